"""The real SDKs, through the throttled transport, against the fake provider.

Run by `make test-sdks`, once with the current and once with the previous major of
openai and anthropic, each pair in an environment of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from tests.test_examples import TABLE, run
from tokenflow import ApproximateCounter, TokenFlow, TokenLimits, TokenSemaphore, call_options
from tokenflow import providers as presets
from tokenflow.testing import FakeProvider, Fault

openai: Any = pytest.importorskip("openai", reason="see make test-sdks")
anthropic: Any = pytest.importorskip("anthropic", reason="see make test-sdks")

pytestmark = [
    pytest.mark.anyio,
    # After [DONE] the OpenAI SDK drops its own generators unfinished; on trio they warn of it.
    pytest.mark.filterwarnings(
        r"ignore:Exception ignored in. <async_generator object (SSEDecoder|AsyncStream)\."
        ":pytest.PytestUnraisableExceptionWarning"
    ),
]

IS_CURRENT = int(openai.__version__.split(".")[0]) >= 3
STACK: Any = importlib.import_module("httpx2" if IS_CURRENT else "httpx")
THROTTLED = importlib.import_module(f"tokenflow.integrations.{STACK.__name__}").ThrottledTransport

HELLO = [{"role": "user", "content": "hello there"}]


class Setting:
    """An SDK's client, the flow it goes through, and the provider on the other side."""

    def __init__(self, provider: FakeProvider, preset: Any) -> None:
        self.in_flight = TokenSemaphore(50_000)
        self.limits = TokenLimits(self.in_flight, preset)
        self.flow = TokenFlow(self.limits, counter=ApproximateCounter(4.0))
        self.provider = provider
        self.transport = THROTTLED(self.flow, provider.transport(STACK))

    def check(self) -> None:
        """Nothing is held, nobody waits, and what was answered is what was charged."""
        now = self.limits.statistics()
        assert now.waiting_calls == 0
        assert self.in_flight.statistics().tokens_in_flight == 0
        answered = [each for each in self.provider.calls if each.outcome == "completed"]
        tokens = sum(each.input_tokens + each.output_tokens for each in answered)
        if len(answered) == len(self.provider.calls):
            assert self.flow.statistics().tokens == tokens
        assert self.provider.statistics().running == 0


class OpenAI(Setting):
    error: Any = openai.APIError
    status_error: Any = openai.APIStatusError

    def __init__(self, max_retries: int = 0, **options: Any) -> None:
        provider = FakeProvider.openai(tpm=100_000, rpm=1_000, output=30, seed=1, **options)
        super().__init__(provider, presets.openai(tpm=100_000, rpm=1_000))
        self.client = openai.AsyncOpenAI(
            api_key="none",
            base_url="http://fake/v1",
            max_retries=max_retries,
            http_client=openai.DefaultAsyncHttpxClient(transport=self.transport),
        )

    async def chat(self, **more: Any) -> Any:
        return await self.client.chat.completions.create(
            **{"model": "gpt-5", "messages": HELLO, "max_tokens": 100, **more}
        )

    async def stream(self, seen: list[str]) -> None:
        stream = await self.chat(stream=True, stream_options={"include_usage": True})
        async with stream:
            async for chunk in stream:
                seen.extend(choice.delta.content or "" for choice in chunk.choices)


class Anthropic(Setting):
    error: Any = anthropic.APIError
    status_error: Any = anthropic.APIStatusError

    def __init__(self, max_retries: int = 0, **options: Any) -> None:
        provider = FakeProvider.anthropic(
            rpm=1_000, itpm=100_000, otpm=100_000, output=30, seed=1, **options
        )
        super().__init__(provider, presets.anthropic(rpm=1_000, itpm=100_000, otpm=100_000))
        self.client = anthropic.AsyncAnthropic(
            api_key="none",
            base_url="http://fake",
            max_retries=max_retries,
            http_client=anthropic.DefaultAsyncHttpxClient(transport=self.transport),
        )

    async def chat(self, **more: Any) -> Any:
        return await self.client.messages.create(
            **{"model": "claude-opus-4", "messages": HELLO, "max_tokens": 100, **more}
        )

    async def stream(self, seen: list[str]) -> None:
        stream = await self.chat(stream=True)
        async with stream:
            async for event in stream:
                if event.type == "content_block_delta":
                    seen.append(event.delta.text)


