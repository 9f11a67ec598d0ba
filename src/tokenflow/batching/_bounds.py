"""How few batches could do: numbers that no packing goes below, over plain ints.

Two of them see what a sum does not. *L2* of Martello and Toth (1990): items above
half the budget are in different batches, and whatever is too long to join them
needs batches of its own. *Company*, the same for an item cap: long items leave
so little room that even the shortest ones cannot take all the slots beside
them, so more than items / cap batches are needed for the rest. On lengths with a
few per cent close to the budget that is the whole of the 0.2 to 1 % by which a
packing seems to miss.

O(k log k) in the number of different sizes.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from itertools import accumulate
from typing import final

__all__ = ["fewest_batches"]


def fewest_batches(distinct: list[int], counts: list[int], budget: int, cap: int) -> int:
    """The largest of the bounds, for sizes in ascending order, none above the budget."""
    sums = _Sums(distinct, counts)
    return max(-(-sums.items[-1] // cap), sums.l2(budget), sums.company(budget, cap))


@final
class _Sums:
    """`items[k]` and `tokens[k]` are of the k smallest sizes, all items of each."""

    __slots__ = ("distinct", "items", "tokens")

    def __init__(self, distinct: list[int], counts: list[int]) -> None:
        self.distinct = distinct
        self.items: list[int] = [0, *accumulate(counts)]
        self.tokens: list[int] = [0, *accumulate(map(operator.mul, distinct, counts))]

    def l2(self, budget: int) -> int:
        """For every threshold p up to half the budget: items above budget - p are alone.

        Those above half are in different batches; what lies between p and a half goes
        into their room, and its rest into batches of its own. At p = 0 that is the
        sum over the budget.
        """
        distinct, items, tokens = self.distinct, self.items, self.tokens
        half = bisect_right(distinct, budget // 2)
        more = -(-(tokens[-1] - (items[-1] - items[half]) * budget) // budget)  # at p = 0
        for kind, threshold in enumerate(distinct[:half]):
            wide = bisect_right(distinct, budget - threshold, half)
            room = (items[wide] - items[half]) * budget - (tokens[wide] - tokens[half])
            more = max(more, -((room - tokens[half] + tokens[kind]) // budget))
        return items[-1] - items[half] + max(0, more)

    def company(self, budget: int, cap: int) -> int:
        """For every size above half: its items and longer ones, and the most they take along.

        They take the shortest first, into their rooms as if those were one, and no
        more than cap - 1 each. Within one size the bound is convex, so its ends do.
        """
        distinct, items, tokens = self.distinct, self.items, self.tokens
        best = 0
        for kind in range(bisect_right(distinct, budget // 2), len(distinct)):
            long = items[-1] - items[kind]
            room = long * budget - (tokens[-1] - tokens[kind])
            whole = bisect_right(tokens, room, 0, kind + 1) - 1
            part = (room - tokens[whole]) // distinct[whole] if whole < kind else 0
            taken = min(items[whole] + part, long * (cap - 1))
            best = max(best, long + -(-(items[kind] - taken) // cap))
        return best
