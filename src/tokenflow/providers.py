"""What providers allow, count and say, as data.

A `Provider` knows its quotas, what a call is charged at arrival and at the end, and what its
headers and its refusals mean. The presets here make one from the limits of an account:

>>> from tokenflow import TokenLimits, TokenSemaphore, providers
>>> provider = providers.openai(tpm=30_000, rpm=500)
>>> limits = TokenLimits(TokenSemaphore(100_000), provider)

`rpm`, `tpm` and so on are requests and tokens per minute, `rph` and `tph` per hour, `rpd` and
`tpd` per day, `itpm` and `otpm` input and output tokens per minute; None: not limited, or not
known. `slices` are periods, in seconds, by which a provider also counts requests, so that not
all of a minute's come at once: 60 a minute, in slices of a second, are one each second.
`leeway` is for network jitter: that many seconds are added to each period but the slices.

How providers count was gathered from documentation, SDKs and error messages in late 2026, and
drifts. All of it is frozen data, so that `dataclasses.replace` adapts a provider, or what one
request may hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

from ._headers import DAY, HOUR, MINUTE, MONTH
from ._provider import Provider, TokenWeights
from ._refusal import Refusal, RefusalKind, classify, read_status
from ._usage import positive_seconds
from .batching._request_limits import (
    AZURE_OPENAI_EMBEDDINGS,
    COHERE_EMBEDDINGS,
    DASHSCOPE_EMBEDDINGS,
    GEMINI_EMBEDDINGS,
    MISTRAL_EMBEDDINGS,
    OPENAI_BATCH,
    OPENAI_EMBEDDINGS,
    REQUEST_LIMITS,
    VERTEX_EMBEDDINGS,
    PackArguments,
    RequestLimits,
)
from .limits import Quota, Settle

__all__ = [
    "AZURE_OPENAI_EMBEDDINGS",
    "AZURE_REQUESTS_PER_1000_TOKENS",
    "BEDROCK_BURN_DOWN",
    "COHERE_EMBEDDINGS",
    "DASHSCOPE_EMBEDDINGS",
    "GEMINI_EMBEDDINGS",
    "MISTRAL_EMBEDDINGS",
    "OPENAI_BATCH",
    "OPENAI_EMBEDDINGS",
    "REQUEST_LIMITS",
    "VERTEX_EMBEDDINGS",
    "PackArguments",
    "Provider",
    "Refusal",
    "RefusalKind",
    "RequestLimits",
    "TokenWeights",
    "anthropic",
    "azure",
    "bedrock",
    "cerebras",
    "classify",
    "deepseek",
    "gemini",
    "generic",
    "groq",
    "mistral",
    "openai",
    "read_status",
]

AZURE_REQUESTS_PER_1000_TOKENS: Final = 6
"""What a deployment gets with its tokens; newer models may have another ratio."""

BEDROCK_BURN_DOWN: Final[Mapping[str, float]] = MappingProxyType(
    {"claude-opus-4": 5, "claude-sonnet-4": 5, "claude-haiku-4": 5}
)
"""What a generated token counts, by a part of the model's name; others count 1."""

_PERIODS: Final[Mapping[str, tuple[str, float]]] = {
    "rpm": ("requests", MINUTE),
    "rph": ("requests", HOUR),
    "rpd": ("requests", DAY),
    "tpm": ("tokens", MINUTE),
    "tph": ("tokens", HOUR),
    "tpd": ("tokens", DAY),
    "tokens_per_month": ("tokens", MONTH),
    "itpm": ("input_tokens", MINUTE),
    "otpm": ("output_tokens", MINUTE),
}
_NAMES: Final = {HOUR: " per hour", DAY: " per day", MONTH: " per month"}