@pytest.fixture(params=[OpenAI, Anthropic])
def sdk(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param  # type: ignore[no-any-return]


@asynccontextmanager
async def checked(setting: Any) -> Any:
    setting.client._platform = "Linux"  # else the first call asks a thread, out of virtual time
    try:
        async with setting.client:
            yield setting
    finally:
        setting.check()


async def test_chat(sdk: Callable[..., Any]) -> None:
    async with checked(sdk()) as setting:
        response = await setting.chat()
        assert response.usage is not None
        assert setting.flow.statistics().outcomes == {"reconciled": 1}


async def test_many_at_once(sdk: Callable[..., Any]) -> None:
    async with checked(sdk()) as setting, anyio.create_task_group() as tasks:
        for _ in range(50):
            tasks.start_soon(setting.chat)
    assert setting.flow.statistics().outcomes == {"reconciled": 50}


async def test_stream(sdk: Callable[..., Any]) -> None:
    seen: list[str] = []
    async with checked(sdk()) as setting:
        await setting.stream(seen)
    assert len("".join(seen)) > 20
    assert setting.flow.statistics().outcomes == {"reconciled": 1}


async def test_stream_broken_off(sdk: Callable[..., Any]) -> None:
    seen: list[str] = []
    async with checked(sdk(faults=lambda request: Fault(abort_after=9))) as setting:
        with pytest.raises((STACK.RemoteProtocolError, setting.error)):
            await setting.stream(seen)
    assert seen
    assert setting.flow.statistics().outcomes == {"failed": 1}


async def test_embeddings() -> None:
    async with checked(OpenAI()) as setting:
        response = await setting.client.embeddings.create(
            model="text-embedding-3-small", input=["one", "two", "three"]
        )
        assert len(response.data) == 3
    assert setting.flow.statistics().outcomes == {"reconciled": 1}


async def test_responses() -> None:
    async with checked(OpenAI()) as setting:
        response = await setting.client.responses.create(model="gpt-5", input="hello")
        assert response.usage.output_tokens == 30
        stream = await setting.client.responses.create(model="gpt-5", input="hello", stream=True)
        async with stream:
            kinds = [event.type async for event in stream]
        assert kinds[-1] == "response.completed"
    assert setting.flow.statistics().outcomes == {"reconciled": 2}


async def test_retry_after_429(sdk: Callable[..., Any]) -> None:
    """(openai-cookbook 2812) Every attempt is admitted, and visible."""
    faults = iter([Fault(status=429, retry_after=2.0)])
    async with checked(sdk(2, faults=lambda request: next(faults, None))) as setting:
        started = anyio.current_time()
        await setting.chat()
        assert anyio.current_time() - started >= 2
    assert setting.flow.statistics().outcomes == {"refused": 1, "reconciled": 1}
    assert [each.status for each in setting.provider.calls] == [429, 200]


async def test_what_can_never_fit_is_not_retried(sdk: Callable[..., Any]) -> None:
    """(shell_gpt 653, agent-zero 711)"""
    long = [{"role": "user", "content": "x" * 4_000_000}]
    async with checked(sdk(5)) as setting:
        started = anyio.current_time()
        with pytest.raises(setting.status_error, match="can never pass") as raised:
            await setting.chat(messages=long)
        assert raised.value.status_code == 413
        assert anyio.current_time() == started
    assert setting.provider.calls == ()
    assert setting.flow.statistics().outcomes == {"not admitted": 1}


async def test_a_spent_quota_is_not_retried() -> None:
    """(continue 9570, foyle 82)"""
    broke = Fault(status=429, code="insufficient_quota")
    async with checked(OpenAI(5, faults=lambda request: broke)) as setting:
        with pytest.raises(openai.RateLimitError):
            await setting.chat()
    assert len(setting.provider.calls) == 1


async def test_a_full_queue_is_retried_by_the_sdk(sdk: Callable[..., Any]) -> None:
    async with checked(sdk(1)) as setting:
        with call_options(max_wait=0), setting.in_flight.acquire_nowait(50_000) as lease:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(setting.chat)
                await wait_all_tasks_blocked()
                lease.release()
    assert setting.flow.statistics().outcomes == {"not admitted": 1, "reconciled": 1}


async def test_cancelled_in_the_queue(sdk: Callable[..., Any]) -> None:
    async with checked(sdk()) as setting:
        with setting.in_flight.acquire_nowait(50_000):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(setting.chat)
                await wait_all_tasks_blocked()
                assert setting.limits.statistics().waiting_calls == 1
                tasks.cancel_scope.cancel()
    assert setting.provider.calls == ()


async def test_cancelled_mid_stream(sdk: Callable[..., Any]) -> None:
    seen: list[str] = []
    async with checked(sdk()) as setting:
        with anyio.move_on_after(0.8) as scope:
            await setting.stream(seen)
        assert scope.cancelled_caught
    assert seen
    (call,) = setting.provider.calls
    assert call.outcome == "aborted"
    assert setting.flow.statistics().tokens >= call.output_tokens


@pytest.mark.skipif(IS_CURRENT, reason="tests/test_examples.py runs them with the current SDKs")
@pytest.mark.parametrize("script", ["openai_sdk.py", "anthropic_sdk.py", "agents.py"])
def test_the_examples(script: str, tmp_path: Path) -> None:
    arguments, telling = TABLE[script]
    done = run(script, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(words in done.stdout for words in telling)
