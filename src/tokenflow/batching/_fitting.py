"""Which sizes go together: the algorithms, over plain ints.

*Next fit*: an item that does not fit closes the batch and leads the next one.
Linear; 15 to 27 % above the bound on real traces when the mean item is a tenth
to two fifths of the budget, under 1 % when it is a few thousandths, where
there is nothing to gain by anything cleverer.

*Best fit* builds one batch at a time and gives it, again and again, the largest
item left that fits. That is first-fit decreasing, seen from the batch: the
search is over item sizes, which only ever run out, so one sorted list and a
union-find over its emptied places serve any budget. O(n log n), 11/9 of the
optimum at worst, within 0.2 % of the bound on the traces.

*Under an item cap* that rule is wrong: the largest items first leave batches of
small change at the end, full by count and empty by tokens. There a batch takes
its largest one, two or three items and then aims at the mean: the room left
over the slots left. Which number is best depends on the sizes, so all are tried
on the histogram of sizes (no item moves) until one meets the bound.

*Padded*, a batch costs its longest item times its count. In order of size, next
fit gives the fewest batches there can be: the longest item needs some batch,
and by exchange that batch is best filled with the next longest ones.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import SupportsIndex, TypeAlias, final

__all__ = ["Group", "Limits", "best_fit", "martello_toth", "next_fit", "positive"]


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch may hold."""

    token_budget: int
    max_items: int | None = None
    padded: bool = False

    @classmethod
    def checked(cls, token_budget: int, max_items: int | None, padded: bool = False) -> Limits:
        """The same, or a ValueError that names the argument."""
        cap = None if max_items is None else positive(max_items, "max_items")
        return cls(positive(token_budget, "token_budget"), cap, padded)


def positive(value: object, name: str) -> int:
    """Return an int >= 1, or say which argument is none: bool, float and NaN are not."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < 1:
        raise ValueError(f"{name} must be an int >= 1, not {value!r}")
    return operator.index(value)


Group: TypeAlias = tuple[list[int], int]
"""The places of a batch's items, and its cost."""


def next_fit(sizes: list[int], order: Iterable[int], limits: Limits) -> Iterator[Group]:
    """Close a batch at the first item, in this order, that it cannot take."""
    budget, padded = limits.token_budget, limits.padded
    cap = limits.max_items or len(sizes)
    group: list[int] = []
    cost = longest = 0
    for place in order:
        size = sizes[place]
        if size > longest:
            longest = size
        after = longest * (len(group) + 1) if padded else cost + size
        if group and (after > budget or len(group) == cap):
            yield group, cost
            group = []
            after = longest = size
        group.append(place)
        cost = after
    if group:
        yield group, cost


def best_fit(sizes: list[int], limits: Limits) -> Iterator[Group]:
    """Oversize items alone, the others by the rule of the module's docstring."""
    if limits.padded:
        yield from next_fit(
            sizes, sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True), limits
        )
        return
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place in range(len(sizes) - 1, -1, -1):  # so that pop() gives the first
        places[sizes[place]].append(place)
    distinct = sorted(places)
    while distinct and distinct[-1] > limits.token_budget:
        size = distinct.pop()
        yield from (([place], size) for place in reversed(places[size]))
    stacks = [places[size] for size in distinct]
    for runs in _best_runs(distinct, list(map(len, stacks)), limits):
        group: list[int] = []
        cost = 0
        for kind, count in runs:
            cost += count * distinct[kind]
            if count == 1:
                group.append(stacks[kind].pop())
            else:
                group += stacks[kind][-count:]
                del stacks[kind][-count:]
        group.sort()
        yield group, cost


_Runs: TypeAlias = list[tuple[int, int]]
"""A batch as runs of (which size, how many of it)."""


