"""A call in a queue, and what all calls of one limiter share."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, final

from tokenflow._run import Bell
from tokenflow._usage import Usage

from ._order import Order

if TYPE_CHECKING:
    from ._admission import Path

__all__ = ["Booking", "Queue", "Waiter", "Wishes", "check_hashable", "checked_wishes"]

Wishes: TypeAlias = tuple[str | None, Hashable, str | None, Collection[str]]
"""What a call asks of a router: model, affinity, region, and the names to exclude."""


def checked_wishes(
    model: str | None, affinity: Hashable, region: str | None, exclude: Collection[str]
) -> Wishes:
    """The wishes, or what is wrong with them: nothing may go wrong once the call waits."""
    check_hashable(affinity, "affinity")
    if region is not None and not isinstance(region, str):
        raise TypeError(f"region must be a str or None, not {region!r}")
    if isinstance(exclude, str) or not all(isinstance(name, str) for name in exclude):
        raise TypeError(f"exclude must be a collection of replicas' names, not {exclude!r}")
    return (model, affinity, region, frozenset(exclude))


def check_hashable(value: object, name: str) -> None:
    """Say so where it is not; `isinstance` would not see what a tuple holds."""
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(f"{name} must be hashable, not {value!r}: {error}") from None


_State = Literal["queued", "granted", "failed", "gone"]
_sequence = count()


@final
class Queue:
    """What all paths of one limiter share: its order, its bound, its counts.

    Where tenants share, one who floods the queue does not take the others' places:
    once it is full, whoever holds less than the share of `max_waiting` that its weight
    gives it, among those who wait, may still join, up to twice as many in all.
    """

    __slots__ = (
        "alone",
        "debt_logged_at",
        "max_waiting",
        "order",
        "pause_logged_at",
        "places",
        "unreconciled",
        "wait_logged_at",
        "waiting",
        "waiting_tokens",
        "weights",
    )

    def __init__(self, order: Order, max_waiting: int | None, *, alone: bool) -> None:
        self.order: Order = order
        self.max_waiting: int | None = max_waiting
        self.places: dict[Hashable, int] = {}  # by tenant, where they share them
        self.weights: float = 0.0  # of those tenants
        self.alone: bool = alone
        self.waiting: int = 0
        self.waiting_tokens: int = 0
        self.unreconciled: int = 0
        self.wait_logged_at: float = -math.inf
        self.debt_logged_at: float = -math.inf
        self.pause_logged_at: float = -math.inf

    def arrives(self, tenant: Hashable, tokens: int) -> None:
        self.waiting += 1
        self.waiting_tokens += tokens
        if self.order.shares and self.max_waiting is not None:
            if tenant not in self.places:
                self.weights += self.order.weight(tenant)
            self.places[tenant] = self.places.get(tenant, 0) + 1

    def leaves(self, tenant: Hashable, tokens: int) -> None:
        self.waiting -= 1
        self.waiting_tokens -= tokens
        if self.places:  # else nobody has asked whether the tenant can be hashed
            self.places[tenant] -= 1
            if not self.places[tenant]:
                del self.places[tenant]
                self.weights -= self.order.weight(tenant)
            if not self.places:
                self.weights = 0.0  # what rounding has left

    def is_too_full_for(self, tenant: Hashable) -> bool:
        """For the one of this tenant that has just come."""
        most = self.max_waiting
        if most is None or self.waiting <= most:
            return False
        if not self.places or self.waiting > 2 * most:
            return True
        return self.places[tenant] * self.weights > most * self.order.weight(tenant)


class Booking(Protocol):
    """What a waiter waits for: a lease, which the grant step fills in."""

    usage: int | Usage
    priority: int
    tenant: Hashable
    _wishes: Wishes

    @property
    def tokens(self) -> int: ...

    def _book(self, path: Path, costs: list[int], charges: list[Any]) -> None:
        """Take what the grant step has charged."""

    def cancel(self) -> None:
        """Give all of it back: the caller is gone."""


@final
class Waiter:
    """A call in a queue, from its arrival until it is granted, fails or leaves."""

    __slots__ = (
        "alarm",
        "arrived",
        "bell",
        "costs",
        "deadline",
        "error",
        "key",
        "lease",
        "path",
        "state",
        "tokens",
    )

    def __init__(
        self, path: Path, lease: Booking, costs: list[int], now: float, bell: Bell | None
    ) -> None:
        sequence = next(_sequence)
        self.path = path
        self.lease = lease
        self.costs = costs
        self.tokens = tokens = lease.tokens
        self.arrived = now
        self.key = path.queue.order.key(
            lease.priority,
            tokens,
            lease.tenant,
            now,
            sequence,
            backlogged=path.queue.waiting > 0,
        )
        self.bell = bell
        self.state: _State = "queued"
        self.error: Exception | None = None
        self.alarm = math.inf  # when one of its gates, or a gap, may let it go
        self.deadline = math.inf  # when it gives up

    @property
    def rank(self) -> tuple[float, float]:
        """(priority, arrival): what counts between limiters."""
        return (self.lease.priority, self.key[-1])

    def wake_at(self, when: float) -> None:
        self.alarm = when
        self.arm()

    def arm(self) -> None:
        """Set the bell's alarm for whatever comes first."""
        if self.bell is not None:
            self.bell.set_alarm(min(self.alarm, self.deadline))

    def end(self, state: _State) -> None:
        """Leave the queue, one way or the other."""
        self.state = state
        queue = self.path.queue
        queue.leaves(self.lease.tenant, self.tokens)
        if self.path.shares:
            if state == "granted":
                queue.order.granted(self.key)
            else:
                queue.order.settle(self.lease.tenant, -self.tokens)
        if self.bell is not None and state != "gone":
            self.bell.ring()
