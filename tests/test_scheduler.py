"""The step planner: three gates, decodes first, prompts in chunks, preemption by recompute."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tokenflow import (
    FairShare,
    Fifo,
    OutputEstimate,
    Request,
    RequestTooLarge,
    SmallestFirst,
)
from tokenflow.serving import Reserve, Step, TokenScheduler, TokenSequence
from tokenflow.serving.capacity import ACCELERATORS, MODELS, Deployment, step_seconds

from .steps import Planner, Row

LLAMA = Deployment(MODELS["Llama-3.1-8B"], ACCELERATORS["H100"])


def add(
    scheduler: TokenScheduler, prompt: int, output: int | None = 10, now: float = 0, **options: Any
) -> TokenSequence:
    request = Request(input_tokens=prompt, max_output_tokens=output)
    return scheduler.add(request, now=now, **options)


def parts(step: Step) -> list[int]:
    return [part.tokens for part in step.prefills]


def prefilled(step: Step) -> list[TokenSequence]:
    return [part.sequence for part in step.prefills]


def run(scheduler: TokenScheduler) -> Iterator[Step]:
    """Steps until all have ended."""
    for _ in range(100_000):
        if not scheduler.unfinished:
            return
        yield scheduler.step()
    raise AssertionError("it never ends")


def decoding(count: int, scheduler: TokenScheduler, output: int = 1_000) -> list[TokenSequence]:
    sequences = [add(scheduler, 1, output) for _ in range(count)]
    while any(each.state != "decoding" for each in sequences):
        scheduler.step()
    return sequences


# -- a request, from beginning to end ----------------------------------------------------------


def test_a_request_from_beginning_to_end() -> None:
    scheduler = TokenScheduler(4, 100, 1_000)
    sequence = add(scheduler, 150, 3, now=7.5, priority=2, tenant="a")
    seen = [(sequence.state, sequence.context_tokens, sequence.output_tokens)]
    for step in run(scheduler):
        assert step.tokens == len(step.decodes) + sum(parts(step))
        assert step.context_tokens in (100, 150, 151, 152)
        seen.append((sequence.state, sequence.context_tokens, sequence.output_tokens))
    assert seen == [
        ("waiting", 0, 0),
        ("prefilling", 100, 0),
        ("decoding", 150, 1),
        ("decoding", 151, 2),
        ("finished", 0, 3),
    ]
    assert (sequence.arrived, sequence.priority, sequence.tenant) == (7.5, 2, "a")
    assert sequence.request == Request(input_tokens=150, max_output_tokens=3)
    assert scheduler.statistics().held_tokens == 0


def test_the_caller_says_what_was_the_last_token() -> None:
    scheduler = TokenScheduler(4, 100, 1_000)
    sequence = add(scheduler, 50, 100)
    scheduler.step()
    assert scheduler.step().decodes == (sequence,)
    scheduler.finish(sequence)
    assert (sequence.state, sequence.output_tokens, scheduler.unfinished) == ("finished", 2, 0)
    assert scheduler.step().tokens == 0


def test_the_maximum_ends_it_without_being_told() -> None:
    scheduler = TokenScheduler(4, 100, 1_000)
    one, two = add(scheduler, 10, 1), add(scheduler, 10, 2)
    first, second = scheduler.step(), scheduler.step()
    assert first.finished == (one,)
    assert second.decodes == second.finished == (two,)
    scheduler.finish(two)  # by a caller who counts too: no harm
    assert scheduler.statistics().finished == 2


def test_embeddings_end_with_their_prompt() -> None:
    scheduler = TokenScheduler(4, 100, 1_000)
    sequence = add(scheduler, 150, 0)
    first, second = run(scheduler)
    assert (parts(first), parts(second)) == ([100], [50])
    assert second.finished == (sequence,)
    assert sequence.output_tokens == 0


def test_without_a_maximum_an_answer_fills_the_memory_or_the_window() -> None:
    for window, most in ((None, 48), (40, 40)):
        scheduler = TokenScheduler(4, 100, 50, context_window=window)
        sequence = add(scheduler, 10, None)
        assert len(list(run(scheduler))) == sequence.output_tokens == most - 10


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_it_can_end_in_any_state(end: str, steps: int) -> None:
    scheduler = TokenScheduler(2, 100, 1_000)
    add(scheduler, 80, 2)
    sequence, other = add(scheduler, 150, 3), add(scheduler, 150, 3)
    for _ in range(steps):
        scheduler.step()
    for _ in range(2):
        getattr(scheduler, end)(sequence)
    assert sequence.context_tokens == 0
    for step in run(scheduler):
        assert sequence not in step.decodes
        assert sequence not in prefilled(step)
    assert other.output_tokens == 3
    seen = scheduler.statistics()
    assert (seen.held_tokens, seen.promised_tokens, seen.waiting_tokens) == (0, 0, 0)
    assert seen.finished + seen.cancelled == 3


def test_a_sequence_is_of_one_scheduler() -> None:
    one, other = TokenScheduler(2, 10, 100), TokenScheduler(2, 10, 100)
    sequence = add(one, 10)
    for end in (other.finish, other.cancel):
        with pytest.raises(ValueError, match=r"<TokenSequence: waiting, 10 input .* not of this"):
            end(sequence)
    assert sequence.state == "waiting"


def test_many_that_leave_the_queue_leave_no_trace() -> None:
    scheduler = TokenScheduler(1, 10, 100)
    sequences = [add(scheduler, 10, 1, priority=n % 3) for n in range(1_000)]
    random.Random(1).shuffle(sequences)
    for sequence in sequences[:990]:
        scheduler.cancel(sequence)
    assert len(scheduler._prompts._lanes[True]._heap) < 200
    assert scheduler.unfinished == 10
    went = [part.sequence for step in run(scheduler) for part in step.prefills]
    assert went == sorted(sequences[990:], key=lambda each: each._key)


# -- the three gates ---------------------------------------------------------------------------


def test_a_free_slot() -> None:
    scheduler = TokenScheduler(2, 100, 1_000)
    one, two, three = (add(scheduler, 10, 2) for _ in range(3))
    assert prefilled(scheduler.step()) == [one, two]
    assert not scheduler.step().prefills
    assert prefilled(scheduler.step()) == [three]


def test_room_in_the_step() -> None:
    scheduler = TokenScheduler(8, 100, 1_000)
    sequences = [add(scheduler, 40, 1) for _ in range(3)]
    assert parts(scheduler.step()) == [40, 40, 20]
    assert parts(scheduler.step()) == [20]
    assert [each.state for each in sequences] == ["finished"] * 3


def test_free_memory_in_whole_blocks() -> None:
    """A prompt of 17 tokens takes two blocks of 16; the third request finds one of five."""
    scheduler = TokenScheduler(8, 100, 95, reserve="none")
    assert scheduler.kv_cache_tokens == 80
    add(scheduler, 17, 2)
    add(scheduler, 17, 2)
    third = add(scheduler, 17, 2)
    assert len(scheduler.step().prefills) == 2
    assert scheduler.statistics().held_tokens == 64
    scheduler.step()
    assert prefilled(scheduler.step()) == [third]


@pytest.mark.parametrize(("reserve", "admitted"), [("declared", 1), ("estimate", 4), ("none", 10)])
def test_what_is_reserved_for_answers(reserve: Reserve, admitted: int) -> None:
    """Prompts of 100, answers of up to 900, estimated at 150, in 1,000 tokens of memory."""
    scheduler = TokenScheduler(
        16, 1_600, 1_001, block_size=1, reserve=reserve, estimator=Constant(150)
    )
    for _ in range(10):
        add(scheduler, 100 if reserve != "none" else 99, 900)
    assert len(scheduler.step().prefills) == admitted


class Constant:
    """Estimates the same for all."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.observed: list[tuple[int, bool]] = []

    def estimate(self, request: Request) -> OutputEstimate:
        return OutputEstimate(self.tokens, 0.5)

    def observe(self, request: Request, output_tokens: int, *, truncated: bool = False) -> None:
        self.observed.append((output_tokens, truncated))


