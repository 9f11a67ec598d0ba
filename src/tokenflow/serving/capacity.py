"""What a machine can hold and how fast it can go: memory, step time, budgets, replicas. Pure.

A step of an engine reads all weights and the context of every running sequence
from memory, and computes each of its tokens. It takes as long as the slower of
the two (the roofline model: Williams, Waterman, Patterson 2009):

    overhead + max((weights + context x kv bytes) / bandwidth, tokens x flops / peak)

Up to the ridge, tokens beside the running ones cost no time; from there on, time
is proportional to tokens. All the rest follows: how many tokens a step may have,
how many sequences, how many replicas.

What the model leaves out: the arithmetic of attention itself, which counts from
prompts of some 10,000 tokens on; the communication between tensor-parallel ranks
(add it to `overhead_seconds`); that a mixture of experts reads only some of them
for very few tokens. Published peaks are never reached: measure one long prefill
and one decode step of yours, and set `compute_share` and `bandwidth_share`.

>>> llama = Deployment(MODELS["Llama-3.1-8B"], ACCELERATORS["H100"])
>>> token_budget(llama, max_step_seconds=0.040)
2463

Memory and bandwidth are in decimal bytes, as published; a share is above 0 and
at most 1. Wrong values raise TypeError or ValueError at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from tokenflow._usage import finite_seconds, positive_int, positive_seconds, token_count

__all__ = [
    "ACCELERATORS",
    "MODELS",
    "Accelerator",
    "Bottleneck",
    "Deployment",
    "ModelShape",
    "Plan",
    "Workload",
    "autoscale_signal",
    "block_count",
    "kv_bytes_per_token",
    "load_factor",
    "max_cached_tokens",
    "plan",
    "replicas_needed",
    "ridge_tokens",
    "step_seconds",
    "token_budget",
    "tokens_in_flight",
]

Bottleneck: TypeAlias = Literal["prefill", "decode", "memory"]
"""What runs out first: arithmetic for prompts, reading memory for answers, or KV memory."""


def _number(value: object, name: str) -> float:
    """Return `value` as a finite number >= 0, or say which argument is wrong and how."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number >= 0, not {value!r}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, not {value!r}")
    return float(value)


def _positive(value: object, name: str) -> float:
    """Return `value` as a finite number > 0, or say which argument is wrong and how."""
    number = _number(value, name)
    if number == 0:
        raise ValueError(f"{name} must be more than 0, not {value!r}")
    return number


# -- what there is -----------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator, by its data sheet.

    `flops_per_second` is for 16-bit *dense* matrices: data sheets like to print
    twice that, with sparsity. Where weights and activations are both fp8, use
    `dataclasses.replace` with the fp8 rate.
    """

    name: str
    memory_bytes: float
    bandwidth_bytes_per_second: float
    flops_per_second: float

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "bandwidth_bytes_per_second", "flops_per_second"):
            _positive(getattr(self, name), name)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a model decides about memory and time; all of it is in its `config.json`.

    Either `kv_heads` and `head_dim`, where heads of queries share heads of keys
    and values (`num_key_value_heads`: *not* `num_attention_heads`), or `latent_dim`
    with multi-head latent attention (`kv_lora_rank` + `qk_rope_head_dim`).
    `layers` are those that keep all of the context: leave out the ones with a
    sliding window. `active_parameters` are those that a token passes in a mixture
    of experts; None is all.
    """

    name: str
    layers: int
    parameters: int
    active_parameters: int | None = None
    kv_heads: int = 0
    head_dim: int = 0
    latent_dim: int = 0
    weight_bytes_per_parameter: float = 2.0

    def __post_init__(self) -> None:
        positive_int(self.layers, "layers")
        positive_int(self.parameters, "parameters")
        if self.active_parameters is not None:
            positive_int(self.active_parameters, "active_parameters")
        for name in ("kv_heads", "head_dim", "latent_dim"):
            token_count(getattr(self, name), name)
        _positive(self.weight_bytes_per_parameter, "weight_bytes_per_parameter")
        if (self.kv_heads > 0, self.head_dim > 0) != (self.latent_dim == 0,) * 2:
            raise ValueError(
                "give kv_heads and head_dim, or latent_dim alone, not "
                f"kv_heads={self.kv_heads}, head_dim={self.head_dim}, latent_dim={self.latent_dim}"
            )

    @property
    def weight_bytes(self) -> float:
        """All weights, on however many accelerators."""
        return self.parameters * self.weight_bytes_per_parameter

    @property
    def flops_per_token(self) -> float:
        """A multiplication and an addition for each parameter that a token passes."""
        return 2.0 * (self.active_parameters or self.parameters)


