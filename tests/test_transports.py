"""The throttled transports: what an SDK's requests reserve, and what each way out charges.

Against the fake provider, in process, on both HTTP libraries and both backends.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import importlib
import json
import weakref
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from tokenflow import (
    ApproximateCounter,
    CallEvent,
    HistoricalEstimator,
    TaskEstimator,
    TokenFlow,
    TokenLimits,
    TokenRateLimiter,
    TokenSemaphore,
    Usage,
    call_options,
)
from tokenflow.testing import FakeProvider, Fault

from .conftest import Run

pytestmark = pytest.mark.anyio

CHAT = "http://fake/v1/chat/completions"
ANTHROPIC = "http://fake/v1/messages"


@pytest.fixture(params=["httpx", "httpx2"])
def stack(request: pytest.FixtureRequest) -> ModuleType:
    stack: ModuleType = pytest.importorskip(request.param)
    return stack


def throttled(stack: ModuleType) -> Any:
    return importlib.import_module(f"tokenflow.integrations.{stack.__name__}").ThrottledTransport


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "gpt-5", "messages": [{"role": "user", "content": "hello"}], **more}


class Setting:
    """A client, throttled, of a fake provider; and all the books."""

    def __init__(
        self, stack: ModuleType, provider: FakeProvider | None = None, **options: Any
    ) -> None:
        self.in_flight = TokenSemaphore(100_000, max_waiting=options.pop("max_waiting", None))
        self.quotas = TokenRateLimiter(tokens_per_minute=100_000, requests_per_minute=100)
        self.events: list[CallEvent] = []
        self.flow = TokenFlow(
            TokenLimits(self.in_flight, self.quotas, max_waiting=self.in_flight._queue.max_waiting),
            counter=ApproximateCounter(4.0),
            estimator=HistoricalEstimator(prior=TaskEstimator(default=500)),
            observers=[self.events.append],
        )
        fake = {"output": 20, "seed": 1, **options}
        self.provider = provider or FakeProvider.openai(tpm=1_000_000, rpm=10_000, **fake)
        below = self.provider.transport(stack)
        self.transport = throttled(stack)(self.flow, below)
        self.client = stack.AsyncClient(transport=self.transport, timeout=None)

    @property
    def held(self) -> tuple[int, int]:
        now = self.in_flight.statistics()
        return now.tokens_in_flight, now.waiting_calls

    @property
    def used(self) -> tuple[int, int]:
        tokens, requests = self.quotas.statistics().quotas
        return tokens.used, requests.used

    @property
    def outcomes(self) -> list[str]:
        return [event.outcome for event in self.events]

    @property
    def provided(self) -> int:
        """Tokens of the calls it answered, by the provider's own books."""
        answered = (each for each in self.provider.calls if each.outcome == "completed")
        return sum(each.input_tokens + each.output_tokens for each in answered)


