"""The surface that all limiters share, the lease they hand out, and several as one."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from threading import get_ident
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, final

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from tokenflow._errors import QueueFull, WaitTimeout
from tokenflow._usage import Usage, token_count

from ._admission import Booking, Path, Queue, Waiter, enter_all, settle, turnstile
from ._gate import Gate
from ._order import Fifo, Order
from ._run import Bell, Run
from ._window import WindowGate

__all__ = ["Lease", "Limiter", "LimitsStatistics", "Oversize", "TokenLimits"]

logger = logging.getLogger("tokenflow")

Oversize = Literal["raise", "alone"]

_CANCELLED = -math.inf
_LONG_WAIT = 5.0
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
    | `release()`            | freed                        | stay                   |
    | `cancel()`             | freed                        | all back               |

    Nothing here waits. Whoever can go because of it is granted before the call
    returns. Called from another thread while the event loop runs, each raises
    RuntimeError and changes nothing; after the run they work.

    A lease that is dropped without being released keeps what it holds and
    warns (`ResourceWarning`); one that was never entered does too (`RuntimeWarning`).
    """

    __slots__ = (
        "_charges",
        "_costs",
        "_epochs",
        "_limiter",
        "_max_wait",
        "_path",
        "_reconciled",
        "_state",
        "_waited",
        "priority",
        "tenant",
        "usage",
    )

    usage: int | Usage
    """What it is charged for: what was asked, or what the last correction said."""

    replica: object | None = None
    """The replica that a router chose; None without a router."""

    _path: Path
    _costs: list[int]
    _charges: list[Any]
    _epochs: tuple[int, ...]
    _waited: float

    def __init__(
        self,
        limiter: Limiter,
        usage: int | Usage,
        priority: int,
        tenant: Hashable,
        max_wait: float | None,
    ) -> None:
        self._limiter = limiter
        self.usage = usage
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

    def progress(self, usage: int | Usage) -> None:
        """So much exists already (a stream): raise what is charged to it.

        In flight and in the windows, even past the limits; never lowers. After
        `release` only windows are raised; after `cancel` it does nothing.

        Raises:
            TypeError, ValueError: a cost that makes no sense; nothing has changed.
        """
        self._expect_held("progress")
        usage, costs = _priced(self._path, usage, "usage")
        if self._state != "cancelled":
            larger = max(usage, self.usage, key=_total)
            self._correct(larger, [max(pair) for pair in zip(costs, self._costs, strict=False)])

    def reconcile(self, actual: int | Usage) -> None:
        """Set what is charged to what it really was; the last one wins.

        Windows credit at most what is still in them, and charge an overrun now,
        past the limit if need be: debt, which later calls wait out. Still counts
        after `release` (in windows); does nothing after `cancel`.

        Raises:
            TypeError, ValueError: a cost that makes no sense; nothing has changed.
        """
        self._expect_held("reconcile")
        usage, costs = _priced(self._path, actual, "actual")
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
        priority, max_wait = self.priority, self._max_wait
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority must be an int (lower goes first), not {priority!r}")
        if max_wait is None:
            return
        if isinstance(max_wait, bool) or not isinstance(max_wait, (int, float)):
            raise TypeError(f"max_wait must be a number of seconds or None, not {max_wait!r}")
        if not max_wait >= 0:
            raise ValueError(f"max_wait must be >= 0 seconds, not {max_wait}")
        self._max_wait = None if max_wait == math.inf else max_wait

    def _expect_held(self, what: str) -> None:
        if self._state in ("asked", "waiting"):
            raise RuntimeError(
                f"{what} before anything is reserved: enter `async with limiter.reserve(...)` first"
            )

    async def __aenter__(self) -> Self:
        """Wait for room. `_admit`, for one gate and nothing on account, stands here unrolled."""
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
            path = limiter._path(self.tenant)
        run = path.run
        if run is None or get_ident() != path.thread or not path.is_running():
            run = path.enter()
        if run.effective_deadline() == _CANCELLED:
            await checkpoint_if_cancelled()
        cost = self.usage
        if type(cost) is not int or cost < 0:
            cost = self.usage = _checked(cost)
        now = run.now() if path.timed else 0.0
        gate = path.only
        if gate is None:
            costs = path.price(cost)
            if limiter._admit(path, self, costs, now):
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
        self._expect_held("with")
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
        return f"<Lease of {_shown(self.usage)}, {self._state}>"


