"""The arithmetic of serving: every number is one that came out elsewhere, on paper or measured."""

import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow import Request
from tokenflow.serving import TokenScheduler
from tokenflow.serving.capacity import (
    ACCELERATORS,
    MODELS,
    Accelerator,
    Deployment,
    ModelShape,
    Plan,
    Workload,
    autoscale_signal,
    block_count,
    kv_bytes_per_token,
    load_factor,
    max_cached_tokens,
    plan,
    replicas_needed,
    ridge_tokens,
    step_seconds,
    token_budget,
    tokens_in_flight,
)

LLAMA_8B = MODELS["Llama-3.1-8B"]
LLAMA_70B = MODELS["Llama-3-70B"]
DEEPSEEK = MODELS["DeepSeek-V3"]
H100 = ACCELERATORS["H100"]
LLAMA = Deployment(LLAMA_8B, H100)


# -- memory -----------------------------------------------------------------------------------


def test_kv_bytes_per_token() -> None:
    assert kv_bytes_per_token(LLAMA_70B) == 2 * 80 * 8 * 128 * 2 == 327_680
    assert kv_bytes_per_token(LLAMA_8B) == 131_072
    assert kv_bytes_per_token(DEEPSEEK) == 61 * (512 + 64) * 2 == 70_272


def test_the_classic_mistake_is_the_heads_of_queries() -> None:
    assert kv_bytes_per_token(replace(LLAMA_70B, kv_heads=64)) == 2_621_440


def test_fp8_halves() -> None:
    for model in MODELS.values():
        halved = kv_bytes_per_token(model, bytes_per_value=1)
        assert 2 * halved == kv_bytes_per_token(model)


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (3, 3), (8, 1), (16, 1)])
def test_ranks_share_whole_heads(ranks: int, heads: int) -> None:
    expected = 2 * 80 * heads * 128 * 2
    assert kv_bytes_per_token(LLAMA_70B, tensor_parallel=ranks) == expected


def test_every_rank_keeps_the_whole_latent() -> None:
    assert kv_bytes_per_token(DEEPSEEK, tensor_parallel=8) == 70_272


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (1_001, 63)])
def test_blocks(tokens: int, blocks: int) -> None:
    assert block_count(tokens) == blocks


