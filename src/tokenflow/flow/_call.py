"""One call on its way: what is done with it, whichever way it ends.

A call's end is one synchronous step: settle the lease, feed the estimator, tell
the observers. It happens on every way out of the block, once.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import AsyncIterable, Awaitable, Callable, Hashable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self, TypeVar, final

from tokenflow._errors import TokenflowError
from tokenflow._refusal import Refusal
from tokenflow._run import OUTSIDE, Run, current_run
from tokenflow._usage import Request, Usage, known_seconds
from tokenflow._wire import is_cut_off, read_usage
from tokenflow.estimation import TokenCounter
from tokenflow.limits import Lease, TokenRateLimiter
from tokenflow.limits._lease import log

from ._family import ProviderRules, rate_limiters
from ._map import classified, current_job
from ._stream import Meter, TrackedStream

if TYPE_CHECKING:
    from tokenflow.serving import Replica

    from ._flow import TokenFlow

__all__ = ["Call", "CallEvent", "Ticket", "open_call"]

T = TypeVar("T")
_NOTHING: Final = Usage(requests=0)
Outcome = Literal["reconciled", "refused", "unsent", "failed", "abandoned", "not admitted"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CallEvent:
    """What an observer is told when a call is over.

    `outcome` is "reconciled" (its usage became known), "refused" (by the server),
    "unsent" (could not connect), "failed" (an exception), "abandoned" (the block
    was left, or its stream, without a usage) or "not admitted" (turned away, cancelled
    before that, or its input could not be counted: see `error`). `waited` and `seconds`
    are the time in the queue and the time after it. Where it did not come to an
    estimate, `estimated` is nothing, and `request` what was said of it.
    """

    request: Request
    tenant: Hashable
    outcome: Outcome
    estimated: Usage
    charged: Usage
    waited: float = 0.0
    seconds: float = 0.0
    replica: str | None = None
    refusal: Refusal | None = None
    error: BaseException | None = None


@final
@dataclass(slots=True, kw_only=True)
class Ticket:
    """What a call asks its limits with."""

    request: Request
    estimated: Usage
    rate_limiters: Sequence[TokenRateLimiter]
    rules: ProviderRules
    counter: TokenCounter
    tenant: Hashable
    lease: Lease


_open: Final[ContextVar[Call | None]] = ContextVar("tokenflow.call", default=None)


def _innermost(flow: TokenFlow | None = None) -> Call | None:
    """The call whose block this is: of this flow, or of any."""
    call = _open.get()
    while call is not None and (call._is_over or flow not in (None, call._flow)):
        call = call._before
    return call


def open_call(flow: TokenFlow) -> Call | None:
    """The flow's call whose block this is, if nobody has taken it yet; it is the caller's now."""
    call = _innermost(flow)
    if call is None or not call._is_free:
        return None
    call._is_free, call._outcome = False, "abandoned"
    return call


@final
class Call:
    """One call: `async with flow.request(...) as call:` counts, estimates and waits for room.

    Inside, tell it what became of the call: `reconcile(response)`, `track(stream)` or
    `failed(error)`; an exception that leaves the block is told by itself. At the end

    | left by                                    | charged                                  |
    |--------------------------------------------|------------------------------------------|
    | `reconcile`, or a stream with a usage      | the actual usage                         |
    | a refusal (429 and the like)               | the request; everyone pauses as told     |
    | could not connect                          | nothing                                  |
    | anything else: an exception, a cancel, ... | the estimate, or what was emitted if more |

    Nothing here waits but entering. Not bound to the task that entered it.
    """

    __slots__ = (
        "_before",
        "_entered",
        "_error",
        "_flow",
        "_is_free",
        "_is_over",
        "_job",
        "_meter",
        "_outcome",
        "_prepare",
        "_refusal",
        "_run",
        "_said",
        "_started",
        "_tenant",
        "_ticket",
        "_truncated",
    )

    def __init__(
        self,
        flow: TokenFlow,
        said: Request,
        tenant: Hashable,
        prepare: Callable[[], Awaitable[Ticket]],
    ) -> None:
        self._flow = flow
        self._said = said
        self._tenant = tenant
        self._job = current_job.get()  # of the worker that makes it: it may end elsewhere
        self._prepare = prepare
        self._ticket: Ticket | None = None
        self._entered = False
        self._is_free = False  # for a transport inside the block to take over
        self._is_over = False
        self._outcome: Outcome = "abandoned"
        self._refusal: Refusal | None = None
        self._error: BaseException | None = None
        self._truncated = False
        self._meter: Meter | None = None
        self._before: Call | None = None
        self._run: Run = OUTSIDE
        self._started = math.nan

    # -- what it is --------------------------------------------------------

    @property
    def request(self) -> Request:
        """What the estimator saw: input tokens, declared maximum, model, task."""
        return self._held().request

    @property
    def estimated(self) -> Usage:
        """What was reserved."""
        return self._held().estimated

    @property
    def usage(self) -> Usage:
        """What is charged for it: the estimate at first, the truth in the end."""
        usage = self.lease.usage
        assert isinstance(usage, Usage)
        return usage

    @property
    def lease(self) -> Lease:
        """What it holds."""
        return self._held().lease

    @property
    def waited(self) -> float:
        """Seconds in the queue."""
        return self.lease.waited

    @property
    def replica(self) -> Replica | None:
        """The replica that the router chose; None without a router."""
        return self.lease.replica

    @property
    def is_told(self) -> bool:
        """Is it known already what became of it?"""
        return self._outcome != "abandoned"

    # -- what became of it -------------------------------------------------

    def progress(self, usage: int | Usage) -> None:
        """So much exists already: raise what is charged to it. `track` does it for a stream."""
        self.lease.progress(self._read(usage))

    def reconcile(self, actual: object) -> None:
        """Set what is charged to what it really was: a response, its usage, or a `Usage`.

        An int is the total; it corrects the charge, and teaches the estimator
        what is left of it after the input. The last one wins, also after the block.

        Raises:
            ValueError: no usage in it: leave it alone then, and the estimate stays.
        """
        usage = self._read(actual)
        self.lease.reconcile(usage)
        self._truncated = is_cut_off(actual)
        self._outcome, self._refusal, self._error = "reconciled", None, None

    def failed(self, outcome: object) -> Refusal | None:
        """Say what went wrong: an exception, or a response that is no success.

        A refusal gives the tokens back at once, and holds everyone for as long as the
        server asked; where nothing could be sent the request goes back as well, unless
        another attempt in the block could. With a router only the replica is held.
        Headers, if there are any, are observed. What another attempt in the same block
        costs is charged when it is reconciled.

        Returns what was understood; None is "anything else", for which the estimate
        stays charged.
        """
        ticket = self._held()
        refusal = classified(ticket.rules.classify, outcome)
        self._refusal = refusal
        self._error = outcome if isinstance(outcome, BaseException) else None
        if refusal is None or (self._meter is not None and self._meter.output_tokens):
            self._outcome = "failed"  # a stream that breaks off with a refusal has cost something
        else:
            self._outcome = "unsent" if refusal.kind == "unsent" else "refused"
            ticket.lease.refused()
        # Now that this call holds nothing more: the server has not counted it either.
        self.observe(getattr(getattr(outcome, "response", outcome), "headers", None))
        self._hold_back(refusal, outcome)
        return refusal

    def redirected(self) -> None:
        """The server named another address and did nothing else; who asks there takes this call."""
        self._outcome, self._is_free = "refused", True

    def track(self, stream: AsyncIterable[T]) -> TrackedStream[T]:
        """`async for chunk in call.track(stream)`: pass chunks on, and charge what they say.

        Usage is merged from chunks and events of any provider. What is emitted beyond
        the estimate is charged as it comes; at the end the usage that the stream
        reported counts, and where it reported none, or broke off, the estimate or what
        was emitted, whichever is more. `aclose()` closes the stream and settles. Where a
        transport below reads the same stream, this only passes it on.
        """
        return TrackedStream(stream, self.meter())

    def meter(self) -> Meter:
        """What `track` feeds, for streams of another shape. One after its end has another."""
        if self._meter is None or self._meter.is_over:
            self._meter = Meter(self, self._held().counter)
        return self._meter

    def observe(self, headers: object, body: object = None) -> None:
        """Tell the quotas what the server says about them, in a response's headers.

        What is no such header is ignored. With a router they are about one replica,
        and are told to its own limiter. `failed` does it by itself.
        """
        ticket = self._held()
        if headers is None:
            return
        age = max(0.0, self._now() - self._started)
        try:
            status = ticket.rules.status(headers, body, age=age)
        except Exception as error:  # by rules of the user's own
            log(logging.ERROR, "the rules %r raised %r", ticket.rules, error)
            return
        for limiter in self._told():
            limiter.observe(status, tenant=ticket.tenant)

    def _told(self) -> Iterable[TokenRateLimiter]:
        ticket = self._held()
        replica = ticket.lease.replica
        if replica is None:
            return ticket.rate_limiters
        return rate_limiters(getattr(replica, "limiter", None))

    def _read(self, actual: object) -> Usage:
        if type(actual) is int:
            known = min(self.request.input_tokens, actual)
            return Usage(input_tokens=known, output_tokens=actual - known)
        return read_usage(actual)

    def _hold_back(self, refusal: Refusal | None, outcome: object) -> None:
        """Nobody else is to run into the same wall."""
        ticket = self._held()
        retry_after = None if refusal is None else known_seconds(refusal.retry_after)
        told_to_wait = refusal is not None and refusal.kind in ("wait", "overloaded")
        if ticket.lease.replica is not None:
            if told_to_wait or _is_the_servers(refusal, outcome):
                ticket.lease.failed(retry_after=retry_after)
        elif told_to_wait and retry_after:
            for limiter in ticket.rate_limiters:
                limiter.pause(retry_after)

    # -- entering and leaving ----------------------------------------------

    def _held(self) -> Ticket:
        if self._ticket is None:
            raise RuntimeError("this call has not begun: write `async with flow.request(...)`")
        return self._ticket

    async def begin(self) -> Self:
        """Count, estimate and wait for room, where a block does not fit: then `close` is yours."""
        if self._entered:
            raise RuntimeError("a call can be entered once: make another with flow.request(...)")
        self._entered = True
        ticket: Ticket | None = None
        try:
            ticket = await self._prepare()
            await ticket.lease.__aenter__()
        except BaseException as error:
            self._not_admitted(ticket, error)
            raise
        self._ticket = ticket
        self._run = current_run() or OUTSIDE
        self._started = self._now()
        return self

    def _not_admitted(self, ticket: Ticket | None, error: BaseException) -> None:
        self._flow._count("not admitted", _NOTHING)
        self._flow._tell(
            CallEvent(
                request=self._said if ticket is None else ticket.request,
                tenant=self._tenant,
                outcome="not admitted",
                estimated=_NOTHING if ticket is None else ticket.estimated,
                charged=_NOTHING,
                waited=0.0 if ticket is None else ticket.lease.waited,
                error=error,
            )
        )

    async def __aenter__(self) -> Self:
        await self.begin()
        self._is_free = True
        self._before = _innermost()
        _open.set(self)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(exc)
        if _open.get() is self:  # the block may be left in another context
            _open.set(_innermost())

    def close(self, error: BaseException | None = None) -> None:
        """End the call, as leaving the block does (by `error`); only the first time counts."""
        if self._is_over:
            return
        try:
            self._settle(error)
        finally:
            self.lease.release()  # raises in another thread: then the call is still open
            self._is_over, self._is_free = True, False
            self._learn()
            self._report()
            self._error = None  # its traceback may hold a response that holds this call

    def _settle(self, error: BaseException | None) -> None:
        """The last that can be said of the charge."""
        try:
            if self._meter is not None and self._outcome in ("abandoned", "failed"):
                self._meter.catch_up()  # it may be read to its end later
        finally:
            if error is not None and self._outcome == "abandoned":
                self.failed(error)
        if self._outcome == "unsent":
            self.lease.cancel()
        elif self._outcome == "refused":
            self.lease.refused()

    def _learn(self) -> None:
        """Feed the estimator. A call that was refused has told nothing about its length."""
        if self._outcome in ("refused", "unsent"):
            return
        known = self._outcome == "reconciled"
        emitted = self._meter.output_tokens if self._meter is not None else 0
        output = self.usage.output_tokens if known else emitted
        truncated = self._truncated or not known
        if known or emitted:
            try:
                self._flow.estimator.observe(self.request, output, truncated=truncated)
            except Exception as error:
                log(logging.ERROR, "the estimator %r raised %r", self._flow.estimator, error)

    def _now(self) -> float:
        """By the clock of the run that it began in."""
        return self._run.now()

    def _report(self) -> None:
        ticket = self._held()
        charged = _NOTHING if self._outcome == "unsent" else self.usage
        self._flow._count(self._outcome, charged)
        if self._job is not None:
            self._job.charge(charged.total_tokens)
        if not self._flow._observers:
            return
        self._flow._tell(
            CallEvent(
                request=ticket.request,
                tenant=ticket.tenant,
                outcome=self._outcome,
                estimated=ticket.estimated,
                charged=charged,
                waited=self.waited,
                seconds=self._now() - self._started,
                replica=getattr(self.replica, "name", None),
                refusal=self._refusal,
                error=self._error,
            )
        )

    def __del__(self) -> None:
        if not self._entered:
            warnings.warn(
                f"{self!r} was never entered, so that nothing was limited: write "
                "`async with flow.request(...)`",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        if self._ticket is None:
            return "<Call, not admitted yet>"
        state = self._outcome if self._is_over else "open"
        return f"<Call of {self.usage!r}, {state}>"


def _is_the_servers(refusal: Refusal | None, outcome: object) -> bool:
    """Did the server fail, rather than the caller?"""
    if refusal is not None:
        return refusal.kind == "unsent" and not isinstance(outcome, TokenflowError)
    status = getattr(getattr(outcome, "response", outcome), "status_code", None)
    return isinstance(status, int) and status >= 500
