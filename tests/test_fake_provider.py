"""A provider to test against: each quota rule on a timeline worked out by hand."""

import base64
import json
import math
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import example, given
from hypothesis import strategies as st

from tokenflow import TokenRateLimiter, Usage
from tokenflow.testing import (
    Answer,
    ConnectionDropped,
    FakeProvider,
    FakeQuota,
    FakeRequest,
    Fault,
    approximate_tokens,
    first_calls,
    lognormal,
    some_calls,
)
from tokenflow.testing._quota import Ledger, Rule

from .conftest import Run

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
AT_ONCE: dict[str, Any] = {"output": 0, "first_token_seconds": 0.0}


def prompt(tokens: int, **fields: Any) -> dict[str, Any]:
    """A chat of so many tokens, as a fake counts them."""
    return {"model": "m", "messages": [{"role": "user", "content": "1234" * tokens}], **fields}


async def chat(provider: FakeProvider, tokens: int = 1, /, **fields: Any) -> Answer:
    messages = "OTPM" in [quota.name for quota in provider.quotas]
    path = "/v1/messages" if messages else CHAT
    return await provider.respond("POST", path, body=prompt(tokens, **fields))


async def statuses(provider: FakeProvider, calls: int, /, *args: Any, **fields: Any) -> list[int]:
    """So many calls, one after the other, each read to its end."""
    codes = []
    for _ in range(calls):
        async with await chat(provider, *args, **fields) as answer:
            await answer.read()
            codes.append(answer.status)
    return codes


async def refusal(provider: FakeProvider, *args: Any, **fields: Any) -> tuple[dict[str, str], str]:
    """The headers and the message of a call that is refused."""
    answer = await chat(provider, *args, **fields)
    assert answer.status in (413, 429)
    body = await answer.json()
    return dict(answer.headers), body["error"]["message"]


def events(body: bytes) -> list[Any]:
    """What the events of a stream carry."""
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


class TestBuckets:
    async def test_it_refills_continuously(self) -> None:
        provider = FakeProvider.openai(tpm=600, counts="declared", **AT_ONCE)  # 10 tokens a second
        assert await statuses(provider, 3, 100, max_tokens=200) == [200, 200, 429]
        await anyio.sleep(29.9)  # 299 are there
        assert await statuses(provider, 1, 100, max_tokens=200) == [429]
        await anyio.sleep(0.1)
        assert await statuses(provider, 2, 100, max_tokens=200) == [200, 429]

    async def test_it_holds_one_period_at_most(self) -> None:
        provider = FakeProvider.openai(tpm=600, counts="declared", **AT_ONCE)
        await anyio.sleep(3_600)
        assert await statuses(provider, 2, 600, max_tokens=0) == [200, 429]

    def test_a_clock_that_starts_again_takes_nothing_away(self, run: Run) -> None:
        provider = FakeProvider.openai(tpm=600, counts="declared", **AT_ONCE)

        async def late() -> None:
            await anyio.sleep(50)
            assert await statuses(provider, 1, 500, max_tokens=0) == [200]

        async def early() -> None:
            assert await statuses(provider, 2, 100, max_tokens=0) == [200, 429]

        run(late)
        run(early)

    async def test_what_a_provider_said_in_public(self) -> None:
        provider = FakeProvider.openai(tpm=10_000, counts="declared", **AT_ONCE)
        provider.consume(8_554)
        headers, message = await refusal(provider, 3_082, max_tokens=0)
        assert "Limit 10000, Used 8554, Requested 3082. Please try again in 9.816s." in message
        assert (headers["retry-after-ms"], headers["retry-after"]) == ("9816", "10")

    async def test_the_wait_that_is_told_is_enough(self) -> None:
        provider = FakeProvider.openai(tpm=7_777, counts="declared", **AT_ONCE)
        for tokens in (7_777, 1, 33, 5_000, 7_776):
            answer = await chat(provider, tokens, max_tokens=0)
            if answer.status == 429:
                await anyio.sleep(int(dict(answer.headers)["retry-after-ms"]) / 1000)
                await chat(provider, tokens, max_tokens=0)
        assert [call.status for call in provider.calls] == [200] + [429, 200] * 4

    async def test_in_slices_of_a_second(self) -> None:
        rpm = FakeQuota(60, of="requests", slices=60)
        provider = FakeProvider(rpm, **AT_ONCE)
        assert await statuses(provider, 2) == [200, 429]
        await anyio.sleep(1.0)
        assert await statuses(provider, 2) == [200, 429]

    async def test_a_call_larger_than_a_slice_needs_an_untouched_one(self) -> None:
        provider = FakeProvider(FakeQuota(600, slices=60), **AT_ONCE)  # 10 a slice, 10 a second
        assert await statuses(provider, 2, 25, max_tokens=0) == [200, 429]
        await anyio.sleep(2.4)
        assert await statuses(provider, 1, 25, max_tokens=0) == [429]
        await anyio.sleep(0.1)
        assert await statuses(provider, 1, 25, max_tokens=0) == [200]

    @given(
        limit=st.integers(1, 10**7),
        per=st.sampled_from([0.1, 1.0, 60.0, 86_400.0]),
        rule=st.sampled_from(["bucket", "fixed"]),
        slices=st.integers(1, 60),
        charges=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 100)), max_size=5),
        share=st.floats(0, 1),
    )
    @example(limit=33, per=0.1, rule="fixed", slices=33, charges=[(1.0, 249.01)], share=0.04)
    def test_after_the_wait_it_fits_and_before_it_does_not(
        self,
        limit: int,
        per: float,
        rule: Rule,
        slices: int,
        charges: list[tuple[float, float]],
        share: float,
    ) -> None:
        ledger = Ledger(FakeQuota(limit, per=per, rule=rule, slices=min(slices, limit)))
        now = 0.0
        for part, pause in charges:
            now += pause
            ledger.charge(int(part * limit), now)
        cost = int(share * limit)
        if denial := ledger.denial(cost, now):
            assert denial.wait is not None
            assert ledger.denial(cost, now + denial.wait) is None
            if denial.wait > 0.001:
                assert ledger.denial(cost, now + denial.wait * 0.99) is not None

    @given(charges=st.lists(st.tuples(st.integers(0, 100), st.floats(0, 50)), max_size=30))
    def test_the_worst_window_is_that_of_a_naive_search(
        self, charges: list[tuple[int, float]]
    ) -> None:
        ledger, now, log = Ledger(FakeQuota(10_000)), 0.0, []
        for amount, pause in charges:
            now += round(pause)
            ledger.charge(amount, now)
            log.append((now, amount))
        spans = [sum(n for at, n in log if start <= at < start + 60) for start, _ in log]
        assert ledger.worst_window(None) == max(spans, default=0)