@final
@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on `tensor_parallel` accelerators: one replica.

    `memory_share` of each accelerator is the engine's (vLLM calls it
    `gpu_memory_utilization`); `activation_bytes`, also of each, is what it needs
    beside weights and KV cache, which engines print when they start.
    `kv_bytes_per_value` is 1 for an fp8 cache. `overhead_seconds` is what a step
    takes on top: launching, scheduling, communication. `compute_share` and
    `bandwidth_share` are the parts of the published peaks that are reached.
    """

    model: ModelShape
    accelerator: Accelerator
    tensor_parallel: int = 1
    memory_share: float = 0.9
    activation_bytes: float = 2e9
    kv_bytes_per_value: float = 2.0
    overhead_seconds: float = 0.0
    compute_share: float = 1.0
    bandwidth_share: float = 1.0

    def __post_init__(self) -> None:
        positive_int(self.tensor_parallel, "tensor_parallel")
        for name in ("memory_share", "compute_share", "bandwidth_share"):
            if _positive(getattr(self, name), name) > 1:
                raise ValueError(f"{name} must be at most 1, not {getattr(self, name)!r}")
        _number(self.activation_bytes, "activation_bytes")
        _positive(self.kv_bytes_per_value, "kv_bytes_per_value")
        finite_seconds(self.overhead_seconds, "overhead_seconds")


# As published by their makers: SXM or OAM modules where there are several kinds.
ACCELERATORS: Final[dict[str, Accelerator]] = {
    each.name: each
    for each in (
        Accelerator("A10", 24e9, 600e9, 125e12),
        Accelerator("A100-40GB", 40e9, 1_555e9, 312e12),
        Accelerator("A100", 80e9, 2_039e9, 312e12),
        Accelerator("L4", 24e9, 300e9, 121e12),
        Accelerator("L40S", 48e9, 864e9, 362e12),
        Accelerator("H100", 80e9, 3_350e9, 989e12),
        Accelerator("H200", 141e9, 4_800e9, 989e12),
        Accelerator("B200", 180e9, 8_000e9, 2_250e12),
        Accelerator("MI300X", 192e9, 5_300e9, 1_307e12),
    )
}
"""Some accelerators by name. Any other is an `Accelerator(...)` of yours."""


def _grouped(
    name: str, layers: int, kv_heads: int, parameters: float, active: float | None = None
) -> ModelShape:
    """A 16-bit model with heads of 128, as most are."""
    return ModelShape(
        name=name,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=128,
        parameters=round(parameters),
        active_parameters=None if active is None else round(active),
    )


MODELS: Final[dict[str, ModelShape]] = {
    each.name: each
    for each in (
        _grouped("Llama-3.1-8B", 32, 8, 8.03e9),
        _grouped("Llama-3-70B", 80, 8, 70.6e9),
        _grouped("Llama-3.1-405B", 126, 8, 405.9e9),
        _grouped("Mistral-7B", 32, 8, 7.25e9),
        _grouped("Mixtral-8x7B", 32, 8, 46.7e9, 12.9e9),
        _grouped("Qwen2.5-7B", 28, 4, 7.62e9),
        _grouped("Qwen2.5-72B", 80, 8, 72.7e9),
        _grouped("Qwen3-8B", 36, 8, 8.19e9),
        _grouped("Qwen3-32B", 64, 8, 32.8e9),
        _grouped("Qwen3-30B-A3B", 48, 4, 30.5e9, 3.3e9),
        _grouped("Qwen3-235B-A22B", 94, 4, 235e9, 22e9),
        ModelShape(
            name="DeepSeek-V3",
            layers=61,
            latent_dim=512 + 64,
            parameters=671_000_000_000,
            active_parameters=37_000_000_000,
            weight_bytes_per_parameter=1.0,
        ),
    )
}
"""Some models by name. Any other is a `ModelShape(...)` of yours."""


# -- memory ------------------------------------------------------------------------------------


def kv_bytes_per_token(
    model: ModelShape, *, tensor_parallel: int = 1, bytes_per_value: float = 2.0
) -> int:
    """Bytes of KV cache that each token of context takes on each rank.

    2 x layers x ceil(kv heads / ranks) x head dim x bytes per value. A latent is
    kept once, and by every rank.

    >>> kv_bytes_per_token(MODELS["Llama-3-70B"])
    327680
    >>> kv_bytes_per_token(MODELS["Llama-3-70B"], tensor_parallel=4, bytes_per_value=1)
    40960
    >>> kv_bytes_per_token(MODELS["DeepSeek-V3"])
    70272
    """
    ranks = positive_int(tensor_parallel, "tensor_parallel")
    values = model.latent_dim or 2 * -(-model.kv_heads // ranks) * model.head_dim
    return math.ceil(model.layers * values * _positive(bytes_per_value, "bytes_per_value"))


def block_count(tokens: int, *, block_size: int = 16) -> int:
    """Blocks that so many tokens of one sequence take.

    >>> block_count(1_001)
    63
    """
    return -(-token_count(tokens, "tokens") // positive_int(block_size, "block_size"))


def max_cached_tokens(deployment: Deployment, *, block_size: int = 16) -> int:
    """Tokens of context that fit into a replica's KV cache, in whole blocks.

    The pool is the engine's share of memory, less weights and activations.

    >>> max_cached_tokens(Deployment(MODELS["Llama-3.1-8B"], ACCELERATORS["H100"]))
    411520

    Raises:
        ValueError: nothing is left for a single block.
    """
    accelerator, ranks = deployment.accelerator, deployment.tensor_parallel
    weights = deployment.model.weight_bytes / ranks
    share = accelerator.memory_bytes * deployment.memory_share
    pool = share - weights - deployment.activation_bytes
    blocks = math.floor(pool / (_kv_bytes(deployment) * positive_int(block_size, "block_size")))
    if blocks < 1:
        raise ValueError(
            f"{deployment.model.name} has {weights / 1e9:.1f} GB of weights on each of {ranks} "
            f"{accelerator.name}, which with {deployment.activation_bytes / 1e9:.1f} GB of "
            f"activations leaves nothing of {share / 1e9:.1f} GB for a KV cache: "
            "raise tensor_parallel or memory_share, or quantize"
        )
    return blocks * block_size


# -- time --------------------------------------------------------------------------------------


def step_seconds(deployment: Deployment, *, tokens: int, context_tokens: int = 0) -> float:
    """Seconds for a step that computes `tokens` and reads `context_tokens` of KV cache.

    >>> llama = Deployment(MODELS["Llama-3.1-8B"], ACCELERATORS["H100"])
    >>> [round(1e3 * step_seconds(llama, tokens=n), 2) for n in (1, 512, 2_048, 8_192)]
    [4.79, 8.31, 33.26, 133.03]
    """
    computing = positive_int(tokens, "tokens") * _seconds_per_token(deployment)
    reading = _reading_seconds(deployment, token_count(context_tokens, "context_tokens"))
    return deployment.overhead_seconds + max(computing, reading)


def ridge_tokens(deployment: Deployment, *, context_tokens: int = 0) -> int:
    """Tokens that a step has time to compute while it reads weights and context anyway.

    >>> ridge_tokens(Deployment(MODELS["Llama-3.1-8B"], ACCELERATORS["H100"]))
    295
    """
    reading = _reading_seconds(deployment, token_count(context_tokens, "context_tokens"))
    return math.floor(reading / _seconds_per_token(deployment))


def token_budget(
    deployment: Deployment, *, max_step_seconds: float, context_tokens: int = 0
) -> int:
    """Tokens that a step may have (`max_num_batched_tokens`) to take no longer than this.

    Answers get a token a step, so this is the longest gap between two of them.

    >>> llama = Deployment(MODELS["Llama-3.1-8B"], ACCELERATORS["H100"])
    >>> token_budget(llama, max_step_seconds=0.040)
    2463

    Raises:
        ValueError: reading weights and context alone takes longer.
    """
    left = positive_seconds(max_step_seconds, "max_step_seconds") - deployment.overhead_seconds
    reading = _reading_seconds(deployment, token_count(context_tokens, "context_tokens"))
    budget = math.floor(left / _seconds_per_token(deployment))
    if reading > left or budget < 1:
        least = step_seconds(deployment, tokens=1, context_tokens=context_tokens)
        raise ValueError(
            f"max_step_seconds = {max_step_seconds:g} is less than the {least:.3g} s that a step "
            "of one token takes: raise it or tensor_parallel, or hold less context"
        )
    return budget


def _kv_bytes(deployment: Deployment) -> int:
    return kv_bytes_per_token(
        deployment.model,
        tensor_parallel=deployment.tensor_parallel,
        bytes_per_value=deployment.kv_bytes_per_value,
    )


def _bandwidth(deployment: Deployment) -> float:
    """Bytes per second on each rank."""
    return deployment.accelerator.bandwidth_bytes_per_second * deployment.bandwidth_share


def _reading_seconds(deployment: Deployment, context_tokens: float) -> float:
    weights = deployment.model.weight_bytes / deployment.tensor_parallel
    return (weights + context_tokens * _kv_bytes(deployment)) / _bandwidth(deployment)


def _seconds_per_token(deployment: Deployment) -> float:
    peak = deployment.accelerator.flops_per_second * deployment.compute_share
    return deployment.model.flops_per_token / (peak * deployment.tensor_parallel)


# -- replicas ----------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What arrives, as means: take the rate of the hour that has to work.

    `cached_tokens` is the part of `input_tokens` found in the prefix cache: it is
    held and read, but not computed again.
    """

    requests_per_second: float
    input_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0

    def __post_init__(self) -> None:
        _positive(self.requests_per_second, "requests_per_second")
        _positive(self.input_tokens, "input_tokens")
        _number(self.output_tokens, "output_tokens")
        if not _number(self.cached_tokens, "cached_tokens") < self.input_tokens:
            raise ValueError(
                f"cached_tokens = {self.cached_tokens:g} must be less than input_tokens = "
                f"{self.input_tokens:g}: at least the last one is computed"
            )

    @property
    def prefill_tokens(self) -> float:
        """Input tokens of a request that have to be computed."""
        return self.input_tokens - self.cached_tokens

    @property
    def context_tokens(self) -> float:
        """What a request holds on average while it is answered: input + output / 2."""
        return self.input_tokens + self.output_tokens / 2