class TestWaysOut:
    async def test_success(self, stack: ModuleType) -> None:
        setting = Setting(stack)
        response = await setting.client.post(CHAT, json=chat())
        assert response.status_code == 200
        assert response.json()["usage"]["completion_tokens"] == 20
        assert setting.used == (setting.provided, 1)
        assert setting.held == (0, 0)
        assert setting.outcomes == ["reconciled"]

    async def test_holds_the_estimate_until_the_body_is_read(self, stack: ModuleType) -> None:
        """(sglang 9491)"""
        setting = Setting(stack)
        async with setting.client.stream("POST", CHAT, json=chat()) as response:
            assert setting.held[0] > 500
            assert setting.events == []
            await response.aread()
        assert setting.held == (0, 0)
        assert setting.used == (setting.provided, 1)

    async def test_refused_then_success(self, stack: ModuleType) -> None:
        faults = iter([Fault(status=429, retry_after=3.0)])
        setting = Setting(stack, faults=lambda request: next(faults, None))
        started = anyio.current_time()
        first = await setting.client.post(CHAT, json=chat())
        assert first.status_code == 429
        assert first.json()["error"]
        assert setting.used == (0, 1)  # the request counts, the tokens don't
        second = await setting.client.post(CHAT, json=chat())
        assert second.status_code == 200
        assert anyio.current_time() - started >= 3
        assert setting.outcomes == ["refused", "reconciled"]
        assert setting.used == (setting.provided, 2)

    async def test_a_permanent_refusal_is_marked_for_the_sdk(self, stack: ModuleType) -> None:
        """(continue 9570)"""
        broke = Fault(status=429, code="insufficient_quota")
        setting = Setting(stack, faults=lambda request: broke)
        response = await setting.client.post(CHAT, json=chat())
        assert response.status_code == 429
        assert response.headers["x-should-retry"] == "false"
        assert response.json()["error"]["code"] == "insufficient_quota"
        assert setting.used == (0, 1)

    async def test_connection_refused(self, stack: ModuleType) -> None:
        setting = Setting(stack)

        class Down(stack.AsyncBaseTransport):  # type: ignore[name-defined,misc]
            async def handle_async_request(self, request: Any) -> Any:
                raise stack.ConnectError("refused")

        setting.transport._transport = Down()
        with pytest.raises(stack.ConnectError):
            await setting.client.post(CHAT, json=chat())
        assert setting.held == (0, 0)
        assert setting.used == (0, 0)
        assert setting.outcomes == ["unsent"]

    async def test_a_dropped_connection_keeps_the_estimate(self, stack: ModuleType) -> None:
        setting = Setting(stack, faults=lambda request: Fault(drop=True))
        with pytest.raises(stack.RemoteProtocolError):
            await setting.client.post(CHAT, json=chat())
        assert setting.held == (0, 0)
        assert setting.used[0] > 500
        assert setting.outcomes == ["failed"]

    async def test_a_server_error_keeps_the_estimate(self, stack: ModuleType) -> None:
        setting = Setting(stack, faults=lambda request: Fault(status=500))
        response = await setting.client.post(CHAT, json=chat())
        assert response.status_code == 500
        assert setting.used[0] > 500
        assert setting.outcomes == ["failed"]

    async def test_cancelled_in_the_queue(self, stack: ModuleType) -> None:
        setting = Setting(stack)
        with setting.in_flight.acquire_nowait(100_000):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: setting.client.post(CHAT, json=chat()))
                await wait_all_tasks_blocked()
                assert setting.held == (100_000, 0)  # it waits in the queue of both
                assert setting.flow.statistics().limits["*"].waiting_calls == 1
                tasks.cancel_scope.cancel()
        assert setting.held == (0, 0)
        assert setting.used == (0, 0)
        assert setting.provider.calls == ()

    async def test_cancelled_while_the_server_works(self, stack: ModuleType) -> None:
        setting = Setting(stack)
        with anyio.move_on_after(0.2) as scope:
            await setting.client.post(CHAT, json=chat())
        assert scope.cancelled_caught
        assert setting.held == (0, 0)
        assert setting.used[0] > 500
        assert setting.outcomes == ["failed"]


