"""Providers: what presets count, what reaches which quota, and that reports never hurt."""

import copy
import dataclasses
import json
import math
import pickle
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Run
from tests.oracle import Admitted, sizes
from tests.servers import Bucket, Minute, Server
from tokenflow import (
    FairShare,
    Fifo,
    QueueFull,
    Quota,
    QuotaStatus,
    RateLimitStatus,
    Request,
    RequestTooLarge,
    TokenLimits,
    TokenRateLimiter,
    TokenSemaphore,
    Usage,
    WaitTimeout,
    providers,
)
from tokenflow.limits import InFlightGate, Limiter
from tokenflow.providers import Provider, TokenWeights
from tokenflow.testing import FakeProvider, approximate_tokens

DAY = 86_400.0
SMALL = Usage(input_tokens=1)


def limits_of(provider: Provider) -> dict[str, tuple[int, float]]:
    return {quota.name: (quota.limit, quota.per) for quota in provider.quotas}


def cost(provider: Provider, name: str, usage: Usage) -> int:
    """What a call costs at the quota of this name, the limiter's way."""
    only = next(quota for quota in provider.quotas if quota.name == name)
    limiter = TokenRateLimiter(dataclasses.replace(only, limit=10**9))
    limiter.acquire_nowait(usage).release()
    return limiter.statistics().quotas[0].used


def used(limiter: Limiter) -> dict[str, int]:
    assert isinstance(limiter, TokenRateLimiter)
    return {quota.name: quota.used for quota in limiter.statistics().quotas}


# -- presets ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "expected"),
    [
        (
            providers.openai(rpm=500, tpm=30_000, rpd=10_000, tpd=90_000),
            {
                "requests": (500, 60),
                "tokens": (30_000, 60),
                "requests per day": (10_000, DAY),
                "tokens per day": (90_000, DAY),
            },
        ),
        (
            providers.azure(tpm=120_000),
            {"requests": (720, 60), "tokens": (120_000, 60), "requests per 10 s": (120, 10)},
        ),
        (
            providers.anthropic(rpm=50, itpm=30_000, otpm=8_000),
            {"requests": (50, 60), "input_tokens": (30_000, 60), "output_tokens": (8_000, 60)},
        ),
        (
            providers.gemini(rpm=15, tpm=250_000, rpd=1_000),
            {
                "requests": (15, 60),
                "input_tokens": (250_000, 60),
                "requests per day": (1_000, DAY),
            },
        ),
        (
            providers.bedrock(rpm=200, tpm=200_000, tpd=10**8),
            {"requests": (200, 60), "tokens": (200_000, 60), "tokens per day": (10**8, DAY)},
        ),
        (
            providers.groq(rpm=30, tpm=6_000, rpd=14_400, tpd=500_000),
            {
                "requests": (30, 60),
                "tokens": (6_000, 60),
                "requests per day": (14_400, DAY),
                "tokens per day": (500_000, DAY),
            },
        ),
        (
            providers.cerebras(rph=900, tph=10**6),
            {"requests per hour": (900, 3_600), "tokens per hour": (10**6, 3_600)},
        ),
        (
            providers.mistral(rpm=60, tpm=500_000, tokens_per_month=10**9, slices=(1.0,)),
            {
                "requests": (60, 60),
                "tokens": (500_000, 60),
                "tokens per month": (10**9, 31 * DAY),
                "requests per 1 s": (1, 1),
            },
        ),
        (providers.deepseek(max_requests=9), {}),
        (
            providers.generic("ours", itpm=5, otpm=6),
            {"input_tokens": (5, 60), "output_tokens": (6, 60)},
        ),
        (providers.generic(), {}),
    ],
    ids=lambda value: value.name if isinstance(value, Provider) else "",
)
def test_the_quotas_of_a_preset(provider: Provider, expected: dict[str, tuple[int, float]]) -> None:
    assert limits_of(provider) == expected


@pytest.mark.parametrize(
    ("rpm", "seconds", "expected"),
    [(60, 1.0, (1, 1)), (500, 1.0, (8, 1)), (6, 1.0, (1, 10)), (100, 10.0, (16, 10))],
)
def test_a_slice_is_of_whole_requests(
    rpm: int, seconds: float, expected: tuple[int, float]
) -> None:
    provider = providers.openai(rpm=rpm, slices=(seconds,))
    *_, (limit, per) = limits_of(provider).values()
    assert (limit, per) == expected
    assert limit / per <= rpm / 60


def test_a_small_deployment_may_send_a_request() -> None:
    assert limits_of(providers.azure(tpm=100, slices=()))["requests"] == (1, 60)
    assert limits_of(providers.azure(tpm=100, rpm=7, slices=()))["requests"] == (7, 60)


def test_slices_need_a_limit_to_slice() -> None:
    assert providers.openai(tpm=100, slices=(1.0,)).quotas == (Quota(100, settle="reserved"),)


