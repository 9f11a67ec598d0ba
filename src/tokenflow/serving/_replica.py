"""One place that serves a model, and the account of what it holds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, final

from tokenflow._usage import Usage, positive_int, token_count
from tokenflow.limits import Gate, InFlightGate, Limiter
from tokenflow.limits._gate import CostFunction

if TYPE_CHECKING:
    from ._fleet import Fleet

__all__ = ["Charge", "Ledger", "Replica", "checked_report", "occupied"]

Charge = tuple[int, int]
"""The tokens of a call, and how many times its replica had failed when it began."""

_SEQUENCE = 100  # tokens that an active sequence weighs beside its own; see Ledger
_UNKNOWN_POOL = 100_000  # tokens of KV memory, where a replica does not say
_FRESH = 15.0  # seconds for which a report is believed
_SLOW_START = 30.0  # seconds from a tenth of the share to the whole
_FIRST_SHARE = 0.1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One deployment, engine or API key that calls can go to.

    Args:
        name: Unique in its router.
        max_tokens: Tokens that it may have in flight; None is no limit.
        context_window: The most tokens that one call may have, its declared
            maximum of output included; None is no limit.
        tokens_per_second: Its speed, to weigh its load by. Where it is unknown,
            the mean of those that are known.
        max_requests: Calls that it may have in flight; None is no limit.
        model: The model that it serves, or a pattern ("llama-*"); None: any.
        region: Where it is, for calls that name a region.
        limiter: A limit of its own (an API key's TPM, a deployment's quota), part
            of the same admission. Several replicas may share one.
        target: Whatever reaches it: a client, a URL, a key. Never shown.

    >>> Replica("a", max_tokens=64_000, model="llama-3.1-8b", target="a secret")
    Replica(name='a', max_tokens=64000, model='llama-3.1-8b')

    Raises:
        TypeError, ValueError: a setting that makes no sense.
    """

    name: str = field(kw_only=False)
    max_tokens: int | None = None
    context_window: int | None = None
    tokens_per_second: float | None = None
    max_requests: int | None = None
    model: str | None = None
    region: str | None = None
    limiter: Limiter | None = field(default=None, compare=False)
    target: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _expect_str(self.name, "name")
        for name in ("max_tokens", "context_window", "max_requests"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, positive_int(value, name))
        speed = self.tokens_per_second
        if speed is not None and (isinstance(speed, bool) or not isinstance(speed, (int, float))):
            raise TypeError(f"tokens_per_second must be a number or None, not {speed!r}")
        if speed is not None and not 0 < speed < math.inf:
            raise ValueError(f"tokens_per_second must be > 0 and finite, not {speed}")
        for name in ("model", "region"):
            if getattr(self, name) is not None:
                _expect_str(getattr(self, name), name)
        if self.limiter is not None and not isinstance(self.limiter, Limiter):
            raise TypeError(f"limiter must be a limiter or None, not {self.limiter!r}")
        if self.limiter is not None and self.limiter._choice is not None:
            raise ValueError("a replica's limiter cannot hold a router: put all into one router")

    def serves(self, model: str | None) -> bool:
        """Can a call for this model go here? One that names none can go anywhere."""
        return (
            model is None
            or self.model is None
            or self.model == model
            or fnmatchcase(model, self.model)
        )

    def __repr__(self) -> str:
        shown = [f"name={self.name!r}"]
        for name in (
            "max_tokens",
            "context_window",
            "tokens_per_second",
            "max_requests",
            "model",
            "region",
            "limiter",
        ):
            value = getattr(self, name)
            if value is not None:
                shown.append(f"{name}={value!r}")
        return f"Replica({', '.join(shown)})"


def occupied(cost: int | Usage) -> int:
    """Tokens that a call occupies at a replica: at least one, so that none is there unseen."""
    return (cost if isinstance(cost, int) else cost.total_tokens) or 1