class TestStreams:
    def events(self, response: Any) -> AsyncIterator[str]:
        lines: AsyncIterator[str] = response.aiter_lines()
        return lines

    async def test_finished(self, stack: ModuleType) -> None:
        """(dspy 9459, aisix 690)"""
        setting = Setting(stack)
        body = chat(stream=True, stream_options={"include_usage": True})
        async with setting.client.stream("POST", CHAT, json=body) as response:
            lines = [line async for line in self.events(response)]
        assert "data: [DONE]" in lines
        assert setting.used == (setting.provided, 1)
        assert setting.held == (0, 0)
        assert setting.outcomes == ["reconciled"]

    async def test_anthropic(self, stack: ModuleType) -> None:
        provider = FakeProvider.anthropic(rpm=100, itpm=100_000, otpm=100_000, output=20)
        setting = Setting(stack, provider)
        body = chat(stream=True, max_tokens=100)
        async with setting.client.stream("POST", ANTHROPIC, json=body) as response:
            async for _ in self.events(response):
                pass
        assert setting.used == (setting.provided, 1)
        assert setting.outcomes == ["reconciled"]

    # A generator inside httpx is left to the garbage collector, of which trio tells.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.parametrize(
        ("dialect", "url", "body", "last"),
        [
            ("openai", CHAT, {"stream_options": {"include_usage": True}}, "data: [DONE]"),
            ("openai", "http://fake/v1/responses", {"input": "hello"}, "response.completed"),
            ("anthropic", ANTHROPIC, {"max_tokens": 100}, "message_stop"),
        ],
    )
    async def test_read_up_to_the_last_event(
        self, stack: ModuleType, dialect: Any, url: str, body: dict[str, Any], last: str
    ) -> None:
        """The body goes on, if only by nothing: openai 2 stops here, and so does 3 on HTTP/2."""
        setting = Setting(stack, FakeProvider(dialect=dialect, output=20))
        body = chat(stream=True, **body)
        async with setting.client.stream("POST", url, json=body) as response:
            async with contextlib.aclosing(self.events(response)) as lines:  # type: ignore[type-var]
                async for line in lines:
                    if last in line and line.startswith("data:"):
                        break
        (call,) = setting.provider.calls
        assert setting.used == (call.input_tokens + 20, 1)
        assert setting.outcomes == ["reconciled"]
        del response, lines
        gc.collect()

    async def test_without_a_usage_the_estimate_stays(self, stack: ModuleType) -> None:
        setting = Setting(stack)
        async with setting.client.stream("POST", CHAT, json=chat(stream=True)) as response:
            async for _ in self.events(response):
                pass
        assert setting.used[0] > 500
        assert setting.outcomes == ["abandoned"]

    async def test_broken_off_by_the_server(self, stack: ModuleType) -> None:
        setting = Setting(stack, faults=lambda request: Fault(abort_after=5))
        body = chat(stream=True)
        with pytest.raises(stack.RemoteProtocolError):
            async with setting.client.stream("POST", CHAT, json=body) as response:
                async for _ in self.events(response):
                    pass
        assert setting.held == (0, 0)
        assert setting.outcomes == ["failed"]

    # A generator inside httpx is left to the garbage collector, of which trio tells.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    async def test_abandoned_with_aclose(self, stack: ModuleType) -> None:
        """(TokenHub 102) The emitted part stays charged."""
        setting = Setting(stack, output=3_000)
        async with setting.client.stream("POST", CHAT, json=chat(stream=True)) as response:
            async with contextlib.aclosing(response.aiter_raw()) as chunks:
                while setting.used[0] < 2_000:
                    await anext(chunks)
        assert setting.held == (0, 0)
        assert setting.used[0] > 1_000
        (call,) = setting.provider.calls
        assert call.outcome == "aborted"
        assert 1_000 < call.output_tokens < 3_000
        del response, chunks
        gc.collect()

    @pytest.mark.parametrize("thread", ["its own", "another"])
    async def test_abandoned_without_aclose(self, stack: ModuleType, thread: str) -> None:
        """The garbage collector may come in any thread, and in the middle of a step."""
        setting = Setting(stack)
        response = await setting.transport.handle_async_request(
            stack.Request("POST", CHAT, json=chat(stream=True))
        )
        chunks = aiter(response.stream)
        await anext(chunks)
        dropped = [response, chunks]
        dropped.append(dropped)
        del chunks, response, dropped
        if thread == "another":
            await anyio.to_thread.run_sync(gc.collect)
        else:
            gc.collect()
            assert setting.held[0] > 0
        await wait_all_tasks_blocked()
        assert setting.held == (0, 0)
        assert setting.outcomes == ["abandoned"]

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    async def test_abandoned_by_an_error_that_holds_it(self, stack: ModuleType) -> None:
        setting = Setting(stack)
        bodies: list[weakref.ref[object]] = []

        async def fail() -> None:
            async with setting.flow.request(input_tokens=1):
                response = await setting.transport.handle_async_request(
                    stack.Request("POST", CHAT, json=chat(stream=True))
                )
                bodies.append(weakref.ref(response.stream))
                raise OSError

        with contextlib.suppress(OSError):
            await fail()
        setting.events.clear()
        for _ in range(2):  # a generator below keeps all alive until trio has closed it
            gc.collect()
            await wait_all_tasks_blocked()
        assert [body() for body in bodies] == [None]

    def test_abandoned_after_the_run(self, stack: ModuleType, run: Run) -> None:
        setting = Setting(stack)

        async def other() -> Any:
            request = stack.Request("POST", CHAT, json=chat(stream=True))
            return await setting.transport.handle_async_request(request)

        run(other)
        gc.collect()
        assert setting.outcomes == ["abandoned"]

    async def test_abandoned_without_aclose_where_that_fails(
        self, stack: ModuleType, caplog: pytest.LogCaptureFixture
    ) -> None:
        setting = Setting(stack)
        response = await setting.transport.handle_async_request(
            stack.Request("POST", CHAT, json=chat(stream=True))
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(response.stream._reader, "_meter", None)
            del response
            gc.collect()
            await wait_all_tasks_blocked()
        assert setting.outcomes == ["abandoned"]
        assert "could not be settled: AttributeError" in caplog.text

    async def test_cancelled_in_the_middle(self, stack: ModuleType) -> None:
        setting = Setting(stack, output=3_000)
        with anyio.move_on_after(20) as scope:
            async with setting.client.stream("POST", CHAT, json=chat(stream=True)) as response:
                async for _ in self.events(response):
                    pass
        assert scope.cancelled_caught
        assert setting.held == (0, 0)
        assert setting.used[0] > 700


class TestOneCallOnce:
    async def test_inside_an_open_request(self, stack: ModuleType) -> None:
        setting = Setting(stack)
        async with setting.flow.request(input_tokens=5, model="gpt-5") as call:
            response = await setting.client.post(CHAT, json=chat())
            assert setting.used == (setting.provided, 1)
        assert response.status_code == 200
        assert call.usage.output_tokens == 20
        assert setting.outcomes == ["reconciled"]

    async def test_a_second_attempt_reserves_for_itself(self, stack: ModuleType) -> None:
        faults = iter([Fault(status=429, retry_after=1.0)])
        setting = Setting(stack, faults=lambda request: next(faults, None))
        async with setting.flow.request(input_tokens=5, model="gpt-5"):
            first = await setting.client.post(CHAT, json=chat())
            second = await setting.client.post(CHAT, json=chat())
            assert [first.status_code, second.status_code] == [429, 200]
            assert setting.used == (setting.provided, 2)
        assert setting.outcomes == ["reconciled", "refused"]
        assert setting.used == (setting.provided, 2)

    async def test_inside_another_flows_request(self, stack: ModuleType) -> None:
        setting = Setting(stack)
        other = TokenFlow()
        async with other.request(input_tokens=5):
            await setting.client.post(CHAT, json=chat())
        assert setting.outcomes == ["reconciled"]

    async def test_after_the_block(self, stack: ModuleType) -> None:
        setting = Setting(stack)
        async with setting.flow.request(input_tokens=5, model="gpt-5"):
            pass
        await setting.client.post(CHAT, json=chat())
        assert setting.outcomes == ["abandoned", "reconciled"]


class TestTurnedAway:
    async def test_too_large(self, stack: ModuleType) -> None:
        """(shell_gpt 653)"""
        setting = Setting(stack)
        response = await setting.client.post(CHAT, json=chat(messages=[
            {"role": "user", "content": "x" * 800_000}
        ]))  # fmt: skip
        assert response.status_code == 413
        assert response.headers["x-should-retry"] == "false"
        error = response.json()["error"]
        assert error["type"] == "request_too_large"
        assert error["limit"] == 100_000
        assert error["cost"] > 200_000
        assert setting.provider.calls == ()

    async def test_queue_full(self, stack: ModuleType) -> None:
        setting = Setting(stack, max_waiting=0)
        setting.quotas.pause(7.5)
        response = await setting.client.post(CHAT, json=chat())
        assert response.status_code == 429
        assert response.headers["retry-after"] == "8"
        assert response.headers["retry-after-ms"] == "7500"
        assert response.json()["error"]["type"] == "queue_full"

    async def test_a_model_that_no_pattern_matches(self, stack: ModuleType) -> None:
        setting = Setting(stack)
        flow = TokenFlow({"claude-*": TokenSemaphore(10)}, observers=[setting.events.append])
        below = setting.provider.transport(stack)
        client = stack.AsyncClient(transport=throttled(stack)(flow, below))
        response = await client.post(CHAT, json=chat())
        assert response.status_code == 404
        assert response.headers["x-should-retry"] == "false"
        error = response.json()["error"]
        assert error["type"] == "unknown_model"
        assert "no limits for the model 'gpt-5'" in error["message"]
        assert setting.outcomes == ["not admitted"]

    async def test_max_wait_from_the_options(self, stack: ModuleType) -> None:
        setting = Setting(stack)
        with setting.in_flight.acquire_nowait(100_000), call_options(max_wait=0, tenant="acme"):
            response = await setting.client.post(CHAT, json=chat())
        assert response.status_code == 429
        assert "retry-after" not in response.headers  # only a release helps
        assert setting.events[0].tenant == "acme"


class TestRequests:
    @pytest.mark.parametrize(
        ("path", "body", "input_tokens", "output_tokens", "declared"),
        [
            ("embeddings", {"input": ["abcd", "abcdefgh"]}, 3, 0, 0),
            ("embeddings", {"input": [[1, 2], [3]]}, 3, 0, 0),
            ("completions", {"prompt": "abcd", "max_tokens": 9, "n": 2}, 1, 18, 18),
            ("chat/completions", chat(max_tokens=1, max_completion_tokens=7), 9, 7, 7),
            ("responses", {"input": "hello", "max_output_tokens": 5}, 9, 5, 5),
            ("responses", {"input": "hello", "instructions": "hi"}, 15, 500, None),
            ("messages", chat(system="abcd", max_tokens=5), 15, 5, 5),
            ("unknown", {"what": "is this"}, 6, 500, None),
        ],
    )
    async def test_what_is_reserved(
        self,
        stack: ModuleType,
        path: str,
        body: dict[str, Any],
        input_tokens: int,
        output_tokens: int,
        declared: int | None,
    ) -> None:
        setting = Setting(stack)
        await setting.client.post(f"http://fake/v1/{path}", json=body)
        assert setting.events[0].estimated == Usage(
            input_tokens=input_tokens, output_tokens=output_tokens, max_output_tokens=declared
        )
        assert setting.events[0].request.model == body.get("model")

    @pytest.mark.parametrize(
        "path",
        [
            "messages/count_tokens",
            "responses/input_tokens",
            "models/m:countTokens",
            "models/count-tokens:rawPredict",
        ],
    )
    async def test_counting_is_a_request_and_takes_no_block(
        self, stack: ModuleType, path: str
    ) -> None:
        setting = Setting(stack)
        counted = {"input_tokens": 14, "totalTokens": 14}
        setting.transport._transport = stack.MockTransport(
            lambda request: stack.Response(200, json=counted)
        )
        async with setting.flow.request(input_tokens=7, max_output_tokens=1):
            await setting.client.post(f"http://fake/v1/{path}", json=chat(max_tokens=9))
            assert setting.used == (8, 2)
        assert setting.outcomes == ["abandoned", "abandoned"]
        assert setting.events[0].request.model == "gpt-5"

    @pytest.mark.parametrize(
        ("status", "outcome", "output_tokens"), [(204, "reconciled", 0), (200, "abandoned", 500)]
    )
    async def test_an_empty_body(
        self, stack: ModuleType, status: int, outcome: str, output_tokens: int
    ) -> None:
        setting = Setting(stack)

        class Empty(stack.AsyncByteStream):  # type: ignore[name-defined,misc]
            async def __aiter__(self) -> AsyncIterator[bytes]:
                await anyio.lowlevel.checkpoint()
                return
                yield

        setting.transport._transport = stack.MockTransport(
            lambda request: stack.Response(status, stream=Empty())
        )
        await setting.client.post(CHAT, json=chat())
        (event,) = setting.events
        assert (event.outcome, event.charged.output_tokens) == (outcome, output_tokens)
        assert event.charged.input_tokens == 9
        assert setting.held == (0, 0)

    async def test_others_are_requests_and_no_more(self, stack: ModuleType) -> None:
        setting = Setting(stack)
        await setting.client.get("http://fake/v1/models")
        await setting.client.post("http://fake/v1/files", files={"file": b"x" * 1_000_000})
        await setting.client.post(
            "http://fake/v1/x", content=b"x", headers={"content-type": "image/png"}
        )
        assert [event.estimated.total_tokens for event in setting.events] == [0, 0, 0]

    async def test_a_model_named_in_the_path(self, stack: ModuleType) -> None:
        setting = Setting(stack)
        body = chat()
        del body["model"]
        await setting.client.post("http://fake/openai/deployments/mine/chat/completions", json=body)
        assert setting.events[0].request.model == "mine"


class TestBodies:
    """What the servers send, in any packaging, is passed on to the byte."""

    def replay(self, stack: ModuleType, *chunks: bytes, **headers: str) -> Any:
        class Replay(stack.AsyncBaseTransport):  # type: ignore[name-defined,misc]
            async def handle_async_request(self, request: Any) -> Any:
                async def body() -> AsyncIterator[bytes]:
                    for chunk in chunks:
                        yield chunk

                named = {name.replace("_", "-"): value for name, value in headers.items()}
                return stack.Response(200, headers=named, content=body())

        return Replay()

    async def post(self, stack: ModuleType, *chunks: bytes, **headers: str) -> tuple[Any, Setting]:
        setting = Setting(stack)
        setting.transport._transport = self.replay(stack, *chunks, **headers)
        return await setting.client.post(CHAT, json=chat()), setting

    ANSWER = json.dumps({"usage": {"prompt_tokens": 9, "completion_tokens": 7}}).encode()

    async def test_compressed(self, stack: ModuleType) -> None:
        packed = gzip.compress(self.ANSWER)
        response, setting = await self.post(
            stack, packed[:9], packed[9:], content_encoding="gzip", content_type="application/json"
        )
        assert response.content == self.ANSWER
        assert setting.used == (16, 1)

    @pytest.mark.parametrize("encoding", ["br", "zstd, gzip", "deflate"])
    async def test_what_cannot_be_read_keeps_the_estimate(
        self, stack: ModuleType, encoding: str
    ) -> None:
        setting = Setting(stack)
        setting.transport._transport = self.replay(stack, b"\x00\xff", content_encoding=encoding)
        request = stack.Request("POST", CHAT, json=chat(), headers={"accept-encoding": "br, gzip"})
        response = await setting.transport.handle_async_request(request)
        assert [chunk async for chunk in response.stream] == [b"\x00\xff"]
        assert request.headers["accept-encoding"] == "gzip, deflate"
        assert setting.used[0] > 500
        assert setting.held == (0, 0)

    async def test_a_long_one_is_not_kept(self, stack: ModuleType) -> None:
        vectors = b'{"data": [' + b"0.125, " * 400_000 + b'1], "model": "e", '
        usage = b'"usage": {"prompt_tokens": 42, "total_tokens": 42}}'
        chunks = (vectors[i : i + 9_999] for i in range(0, len(vectors), 9_999))
        response, setting = await self.post(stack, *chunks, usage)
        assert len(response.content) > 2_800_000
        assert setting.used == (42, 1)

    @pytest.mark.parametrize(
        "body", [b"", b"not json", b"[1, 2]", b'{"usage": 7}', b"[" * 100_000, b"\xff\xfe", b"null"]
    )
    async def test_nonsense_keeps_the_estimate(self, stack: ModuleType, body: bytes) -> None:
        for kind in ("application/json", "text/event-stream"):
            response, setting = await self.post(stack, body, content_type=kind)
            assert response.content == body
            assert setting.used[0] > 500
            assert setting.held == (0, 0)

    @pytest.mark.parametrize("size", [1, 2, 7, 1_000])
    async def test_events_cut_anywhere(self, stack: ModuleType, size: int) -> None:
        stream = (
            b": comment\r\n\r\nevent: x\r\n"
            b'data: {"choices": [{"delta": {"content": "\xc3\xa4"}}]}\r\n\r\n'
            b'data:{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}}\n\n'
            b"data: [DONE]"
        )
        chunks = [stream[i : i + size] for i in range(0, len(stream), size)]
        response, setting = await self.post(stack, *chunks, content_type="text/event-stream")
        assert response.content == stream
        assert setting.used == (16, 1)


class TestMistakes:
    def test_something_else_than_a_transport(self, stack: ModuleType) -> None:
        with pytest.raises(TypeError, match=rf"pass fake.transport\({stack.__name__}\)"):
            throttled(stack)(TokenRateLimiter(tokens_per_minute=10), FakeProvider())

    async def test_the_other_librarys_client(self, stack: ModuleType) -> None:
        other = pytest.importorskip({"httpx": "httpx2", "httpx2": "httpx"}[stack.__name__])
        limiter = TokenRateLimiter(tokens_per_minute=10)
        transport = throttled(stack)(limiter)
        request = other.Request("POST", CHAT, json=chat())
        with pytest.raises(TypeError, match=rf"take .* tokenflow.integrations.{other.__name__}$"):
            await transport.handle_async_request(request)
        assert limiter.statistics().quotas[0].used == 0

    async def test_a_name_that_tells_what_it_is(self, stack: ModuleType) -> None:
        fake = FakeProvider.openai(tpm=10)
        assert repr(fake) == "<FakeProvider openai: 0 calls, 0 running, 0 refused>"
        assert repr(fake.transport(stack)) == f"<FakeTransport of {stack.__name__} to {fake!r}>"
        async with await fake.respond("POST", "/v1/chat/completions", body=chat()) as answer:
            assert repr(answer) == f"<Answer {answer.status}>"