def test_leeway_is_added_to_each_period_but_slices() -> None:
    provider = providers.azure(tpm=10_000, leeway=1.5)
    assert [quota.leeway for quota in provider.quotas] == [1.5, 1.5, 0]


PROMPT = Usage(input_tokens=1_000, output_tokens=50, max_output_tokens=400)
ANSWER = Usage(input_tokens=1_000, cached_tokens=600, cache_write_tokens=100, output_tokens=80)


@pytest.mark.parametrize(
    ("provider", "name", "at_arrival", "in_the_end"),
    [
        (providers.openai(tpm=1), "tokens", 1_400, 1_080),
        (providers.openai(tpm=1, counts="larger"), "tokens", 1_000, 1_000),
        (providers.azure(tpm=1), "tokens", 1_400, 1_080),
        (providers.anthropic(itpm=1), "input_tokens", 1_000, 400),
        (providers.anthropic(itpm=1, free_cache_reads=False), "input_tokens", 1_000, 1_000),
        (providers.anthropic(otpm=1), "output_tokens", 50, 80),
        (providers.anthropic(otpm=1, reserve_declared=True), "output_tokens", 400, 80),
        (providers.gemini(tpm=1), "input_tokens", 1_000, 1_000),
        (providers.bedrock("meta.llama3", tpm=1), "tokens", 1_400, 480),
        (providers.bedrock("us.anthropic.claude-opus-4-1", tpm=1), "tokens", 1_400, 800),
        (providers.bedrock("anthropic.claude-3-haiku", tpm=1), "tokens", 1_400, 480),
        (providers.bedrock("some.model", tpm=1, burn_down=2.5), "tokens", 1_400, 600),
        (providers.groq(tpm=1), "tokens", 1_050, 480),
        (providers.cerebras(tpm=1), "tokens", 1_400, 1_080),
        (providers.mistral(tpm=1), "tokens", 1_050, 1_080),
        (providers.generic(tpm=1), "tokens", 1_050, 1_080),
        (providers.generic(tpm=1, settle="reserved"), "tokens", 1_400, 1_080),
    ],
)
def test_what_counts_at_arrival_and_what_in_the_end(
    provider: Provider, name: str, at_arrival: int, in_the_end: int
) -> None:
    assert cost(provider, name, PROMPT) == at_arrival
    assert cost(provider, name, ANSWER) == in_the_end


def test_openai_by_its_documentation_counts_the_larger_for_each_choice() -> None:
    provider = providers.openai(tpm=30_000, counts="larger")
    request = Request(input_tokens=900, max_output_tokens=400, choices=3)
    assert cost(provider, "tokens", provider.charge(request, 50)) == 2_700
    undeclared = Request(input_tokens=900, choices=3)
    assert cost(provider, "tokens", provider.charge(undeclared, 50)) == 2_700
    limiter = provider.limiter()
    limiter.acquire_nowait(500).release()  # a total counts as it is
    assert used(limiter) == {"tokens": 500}
    with pytest.raises(ValueError, match="counts must be"):
        providers.openai(counts="smaller")  # type: ignore[arg-type]


def test_openai_gives_nothing_back_but_counts_an_overrun() -> None:
    """(graphrag 757): what was really used is charged, past the estimate."""
    limiter = providers.openai(tpm=30_000).limiter()
    for actual, expected in ((80, 1_400), (5_000, 6_000)):
        with limiter.acquire_nowait(PROMPT) as lease:
            lease.reconcile(Usage(input_tokens=1_000, output_tokens=actual))
        assert used(limiter) == {"tokens": expected}
        limiter = providers.openai(tpm=30_000).limiter()


@pytest.mark.parametrize("counts", ["sum", "larger"])
def test_openai_settles_at_the_truth_what_declares_nothing(
    counts: Literal["sum", "larger"],
) -> None:
    provider = providers.openai(tpm=30_000, counts=counts)
    actual = Usage(input_tokens=700, output_tokens=80)
    for choices, (at_arrival, in_the_end) in {
        1: {"sum": (2_300, 780), "larger": (1_600, 700)}[counts],
        3: {"sum": (2_300, 780), "larger": (2_100, 2_100)}[counts],
    }.items():
        limiter = provider.limiter()
        reserved = provider.charge(Request(input_tokens=700, choices=choices), 1_600)
        with limiter.acquire_nowait(reserved) as lease:
            assert used(limiter) == {"tokens": at_arrival}
            lease.reconcile(actual)
        assert used(limiter) == {"tokens": in_the_end}


def test_bedrock_settles_for_less_or_for_more() -> None:
    provider = providers.bedrock("claude-sonnet-4", tpm=200_000)
    for output, expected in ((20, 1_100), (400, 3_000)):
        limiter = provider.limiter()
        with limiter.acquire_nowait(PROMPT) as lease:
            lease.reconcile(Usage(input_tokens=1_000, output_tokens=output))
        assert used(limiter) == {"tokens": expected}