def test_what_is_really_held_counts_where_it_is_more_than_estimated() -> None:
    scheduler = TokenScheduler(4, 100, 100, block_size=1, estimator=Constant(5))
    add(scheduler, 40, 50)
    for _ in range(30):
        scheduler.step()
    seen = scheduler.statistics()
    assert seen.held_tokens == seen.promised_tokens == 40 + 29
    add(scheduler, 40, 5)
    assert not scheduler.step().prefills  # 40 are not free, though 60 were by the estimate


def test_estimates_learn_from_the_answers_that_end() -> None:
    estimator = Constant(5)
    scheduler = TokenScheduler(8, 100, 1_000, estimator=estimator)
    told, cut_off, gone, never = (add(scheduler, 10, n) for n in (90, 3, 90, 90))
    for _ in range(3):
        scheduler.step()
    scheduler.finish(told)
    scheduler.cancel(gone)
    scheduler.cancel(add(scheduler, 10))
    assert cut_off.state == "finished"
    assert never.state == "decoding"
    assert estimator.observed == [(3, True), (3, False), (3, True)]


def test_by_default_the_median_answer_is_reserved() -> None:
    scheduler = TokenScheduler(512, 1_024, 100_000, block_size=1)
    for length in [10, 20, 30] * 100:
        sequence = add(scheduler, 1, None)
        while sequence.output_tokens < length:
            scheduler.step()
        scheduler.finish(sequence)
    add(scheduler, 1, None)
    scheduler.step()
    assert scheduler.statistics().promised_tokens == pytest.approx(20, abs=3)


def test_more_sequences_than_a_step_has_tokens() -> None:
    with pytest.raises(
        ValueError, match=r"max_num_seqs = 257 exceeds max_num_batched_tokens = 256"
    ):
        TokenScheduler(257, 256, 1_000)
    TokenScheduler(256, 256, 1_000)