@final
class Ledger:
    """What a replica holds, and how loaded that makes it: the gate of its tokens in flight.

    It belongs to one stay of a replica in a router, and a lease to its ledger:
    a replica that returns under the same name starts a new one.

    `load` is in tokens of the fastest replica: what is in flight here, so much
    for each active sequence, and what a report has shown of others' work,
    times `pace`. What a sequence weighs stands for what its decoding costs
    beyond the tokens that the ledger counts: each step reads its whole context
    once more. By the step times of an 8B model on an H100 that is worth between
    50 and 500 tokens of prompt for contexts of 100 and 1,000 tokens.

    Invariant: `used` and `calls` are the sums over the charges neither released
    nor undone. Reports, cooldowns and health checks never touch them.
    """

    __slots__ = (
        "__weakref__",
        "_reported_at",
        "_reported_load",
        "_warm_from",
        "calls",
        "cost",
        "failures",
        "fleet",
        "foreign",
        "limit",
        "load",
        "outages",
        "pace",
        "picks",
        "replica",
        "requests",
        "room",
        "turn",
        "up_at",
        "used",
        "window",
    )

    in_flight = True
    timed = True

    def __init__(self, replica: Replica, fleet: Fleet) -> None:
        self.replica: Replica = replica
        self.fleet: Fleet = fleet
        self.cost: CostFunction = occupied
        self.limit: float = replica.max_tokens or math.inf
        self.window: float = replica.context_window or math.inf
        self.requests: InFlightGate | None = None
        if replica.max_requests is not None:
            self.requests = InFlightGate(replica.max_requests, of="requests")
        self.used: int = 0
        self.calls: int = 0
        self.up_at: float = -math.inf  # inf: drained
        self.failures: int = 0  # one after the other
        self.outages: int = 0  # in all
        self.picks: int = 0
        self.turn: int = 0  # when it was last chosen
        self.pace: float = 1.0
        self.foreign: float = 0.0
        self._reported_at = -math.inf
        self._reported_load = 0.0
        self._warm_from = -math.inf
        self._weigh()

    def gates(self, tenant: Hashable) -> Iterator[Gate]:
        """All that a call needs here."""
        yield self
        if self.requests is not None:
            yield self.requests
        if self.replica.limiter is not None:
            yield from self.replica.limiter._gates(tenant)

    # -- as a gate ---------------------------------------------------------

    def largest(self) -> float:
        return self.limit

    def ready_at(self, cost: int, now: float) -> float:
        if self.used + cost > self.limit:
            return math.inf
        return max(now, self.up_at)

    def charge(self, cost: int, now: float) -> Charge:
        self.used += cost
        self.calls += 1
        self._weigh()
        return (cost, self.outages)

    def undo(self, charge: Charge, now: float) -> None:
        self.used -= charge[0]
        self.calls -= 1
        self._weigh()

    def correct(self, charge: Charge, cost: int, now: float) -> Charge:
        self.used += cost - charge[0]
        self._weigh()
        return (cost, charge[1])

    def release(self, charge: Charge) -> None:
        self.used -= charge[0]
        self.calls -= 1
        if self.failures and charge[1] == self.outages:  # it began after the last failure
            self.failures = 0
        self._weigh()

    def give_up(self) -> None:
        self.used = self.calls = 0
        self._weigh()

    def shift(self, seconds: float) -> None:
        self.up_at += seconds
        self._reported_at += seconds
        self._warm_from += seconds
        self.fleet.refresh_at = -math.inf

    # -- health ------------------------------------------------------------

    def cool(self, seconds: float, now: float) -> None:
        """Take no calls for so long; it only ever extends. Then start slowly."""
        until = now + seconds
        if until > max(now, self.up_at):
            self.up_at = self._warm_from = until

    def drain(self) -> None:
        """Take no calls until it is restored."""
        self.up_at = math.inf

    def restore(self, now: float) -> None:
        """Take calls again, slowly at first."""
        self.up_at = self._warm_from = now
        self.failures = 0

    def fail(self, charge: Charge) -> Charge:
        """A call has failed. Those that were under way at the same time count once."""
        if charge[1] == self.outages:
            self.outages += 1
            self.failures += 1
        return (charge[0], -1)

    def share(self, now: float) -> float:
        """Of the load that it would take otherwise, after a cooldown or a restoration."""
        return min(1.0, max(_FIRST_SHARE, (now - self._warm_from) / _SLOW_START))

    # -- reports -----------------------------------------------------------

    def report(
        self, kv_cache_usage: float | None, running: int | None, waiting: int | None, now: float
    ) -> None:
        """What the engine says of itself, less what the ledger knows of."""
        pool = _UNKNOWN_POOL if self.limit == math.inf else self.limit
        tokens = max(0.0, (kv_cache_usage or 0.0) * pool - self.used)
        sequences = max(0, (running or 0) + (waiting or 0) - self.calls)
        self._reported_at, self._reported_load = now, tokens + sequences * _SEQUENCE

    def reported(self, now: float) -> float | None:
        """Others' work as last reported, in tokens; None where that is unknown by now."""
        return self._reported_load if now - self._reported_at < _FRESH else None

    def changes_at(self, now: float) -> float:
        """The next instant at which the passing of time changes its load."""
        expires = self._reported_at + _FRESH
        warms = max(now, self._warm_from) + 1.0 if self.share(now) < 1 else math.inf
        return min(warms, expires if expires > now else math.inf)

    def weigh(self, foreign: float, pace: float) -> None:
        """Take in what others do here, and what a token takes here, against the fastest."""
        self.foreign, self.pace = foreign, pace
        self._weigh()

    def _weigh(self) -> None:
        self.room = self.limit - self.used
        self.load = (self.used + _SEQUENCE * (self.calls + 1) + self.foreign) * self.pace

    def __repr__(self) -> str:
        limit = "" if self.limit == math.inf else f" of {self.limit:,}"
        return f"<{self.used:,}{limit} tokens in flight at {self.replica.name!r}>"


def _expect_str(value: object, name: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {value!r}")
    if not value:
        raise ValueError(f"{name} must not be empty")


def checked_report(
    kv_cache_usage: float | None, running_requests: int | None, waiting_requests: int | None
) -> None:
    """Refuse a report that makes no sense."""
    if kv_cache_usage is not None:
        if isinstance(kv_cache_usage, bool) or not isinstance(kv_cache_usage, (int, float)):
            raise TypeError(f"kv_cache_usage must be a share or None, not {kv_cache_usage!r}")
        if not 0 <= kv_cache_usage <= 1:
            raise ValueError(f"kv_cache_usage must be between 0 and 1, not {kv_cache_usage}")
    if running_requests is not None:
        token_count(running_requests, "running_requests")
    if waiting_requests is not None:
        token_count(waiting_requests, "waiting_requests")