@given(
    usage=st.builds(
        lambda fresh, cached, written, output, most: Usage(
            input_tokens=fresh + cached + written,
            cached_tokens=cached,
            cache_write_tokens=written,
            output_tokens=output,
            max_output_tokens=most,
        ),
        *[st.integers(0, 10**7)] * 4,
        st.none() | st.integers(0, 10**7),
    )
)
def test_weights_are_additive_and_whole(usage: Usage) -> None:
    assert TokenWeights()(usage) == usage.total_tokens
    assert TokenWeights(cached=0)(usage) == usage.total_tokens - usage.cached_tokens
    assert TokenWeights(input=0, cached=0, output=0)(usage) == usage.cache_write_tokens
    weighted = TokenWeights(input=0.1, cached=0, cache_write=0, output=0)(usage)
    fresh = usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens
    assert fresh / 10 - 1e-6 <= weighted < fresh / 10 + 1


# -- what to reserve ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Request(input_tokens=80), None),
        (Request(input_tokens=80, max_output_tokens=0), 0),
        (Request(input_tokens=80, max_output_tokens=256), 256),
        # n multiplies (openai-python 605).
        (Request(input_tokens=80, max_output_tokens=256, choices=5), 1_280),
        # Of two maxima the larger counts (litellm 34223).
        (
            Request.from_body({"max_tokens": 1, "max_completion_tokens": 738}, input_tokens=80),
            738,
        ),
    ],
)
def test_what_a_call_declares_is_reserved(request_: Request, expected: int | None) -> None:
    charge = providers.openai(tpm=1).charge(request_, 300)
    assert charge == Usage(input_tokens=80, output_tokens=300, max_output_tokens=expected)


def test_a_maximum_that_is_assumed() -> None:
    provider = providers.bedrock(tpm=1, max_output_tokens=64_000)
    undeclared = provider.charge(Request(input_tokens=80, choices=2), 300)
    assert undeclared.max_output_tokens == 128_000
    assert cost(provider, "tokens", undeclared) == 128_080
    declared = provider.charge(Request(input_tokens=80, max_output_tokens=100), 90)
    assert declared.max_output_tokens == 100


# -- limiters -------------------------------------------------------------------------


def test_a_call_above_the_quota_is_refused_at_once() -> None:
    """(shell_gpt 653, agent-zero 711): it was retried for ever."""
    limiter = providers.openai(tpm=30_000, rpm=500).limiter()
    with pytest.raises(RequestTooLarge) as caught:
        limiter.acquire_nowait(Usage(input_tokens=35_000, max_output_tokens=1_055))
    assert (caught.value.cost, caught.value.limit) == (36_055, 30_000)


def test_tokens_and_requests_are_counted_together() -> None:
    """(crewAI 494, 2906): one limiter for every component."""
    limiter = providers.openai(tpm=1_000, rpm=2).limiter()
    limiter.acquire_nowait(Usage(input_tokens=100)).release()
    limiter.acquire_nowait(Usage(input_tokens=100)).release()
    assert used(limiter) == {"requests": 2, "tokens": 200}
    with pytest.raises(anyio.WouldBlock):
        limiter.acquire_nowait(Usage(input_tokens=100))


def test_each_limiter_has_windows_of_its_own() -> None:
    provider = providers.openai(tpm=1_000)
    one, other = provider.limiter(), provider.limiter()
    one.acquire_nowait(900).release()
    assert (used(one), used(other)) == ({"tokens": 900}, {"tokens": 0})


@pytest.mark.anyio
@pytest.mark.parametrize(
    "provider", [providers.generic(tpm=10), providers.generic(max_requests=1)], ids=["rate", "open"]
)
async def test_a_limiter_takes_the_settings_of_any(provider: Provider) -> None:
    limiter = provider.limiter(order=FairShare(), max_waiting=0, oversize="alone")
    async with limiter.reserve(20, tenant="a"):
        with pytest.raises(QueueFull):
            await limiter.acquire(20, tenant="b")


def test_deepseek_counts_open_calls() -> None:
    limiter = providers.deepseek(max_requests=2).limiter()
    one, _two = (limiter.acquire_nowait(SMALL) for _ in range(2))
    with pytest.raises(anyio.WouldBlock):
        limiter.acquire_nowait(SMALL)
    one.release()
    with limiter.acquire_nowait(SMALL), _two:
        pass