# 5.
def test_the_context_window_and_the_memory_are_two_limits() -> None:
    scheduler = TokenScheduler(8, 100, 1_600, context_window=100)
    with pytest.raises(
        RequestTooLarge, match=r"60 input tokens and up to 41 .* window of 100"
    ) as e:
        add(scheduler, 60, 41)
    assert (e.value.cost, e.value.limit) == (101, 100)
    for _ in range(8):
        add(scheduler, 60, 40)  # together far more than a window
    scheduler.step()
    assert scheduler.statistics().decoding + scheduler.statistics().prefilling == 2
    with pytest.raises(RequestTooLarge, match=r"100 input tokens and up to 1 of output"):
        add(scheduler, 100, None)

    wide = TokenScheduler(8, 100, 1_609, context_window=10_000)
    with pytest.raises(RequestTooLarge, match="exceed the 1600 tokens of the whole kv cache") as e:
        add(wide, 1_000, 601)
    assert (e.value.cost, e.value.limit) == (1_601, 1_600)
    add(wide, 1_000, 600)


# -- decodes and prompts -----------------------------------------------------------------------


def test_100_decoding_and_a_prompt_of_5000_in_a_budget_of_2048() -> None:
    """1,948 + 1,948 + 1,104; the longest gap between tokens 33.3 ms, unchunked 82.8."""
    gaps = {}
    for budget in (2_048, 8_192):
        scheduler = TokenScheduler(256, budget, 400_000)
        answers = decoding(100, scheduler)
        prompt = add(scheduler, 5_000)
        steps = []
        while prompt.state != "decoding":
            before = [each.output_tokens for each in answers]
            steps.append(scheduler.step())
            assert [each.output_tokens for each in answers] == [n + 1 for n in before]
        chunks = [tokens for step in steps for tokens in parts(step)]
        assert chunks == ([1_948, 1_948, 1_104] if budget == 2_048 else [5_000])
        gaps[budget] = max(
            step_seconds(LLAMA, tokens=s.tokens, context_tokens=s.context_tokens) for s in steps
        )
    assert 1e3 * gaps[2_048] == pytest.approx(33.3, abs=0.05)
    assert 1e3 * gaps[8_192] == pytest.approx(82.8, abs=0.05)


# 18.
def test_decodes_never_wait_for_a_prompt() -> None:
    """(vllm 31731)"""
    scheduler = TokenScheduler(64, 64, 200_000)
    answers = decoding(60, scheduler)
    add(scheduler, 100_000)
    for _ in range(100):
        step = scheduler.step()
        assert set(answers) == set(step.decodes)
        assert step.tokens == 64


# 18.
def test_one_long_prefill_does_not_eat_each_step() -> None:
    """(vllm 31731) Short prompts get half of the room, whatever the number of long ones."""
    scheduler = TokenScheduler(64, 1_000, 1_000_000)
    first, second = add(scheduler, 100_000), add(scheduler, 100_000)
    assert parts(scheduler.step()) == [1_000]  # nobody else wants it
    for _ in range(50):
        short = [add(scheduler, 200, 1) for _ in range(2)]
        step = scheduler.step()
        assert step.finished == tuple(short)
        assert sum(part.tokens for part in step.prefills if part.sequence is first) == 600
    assert second.state == "waiting"


# 18.
def test_a_flood_of_short_prompts_leaves_half_of_the_room_to_long_ones() -> None:
    scheduler = TokenScheduler(512, 1_000, 1_000_000)
    for _ in range(1_000):
        add(scheduler, 400, 1)
    long = [add(scheduler, 2_000, 1) for _ in range(2)]
    steps = [scheduler.step() for _ in range(8)]
    assert [each.state for each in long] == ["finished", "finished"]
    assert all(step.tokens == 1_000 for step in steps)


def test_odd_room_and_room_for_one_token() -> None:
    scheduler = TokenScheduler(4, 9, 1_000)
    long, short = add(scheduler, 50, 1), add(scheduler, 4, 1)
    assert {p.sequence: p.tokens for p in scheduler.step().prefills} == {short: 4, long: 5}

    narrow = TokenScheduler(4, 4, 10_000)
    decoding(3, narrow)
    first, second = add(narrow, 5, 1), add(narrow, 2, 1)
    steps = [narrow.step() for _ in range(7)]
    assert [part.sequence for step in steps for part in step.prefills] == [first] * 5 + [second] * 2


def test_lower_priorities_take_no_room_from_long_prompts() -> None:
    scheduler = TokenScheduler(64, 100, 10_000)
    long = add(scheduler, 1_000, 1, priority=1)
    batch = add(scheduler, 20, 1, priority=2)
    urgent = add(scheduler, 20, 1, priority=0)
    first = scheduler.step()
    assert {p.sequence: p.tokens for p in first.prefills} == {urgent: 20, long: 80}
    for _ in range(8):
        assert parts(scheduler.step()) == [100]
    assert parts(scheduler.step()) == [100]
    last = scheduler.step()
    assert {p.sequence: p.tokens for p in last.prefills} == {long: 20, batch: 20}