class TestFixedPeriods:
    async def test_a_sum_reset_each_minute(self) -> None:
        provider = FakeProvider.azure(tpm=1_000, rpm=600, **AT_ONCE)
        await anyio.sleep(59)
        assert await statuses(provider, 2, 500, max_tokens=500) == [200, 429]
        headers, message = await refusal(provider, 1, max_tokens=0)
        assert headers["retry-after"] == "1"
        assert "Please retry after 1 seconds." in message
        await anyio.sleep(1)
        assert await statuses(provider, 2, 500, max_tokens=500) == [200, 429]

    async def test_requests_in_slices_of_ten_seconds(self) -> None:
        provider = FakeProvider.azure(tpm=2_000, **AT_ONCE)  # 12 a minute, 2 in 10 s
        assert await statuses(provider, 3, max_tokens=1) == [200, 200, 429]
        await anyio.sleep(9)
        assert await statuses(provider, 1, max_tokens=1) == [429]
        await anyio.sleep(1)
        assert await statuses(provider, 3, max_tokens=1) == [200, 200, 429]

    async def test_each_deployment_has_its_own(self) -> None:
        provider = FakeProvider.azure(tpm=1_000, **AT_ONCE)

        async def ask(deployment: str) -> int:
            path = f"/openai/deployments/{deployment}/chat/completions?api-version=2024-10-21"
            return (await provider.respond("POST", path, body=prompt(900, max_tokens=1))).status

        assert [await ask(name) for name in ("a", "a", "b")] == [200, 429, 200]
        assert [call.model for call in provider.calls] == ["a", "a", "b"]
        assert provider.worst_window("TPM") == 901


class TestWhatCounts:
    @pytest.mark.parametrize(
        ("fields", "charged"),
        [
            ({"max_tokens": 700}, 700),
            ({"max_tokens": 20}, 100),
            ({}, 100),
            ({"max_tokens": 700, "n": 2}, 1_400),
            ({"max_tokens": 1, "max_completion_tokens": 738}, 738),
        ],
    )
    async def test_the_larger(self, fields: dict[str, int], charged: int) -> None:
        provider = FakeProvider.openai(tpm=10_000, **AT_ONCE)
        await statuses(provider, 1, 100, **fields)
        assert provider.calls[0].charged == {"TPM": charged}

    async def test_the_estimate_is_of_characters_whatever_is_counted(self) -> None:
        provider = FakeProvider.openai(tpm=10_000, count_tokens=lambda body: 7, **AT_ONCE)
        await chat(provider, 100)
        assert provider.calls[0].input_tokens == 7
        assert provider.calls[0].charged == {"TPM": 100}

    async def test_the_declared_maximum_is_not_given_back(self) -> None:
        quota = FakeQuota(10_000, counts="declared")
        provider = FakeProvider(quota, output=10, max_output_tokens=2_000)
        await statuses(provider, 1, 100, max_tokens=500, n=3)
        await statuses(provider, 1, 100)
        assert [call.charged["TPM"] for call in provider.calls] == [1_600, 2_100]

    async def test_a_request_is_a_request_whatever_counts_as_tokens(self) -> None:
        provider = FakeProvider(FakeQuota(1, of="requests", counts="actual"))
        async with await chat(provider, stream=True):
            assert (await chat(provider)).status == 429

    async def test_settled_at_the_end(self) -> None:
        provider = FakeProvider(FakeQuota(10_000, counts="settled"), output=10)
        async with await chat(provider, 100, max_tokens=500, stream=True) as answer:
            before = provider.calls[0]
            await answer.read()
        assert before.charged == {"TPM": 600}
        assert provider.calls[0].charged == {"TPM": 110}

    async def test_after_the_fact_a_bucket_goes_below_zero(self) -> None:
        # 10 a second. 1,000 tokens are charged at 10.0 s, when it was full: 400 are owed. A call
        # of 100 needs 500 more: 50 s.
        provider = FakeProvider.groq(
            tpm=600, output=900, first_token_seconds=1.0, tokens_per_second=899 / 9.0
        )
        assert await statuses(provider, 1, 100, max_tokens=1_000) == [200]
        assert anyio.current_time() == 10.0
        headers, message = await refusal(provider, 100)
        assert "Limit 600, Used 1000, Requested 100. Please try again in 50s." in message
        assert headers["retry-after"] == "50"
        assert "retry-after-ms" not in headers
        await anyio.sleep(50)
        assert await statuses(provider, 1, 100) == [200]
        assert provider.calls[0].charged == {"TPM": 1_000}

    async def test_output_counts_as_it_is_produced(self) -> None:
        # One a second is refilled, and twenty are produced, from 1.0 s on. After the k-th,
        # k - 0.05 (k - 1) are used: none of 60 is left after the 63rd; 114.05 after the last.
        provider = FakeProvider.anthropic(
            otpm=60, output=120, first_token_seconds=1.0, tokens_per_second=20.0
        )
        answer = await chat(provider, max_tokens=4_000, stream=True)
        async for _ in answer:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await chat(provider, max_tokens=1)
            if provider.calls[-1].refused_by == "OTPM":
                break
        assert provider.calls[0].output_tokens == 63
        await answer.read()
        assert provider.calls[0].charged == {"OTPM": 120}
        headers, _ = await refusal(provider, max_tokens=1)
        assert headers["retry-after"] == "56"
        await anyio.sleep(55.05)
        assert (await chat(provider, max_tokens=1)).status == 200

    async def test_cached_input_is_free(self) -> None:
        provider = FakeProvider.anthropic(
            itpm=1_000, otpm=1_000, cached_tokens=lambda request: 600, **AT_ONCE
        )
        answer = await chat(provider, 900, max_tokens=1)
        usage = Usage.from_response(await answer.json())
        assert usage == Usage(input_tokens=900, cached_tokens=600)
        assert provider.calls[0].charged == {"ITPM": 300, "OTPM": 0}

    async def test_it_reserves_the_maximum_as_it_once_did(self) -> None:
        provider = FakeProvider.anthropic(otpm=1_000, counts="declared", **AT_ONCE)
        assert await statuses(provider, 2, 5, max_tokens=600) == [200, 429]

    async def test_requests_at_a_time(self) -> None:
        provider = FakeProvider.vllm(max_requests=2, output=10)
        first = await chat(provider, stream=True)
        second = await chat(provider, stream=True)
        headers, message = await refusal(provider)
        assert message == "Model is overloaded"
        assert "retry-after" not in headers
        await first.read()
        third = await chat(provider, stream=True)
        assert (await chat(provider)).status == 429
        await second.aclose()
        fourth = await chat(provider, stream=True)
        assert [third.status, fourth.status] == [200, 200]
        await fourth.aclose()
        await fourth.aclose()
        assert provider.statistics().running == 1

    async def test_all_quotas_or_none(self) -> None:
        provider = FakeProvider.anthropic(rpm=100, itpm=1_000, otpm=1_000, **AT_ONCE)
        provider.consume(Usage(input_tokens=500, requests=0))
        assert await statuses(provider, 1, 501, max_tokens=1) == [429]
        assert provider.calls[0].charged == {}
        assert provider.calls[0].refused_by == "ITPM"

    async def test_a_refused_call_is_a_request_all_the_same(self) -> None:
        provider = FakeProvider.openai(rpm=3, tpm=100, **AT_ONCE)
        assert await statuses(provider, 3, 100) == [200, 429, 429]
        assert [call.refused_by for call in provider.calls] == [None, "TPM", "TPM"]
        await statuses(provider, 1, 100)
        assert provider.statistics().charged == {"RPM": 3, "TPM": 100}
        assert provider.statistics().input_tokens == 100

    async def test_the_longest_wait_is_told(self) -> None:
        provider = FakeProvider.openai(rpm=1, rpd=2, **AT_ONCE)
        await statuses(provider, 1)
        await anyio.sleep(60)
        await statuses(provider, 1)
        _, message = await refusal(provider)
        assert "requests per day (RPD): Limit 2, Used 2, Requested 1." in message
        assert "Please try again in 11h59m0s." in message

    async def test_each_key_has_its_own(self) -> None:
        provider = FakeProvider(FakeQuota(1, of="requests", by="key"), **AT_ONCE)
        headers = [
            {"Authorization": "Bearer a"},
            {"Authorization": "Bearer a"},
            {"x-api-key": "b"},
            {"api-key": "b"},
            {},
        ]
        codes = [
            (await provider.respond("POST", CHAT, headers=each, body=prompt(1))).status
            for each in headers
        ]
        assert codes == [200, 429, 200, 429, 200]