@pytest.mark.anyio
@pytest.mark.parametrize(
    "provider",
    [providers.generic(), providers.deepseek(max_requests=5), providers.openai(tpm=100)],
    ids=lambda provider: provider.name,
)
async def test_each_limiter_can_be_paused(provider: Provider) -> None:
    limiter = provider.limiter()
    limiter.observe(provider.status({"retry-after": "7"}))
    assert limiter.delay(1) == pytest.approx(7)
    limiter.pause(9)
    assert limiter.delay(SMALL) == pytest.approx(9)
    limiter.observe(provider.status({"x-ratelimit-remaining-requests": "0"}))
    assert limiter.delay(SMALL) == pytest.approx(9)


# -- what reaches which quota -----------------------------------------------------------


def said(unit: str, limit: int, left: int, reset: str, period: str = "") -> dict[str, str]:
    return {
        f"x-ratelimit-{what}-{unit}{period}": value
        for what, value in (("limit", str(limit)), ("remaining", str(left)), ("reset", reset))
    }


def anthropic_said(unit: str, limit: int, left: int) -> dict[str, str]:
    return {
        "date": "Tue, 14 Nov 2023 22:13:20 GMT",
        f"anthropic-ratelimit-{unit}-limit": str(limit),
        f"anthropic-ratelimit-{unit}-remaining": str(left),
        f"anthropic-ratelimit-{unit}-reset": "2023-11-14T22:13:35Z",
    }


@pytest.mark.parametrize(
    ("provider", "headers", "expected"),
    [
        (
            providers.openai(rpm=500, tpm=30_000, rpd=10_000, tpd=10**6, slices=(1.0,)),
            said("tokens", 30_000, 21_446, "17.108s"),
            {"tokens": 8_554},
        ),
        (
            providers.openai(rpm=500, tpm=30_000, rpd=10_000, slices=(1.0,)),
            said("requests", 500, 490, "1.2s"),
            {"requests": 10},
        ),
        (
            providers.openai(rpm=500, tpm=30_000, rpd=10_000, slices=(1.0,)),
            said("requests", 10_000, 9_990, "1m26.4s"),
            {"requests per day": 10},
        ),
        # Nothing per day was declared: it must not be taken for what there is per minute.
        (providers.openai(rpm=500), said("requests", 10_000, 9_990, "1m26.4s"), {}),
        (
            providers.groq(rpm=30, tpm=6_000, rpd=14_400),
            said("requests", 14_400, 14_300, "10m0s"),
            {"requests per day": 100},
        ),
        (providers.groq(rpm=30), said("requests", 14_400, 14_300, "10m0s"), {}),
        (providers.groq(tpm=6_000), said("tokens", 6_000, 5_000, "10s"), {"tokens": 1_000}),
        (providers.azure(tpm=10_000), said("tokens", 10_000, 9_000, "55"), {"tokens": 1_000}),
        (providers.azure(tpm=10_000), said("requests", 60, 20, "55"), {"requests": 40}),
        (providers.azure(tpm=10_000), said("tokens", 10_000, -1, "55"), {}),
        (
            providers.mistral(tpm=9_000, tokens_per_month=10**9),
            said("tokens", 10**9, 10**9 - 7, "1", "-month"),
            {"tokens per month": 7},
        ),
        (
            providers.cerebras(tpm=9_000, tph=90_000),
            said("tokens", 90_000, 80_000, "900", "-hour"),
            {"tokens per hour": 10_000},
        ),
        (
            providers.anthropic(rpm=50, itpm=30_000, otpm=8_000),
            anthropic_said("input-tokens", 30_000, 20_100),
            {"input_tokens": 9_900},
        ),
        (
            providers.anthropic(rpm=50, itpm=30_000, otpm=8_000),
            anthropic_said("output-tokens", 8_000, 5_000),
            {"output_tokens": 2_500},
        ),
        (
            providers.anthropic(rpm=50, itpm=30_000, otpm=8_000),
            anthropic_said("tokens", 38_000, 5_000),
            {},
        ),
    ],
)
def test_headers_reach_the_quota_that_they_mean(
    provider: Provider, headers: dict[str, str], expected: dict[str, int]
) -> None:
    limiter = provider.limiter()
    before = limits_of(provider)
    limiter.observe(provider.status(headers))
    assert {name: tokens for name, tokens in used(limiter).items() if tokens} == expected
    assert isinstance(limiter, TokenRateLimiter)
    after = {quota.name: (quota.limit, quota.per) for quota in limiter.statistics().quotas}
    assert after == before


@pytest.mark.parametrize("preset", [providers.openai, providers.groq, providers.generic])
def test_what_names_no_period_is_per_minute(preset: Callable[..., Provider]) -> None:
    (quota,) = preset(tpm=5).status({"x-ratelimit-remaining-tokens": "5"}).quotas
    assert quota.per == 60


@pytest.mark.parametrize(
    ("provider", "steadily"),
    [
        (providers.openai(), True),
        (providers.groq(), True),
        (providers.anthropic(), True),
        (providers.azure(tpm=1), False),
        (providers.generic(), False),
    ],
    ids=lambda value: value.name if isinstance(value, Provider) else "",
)
def test_which_quotas_are_buckets(provider: Provider, steadily: bool) -> None:
    (quota,) = provider.status({"x-ratelimit-remaining-tokens": "5"}).quotas
    assert quota.refills_steadily is steadily