def test_lower_priorities_take_no_room_from_a_long_prompt_beside_short_ones() -> None:
    """Neither one that is under way nor one that waits."""
    scheduler = TokenScheduler(64, 100, 10_000)
    add(scheduler, 80, 1)
    batch = [add(scheduler, 45, 1, priority=1), add(scheduler, 45, 1, priority=1)]
    scheduler.step()
    long, short = add(scheduler, 1_000, 1), add(scheduler, 20, 1)
    assert {p.sequence: p.tokens for p in scheduler.step().prefills} == {short: 20, long: 80}
    assert [each.state for each in batch] == ["prefilling", "waiting"]


def test_a_prompt_under_way_is_overtaken_by_whom_the_order_puts_first() -> None:
    scheduler = TokenScheduler(64, 100, 10_000)
    batch = add(scheduler, 500, 1, priority=1)
    scheduler.step()
    urgent = add(scheduler, 250, 1)
    steps = [scheduler.step() for _ in range(3)]
    assert [{p.sequence: p.tokens for p in s.prefills} for s in steps] == [
        {urgent: 100},
        {urgent: 100},
        {urgent: 50, batch: 50},
    ]


# -- who waits for memory ----------------------------------------------------------------------


# 18.
def test_nothing_overtakes_a_head_that_memory_does_not_take() -> None:
    """(vllm 10774) Small ones keep coming; the large one goes as soon as its memory is free."""
    scheduler = TokenScheduler(64, 1_000, 1_000, block_size=1, reserve="declared")
    for length in (50, 100):
        add(scheduler, 300, length)
    scheduler.step()
    head = add(scheduler, 800, 10)
    small = []
    for _ in range(99):
        small.append(add(scheduler, 10, 5))
        assert not scheduler.step().prefills
    assert head.state == "waiting"
    assert prefilled(scheduler.step())[0] is head


# 18.
def test_what_a_blocked_head_costs_is_bounded_by_what_runs() -> None:
    """Under a flood that alone would fill the memory for ever."""
    rng = random.Random(1)
    scheduler = TokenScheduler(64, 500, 2_000, reserve="declared")
    for _ in range(100):
        add(scheduler, rng.randint(10, 100), rng.randint(5, 50))
    for _ in range(50):
        scheduler.step()
    head = add(scheduler, 1_900, 10)
    waited = 0
    while head.state == "waiting":
        add(scheduler, rng.randint(10, 100), rng.randint(5, 50))
        scheduler.step()
        waited += 1
    assert waited < 150


# 20.
@pytest.mark.parametrize(
    ("patience", "overtaken_by"), [(3.0, 2), (0.0, 0), (1e6, 200)], ids=["some", "none", "all"]
)
def test_a_queue_by_size_lets_small_ones_pass_only_so_long(
    patience: float, overtaken_by: int
) -> None:
    """A 90 and 30s, one every 100 ms. With a patience of 3 s per 1,000, those of 180 ms pass."""
    order = SmallestFirst(patience)
    scheduler = TokenScheduler(8, 100, 100, block_size=1, order=order, reserve="none")
    blocker = add(scheduler, 90)
    scheduler.step()
    large = add(scheduler, 90, 1, now=0.0)
    small = [add(scheduler, 30, 1, now=0.1 * n) for n in range(200)]
    assert not scheduler.step().prefills
    scheduler.finish(blocker)
    went = [sequence for step in run(scheduler) for sequence in prefilled(step)]
    assert sum(went.index(each) < went.index(large) for each in small) == overtaken_by


# 20.
def test_a_later_30_overtakes_a_waiting_60_and_a_90_is_not_pending_for_ever() -> None:
    scheduler = TokenScheduler(1, 100, 100, block_size=1, order=SmallestFirst(), reserve="none")
    ninety = add(scheduler, 90, 1, now=0.0)
    sixty = add(scheduler, 60, 1, now=0.0)
    thirty = add(scheduler, 30, 1, now=0.05)
    went: list[TokenSequence] = []
    for n in range(200):
        add(scheduler, 10, 1, now=0.05 * n)
        went += prefilled(scheduler.step())
    order = [went.index(each) for each in (thirty, sixty, ninety)]
    assert order == sorted(order)
    assert went.index(ninety) < 10


def test_fair_share_between_tenants() -> None:
    """Two that always have something waiting; the answers of one are ten times the estimate."""
    scheduler = TokenScheduler(1, 100, 1_000, order=FairShare(), estimator=Constant(10))
    answer, had = {"as estimated": 10, "more": 100}, {"as estimated": 0, "more": 0}
    for tenant in (*answer, *answer):
        add(scheduler, 10, answer[tenant], tenant=tenant)
    for _ in range(3_000):
        for sequence in scheduler.step().finished:
            tenant = str(sequence.tenant)
            had[tenant] += 10 + sequence.output_tokens
            add(scheduler, 10, answer[tenant], tenant=tenant)
            assert abs(had["as estimated"] - had["more"]) <= 4 * 110
    assert min(had.values()) > 1_000