def openai(
    *,
    rpm: int | None = None,
    tpm: int | None = None,
    rpd: int | None = None,
    tpd: int | None = None,
    counts: Literal["sum", "larger"] = "sum",
    slices: Iterable[float] = (),
    leeway: float = 0.0,
) -> Provider:
    """OpenAI: a call counts when it arrives, and nothing comes back.

    So a maximum that is not used costs quota all the same: declare what you need. By its
    documentation a call counts the `larger` of its input and its declared maximum, for each
    choice; the "sum" of both, the default, is safe whichever it is, and leaves unused what the
    smaller one is. A call that declares none counts what it is estimated at, and in the end
    what it has used.
    """
    is_larger = counts == "larger"
    if counts not in ("sum", "larger"):
        raise ValueError(f'counts must be "sum" or "larger", not {counts!r}')
    return _provider(
        "openai",
        {"rpm": rpm, "tpm": tpm, "rpd": rpd, "tpd": tpd},
        weights={"tokens": TokenWeights(reserve_declared=True, larger=True)} if is_larger else {},
        settle="reserved",
        slices=slices,
        leeway=leeway,
        repeats_input=is_larger,
        refills_steadily=True,
    )


def azure(
    *,
    tpm: int,
    rpm: int | None = None,
    slices: Iterable[float] = (10.0,),
    leeway: float = 0.0,
) -> Provider:
    """One deployment of Azure OpenAI: as `openai`, in fixed minutes.

    `rpm` follows from the tokens where it is not given, and is checked every ten seconds,
    for some models every second: `slices=(1.0, 10.0)`.
    """
    if rpm is None:
        rpm = max(1, tpm * AZURE_REQUESTS_PER_1000_TOKENS // 1000)
    return _provider(
        "azure",
        {"rpm": rpm, "tpm": tpm},
        settle="reserved",
        slices=slices,
        leeway=leeway,
        header_periods={"requests": MINUTE, "tokens": MINUTE},
    )


def anthropic(
    *,
    rpm: int | None = None,
    itpm: int | None = None,
    otpm: int | None = None,
    free_cache_reads: bool = True,
    reserve_declared: bool = False,
    leeway: float = 0.0,
) -> Provider:
    """Anthropic, for one class of models: input and output tokens apart.

    What is read from the cache is free with most models; `free_cache_reads=False` for the
    others. Output counts as it is generated; with `reserve_declared=True` the declared maximum
    is reserved for it first, as it was until early 2025.
    """
    weights = {}
    if free_cache_reads:
        weights["input_tokens"] = TokenWeights(cached=0, output=0, unit="input_tokens")
    if reserve_declared:
        weights["output_tokens"] = TokenWeights(
            input=0, cached=0, cache_write=0, reserve_declared=True, unit="output_tokens"
        )
    limits = {"rpm": rpm, "itpm": itpm, "otpm": otpm}
    return _provider("anthropic", limits, weights=weights, leeway=leeway, refills_steadily=True)


def gemini(
    *,
    rpm: int | None = None,
    tpm: int | None = None,
    rpd: int | None = None,
    leeway: float = 0.0,
) -> Provider:
    """Gemini, for one project: `tpm` are input tokens only. A 429 tells all, headers nothing."""
    return _provider("gemini", {"rpm": rpm, "itpm": tpm, "rpd": rpd}, leeway=leeway)


def bedrock(
    model: str = "",
    *,
    rpm: int | None = None,
    tpm: int | None = None,
    tpd: int | None = None,
    max_output_tokens: int | None = None,
    burn_down: float | None = None,
    leeway: float = 0.0,
) -> Provider:
    """Bedrock, for one model: the declared maximum at first, in the end the output times a rate.

    What is read from the cache is free in the end. `max_output_tokens` is the model's own: it
    is reserved for calls that declare none. `burn_down` is what a generated token counts; by
    default what `BEDROCK_BURN_DOWN` says for the model.

    >>> from tokenflow import Usage
    >>> provider = bedrock("us.anthropic.claude-sonnet-4-20250514-v1:0", tpm=200_000)
    >>> provider.quotas[0].of(Usage(input_tokens=2_005, output_tokens=200))
    3005
    """
    if burn_down is None:
        burn_down = next((rate for part, rate in BEDROCK_BURN_DOWN.items() if part in model), 1)
    weights = TokenWeights(cached=0, output=burn_down, reserve_declared=True)
    return _provider(
        "bedrock",
        {"rpm": rpm, "tpm": tpm, "tpd": tpd},
        weights={"tokens": weights},
        leeway=leeway,
        assumed_output_tokens=max_output_tokens,
    )


def groq(
    *,
    rpm: int | None = None,
    tpm: int | None = None,
    rpd: int | None = None,
    tpd: int | None = None,
    leeway: float = 0.0,
) -> Provider:
    """Groq: charged afterwards, cached input free. Its headers count requests by the day."""
    return _provider(
        "groq",
        {"rpm": rpm, "tpm": tpm, "rpd": rpd, "tpd": tpd},
        weights={"tokens": TokenWeights(cached=0)},
        leeway=leeway,
        refills_steadily=True,
        header_periods={"requests": DAY, "tokens": MINUTE},
    )


def cerebras(
    *,
    rpm: int | None = None,
    tpm: int | None = None,
    rph: int | None = None,
    tph: int | None = None,
    rpd: int | None = None,
    tpd: int | None = None,
    max_output_tokens: int | None = None,
    leeway: float = 0.0,
) -> Provider:
    """Cerebras: reserves the declared maximum, or else `max_output_tokens`, the model's own."""
    return _provider(
        "cerebras",
        {"rpm": rpm, "tpm": tpm, "rph": rph, "tph": tph, "rpd": rpd, "tpd": tpd},
        weights={"tokens": TokenWeights(reserve_declared=True)},
        leeway=leeway,
        assumed_output_tokens=max_output_tokens,
    )


def mistral(
    *,
    rpm: int | None = None,
    tpm: int | None = None,
    tokens_per_month: int | None = None,
    slices: Iterable[float] = (),
    leeway: float = 0.0,
) -> Provider:
    """Mistral: one request per second, where that is the limit, is `rpm=60, slices=(1.0,)`."""
    limits = {"rpm": rpm, "tpm": tpm, "tokens_per_month": tokens_per_month}
    return _provider("mistral", limits, slices=slices, leeway=leeway)


def deepseek(*, max_requests: int) -> Provider:
    """DeepSeek limits how many calls are open at a time, and nothing per minute."""
    return _provider("deepseek", {}, max_requests=max_requests)


def generic(
    name: str = "generic",
    *,
    rpm: int | None = None,
    tpm: int | None = None,
    rpd: int | None = None,
    tpd: int | None = None,
    itpm: int | None = None,
    otpm: int | None = None,
    max_requests: int | None = None,
    settle: Settle = "actual",
    slices: Iterable[float] = (),
    leeway: float = 0.0,
) -> Provider:
    """Anybody else; an engine of your own (vLLM, TGI) has at most `max_requests` calls open."""
    limits = {"rpm": rpm, "tpm": tpm, "rpd": rpd, "tpd": tpd, "itpm": itpm, "otpm": otpm}
    return _provider(
        name, limits, settle=settle, slices=slices, leeway=leeway, max_requests=max_requests
    )


def _provider(
    name: str,
    limits: Mapping[str, int | None],
    *,
    weights: Mapping[str, TokenWeights] = MappingProxyType({}),
    settle: Settle = "actual",
    slices: Iterable[float] = (),
    leeway: float = 0.0,
    **others: Any,
) -> Provider:
    quotas = []
    for key, limit in limits.items():
        if limit is not None:
            unit, per = _PERIODS[key]
            of = weights.get(unit, unit)
            named = unit + _NAMES.get(per, "")
            quotas.append(Quota(limit, per=per, of=of, settle=settle, leeway=leeway, name=named))
    rpm = limits.get("rpm")
    if rpm is not None:
        quotas += [_slice(rpm, seconds) for seconds in slices]
    prefix = f"{name}/"
    return Provider(
        name=name,
        quotas=tuple(quotas),
        request_limits={
            key.removeprefix(prefix): value
            for key, value in REQUEST_LIMITS.items()
            if key.startswith(prefix)
        },
        **others,
    )


def _slice(rpm: int, seconds: float) -> Quota:
    """A second quota, so short: of whole requests, and so of one at least."""
    share = max(1, int(rpm * positive_seconds(seconds, "slices") / MINUTE))
    per = max(seconds, share * MINUTE / rpm)
    return Quota(share, per=per, of="requests", name=f"requests per {per:g} s")