def test_a_lower_limit_is_adopted_and_a_higher_one_is_not() -> None:
    provider = providers.openai(tpm=30_000, rpm=500)
    limiter = provider.limiter()
    for told, largest in ((2_000_000, 30_000), (20_000, 20_000), (2_000_000, 30_000)):
        limiter.observe(provider.status(said("tokens", told, told, "0s")))
        assert limiter.delay(largest) == 0
        with pytest.raises(RequestTooLarge):
            limiter.delay(largest + 1)


def test_what_gemini_says_in_a_body_reaches_its_quota() -> None:
    provider = providers.gemini(tpm=250_000, rpm=15)
    quota = {"quotaId": "InputTokensPerModelPerMinute", "quotaValue": "125000"}
    body = {"error": {"details": [{"violations": [quota]}, {"retryDelay": "30s"}]}}
    limiter = provider.limiter()
    limiter.observe(provider.status({}, body))
    assert limiter.delay(SMALL) == pytest.approx(31, abs=1)
    with pytest.raises(RequestTooLarge):
        limiter.delay(Usage(input_tokens=125_001))


@pytest.mark.anyio
async def test_the_latest_delay_counts() -> None:
    """(litellm 20722): the back-off came from the first 429 only."""
    provider = providers.openai(tpm=30_000)
    limiter = provider.limiter()
    limiter.observe(provider.status({"retry-after": "2"}))
    await anyio.sleep(1)
    limiter.observe(provider.status({"retry-after-ms": "9816"}))
    assert limiter.delay(10) == pytest.approx(9.816)


@pytest.mark.parametrize(("delay", "paused"), [("120", 120), ("121", 0)])
def test_nobody_pauses_longer_than_the_longest_wait(delay: str, paused: float) -> None:
    provider = providers.openai(tpm=30_000)
    refused = SimpleNamespace(status_code=429, headers={"retry-after": delay})
    refusal = provider.classify(refused)
    assert refusal is not None
    assert refusal.kind == ("wait" if paused else "exhausted")
    assert refusal.retry_after == float(delay)
    assert provider.status(refused.headers).retry_after == (paused or None)


def test_the_longest_wait_is_the_providers() -> None:
    provider = dataclasses.replace(providers.openai(tpm=30_000), longest_wait=7_200)
    assert provider.status({"retry-after": "7200"}).retry_after == 7_200
    refusal = provider.classify(SimpleNamespace(status_code=429, headers={"retry-after": "7200"}))
    assert refusal is not None
    assert refusal.kind == "wait"


def test_status_passes_on_what_it_is_given() -> None:
    status = providers.generic().status(
        {"retry-after": "Tue, 14 Nov 2023 22:13:30 GMT"}, age=3.0, unix_now=1_700_000_000.0
    )
    assert status == RateLimitStatus(retry_after=10.0, age=3.0)


# -- the value ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"quotas": (60_000,)}, TypeError),
        ({"quotas": Quota(1)}, TypeError),
        ({"max_requests": 0}, ValueError),
        ({"max_requests": 1.5}, TypeError),
        ({"assumed_output_tokens": -1}, ValueError),
        ({"longest_wait": 0}, ValueError),
        ({"longest_wait": math.nan}, ValueError),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Provider(name="ours", **settings)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, True, "1", None])
@pytest.mark.parametrize("name", ["input", "cached", "cache_write", "output"])
def test_weights_that_make_no_sense(name: str, weight: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a finite weight"):
        TokenWeights(**{name: weight})


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        (providers.openai, {"tpm": 0}),
        (providers.openai, {"rpm": -1}),
        (providers.azure, {"tpm": 1.5}),
        (providers.openai, {"rpm": 60, "slices": (0,)}),
        (providers.deepseek, {"max_requests": 0}),
        (providers.openai, {"tpm": 1, "leeway": -1}),
    ],
    ids=repr,
)
def test_presets_refuse_what_makes_no_sense(
    preset: Callable[..., Provider], settings: dict[str, Any]
) -> None:
    with pytest.raises((TypeError, ValueError)):
        preset(**settings)


def test_a_provider_is_a_value() -> None:
    for provider in (
        providers.openai(tpm=30_000, rpm=500),
        providers.bedrock("claude-sonnet-4", tpm=5),
        providers.groq(tpm=5),
    ):
        assert pickle.loads(pickle.dumps(provider)) == copy.deepcopy(provider) == provider
        assert hash(copy.deepcopy(provider)) == hash(provider)
        with pytest.raises(dataclasses.FrozenInstanceError):
            provider.name = "other"  # type: ignore[misc]


