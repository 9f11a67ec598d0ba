"""What is handed out for a call, to be given back exactly once."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, final

from anyio.lowlevel import checkpoint_if_cancelled

from tokenflow._usage import Usage, finite_seconds, token_count

from ._admission import Path, settle
from ._fork import Branch
from ._waiter import Wishes
from ._window import WindowGate

if TYPE_CHECKING:
    from tokenflow.serving import Replica

    from ._limiter import Limiter

__all__ = ["CANCELLED", "Lease", "check_options", "is_due", "log", "priced", "shown"]

logger = logging.getLogger("tokenflow")

CANCELLED = -math.inf  # the effective deadline in a cancelled scope
_LOG_EVERY = 10.0


@final
class Lease:
    """What was reserved, to be given back exactly once.

    `limiter.reserve(cost)` makes one and `async with` fills it; `limiter.acquire`
    and `acquire_nowait` return it filled, and `with lease:` releases it. It is
    not bound to the task that took it.

    |                        | in flight                    | windows                |
    |------------------------|------------------------------|------------------------|
    | `progress(usage)`      | raised to it, never lowered  | raised, never lowered  |
    | `reconcile(actual)`    | set to it                    | credited or charged    |
    | `refused()`            | the request stays            | the request stays      |
    | `release()`            | freed                        | stay                   |
    | `cancel()`             | freed                        | all back               |

    Nothing here waits. Whoever can go because of it is granted before the call
    returns. Called from another thread while the event loop runs, each raises
    RuntimeError and changes nothing; after the run they work.

    A lease that is dropped without being released keeps what it holds and
    warns (`ResourceWarning`); one that was never entered does too (`RuntimeWarning`).
    """

    __slots__ = (
        "_asked",
        "_charges",
        "_costs",
        "_epochs",
        "_limiter",
        "_max_wait",
        "_path",
        "_reconciled",
        "_state",
        "_waited",
        "_wishes",
        "priority",
        "tenant",
        "usage",
    )

    usage: int | Usage
    """What it is charged for: what was asked, or what the last correction said."""

    _path: Path
    _costs: list[int]
    _charges: list[Any]
    _epochs: tuple[int, ...]
    _waited: float
    _wishes: Wishes  # only where there is a router to ask

    def __init__(
        self,
        limiter: Limiter,
        usage: int | Usage,
        priority: int,
        tenant: Hashable,
        max_wait: float | None,
    ) -> None:
        self._limiter = limiter
        self.usage = self._asked = usage
        self.priority: int = priority
        self.tenant: Hashable = tenant
        self._max_wait = max_wait
        self._state: Literal["asked", "waiting", "held", "released", "cancelled"] = "asked"
        self._reconciled = False

    @property
    def waited(self) -> float:
        """Seconds in the queue."""
        return getattr(self, "_waited", 0.0)  # most do not wait

    @property
    def tokens(self) -> int:
        """Total tokens."""
        return _total(self.usage)

    @property
    def replica(self) -> Replica | None:
        """The replica that a router chose; None before that, and without a router."""
        path = getattr(self, "_path", None)
        return None if path is None or path.option is None else path.option.replica

    def progress(self, usage: int | Usage) -> None:
        """So much exists already (a stream): raise what is charged to it.

        In flight and in the windows, even past the limits; never lowers. After
        `release` only windows are raised; after `cancel` it does nothing.

        Raises:
            TypeError, ValueError: a cost that makes no sense; nothing has changed.
        """
        self._expect_held("`progress`")
        usage, costs = priced(self._path, usage, "usage")
        if self._state != "cancelled":
            larger = max(usage, self.usage, key=_total)
            self._correct(larger, [max(pair) for pair in zip(costs, self._costs, strict=False)])

    def reconcile(self, actual: int | Usage) -> None:
        """Set what is charged to what it really was; the last one wins.

        Windows credit at most what is still in them, and charge an overrun now,
        past the limit if need be: debt, which later calls wait out. Those that settle
        as "reserved" keep the maximum that a call declared. Still counts after
        `release` (in windows); does nothing after `cancel`.

        Raises:
            TypeError, ValueError: a cost that makes no sense; nothing has changed.
        """
        self._expect_held("`reconcile`")
        usage = _checked(actual, "actual")
        costs = self._settled(usage)
        if self._state != "cancelled":
            self._correct(usage, costs)
            self._reconciled = True

    def release(self) -> None:
        """The call is over: free what is in flight; windows keep what they hold.

        A second call, or one after `cancel`, does nothing.
        """
        if self._state != "held":
            return
        path = self._path
        if get_ident() != path.thread:
            path.enter()
        self._state = "released"
        if not self._reconciled:
            path.queue.unreconciled += 1
        charges, epochs = self._charges, self._epochs
        crowded = False
        for i, held in path.held:
            if i < len(charges) and epochs[i] == held.epoch:  # else it came later, or gave up
                held.gate.release(charges[i])
                if held.lines:
                    crowded = True
        if crowded:
            settle(path.turnstiles, (), path.enter().now())

    def cancel(self) -> None:
        """It was never sent: free what is in flight and take back all charges still in windows.

        A second call, or one after `release`, does nothing.
        """
        if self._state != "held":
            return
        path = self._path
        now = path.enter().now()
        self._state = "cancelled"
        for i, charge in enumerate(self._charges):
            if self._counts(i):
                path.gates[i].undo(charge, now)
        if path.queue.order.shares:
            path.queue.order.settle(self.tenant, -self.tokens)
        _settle_path(path)

    def refused(self) -> None:
        """The server said no: take back all but the request, from `settle="reserved"` quotas too.

        The lease stays held: `release` it, or `reconcile` what another attempt has used.
        After `cancel` it does nothing.
        """
        self._expect_held("`refused`")
        if self._state == "cancelled":
            return
        self._correct(*priced(self._path, Usage()))
        self._reconciled = True

    def failed(self, *, retry_after: float | None = None) -> None:
        """The replica has failed this call: send it nothing for a while.

        For a second, and for twice as long with each further failure, at most a
        minute; at least `retry_after` seconds, where it said so. Calls that fail
        together count once, and the last replica up is never spared. The lease
        stays as it is. Without a router this does nothing.

        Raises:
            TypeError, ValueError: a `retry_after` that is no finite number of seconds >= 0.
        """
        self._expect_held("`failed`")
        seconds = 0.0 if retry_after is None else finite_seconds(retry_after, "retry_after")
        path = self._path
        if isinstance(path, Branch):
            i = path.gates.index(path.option)
            now = path.enter().now()
            charges = self._charges
            charges[i] = path.choice.failed(path.option, charges[i], self, seconds, now)

    def _book(self, path: Path, costs: list[int], charges: list[Any]) -> None:
        """Called by the grant step once everything is charged."""
        self._path = path
        self._costs = costs
        self._charges = charges
        self._epochs = path.epochs
        self._state = "held"

    def _counts(self, i: int) -> bool:
        """Not where it was in flight in a run that has ended: that was given up with it."""
        each = self._path.turnstiles[i]
        return not each.gate.in_flight or self._epochs[i] == each.epoch

    def _settled(self, actual: int | Usage) -> list[int]:
        """What it comes to: with what the call declared, where servers count that at arrival."""
        asked, declared = self._asked, actual
        if isinstance(asked, Usage) and isinstance(actual, Usage):
            held: list[int] = []
            if actual.max_output_tokens is None and asked.max_output_tokens is not None:
                declared = replace(actual, max_output_tokens=asked.max_output_tokens)
        else:  # nobody knows what an int declared: what is held stays
            held = self._costs
        costs = []
        for i, gate in enumerate(self._path.gates):
            if isinstance(gate, WindowGate) and gate.settle == "reserved":
                costs.append(max([gate.cost(declared), *held[i : i + 1]]))
            else:
                costs.append(gate.cost(actual))
        return costs

    def _correct(self, usage: int | Usage, costs: list[int]) -> None:
        path = self._path
        now = path.enter().now()
        released = self._state == "released"
        for i, held in enumerate(self._costs):
            each = path.turnstiles[i]
            if costs[i] != held and self._counts(i) and not (released and each.gate.in_flight):
                self._charges[i] = each.gate.correct(self._charges[i], costs[i], now)
                each.keep()
        before = self.tokens
        self.usage, self._costs = usage, costs[: len(self._charges)]  # a gate may have come later
        if path.queue.order.shares:
            path.queue.order.settle(self.tenant, self.tokens - before)
        _settle_path(path)
        _log_debt(path, now)

    def _check_options(self) -> None:
        check_options(self.priority, self._max_wait)
        if self._max_wait == math.inf:
            self._max_wait = None

    def _expect_held(self, what: str) -> None:
        if self._state in ("asked", "waiting"):
            raise RuntimeError(
                f"{what} before anything is reserved: enter `async with limiter.reserve(...)` first"
            )

    async def __aenter__(self) -> Self:
        """Wait for room. `Path.admit`, for one gate and no account, stands here unrolled."""
        if self._state != "asked":
            raise RuntimeError(
                "a lease that is held already is released by plain `with lease:`"
                if self._state == "held"
                else "a reservation can be entered once: call reserve() again"
            )
        self._state = "waiting"
        if type(self.priority) is not int or self._max_wait is not None:
            self._check_options()
        limiter = self._limiter
        path = limiter._fixed
        if path is None:
            path = limiter._path(self)
        run = path.run
        if run is None or get_ident() != path.thread or not path.is_running():
            run = path.enter()
        if run.effective_deadline() == CANCELLED:
            await checkpoint_if_cancelled()
        cost = self.usage
        if type(cost) is not int or cost < 0:
            cost = self.usage = _checked(cost)
        now = run.now() if path.timed else 0.0
        gate = path.only
        if gate is None:
            if path.plain is not None and type(cost) is int:  # price(), without calls
                costs = [cost if counts_tokens else 1 for counts_tokens in path.plain]
            else:
                costs = path.price(cost)
            if path.admit(self, costs, now):
                return self
        else:
            amount = cost if path.counts_int and type(cost) is int else gate.cost(cost)
            costs = [amount]
            if not amount or (not path.turnstiles[0].lines and gate.ready_at(amount, now) <= now):
                self._path = path
                self._costs = costs
                self._charges = [gate.charge(amount, now)]
                self._epochs = path.epochs
                self._state = "held"
                return self
        await limiter._wait(path, self, costs, run)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __enter__(self) -> Self:
        self._expect_held("plain `with`")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if self._state == "asked":
            warnings.warn(
                f"{self!r} was never entered, so that nothing was limited: write "
                "`async with limiter.reserve(...)`, or `await limiter.acquire(...)`",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )
        if self._state == "held" and all(map(self._counts, range(len(self._charges)))):
            warnings.warn(
                f"{self!r} was dropped without being released: what it holds stays in use; "
                "write `with lease:` or call lease.release()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a lease cannot be pickled or copied: it must be given back exactly once")

    def __repr__(self) -> str:
        return f"<Lease of {shown(self.usage)}, {self._state}>"


def is_due(logged_at: float, now: float) -> bool:
    """Was that long enough ago? A clock that went back counts as long ago."""
    return not 0 <= now - logged_at < _LOG_EVERY


def log(level: int, message: str, *args: object) -> None:
    """Whatever handlers and filters do, the caller's state is settled, and stays so."""
    with suppress(Exception):
        logger.log(level, message, *args)


