"""Packing: the failures of others as named tests, and the promises as properties."""

from __future__ import annotations

import math
import pickle
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenflow
from tests.conftest import Trace
from tokenflow import (
    Batch,
    RequestTooLarge,
    WrongResultCount,
    lower_bound,
    pack,
    pack_stream,
    pack_stream_async,
    providers,
    restore,
)
from tokenflow.batching._patterns import _AIMS, _towards_the_mean

Strategy = Any  # Literal["in_order", "best_fit"], which Hypothesis draws as str
STRATEGIES = ("in_order", "best_fit")


def size(item: int) -> int:
    return item


def contents(batches: list[Batch[int]]) -> list[list[int]]:
    return [list(batch.items) for batch in batches]


def halves(item: int, budget: int) -> list[int]:
    return [min(budget, item - start) for start in range(0, item, budget)]


# How it has gone wrong elsewhere.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_oversize_item_does_not_block_the_next(strategy: Strategy) -> None:
    """text-embeddings-inference 723: popped, over budget, pushed back, for ever."""
    batches = pack([11, 1], 10, tokens=size, strategy=strategy)
    assert contents(batches) == [[11], [1]]
    assert [batch.oversize for batch in batches] == [True, False]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_long_item_is_named_or_split_or_alone(strategy: Strategy) -> None:
    """fairseq 2650, 2318: one long item aborts the run."""
    items = [5, 201, 5]
    assert sorted(contents(pack(items, 200, tokens=size, strategy="in_order"))) == [[5], [5], [201]]
    with pytest.raises(
        RequestTooLarge, match="item 1 has 201 tokens, above the budget of 200"
    ) as e:
        pack(items, 200, tokens=size, strategy=strategy, oversize="raise")
    assert (e.value.cost, e.value.limit) == (201, 200)
    pieces = pack(items, 200, tokens=size, strategy=strategy, oversize=halves)
    assert sorted(item for batch in pieces for item in batch.items) == [1, 5, 5, 200]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("padded", [False, True])
def test_a_first_item_that_is_oversize_makes_no_empty_batch(
    strategy: Strategy, padded: bool
) -> None:
    """OpenNMT-py 1484."""
    batches = pack([99, 1, 1], 10, tokens=size, strategy=strategy, padded=padded)
    assert contents(batches) == [[99], [1, 1]]


def test_order_is_kept_across_oversize_items() -> None:
    batches = pack([10, 60_000, 20], 50_000, tokens=size)
    assert contents(batches) == [[10], [60_000], [20]]


def test_padded_cost_is_checked_after_the_longest_has_changed() -> None:
    """CTranslate2 939, pytorch/data 788: real lengths were summed, but the tensor is padded."""
    assert contents(pack([100, 10, 10], 130, tokens=size, padded=True)) == [[100], [10, 10]]
    assert contents(pack([10, 10, 100], 130, tokens=size, padded=True)) == [[10, 10], [100]]
    assert [b.tokens for b in pack([10, 4], 20, tokens=size, padded=True)] == [20]


def test_no_token_is_lost_in_silence() -> None:
    """trl 5075, 4632: truncation lost 99.8 % of the tokens."""
    items = [9_000, 3, 20_000]
    pieces = pack(items, 1_000, tokens=size, strategy="best_fit", oversize=halves)
    assert sum(batch.tokens for batch in pieces) == sum(items)
    with pytest.raises(ValueError, match="no piece of item 0: it would be lost"):
        pack([11], 10, tokens=size, oversize=lambda item, budget: [])
    with pytest.raises(RequestTooLarge, match="a piece of item 0 has 12 tokens"):
        pack([13], 10, tokens=size, oversize=lambda item, budget: [12, 1])