def test_a_list_of_quotas_becomes_a_tuple() -> None:
    provider = Provider(name="ours", quotas=[Quota(5)])  # type: ignore[arg-type]
    assert provider.quotas == (Quota(5),)


def test_what_one_request_may_hold_is_linked() -> None:
    assert providers.openai().request_limits == {
        "embeddings": providers.OPENAI_EMBEDDINGS,
        "batch": providers.OPENAI_BATCH,
    }
    assert providers.azure(tpm=1).request_limits["embeddings"].max_items == 2_048
    assert providers.generic().request_limits == {}
    assert providers.generic("cohere").request_limits["embeddings"].max_items == 96


# -- as a member of limits --------------------------------------------------------------


def test_limits_take_a_provider_and_make_its_limiter() -> None:
    provider, semaphore = providers.openai(tpm=1_000, rpm=9), TokenSemaphore(500)
    limits = TokenLimits(semaphore, provider)
    with limits.acquire_nowait(400):
        _, rate = limits.members
        assert limits.members[0] is semaphore
        assert used(rate) == {"requests": 1, "tokens": 400}  # type: ignore[arg-type]
        assert limits.statistics().members[1].quotas[1].used == 400
        assert "400 of 1,000 tokens per 60 s" in repr(limits)
    with pytest.raises(RequestTooLarge):
        limits.acquire_nowait(1_001)


def test_limits_make_a_new_limiter_each_time() -> None:
    provider = providers.openai(tpm=1_000)
    one, other = TokenLimits(provider), TokenLimits(provider)
    one.acquire_nowait(900).release()
    other.acquire_nowait(900).release()
    assert [limits.members[0].statistics().quotas[0].used for limits in (one, other)] == [900, 900]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "member",
    [
        None,
        5,
        Provider,
        TokenRateLimiter,
        InFlightGate,
        Quota(5),
        SimpleNamespace(limiter=None),
        SimpleNamespace(limiter=lambda: None),
        SimpleNamespace(limiter=lambda: TokenRateLimiter),
        SimpleNamespace(limiter=lambda: InFlightGate(5)),
    ],
    ids=repr,
)
def test_limits_refuse_what_is_neither_limiter_nor_gate_nor_makes_one(member: Any) -> None:
    with pytest.raises(TypeError, match="takes limiters, gates and providers, not"):
        TokenLimits(member)


@pytest.mark.anyio
async def test_limits_pass_reports_and_pauses_on() -> None:
    provider = providers.openai(tpm=1_000, rpm=100)
    rate = provider.limiter()
    limits = TokenLimits(TokenSemaphore(500), TokenLimits(InFlightGate(5, of="requests"), rate))
    limits.observe(provider.status(said("tokens", 1_000, 100, "54s") | {"retry-after": "3"}))
    assert used(rate) == {"requests": 0, "tokens": 900}
    assert limits.delay(100) == pytest.approx(3)
    limits.pause(8)
    assert limits.delay(100) == rate.delay(100) == pytest.approx(8)


def test_limits_without_a_window_cannot_be_paused() -> None:
    limits = TokenLimits(TokenSemaphore(500), TokenLimits(InFlightGate(500)))
    with pytest.raises(ValueError, match="no member can be paused"):
        limits.pause(5)
    limits.observe(RateLimitStatus(retry_after=5))
    assert limits.delay(100) == 0
    with pytest.raises(ValueError, match="seconds must be"):
        TokenLimits(providers.openai(tpm=5)).pause(-1)


def test_a_tenants_report_reaches_its_ledger() -> None:
    limits = TokenLimits(Provider(name="ours", quotas=(Quota(100, by="tenant"),)))
    status = RateLimitStatus(quotas=(QuotaStatus(of="tokens", remaining=0, reset=30),))
    limits.observe(status, tenant="a")
    assert limits.delay(1, tenant="a") > 0
    assert limits.delay(100, tenant="b") == 0


# -- against a server ---------------------------------------------------------------------

LIMIT = 60_000


class Outcome(NamedTuple):
    """What went through, by us and by others, and how often we were refused."""

    ours: Admitted
    others: int
    refused: int

    @property
    def share(self) -> float:
        return sum(cost for _, cost in self.ours) / self.ours[-1][0] * 60 / LIMIT