class TestWhatNeverFits:
    async def test_openai_has_the_code_of_any_other_refusal(self) -> None:
        provider = FakeProvider.openai(tpm=30_000, counts="declared", **AT_ONCE)
        answer = await chat(provider, 36_000, max_tokens=55)
        error = (await answer.json())["error"]
        assert answer.status == 429
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "tokens")
        assert error["message"].startswith("Request too large for m")
        assert "Limit 30000, Requested 36055." in error["message"]
        assert not [name for name, _ in answer.headers if name.startswith("retry")]

    async def test_azure_says_a_day(self) -> None:
        _, message = await refusal(FakeProvider.azure(tpm=1_000, **AT_ONCE), 1_001, max_tokens=0)
        assert "retry after 86400 seconds" in message

    async def test_groq_has_a_status_for_it(self) -> None:
        answer = await chat(FakeProvider.groq(tpm=1_000, **AT_ONCE), 1_001)
        assert answer.status == 413

    async def test_anthropic_says_no_more_than_usual(self) -> None:
        provider = FakeProvider.anthropic(itpm=1_000, otpm=1, **AT_ONCE)
        answer = await chat(provider, 1_001, max_tokens=0)
        assert (await answer.json())["error"]["type"] == "rate_limit_error"
        assert not [name for name, _ in answer.headers if name.startswith("retry")]


class TestHeaders:
    async def test_openai(self) -> None:
        provider = FakeProvider.openai(rpm=600, tpm=6_000, **AT_ONCE)
        answer = await chat(provider, 150)
        assert answer.headers == [
            ("content-type", "application/json"),
            ("x-request-id", "req_0"),
            ("x-ratelimit-limit-requests", "600"),
            ("x-ratelimit-remaining-requests", "599"),
            ("x-ratelimit-reset-requests", "100ms"),
            ("x-ratelimit-limit-tokens", "6000"),
            ("x-ratelimit-remaining-tokens", "5850"),
            ("x-ratelimit-reset-tokens", "1.5s"),
        ]

    async def test_azure(self) -> None:
        provider = FakeProvider.azure(tpm=6_000, **AT_ONCE)
        await anyio.sleep(4.5)
        headers = dict((await chat(provider, 150, max_tokens=50)).headers)
        assert headers["x-ratelimit-remaining-requests"] == "35"
        assert headers["x-ratelimit-reset-requests"] == "6"
        assert headers["x-ratelimit-remaining-tokens"] == "5800"
        assert headers["x-ratelimit-reset-tokens"] == "56"

    async def test_azure_does_not_know_everything(self) -> None:
        provider = FakeProvider(FakeQuota(100), dialect="azure", **AT_ONCE)
        assert dict((await chat(provider)).headers)["x-ratelimit-remaining-requests"] == "-1"

    async def test_groq_tells_the_requests_of_a_day(self) -> None:
        provider = FakeProvider.groq(rpm=30, rpd=14_400, tpm=600, tpd=9_999, **AT_ONCE)
        headers = dict((await chat(provider)).headers)
        assert headers["x-ratelimit-limit-requests"] == "14400"
        assert headers["x-ratelimit-reset-requests"] == "6s"
        assert headers["x-ratelimit-limit-tokens"] == "600"

    async def test_anthropic(self) -> None:
        provider = FakeProvider.anthropic(
            rpm=50,
            itpm=60_000,
            otpm=8_000,
            unix_time=lambda: 1_800_000_000.2 + anyio.current_time(),
            **AT_ONCE,
        )
        await anyio.sleep(30)
        headers = dict((await chat(provider, 12_345, max_tokens=1)).headers)
        assert headers == {
            "content-type": "application/json",
            "request-id": "req_0",
            "anthropic-ratelimit-requests-limit": "50",
            "anthropic-ratelimit-requests-remaining": "49",
            "anthropic-ratelimit-requests-reset": "2027-01-15T08:00:32Z",
            "anthropic-ratelimit-input-tokens-limit": "60000",
            "anthropic-ratelimit-input-tokens-remaining": "48000",
            "anthropic-ratelimit-input-tokens-reset": "2027-01-15T08:00:43Z",
            "anthropic-ratelimit-output-tokens-limit": "8000",
            "anthropic-ratelimit-output-tokens-remaining": "8000",
            "anthropic-ratelimit-output-tokens-reset": "2027-01-15T08:00:31Z",
            "anthropic-ratelimit-tokens-limit": "8000",
            "anthropic-ratelimit-tokens-remaining": "8000",
            "anthropic-ratelimit-tokens-reset": "2027-01-15T08:00:31Z",
        }

    async def test_anthropic_waits_in_whole_seconds(self) -> None:
        provider = FakeProvider.anthropic(itpm=60_000, otpm=1, **AT_ONCE)
        provider.consume(60_000)
        headers, message = await refusal(provider, 1_001, max_tokens=0)
        assert headers["retry-after"] == "2"
        assert "retry-after-ms" not in headers
        assert "60,000 input tokens per min" in message

    async def test_vllm_has_none(self) -> None:
        provider = FakeProvider.vllm(max_requests=1, **AT_ONCE)
        assert [name for name, _ in (await chat(provider)).headers] == [
            "content-type",
            "x-request-id",
        ]

    async def test_a_concurrency_quota_is_not_told(self) -> None:
        provider = FakeProvider(FakeQuota(5, of="requests", rule="concurrency"), **AT_ONCE)
        assert len((await chat(provider)).headers) == 2

    async def test_a_period_without_a_name(self) -> None:
        provider = FakeProvider(FakeQuota(5, per=10, of="input_tokens"), **AT_ONCE)
        _, message = await refusal(provider, 6)
        assert "input tokens per 10 s (ITP10S)" in message