def tokens_in_flight(workload: Workload, *, residence_seconds: float) -> float:
    """Tokens of context held at a time, by Little's law: rate x what each holds x how long.

    `residence_seconds` runs from a request's admission to its last token.

    >>> chat = Workload(requests_per_second=20, input_tokens=1_000, output_tokens=400)
    >>> tokens_in_flight(chat, residence_seconds=10)
    240000.0
    """
    seconds = finite_seconds(residence_seconds, "residence_seconds")
    return workload.requests_per_second * workload.context_tokens * seconds


def replicas_needed(
    workload: Workload,
    *,
    prefill_tokens_per_second: float,
    decode_tokens_per_second: float,
    kv_cache_tokens: int,
    residence_seconds: float,
) -> int:
    """Replicas for a workload, from what one of them is measured to do.

    The largest of three: prompts over the rate of prefill, answers over the rate
    of decoding, tokens in flight over the KV cache. Not their sum: prefill is
    bound by arithmetic and decoding by reading memory, and a chunked step does
    both at a time. One rate for both would hide which of them runs out.

    >>> chat = Workload(requests_per_second=20, input_tokens=1_000, output_tokens=400)
    >>> replicas_needed(
    ...     chat,
    ...     prefill_tokens_per_second=30_000,
    ...     decode_tokens_per_second=4_500,
    ...     kv_cache_tokens=411_520,
    ...     residence_seconds=10,
    ... )
    2
    """
    prefill = _positive(prefill_tokens_per_second, "prefill_tokens_per_second")
    decode = _positive(decode_tokens_per_second, "decode_tokens_per_second")
    pool = positive_int(kv_cache_tokens, "kv_cache_tokens")
    flying = tokens_in_flight(workload, residence_seconds=residence_seconds)
    prompts = workload.requests_per_second * workload.prefill_tokens
    answers = workload.requests_per_second * workload.output_tokens
    return math.ceil(max(prompts / prefill, answers / decode, flying / pool))