def test_the_pool_of_an_8b_model_on_80_gb() -> None:
    pool = 0.9 * 80e9 - 16.06e9 - 2e9
    assert max_cached_tokens(LLAMA) == math.floor(pool / 131_072 / 16) * 16
    assert max_cached_tokens(LLAMA) == pytest.approx(411_000, rel=0.002)
    assert max_cached_tokens(LLAMA, block_size=1_000_000 // 3) == 333_333


def test_the_pool_in_fp8_and_over_ranks() -> None:
    assert max_cached_tokens(replace(LLAMA, kv_bytes_per_value=1)) == pytest.approx(
        823_000, rel=1e-3
    )
    four = Deployment(LLAMA_70B, H100, tensor_parallel=4)
    assert max_cached_tokens(four) == math.floor((70e9 - 141.2e9 / 4) / 81_920 / 16) * 16


def test_a_model_that_does_not_fit_says_so() -> None:
    with pytest.raises(ValueError, match=r"Llama-3-70B has 141\.2 GB of weights .* nothing of 72"):
        max_cached_tokens(Deployment(LLAMA_70B, H100))


# -- time -------------------------------------------------------------------------------------


def test_the_roofline_of_an_8b_model_on_an_h100() -> None:
    assert LLAMA_8B.weight_bytes == pytest.approx(16.06e9)
    assert LLAMA_8B.flops_per_token == pytest.approx(16.06e9)
    assert 1e3 * step_seconds(LLAMA, tokens=1) == pytest.approx(4.79, abs=0.005)
    assert 1e6 * (step_seconds(LLAMA, tokens=10_000) / 10_000) == pytest.approx(16.24, abs=0.005)
    assert ridge_tokens(LLAMA) == 295


@pytest.mark.parametrize(("tokens", "milliseconds"), [(512, 8.31), (2_048, 33.3), (8_192, 133)])
def test_step_seconds(tokens: int, milliseconds: float) -> None:
    expected = pytest.approx(milliseconds, rel=0.002)
    assert 1e3 * step_seconds(LLAMA, tokens=tokens) == expected


def test_up_to_the_ridge_tokens_cost_nothing() -> None:
    assert step_seconds(LLAMA, tokens=295) == step_seconds(LLAMA, tokens=1)
    assert step_seconds(LLAMA, tokens=296) > step_seconds(LLAMA, tokens=1)


def test_so_much_context_doubles_the_flat_part() -> None:
    alone = step_seconds(LLAMA, tokens=1)
    assert step_seconds(LLAMA, tokens=1, context_tokens=122_500) == pytest.approx(
        2 * alone, rel=1e-3
    )
    assert ridge_tokens(LLAMA, context_tokens=122_500) == 590


def test_a_budget_for_40_ms() -> None:
    assert token_budget(LLAMA, max_step_seconds=0.040) == 2_463


def test_shares_ranks_and_overhead() -> None:
    half = replace(LLAMA, compute_share=0.5, bandwidth_share=0.5)
    assert step_seconds(half, tokens=1) == pytest.approx(2 * step_seconds(LLAMA, tokens=1))
    assert step_seconds(half, tokens=4_096) == pytest.approx(2 * step_seconds(LLAMA, tokens=4_096))
    two = replace(LLAMA, tensor_parallel=2, overhead_seconds=0.001)
    assert step_seconds(two, tokens=1) == pytest.approx(0.001 + step_seconds(LLAMA, tokens=1) / 2)
    assert step_seconds(two, tokens=2_048) == pytest.approx(
        0.001 + step_seconds(LLAMA, tokens=1_024)
    )


def test_a_mixture_computes_its_active_parameters_and_reads_all() -> None:
    eight = Deployment(DEEPSEEK, ACCELERATORS["H200"], tensor_parallel=8)
    assert step_seconds(eight, tokens=1) == pytest.approx(671e9 / 8 / 4.8e12)
    assert step_seconds(eight, tokens=32_768) == pytest.approx(32_768 * 74e9 / 8 / 989e12)


@given(st.floats(0.005, 1), st.integers(0, 10_000), st.floats(0, 0.01))
def test_a_budget_is_the_most_that_meets_its_target(
    target: float, context: int, overhead: float
) -> None:
    deployment = replace(LLAMA, overhead_seconds=overhead)
    try:
        budget = token_budget(deployment, max_step_seconds=target, context_tokens=context)
    except ValueError:
        assert step_seconds(deployment, tokens=1, context_tokens=context) > target
    else:
        nearly = target * (1 + 1e-9)
        assert step_seconds(deployment, tokens=budget, context_tokens=context) <= nearly
        assert step_seconds(deployment, tokens=budget + 1, context_tokens=context) > target


@pytest.mark.parametrize("context", [0, 411_000])
def test_a_target_that_no_budget_meets(context: int) -> None:
    with pytest.raises(ValueError, match=r"max_step_seconds = 0\.004 is less than the 0\.0"):
        token_budget(LLAMA, max_step_seconds=0.004, context_tokens=context)


# -- replicas ---------------------------------------------------------------------------------

CHAT = Workload(requests_per_second=20, input_tokens=1_000, output_tokens=400)


def test_tokens_in_flight_by_littles_law() -> None:
    assert tokens_in_flight(CHAT, residence_seconds=10) == 20 * (1_000 + 400 / 2) * 10


@pytest.mark.parametrize(
    ("prefill", "decode", "pool", "replicas"),
    [
        (20_000, 8_000, 240_000, 1),
        (19_999, 8_000, 240_000, 2),
        (20_000, 7_999, 240_000, 2),
        (20_000, 8_000, 239_999, 2),
        (4_000, 3_000, 100_000, 5),
    ],
)
def test_replicas_are_the_largest_of_three(
    prefill: float, decode: float, pool: int, replicas: int
) -> None:
    needed = replicas_needed(
        CHAT,
        prefill_tokens_per_second=prefill,
        decode_tokens_per_second=decode,
        kv_cache_tokens=pool,
        residence_seconds=10,
    )
    assert needed == replicas


@pytest.mark.parametrize(
    "name", ["prefill_tokens_per_second", "decode_tokens_per_second", "kv_cache_tokens"]
)
def test_a_replica_that_does_nothing_is_refused(name: str) -> None:
    rates: dict[str, Any] = {
        "prefill_tokens_per_second": 1,
        "decode_tokens_per_second": 1,
        "kv_cache_tokens": 1,
        "residence_seconds": 1,
    }
    with pytest.raises(ValueError, match=f"^{name} must be"):
        replicas_needed(CHAT, **rates | {name: 0})


def test_cached_tokens_are_held_but_not_computed() -> None:
    cached = replace(CHAT, cached_tokens=750)
    assert cached.prefill_tokens == 250
    assert cached.context_tokens == CHAT.context_tokens


def test_replica_normalisation() -> None:
    assert load_factor(2_800, base_tokens_per_second=4_500) == pytest.approx(1.607, abs=5e-4)
    assert load_factor(3_200, base_tokens_per_second=4_500) == pytest.approx(1.406, abs=5e-4)
    assert load_factor(4_500, base_tokens_per_second=4_500) == 1


def signal(**changed: Any) -> float:
    usual = {"tokens_in_flight": 800, "kv_cache_tokens": 500, "replicas": 2}
    return autoscale_signal(**usual | changed)


def test_the_signal_to_scale_by() -> None:
    assert signal() == 1
    assert signal(tokens_in_flight=1_600) == 2
    assert signal(tokens_in_flight=0) == 0
    assert signal(tokens_in_flight=0, kv_cache_usage=0.99) == pytest.approx(0.99 / 0.8)
    assert signal(target_usage=0.5) == pytest.approx(1.6)
    assert signal(kv_cache_usage=1.0, tokens_in_flight=100_000) == 125  # those that wait count


# -- a plan -----------------------------------------------------------------------------------

RAG = Workload(requests_per_second=20, input_tokens=7_800, output_tokens=200)
TALK = Workload(requests_per_second=160, input_tokens=200, output_tokens=800)


def test_equal_tokens_per_second_need_different_hardware() -> None:
    """160,000 a second: the one is short of arithmetic, the other of memory."""
    by_memory = {name: ACCELERATORS[name] for name in ("H100", "H200")}
    rag = {
        n: plan(RAG, Deployment(LLAMA_8B, a), max_step_seconds=0.04) for n, a in by_memory.items()
    }
    talk = {
        n: plan(TALK, Deployment(LLAMA_8B, a), max_step_seconds=0.04) for n, a in by_memory.items()
    }
    assert rag["H100"].bottleneck == rag["H200"].bottleneck == "prefill"
    assert rag["H100"].replicas == rag["H200"].replicas == 3
    assert talk["H100"].bottleneck == "memory"
    assert (talk["H100"].replicas, talk["H200"].replicas) == (4, 3)


def test_a_plan_is_what_its_parts_say() -> None:
    made = plan(TALK, LLAMA, max_step_seconds=0.04)
    assert made.max_num_batched_tokens == 2_463
    assert made.kv_cache_tokens == max_cached_tokens(LLAMA)
    assert made.max_num_seqs == made.kv_cache_tokens // 600
    assert made.prefill_replicas == pytest.approx(160_000 * 0.04 / 2_463)
    needs = (made.prefill_replicas, made.decode_replicas, made.memory_replicas)
    assert made.replicas == math.ceil(max(needs))
    assert needs.index(max(needs)) == 2


def test_reading_context_is_what_bounds_decoding() -> None:
    """In 25 ms there is time to read 512,000 tokens of context; of 140 GB, 866,000 fit."""
    tight = plan(
        TALK, Deployment(LLAMA_8B, replace(H100, memory_bytes=150e9)), max_step_seconds=0.025
    )
    assert tight.bottleneck == "decode"
    readable = (0.025 * 3.35e12 - 16.06e9) / 131_072
    assert tight.max_num_seqs == math.floor(readable / 600)
    assert tight.decode_replicas == pytest.approx(160 * 800 * 0.025 / (readable / 600))


def test_arithmetic_that_is_mostly_for_answers_is_decoding() -> None:
    brief = Workload(requests_per_second=900, input_tokens=20, output_tokens=160)
    made = plan(brief, LLAMA, max_step_seconds=0.04)
    assert made.prefill_replicas > max(made.decode_replicas, made.memory_replicas)
    assert made.bottleneck == "decode"


def test_embeddings_have_no_answer() -> None:
    embeddings = Workload(requests_per_second=100, input_tokens=500, output_tokens=0)
    made = plan(embeddings, LLAMA, max_step_seconds=0.04)
    assert (made.bottleneck, made.decode_replicas) == ("prefill", 0)


def test_more_sequences_than_a_step_has_tokens_are_no_use() -> None:
    short = Workload(requests_per_second=1, input_tokens=50, output_tokens=50)
    made = plan(short, LLAMA, max_step_seconds=0.006)
    assert made.max_num_seqs == made.max_num_batched_tokens


@pytest.mark.parametrize("target", [0.04, 0.00480])
def test_a_request_that_no_replica_holds(target: float) -> None:
    books = Workload(requests_per_second=1, input_tokens=500_000, output_tokens=100)
    with pytest.raises(ValueError, match=r"a request holds 500,050 tokens on average, but 411,520"):
        plan(books, LLAMA, max_step_seconds=target)


def simulated(workload: Workload, made: Plan, requests: int) -> tuple[float, float]:
    """A replica with what a plan says: the median wait, early and late, for the first token."""
    scheduler = TokenScheduler(
        made.max_num_seqs, made.max_num_batched_tokens, made.kv_cache_tokens, reserve="none"
    )
    rng = random.Random(1)
    request = Request(
        input_tokens=round(workload.input_tokens), max_output_tokens=round(workload.output_tokens)
    )
    gaps = (rng.expovariate(workload.requests_per_second) for _ in range(requests))
    arrivals = deque(itertools.accumulate(gaps))
    now, waits = 0.0, []
    while arrivals:
        while arrivals and arrivals[0] <= now:
            scheduler.add(request, now=arrivals.popleft())
        step = scheduler.step()
        if not step.tokens:
            now = arrivals[0] if arrivals else now
            continue
        taken = step_seconds(LLAMA, tokens=step.tokens, context_tokens=step.context_tokens)
        assert taken <= 0.04 * 1.01
        now += taken
        waits += [now - part.sequence.arrived for part in step.prefills if part.last]
    half = len(waits) // 2
    return statistics.median(waits[:half]), statistics.median(waits[half:])


@pytest.mark.parametrize(("workload", "requests"), [(RAG, 800), (TALK, 1_600)], ids=["rag", "talk"])
def test_a_plan_holds_in_a_simulation(workload: Workload, requests: int) -> None:
    """Nine tenths of what a replica is planned for it takes; with 1.3 times, waits grow."""
    made = plan(workload, LLAMA, max_step_seconds=0.04)
    most = max(made.prefill_replicas, made.decode_replicas, made.memory_replicas)
    rate = workload.requests_per_second / most
    early, late = simulated(replace(workload, requests_per_second=0.9 * rate), made, requests)
    assert max(early, late) < 1.5
    early, late = simulated(replace(workload, requests_per_second=1.3 * rate), made, requests)
    assert late > max(2 * early, 1.5)


# -- data -------------------------------------------------------------------------------------


def test_tables_go_by_name() -> None:
    assert all(name == accelerator.name for name, accelerator in ACCELERATORS.items())
    assert all(name == model.name for name, model in MODELS.items())
    assert {"H100", "A100", "L40S", "H200", "B200", "MI300X"} <= ACCELERATORS.keys()


@pytest.mark.parametrize("accelerator", ACCELERATORS.values(), ids=ACCELERATORS)
def test_data_sheets_are_of_dense_matrices_in_bytes(accelerator: Accelerator) -> None:
    """With sparsity, or in GiB or GB instead of bytes, they would be out of these ranges."""
    assert 20e9 < accelerator.memory_bytes < 300e9
    assert 100 < accelerator.flops_per_second / accelerator.bandwidth_bytes_per_second < 450


def test_shapes_and_machines_of_ones_own() -> None:
    mine = ModelShape(name="mine", layers=2, kv_heads=1, head_dim=8, parameters=1_000)
    slow = Accelerator("slow", 1e6, 1e6, 1e6)
    deployment = Deployment(mine, slow, activation_bytes=0)
    assert kv_bytes_per_token(mine) == 64
    assert step_seconds(deployment, tokens=1) == 2e-3
    assert max_cached_tokens(deployment, block_size=1) == math.floor((900_000 - 2_000) / 64)
    with pytest.raises(FrozenInstanceError):
        slow.name = "fast"  # type: ignore[misc]


@pytest.mark.parametrize(
    "shape",
    [
        {"kv_heads": 8},
        {"head_dim": 128},
        {"latent_dim": 576, "kv_heads": 8},
        {"latent_dim": 576, "kv_heads": 8, "head_dim": 128},
        {},
    ],
    ids=repr,
)
def test_a_shape_has_heads_or_a_latent(shape: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give kv_heads and head_dim, or latent_dim alone, not"):
        ModelShape(name="odd", layers=1, parameters=1, **shape)


NONSENSE: list[tuple[str, Callable[[Any], object]]] = [
    ("memory_bytes", lambda x: Accelerator("a", x, 1, 1)),
    ("flops_per_second", lambda x: replace(H100, flops_per_second=x)),
    ("layers", lambda x: replace(LLAMA_8B, layers=x)),
    ("parameters", lambda x: replace(LLAMA_8B, parameters=x)),
    ("active_parameters", lambda x: replace(LLAMA_8B, active_parameters=x)),
    ("weight_bytes_per_parameter", lambda x: replace(LLAMA_8B, weight_bytes_per_parameter=x)),
    ("tensor_parallel", lambda x: replace(LLAMA, tensor_parallel=x)),
    ("memory_share", lambda x: replace(LLAMA, memory_share=x)),
    ("kv_bytes_per_value", lambda x: replace(LLAMA, kv_bytes_per_value=x)),
    ("tensor_parallel", lambda x: kv_bytes_per_token(LLAMA_8B, tensor_parallel=x)),
    ("bytes_per_value", lambda x: kv_bytes_per_token(LLAMA_8B, bytes_per_value=x)),
    ("block_size", lambda x: max_cached_tokens(LLAMA, block_size=x)),
    ("block_size", lambda x: block_count(1, block_size=x)),
    ("tokens", lambda x: step_seconds(LLAMA, tokens=x)),
    ("max_step_seconds", lambda x: token_budget(LLAMA, max_step_seconds=x)),
    ("requests_per_second", lambda x: replace(CHAT, requests_per_second=x)),
    ("input_tokens", lambda x: replace(CHAT, input_tokens=x)),
    ("tokens_per_second", lambda x: load_factor(x, base_tokens_per_second=1)),
    ("base_tokens_per_second", lambda x: load_factor(1, base_tokens_per_second=x)),
    ("replicas", lambda x: signal(replicas=x)),
    ("kv_cache_tokens", lambda x: signal(kv_cache_tokens=x)),
    ("target_usage", lambda x: signal(target_usage=x)),
]


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "8", None], ids=repr)
@pytest.mark.parametrize(
    ("name", "make"), NONSENSE, ids=[f"{n}: {name}" for n, (name, _) in enumerate(NONSENSE)]
)
def test_nonsense_is_refused(name: str, make: Callable[[Any], object], value: object) -> None:
    if value is None and name == "active_parameters":
        return
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be "):
        make(value)


