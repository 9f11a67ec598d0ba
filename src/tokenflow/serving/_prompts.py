"""The prompts: who is admitted, and how many tokens of each go into a step.

Room goes by the order's key, in two lanes. While both want it, half is for *long*
prompts, of more than half of a step's budget, and half for the others; what one
lane leaves, the other gets. So a short prompt does not wait for the room of a long
one, nor a long one for more than half of the room. Lower priorities get what is left.

Slots and memory go strictly by key, among those whose lane has room: nothing
overtakes a head that memory does not take. Everything that runs ends, nothing
begins meanwhile, so the head's turn comes; were it passed, others would fill the
memory that it waits for, under load for ever. Where small requests should not
wait so there is an order for it, and its patience is the bound.

A prompt's memory is booked whole when it is admitted, so that prompts never block
each other halfway.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Iterator
from operator import attrgetter
from typing import TypeAlias, final

from tokenflow.limits import Order
from tokenflow.limits._order import Key

from ._blocks import KvBlocks
from ._sequence import Prefill, TokenSequence

__all__ = ["Prompts"]

_FEW = 64
_by_key = attrgetter("_key")

_Rooms: TypeAlias = tuple[list[int], list[int]]
"""What is left for the short and for the long: one list of one, twice, where they share it."""


@final
class _Lane:
    """Who waits, smallest key first.

    Who leaves stays in the heap until it comes to the front, or half of all have left.
    """

    __slots__ = ("_heap", "_left")

    def __init__(self) -> None:
        self._heap: list[tuple[Key, TokenSequence]] = []
        self._left = 0

    def __len__(self) -> int:
        return len(self._heap) - self._left

    def push(self, sequence: TokenSequence) -> None:
        heapq.heappush(self._heap, (sequence._key, sequence))  # keys differ, so they decide

    def head(self) -> TokenSequence | None:
        heap = self._heap
        while heap and heap[0][1].state != "waiting":
            heapq.heappop(heap)
            self._left -= 1
        return heap[0][1] if heap else None

    def pop(self) -> None:
        """Take out what `head` has just returned."""
        heapq.heappop(self._heap)

    def left(self) -> None:
        """One of them is not waiting any more."""
        self._left += 1
        if self._left > _FEW and 2 * self._left > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].state == "waiting"]
            heapq.heapify(self._heap)
            self._left = 0


@final
class Prompts:
    """Sequences that wait for admission, and those whose prompt is under way."""

    __slots__ = ("_blocks", "_lanes", "_long", "_order", "_slots", "cached", "tokens", "under_way")

    def __init__(self, blocks: KvBlocks, order: Order, long: int) -> None:
        self._blocks = blocks
        self._order = order
        self._long = long
        self._lanes = (_Lane(), _Lane())
        self._slots = 0
        self.cached = 0
        """Tokens that were not computed because somebody else had them."""
        self.tokens = 0
        """Of all who wait."""
        self.under_way: list[TokenSequence] = []
        """By key."""

    @property
    def waiting(self) -> int:
        """How many wait for admission."""
        short, long = self._lanes
        return len(short) + len(long)

    def push(self, sequence: TokenSequence) -> None:
        """Let it wait: it is new, or has to be recomputed."""
        sequence.state = "waiting"
        sequence._prefilled = 0
        sequence._target = sequence.request.input_tokens + sequence._produced
        sequence._long = sequence._target > self._long
        self._lanes[sequence._long].push(sequence)
        self.tokens += sequence._target

    def withdraw(self, sequence: TokenSequence) -> None:
        """It waits no longer; its state says so already."""
        self._lanes[sequence._long].left()
        self.tokens -= sequence._target

    def stop(self, sequence: TokenSequence) -> None:
        """Its prompt is complete, or it ends, or gives way."""
        self.under_way.remove(sequence)

    def spend(self, room: int, slots: int) -> tuple[Prefill, ...]:
        """Give out the room of one step, and admit at most so many."""
        self._slots = slots
        tokens: dict[TokenSequence, int] = {}
        half, level = room // 2, self._level()
        if half and self._wanted(False, level) and self._wanted(True, level):
            rooms = ([room - half], [half])
            self._fill(tokens, rooms, level)
            room = rooms[False][0] + rooms[True][0]
        both = [room]
        self._fill(tokens, (both, both), math.inf)
        return tuple(
            Prefill(each, count, each._prefilled == each._target) for each, count in tokens.items()
        )

    def _level(self) -> float:
        """The priority of the first of all: who is below it shares no room with it."""
        heads = [head for lane in self._lanes if (head := lane.head())]
        first = min(heads + self.under_way[:1], key=_by_key, default=None)
        return math.inf if first is None else first.priority

    def _wanted(self, long: bool, level: float) -> bool:
        """Has the lane a use for room?"""
        head = self._lanes[long].head()
        return (head is not None and head.priority <= level) or any(
            each._long is long and each.priority <= level for each in self.under_way
        )

    def _fill(self, tokens: dict[TokenSequence, int], rooms: _Rooms, level: float) -> None:
        """Give everyone in turn as much as there is for their lane."""
        for sequence in self._in_turn(rooms, level):
            room = rooms[sequence._long]
            part = min(room[0], sequence._target - sequence._prefilled)
            if part and sequence.priority <= level:
                room[0] -= part
                sequence._prefilled += part
                tokens[sequence] = tokens.get(sequence, 0) + part
                self._blocks.computed(sequence)

    def _in_turn(self, rooms: _Rooms, level: float) -> Iterator[TokenSequence]:
        """Those under way and those that can be admitted, by key."""
        for each in (*self.under_way, None):
            while (head := self._head(rooms, level)) and (each is None or head._key < each._key):
                if self._admit(head):
                    yield head
            if each is not None:
                yield each

    def _head(self, rooms: _Rooms, level: float) -> TokenSequence | None:
        """The first of those that wait and whose lane has room; None if nobody may be admitted."""
        if not self._slots:
            return None
        heads = [
            head
            for lane, room in zip(self._lanes, rooms, strict=True)
            if room[0] and (head := lane.head()) and head.priority <= level
        ]
        return min(heads, key=_by_key, default=None)

    def _admit(self, sequence: TokenSequence) -> bool:
        """Admit it, or nobody any more in this step."""
        if not self._blocks.fits(sequence):
            self._slots = 0
            return False
        self._slots -= 1
        self._lanes[sequence._long].pop()
        self.tokens -= sequence._target
        if self._order.shares:
            self._order.granted(sequence._key)
        self._blocks.take(sequence)
        self.cached += sequence._prefilled
        sequence.state = "prefilling"
        insort(self.under_way, sequence, key=_by_key)
        return True