def load_factor(tokens_per_second: float, *, base_tokens_per_second: float) -> float:
    """How much heavier the same tokens weigh on a replica of this speed than on the base's.

    >>> [round(load_factor(n, base_tokens_per_second=4_500), 3) for n in (4_500, 3_200, 2_800)]
    [1.0, 1.406, 1.607]
    """
    base = _positive(base_tokens_per_second, "base_tokens_per_second")
    return base / _positive(tokens_per_second, "tokens_per_second")


def autoscale_signal(
    *,
    tokens_in_flight: int,
    kv_cache_tokens: int,
    replicas: int,
    kv_cache_usage: float = 0.0,
    target_usage: float = 0.8,
) -> float:
    """By what to multiply the number of replicas: 1.0 is just right, 2.0 is twice as many.

    The larger of tokens in flight over all replicas' caches and the reported KV
    pressure (`kv_cache_usage`, 0 to 1), over the usage to aim for. Count those
    that wait as in flight: a full cache shows the same 100 % whether ten or ten
    thousand stand before it. Requests per second or GPU utilisation would not do:
    one request can cost a thousand times another, and a GPU that decodes is
    always busy. Autoscalers that follow a ratio (Kubernetes' does) take it as it is.

    >>> autoscale_signal(tokens_in_flight=1_200_000, kv_cache_tokens=400_000, replicas=3)
    1.25
    >>> autoscale_signal(
    ...     tokens_in_flight=600_000, kv_cache_tokens=400_000, replicas=3, kv_cache_usage=0.96
    ... )
    1.2
    """
    room = positive_int(replicas, "replicas") * positive_int(kv_cache_tokens, "kv_cache_tokens")
    pressure = _number(kv_cache_usage, "kv_cache_usage")
    if pressure > 1:
        raise ValueError(f"kv_cache_usage must be a share from 0 to 1, not {kv_cache_usage!r}")
    used = max(token_count(tokens_in_flight, "tokens_in_flight") / room, pressure)
    target = _positive(target_usage, "target_usage")
    if target > 1:
        raise ValueError(f"target_usage must be at most 1, not {target_usage!r}")
    return used / target


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `plan` recommends, and why.

    `max_num_batched_tokens` and `max_num_seqs` are settings of an engine, and
    arguments of `TokenScheduler`, as is `kv_cache_tokens`. `prefill_replicas`,
    `decode_replicas` and `memory_replicas` are what each of the three needs by
    itself; the largest is the `bottleneck`, and rounded up it is `replicas`.
    """

    replicas: int
    bottleneck: Bottleneck
    prefill_replicas: float
    decode_replicas: float
    memory_replicas: float
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_tokens: int


def plan(workload: Workload, deployment: Deployment, *, max_step_seconds: float) -> Plan:
    """Budget, sequences and replicas for a workload whose tokens come no further apart than this.

    Three things may run out on a replica, and more of the other two then helps nothing:

    - prefill: all tokens are arithmetic, and a step has a budget of them;
    - decode: a step has time to read the context of so many sequences, and each
      of them gets one token of it;
    - memory: the cache is full of sequences, by Little's law, before a step has
      become as slow as it may be.

    All are means, and replicas are busy all the time: there is no slack in it for
    bursts, so plan for the rate of the busiest minute.

    >>> llama = Deployment(MODELS["Llama-3.1-8B"], ACCELERATORS["H100"])
    >>> rag = Workload(requests_per_second=20, input_tokens=7_800, output_tokens=200)
    >>> chat = Workload(requests_per_second=160, input_tokens=200, output_tokens=800)
    >>> for each in (rag, chat):  # 160,000 tokens per second either way
    ...     needed = plan(each, llama, max_step_seconds=0.040)
    ...     print(needed.replicas, needed.bottleneck)
    3 prefill
    4 memory

    Raises:
        ValueError: no replica could meet the target, or hold one request of the mean size.
    """
    pool = max_cached_tokens(deployment)
    budget = token_budget(deployment, max_step_seconds=max_step_seconds)
    readable = _readable_tokens(deployment, max_step_seconds)
    sequences = min(pool, readable) / workload.context_tokens
    if sequences < 1:
        raise ValueError(
            f"a request holds {workload.context_tokens:,.0f} tokens on average, but {pool:,} fit "
            f"in memory, and {readable:,.0f} can be read in {max_step_seconds:g} s: "
            "raise tensor_parallel or max_step_seconds"
        )
    full = min(max_step_seconds, deployment.overhead_seconds + _reading_seconds(deployment, pool))
    residence = (workload.prefill_tokens / budget + workload.output_tokens) * full
    steps = workload.requests_per_second * max_step_seconds
    needed: dict[Bottleneck, float] = {
        "prefill": steps * (workload.prefill_tokens + workload.output_tokens) / budget,
        "decode": steps * workload.output_tokens * workload.context_tokens / readable,
        "memory": tokens_in_flight(workload, residence_seconds=residence) / pool,
    }
    return Plan(
        replicas=math.ceil(max(needed.values())),
        bottleneck=_bottleneck(needed, workload),
        prefill_replicas=needed["prefill"],
        decode_replicas=needed["decode"],
        memory_replicas=needed["memory"],
        max_num_batched_tokens=budget,
        max_num_seqs=math.floor(min(sequences, budget)),
        kv_cache_tokens=pool,
    )


def _readable_tokens(deployment: Deployment, max_step_seconds: float) -> float:
    """Tokens of context that a step has time to read beside the weights."""
    left = max_step_seconds - deployment.overhead_seconds - _reading_seconds(deployment, 0)
    return left * _bandwidth(deployment) / _kv_bytes(deployment)


def _bottleneck(needed: dict[Bottleneck, float], workload: Workload) -> Bottleneck:
    """The largest; where that is arithmetic, but most of it for answers, it is decoding."""
    largest = max(needed, key=needed.__getitem__)
    if largest == "prefill" and workload.output_tokens > workload.prefill_tokens:
        return "decode"
    return largest
