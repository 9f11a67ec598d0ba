"""What goes together: packing items into batches under a token budget. No clock, no I/O.

Invariant: every item, or every piece of one that was split, is in exactly one
batch; no batch is empty; only a batch flagged `oversize` costs more than the
budget, and it holds one item. `_fitting` has the rules, over sizes alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, Literal, TypeAlias, TypeVar, final

from tokenflow._errors import RequestTooLarge, WrongResultCount
from tokenflow._usage import token_count

from ._bounds import fewest_batches
from ._fitting import Group, Limits, best_fit, next_fit

__all__ = ["Batch", "Oversize", "lower_bound", "pack", "restore"]

T = TypeVar("T")
R = TypeVar("R")
V = TypeVar("V")

Oversize: TypeAlias = Literal["alone", "raise"] | Callable[[T, int], Iterable[T]]
"""What becomes of an item above the budget: a batch of its own, an error, or pieces.

A function gets the item and the budget and returns pieces that fit.
"""


@final
@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Items that go together.

    `indices` are their places in the input, so `restore` can put results back.
    `tokens` is what the batch costs: the sum of its items, or longest x count
    where it was packed `padded`. `oversize` marks one item above the budget.
    `parts` is empty unless the input had items that were split: then it says
    which piece of its item each one is.
    """

    items: tuple[T, ...]
    indices: tuple[int, ...]
    tokens: int
    oversize: bool = False
    parts: tuple[int, ...] = ()

    def __len__(self) -> int:
        """How many items: never 0."""
        return len(self.items)


@final
class _Draft(Generic[T]):
    """A batch while it is written: laid out as one, so that it can become one."""

    __slots__ = ("indices", "items", "oversize", "parts", "tokens")

    items: tuple[T, ...]
    indices: tuple[int, ...]
    tokens: int
    oversize: bool
    parts: tuple[int, ...]


def made(
    items: tuple[T, ...],
    indices: tuple[int, ...],
    tokens: int,
    oversize: bool,
    parts: tuple[int, ...],
) -> Batch[T]:
    """`Batch(...)` at a third of the cost, most of which is to get past being frozen."""
    draft: Any = _Draft()
    draft.items = items
    draft.indices = indices
    draft.tokens = tokens
    draft.oversize = oversize
    draft.parts = parts
    draft.__class__ = Batch
    return draft  # type: ignore[no-any-return]


def pack(
    items: Iterable[T],
    token_budget: int,
    *,
    tokens: Callable[[T], int],
    max_items: int | None = None,
    padded: bool = False,
    strategy: Literal["in_order", "best_fit"] = "in_order",
    oversize: Oversize[T] = "alone",
) -> list[Batch[T]]:
    """Pack `items` into batches of at most `token_budget` tokens and `max_items` items.

    `"in_order"` keeps the order, across batches and across oversize items:

    >>> [batch.items for batch in pack([10, 60_000, 20], 50_000, tokens=int)]
    [(10,), (60000,), (20,)]

    `"best_fit"` needs close to the fewest batches there can be (`lower_bound`);
    a batch's items are in input order, the batches are not. With `padded` a
    batch costs its longest item times its count, as a tensor does; `"best_fit"`
    then sorts by length, which gives the fewest batches there can be.

    Zero-token items are kept and count as items.

    Raises:
        ValueError: a budget or cap that is not an int >= 1, before anything is read.
        RequestTooLarge: `oversize="raise"` and an item above the budget, by index.
    """
    limits = Limits.checked(token_budget, max_items, padded)
    if strategy not in ("in_order", "best_fit"):
        raise ValueError(f'strategy must be "in_order" or "best_fit", not {strategy!r}')
    pieces = _measured(tuple(items), limits, tokens, checked_oversize(oversize))
    fit = next_fit if strategy == "in_order" else best_fit
    return list(pieces.batches(fit(pieces.sizes, limits), limits.token_budget))


def restore(
    batches: Sequence[Batch[T]],
    results: Iterable[Sequence[R]],
    *,
    join: Callable[[list[R]], R] | None = None,
) -> list[R]:
    """Put results back in input order: `results[k]` holds one result per item of `batches[k]`.

    >>> batches = pack(["aaa", "b", "cc"], 4, tokens=len, strategy="best_fit")
    >>> restore(batches, [[item.upper() for item in batch.items] for batch in batches])
    ['AAA', 'B', 'CC']

    An item that was split has several results; `join` gets them in order and
    makes them one (an average of embeddings, say).

    Raises:
        WrongResultCount: more or fewer results than a batch has items.
        ValueError: a batch is missing or came twice, or split items without `join`.
    """
    rows = list(results)
    if len(rows) != len(batches):
        raise wrong_count("restore() of all batches", len(batches), len(rows))
    found: defaultdict[int, dict[int, R]] = defaultdict(dict)
    for batch, row in zip(batches, rows, strict=True):
        if len(row) != len(batch):
            raise wrong_count(f"the batch of item {batch.indices[0]}", len(batch), len(row))
        parts = batch.parts or (0,) * len(batch)
        for index, part, result in zip(batch.indices, parts, row, strict=True):
            if part in found[index]:
                raise ValueError(f"item {index} came twice: pass each batch once")
            found[index][part] = result
    return [_joined(found, index, join) for index in range(len(found))]