async def drive(
    provider: Provider,
    server: Server,
    *,
    seconds: float,
    is_told: bool,
    others: int = 0,
    every: float = 1.0,
    latency: float = 1.0,
    pause: float = 0.0,
    workers: int = 12,
    is_early: bool = True,
) -> Outcome:
    """Workers who send through a limiter of this provider, beside somebody who knows none."""
    limiter = provider.limiter(order=Fifo(backfill=False))  # so that orders can be compared
    ours: Admitted = []
    taken = refused = 0
    size = sizes(5)

    started = anyio.current_time()

    def clock() -> float:
        return anyio.current_time() - started

    def headers() -> dict[str, str]:
        now = server.said(clock())
        reset = math.ceil(now["reset"]) if provider.name == "azure" else f"{now['reset']:.3f}s"
        return said("tokens", now["limit"], now["remaining"], str(reset))

    def tell(headers: dict[str, str], sent: float) -> None:
        if is_told:
            limiter.observe(provider.status(headers, age=clock() - sent))

    async def send(tokens: int) -> bool:
        nonlocal refused
        async with limiter.reserve(Usage(input_tokens=tokens)) as lease:
            sent = clock()
            wait = server.take(tokens, sent)
            at_arrival = headers()
            if wait:
                refused += 1
                tell(at_arrival, sent)
                limiter.pause(wait)
                lease.cancel()
                return False
            ours.append((sent, tokens))
            await anyio.sleep(latency)
            tell(at_arrival if is_early else headers(), sent)
            return True

    async def worker() -> None:
        while True:
            tokens = size()
            while not await send(tokens):
                pass
            await anyio.sleep(pause)

    async def somebody() -> None:
        nonlocal taken
        while True:
            taken += others * (server.take(others, clock()) == 0)
            await anyio.sleep(every)

    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as tasks:
            for _ in range(workers):
                tasks.start_soon(worker)
            if others:
                tasks.start_soon(somebody)
    return Outcome(ours, taken, refused)


OPENAI = providers.openai(tpm=LIMIT)
AZURE = providers.azure(tpm=LIMIT, slices=())


@pytest.mark.anyio
@pytest.mark.parametrize("latency", [0.5, 45.0])
@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("name", ["openai", "azure"])
async def test_reports_cost_nothing_to_who_is_alone(
    name: str, is_early: bool, latency: float
) -> None:
    provider = OPENAI if name == "openai" else AZURE
    outcomes = [
        await drive(
            provider,
            Bucket(LIMIT) if name == "openai" else Minute(LIMIT, 17.0),
            seconds=400,
            is_told=is_told,
            is_early=is_early,
            latency=latency,
            workers=12 if latency < 1 else 50,
        )
        for is_told in (False, True)
    ]
    # Those who were let in together resume in any order.
    untold, told = (
        sorted((round(at, 6), tokens) for at, tokens in outcome.ours) for outcome in outcomes
    )
    assert told == untold
    assert [outcome.refused for outcome in outcomes] == [0, 0]


@pytest.mark.anyio
@pytest.mark.parametrize("is_early", [True, False])
async def test_who_eats_from_the_same_bucket_is_noticed(is_early: bool) -> None:
    """Three tenths of it."""
    untold, told = [
        await drive(
            OPENAI, Bucket(LIMIT), seconds=600, is_told=is_told, is_early=is_early, others=300
        )
        for is_told in (False, True)
    ]
    assert untold.refused > 300
    assert told.refused < 60
    assert told.others >= untold.others
    assert told.share > 0.7


@pytest.mark.anyio
@pytest.mark.parametrize("provider", [OPENAI, AZURE], ids=lambda provider: provider.name)
async def test_a_call_for_which_others_left_no_room_is_not_sent(provider: Provider) -> None:
    server: Server = Bucket(LIMIT) if provider is OPENAI else Minute(LIMIT)
    limiter = provider.limiter()
    started = anyio.current_time()
    await anyio.sleep(5)
    server.take(54_000, 5.0)
    with limiter.acquire_nowait(Usage(input_tokens=1_000)):
        server.take(1_000, 5.0)
        now = server.said(5.0)
        await anyio.sleep(1)
        headers = said("tokens", LIMIT, now["remaining"], str(now["reset"]))
        limiter.observe(provider.status(headers, age=1.0))
    assert server.take(8_000, 6.0) > 0
    async with limiter.reserve(Usage(input_tokens=8_000)):
        waited = anyio.current_time() - started
    assert waited <= 60
    assert server.take(8_000, waited) == 0


@pytest.mark.anyio
async def test_after_a_restart_the_wait_is_the_servers() -> None:
    """What we used is others' use to a new process: it waits until there is room, not longer."""
    bucket = Bucket(10_000)
    bucket.take(8_554, anyio.current_time())
    provider = providers.openai(tpm=10_000)
    limiter = provider.limiter()
    wait = bucket.take(3_082, anyio.current_time())
    assert wait == pytest.approx(9.816)
    limiter.observe(provider.status(said("tokens", 10_000, 1_446, "51.324s")))
    assert wait <= limiter.delay(3_082) <= wait + 51.324 / 20
    with pytest.raises(WaitTimeout):
        await limiter.acquire(3_082, max_wait=1)


