"""Which replica a call goes to.

Goal: the least projected load after taking the call, in tokens over speed,
among replicas that are up and have room. Ties go to the least recently used,
so that paced calls rotate.

The ledgers here are the truth: they are charged before a call is sent, and a
load that is polled is seconds old, which sends a herd to whoever was least
loaded then. Reports only add what others do, and age out; a replica of which
nothing is known counts like the average of those that report, not as idle.

A choice is one loop over numbers that the ledgers keep ready. What the passing
of time changes (reports, slow starts) is recomputed when it is due, not for
each choice.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import final

from tokenflow._errors import NoReplica, RequestTooLarge, TokenflowError
from tokenflow._usage import Usage
from tokenflow.limits._admission import too_large
from tokenflow.limits._fork import Obstacle
from tokenflow.limits._waiter import Booking

from ._replica import Charge, Ledger, Replica, occupied

__all__ = ["Fleet"]

_PREFERENCE = 2.0
_AFFINITIES = 10_000
_COOLDOWN = 1.0
_LONGEST_COOLDOWN = 60.0


@final
class Fleet:
    """The replicas of one router. Pure: it is told the time, and knows no waiters."""

    __slots__ = ("_affinities", "_ledgers", "_shortest", "_turns", "refresh_at")

    def __init__(self) -> None:
        self._ledgers: dict[str, Ledger] = {}
        self._shortest = math.inf  # context window
        self._turns = 0
        self._affinities: OrderedDict[Hashable, Ledger] = OrderedDict()
        self.refresh_at: float = -math.inf  # what the ledgers keep ready holds until then

    def __iter__(self) -> Iterator[Ledger]:
        return iter(self._ledgers.values())

    def __len__(self) -> int:
        return len(self._ledgers)

    def __getitem__(self, name: str) -> Ledger:
        try:
            return self._ledgers[name]
        except (KeyError, TypeError):
            names = ", ".join(map(repr, self._ledgers)) or "there is none"
            raise ValueError(f"no replica is called {name!r}: {names}") from None

    def add(self, replica: Replica) -> Ledger:
        """With a new ledger, whoever had that name before."""
        if not isinstance(replica, Replica):
            raise TypeError(f"a router takes Replica(...) objects, not {replica!r}")
        if replica.name in self._ledgers:
            raise ValueError(f"there is a replica {replica.name!r} already: names are unique")
        ledger = self._ledgers[replica.name] = Ledger(replica, self)
        self._changed()
        return ledger

    def remove(self, name: str) -> Ledger:
        """Forget a replica; its ledger lives as long as its leases."""
        ledger = self[name]
        del self._ledgers[name]
        for key in [key for key, known in self._affinities.items() if known is ledger]:
            del self._affinities[key]
        self._changed()
        return ledger

    def by_tenant(self) -> bool:
        """Has any replica a limiter of its own that tells tenants apart?"""
        limiters = (ledger.replica.limiter for ledger in self)
        return any(limiter is not None and limiter._by_tenant() for limiter in limiters)

    def _changed(self) -> None:
        self._shortest = min((ledger.window for ledger in self), default=math.inf)
        self.refresh_at = -math.inf

    # -- options -----------------------------------------------------------

    def options(self, model: str | None) -> list[Ledger]:
        """Those for a model.

        Raises:
            NoReplica: there is none.
        """
        if model is not None and not isinstance(model, str):
            raise TypeError(f"model must be a str or None, not {model!r}")
        found = [ledger for ledger in self if ledger.replica.serves(model)]
        if not found:
            served = sorted({ledger.replica.model or "any" for ledger in self})
            raise NoReplica(
                f"no replica serves the model {model!r}, only {', '.join(served)}: add one"
                if served
                else "the router has no replica: add one"
            )
        return found

    def eligible(self, ledgers: Sequence[Ledger], lease: Booking) -> Sequence[Ledger]:
        """Those that the call does not exclude, and whose context window takes it."""
        exclude = lease._wishes[3]
        if exclude:
            ledgers = [each for each in ledgers if each.replica.name not in exclude]
        length = _length(lease.usage)
        if length > self._shortest:
            ledgers = [each for each in ledgers if each.window >= length]
        return ledgers

    def refusal(
        self, ledgers: Sequence[Ledger], lease: Booking, obstacles: Sequence[Obstacle]
    ) -> TokenflowError:
        """Why none of these could ever take the call."""
        model, _, _, exclude = lease._wishes
        allowed = [each for each in ledgers if each.replica.name not in exclude]
        length = _length(lease.usage)
        too_short = [min(each.window, each.limit) for each in allowed if each.window < length]
        if not allowed:
            largest = max((min(each.window, each.limit) for each in ledgers), default=math.inf)
            return NoReplica(
                f"every replica for {model or 'this call'} is excluded: exclude fewer, or add one",
                largest=None if largest == math.inf else int(largest),
            )
        if obstacles:
            gate, cost = max(obstacles, key=lambda obstacle: obstacle[0].largest())
            if gate.largest() >= max(too_short, default=0):
                return too_large(gate, cost)
        largest = max(too_short)
        return RequestTooLarge(
            f"a call of {length:,} tokens fits into no replica's context window: at most "
            f"{largest:,} do; send less, or add a replica with a larger window",
            cost=length,
            limit=int(largest),
        )

    # -- choosing ----------------------------------------------------------

    def pick(self, ledgers: Sequence[Ledger], lease: Booking, now: float) -> Ledger | None:
        """The best for a call, of those that are up and have room for it."""
        if now >= self.refresh_at:
            self._refresh(now)
        _, affinity, region, exclude = lease._wishes
        usage = lease.usage
        if exclude or (self._shortest < math.inf and _length(usage) > self._shortest):
            ledgers = self.eligible(ledgers, lease)
        tokens = occupied(usage)
        if affinity is None and region is None:
            return _least(ledgers, tokens, tokens, now)
        return self._preferred(ledgers, lease, tokens, now)

    def pick_open(self, ledgers: Sequence[Ledger], lease: Booking, now: float) -> Ledger | None:
        """The best of some that all could take it now."""
        if now >= self.refresh_at:
            self._refresh(now)
        return self._preferred(ledgers, lease, -math.inf, now)

    def _preferred(
        self, ledgers: Sequence[Ledger], lease: Booking, room: float, now: float
    ) -> Ledger | None:
        """Where the call would like to go, unless that is loaded too much."""
        tokens = occupied(lease.usage)
        best = _least(ledgers, tokens, room, now)
        if best is None:
            return None
        bound = _PREFERENCE * (best.load + tokens * best.pace)
        for group in self._groups(ledgers, lease):
            found = _least(group, tokens, room, now)
            if found is not None and found.load + tokens * found.pace <= bound:
                return found
        return best

    def _groups(self, ledgers: Sequence[Ledger], lease: Booking) -> Iterator[list[Ledger]]:
        """Where it would like to go most, and then."""
        model, affinity, region, _ = lease._wishes
        if affinity is not None:
            known = self._affinities.get((model, affinity))
            yield [each for each in ledgers if each is known]
        if region is not None:
            yield [each for each in ledgers if each.replica.region == region]

    def taken(self, ledger: Ledger, lease: Booking) -> None:
        """A call has been admitted there."""
        self._turns += 1
        ledger.turn = self._turns
        ledger.picks += 1
        model, affinity, _, _ = lease._wishes
        if affinity is not None:
            memory = self._affinities
            memory[model, affinity] = ledger
            memory.move_to_end((model, affinity))
            if len(memory) > _AFFINITIES:
                memory.popitem(last=False)

    def failed(
        self, ledger: Ledger, charge: Charge, lease: Booking, retry_after: float, now: float
    ) -> Charge:
        """Spare a replica that failed, each time for longer, unless it is the last one up."""
        marked = ledger.fail(charge)
        model = lease._wishes[0]
        others = (each for each in self if each is not ledger and each.replica.serves(model))
        if any(each.up_at <= now for each in others):
            doubled = _COOLDOWN * 2.0 ** min(ledger.failures - 1, 10)
            ledger.cool(max(retry_after, min(doubled, _LONGEST_COOLDOWN)), now)
            self.refresh_at = -math.inf
        return marked

    def _refresh(self, now: float) -> None:
        """Bring up to date what does not change with the calls."""
        ledgers = list(self)
        speeds = [s for each in ledgers if (s := each.replica.tokens_per_second) is not None]
        fastest, mean = (max(speeds), fmean(speeds)) if speeds else (1.0, 1.0)
        reported = [each.reported(now) for each in ledgers]
        usual = fmean(known) if (known := [r for r in reported if r is not None]) else 0.0
        for ledger, foreign in zip(ledgers, reported, strict=True):
            pace = fastest / (ledger.replica.tokens_per_second or mean)
            ledger.weigh(usual if foreign is None else foreign, pace / ledger.share(now))
        self.refresh_at = min((each.changes_at(now) for each in ledgers), default=math.inf)


def _least(ledgers: Iterable[Ledger], tokens: int, room: float, now: float) -> Ledger | None:
    """The least loaded with room, of those that are up."""
    best, least, since = None, math.inf, 0
    for ledger in ledgers:
        if ledger.room < room or ledger.up_at > now:
            continue
        load = ledger.load + tokens * ledger.pace
        if load < least or (load == least and ledger.turn < since):
            best, least, since = ledger, load, ledger.turn
    return best


def _length(usage: int | Usage) -> int:
    """What has to fit into the context window."""
    if isinstance(usage, int):
        return usage
    return usage.input_tokens + max(usage.output_tokens, usage.max_output_tokens or 0)