def test_a_tenant_that_was_idle_has_no_credit() -> None:
    scheduler = TokenScheduler(1, 100, 1_000, order=FairShare(), estimator=Constant(1))
    for _ in range(20):
        add(scheduler, 10, 1, tenant="busy")
    for _ in run(scheduler):
        pass
    for tenant in ("busy", "idle") * 3:
        add(scheduler, 10, 1, tenant=tenant)
    went = [str(p.sequence.tenant) for step in run(scheduler) for p in step.prefills]
    assert sorted(went[:2]) == sorted(went[2:4]) == ["busy", "idle"]


def test_accounts_are_kept_while_tenants_wait() -> None:
    """Also of so many that those without anything to their account are forgotten."""
    scheduler = TokenScheduler(1, 100, 1_000, order=FairShare(), estimator=Constant(1))
    busy = [add(scheduler, 50, 1, tenant="busy") for _ in range(10)]
    for tenant in range(100):
        add(scheduler, 10, 1, tenant=tenant)
    late = add(scheduler, 10, 1, tenant="late")
    went = [p.sequence for step in run(scheduler) for p in step.prefills]
    assert went.index(late) < went.index(busy[1])


def test_what_is_cancelled_in_the_queue_costs_its_tenant_nothing() -> None:
    scheduler = TokenScheduler(1, 100, 1_000, order=FairShare())
    add(scheduler, 10, 1, tenant="c")
    scheduler.step()
    for _ in range(50):
        scheduler.cancel(add(scheduler, 10, 1, tenant="a"))
    wanted = [add(scheduler, 10, 1, tenant=t) for t in ("a", "b", "a", "b")]
    assert [p.sequence for s in run(scheduler) for p in s.prefills] == wanted


# -- preemption --------------------------------------------------------------------------------


# 19.
def test_a_preempted_request_keeps_its_place() -> None:
    """(vllm 41951) c has to give way to a and b, and comes before d, which arrived later."""
    scheduler = TokenScheduler(3, 1_000, 90, block_size=1, reserve="none")
    a, b, c, d = (add(scheduler, 25, 40) for _ in range(4))
    preempted: list[TokenSequence] = []
    went: list[TokenSequence] = []
    for step in run(scheduler):
        preempted += step.preempted
        went += prefilled(step)
    assert preempted[0] is c
    assert went[:3] == [a, b, c]
    assert went.index(c, 3) < went.index(d)
    assert [each.output_tokens for each in (a, b, c, d)] == [40] * 4
    assert c.preemptions == preempted.count(c)


def test_the_lowest_priority_gives_way_and_among_equals_the_youngest() -> None:
    scheduler = TokenScheduler(8, 1_000, 100, block_size=1, reserve="none")
    low = add(scheduler, 19, 60, priority=1)
    scheduler.step()
    high = [add(scheduler, 25, 60) for _ in range(3)]
    order: list[TokenSequence] = []
    while len(order) < 3:
        order += scheduler.step().preempted
    assert order == [low, high[2], high[1]]


def test_a_preempted_answer_loses_no_token() -> None:
    scheduler = TokenScheduler(2, 64, 64, block_size=4, reserve="none")
    old, young = add(scheduler, 20, 30), add(scheduler, 20, 30)
    produced: dict[TokenSequence, int] = {old: 0, young: 0}
    for step in run(scheduler):
        for sequence in (*step.decodes, *(p.sequence for p in step.prefills if p.last)):
            produced[sequence] += 1
        for sequence in step.preempted:
            assert (sequence.state, sequence.context_tokens) == ("waiting", 0)
            assert sequence.output_tokens == produced[sequence]
        assert not (step.preempted and step.prefills)
    assert produced == {old: 30, young: 30}
    assert (old.preemptions, young.preemptions) == (0, 1)
    seen = scheduler.statistics()
    assert seen.preemptions == 1
    assert seen.prefilled_tokens + seen.decoded_tokens == 2 * (20 + 29) + seen.recomputed_tokens


def test_a_prompt_under_way_gives_way_too() -> None:
    scheduler = TokenScheduler(4, 10, 100, block_size=1, reserve="none")
    old = add(scheduler, 5, 60)
    scheduler.step()
    young = add(scheduler, 92, 1)
    step = scheduler.step()
    while not step.preempted:
        step = scheduler.step()
    assert step.preempted == (young,)
    assert young.context_tokens == 0
    assert old.state == "decoding"
    list(run(scheduler))
    assert (old.output_tokens, young.output_tokens) == (60, 1)