@pytest.mark.parametrize("budget", [8_191, 8_192, 8_193, 7_919, 2**61 - 1])
def test_a_budget_need_not_be_a_power_of_two(budget: int) -> None:
    """trl 3887: at other budgets nothing was packed at all."""
    rng = random.Random(budget)
    items = [rng.randint(1, budget // 4) for _ in range(2_000)]
    packed = len(pack(items, budget, tokens=size, strategy="best_fit"))
    assert packed <= 1.005 * lower_bound(items, budget, tokens=size) + 1


def test_neighbouring_budgets_differ_by_a_batch_at_most() -> None:
    rng = random.Random(3_887)
    items = [min(8_192, int(rng.lognormvariate(7, 1))) for _ in range(3_000)]
    counts = [len(pack(items, b, tokens=size, strategy="best_fit")) for b in (8_192, 8_193)]
    assert abs(counts[0] - counts[1]) <= 1


def test_a_budget_of_one() -> None:
    assert contents(pack([1, 0, 1], 1, tokens=size)) == [[1, 0], [1]]
    assert contents(pack([1, 1], 1, tokens=size, strategy="best_fit")) == [[1], [1]]


def largest_first(items: list[int], budget: int, cap: int) -> list[list[int]]:
    """Best fit by its definition: each batch takes the largest item that fits, again and again."""
    left = sorted(items, reverse=True)
    batches: list[list[int]] = []
    while left:
        batch = [left.pop(0)]
        while len(batch) < cap:
            fits = [item for item in left if sum(batch) + item <= budget]
            if not fits:
                break
            left.remove(fits[0])
            batch.append(fits[0])
        batches.append(batch)
    return batches


@given(st.lists(st.integers(0, 130), max_size=60), st.integers(1, 100))
def test_best_fit_is_what_its_name_says(items: list[int], budget: int) -> None:
    """trl 3645, binpacking 4: equal to a slow reference."""
    packed = contents(pack(items, budget, tokens=size, strategy="best_fit"))
    assert [sorted(batch, reverse=True) for batch in packed] == largest_first(items, budget, 10**6)


def aimed(items: list[int], budget: int, cap: int, aim: tuple[int, int, int]) -> list[list[int]]:
    """A rule under an item cap by its definition; a batch is made again while it can be."""
    seeds, share, of = aim
    left = Counter(items)
    batches: list[list[int]] = []
    while left:
        slots = Fraction(left.total(), fewest_by_sums(left, budget, cap))
        batch: list[int] = []
        while len(batch) < cap:
            room, ahead = budget - sum(batch), slots - len(batch)
            fits = sorted(item for item in left - Counter(batch) if item <= room)
            if not fits:
                break
            low = [item for item in fits if item * ahead * of <= room * share]
            aims = len(batch) >= seeds and ahead > 1
            batch.append(fits[-1] if not aims else low[-1] if low else fits[0])
        while Counter(batch) <= left:
            left -= Counter(batch)
            batches.append(batch)
    return batches


def fewest_by_sums(left: Counter[int], budget: int, cap: int) -> int:
    tokens = sum(size * count for size, count in left.items())
    return max(math.ceil(Fraction(tokens, budget)), math.ceil(Fraction(left.total(), cap)))


@given(
    st.lists(st.integers(0, 100) | st.integers(18, 24), max_size=40),
    st.integers(100, 150),
    st.integers(1, 8),
    st.sampled_from(_AIMS),
)
def test_each_rule_under_a_cap_is_what_it_says(
    items: list[int], budget: int, cap: int, aim: tuple[int, int, int]
) -> None:
    sizes = sorted(set(items))
    patterns = _towards_the_mean(sizes, [items.count(size) for size in sizes], budget, cap, aim)
    packed = []
    for kinds, cost, times in patterns:
        packed += [[sizes[kind - 1] for kind in kinds]] * times
        assert cost == sum(packed[-1])
    assert packed == aimed(items, budget, cap, aim)


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(100, 150), st.integers(1, 8))
def test_best_fit_under_a_cap_is_the_best_of_its_rules(
    items: list[int], budget: int, cap: int
) -> None:
    fewest = min(
        [len(largest_first(items, budget, cap))]
        + [len(aimed(items, budget, cap, aim)) for aim in _AIMS]
    )
    packed = pack(items, budget, tokens=size, strategy="best_fit", max_items=cap)
    assert len(packed) == fewest


@pytest.mark.parametrize("bad", [0, -1, True, math.nan, math.inf, 1.0, "7"])
@pytest.mark.parametrize("name", ["token_budget", "max_items", "open_batches", "max_open_items"])
def test_nonsense_bounds_are_refused_before_anything_is_read(bad: Any, name: str) -> None:
    """more-itertools 1270."""

    def untouchable() -> Iterator[int]:
        raise AssertionError("it was read")
        yield 1

    arguments: dict[str, Any] = {"token_budget": 10, "tokens": size, name: bad}
    calls: list[Callable[..., Any]] = [pack_stream, pack_stream_async]
    if name in ("token_budget", "max_items"):
        calls += [pack, lower_bound]
    for call in calls:
        with pytest.raises(ValueError, match=f"{name} must be an int >= 1, not"):
            call(untouchable(), **arguments)


@pytest.mark.parametrize("choice", ["oversize", "strategy"])
def test_unknown_choices_are_refused(choice: Any) -> None:
    with pytest.raises(ValueError, match=f"{choice} must be"):
        pack([1], 10, tokens=size, **dict[str, Any]({choice: "truncate"}))


@pytest.mark.parametrize("bad", [-1, True, 1.5, math.nan, None])
def test_nonsense_counts_are_refused_by_index(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"tokens\(items\[1\]\) must be an int >= 0"):
        pack([1, bad], 10, tokens=lambda item: item)


def test_a_strict_stream_lets_out_what_it_holds_before_it_raises() -> None:
    """more-itertools' strict mode loses the pending batch."""
    stream = pack_stream([4, 4, 11, 4], 10, tokens=size, oversize="raise")
    assert next(stream).items == (4, 4)
    with pytest.raises(RequestTooLarge, match="item 2 has 11 tokens"):
        next(stream)


def test_a_source_that_breaks_off_loses_nothing() -> None:
    def source() -> Iterator[int]:
        yield 4
        raise OSError("gone")

    stream = pack_stream(source(), 10, tokens=size)
    assert next(stream).items == (4,)
    with pytest.raises(OSError, match="gone"):
        next(stream)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_and_items_of_a_request_both_hold(strategy: Strategy) -> None:
    """langchain 31227, llama_index 11696: one of the two limits was forgotten."""
    items = [1_000] * 400 + [1] * 5_000
    batches = pack(
        items, tokens=size, strategy=strategy, **providers.OPENAI_EMBEDDINGS.pack_arguments()
    )
    assert all(batch.tokens <= 300_000 and len(batch) <= 2_048 for batch in batches)
    assert sum(map(len, batches)) == 5_400


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_items_without_tokens_are_kept_and_counted(strategy: Strategy) -> None:
    """azure-search-openai-demo 1134."""
    batches = pack([0] * 10, 1, tokens=size, max_items=4, strategy=strategy)
    assert [len(batch) for batch in batches] == [4, 4, 2]


def test_near_linear_just_over_half_the_budget() -> None:
    """Megatron-Bridge 2953: quadratic first-fit took hours. This would time out."""
    rng = random.Random(2_953)
    items = [rng.randint(4_097, 5_000) for _ in range(100_000)]
    assert len(pack(items, 8_192, tokens=size, strategy="best_fit")) == len(items)
    assert lower_bound(items, 8_192, tokens=size) == len(items)


def test_near_linear_where_no_two_sizes_are_equal() -> None:
    items = random.Random(1).sample(range(10**12), 100_000)
    packed = pack(items, 10**13, tokens=size, strategy="best_fit")
    assert len(packed) <= lower_bound(items, 10**13, tokens=size) + 1


def conversation_like(count: int, scale: float = 1.0) -> list[int]:
    """Log-normal with the mean and spread of a conversation trace, and its lumps."""
    rng = random.Random(14)
    sizes = [min(4_200, max(1, int(rng.lognormvariate(6.75, 0.8)))) for _ in range(count)]
    return [91 if rng.random() < 0.04 else max(1, int(scale * each)) for each in sizes]


@pytest.mark.parametrize("scale", [1.0, 1.4, 1.8])
def test_packing_pays_where_a_batch_holds_a_few_items(scale: float) -> None:
    """At a mean of 10 to 25 % of the budget next-fit wastes a tenth and more, best fit nothing."""
    items = conversation_like(10_000, scale)
    assert 0.10 <= sum(items) / len(items) / 8_192 <= 0.25
    bound = lower_bound(items, 8_192, tokens=size)
    assert len(pack(items, 8_192, tokens=size)) >= 1.1 * bound
    assert len(pack(items, 8_192, tokens=size, strategy="best_fit")) <= 1.005 * bound


def test_packing_does_not_pay_where_a_batch_holds_hundreds() -> None:
    """So the default is next-fit, which keeps the order: at 300,000 tokens it wastes under 1 %."""
    items = conversation_like(40_000)
    packed = pack(items, 300_000, tokens=size)
    assert len(packed) <= 1.009 * lower_bound(items, 300_000, tokens=size) + 1


@pytest.mark.parametrize("cap", [4, 5, 6, 7, 8, 10, 12])
def test_an_item_cap_does_not_spoil_the_packing(cap: int) -> None:
    """Largest first alone needs up to 1.29 times the bound at a cap near the mean."""
    items = conversation_like(10_000)
    arguments: dict[str, Any] = {"tokens": size, "max_items": cap}
    packed = pack(items, 8_192, strategy="best_fit", **arguments)
    assert len(packed) <= 1.01 * lower_bound(items, 8_192, **arguments)


NAMES = ("azure_2023_code", "azure_2023_conv")


def lengths(trace: Trace, name: str) -> list[int]:
    return [tokens for tokens, _ in trace(name) if tokens <= 8_192]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cap", [None, *range(4, 13)])
def test_best_fit_on_traces(name: str, cap: int | None, trace: Trace) -> None:
    items = lengths(trace, name)
    packed = pack(items, 8_192, tokens=size, max_items=cap, strategy="best_fit")
    excess = 1.002 if cap is None else 1.01
    assert len(packed) <= excess * lower_bound(items, 8_192, tokens=size, max_items=cap)


@pytest.mark.parametrize("name", NAMES)
def test_streams_and_padding_on_traces(name: str, trace: Trace) -> None:
    items = lengths(trace, name)
    bound = lower_bound(items, 8_192, tokens=size)
    for open_batches, excess in ((4, 1.07), (16, 1.016)):
        stream = pack_stream(items, 8_192, tokens=size, open_batches=open_batches)
        assert sum(1 for _ in stream) <= excess * bound
    padded = pack(items, 32_768, tokens=size, padded=True, strategy="best_fit")
    assert sum(batch.tokens for batch in padded) <= 1.008 * sum(items)


@pytest.mark.parametrize(("open_batches", "excess"), [(4, 1.08), (16, 1.02)])
def test_a_stream_is_close_to_the_bound(open_batches: int, excess: float) -> None:
    items = conversation_like(10_000)
    stream = pack_stream(iter(items), 8_192, tokens=size, open_batches=open_batches)
    assert sum(1 for _ in stream) <= excess * lower_bound(items, 8_192, tokens=size)


def test_look_ahead_is_counted_in_tokens() -> None:
    """A look-ahead of 64 items at a budget of 300,000 makes four times too many batches."""
    items = conversation_like(10_000)
    batches = list(pack_stream(items, 300_000, tokens=size))
    assert len(batches) <= lower_bound(items, 300_000, tokens=size) + 4


def test_padded_in_order_of_size_wastes_little() -> None:
    items = conversation_like(10_000)
    packed = pack(items, 32_768, tokens=size, padded=True, strategy="best_fit")
    assert sum(batch.tokens for batch in packed) <= 1.01 * sum(items)


def fewest_padded(items: list[int], budget: int) -> int:
    """The optimum over sorted runs, by dynamic programming."""
    items = sorted(items)
    best = [0]
    for end in range(1, len(items) + 1):
        starts = [s for s in range(end) if s == end - 1 or items[end - 1] * (end - s) <= budget]
        best.append(1 + min(best[s] for s in starts))
    return best[-1]


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 60))
def test_padded_best_fit_is_optimal(items: list[int], budget: int) -> None:
    packed = pack(items, budget, tokens=size, padded=True, strategy="best_fit")
    bound = lower_bound(items, budget, tokens=size, padded=True)
    assert len(packed) == bound == fewest_padded(items, budget)