class TestAnswers:
    async def test_a_chat(self) -> None:
        provider = FakeProvider.openai(output=10, unix_time=lambda: 1_800_000_000.9)
        answer = await (await chat(provider, 25, n=2, max_tokens=6)).json()
        assert answer["object"] == "chat.completion"
        assert answer["created"] == 1_800_000_000
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert {choice["message"]["content"] for choice in answer["choices"]} == {"tok " * 6}
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        assert Usage.from_response(answer) == Usage(input_tokens=25, output_tokens=12)

    async def test_the_model_has_a_maximum_too(self) -> None:
        provider = FakeProvider.openai(output=10_000, max_output_tokens=8, tokens_per_second=1e9)
        answer = await (await chat(provider, max_tokens=100)).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 8

    async def test_a_streamed_chat(self) -> None:
        provider = FakeProvider.openai(output=5, tokens_per_chunk=2)
        body = await (await chat(provider, stream=True, n=2)).read()
        *chunks, done = events(body)
        assert done == "[DONE]"
        assert "usage" not in chunks[0]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [choice["index"] for choice in choices] == [0, 1] * 5
        assert [choice["delta"].get("content") for choice in choices[::2]] == [
            "",
            "tok tok ",
            "tok tok ",
            "tok ",
            None,
        ]
        assert [choice["finish_reason"] for choice in choices] == [None] * 8 + ["stop"] * 2

    async def test_a_stream_tells_its_usage_to_those_who_ask(self) -> None:
        provider = FakeProvider.openai(output=5)
        answer = await chat(provider, 9, stream=True, stream_options={"include_usage": True})
        assert ("content-type", "text/event-stream; charset=utf-8") in answer.headers
        *chunks, last, _ = events(await answer.read())
        assert {chunk["usage"] for chunk in chunks} == {None}
        assert last["choices"] == []
        assert Usage.from_response(last) == Usage(input_tokens=9, output_tokens=5)

    async def test_a_stream_may_tell_its_usage_all_along(self) -> None:
        provider = FakeProvider.vllm(max_requests=1, output=3)
        options = {"include_usage": True, "continuous_usage_stats": True}
        sent = events(await (await chat(provider, stream=True, stream_options=options)).read())
        counts = [event["usage"]["completion_tokens"] for event in sent[:-1]]
        assert counts == [0, 1, 2, 3, 3, 3]

    async def test_completions(self) -> None:
        provider = FakeProvider.openai(output=5)
        body = {"model": "m", "prompt": [[1, 2, 3], [4]], "max_tokens": 3, "best_of": 2}
        answer = await (await provider.respond("POST", "/completions", body=body)).json()
        assert [choice["text"] for choice in answer["choices"]] == ["tok tok tok "] * 2
        assert Usage.from_response(answer) == Usage(input_tokens=4, output_tokens=6)
        stream = await provider.respond("POST", "/completions", body={**body, "stream": True})
        texts = [event["choices"][0]["text"] for event in events(await stream.read())[:-1]]
        assert "".join(texts) == "tok " * 6

    async def test_responses(self) -> None:
        provider = FakeProvider.openai(output=5)
        body = {"model": "m", "input": "12345678", "instructions": "1234", "max_output_tokens": 3}
        answer = await (await provider.respond("POST", "/v1/responses", body=body)).json()
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["output"][0]["content"][0]["text"] == "tok tok tok "
        assert Usage.from_response(answer) == Usage(input_tokens=3, output_tokens=3)

    async def test_streamed_responses(self) -> None:
        provider = FakeProvider.openai(output=2)
        body = {"model": "m", "input": "1234", "stream": True}
        answer = await (await provider.respond("POST", "/v1/responses", body=body)).read()
        sent = events(answer)
        assert [event["sequence_number"] for event in sent] == list(range(10))
        assert [event["type"] for event in sent] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert answer.startswith(b"event: response.created\ndata: ")
        assert Usage.from_response(sent) == Usage(input_tokens=1, output_tokens=2)

    async def test_messages(self) -> None:
        provider = FakeProvider.anthropic(otpm=1_000, output=5, cached_tokens=lambda request: 3)
        answer = await (await chat(provider, 9, max_tokens=4)).json()
        assert answer["content"] == [{"type": "text", "text": "tok " * 4}]
        assert answer["stop_reason"] == "max_tokens"
        assert answer["usage"]["input_tokens"] == 6
        stream = await chat(provider, 9, max_tokens=9, stream=True)
        sent = events(await stream.read())
        assert [event["type"] for event in sent] == [
            "message_start",
            "content_block_start",
            "ping",
            *["content_block_delta"] * 5,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert sent[-2]["delta"]["stop_reason"] == "end_turn"
        used = Usage(input_tokens=9, output_tokens=5, cached_tokens=3)
        assert Usage.from_response(sent) == used

    @pytest.mark.parametrize("texts", ["one", ["one", "two"], [1, 2], [[1, 2], [3]]])
    async def test_embeddings(self, texts: str | list[Any]) -> None:
        provider = FakeProvider.openai(tpm=1_000)
        body = {"model": "m", "input": texts, "dimensions": 3}
        answer = await (await provider.respond("POST", "/v1/embeddings", body=body)).json()
        coded = {**body, "encoding_format": "base64"}
        short = await (await provider.respond("POST", "/v1/embeddings", body=coded)).json()
        decoded = [
            list(struct.unpack("<3f", base64.b64decode(item["embedding"])))
            for item in short["data"]
        ]
        assert decoded == [item["embedding"] for item in answer["data"]]
        assert len(decoded) == (1 if texts in ("one", [1, 2]) else 2)
        tokens = {"one": 1, "['one', 'two']": 2, "[1, 2]": 2, "[[1, 2], [3]]": 3}[str(texts)]
        assert Usage.from_response(answer) == Usage(input_tokens=tokens)
        assert provider.calls[0].charged == {"TPM": tokens}

    async def test_models(self) -> None:
        provider = FakeProvider.openai(rpm=1)
        for _ in range(2):
            answer = await provider.respond("GET", "/v1/models")
            assert [model["id"] for model in (await answer.json())["data"]] == ["fake"]
        assert provider.statistics().charged == {"RPM": 0}

    @pytest.mark.parametrize(
        ("method", "path", "body", "status"),
        [
            ("POST", "/v1/audio", {"model": "m"}, 404),
            ("POST", "/v1/messages", {"model": "m", "max_tokens": 1}, 404),
            ("GET", CHAT, b"", 405),
            ("POST", "/v1/models", b"", 405),
            ("POST", CHAT, b"{", 400),
            ("POST", CHAT, b"[]", 400),
            ("POST", CHAT, {}, 400),
            ("POST", CHAT, {"model": "m", "max_tokens": -1}, 400),
            ("POST", CHAT, {"model": "m", "n": True}, 400),
            ("POST", CHAT, {"model": "m", "n": 129}, 400),
            ("POST", "/v1/embeddings", {"model": "m"}, 400),
            ("POST", "/v1/embeddings", {"model": "m", "input": []}, 400),
            ("POST", "/v1/embeddings", {"model": "m", "input": ["x"] * 2_049}, 400),
            ("POST", "/v1/embeddings", {"model": "m", "input": "x", "dimensions": "3"}, 400),
        ],
    )
    async def test_requests_that_make_no_sense(
        self, method: str, path: str, body: Any, status: int
    ) -> None:
        provider = FakeProvider.openai(rpm=10)
        answer = await provider.respond(method, path, body=body)
        assert answer.status == status
        assert "error" in await answer.json()
        assert provider.calls[0].outcome == "failed"
        assert provider.calls[0].charged == {}

    async def test_messages_need_a_maximum(self) -> None:
        answer = await chat(FakeProvider.anthropic(otpm=1))
        assert answer.status == 400
        assert (await answer.json())["error"]["type"] == "invalid_request_error"

    def test_what_is_counted_of_a_request(self) -> None:
        text = {"type": "text", "text": "12345678"}
        image = {"type": "image_url", "image_url": {"url": "1234"}}
        messages = [{"role": "user", "content": [text, image]}]
        tools = [{"type": "function", "function": {"name": "1234", "strict": True, "most": 3}}]
        assert approximate_tokens({"messages": messages, "tools": tools, "user": "1234"}) == 4
        assert approximate_tokens({"input": "\ud800é\N{GRINNING FACE}"}) == 2


class TestTime:
    async def test_a_stream_takes_its_time(self) -> None:
        provider = FakeProvider.openai(
            output=4, first_token_seconds=2.0, tokens_per_second=10.0, tokens_per_chunk=2
        )
        answer = await chat(provider, stream=True)
        assert anyio.current_time() == 2.0
        times = [round(anyio.current_time(), 6) async for _ in answer]
        assert times == [2.0, 2.1, 2.3, 2.3]  # opening, 2 tokens, 2 tokens, closing
        assert provider.calls[0].ended == anyio.current_time()

    async def test_another_answer_comes_when_all_is_produced(self) -> None:
        provider = FakeProvider.openai(output=31, first_token_seconds=2.0, tokens_per_second=10.0)
        answer = await chat(provider, n=2)
        assert anyio.current_time() == 5.0
        await answer.read()
        assert anyio.current_time() == 5.0
        assert provider.calls[0].output_tokens == 62

    @pytest.mark.parametrize("stream", [False, True])
    async def test_nothing_to_say_takes_as_long_as_a_first_token(self, stream: bool) -> None:
        provider = FakeProvider.openai(output=0, first_token_seconds=2.0)
        await (await chat(provider, stream=stream)).read()
        assert anyio.current_time() == 2.0

    async def test_what_varies_does_not_depend_on_the_order(self) -> None:
        async def lengths(tokens: Sequence[int], seed: int) -> dict[tuple[int, int], int]:
            provider = FakeProvider.openai(
                seed=seed, tokens_per_second=lognormal(50, 0.2), first_token_seconds=lognormal(1)
            )
            for each in tokens:
                await (await chat(provider, each)).read()
            seen: list[int] = []
            found = {}
            for call in provider.calls:
                seen.append(call.input_tokens)
                found[call.input_tokens, seen.count(call.input_tokens)] = call.output_tokens
            return found

        usual = await lengths([1, 2, 3, 2], 0)
        assert await lengths([2, 3, 2, 1], 0) == usual
        assert await lengths([1, 2, 3, 2], 1) != usual
        assert len(set(usual.values())) == 4

    async def test_lengths_are_as_the_median_says(self) -> None:
        provider = FakeProvider.openai(first_token_seconds=0.0, tokens_per_second=1e9)
        for tokens in range(300):
            await (await chat(provider, tokens)).read()
        lengths = sorted(call.output_tokens for call in provider.calls)
        assert 160 < lengths[150] < 250

    async def test_a_function_decides(self) -> None:
        def output(request: FakeRequest) -> int:
            return request.input_tokens * 2

        provider = FakeProvider.openai(output=output)
        await statuses(provider, 1, 21)
        assert provider.calls[0].output_tokens == 42

    async def test_kept_alive_until_the_first_token(self) -> None:
        provider = FakeProvider.vllm(
            max_requests=1,
            output=3,
            first_token_seconds=25.0,
            tokens_per_second=0.05,
            keep_alive_seconds=10.0,
        )
        answer = await chat(provider)
        assert anyio.current_time() == 0.0
        body = await answer.read()
        assert body.startswith(b"\n" * 6 + b"{")
        assert Usage.from_response(json.loads(body)).output_tokens == 3
        answer = await chat(provider, stream=True)
        parts = [part async for part in answer]
        assert parts[:2] == [b": keep-alive\n\n"] * 2
        assert b"keep-alive" not in b"".join(parts[2:])
        assert provider.calls[1].output_tokens == 3


class TestFaults:
    async def test_the_first_calls(self) -> None:
        fault = Fault(status=429, retry_after=1.5, message="later")
        provider = FakeProvider.openai(rpm=10, faults=first_calls(2, fault), **AT_ONCE)
        headers, message = await refusal(provider)
        assert (headers["retry-after-ms"], headers["retry-after"]) == ("1500", "2")
        assert message == "later"
        assert await statuses(provider, 2) == [429, 200]
        assert [call.outcome for call in provider.calls] == ["refused", "refused", "completed"]
        assert provider.statistics().charged == {"RPM": 1}
        assert provider.calls[0].fault == fault
        assert provider.calls[0].refused_by is None

    async def test_some_calls(self) -> None:
        faults = some_calls(0.25, Fault(status=500))
        provider = FakeProvider.openai(faults=faults, **AT_ONCE)
        codes = [(await chat(provider, tokens)).status for tokens in range(400)]
        assert 70 < codes.count(500) < 130

    async def test_insufficient_quota(self) -> None:
        fault = Fault(status=429, code="insufficient_quota")
        answer = await chat(FakeProvider.openai(rpm=1, faults=lambda request: fault))
        error = (await answer.json())["error"]
        assert answer.status == 429
        assert error["code"] == error["type"] == "insufficient_quota"
        assert "exceeded your current quota" in error["message"]

    @pytest.mark.parametrize(
        ("dialect", "status", "kind"),
        [
            ("anthropic", 529, "overloaded_error"),
            ("anthropic", 500, "api_error"),
            ("openai", 500, "server_error"),
        ],
    )
    async def test_errors(self, dialect: Any, status: int, kind: str) -> None:
        provider = FakeProvider(
            FakeQuota(1_000, of="requests"),
            dialect=dialect,
            faults=lambda request: Fault(status=status),
        )
        path = "/v1/messages" if dialect == "anthropic" else CHAT
        answer = await provider.respond("POST", path, body=prompt(1, max_tokens=1))
        assert (answer.status, (await answer.json())["error"]["type"]) == (status, kind)
        overloaded = status == 529
        assert provider.calls[0].outcome == ("refused" if overloaded else "failed")
        assert provider.statistics().charged["RPM"] == (0 if overloaded else 1)

    async def test_azure_has_codes_of_its_own(self) -> None:
        provider = FakeProvider.azure(tpm=10, faults=lambda request: Fault(status=500))
        assert (await (await chat(provider, max_tokens=1)).json())["error"]["code"] == "500"

    async def test_late_headers(self) -> None:
        provider = FakeProvider.openai(faults=lambda request: Fault(delay=3.0), output=1)
        await (await provider.respond("POST", CHAT, body=prompt(1))).read()
        assert anyio.current_time() == 3.5

    async def test_a_dropped_connection(self) -> None:
        provider = FakeProvider(FakeQuota(9), faults=lambda request: Fault(drop=True, delay=2.0))
        with pytest.raises(ConnectionDropped, match="without an answer"):
            await chat(provider, max_tokens=5)
        assert anyio.current_time() == 2.0
        call = provider.calls[0]
        assert (call.outcome, call.status, call.ended) == ("failed", None, 2.0)
        assert call.charged == {"TPM": 6}

    async def test_unreachable(self) -> None:
        provider = FakeProvider(FakeQuota(9), faults=lambda request: Fault(unreachable=True))
        with pytest.raises(ConnectionRefusedError):
            await chat(provider, max_tokens=5)
        assert provider.calls[0].charged == {}

    @pytest.mark.parametrize(("chunks", "tokens"), [(0, 0), (1, 0), (3, 2)])
    async def test_a_stream_breaks_off(self, chunks: int, tokens: int) -> None:
        fault = Fault(abort_after=chunks)
        provider = FakeProvider(FakeQuota(9), output=9, faults=lambda request: fault)
        answer = await chat(provider, stream=True, max_tokens=8)
        for _ in range(chunks):
            await anext(answer)
        with pytest.raises(ConnectionDropped, match=f"after {chunks} chunks"):
            await anext(answer)
        with pytest.raises(StopAsyncIteration):
            await anext(answer)
        call = provider.calls[0]
        assert (call.outcome, call.status, call.output_tokens) == ("failed", 200, tokens)

    async def test_an_answer_breaks_off_even_if_it_is_over(self) -> None:
        provider = FakeProvider(output=2, faults=lambda request: Fault(abort_after=9))
        answer = await chat(provider)
        with pytest.raises(ConnectionDropped, match="after 1 chunks"):
            await answer.read()
        assert provider.calls[0].outcome == "failed"

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_body_that_is_garbage(self, stream: bool) -> None:
        provider = FakeProvider(FakeQuota(99), faults=lambda request: Fault(body=b"<html>"))
        answer = await chat(provider, stream=stream, max_tokens=5)
        assert (answer.status, await answer.read()) == (200, b"<html>")

    async def test_a_missing_usage(self) -> None:
        provider = FakeProvider(
            FakeQuota(99), output=2, faults=lambda request: Fault(hide_usage=True)
        )
        assert "usage" not in await (await chat(provider, max_tokens=5)).json()
        asked = {"include_usage": True}
        answer = await chat(provider, max_tokens=5, stream=True, stream_options=asked)
        assert b"usage" not in await answer.read()

    async def test_by_model_or_header(self) -> None:
        def faults(request: FakeRequest) -> Fault | None:
            return Fault(status=500) if request.headers.get("x-fault") == "500" else None

        provider = FakeProvider(faults=faults, **AT_ONCE)
        headers = {"X-Fault": "500"}
        answer = await provider.respond("POST", CHAT, headers=headers, body=prompt(1))
        assert answer.status == 500

    async def test_a_function_that_fails(self) -> None:
        def faults(request: FakeRequest) -> Fault | None:
            raise LookupError

        provider = FakeProvider(faults=faults)
        with pytest.raises(LookupError):
            await provider.respond("POST", CHAT, body=prompt(1))
        assert provider.calls[0].outcome == "failed"


class TestClientsThatGoAway:
    async def test_only_what_was_handed_out_was_produced(self) -> None:
        provider = FakeProvider.anthropic(otpm=1_000, output=50)
        async with await chat(provider, max_tokens=99, stream=True) as answer:
            async for _ in answer:
                if provider.calls[0].output_tokens == 7:
                    break
        call = provider.calls[0]
        assert (call.outcome, call.status, call.output_tokens) == ("aborted", 200, 7)
        assert call.charged["OTPM"] == 7
        assert [chunk async for chunk in answer] == []

    async def test_cancelled_between_two_chunks(self) -> None:
        provider = FakeProvider.groq(tpm=1_000, output=50, tokens_per_second=1.0)
        answer = await chat(provider, 30, stream=True)
        with anyio.move_on_after(3.5):
            await answer.read()
        call = provider.calls[0]
        assert (call.outcome, call.ended, call.output_tokens) == ("aborted", 4.0, 4)
        assert call.charged == {"TPM": 34}

    async def test_cancelled_before_the_headers(self) -> None:
        provider = FakeProvider.groq(tpm=1_000, output=50, tokens_per_second=10.0)
        with anyio.move_on_after(2.0):
            await chat(provider, 30)
        call = provider.calls[0]
        assert (call.outcome, call.status, call.output_tokens) == ("aborted", None, 10)

    async def test_closed_in_another_task(self) -> None:
        provider = FakeProvider.vllm(max_requests=1, output=50)
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await chat(provider, stream=True))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
        await answers[0].__anext__()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answers[0].aclose)
        assert (await chat(provider)).status == 200

    async def test_who_has_read_the_last_chunk_has_not_gone_away(self) -> None:
        provider = FakeProvider.openai(output=2)
        async with await chat(provider, stream=True) as answer:
            async for chunk in answer:
                if b"[DONE]" in chunk:
                    break
        assert provider.calls[0].outcome == "completed"