class Limiter:
    """The surface of `TokenSemaphore`, `TokenRateLimiter`, `TokenLimits` and `TokenRouter`.

    `cost` is an int (total tokens) or a `Usage`. `priority`: lower goes first.
    `tenant` is any hashable name, for fair sharing and for quotas `by="tenant"`.
    `max_wait` bounds the wait, in seconds: 0 refuses rather than waits. `model`,
    `affinity` and `region` are for routers; what does not concern a limiter, it
    ignores. An int counts as one request, 0 included; a call that costs 0 at every
    gate goes at once. Not for deriving from: to limit something else, write a `Gate`.

    With room and nobody waiting nothing here yields to the event loop: a loop
    that does nothing but reserve starves its neighbours.

    Cancelled while waiting, a call leaves nothing behind, also when it had been
    granted but not resumed yet. A scope that is cancelled already takes nothing.
    """

    __slots__ = ("__weakref__", "_fixed", "_paths", "_queue", "_sweep_at")

    def __init__(self, *, order: Order, max_waiting: int | None, oversize: Oversize) -> None:
        if oversize not in ("raise", "alone"):
            raise ValueError(f'oversize must be "raise" or "alone", not {oversize!r}')
        if not isinstance(order, Order):
            raise TypeError(f"order must be Fifo(), SmallestFirst() or FairShare(), not {order!r}")
        if max_waiting is not None:
            max_waiting = token_count(max_waiting, "max_waiting")
        self._queue = Queue(order.fresh(), max_waiting, alone=oversize == "alone")
        self._paths: dict[Hashable, Path] = {}
        self._sweep_at = _SWEEP
        self._fixed: Path | None = None

    def _gates(self, tenant: Hashable) -> Iterable[Gate]:
        """The gates of a call by this tenant."""
        raise NotImplementedError  # pragma: no cover

    def _by_tenant(self) -> bool:
        """Does the path depend on the tenant?"""
        raise NotImplementedError  # pragma: no cover

    def reserve(
        self,
        cost: int | Usage,
        *,
        priority: int = 0,
        tenant: Hashable = None,
        max_wait: float | None = None,
        model: str | None = None,
        affinity: Hashable = None,
        region: str | None = None,
    ) -> Lease:
        """`async with limiter.reserve(cost) as lease:` waits for room, and releases at the end.

        >>> import anyio, tokenflow
        >>> async def main():
        ...     async with tokenflow.TokenSemaphore(500_000).reserve(1_200) as lease:
        ...         return lease.usage
        >>> anyio.run(main)
        1200

        It opens no cancel scope and no task group: it may be left in another task.

        Raises:
            TypeError, ValueError: a cost that is no int >= 0 and no Usage.
            RequestTooLarge: the cost could never pass.
            WaitTimeout: it would take, or took, longer than `max_wait`.
            QueueFull: `max_waiting` calls are waiting already.
        """
        return Lease(self, cost, priority, tenant, max_wait)

    async def acquire(
        self,
        cost: int | Usage,
        *,
        priority: int = 0,
        tenant: Hashable = None,
        max_wait: float | None = None,
        model: str | None = None,
        affinity: Hashable = None,
        region: str | None = None,
    ) -> Lease:
        """Like `reserve`, for where a block does not fit; the lease is yours to release."""
        return await Lease(self, cost, priority, tenant, max_wait).__aenter__()

    def acquire_nowait(
        self,
        cost: int | Usage,
        *,
        priority: int = 0,
        tenant: Hashable = None,
        model: str | None = None,
        affinity: Hashable = None,
        region: str | None = None,
    ) -> Lease:
        """Like `acquire`, but raises anyio.WouldBlock where that would wait.

        Raises:
            anyio.WouldBlock: no room, or somebody waits who goes before.
            TypeError, ValueError, RequestTooLarge: as for `reserve`.
        """
        lease = Lease(self, cost, priority, tenant, None)
        lease._state = "waiting"
        lease._check_options()
        path = self._path(tenant)
        lease.usage, costs = _priced(path, cost)
        now = path.enter().now()
        if not self._admit(path, lease, costs, now):
            waiter = self._join(path, lease, costs, now)
            if waiter.state == "queued":
                waiter.path.leave(waiter, now)
                raise anyio.WouldBlock(f"no room for {_shown(cost)} at {self!r}")
        return lease

    def delay(
        self,
        cost: int | Usage,
        *,
        tenant: Hashable = None,
        model: str | None = None,
        affinity: Hashable = None,
        region: str | None = None,
    ) -> float:
        """Seconds until the gates would take this cost, the queue ignored.

        A lower bound when others wait. 0.0: now; `math.inf`: only a release helps.

        Raises:
            RequestTooLarge: it could never pass.
        """
        path = self._path(tenant)
        _, costs = _priced(path, cost)
        now = path.enter().now()
        error = path.refuse_oversize(costs)
        if error is not None:
            raise error
        return max(0.0, path.ready_at(costs, now) - now)

    def _admit(self, path: Path, lease: Lease, costs: list[int], now: float) -> bool:
        """Check all gates, then charge them all; or leave everything as it is."""
        for each, cost in zip(path.turnstiles, costs):  # noqa: B905 (hot, one cost for each)
            if cost and (each.lines or each.gate.ready_at(cost, now) > now):
                return False
        if path.shares:
            queue = path.queue
            arrival = (lease.priority, lease.tokens, lease.tenant, now, 0)
            queue.order.granted(queue.order.key(*arrival, backlogged=queue.waiting > 0))
        charges = []
        for gate, cost in zip(path.gates, costs):  # noqa: B905
            charges.append(gate.charge(cost, now))
        lease._book(path, costs, charges)
        return True

    async def _wait(self, path: Path, lease: Lease, costs: list[int], run: Run) -> None:
        waiter = self._join(path, lease, costs, run.now(), run.bell())
        if waiter.state == "queued":
            try:
                if path.timed or lease._max_wait is not None or self._queue.max_waiting is not None:
                    self._may_wait(waiter, lease._max_wait)
                while waiter.state == "queued":
                    assert waiter.bell is not None
                    await waiter.bell.wait()
                    if waiter.state == "queued":
                        self._rung(waiter, run.now())
                if run.effective_deadline() == _CANCELLED:
                    await checkpoint_if_cancelled()
            except BaseException:
                self._withdraw(waiter)
                raise
            now = run.now()
            lease._waited = now - waiter.arrived
            if lease._waited > _LONG_WAIT:
                self._log_wait(lease._waited, "waited", lease, now)
        if waiter.error is not None:
            raise waiter.error

    def _join(
        self, path: Path, lease: Lease, costs: list[int], now: float, bell: Bell | None = None
    ) -> Waiter:
        """Queue a call, which grants it where that is possible; refuse an impossible one."""
        error = path.refuse_oversize(costs)
        if error is not None:
            raise error
        needed = path.needed(costs)
        if needed is not path:
            needed.enter()
        waiter = Waiter(needed, lease, costs, now, bell)
        needed.join(waiter, now)
        return waiter

    def _may_wait(self, waiter: Waiter, max_wait: float | None) -> None:
        """Refuse to wait where that is known to be in vain."""
        queue, now = self._queue, waiter.arrived
        if queue.max_waiting is not None and queue.waiting > queue.max_waiting:
            self._withdraw(waiter)  # the message does not count it
            raise QueueFull(
                f"{queue.max_waiting} calls wait at {self!r} already: try again later, or raise "
                "max_waiting",
                retry_after=_retry_after(waiter, now),
            )
        delay = waiter.path.ready_at(waiter.costs, now) - now
        if max_wait is not None:
            if max_wait == 0 or max_wait < delay < math.inf:
                raise self._timeout(waiter, max_wait, now)
            waiter.deadline = now + max_wait
            waiter.arm()
        if _LONG_WAIT < delay < math.inf:
            self._log_wait(delay, "will wait", waiter.lease, now)

    def _rung(self, waiter: Waiter, now: float) -> None:
        """Awake but not granted: an alarm. Look at the gates again, or give up."""
        waiter.alarm = math.inf
        if waiter.path.head is waiter:
            settle(list(waiter.path.stands), (), now)
        if waiter.state == "queued":
            if now >= waiter.deadline:
                raise self._timeout(waiter, waiter.deadline - waiter.arrived, now)
            waiter.arm()

    def _timeout(self, waiter: Waiter, max_wait: float, now: float) -> WaitTimeout:
        retry_after = _retry_after(waiter, now)
        when = "only a release helps"
        if retry_after is not None:
            when = f"{retry_after:.3g} s at the earliest, more if others wait"
        self._withdraw(waiter)  # the message does not count it
        return WaitTimeout(
            f"no room for {waiter.lease.tokens:,} tokens within max_wait={max_wait:g} s at "
            f"{self!r}: {when}; retry then, or allow a longer wait",
            retry_after=retry_after,
        )

    def _withdraw(self, waiter: Waiter) -> None:
        """The caller will not have it: as if it had never asked."""
        now = waiter.path.enter().now()
        if waiter.state == "queued":
            waiter.path.leave(waiter, now)
        elif waiter.state == "granted":
            waiter.lease.cancel()

    def _path(self, tenant: Hashable) -> Path:
        """The path of a tenant; those that nobody waits on are dropped now and then."""
        if self._fixed is not None:
            return self._fixed
        if not self._by_tenant():
            self._fixed = Path(self._queue, self._gates(None))
            return self._fixed
        path = self._paths.get(tenant)
        if path is None:
            if len(self._paths) >= self._sweep_at:
                self._paths = {t: p for t, p in self._paths.items() if p.waiting}
                self._sweep_at = max(_SWEEP, 2 * len(self._paths))
            path = self._paths[tenant] = Path(self._queue, self._gates(tenant))
        return path

    def _log_wait(self, waited: float, verb: str, lease: Booking, now: float) -> None:
        if not 0 <= now - self._queue.waited_at < _LOG_EVERY:
            self._queue.waited_at = now
            log(logging.INFO, "%s %.1f s for %s at %r", verb, waited, _shown(lease.usage), self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: each process would get the whole "
            "quota; build it in each process, or share it through a server"
        )