def _joined(found: dict[int, dict[int, R]], index: int, join: Callable[[list[R]], R] | None) -> R:
    """The result of one item, whole or in pieces; say so if part of it is missing."""
    parts = found.get(index, {})
    if len(parts) == 1 and 0 in parts:
        return parts[0]
    if len(parts) == 0 or max(parts) >= len(parts):
        raise ValueError(f"item {index} or a piece of it has no result: pass every batch")
    if join is None:
        raise ValueError(f"item {index} was split in {len(parts)}: pass join= to make one of them")
    return join([parts[part] for part in range(len(parts))])


def lower_bound(
    items: Iterable[T],
    token_budget: int,
    *,
    tokens: Callable[[T], int],
    max_items: int | None = None,
    padded: bool = False,
) -> int:
    """Return a number of batches that no packing can go below, to report quality against.

    The largest of: tokens over budget (L1), items over `max_items`, L2 of
    Martello and Toth (1990), which sees that items above half the budget cannot
    meet, and how few items even the shortest are that long ones can take along.
    Oversize items count one batch each. With `padded` the bound is exact: the
    longest item needs some batch, and no packing does better than to fill that
    batch with the next longest ones. O(n log n).

    >>> lower_bound([60, 60, 60], 100, tokens=int)
    3
    """
    limits = Limits.checked(token_budget, max_items, padded)
    sizes = _sizes(items, tokens)
    if padded:
        return sum(1 for _ in best_fit(sizes, limits))
    fitting = Counter(size for size in sizes if size <= limits.token_budget)
    distinct = sorted(fitting)
    counts = [fitting[size] for size in distinct]
    alone = len(sizes) - fitting.total()
    return alone + fewest_batches(
        distinct, counts, limits.token_budget, limits.max_items or max(1, len(sizes))
    )


def checked_oversize(oversize: Oversize[T]) -> Oversize[T]:
    """Return it, or say what it may be."""
    if not callable(oversize) and oversize not in ("alone", "raise"):
        raise ValueError(f'oversize must be "alone", "raise" or a function, not {oversize!r}')
    return oversize


def pieces_of(
    item: T, index: int, size: int, budget: int, tokens: Callable[[T], int], oversize: Oversize[T]
) -> list[tuple[T, int]]:
    """Apply the oversize rule to an item above the budget: (piece, tokens) of what remains.

    A split that returns nothing, or a piece that is still too large, is an
    error: tokens never get lost in silence.
    """
    if oversize == "alone":
        return [(item, size)]
    if oversize == "raise":
        raise too_large(f"item {index}", size, budget)
    pieces = [
        (piece, token_count(tokens(piece), "tokens(piece)")) for piece in oversize(item, budget)
    ]
    if not pieces:
        raise ValueError(f"oversize() returned no piece of item {index}: it would be lost")
    for _, piece_size in pieces:
        if piece_size > budget:
            raise too_large(f"a piece of item {index}", piece_size, budget)
    return pieces


def wrong_count(what: str, expected: int, received: int) -> WrongResultCount:
    """The error for results that cannot be matched to what they are for."""
    return WrongResultCount(
        f"{what} needs {expected} results, one for each, and got {received}",
        expected=expected,
        received=received,
    )


def too_large(what: str, size: int, budget: int) -> RequestTooLarge:
    """The error for one item above the budget."""
    return RequestTooLarge(
        f"{what} has {size} tokens, above the budget of {budget}: split it, or raise the budget",
        cost=size,
        limit=budget,
    )


@final
@dataclass(frozen=True, slots=True)
class _Pieces(Generic[T]):
    """What is to be packed, in parallel; the last two only where something was split.

    Tuples, since the garbage collector forgets about those that hold nothing of
    interest to it; lists of a million it would visit again and again meanwhile.
    """

    items: tuple[T, ...]
    sizes: tuple[int, ...]
    indices: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()

    def batches(self, groups: Iterable[Group], budget: int) -> Iterator[Batch[T]]:
        """The batches of the pieces at these places."""
        for places, cost in groups:
            items = _at(places, self.items)
            indices = _at(places, self.indices) if self.indices else tuple(places)
            parts = _at(places, self.parts) if self.parts else ()
            yield made(items, indices, cost, cost > budget, parts)


def _at(places: list[int], values: Sequence[V]) -> tuple[V, ...]:
    """The values at these places, by C code that wants at least two of them."""
    return itemgetter(*places)(values) if len(places) > 1 else (values[places[0]],)


def _sizes(items: Iterable[T], tokens: Callable[[T], int]) -> tuple[int, ...]:
    """Count every item. The loop over wrong or foreign ints only runs when there are any."""
    sizes = tuple(map(tokens, items))
    if set(map(type, sizes)) <= {int} and min(sizes, default=0) >= 0:
        return sizes
    return tuple(token_count(size, f"tokens(items[{index}])") for index, size in enumerate(sizes))


def _measured(
    items: tuple[T, ...], limits: Limits, tokens: Callable[[T], int], oversize: Oversize[T]
) -> _Pieces[T]:
    """Count every item and apply the oversize rule."""
    sizes = _sizes(items, tokens)
    budget = limits.token_budget
    if oversize == "alone" or max(sizes, default=0) <= budget:
        return _Pieces(items, sizes)
    pieces: list[tuple[T, int, int, int]] = []
    for index, (item, size) in enumerate(zip(items, sizes, strict=True)):
        split = [(item, size)]
        if size > budget:
            split = pieces_of(item, index, size, budget, tokens, oversize)
        pieces += [(piece, size, index, part) for part, (piece, size) in enumerate(split)]
    return _Pieces(*zip(*pieces, strict=True))