@pytest.mark.parametrize("output", [12, 16, 17, 50])
def test_who_comes_back_soon_is_not_taken_for_whom_it_was(output: int) -> None:
    """When it needs a block, and when it ends, is later by the steps it missed."""
    scheduler = TokenScheduler(2, 100, 96, reserve="none")
    old, young = add(scheduler, 40, 50), add(scheduler, 33, output)
    while not scheduler.step().preempted:
        pass
    assert (young.preemptions, young.output_tokens) == (1, 9)
    scheduler.cancel(old)
    for _ in run(scheduler):
        blocks = -(-young.context_tokens // 16)
        assert scheduler.statistics().held_tokens == 16 * blocks
    assert young.output_tokens == output


def test_a_last_step_may_need_a_block_too() -> None:
    scheduler = TokenScheduler(2, 100, 16, block_size=4, reserve="none")
    old, young = add(scheduler, 4, 6), add(scheduler, 3, 9)
    steps = [scheduler.step() for _ in range(6)]
    assert [step.preempted for step in steps] == [()] * 5 + [(young,)]
    assert steps[5].finished == (old,)


def test_a_last_token_needs_no_memory() -> None:
    """Nothing is computed from it."""
    scheduler = TokenScheduler(4, 100, 100, block_size=1)
    first, second = add(scheduler, 50, 1), add(scheduler, 50, 1)
    assert scheduler.step().finished == (first, second)


@pytest.mark.parametrize("order", [Fifo(), SmallestFirst(), FairShare()], ids=repr)
def test_declared_answers_never_preempt(order: Fifo | SmallestFirst | FairShare) -> None:
    rng = random.Random(1)
    scheduler = TokenScheduler(16, 200, 1_000, order=order, reserve="declared")
    for n in range(300):
        add(scheduler, rng.randint(1, 300), rng.randint(1, 300), now=n / 10, tenant=n % 3)
    for _ in run(scheduler):
        pass
    assert scheduler.statistics().preemptions == 0


# -- prefixes ----------------------------------------------------------------------------------

SYSTEM = [("system", 64)]


def test_shared_blocks_count_once_and_are_computed_once() -> None:
    scheduler = TokenScheduler(8, 1_000, 400, reserve="none")
    first = add(scheduler, 80, 5, prefix=SYSTEM)
    assert parts(scheduler.step()) == [80]
    others = [add(scheduler, 80, 5, prefix=SYSTEM) for _ in range(4)]
    step = scheduler.step()
    assert parts(step) == [16] * 4
    assert step.context_tokens == 81 + 4 * 80  # each reads all of its own
    assert all(each.context_tokens == 80 for each in others)
    seen = scheduler.statistics()
    assert seen.held_tokens == 64 + 32 + 4 * 16
    assert seen.cached_tokens == 4 * 64
    scheduler.cancel(first)
    assert scheduler.statistics().held_tokens == 64 + 4 * 16
    list(run(scheduler))
    assert scheduler.statistics().held_tokens == 0


def test_only_whole_blocks_are_shared() -> None:
    scheduler = TokenScheduler(8, 1_000, 400)
    add(scheduler, 80, 5, prefix=[("system", 63)])
    scheduler.step()
    add(scheduler, 80, 5, prefix=[("system", 63)])
    assert parts(scheduler.step()) == [80 - 48]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    scheduler = TokenScheduler(8, 1_000, 400)
    add(scheduler, 64, 5, prefix=SYSTEM)
    scheduler.step()
    same = add(scheduler, 64, 5, prefix=SYSTEM)
    assert parts(scheduler.step()) == [1]
    assert same.output_tokens == 1


def test_equal_parts_after_different_beginnings_are_different() -> None:
    scheduler = TokenScheduler(8, 1_000, 1_000)
    add(scheduler, 128, 5, prefix=[("english", 32), ("manual", 64)])
    scheduler.step()
    for prefix, skipped in (
        ([("english", 32), ("manual", 64)], 96),
        ([("english", 32), ("story", 64)], 32),
        ([("german", 32), ("manual", 64)], 0),
        ([("english", 48)], 0),
        ([("english", 32)], 32),
    ):
        add(scheduler, 128, 5, prefix=prefix)
        assert parts(scheduler.step()) == [128 - skipped]


def test_a_prefix_that_is_not_complete_yet_is_computed_by_each_but_held_once() -> None:
    """The second comes first, by priority, while the first is under way."""
    scheduler = TokenScheduler(8, 60, 400, reserve="none")
    first = add(scheduler, 80, 5, prefix=SYSTEM, priority=1)
    scheduler.step()
    second = add(scheduler, 80, 5, prefix=SYSTEM)
    steps = [scheduler.step() for _ in range(2)]
    assert [{p.sequence: p.tokens for p in s.prefills} for s in steps] == [
        {second: 60},
        {second: 20, first: 20},
    ]
    assert scheduler.statistics().held_tokens == 64 + 16 + 16


def test_a_preempted_sequence_finds_its_prefix_again() -> None:
    scheduler = TokenScheduler(8, 1_000, 160, reserve="none")
    add(scheduler, 70, 60, prefix=SYSTEM)
    other = add(scheduler, 60, 60)
    scheduler.step()
    young = add(scheduler, 70, 60, prefix=SYSTEM)
    assert parts(scheduler.step()) == [6]
    while not scheduler.step().preempted:
        pass
    assert (young.preemptions, other.state) == (1, "decoding")
    scheduler.cancel(other)
    again, lost = scheduler.step(), 70 + young.output_tokens - 1
    assert prefilled(again) == [young]
    assert parts(again) == [lost - 64]


def test_a_prefix_goes_with_the_last_who_holds_it() -> None:
    scheduler = TokenScheduler(8, 1_000, 400)
    scheduler.cancel(add(scheduler, 80, 5, prefix=SYSTEM))
    add(scheduler, 80, 1, prefix=SYSTEM)
    scheduler.step()
    add(scheduler, 80, 5, prefix=SYSTEM)
    assert parts(scheduler.step()) == [80]


# -- nonsense ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "8", None], ids=repr)
@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_num_batched_tokens", "kv_cache_tokens", "block_size"]
)
def test_limits_are_counts(name: str, value: object) -> None:
    limits: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8,
        "kv_cache_tokens": 100,
        "block_size": 16,
    }
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be "):
        TokenScheduler(**limits | {name: value})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_cache_tokens": 15}, "kv_cache_tokens = 15 is less than a block of 16"),
        ({"order": "fifo"}, "order must be Fifo"),
        ({"reserve": "some"}, 'reserve must be "declared", "estimate" or "none", not \'some\''),
        ({"context_window": 0}, "context_window must be an int >= 1"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_construction_says_what_is_wrong(options: dict[str, Any], says: str) -> None:
    limits: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8,
        "kv_cache_tokens": 100,
    }
    with pytest.raises((TypeError, ValueError), match=f"^{says}"):
        TokenScheduler(**limits | options)