@pytest.mark.parametrize(
    ("items", "bound"),
    [
        ([], 0),
        ([0], 1),
        ([60, 60, 60], 3),  # L1 says 2
        ([60, 60, 45, 45], 3),  # a threshold above 40: neither 45 meets a 60
        ([70, 70, 30, 30], 2),
        ([101, 1], 2),
        ([1] * 10, 1),
    ],
)
def test_the_bound_sees_what_cannot_meet(items: list[int], bound: int) -> None:
    assert lower_bound(items, 100, tokens=size) == bound


def l2(items: list[int], budget: int) -> int:
    """Martello and Toth's second bound, by its definition."""
    best = 0
    for threshold in range(budget // 2 + 1):
        alone = [item for item in items if item > budget - threshold]
        wide = [item for item in items if budget // 2 < item <= budget - threshold]
        small = [item for item in items if threshold <= item <= budget // 2]
        rest = sum(small) - (len(wide) * budget - sum(wide))
        best = max(best, len(alone) + len(wide) + max(0, math.ceil(rest / budget)))
    return best


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(100, 130), st.integers(1, 8))
def test_quality_is_reported_against_every_bound_there_is(
    items: list[int], budget: int, cap: int
) -> None:
    """Against the sum of tokens alone, a packing that nothing can beat looks bad."""
    bound = lower_bound(items, budget, tokens=size)
    assert bound == max(l2(items, budget), bool(items)) >= math.ceil(sum(items) / budget)
    capped = lower_bound(items, budget, tokens=size, max_items=cap)
    assert capped >= max(bound, math.ceil(len(items) / cap))


def test_the_bound_sees_how_little_long_items_take_along() -> None:
    """96s have room for one 4 each: 12 items at 4 a batch would be 3, but 8 are left for 2 more."""
    assert lower_bound([96, 96] + [4] * 10, 100, tokens=size, max_items=4) == 4
    assert lower_bound([60] * 4 + [1] * 20, 100, tokens=size, max_items=4) == 6


def fewest(items: list[int], budget: int, cap: int) -> int:
    """The optimum, by trying everything."""
    best = len(items)

    def place(rest: list[int], bins: list[list[int]]) -> None:
        nonlocal best
        if len(bins) >= best and rest:
            return
        if not rest:
            best = min(best, len(bins))
            return
        for one in bins:
            if sum(one) + rest[0] <= budget and len(one) < cap:
                one.append(rest[0])
                place(rest[1:], bins)
                one.pop()
        place(rest[1:], [*bins, [rest[0]]])

    place(sorted(items, reverse=True), [])
    return best


@given(st.lists(st.integers(0, 25), max_size=7), st.integers(10, 20), st.integers(1, 4))
def test_the_bound_is_one(items: list[int], budget: int, cap: int) -> None:
    fitting = [item for item in items if item <= budget]
    optimum = fewest(fitting, budget, cap) + len(items) - len(fitting)
    assert lower_bound(items, budget, tokens=size, max_items=cap) <= optimum


# What always holds.

ITEMS = st.lists(st.integers(0, 120), max_size=50)
CAPS = st.none() | st.integers(1, 8)
OVERSIZE = st.sampled_from(["alone", halves])


def check(batches: list[Batch[int]], items: list[int], budget: int, cap: int | None) -> None:
    """Every item in exactly one batch, none empty, limits held unless flagged."""
    assert restore(batches, [batch.items for batch in batches], join=sum) == items
    for batch in batches:
        assert 0 < len(batch) == len(batch.items) <= (cap or len(items))
        assert batch.oversize == (batch.tokens > budget)
        assert not batch.oversize or len(batch) == 1


@given(ITEMS, st.integers(1, 100), CAPS, st.booleans(), st.sampled_from(STRATEGIES), OVERSIZE)
def test_packing(
    items: list[int],
    budget: int,
    cap: int | None,
    padded: bool,
    strategy: Strategy,
    oversize: Any,
) -> None:
    batches = pack(
        iter(items),
        budget,
        tokens=size,
        max_items=cap,
        padded=padded,
        strategy=strategy,
        oversize=oversize,
    )
    check(batches, items, budget, cap)
    for batch in batches:
        cost = max(batch.items) * len(batch) if padded else sum(batch.items)
        assert batch.tokens == cost
    if strategy == "in_order":
        assert [i for b in batches for i in b.indices] == sorted(
            i for b in batches for i in b.indices
        )
    if oversize == "alone":
        bound = lower_bound(items, budget, tokens=size, max_items=cap, padded=padded)
        assert len(batches) >= bound


@given(ITEMS, st.integers(1, 100), CAPS, st.integers(1, 6), st.integers(1, 30), OVERSIZE)
def test_streaming(
    items: list[int], budget: int, cap: int | None, k: int, most: int, oversize: Any
) -> None:
    read = 0

    def source() -> Iterator[int]:
        nonlocal read
        for item in items:
            read += 1
            yield item

    batches: list[Batch[int]] = []
    out = 0
    for batch in pack_stream(
        source(),
        budget,
        tokens=size,
        max_items=cap,
        open_batches=k,
        max_open_items=most,
        oversize=oversize,
    ):
        batches.append(batch)
        out += 0 if any(batch.parts) else len(batch)
        assert list(batch.indices) == sorted(batch.indices)
        assert read - batch.indices[0] <= most + 1  # nothing stays longer
    check(batches, items, budget, cap)


@given(ITEMS, st.integers(1, 100), CAPS)
def test_a_stream_with_one_open_batch_is_next_fit(
    items: list[int], budget: int, cap: int | None
) -> None:
    stream = pack_stream(items, budget, tokens=size, max_items=cap, open_batches=1)
    assert list(stream) == pack(items, budget, tokens=size, max_items=cap)


def test_a_batch_that_best_fit_overlooks_comes_of_age() -> None:
    """Room of 40 that nothing wants, while pairs of 50 come and go."""
    items = [60] + [50] * 100
    batches = list(pack_stream(items, 100, tokens=size, open_batches=4))
    place = next(i for i, batch in enumerate(batches) if batch.items == (60,))
    assert place < 10  # 2 x 4 budgets
    check(batches, items, 100, None)


def test_a_stream_reads_no_further_than_it_must() -> None:
    endless = iter(lambda: 5, None)
    stream = pack_stream(endless, 10, tokens=size, open_batches=2)
    assert [next(stream).items for _ in range(3)] == [(5, 5)] * 3


@pytest.mark.anyio
async def test_an_async_stream_is_the_same() -> None:
    async def source(*, broken: bool = False) -> AsyncIterator[int]:
        for item in (6, 5, 4, 5, 1):
            yield item
        if broken:
            raise OSError("gone")

    whole = [batch async for batch in pack_stream_async(source(), 10, tokens=size, open_batches=2)]
    assert whole == list(pack_stream([6, 5, 4, 5, 1], 10, tokens=size, open_batches=2))
    stream = pack_stream_async(source(broken=True), 10, tokens=size, open_batches=2)
    assert [await anext(stream) for _ in whole] == whole
    with pytest.raises(OSError, match="gone"):
        await anext(stream)


# Putting results back.


def test_restore_wants_one_result_per_item() -> None:
    batches = pack([3, 3, 9], 6, tokens=size)
    with pytest.raises(WrongResultCount, match="needs 2 results, one for each, and got 1") as e:
        restore(batches, [["a"], ["b"]])
    assert (e.value.expected, e.value.received) == (2, 1)
    with pytest.raises(WrongResultCount, match="all batches needs 2 results"):
        restore(batches, [["a", "b"]])


def test_restore_wants_every_batch_once() -> None:
    first, last = pack([3, 9], 6, tokens=size)
    with pytest.raises(ValueError, match="item 0 or a piece of it has no result"):
        restore([last], [["a"]])
    with pytest.raises(ValueError, match="item 0 came twice"):
        restore([first, first], [["a"], ["a"]])


def test_restore_joins_what_was_split_in_the_order_of_its_pieces() -> None:
    batches = pack(
        ["aaaabbbbcc", "d"],
        4,
        tokens=len,
        strategy="best_fit",
        oversize=lambda text, n: [text[i : i + n] for i in range(0, len(text), n)],
    )
    results = [batch.items for batch in batches]
    assert restore(batches, results, join="".join) == ["aaaabbbbcc", "d"]
    with pytest.raises(ValueError, match="item 0 was split in 3: pass join="):
        restore(batches, results)
    without = [batch for batch in batches if "aaaa" not in batch.items]
    with pytest.raises(ValueError, match="item 0 or a piece of it has no result"):
        restore(without, [batch.items for batch in without], join="".join)


def test_a_batch_that_was_packed_is_one_as_any_other() -> None:
    (batch,) = pack(["a", "b"], 2, tokens=len)
    assert type(batch) is Batch
    assert batch == Batch(("a", "b"), (0, 1), 2)
    assert hash(batch) == hash(Batch(("a", "b"), (0, 1), 2))
    with pytest.raises(FrozenInstanceError):
        batch.tokens = 3  # type: ignore[misc]
    assert replace(batch, tokens=3) == Batch(("a", "b"), (0, 1), 3)


def test_batches_and_errors_pickle() -> None:
    (batch,) = pack([1, 2], 3, tokens=size)
    assert pickle.loads(pickle.dumps(batch)) == batch
    error = WrongResultCount("why", expected=3, received=2)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.expected, copy.received) == ("why", 3, 2)
    assert isinstance(error, tokenflow.BatchError)


# Per-request limits.


@pytest.mark.parametrize("limits", providers.REQUEST_LIMITS.values(), ids=providers.REQUEST_LIMITS)
def test_presets_are_taken_by_pack(limits: providers.RequestLimits) -> None:
    """semantic-router 297, LightRAG 988, gel 9032: caps that nobody had written down."""
    items = [100] * 5_000
    batches = pack(items, tokens=size, **limits.pack_arguments())
    for batch in batches:
        assert len(batch) <= (limits.max_items or math.inf)
        assert batch.tokens <= (limits.max_tokens or math.inf)


def test_a_preset_that_has_no_token_limit_needs_a_budget() -> None:
    assert providers.COHERE_EMBEDDINGS.pack_arguments(50) == {"token_budget": 50, "max_items": 96}
    assert providers.OPENAI_EMBEDDINGS.pack_arguments(10**9)["token_budget"] == 300_000
    assert providers.COHERE_EMBEDDINGS.pack_arguments()["token_budget"] > 10**12