FAKES: dict[str, tuple[Provider, Callable[[], FakeProvider]]] = {
    "openai": (
        providers.openai(tpm=LIMIT, rpm=300),
        lambda: FakeProvider.openai(tpm=LIMIT, rpm=300, counts="declared"),
    ),
    "azure": (providers.azure(tpm=LIMIT), lambda: FakeProvider.azure(tpm=LIMIT)),
    "groq": (
        providers.groq(tpm=LIMIT, rpm=300, rpd=14_400),
        lambda: FakeProvider.groq(tpm=LIMIT, rpm=300, rpd=14_400),
    ),
    "anthropic": (
        providers.anthropic(rpm=300, itpm=LIMIT, otpm=LIMIT // 4),
        lambda: FakeProvider.anthropic(rpm=300, itpm=LIMIT, otpm=LIMIT // 4),
    ),
}


MODEL = {"model": "m"}


async def use(
    provider: Provider, fake: FakeProvider, *, is_told: bool, workers: int = 16
) -> tuple[int, int]:
    """Saturate it for five minutes: tokens that went through, and refusals."""
    limiter = provider.limiter()
    path = "/v1/messages" if provider.name == "anthropic" else "/v1/chat/completions"
    words = random.Random(3)
    tokens = refusals = 0

    async def worker() -> None:
        nonlocal tokens, refusals
        while True:
            text = "hello " * words.randint(50, 1_500)
            body = {"max_tokens": 400, "messages": [{"role": "user", "content": text}]}
            request = Request.from_body(body, input_tokens=approximate_tokens(body))
            async with limiter.reserve(provider.charge(request, 200)) as lease:
                sent = anyio.current_time()
                answer = await fake.respond("POST", path, body={**body, **MODEL})
                said = json.loads(await answer.read())
                outcome = SimpleNamespace(status_code=answer.status, headers=answer.headers)
                if is_told:
                    age = anyio.current_time() - sent
                    limiter.observe(provider.status(answer.headers, said, age=age))
                if provider.classify(outcome):
                    refusals += 1
                    await anyio.sleep(1)
                else:
                    lease.reconcile(Usage.from_response(said))
                    tokens += Usage.from_response(said).total_tokens

    with anyio.move_on_after(300):
        async with anyio.create_task_group() as tasks:
            for _ in range(workers):
                tasks.start_soon(worker)
    return tokens, refusals


def test_beside_a_client_that_nobody_announced_hardly_a_call_is_refused(run: Run) -> None:
    """Our own calls on their way hide what it uses: 1 in 25 was refused."""
    provider = providers.openai(tpm=5 * LIMIT, rpm=300)
    fake = FakeProvider.openai(tpm=5 * LIMIT, rpm=300, counts="declared")

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fake.foreign_traffic, 0.3)
            await use(provider, fake, is_told=True, workers=64)
            tasks.cancel_scope.cancel()

    run(main)
    done = fake.statistics()
    assert done.refused <= 0.01 * done.calls
    assert done.charged["TPM"] >= 0.7 * 25 * LIMIT


@pytest.mark.parametrize("counts", ["sum", "larger"])
def test_what_declares_nothing_and_is_estimated_at_twice_the_truth_uses_all(
    counts: Literal["sum", "larger"], run: Run
) -> None:
    """By OpenAI's rule, which counts no more than the input then."""
    output = {"sum": 0.04, "larger": 0.8}[counts]  # of the input
    provider = providers.openai(tpm=LIMIT, counts=counts)
    fake = FakeProvider.openai(
        tpm=LIMIT, output=lambda r: output * r.input_tokens, tokens_per_second=400
    )

    async def worker(limiter: Limiter, sizes: random.Random) -> None:
        while True:
            body = {"messages": [{"role": "user", "content": "hello " * sizes.randint(200, 1_000)}]}
            request = Request.from_body(body, input_tokens=approximate_tokens(body))
            estimate = round(2 * output * request.input_tokens)
            async with limiter.reserve(provider.charge(request, estimate)) as lease:
                answer = await fake.respond("POST", "/v1/chat/completions", body={**body, **MODEL})
                lease.reconcile(Usage.from_response(json.loads(await answer.read())))

    async def main() -> None:
        limiter, sizes = provider.limiter(), random.Random(3)
        with anyio.move_on_after(300):
            async with anyio.create_task_group() as tasks:
                for _ in range(16):
                    tasks.start_soon(worker, limiter, sizes)

    run(main)
    assert fake.statistics().refused == 0
    assert fake.statistics().charged["TPM"] >= 0.95 * 5 * LIMIT


@pytest.mark.parametrize("name", FAKES)
def test_a_preset_keeps_to_the_rules_and_loses_nothing_by_listening(name: str, run: Run) -> None:
    provider, make = FAKES[name]
    untold, told = (
        run(partial(use, provider, make(), is_told=is_told)) for is_told in (False, True)
    )
    assert (untold[1], told[1]) == (0, 0)
    assert told[0] == pytest.approx(untold[0], rel=0.01)  # gaps are filled in another order