REQUEST = Request(input_tokens=10, max_output_tokens=10)


@pytest.mark.parametrize(
    ("request_", "options", "says"),
    [
        ("hello", {}, "a request must be a Request"),
        (Request(input_tokens=0), {}, "input_tokens must be at least 1"),
        (Request(input_tokens=5, choices=2), {}, "choices must be 1, not 2"),
        (REQUEST, {"now": None}, "now must be a number"),
        (REQUEST, {"now": True}, "now must be a number"),
        (REQUEST, {"now": float("nan")}, "now must be a finite number"),
        (REQUEST, {"priority": 1.5}, "priority must be an int"),
        (REQUEST, {"priority": True}, "priority must be an int"),
        (REQUEST, {"prefix": [("a", 0)]}, "prefix tokens of 'a' must be"),
        (REQUEST, {"prefix": [("a", 5), ("b", 6)]}, "a prefix of 11 tokens is longer than the"),
        (REQUEST, {"prefix": [([], 5)]}, "unhashable type"),
        (REQUEST, {"tenant": []}, "unhashable type"),
        (Request(input_tokens=101), {}, "101 input tokens"),
        (Request(input_tokens=90, max_output_tokens=11), {}, "90 input tokens and up to 11"),
    ],
)
def test_a_request_that_makes_no_sense_changes_nothing(
    request_: Any, options: dict[str, Any], says: str
) -> None:
    scheduler = TokenScheduler(8, 8, 100, block_size=1, order=FairShare())
    before = scheduler.statistics()
    with pytest.raises((TypeError, ValueError), match=f"^{says}"):
        scheduler.add(request_, **{"now": 0.0} | options)
    assert scheduler.statistics() == before
    assert scheduler.unfinished == 0


def test_they_say_what_they_are() -> None:
    scheduler = TokenScheduler(2, 2_048, 100_000)
    sequence = add(scheduler, 1_000)
    add(scheduler, 1_100)
    add(scheduler, 10)
    scheduler.step()
    assert repr(sequence) == "<TokenSequence: decoding, 1,000 input tokens, 1 output tokens>"
    assert repr(scheduler) == (
        "<TokenScheduler: 1 decoding, 1 prefilling, 1 waiting, 2,112 of 100,000 tokens held>"
    )
    seen = scheduler.statistics()
    assert (seen.waiting, seen.waiting_tokens, seen.prefilling, seen.decoding) == (1, 10, 1, 1)
    assert seen.kv_cache_usage == 0.02112


# -- against a naive model ---------------------------------------------------------------------


Prefixes = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([3, 8, 9])), max_size=3).map(
    tuple
)


