"""The queue in front of a batcher: pure, no clock, no loop.

Goal: the next batch is not chosen before it goes. Until then its items stand in
the queue like all others, so a cancelled one leaves it, a late one joins it and
an urgent one leads it, with no bookkeeping of its own.

Invariant: `count`, `tokens` and the lanes agree; no lane is empty. One lane per
priority, in order of arrival, as a linked list: an item joins, goes or is
cancelled in O(1), and a cancelled one leaves nothing behind.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import Generic, Protocol, TypeVar, final

from ._fitting import Limits

__all__ = ["Backlog", "Queued"]


class Queued(Protocol):
    """What a queue needs to know of an item; compared by identity."""

    @property
    def tokens(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def arrived(self) -> float: ...


Q = TypeVar("Q", bound=Queued)


@final
class Backlog(Generic[Q]):
    """By priority (lower first), then arrival; the next batch is the longest head that fits."""

    __slots__ = ("_lanes", "_limits", "_longest", "_priorities", "count", "tokens")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lanes: dict[int, OrderedDict[Q, None]] = {}
        self._priorities: list[int] = []  # of the lanes there are, ascending
        self._longest = 0  # at least that of the longest item
        self.count = 0
        self.tokens = 0

    def push(self, item: Q) -> None:
        """Queue an item behind those of its priority."""
        lane = self._lanes.get(item.priority)
        if lane is None:
            if not isinstance(item.priority, int):
                raise TypeError(f"priority must be an int, not {item.priority!r}")
            lane = self._lanes[item.priority] = OrderedDict()
            insort(self._priorities, item.priority)
        lane[item] = None
        self.count += 1
        self.tokens += item.tokens
        if item.tokens > self._longest:
            self._longest = item.tokens

    def drop(self, item: Q) -> None:
        """Take out an item that is queued, wherever it stands."""
        lane = self._lanes[item.priority]
        del lane[item]
        if not lane:
            del self._lanes[item.priority]
            self._priorities.remove(item.priority)
        self.count -= 1
        self.tokens -= item.tokens

    def is_full(self) -> bool:
        """Is there a whole batch: would one that goes now leave items, or have no room?"""
        limits = self._limits
        if limits.max_items is not None and self.count >= limits.max_items:
            return True
        if not limits.padded:
            return self.tokens >= limits.token_budget
        if self._longest * self.count < limits.token_budget:
            return False
        head, cost = self.head()
        if len(head) == self.count:
            self._longest = max((item.tokens for item in head), default=0)
        return len(head) < self.count or cost >= limits.token_budget

    def oldest(self) -> float:
        """When the item that has waited longest arrived. Not for an empty queue."""
        return min(next(iter(lane)).arrived for lane in self._lanes.values())

    def head(self, allowed: int | None = None) -> tuple[list[Q], int]:
        """The next batch and its cost; of at most `allowed` tokens where that is given.

        Without `allowed` the first item is taken whatever it costs.
        """
        limits = self._limits
        most = limits.token_budget if allowed is None else allowed
        cap = limits.max_items or self.count
        batch: list[Q] = []
        cost = longest = 0
        for count, item in enumerate(self._in_order(), 1):
            if item.tokens > longest:
                longest = item.tokens
            after = longest * count if limits.padded else cost + item.tokens
            if count > cap or (after > most and (count > 1 or allowed is not None)):
                break
            batch.append(item)
            cost = after
        return batch, cost

    def take(self, head: list[Q]) -> None:
        """Take out what `head` returned: whole lanes first, and then the front of one."""
        for item in head:
            del self._lanes[item.priority][item]
            self.tokens -= item.tokens
        self.count -= len(head)
        while self._priorities and not self._lanes[self._priorities[0]]:
            del self._lanes[self._priorities.pop(0)]

    def _in_order(self) -> Iterable[Q]:
        lanes = self._lanes
        if len(lanes) == 1:
            return lanes[self._priorities[0]]
        return chain.from_iterable(lanes[priority] for priority in self._priorities)