class TestOtherClients:
    async def test_they_take_what_is_there(self) -> None:
        provider = FakeProvider.openai(rpm=2, tpm=100, counts="declared", **AT_ONCE)
        provider.consume(Usage(input_tokens=60, output_tokens=90))
        assert provider.statistics().foreign == {"RPM": 1, "TPM": 100}
        assert await statuses(provider, 1, 1, max_tokens=0) == [429]
        assert provider.statistics().charged == {"RPM": 1, "TPM": 0}

    async def test_they_never_end(self) -> None:
        provider = FakeProvider.vllm(max_requests=1, **AT_ONCE)
        provider.consume(10)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(provider.foreign_traffic, 1.0)
            await anyio.sleep(10)
            assert (await chat(provider)).status == 200
            tasks.cancel_scope.cancel()

    async def test_a_share(self) -> None:
        provider = FakeProvider.openai(rpm=10, tpm=1_000, **AT_ONCE)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(provider.foreign_traffic, 0.3)
            await anyio.sleep(60.5)
            tasks.cancel_scope.cancel()
        assert provider.statistics().foreign == {"RPM": 3, "TPM": 300}

    async def test_of_one_deployment(self) -> None:
        provider = FakeProvider.azure(tpm=1_000, **AT_ONCE)
        provider.consume(1_000, model="other")
        assert (await chat(provider, 900, max_tokens=1)).status == 200