@dataclass(frozen=True, slots=True)
class LimitsStatistics:
    """`TokenLimits.statistics()`: its own queue, and each member's numbers."""

    members: tuple[Any, ...]
    waiting_calls: int
    waiting_tokens: int
    unreconciled: int


@final
class TokenLimits(Limiter):
    """Several limiters as one: a call is admitted by all of them, or charged to none.

    >>> import tokenflow
    >>> in_flight = tokenflow.TokenSemaphore(500_000)
    >>> per_minute = tokenflow.TokenRateLimiter(tokens_per_minute=2_000_000)
    >>> limits = tokenflow.TokenLimits(in_flight, per_minute)
    >>> limits.acquire_nowait(1_200).release()
    >>> per_minute.statistics().quotas[0].used
    1200

    Members may be used directly as well, and in other combinations. Their own
    order, `max_waiting` and `oversize` do not apply to calls that come through
    here; their pauses, limits and debts do. A gate that is reached twice is
    checked and charged once. Without members it admits everything.
    """

    __slots__ = ("_members",)

    def __init__(
        self,
        *members: Limiter | Gate,
        order: Order = Fifo(),  # noqa: B008 (stateless)
        max_waiting: int | None = None,
        oversize: Oversize = "raise",
    ) -> None:
        for member in members:
            is_gate = hasattr(member, "ready_at") and not isinstance(member, type)
            if not isinstance(member, Limiter) and not is_gate:
                raise TypeError(f"TokenLimits takes limiters and gates, not {member!r}")
        super().__init__(order=order, max_waiting=max_waiting, oversize=oversize)
        self._members = members

    def _gates(self, tenant: Hashable) -> Iterable[Gate]:
        for member in self._members:
            if isinstance(member, Limiter):
                yield from member._gates(tenant)
            else:
                yield member

    def _by_tenant(self) -> bool:
        return any(isinstance(m, Limiter) and m._by_tenant() for m in self._members)

    def statistics(self) -> LimitsStatistics:
        """Live numbers; works from anywhere."""
        members = (m.statistics() if hasattr(m, "statistics") else m for m in self._members)
        queue = self._queue
        return LimitsStatistics(
            tuple(members), queue.waiting, queue.waiting_tokens, queue.unreconciled
        )

    def __repr__(self) -> str:
        members = ", ".join(map(repr, self._members))
        return f"<TokenLimits({members}): {self._queue.waiting} waiting>"