class AgainstTheRules(RuleBasedStateMachine):
    """Every step is what `steps.Planner` makes of the same requests, and within the gates."""

    @initialize(
        seqs=st.integers(1, 6),
        more=st.integers(0, 20),
        blocks=st.integers(4, 20),
        size=st.sampled_from([1, 2, 4]),
        reserve=st.sampled_from(["declared", "estimate", "none"]),
        patience=st.sampled_from([None, 0.0, 100.0]),
    )
    def build(
        self,
        seqs: int,
        more: int,
        blocks: int,
        size: int,
        reserve: Reserve,
        patience: float | None,
    ) -> None:
        self.scheduler = TokenScheduler(
            seqs,
            seqs + more,
            blocks * size,
            order=Fifo() if patience is None else SmallestFirst(patience),
            block_size=size,
            reserve=reserve,
            estimator=Constant(6),
        )
        self.planner = Planner(seqs, seqs + more, blocks, size)
        self.reserve, self.patience, self.now = reserve, patience, 0.0
        self.sequences: list[TokenSequence] = []

    @rule(
        prompt=st.integers(1, 40),
        output=st.none() | st.integers(0, 30),
        priority=st.sampled_from([0, 0, 0, 1]),
        prefix=Prefixes,
        seconds=st.sampled_from([0.0, 1.0]),
    )
    def add(
        self,
        prompt: int,
        output: int | None,
        priority: int,
        prefix: tuple[tuple[str, int], ...],
        seconds: float,
    ) -> None:
        self.now += seconds
        total = self.scheduler.kv_cache_tokens
        limit = total - prompt if output is None else output
        prompt = max(prompt, sum(tokens for _, tokens in prefix))
        request = Request(input_tokens=prompt, max_output_tokens=output)
        options: dict[str, Any] = {"now": self.now, "priority": priority, "prefix": prefix}
        if prompt + (1 if output is None else output) > total:
            with pytest.raises(RequestTooLarge):
                self.scheduler.add(request, **options)
            return
        limit = total - prompt if output is None else output
        reserve = min(limit, {"declared": limit, "estimate": 6, "none": 1}[self.reserve])
        number = len(self.sequences)
        key: tuple[float, ...] = (priority, number)
        if self.patience is not None:
            due = self.now + self.patience * (prompt + reserve) / 1_000
            key = (priority, due, number)
        self.sequences.append(self.scheduler.add(request, **options))
        self.planner.rows.append(Row(number, key, priority, prompt, limit, reserve, prefix))

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.one_step()

    def one_step(self) -> Step:
        number = {sequence: n for n, sequence in enumerate(self.sequences)}
        step, plan = self.scheduler.step(), self.planner.step()
        assert sorted(number[each] for each in step.decodes) == sorted(plan.decodes)
        assert {number[p.sequence]: p.tokens for p in step.prefills} == plan.prefills
        assert [number[p.sequence] for p in step.prefills] == list(plan.prefills)
        assert [number[each] for each in step.preempted] == plan.preempted
        assert sorted(number[each] for each in step.finished) == sorted(plan.finished)
        assert step.context_tokens == plan.context
        assert step.tokens == len(step.decodes) + sum(parts(step))
        assert step.tokens <= self.scheduler.max_num_batched_tokens
        return step

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), end=st.sampled_from(["finish", "cancel"]))
    def end(self, data: st.DataObject, end: str) -> None:
        number = data.draw(st.integers(0, len(self.sequences) - 1))
        getattr(self.scheduler, end)(self.sequences[number])
        self.planner.rows[number].state = "finished"
        self.planner.forget()

    @invariant()
    def all_agree(self) -> None:
        rows, running = self.planner.rows, [row for row in self.planner.rows if row.runs]
        for row, sequence in zip(rows, self.sequences, strict=True):
            assert sequence.output_tokens == row.output
            if row.state != "finished":
                assert (sequence.state, sequence.context_tokens) == (row.state, row.computed)
        seen, size = self.scheduler.statistics(), self.planner.size
        assert seen.decoding + seen.prefilling == len(running) <= self.scheduler.max_num_seqs
        assert seen.held_tokens == size * self.planner.used(self.planner.held)
        assert seen.held_tokens <= seen.kv_cache_tokens
        assert seen.promised_tokens == size * self.planner.used(self.planner.promise)
        waiting = [row.target for row in rows if row.state == "waiting"]
        assert (seen.waiting, seen.waiting_tokens) == (len(waiting), sum(waiting))
        assert self.scheduler.unfinished == len(running) + len(waiting)
        assert seen.preemptions == sum(each.preemptions for each in self.sequences)
        assert self.reserve != "declared" or not seen.preemptions

    def teardown(self) -> None:
        """Nobody is lost, and each step does something for somebody."""
        if not hasattr(self, "scheduler"):
            return
        while self.scheduler.unfinished:
            assert self.one_step().tokens > 0
        self.all_agree()
        seen = self.scheduler.statistics()
        assert (seen.held_tokens, seen.promised_tokens) == (0, 0)
        assert seen.finished + seen.cancelled == len(self.sequences)
        decoding = self.scheduler._decoding
        for step in (*decoding._growing, *decoding._ending):
            assert 0 < step - seen.steps <= self.planner.size
        assert not self.scheduler._blocks._shared


TestAgainstTheRules = AgainstTheRules.TestCase
TestAgainstTheRules.settings = settings(max_examples=settings().max_examples // 2)