class TestBooks:
    async def test_the_whole_story_of_a_call(self) -> None:
        provider = FakeProvider.openai(rpm=10, tpm=1_000, output=3, cached_tokens=lambda r: 2)
        await anyio.sleep(5)
        answer = await provider.respond("POST", f"{CHAT}?x=1", body=prompt(4, stream=True))
        before = provider.calls
        await answer.read()
        (call,) = provider.calls
        assert before[0].outcome == "running"
        assert before[0].output_tokens == 0
        assert (call.number, call.path, call.model, call.stream) == (0, CHAT, "m", True)
        assert (call.arrived, call.ended) == (5.0, 5.5 + 2 / 50)
        assert (call.input_tokens, call.cached_tokens, call.output_tokens) == (4, 2, 3)
        assert call.charged == {"RPM": 1, "TPM": 4}

    async def test_sums(self) -> None:
        provider = FakeProvider.openai(rpm=2, output=3)
        await statuses(provider, 3, 5)
        await anyio.sleep(60)
        running = await provider.respond("POST", CHAT, body=prompt(5, stream=True))
        sums = provider.statistics()
        assert (sums.calls, sums.completed, sums.refused, sums.running) == (4, 2, 1, 1)
        assert (sums.failed, sums.aborted) == (0, 0)
        assert (sums.input_tokens, sums.output_tokens) == (15, 6)
        assert sums.charged == {"RPM": 3}
        await running.aclose()

    async def test_the_worst_window(self) -> None:
        provider = FakeProvider.openai(rpm=60, **AT_ONCE)
        assert provider.worst_window("RPM") == 0
        for _ in range(4):
            await statuses(provider, 20)
            await anyio.sleep(20)
        assert provider.worst_window("RPM") == 60
        assert provider.worst_window("RPM", 20.1) == 40
        with pytest.raises(ValueError, match="there are"):
            provider.worst_window("TPM")

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: FakeQuota(0), "limit"),
            (lambda: FakeQuota(5, per=0), "per"),
            (lambda: FakeQuota(5, slices=6), "slices"),
            (lambda: FakeQuota(5, rule="leaky"), "rule"),  # type: ignore[arg-type]
            (lambda: FakeProvider(FakeQuota(5), FakeQuota(6)), "names of their own"),
            (lambda: FakeProvider(dialect="cohere"), "dialect"),  # type: ignore[arg-type]
            (lambda: FakeProvider(tokens_per_chunk=0), "tokens_per_chunk"),
            (lambda: FakeProvider(max_output_tokens=0), "max_output_tokens"),
            (lambda: FakeProvider(keep_alive_seconds=0), "keep_alive_seconds"),
            (lambda: Fault(delay=-1), "delay"),
            (lambda: Fault(retry_after=math.nan), "retry_after"),
            (lambda: Fault(abort_after=-1), "abort_after"),
            (lambda: Fault(status=200), "status"),
            (lambda: some_calls(1.1, Fault()), "share"),
            (lambda: first_calls(-1, Fault()), "calls"),
        ],
    )
    def test_settings_that_make_no_sense(self, make: Callable[[], object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make()

    async def test_a_share_that_makes_no_sense(self) -> None:
        with pytest.raises(ValueError, match="share"):
            await FakeProvider().foreign_traffic(30)

    def test_it_is_not_imported_with_the_library(self) -> None:
        code = "import sys, tokenflow; sys.exit('tokenflow.testing' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)


class Server:
    """What an ASGI server does for one request; `leave` is the client's going away."""

    def __init__(self, body: dict[str, Any], *, path: str = CHAT, method: str = "POST") -> None:
        raw = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json")]
        self.scope = {"type": "http", "method": method, "path": path, "headers": headers}
        self.sent: list[Any] = []
        self.leave = anyio.Event()
        self._incoming = [
            {"type": "http.request", "body": raw[:9], "more_body": True},
            {"type": "http.request", "body": raw[9:]},
        ]

    async def receive(self) -> Any:
        if self._incoming:
            return self._incoming.pop(0)
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await anyio.lowlevel.checkpoint()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


class TestAsAnApp:
    async def test_an_answer(self) -> None:
        provider = FakeProvider.openai(rpm=5, output=3)
        server = Server(prompt(2))
        await provider(server.scope, server.receive, server.send)
        start, *_, end = server.sent
        assert (start["type"], start["status"]) == ("http.response.start", 200)
        assert (b"x-ratelimit-limit-requests", b"5") in start["headers"]
        assert not end["more_body"]
        assert Usage.from_response(json.loads(server.body)).output_tokens == 3

    async def test_a_stream_comes_chunk_by_chunk(self) -> None:
        provider = FakeProvider.openai(output=5)
        server = Server(prompt(2, stream=True))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(provider, server.scope, server.receive, server.send)
            await anyio.sleep(0.55)
            assert len(server.sent) == 5  # headers, opening, and tokens at 0.50, 0.52 and 0.54
        assert len(server.sent) == 9

    async def test_the_client_goes_away(self) -> None:
        provider = FakeProvider.openai(output=500)
        server = Server(prompt(2, stream=True))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(provider, server.scope, server.receive, server.send)
            await anyio.sleep(0.55)
            server.leave.set()
        assert anyio.current_time() == 0.55
        assert provider.calls[0].outcome == "aborted"
        assert provider.calls[0].output_tokens == 3

    async def test_the_client_does_not_even_ask(self) -> None:
        provider = FakeProvider.openai()
        server = Server({})
        server._incoming[1:] = [{"type": "http.disconnect"}]
        await provider(server.scope, server.receive, server.send)
        assert provider.calls == ()
        assert server.sent == []

    async def test_a_stream_breaks_off(self) -> None:
        provider = FakeProvider.openai(faults=lambda request: Fault(abort_after=2))
        server = Server(prompt(2, stream=True))
        with pytest.raises(ConnectionDropped):
            await provider(server.scope, server.receive, server.send)
        assert len(server.sent) == 3
        assert server.sent[-1]["more_body"]

    async def test_no_answer_begins_with_headers_that_no_server_sends(self) -> None:
        provider = FakeProvider.openai(faults=lambda request: Fault(drop=True))
        server = Server(prompt(2))

        async def refuse(message: Any) -> None:
            server.sent.append(message)
            raise RuntimeError("invalid header name")

        with pytest.raises(ConnectionDropped):
            await provider(server.scope, server.receive, refuse)
        assert server.sent[0]["headers"] == [(b"\0", b"\0")]

    async def test_it_starts_and_stops(self) -> None:
        server = Server({})
        server._incoming = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
        await FakeProvider()({"type": "lifespan"}, server.receive, server.send)
        assert [message["type"] for message in server.sent] == [
            "lifespan.startup.complete",
            "lifespan.shutdown.complete",
        ]

    async def test_it_speaks_nothing_else(self) -> None:
        server = Server({})
        with pytest.raises(ValueError, match="websocket"):
            await FakeProvider()({"type": "websocket"}, server.receive, server.send)


@pytest.fixture(params=["httpx", "httpx2"])
def httpx(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = pytest.importorskip(request.param)
    return module


class TestAsATransport:
    async def test_an_answer(self, httpx: Any) -> None:
        provider = FakeProvider.openai(rpm=1, output=3)
        async with httpx.AsyncClient(
            transport=provider.transport(httpx), base_url="http://fake"
        ) as client:
            answer = await client.post(f"{CHAT}?x=1", json=prompt(2), headers={"API-Key": "k"})
            refused = await client.post(CHAT, json=prompt(2))
        assert Usage.from_response(answer.json()).output_tokens == 3
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.status_code == 429

    async def test_a_stream_comes_chunk_by_chunk_and_may_be_closed_early(self, httpx: Any) -> None:
        provider = FakeProvider.openai(output=500)
        request = httpx.Request("POST", f"http://fake{CHAT}", json=prompt(2, stream=True))
        answer = await provider.transport(httpx).handle_async_request(request)
        assert isinstance(answer.stream, httpx.AsyncByteStream)
        chunks = aiter(answer.stream)
        for _ in range(3):
            await anext(chunks)
        assert anyio.current_time() == 0.52
        await answer.aclose()
        assert provider.calls[0].outcome == "aborted"
        assert provider.calls[0].output_tokens == 2

    async def test_a_stream_that_nobody_reads(self, httpx: Any) -> None:
        provider = FakeProvider.openai(output=500)
        async with httpx.AsyncClient(transport=provider.transport(httpx)) as client:
            body = prompt(2, stream=True)
            async with client.stream("POST", f"http://fake{CHAT}", json=body):
                pass
        assert provider.calls[0].outcome == "aborted"

    @pytest.mark.parametrize(
        ("fault", "error"),
        [
            (Fault(drop=True), "RemoteProtocolError"),
            (Fault(abort_after=1), "RemoteProtocolError"),
            (Fault(unreachable=True), "ConnectError"),
            (Fault(delay=60), "ReadTimeout"),
        ],
    )
    async def test_its_errors(self, httpx: Any, fault: Fault, error: str) -> None:
        provider = FakeProvider.openai(faults=lambda request: fault)
        async with httpx.AsyncClient(transport=provider.transport(httpx), timeout=30) as client:
            with pytest.raises(getattr(httpx, error)):
                await client.post(f"http://fake{CHAT}", json=prompt(2, stream=True))
        assert provider.calls[0].outcome == ("aborted" if fault.delay else "failed")

    async def test_a_timeout_between_two_chunks(self, httpx: Any) -> None:
        provider = FakeProvider.openai(output=50, tokens_per_second=0.01)
        async with httpx.AsyncClient(transport=provider.transport(httpx), timeout=30) as client:
            with pytest.raises(httpx.ReadTimeout, match="30 s"):
                await client.post(f"http://fake{CHAT}", json=prompt(2, stream=True))
        assert anyio.current_time() == 30.5


class TestAgainstTheLimiter:
    """What it is for: the same calls, throttled and not."""

    @staticmethod
    async def traffic(provider: FakeProvider, limiter: TokenRateLimiter | None) -> None:
        async def worker() -> None:
            for tokens in (100, 700, 300, 1_500):
                if limiter is None:
                    await (await chat(provider, tokens, max_tokens=200)).read()
                    continue
                async with limiter.reserve(Usage(input_tokens=tokens, output_tokens=200)) as lease:
                    answer = await (await chat(provider, tokens, max_tokens=200)).json()
                    lease.reconcile(Usage.from_response(answer))

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(worker)
            await wait_all_tasks_blocked()

    @pytest.mark.parametrize(
        "make",
        [
            lambda: FakeProvider.openai(rpm=30, tpm=6_000, output=lognormal(80)),
            lambda: FakeProvider.groq(rpm=30, tpm=6_000, output=lognormal(80)),
        ],
        ids=["openai", "groq"],
    )
    async def test_nobody_is_refused(self, make: Callable[[], FakeProvider]) -> None:
        provider = make()
        limiter = TokenRateLimiter(tokens_per_minute=6_000, requests_per_minute=30)
        await self.traffic(provider, limiter)
        assert provider.statistics().refused == 0
        assert provider.statistics().completed == 80
        unthrottled = make()
        await self.traffic(unthrottled, None)
        assert unthrottled.statistics().refused > 40