def _best_runs(distinct: list[int], counts: list[int], limits: Limits) -> Iterable[_Runs]:
    """Largest first; where the item cap gets in the way, the best of that and three aims."""
    budget, items = limits.token_budget, sum(counts)
    cap = limits.max_items or items
    if cap >= items:
        return _largest_first(distinct, counts, budget, items)
    best = list(_largest_first(distinct, counts, budget, cap))
    tokens = sum(map(operator.mul, distinct, counts))
    bound = max(-(-tokens // budget), -(-items // cap))
    for seeds in (1, 2, 3):
        if len(best) > bound:
            aimed = list(_towards_the_mean(distinct, counts, budget, cap, seeds))
            best = min(best, aimed, key=len)
    return best


def _largest_first(
    distinct: list[int], counts: list[int], budget: int, cap: int
) -> Iterator[_Runs]:
    """First-fit decreasing, batch by batch: `_Stock` written out, since this loop is the cost."""
    left = [0, *counts]
    alive = list(range(len(left)))
    items = sum(counts)
    while items:
        runs: _Runs = []
        room, slots, kind = budget, cap, len(distinct)
        while slots:
            while alive[kind] != kind:
                alive[kind] = kind = alive[alive[kind]]
            if not kind:
                break
            size = distinct[kind - 1]
            if size > room:
                kind = bisect_right(distinct, room, 0, kind)
                continue
            count = min(slots, room // size if size else slots)
            if count < left[kind]:
                left[kind] -= count
            else:
                count = left[kind]
                alive[kind] = kind - 1
            room -= count * size
            slots -= count
            runs.append((kind - 1, count))
        items -= cap - slots
        yield runs


def _towards_the_mean(
    distinct: list[int], counts: list[int], budget: int, cap: int, seeds: int
) -> Iterator[_Runs]:
    """Take the `seeds` largest items that fit, then aim at room / slots.

    A batch has as many slots as it must get on average for the rest to go into
    the fewest batches there can be. When a slot or less is left, the largest
    that fits is right again; where nothing is as small as the aim, the smallest.
    """
    stock = _Stock(distinct, counts)
    while items := stock.items:
        bins = max(-(-stock.tokens // budget), -(-items // cap))
        runs: _Runs = []
        room = budget
        for taken in range(cap):
            ahead = items - taken * bins  # slots left x bins: integers at any budget
            if taken < seeds or ahead <= bins:
                kind = stock.largest(room)
            else:
                kind = stock.largest(room * bins // ahead) or stock.smallest(room)
            if not kind:
                break
            stock.take(kind)
            room -= distinct[kind - 1]
            runs.append((kind - 1, 1))
        yield runs


@final
class _Stock:
    """Items left, by size. Kinds of size count from 1; 0 is none.

    `_alive[k]` leads to the largest kind not above k that still has items:
    union-find with path halving, since sizes only ever run out.
    """

    __slots__ = ("_alive", "_distinct", "_first", "_left", "items", "tokens")

    def __init__(self, distinct: list[int], counts: list[int]) -> None:
        self._distinct = distinct
        self._left = [0, *counts]
        self._alive = list(range(len(distinct) + 1))
        self._first = 1
        self.items = sum(counts)
        self.tokens = sum(map(operator.mul, distinct, counts))

    def largest(self, room: int) -> int:
        """The kind of the largest item of at most `room` tokens."""
        alive = self._alive
        kind = bisect_right(self._distinct, room)
        while alive[kind] != kind:
            alive[kind] = kind = alive[alive[kind]]
        return kind

    def smallest(self, room: int) -> int:
        """The kind of the smallest item, if it has at most `room` tokens."""
        while not self._left[self._first]:
            self._first += 1
        return self._first if self._distinct[self._first - 1] <= room else 0

    def take(self, kind: int) -> None:
        """Take one item of a kind that has some."""
        self._left[kind] -= 1
        if not self._left[kind]:
            self._alive[kind] = kind - 1
        self.items -= 1
        self.tokens -= self._distinct[kind - 1]


def martello_toth(fitting: list[int], budget: int) -> int:
    """L2 over ascending sizes, none above the budget.

    For every threshold p up to half the budget: items above budget - p are
    alone; those above half are in different batches; what lies between p and a
    half goes into their room, and its rest into batches of its own.
    """
    upto = [0, *accumulate(fitting)]
    half = bisect_right(fitting, budget // 2)
    best = 0
    for threshold in {0, *fitting[:half]}:
        wide = bisect_right(fitting, budget - threshold)
        room = (wide - half) * budget - (upto[wide] - upto[half])
        small = upto[half] - upto[bisect_left(fitting, threshold, 0, half)]
        best = max(best, len(fitting) - half + max(0, -((room - small) // budget)))
    return best
