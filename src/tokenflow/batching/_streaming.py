"""Packing what has no end: one pass, a few open batches, bounded memory and age.

Each item goes into the open batch where it leaves the least room (best fit).
Where it fits none, a new one is opened; where that makes too many, the fullest
one goes out. On real traces four open batches come within 4 % of the bound for
the whole input, sixteen within 1.5 %. One is next-fit: the order is kept.

Look-ahead is counted in tokens, not in items, so that it means the same at any
budget: at most `open_batches` x `token_budget` tokens are held. Best fit can
overlook a batch whose room nothing wants, so a batch also goes out once twice
that many tokens have been read since it was opened, or `max_open_items` items.
The latter bounds the items held too, since all are that young.

Open batches are kept sorted by room: O(log k) comparisons per item.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Generic, TypeVar, final

from tokenflow._usage import token_count

from ._fitting import Limits, positive
from ._packing import Batch, Oversize, checked_oversize, made, pieces_of

__all__ = ["pack_stream", "pack_stream_async"]

T = TypeVar("T")


def pack_stream(
    items: Iterable[T],
    token_budget: int,
    *,
    tokens: Callable[[T], int],
    max_items: int | None = None,
    open_batches: int = 4,
    max_open_items: int = 100_000,
    oversize: Oversize[T] = "alone",
) -> Iterator[Batch[T]]:
    """Pack an iterable of any length, yielding each batch as soon as it is closed.

    Reads one item at a time and only as far as it must. Items keep their order
    within a batch; with `open_batches=1` the batches do too. An iterable that
    raises, or an oversize item under `oversize="raise"`, first lets out what
    was already packed, then raises: nothing that was read is lost.

    >>> [batch.items for batch in pack_stream(iter([6, 5, 4, 5]), 10, tokens=int)]
    [(6, 4), (5, 5)]

    It waits for the iterable for as long as that takes. Where items arrive from
    live callers, `TokenBatcher` bounds their wait instead.

    Raises:
        ValueError: a budget, cap or bound that is not an int >= 1, at the call.
        RequestTooLarge: `oversize="raise"` and an item above the budget, by index.
    """
    stream = _Stream(token_budget, max_items, open_batches, max_open_items, tokens, oversize)
    return _packed(items, stream)


def pack_stream_async(
    items: AsyncIterable[T],
    token_budget: int,
    *,
    tokens: Callable[[T], int],
    max_items: int | None = None,
    open_batches: int = 4,
    max_open_items: int = 100_000,
    oversize: Oversize[T] = "alone",
) -> AsyncIterator[Batch[T]]:
    """`pack_stream` over an async iterable."""
    stream = _Stream(token_budget, max_items, open_batches, max_open_items, tokens, oversize)
    return _packed_async(items, stream)


def _packed(items: Iterable[T], stream: _Stream[T]) -> Iterator[Batch[T]]:
    try:
        for item in items:
            yield from stream.add(item)
    except Exception:
        yield from stream.drain()
        raise
    yield from stream.drain()


async def _packed_async(items: AsyncIterable[T], stream: _Stream[T]) -> AsyncIterator[Batch[T]]:
    try:
        async for item in items:
            for batch in stream.add(item):
                yield batch
    except Exception:
        for batch in stream.drain():
            yield batch
        raise
    for batch in stream.drain():
        yield batch


@final
class _OpenBatch(Generic[T]):
    """What a batch is while it grows; `opened_at` in items and tokens read before it."""

    __slots__ = ("indices", "items", "opened_at", "parts", "tokens")

    def __init__(self, opened_at: tuple[int, int]) -> None:
        self.opened_at = opened_at
        self.items: list[T] = []
        self.indices: list[int] = []
        self.parts: list[int] = []
        self.tokens = 0

    def add(self, item: T, index: int, part: int, size: int) -> None:
        self.items.append(item)
        self.indices.append(index)
        self.parts.append(part)
        self.tokens += size

    def closed(self, budget: int) -> Batch[T]:
        parts = tuple(self.parts) if any(self.parts) else ()
        over = self.tokens > budget
        return made(tuple(self.items), tuple(self.indices), self.tokens, over, parts)


@final
class _Stream(Generic[T]):
    """The open batches. `add` and `drain` return what they closed."""

    def __init__(
        self,
        token_budget: int,
        max_items: int | None,
        open_batches: int,
        max_open_items: int,
        tokens: Callable[[T], int],
        oversize: Oversize[T],
    ) -> None:
        limits = Limits.checked(token_budget, max_items)
        self._budget = limits.token_budget
        self._open_batches = positive(open_batches, "open_batches")
        self._max_open_items = positive(max_open_items, "max_open_items")
        self._max_items = min(limits.max_items or self._max_open_items, self._max_open_items)
        self._max_age = 2 * self._open_batches * self._budget
        self._tokens = tokens
        self._oversize = checked_oversize(oversize)
        self._by_room: list[tuple[int, int]] = []  # (room, serial), ascending
        self._open: dict[int, _OpenBatch[T]] = {}  # by serial, so oldest first
        self._serial = 0
        self._items_read = 0
        self._tokens_read = 0

    def add(self, item: T) -> list[Batch[T]]:
        """Place one item, or the pieces of it."""
        index = self._items_read
        size = token_count(self._tokens(item), f"tokens(item {index})")
        pieces = [(item, size)]
        if size > self._budget:
            pieces = pieces_of(item, index, size, self._budget, self._tokens, self._oversize)
        self._items_read += 1
        closed: list[Batch[T]] = []
        for part, (piece, piece_size) in enumerate(pieces):
            self._place(piece, index, part, piece_size, closed)
        return closed

    def drain(self) -> list[Batch[T]]:
        """Close what is open, oldest first."""
        return [self._close(serial) for serial in list(self._open)]

    def _place(self, item: T, index: int, part: int, size: int, closed: list[Batch[T]]) -> None:
        """One item into the batch it leaves the least room in, or into a new one."""
        self._tokens_read += min(size, self._budget)
        self._close_the_old(closed)
        place = bisect_left(self._by_room, (size, 0))
        if place == len(self._by_room):
            if len(self._open) == self._open_batches:
                closed.append(self._close(self._by_room[0][1]))
            serial = self._opened(size)
        else:
            serial = self._by_room.pop(place)[1]
        batch = self._open[serial]
        batch.add(item, index, part, size)
        insort(self._by_room, (self._budget - batch.tokens, serial))
        if len(batch.items) == self._max_items or batch.tokens > self._budget:
            closed.append(self._close(serial))

    def _opened(self, size: int) -> int:
        self._serial += 1
        self._open[self._serial] = _OpenBatch((self._items_read, self._tokens_read))
        return self._serial

    def _close_the_old(self, closed: list[Batch[T]]) -> None:
        """At most one batch can have come of age, but pieces of one item come in a row."""
        while self._open:
            serial = next(iter(self._open))
            items, tokens = self._open[serial].opened_at
            if (
                self._items_read - items < self._max_open_items
                and self._tokens_read - tokens <= self._max_age
            ):
                return
            closed.append(self._close(serial))

    def _close(self, serial: int) -> Batch[T]:
        batch = self._open.pop(serial)
        room = (self._budget - batch.tokens, serial)
        del self._by_room[bisect_left(self._by_room, room)]
        return batch.closed(self._budget)