def check_options(priority: object, max_wait: object) -> None:
    """Say what is wrong with them, if anything is."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"priority must be an int (lower goes first), not {priority!r}")
    if max_wait is None:
        return
    if isinstance(max_wait, bool) or not isinstance(max_wait, (int, float)):
        raise TypeError(f"max_wait must be a number of seconds or None, not {max_wait!r}")
    if not max_wait >= 0:
        raise ValueError(f"max_wait must be >= 0 seconds, not {max_wait}")


def _checked(cost: int | Usage, name: str = "cost") -> int | Usage:
    if isinstance(cost, Usage) or (type(cost) is int and cost >= 0):
        return cost
    try:
        return token_count(cost, name)
    except TypeError as error:
        hint = "or a Usage; Usage.from_response(...) reads what a provider sent"
        raise TypeError(f"{error}; pass an int {hint}") from None


def priced(path: Path, cost: int | Usage, name: str = "cost") -> tuple[int | Usage, list[int]]:
    """The cost, checked, and what it comes to at each gate: all that may run a user's code."""
    cost = _checked(cost, name)
    return cost, path.price(cost)


def _total(cost: int | Usage) -> int:
    return cost if isinstance(cost, int) else cost.total_tokens


def shown(cost: int | Usage) -> str:
    return f"{cost:,} tokens" if isinstance(cost, int) else repr(cost)


def _settle_path(path: Path) -> None:
    for each in path.turnstiles:
        if each.lines:
            settle(path.turnstiles, (), path.enter().now())
            return


def _log_debt(path: Path, now: float) -> None:
    for gate in path.gates:
        if not isinstance(gate, WindowGate) or not 0 < gate.limit < gate.used:
            continue
        if gate.used_at(now) > gate.limit and is_due(path.queue.debt_logged_at, now):
            path.queue.debt_logged_at = now
            log(logging.WARNING, "%r is in debt: calls wait until it has left the window", gate)
