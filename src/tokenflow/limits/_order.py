"""Who goes first: one static key per waiter, smallest first.

A key is computed once, when a call arrives, so that a queue is a plain heap.
Every key ends in the call's sequence number, so no two are equal. `priority`
comes first (lower goes first) unless `lane_seconds` turns it into a head start.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Mapping
from typing import Any, final

from tokenflow._usage import finite_seconds

__all__ = ["FairShare", "Fifo", "Key", "Order", "SmallestFirst"]

Key = tuple[float, ...]

_TENANTS = 64  # sweep the accounts when there are so many, then at each doubling
_MOST_TENANTS = 10_000


class Order:
    """`Fifo`, `SmallestFirst` or `FairShare`; not made to be derived from elsewhere."""

    __slots__ = ()

    backfill: bool = False
    """May a later call that leaves the head's known instant alone go before it?"""

    shares: bool = False
    """Does it keep account of what each tenant was granted?"""

    def fresh(self) -> Order:
        """The same order for one more limiter, with nothing on account."""
        return self

    def key(
        self,
        priority: int,
        tokens: int,
        tenant: Hashable,
        now: float,
        sequence: int,
        *,
        backlogged: bool,
    ) -> Key:
        """The key of a call that arrives now."""
        raise NotImplementedError  # pragma: no cover

    def granted(self, key: Key) -> None:
        """The call with this key goes. Called only where the order `shares`."""

    def settle(self, tenant: Hashable, tokens: int) -> None:
        """Correct what a tenant was granted. Called only where the order `shares`."""

    def weight(self, tenant: Hashable) -> float:
        """A tenant's, where the order `shares`."""
        return 1.0


@final
class Fifo(Order):
    """In order of arrival.

    With `backfill`, when the first in line waits for a known instant (a window),
    one of the next 16 may go first if that leaves the instant where it is: the
    first in line goes no later for it.

    With `lane_seconds`, a call of priority p waits as if it had arrived
    p x lane_seconds later, instead of after all of lower number: low lanes
    wait longer, but cannot starve.
    """

    __slots__ = ("_lane", "backfill")

    def __init__(self, *, backfill: bool = True, lane_seconds: float | None = None) -> None:
        if not isinstance(backfill, bool):
            raise TypeError(f"backfill must be True or False, not {backfill!r}")
        self.backfill: bool = backfill
        self._lane = None if lane_seconds is None else finite_seconds(lane_seconds, "lane_seconds")

    def key(
        self,
        priority: int,
        tokens: int,
        tenant: Hashable,
        now: float,
        sequence: int,
        *,
        backlogged: bool,
    ) -> Key:
        if self._lane is None:
            return (priority, sequence)
        return (now + priority * self._lane, sequence)

    def __repr__(self) -> str:
        return _shown("Fifo", "" if self.backfill else "backfill=False", self._lane)


@final
class SmallestFirst(Order):
    """Small calls fill gaps, and nobody starves: arrival + patience x tokens / 1000.

    A call is never overtaken by one that arrived more than `patience` seconds
    per 1,000 of its own tokens later. `lane_seconds` as for `Fifo`.
    """

    __slots__ = ("_lane", "_patience")

    def __init__(self, patience: float = 3.0, *, lane_seconds: float | None = None) -> None:
        self._patience = finite_seconds(patience, "patience")
        self._lane = None if lane_seconds is None else finite_seconds(lane_seconds, "lane_seconds")

    def key(
        self,
        priority: int,
        tokens: int,
        tenant: Hashable,
        now: float,
        sequence: int,
        *,
        backlogged: bool,
    ) -> Key:
        due = now + self._patience * tokens / 1000
        if self._lane is None:
            return (priority, due, sequence)
        return (due + priority * self._lane, sequence)

    def __repr__(self) -> str:
        return _shown("SmallestFirst", f"{self._patience:g}", self._lane)


@final
class FairShare(Order):
    """Each tenant gets its share of the tokens, whatever the size of its calls.

    Start-time fair queueing (Goyal, Vin, Cheng 1996): a call's tag is
    max(V, F[tenant]), after which F[tenant] grows by tokens / weight; V is the
    largest tag granted. Two tenants with calls waiting stay within the sum of
    their largest calls of each other; with weights, in proportion. Whoever asks
    alone gets everything, and being idle earns nothing.

    A call cancelled in the queue takes its share of F back, and a reconcile
    adds its difference. Tenants who are not ahead of V are forgotten.

    Places in the queue are shared as well: one who has filled all `max_waiting` of
    them leaves others their share, by weight among those who wait; so up to twice
    as many may wait then.

    >>> FairShare({"batch": 1, "interactive": 3})
    FairShare({'batch': 1, 'interactive': 3})
    """

    __slots__ = ("_finish", "_sweep_at", "_virtual", "_weights")

    shares: bool = True

    def __init__(self, weights: Mapping[Any, float] | None = None) -> None:
        if weights is not None and not isinstance(weights, Mapping):
            raise TypeError(f"weights must be a mapping of tenant to number, not {weights!r}")
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)):
                raise TypeError(f"the weight of {tenant!r} must be a number, not {weight!r}")
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of {tenant!r} must be > 0 and finite, not {weight}")
        self._finish: dict[Hashable, float] = {}
        self._virtual = 0.0
        self._sweep_at = _TENANTS

    def fresh(self) -> FairShare:
        return FairShare(self._weights)

    def key(
        self,
        priority: int,
        tokens: int,
        tenant: Hashable,
        now: float,
        sequence: int,
        *,
        backlogged: bool,
    ) -> Key:
        if len(self._finish) > self._sweep_at:
            self._forget(backlogged)
        tag = max(self._virtual, self._finish.get(tenant, 0.0))
        self._finish[tenant] = tag + tokens / self.weight(tenant)
        return (priority, tag, sequence)

    def granted(self, key: Key) -> None:
        if key[1] > self._virtual:
            self._virtual = key[1]

    def settle(self, tenant: Hashable, tokens: int) -> None:
        finish = self._finish.get(tenant, self._virtual) + tokens / self.weight(tenant)
        if finish > self._virtual:
            self._finish[tenant] = finish
        else:
            self._finish.pop(tenant, None)

    def weight(self, tenant: Hashable) -> float:
        return self._weights.get(tenant, 1)

    def _forget(self, backlogged: bool) -> None:
        """Bound the account: amortised O(1) per call.

        Without a backlog there is nobody to be fair to, and all start equal.
        Under a backlog of ever new tenants those who had least are forgotten.
        """
        if not backlogged:
            self._virtual = max(self._virtual, *self._finish.values())
        ahead = {t: f for t, f in self._finish.items() if f > self._virtual}
        if len(ahead) > _MOST_TENANTS:
            ahead = dict(
                heapq.nlargest(_MOST_TENANTS // 2, ahead.items(), key=lambda item: item[1])
            )
        self._finish = ahead
        self._sweep_at = max(_TENANTS, 2 * len(ahead))

    def __repr__(self) -> str:
        return f"FairShare({self._weights or ''})"


def _shown(name: str, first: str, lane: float | None) -> str:
    shown = [first] if first else []
    if lane is not None:
        shown.append(f"lane_seconds={lane:g}")
    return f"{name}({', '.join(shown)})"