OUT_OF_RANGE: list[tuple[str, Callable[[], object]]] = [
    ("memory_share", lambda: replace(LLAMA, memory_share=1.01)),
    ("compute_share", lambda: replace(LLAMA, compute_share=2)),
    ("bandwidth_share", lambda: replace(LLAMA, bandwidth_share=2)),
    ("kv_cache_usage above", lambda: signal(kv_cache_usage=1.5)),
    ("kv_cache_usage below", lambda: signal(kv_cache_usage=-0.1)),
    ("target_usage", lambda: signal(target_usage=1.5)),
    ("tokens_in_flight", lambda: signal(tokens_in_flight=-1)),
    ("activation_bytes", lambda: replace(LLAMA, activation_bytes=-1)),
    ("overhead_seconds", lambda: replace(LLAMA, overhead_seconds=-1)),
    ("context_tokens", lambda: step_seconds(LLAMA, tokens=1, context_tokens=-1)),
    ("residence_seconds", lambda: tokens_in_flight(CHAT, residence_seconds=-1)),
    ("output_tokens", lambda: replace(CHAT, output_tokens=-1)),
    ("cached_tokens", lambda: replace(CHAT, cached_tokens=1_000)),
]


@pytest.mark.parametrize("make", dict(OUT_OF_RANGE).values(), ids=dict(OUT_OF_RANGE))
def test_what_is_out_of_range_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()
