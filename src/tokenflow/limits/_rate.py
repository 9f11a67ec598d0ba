"""At most so many tokens, requests or anything else per minute, in a true sliding window."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, cast, final
from weakref import WeakValueDictionary

from tokenflow._run import OUTSIDE, Run, current_run
from tokenflow._usage import (
    QuotaStatus,
    RateLimitStatus,
    Usage,
    finite_seconds,
    known_seconds,
    positive_int,
    token_count,
)

from ._admission import changed
from ._gate import Gate, unit_name
from ._lease import is_due, log
from ._limiter import Limiter, Oversize
from ._order import Fifo, Order
from ._turnstile import Turnstile, guard, turnstile
from ._window import Settle, WindowGate

__all__ = ["Quota", "QuotaStatistics", "RateLimiterStatistics", "TokenRateLimiter"]

_SWEEP = 64  # drop idle ledgers when there are so many, then at each doubling: O(1) amortised


@final
@dataclass(frozen=True, slots=True)
class Quota:
    """At most `limit` in any `per` seconds.

    Args:
        limit: In the unit that `of` names; at least 1. It may be a part of what the account
            has: where a server names another limit, the lower of the two counts.
        per: The period, in seconds.
        of: "tokens", "input_tokens", "output_tokens", "requests", or a pure
            function from a Usage to an int (burn-down rates, cache weights,
            micro-dollars). It runs once per call, before anything is charged.
        by: "tenant" keeps one ledger for each tenant; calls without a tenant share one.
        burst: After idling at most this much goes at once, then a steady
            limit / per (the generic cell rate algorithm). A larger call goes when the
            schedule is clear, and delays what follows. None: a whole period's
            worth may go in its first second.
        settle: "actual" corrects a charge to what was really used. "reserved" counts
            a call's `max_output_tokens` where that is more, and never credits that: for
            providers that charge the declared maximum at arrival. A call that declared
            none, as a Usage, is corrected to what was really used there too.
        leeway: Seconds added to `per`, for network jitter on the way to a server
            that counts for itself.
        name: For `set_limit`, `observe` and `statistics`; by default `of`.

    >>> Quota(30_000, of="input_tokens")
    Quota(limit=30000, per=60.0, of='input_tokens')
    >>> Quota(1_000_000, of=lambda u: u.input_tokens + 5 * u.output_tokens, name="burn-down").name
    'burn-down'

    Raises:
        TypeError, ValueError: a setting that makes no sense; a limit of 0 or None,
            which would be a pause or no quota at all.
    """

    limit: int
    per: float = 60.0
    of: str | Callable[[Usage], int] = "tokens"
    by: Literal["tenant"] | None = None
    burst: int | None = None
    settle: Settle = "actual"
    leeway: float = 0.0
    name: str = ""

    def __init__(
        self,
        limit: int,
        *,
        per: float = 60.0,
        of: str | Callable[[Usage], int] = "tokens",
        by: Literal["tenant"] | None = None,
        burst: int | None = None,
        settle: Settle = "actual",
        leeway: float = 0.0,
        name: str | None = None,
    ) -> None:
        if by not in (None, "tenant"):
            raise ValueError(f'by must be "tenant" or None, not {by!r}')
        WindowGate(limit, per, of=of, burst=burst, settle=settle, leeway=leeway)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a str or None, not {name!r}")
        if name is None:
            name = unit_name(of)
        for field, value in (
            ("limit", int(limit)),
            ("per", float(per)),
            ("of", of),
            ("by", by),
            ("burst", burst),
            ("settle", settle),
            ("leeway", float(leeway)),
            ("name", name),
        ):
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        shown = [f"limit={self.limit}", f"per={self.per}", f"of={self.of!r}"]
        if self.by:
            shown.append(f"by={self.by!r}")
        if self.burst is not None:
            shown.append(f"burst={self.burst}")
        if self.settle != "actual":
            shown.append(f"settle={self.settle!r}")
        if self.leeway:
            shown.append(f"leeway={self.leeway}")
        if self.name != self.of:
            shown.append(f"name={self.name!r}")
        return f"Quota({', '.join(shown)})"


PAUSES: Final = Quota(2**62, per=1.0, of="requests", name="pauses")
"""Never binds, but can be paused: where there is no known quota."""


@dataclass(frozen=True, slots=True)
class QuotaStatistics:
    """One quota now: `used` counts what is in the window, others' use included.

    With `by="tenant"` it is the sum over `ledgers` tenants, each of whom has `limit`.
    `limit` is the lower of what was set and what the server told.
    `paused_for` is in seconds.
    """

    name: str
    per: float
    limit: int
    used: int
    ledgers: int
    paused_for: float


@dataclass(frozen=True, slots=True)
class RateLimiterStatistics:
    """`TokenRateLimiter.statistics()`. `unreconciled` counts calls that left on their estimate."""

    quotas: tuple[QuotaStatistics, ...]
    waiting_calls: int
    waiting_tokens: int
    unreconciled: int


@final
class _Ledgers:
    """The gates of one quota: a single one, or one for each tenant that is not idle.

    A tenant's gate also lives as long as a lease or a waiter refers to it.
    """

    __slots__ = (
        "_known",
        "_limit",
        "_paused_until",
        "_run",
        "_sweep_at",
        "_turnstiles",
        "_units",
        "quota",
    )

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self._units = (quota.name, unit_name(quota.of))
        self._limit = quota.limit
        self._paused_until, self._run = -math.inf, OUTSIDE
        # Turnstiles, and not gates: they know by which clock a gate goes.
        self._turnstiles: dict[Hashable, Turnstile] = {}
        self._known: WeakValueDictionary[Hashable, Turnstile] = WeakValueDictionary()
        self._sweep_at = _SWEEP
        if quota.by is None:
            self.gate(None)

    def __iter__(self) -> Iterator[WindowGate]:
        return map(_gate, list(self._known.values()))

    def gate(self, tenant: Hashable) -> WindowGate:
        key = tenant if self.quota.by else None
        found = self._turnstiles.get(key)
        if found is None:
            found = self._turnstiles[key] = self._known.get(key) or self._new(key)
        return _gate(found)

    @property
    def limit(self) -> int:
        """Of each gate; a server may have lowered that of some tenants."""
        return self._limit if self.quota.by else self.gate(None).limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        for gate in self:
            gate.limit = limit

    @property
    def account_limit(self) -> int:
        """What the server calls the limit, as far as is known."""
        return self._limit if self.quota.by else self.gate(None).account_limit

    def pause(self, pause: float, run: Run) -> bool:
        """Hold all gates, and those yet to come; tells whether that extends a pause."""
        until = run.now() + pause
        extends = until > self._pause_in(run)
        if extends:
            self._paused_until, self._run = until, run
        for gate in self:
            gate.pause(until)
        return extends

    def _pause_in(self, run: Run) -> float:
        """The end of the pause, by the clock of this run."""
        if self._run is run:
            return self._paused_until
        return self._paused_until + run.now() - self._run.now_or_after()

    def statistics(self) -> QuotaStatistics:
        known = [(_gate(each), each.now()) for each in list(self._known.values())]
        return QuotaStatistics(
            self.quota.name,
            self.quota.per,
            self.limit,
            sum(gate.used_at(now) for gate, now in known),
            len(known),
            max((gate.paused_for(now) for gate, now in known), default=0.0),
        )

    def __repr__(self) -> str:
        quota = self.quota
        if quota.by:  # every refusal shows this: not the time to add up all tenants
            each = f"{self.limit:,} {quota.name} per {quota.per:g} s"
            return f"{each} for each of {len(self._known)} tenants"
        now = self.statistics()
        shown = f"{now.used:,} of {now.limit:,} {now.name} per {now.per:g} s"
        if quota is PAUSES:
            shown = "no limit"
        if now.paused_for:
            shown += f" (paused for {now.paused_for:.1f} s)"
        return shown

    def matches(self, status: QuotaStatus) -> bool:
        return status.of in self._units and status.per in (None, self.quota.per)

    def _new(self, key: Hashable) -> Turnstile:
        if len(self._turnstiles) >= self._sweep_at:
            for tenant, each in list(self._turnstiles.items()):
                if _gate(each).is_idle(each.now()):
                    del self._turnstiles[tenant]
            self._sweep_at = max(_SWEEP, 2 * len(self._turnstiles))
        quota = self.quota
        gate = WindowGate(
            quota.limit,
            quota.per,
            of=quota.of,
            burst=quota.burst,
            settle=quota.settle,
            leeway=quota.leeway,
            paused_until=self._pause_in(current_run() or OUTSIDE),
        )
        gate.limit = self._limit
        new = self._known[key] = turnstile(gate)
        new.home = (self._turnstiles, key)
        return new


def _gate(each: Turnstile) -> WindowGate:
    return cast(WindowGate, each.gate)


@final
class TokenRateLimiter(Limiter):
    """Any number of quotas, judged together: all admit a call, or none is charged.

    >>> import anyio, tokenflow
    >>> limiter = tokenflow.TokenRateLimiter(
    ...     tokens_per_minute=60_000,
    ...     requests_per_minute=500,
    ... )
    >>> async def main():
    ...     async with limiter.reserve(1_000) as lease:  # an estimate
    ...         lease.reconcile(640)  # what the response says it was
    ...     return limiter.statistics().quotas[0].used
    >>> anyio.run(main)
    640

    The window is a true sliding one: in no span of `per` seconds, wherever it
    starts, is more than the limit charged. The exceptions are debt (calls that
    turned out larger than reserved), calls admitted `oversize="alone"`, and
    limits that were lowered afterwards. It remembers about 1,000 points per
    ledger, whatever the traffic, and errs on the safe side by at most per / 1000.

    A call waits until its estimate fits; a call larger than a quota raises
    RequestTooLarge at once. By default calls go in order of arrival, and small
    ones fill gaps where that does not hold up the first in line.

    Args:
        quotas: Any number of `Quota`.
        tokens_per_minute: Short for `Quota(n)`.
        requests_per_minute: Short for `Quota(n, of="requests")`.
        input_tokens_per_minute: Short for `Quota(n, of="input_tokens")`.
        output_tokens_per_minute: Short for `Quota(n, of="output_tokens")`.
        order: `Fifo()`, `SmallestFirst()` or `FairShare()`.
        max_waiting: How many calls may wait; more raise QueueFull. With `FairShare` a full
            queue still has a place for a tenant who holds less than its share of them.
        oversize: "alone" admits a call larger than a quota into an empty window.

    Raises:
        ValueError: no quota at all, which would limit nothing.
    """

    __slots__ = ("_ledgers",)

    def __init__(
        self,
        *quotas: Quota,
        tokens_per_minute: int | None = None,
        requests_per_minute: int | None = None,
        input_tokens_per_minute: int | None = None,
        output_tokens_per_minute: int | None = None,
        order: Order = Fifo(),  # noqa: B008 (stateless)
        max_waiting: int | None = None,
        oversize: Oversize = "raise",
    ) -> None:
        for quota in quotas:
            if not isinstance(quota, Quota):
                raise TypeError(f"quotas must be Quota(...) objects, not {quota!r}")
        per_minute = {
            "tokens": tokens_per_minute,
            "requests": requests_per_minute,
            "input_tokens": input_tokens_per_minute,
            "output_tokens": output_tokens_per_minute,
        }
        quotas += tuple(
            Quota(positive_int(n, f"{of}_per_minute"), of=of)
            for of, n in per_minute.items()
            if n is not None
        )
        if not quotas:
            raise ValueError(
                "a rate limiter without a quota limits nothing: pass tokens_per_minute=..., "
                "another ..._per_minute or a Quota; for no limit use TokenLimits()"
            )
        super().__init__(order=order, max_waiting=max_waiting, oversize=oversize)
        self._ledgers = [_Ledgers(quota) for quota in quotas]

    def pause(self, seconds: float, /) -> None:
        """Admit nothing for so many seconds: everybody waits, nobody is lost.

        For a server that says "retry after". It only ever extends, and holds
        through every `TokenLimits` that this limiter is part of.
        """
        pause = finite_seconds(seconds, "seconds")
        run = guard(self._all_gates())
        extends = [ledgers.pause(pause, run) for ledgers in self._ledgers]
        if pause and any(extends) and is_due(self._queue.pause_logged_at, run.now()):
            self._queue.pause_logged_at = run.now()
            log(logging.WARNING, "paused for %.1f s: %r", pause, self)

    def observe(self, status: RateLimitStatus, *, tenant: Hashable = None) -> None:
        """Take in what the server says about its quotas.

        What it has counted beyond what is charged here is booked as others' use
        until it resets, in place of what the last observation said, unless calls on their
        way may hide that. Of the limit that it names and the one set here, the lower one
        counts; where that is the one set here, others' use takes none of it until the
        account has too little left for both. `retry_after` pauses. A status that matches
        no quota by name or unit and period, or that could mean several, is ignored, and so
        are numbers that make no sense.

        Every response may be observed, in any order: one that counts only the calls of
        this limiter makes nobody wait, provided that its `age` is given, and that each was
        charged at least what the server counts for it.
        """
        if not isinstance(status, RateLimitStatus):
            raise TypeError(f"observe takes a RateLimitStatus, not {status!r}")
        age = known_seconds(status.age) or 0.0
        observed = [(each, self._observed(each)) for each in status.quotas]
        if self._by_tenant():  # before a gate is made for a new tenant
            guard(gate for _, ledgers in observed for gate in islice(ledgers or (), 1))
        told = [(each, ledgers.gate(tenant)) for each, ledgers in observed if ledgers is not None]
        gates = [gate for _, gate in told]
        now = guard(gates).now() if gates else 0.0
        lowered = raised = False
        for each, gate in told:
            largest = gate.largest()
            gate.observe(each, now, age)
            lowered |= gate.largest() < largest
            raised |= gate.largest() > largest
        changed(gates, now, lowered=lowered, raised=raised)
        if pause := known_seconds(status.retry_after):
            self.pause(pause)

    def set_limit(self, quota: str, limit: int) -> None:
        """Change the limit of the quota with this name (or unit); 0 is a pause.

        A server's limit, where `observe` was told a lower one, still counts.

        Raising admits waiters before this returns. Lowering fails those in the
        queue that could no longer fit; what was charged stays charged.

        Raises:
            ValueError: no quota of that name, or several.
        """
        limit = token_count(limit, "limit")
        found = [each for each in self._ledgers if each.quota.name == quota]
        found = found or [each for each in self._ledgers if each.quota.of == quota]
        if len(found) != 1:
            names = ", ".join(repr(each.quota.name) for each in self._ledgers)
            if not found:
                raise ValueError(f"no quota is called {quota!r}: pass one of {names}")
            raise ValueError(f"{len(found)} quotas are called {quota!r}: give each its own name")
        now = guard(self._all_gates()).now()
        found[0].limit = limit
        changed(found[0], now, lowered=True)

    def statistics(self) -> RateLimiterStatistics:
        """Live numbers; works from anywhere."""
        queue = self._queue
        return RateLimiterStatistics(
            tuple(each.statistics() for each in self._ledgers),
            queue.waiting,
            queue.waiting_tokens,
            queue.unreconciled,
        )

    def _observed(self, status: QuotaStatus) -> _Ledgers | None:
        found = [each for each in self._ledgers if each.matches(status)]
        if len(found) > 1:
            found = [each for each in found if each.account_limit == status.limit]
        return found[0] if len(found) == 1 else None

    def _gates(self, tenant: Hashable) -> Iterable[Gate]:
        return [ledgers.gate(tenant) for ledgers in self._ledgers]

    def _all_gates(self) -> list[WindowGate]:
        return [gate for ledgers in self._ledgers for gate in ledgers]

    def _by_tenant(self) -> bool:
        return any(ledgers.quota.by for ledgers in self._ledgers)

    def __repr__(self) -> str:
        quotas = ", ".join(map(repr, self._ledgers))
        return f"<TokenRateLimiter: {quotas}, {self._queue.waiting} waiting>"