_SWEEP = 64


def changed(gates: Iterable[Gate], now: float, *, lowered: bool = False) -> None:
    """Gates were set from outside: who can go now goes.

    Where a limit was lowered, those who can no longer ever fit fail.
    """
    opened = [turnstile(gate) for gate in gates]
    paths: set[Path] = set()
    if lowered:
        paths = {path for each in opened for path in each.paths if path.waiting}
    for path in paths:
        opened += path.fail_oversize()
    settle(dict.fromkeys(opened), paths, now)


def guard(gates: Iterable[Gate]) -> Run:
    """Be sure that these gates may be changed from here; returns the run they go by."""
    return enter_all([turnstile(gate) for gate in gates])


def log(level: int, message: str, *args: object) -> None:
    """Whatever handlers and filters do, the caller's state is settled, and stays so."""
    with suppress(Exception):
        logger.log(level, message, *args)


def _checked(cost: int | Usage, name: str = "cost") -> int | Usage:
    if isinstance(cost, Usage) or (type(cost) is int and cost >= 0):
        return cost
    try:
        return token_count(cost, name)
    except TypeError as error:
        hint = "or a Usage; Usage.from_response(...) reads what a provider sent"
        raise TypeError(f"{error}; pass an int {hint}") from None


def _priced(path: Path, cost: int | Usage, name: str = "cost") -> tuple[int | Usage, list[int]]:
    """The cost, checked, and what it comes to at each gate: all that may run a user's code."""
    cost = _checked(cost, name)
    return cost, path.price(cost)


def _total(cost: int | Usage) -> int:
    return cost if isinstance(cost, int) else cost.total_tokens


def _shown(cost: int | Usage) -> str:
    return f"{cost:,} tokens" if isinstance(cost, int) else repr(cost)


def _retry_after(waiter: Waiter, now: float) -> float | None:
    delay = waiter.path.ready_at(waiter.costs, now) - now
    return max(0.0, delay) if delay < math.inf else None


def _settle_path(path: Path) -> None:
    for each in path.turnstiles:
        if each.lines:
            settle(path.turnstiles, (), path.enter().now())
            return


def _log_debt(path: Path, now: float) -> None:
    for gate in path.gates:
        if not isinstance(gate, WindowGate) or not 0 < gate.limit < gate.used:
            continue
        if gate.used_at(now) > gate.limit and not 0 <= now - path.queue.warned_at < _LOG_EVERY:
            path.queue.warned_at = now
            log(logging.WARNING, "%r is in debt: calls wait until it has left the window", gate)
