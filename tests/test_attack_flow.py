"""Calls and transports under hostile schedules, streams and code: what was once wrong, and more."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import math
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

from tokenflow import (
    ApproximateCounter,
    CallEvent,
    HistoricalEstimator,
    Quota,
    Replica,
    Request,
    TaskEstimator,
    TokenFlow,
    TokenLimits,
    TokenRateLimiter,
    TokenRouter,
    TokenSemaphore,
    Usage,
)
from tokenflow.flow import MapResults
from tokenflow.flow._call import _open, open_call
from tokenflow.integrations._bodies import Compressed, Document, Events

from .calls import Refused
from .conftest import Backend, run_virtual
from .test_bodies import meter
from .test_flow import Limited, chunk, usage
from .test_map import collect, double
from .test_transports import CHAT, Setting, chat, stack, throttled

__all__ = ["stack"]


async def stream(*chunks: Any, error: BaseException | None = None) -> AsyncIterator[Any]:
    for each in chunks:
        await anyio.sleep(1)
        yield each
    if error is not None:
        raise error


@pytest.mark.anyio
class TestWhatACallIsCharged:
    async def test_the_truth_stands_though_more_was_counted(self) -> None:
        """Ours counts 1,000 tokens of what the server says are 7."""
        limited = Limited()
        async with limited.request(max_output_tokens=100) as call:
            async for _ in call.track(stream(chunk("a" * 3_000), usage(7))):
                pass
        assert limited.used == (1_007, 1)
        assert limited.events[0].charged.output_tokens == 7

    async def test_a_stream_reconciled_by_hand(self) -> None:
        limited = Limited()
        async with limited.request(max_output_tokens=100) as call:
            async for _ in call.track(stream(chunk("a" * 3_000))):
                pass
            call.reconcile(usage(7))
        assert limited.used == (1_007, 1)

    async def test_a_stream_refused_before_it_began(self) -> None:
        limited = Limited()
        async with limited.request() as call:
            try:
                await anext(call.track(stream(error=Refused(429))))
            except Refused as error:
                call.failed(error)
        assert limited.used == (0, 1)

    async def test_another_attempt_after_no_connection(self) -> None:
        limited = Limited()
        async with limited.request() as call:
            call.failed(ConnectionRefusedError())
            assert limited.used[0] == 0
            call.reconcile(usage(50))
        assert (limited.held, limited.used) == (0, (1_050, 1))
        assert limited.events[0].charged.total_tokens == 1_050

    async def test_another_stream_after_one_that_broke(self) -> None:
        limited = Limited()
        async with limited.request(max_output_tokens=10) as call:
            with contextlib.suppress(OSError):
                async for _ in call.track(stream(chunk("aaa"), error=OSError())):
                    pass
            async for _ in call.track(stream(chunk("bbb"), usage(4))):
                pass
        assert limited.used == (1_004, 1)
        assert limited.outcomes == ["reconciled"]

    @pytest.mark.parametrize(
        ("events", "tokens"),
        [
            ([chunk("b"), {"choices": [], **usage(4)}], 1_004),
            ([{"choices": [{"delta": {}, "finish_reason": "stop"}], **usage(4)}], 1_004),
            ([{"type": "message_delta", "delta": {"stop_reason": "end_turn"}, **usage(4)}], 1_004),
            ([{"response": {"status": "completed", **usage(4)}}], 1_004),
            ([{"response": {"status": "in_progress", **usage(4)}}], 1_500),
            ([{**chunk("b"), **usage(4)}], 1_500),  # vLLM's, so far
            ([{"choices": [], **usage(4)}, chunk("b" * 3_000)], 2_000),  # it was not the last
        ],
    )
    async def test_left_after_its_usage_and_before_its_end(
        self, events: list[Any], tokens: int
    ) -> None:
        limited = Limited()
        async with contextlib.aclosing(stream(*events, chunk("more"))) as source:  # type: ignore[type-var]
            async with limited.request() as call:
                tracked = call.track(source)
                for _ in events:
                    await anext(tracked)
        assert limited.used == (tokens, 1)

    @pytest.mark.parametrize("wrong", [ZeroDivisionError(), -1, None, 1.5])
    async def test_a_counter_that_fails_in_the_middle(
        self, wrong: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Failing:
            def count(self, text: str) -> Any:
                if isinstance(wrong, Exception):
                    raise wrong
                return wrong

        in_flight = TokenSemaphore(10_000)
        flow = TokenFlow(in_flight, counter=Failing(), estimator=TaskEstimator(default=10))
        async with flow.request(input_tokens=5) as call:
            chunks = [each async for each in call.track(stream(chunk("a" * 40), chunk("b" * 40)))]
            assert len(chunks) == 2
            assert call.usage.output_tokens == 20  # 4 bytes each
        assert caplog.text.count("in a stream") == 1

    async def test_progress_by_a_total(self) -> None:
        limited = Limited()
        async with limited.request() as call:
            call.progress(5_000)
            assert call.usage == Usage(input_tokens=1_000, output_tokens=4_000)
        assert limited.outcomes == ["abandoned"]


@pytest.mark.anyio
class TestObserversAreTold:
    async def test_though_the_estimator_raises(self, caplog: pytest.LogCaptureFixture) -> None:
        class Broken:
            def estimate(self, request: object) -> Any:
                return SimpleNamespace(tokens=10)

            def observe(self, *args: object, **more: object) -> None:
                raise ZeroDivisionError

        told: list[CallEvent] = []
        flow = TokenFlow(estimator=Broken(), observers=[told.append])
        async with flow.request(input_tokens=1) as call:
            call.reconcile(5)
        assert [event.outcome for event in told] == ["reconciled"]
        assert "ZeroDivisionError" in caplog.text

    @pytest.mark.parametrize("error", [None, Refused(429)])
    async def test_though_a_quota_cannot_be_computed(self, error: Exception | None) -> None:
        def of(usage: Usage) -> int:
            return 1 // (usage.output_tokens <= 5)

        told: list[CallEvent] = []
        semaphore = TokenSemaphore(100)
        limits = TokenLimits(TokenRateLimiter(Quota(1_000, of=of)), semaphore)
        flow = TokenFlow(limits, observers=[told.append], counter=ApproximateCounter())
        with pytest.raises(ZeroDivisionError):
            async with flow.request(input_tokens=1, max_output_tokens=5) as call:
                call.meter()._emitted = 100
                if error is not None:
                    raise error
        assert semaphore.statistics().tokens_in_flight == 0
        assert [event.outcome for event in told] == ["abandoned" if error is None else "failed"]

    async def test_though_it_was_closed_in_another_thread_first(self) -> None:
        limited = Limited()
        call = await limited.request().begin()
        with pytest.raises(RuntimeError, match="another thread"):
            await anyio.to_thread.run_sync(call.close)
        assert limited.outcomes == []
        call.close()
        call.close()
        assert limited.held == 0
        assert limited.outcomes == ["abandoned"]

    async def test_the_source_is_closed_though_its_charge_fails(self) -> None:
        def of(usage: Usage) -> int:
            return 1 // (usage.output_tokens <= 5)

        flow = TokenFlow(TokenRateLimiter(Quota(1_000, of=of)), counter=ApproximateCounter())
        source = stream(chunk("a"), chunk("b"))
        with pytest.raises(ZeroDivisionError):
            async with flow.request(input_tokens=1, max_output_tokens=5) as call:
                tracked = call.track(source)
                await anext(tracked)
                call.meter()._emitted = 100
                await tracked.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(source)


@pytest.mark.anyio
class TestBlocks:
    async def test_of_another_flow_hides_nothing(self) -> None:
        outer, inner = TokenFlow(), TokenFlow()
        async with outer.request(input_tokens=1) as call:
            async with inner.request(input_tokens=1):
                assert open_call(outer) is call
            assert open_call(outer) is None  # taken

    async def test_left_in_another_task_are_forgotten(self) -> None:
        flow = TokenFlow()
        async with flow.request(input_tokens=1) as outer:
            for _ in range(5):
                call = await flow.request(input_tokens=1).__aenter__()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call.__aexit__, None, None, None)
                assert call._before is outer  # and not the one before
            assert open_call(flow) is outer
        assert _open.get() is call
        async with flow.request(input_tokens=1) as call:
            assert call._before is None
        assert _open.get() is None

    async def test_a_long_stream_stays_cheap(self) -> None:
        """What it has charged in a window long gone is one number."""
        flow = TokenFlow(TokenRateLimiter(tokens_per_minute=1_000_000))
        async with flow.request(input_tokens=1, max_output_tokens=1) as call:
            for tokens in range(2, 600):
                call.progress(Usage(input_tokens=1, output_tokens=tokens))
                await anyio.sleep(1)
            assert len(call.lease._charges[0]) <= 62
            call.reconcile(Usage(input_tokens=1, output_tokens=570))
        quota = flow.statistics().limits["*"].quotas[0]
        assert quota.used == 60 - 1 - 29  # the youngest pieces are credited


@pytest.mark.anyio
class TestMap:
    async def test_in_a_generator_that_is_closed(self) -> None:
        jobs: list[MapResults[int, int]] = []

        async def values() -> AsyncIterator[int]:
            async with TokenFlow().map(double, range(100)) as results:
                jobs.append(results)
                async for result in results:
                    yield result.unwrap()

        async with contextlib.aclosing(values()) as found:  # type: ignore[type-var]
            await anext(found)
        assert "0 pending" in repr(jobs[0])

    async def test_left_by_what_is_no_exception(self) -> None:
        with pytest.raises(KeyboardInterrupt):  # and not in a group
            async with TokenFlow().map(double, range(10)):
                raise KeyboardInterrupt

    async def test_read_on_after_it_was_left(self) -> None:
        async with TokenFlow().map(double, range(10)) as results:
            await anext(results)
        with anyio.fail_after(5), pytest.raises(RuntimeError, match="has been left"):
            async for _ in results:
                pass

    async def test_left_while_another_task_reads(self) -> None:
        async def read(results: Any) -> None:
            with pytest.raises(RuntimeError, match="has been left"):
                await anext(results)

        async with anyio.create_task_group() as tasks:
            async with TokenFlow().map(anyio.sleep, [100]) as results:
                tasks.start_soon(read, results)
                await wait_all_tasks_blocked()

    async def test_its_progress_cannot_be_closed(self, caplog: pytest.LogCaptureFixture) -> None:
        class Broken:
            def __call__(self, progress: object) -> None:
                pass

            def close(self) -> None:
                raise OSError("broken pipe")

        cancelled = []

        async def worker(item: int) -> None:
            try:
                await anyio.sleep(100)
            finally:
                cancelled.append(item)

        async with TokenFlow().map(worker, range(3), progress=Broken()):
            await wait_all_tasks_blocked()
        assert sorted(cancelled) == [0, 1, 2]
        assert "broken pipe" in caplog.text

    async def test_workers_that_fail_while_they_are_cancelled(self) -> None:
        async def stubborn() -> None:
            try:
                await anyio.sleep(100)
            finally:
                raise ValueError("while cleaning up")

        async def worker(item: int) -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stubborn)
                tasks.start_soon(anyio.sleep, 100)

        async with TokenFlow().map(worker, range(3)) as results:
            await wait_all_tasks_blocked()
        assert "0 pending" in repr(results)

    async def test_rules_that_raise_stop_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        class Rules:
            def limiter(self) -> TokenSemaphore:
                return TokenSemaphore(100)

            def classify(self, outcome: object) -> None:
                raise LookupError

        async def worker(item: int) -> int:
            return 1 // item

        results = await collect(TokenFlow(Rules()), worker, range(3), attempts=2)  # type: ignore[arg-type]
        assert [result.attempts for result in results] == [1, 1, 1]
        assert "LookupError" in caplog.text


class Raising:
    """Rules of the user's own, which fail."""

    def limiter(self) -> TokenRateLimiter:
        return TokenRateLimiter(tokens_per_minute=10_000)

    def charge(self, request: Request, output_tokens: int) -> Usage:
        return Usage(input_tokens=request.input_tokens)

    def classify(self, outcome: object) -> Any:
        raise LookupError("classify")

    def status(self, headers: object, body: object = None, *, age: float = 0.0) -> Any:
        raise LookupError("status")


@pytest.mark.anyio
class TestRulesThatRaise:
    async def test_hide_no_error(self, caplog: pytest.LogCaptureFixture) -> None:
        flow = TokenFlow(Raising())
        with pytest.raises(OSError, match="the caller's"):
            async with flow.request(input_tokens=1) as call:
                assert call.failed(OSError("first")) is None
                raise OSError("the caller's")
        assert flow.statistics().outcomes == {"failed": 1}
        assert "LookupError('classify')" in caplog.text

    @pytest.mark.parametrize(("status", "outcome"), [(200, "reconciled"), (429, "failed")])
    async def test_end_no_response(
        self, stack: ModuleType, status: int, outcome: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        flow = TokenFlow(Raising(), counter=ApproximateCounter())
        below = stack.MockTransport(lambda request: stack.Response(status, content=ANSWER))
        client = stack.AsyncClient(transport=throttled(stack)(flow, below))
        assert (await client.post(CHAT, json=chat())).content == ANSWER
        assert flow.statistics().outcomes == {outcome: 1}
        assert "LookupError('status')" in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize("retry_after", [math.nan, math.inf, -1.0, "soon"])
async def test_rules_that_ask_for_nonsense(retry_after: Any) -> None:
    class Rules:
        def limiter(self) -> TokenRateLimiter:
            return TokenRateLimiter(tokens_per_minute=10_000)

        def charge(self, request: Request, output_tokens: int) -> Usage:
            return Usage(input_tokens=request.input_tokens)

        def classify(self, outcome: object) -> Any:
            kind: Any = SimpleNamespace(kind="wait", retry_after=retry_after, is_permanent=False)
            return kind

    flow = TokenFlow(Rules())  # type: ignore[arg-type]

    async def worker(item: int) -> None:
        async with flow.request(input_tokens=item):
            raise OSError

    results = await collect(flow, worker, range(3), attempts=2)
    assert [result.attempts for result in results] == [2, 2, 2]
    assert flow.statistics().outcomes == {"refused": 6}


def served(stack: ModuleType, *answers: Any) -> Setting:
    """A setting whose server gives these answers, one by one: each makes a response."""
    left = list(answers)

    class Below(stack.AsyncBaseTransport):  # type: ignore[name-defined,misc]
        async def handle_async_request(self, request: Any) -> Any:
            return await left.pop(0)(request)

    setting = Setting(stack)
    setting.transport._transport = Below()
    return setting


def answer(stack: ModuleType, status: int, *parts: bytes, **headers: str) -> Any:
    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            await anyio.sleep(1)
            yield part

    async def respond(request: Any) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return stack.Response(status, headers=named, content=body())

    return respond


ANSWER = b'{"usage": {"prompt_tokens": 9, "completion_tokens": 7}}'
LAST = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}}\n\n'
SSE = "text/event-stream"


@pytest.mark.anyio
class TestTransports:
    async def test_a_redirect_has_used_nothing(self, stack: ModuleType) -> None:
        moved = answer(stack, 307, b"there", location="http://fake/there")
        setting = served(stack, moved, answer(stack, 200, ANSWER), moved)
        await setting.client.post(CHAT, json=chat(), follow_redirects=True)
        assert setting.used == (16, 2)
        response = await setting.client.post(CHAT, json=chat())
        assert response.content == b"there"
        assert setting.used == (16, 3)
        assert setting.held == (0, 0)

    async def test_a_redirect_keeps_to_its_block(self, stack: ModuleType) -> None:
        moved = answer(stack, 307, b"", location="http://fake/there")
        setting = served(stack, moved, answer(stack, 200, ANSWER))
        with anyio.fail_after(30):  # it held what it would have waited for
            async with setting.flow.request(input_tokens=60_000, max_output_tokens=0):
                body = chat(messages=[{"role": "user", "content": "x" * 240_000}])
                await setting.client.post(CHAT, json=body, follow_redirects=True)
        assert setting.used == (16, 1)
        assert setting.outcomes == ["reconciled"]

    async def test_a_read_is_charged_for_nothing_and_takes_no_block(
        self, stack: ModuleType
    ) -> None:
        """Whoever polls a background response gets its usage each time."""
        usage = answer(stack, 200, ANSWER)
        setting = served(stack, usage, usage, usage)
        async with setting.flow.request(input_tokens=10):
            await setting.client.get("http://fake/v1/responses/1")
            await setting.client.post(CHAT, json=chat())
        await setting.client.get("http://fake/v1/responses/1")
        assert setting.used == (16, 3)

    @pytest.mark.parametrize("status", [429, 200])
    async def test_what_was_read_below(self, stack: ModuleType, status: int) -> None:
        async def respond(request: Any) -> Any:
            packed = gzip.compress(ANSWER)
            response = await answer(stack, status, packed, content_encoding="gzip")(request)
            await response.aread()
            return response

        setting = served(stack, respond)
        response = await setting.client.post(CHAT, json=chat())
        assert (response.status_code, response.content) == (status, ANSWER)
        assert setting.used == (16 if status == 200 else 0, 1)
        assert setting.held == (0, 0)

    @pytest.mark.parametrize("status", [500, 200])
    async def test_what_was_closed_below(self, stack: ModuleType, status: int) -> None:
        async def respond(request: Any) -> Any:
            response = await answer(stack, status, ANSWER)(request)
            await response.aclose()
            return response

        setting = served(stack, respond)
        async with setting.client.stream("POST", CHAT, json=chat()) as response:
            assert response.status_code == status
        assert setting.held == (0, 0)
        assert len(setting.events) == 1

    async def test_an_error_that_is_not_packed_as_it_says(self, stack: ModuleType) -> None:
        setting = served(stack, answer(stack, 500, b"not gzip", content_encoding="gzip"))
        async with setting.client.stream("POST", CHAT, json=chat()) as response:
            assert [each async for each in response.aiter_raw()] == [b"not gzip"]
        assert setting.held == (0, 0)

    @pytest.mark.parametrize("depth", [1, 900, 910, 920, 930, 940, 950, 960, 20_000])
    async def test_a_request_that_nobody_understands(self, stack: ModuleType, depth: int) -> None:
        setting = served(stack, answer(stack, 200, ANSWER))
        deep = b"[" * depth + b"]" * depth
        content = b'{"messages": [{"type": %s, "arguments": %s}]}' % (deep, deep)
        await setting.client.post(CHAT, content=content)
        assert setting.used == (16, 1)

    @pytest.mark.parametrize("where", ["read below", "packed otherwise"])
    async def test_a_refusal_whose_headers_are_not_ascii(
        self, stack: ModuleType, where: str
    ) -> None:
        headers = [(b"x-why", b"f\xfcr"), (b"retry-after", b"5"), (b"content-encoding", b"gzip")]

        async def body() -> AsyncIterator[bytes]:
            yield b"not gzip"

        async def respond(request: Any) -> Any:
            if where == "packed otherwise":
                return stack.Response(429, headers=headers, content=body())
            return stack.Response(429, headers=headers[:2], content=b"whole")

        setting = served(stack, respond)
        async with setting.client.stream("POST", CHAT, json=chat()) as response:
            assert response.headers["x-why"] == "f\xfcr"
        assert setting.outcomes == ["refused"]
        assert setting.quotas.statistics().quotas[0].paused_for > 0

    @pytest.mark.parametrize("parts", [1, 2, 1_000])
    async def test_an_error_whose_body_is_long(self, stack: ModuleType, parts: int) -> None:
        """It is handed on when so much of it has come that no more would be looked at."""
        setting = served(stack, answer(stack, 500, *parts * [b"x" * 40_000]))
        async with setting.client.stream("POST", CHAT, json=chat()) as response:
            assert anyio.current_time() == pytest.approx(min(parts, 2))
            assert setting.outcomes == ["failed"]
            assert sum([len(each) async for each in response.aiter_raw()]) == parts * 40_000
        assert setting.held == (0, 0)

    async def test_an_error_whose_body_is_long_is_closed(self, stack: ModuleType) -> None:
        closed: list[str] = []

        class Endless(stack.AsyncByteStream):  # type: ignore[name-defined,misc]
            async def __aiter__(self) -> AsyncIterator[bytes]:
                try:
                    while True:
                        await checkpoint()
                        yield b"x" * 9_999
                finally:
                    closed.append("generator")

            async def aclose(self) -> None:
                closed.append("stream")

        async def respond(request: Any) -> Any:
            return stack.Response(500, stream=Endless())

        setting = served(stack, respond)
        async with setting.client.stream("POST", CHAT, json=chat()):
            assert closed == []
        assert closed == ["generator", "stream"]

    async def test_a_refusal_whose_body_never_came(self, stack: ModuleType) -> None:
        setting = served(stack, answer(stack, 429, b"a", b"b", b"c", retry_after="5"))
        with anyio.move_on_after(1.5):
            await setting.client.post(CHAT, json=chat())
        assert setting.outcomes == ["refused"]
        assert setting.used == (0, 1)
        assert setting.quotas.statistics().quotas[0].paused_for == pytest.approx(5)

    async def test_a_request_that_is_sent_again_goes_where_it_would(
        self, stack: ModuleType
    ) -> None:
        asked = []

        class Below(stack.AsyncBaseTransport):  # type: ignore[name-defined,misc]
            async def handle_async_request(self, request: Any) -> Any:
                asked.append((str(request.url), request.headers["host"]))
                return stack.Response(200)

        router = TokenRouter([Replica("a", target="https://b.example/base/")])
        transport = throttled(stack)(TokenFlow(router=router), Below())
        async with stack.AsyncClient(transport=transport) as client:
            request = client.build_request("GET", "http://any/v1/x")
            for _ in range(2):
                await client.send(request)
        assert asked == [("https://b.example/base/v1/x", "b.example")] * 2
        assert (str(request.url), request.headers["host"]) == ("http://any/v1/x", "any")

    @pytest.mark.parametrize("location", ["/base/v1/y?z=1", "https://b.example/base/v1/y?z=1"])
    async def test_a_redirect_to_an_address_of_the_replicas(
        self, stack: ModuleType, location: str
    ) -> None:
        asked = []

        class Below(stack.AsyncBaseTransport):  # type: ignore[name-defined,misc]
            async def handle_async_request(self, request: Any) -> Any:
                asked.append(str(request.url))
                is_first = len(asked) == 1
                return stack.Response(307 if is_first else 200, headers={"location": location})

        router = TokenRouter([Replica("a", target="https://b.example/base/")])
        transport = throttled(stack)(TokenFlow(router=router), Below())
        async with stack.AsyncClient(transport=transport, follow_redirects=True) as client:
            await client.post("http://any/v1/x", json={})
        assert asked == ["https://b.example/base/v1/x", "https://b.example/base/v1/y?z=1"]

    async def test_an_upload_is_not_read_before_it_is_sent(self, stack: ModuleType) -> None:
        sent: list[str] = []

        async def upload() -> AsyncIterator[bytes]:
            for _ in range(3):
                sent.append("part")
                yield b"x"

        async def respond(request: Any) -> Any:
            sent.append("request")
            assert len([part async for part in request.stream]) == 3
            return stack.Response(200)

        setting = served(stack, respond)
        kind = {"content-type": "application/octet-stream"}
        await setting.client.post("http://fake/upload", content=upload(), headers=kind)
        assert sent == ["request", "part", "part", "part"]
        assert setting.used == (0, 1)

    # A generator inside httpx is left to the garbage collector, of which trio tells.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    async def test_a_stream_closed_at_its_done(self, stack: ModuleType) -> None:
        """As openai does over HTTP/2."""
        done = b'data: {"usage": {"prompt_tokens": 9, "completion_tokens": 7}}\n\ndata: [DONE]\n\n'
        setting = served(stack, answer(stack, 200, done, b"", content_type=SSE))
        async with setting.client.stream("POST", CHAT, json=chat()) as response:
            await anext(response.aiter_raw())
        assert setting.used == (16, 1)

    async def test_a_stream_closed_while_another_task_reads(self, stack: ModuleType) -> None:
        closed = anyio.Event()

        class Stream(stack.AsyncByteStream):  # type: ignore[name-defined,misc]
            async def __aiter__(self) -> AsyncIterator[bytes]:
                yield b"data: 1\n"
                await closed.wait()
                raise stack.ReadError("closed")

            async def aclose(self) -> None:
                closed.set()

        async def respond(request: Any) -> Any:
            return stack.Response(200, stream=Stream())

        async def read(response: Any) -> None:
            with pytest.raises(stack.ReadError):
                async for _ in response.aiter_raw():
                    pass

        setting = served(stack, respond)
        request = setting.client.build_request("POST", CHAT, json=chat())
        response = await setting.client.send(request, stream=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, response)
            await wait_all_tasks_blocked()
            await response.aclose()
        assert setting.held == (0, 0)
        assert setting.outcomes == ["abandoned"]

    async def test_a_stream_tracked_above_counts_once(self, stack: ModuleType) -> None:
        text = b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % (b"a" * 4_000)
        setting = served(stack, answer(stack, 200, text, b"\n", content_type=SSE))

        async def events(response: Any) -> AsyncIterator[Any]:
            async for line in response.aiter_lines():
                if line:
                    yield json.loads(line[5:])

        async with setting.flow.request(input_tokens=10, max_output_tokens=10) as call:
            async with setting.client.stream("POST", CHAT, json=chat()) as response:
                assert len([each async for each in call.track(events(response))]) == 1
        assert setting.used == (1_010, 1)


class TestBodies:
    TRUTH = Usage(input_tokens=9, output_tokens=7)

    @pytest.mark.parametrize("size", [1, 3, 1_000])
    @pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
    def test_an_event_of_many_lines(self, end: bytes, size: int) -> None:
        """As a proxy sends it that formats JSON."""
        lines = json.dumps(json.loads(LAST[5:]), indent=1).encode().split(b"\n")
        raw = b"\xef\xbb\xbf" + b"".join(b"data: " + line + end for line in lines) + end
        measured, call = meter()
        events = Events(measured)
        for i in range(0, len(raw), size):
            events.feed(raw[i : i + size])
            events.feed(b"")
        events.finish()
        assert call.charged[-1] == self.TRUTH

    def test_lines_that_never_make_an_event_are_not_kept(self) -> None:
        measured, _ = meter()
        events = Events(measured)
        for _ in range(200):
            events.feed(b"data: " + b"x" * 9_999 + b"\n")
            assert sum(map(len, events._lines)) <= 1 << 20
        events.feed(b"\n" + LAST)
        events.finish()

    def test_the_usage_in_an_event_that_is_too_long(self) -> None:
        """The end of a response with an image in it."""
        usage = {"input_tokens": 9, "output_tokens": 7}
        image = {"result": "A" * 3_000_000}
        event = {"type": "response.completed", "response": {"output": [image], "usage": usage}}
        raw = b"data: " + json.dumps(event).encode() + b"\n\n"
        measured, call = meter()
        events = Events(measured)
        for i in range(0, len(raw), 99_999):
            events.feed(raw[i : i + 99_999])
        events.finish()
        assert call.charged[-1] == self.TRUTH

    def test_deflate_without_its_head(self) -> None:
        packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        packed = packer.compress(ANSWER) + packer.flush()
        _, call = meter()
        body = Compressed(Document(call.reconcile), readable=True)
        body.feed(packed[:9])
        body.feed(packed[9:])
        body.finish()
        assert call.charged == [self.TRUTH]

    def test_a_small_body_that_is_huge(self) -> None:
        sizes = []
        _, call = meter()
        document = Document(call.reconcile)

        class Plain:
            finish = document.finish

            def feed(self, data: bytes) -> None:
                sizes.append(len(data))
                document.feed(data)

        body = Compressed(Plain(), readable=True)  # type: ignore[arg-type]
        body.feed(gzip.compress(b'{"x": "' + b"0" * 9_000_000 + b'", ' + ANSWER[1:]))
        body.finish()
        assert call.charged == [self.TRUTH]
        assert max(sizes) <= 1 << 20


# -- cancelled everywhere ----------------------------------------------------


class Struck:
    """Awaits a coroutine, and does something as it goes to sleep, or wakes, for the n-th time."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, None], n: int, strike: Callable[[], Any], late: bool
    ) -> None:
        self.sleeps = 0
        self._coroutine, self._n, self._strike, self._late = coroutine, n, strike, late

    def __await__(self) -> Generator[Any, Any, None]:
        resume, value = self._coroutine.send, None
        while True:
            try:
                trap = resume(value)
            except StopIteration:
                return
            self.sleeps += 1
            now = self.sleeps == self._n
            if now and not self._late:
                self._strike()
            try:
                value, resume = (yield trap), self._coroutine.send
            except BaseException as error:
                value, resume = error, self._coroutine.throw
            if now and self._late:
                self._strike()


class Books:
    """A flow through limits that are narrow in flight and never forget."""

    def __init__(self) -> None:
        self.in_flight = TokenSemaphore(2_000, max_requests=5)
        self.quotas = TokenRateLimiter(Quota(10**9, per=1e9), Quota(10**6, of="requests", per=1e9))
        self.limits = TokenLimits(self.in_flight, self.quotas)
        self.events: list[CallEvent] = []
        self.flow = TokenFlow(
            self.limits,
            counter=ApproximateCounter(),
            estimator=HistoricalEstimator(prior=TaskEstimator(default=50)),
            observers=[self.events.append],
        )
        self.open = 0  # bodies

    def check(self) -> None:
        """Nothing is held, nobody waits, and each event says what the quotas say."""
        held, waiting = self.in_flight.statistics(), self.limits.statistics()
        assert (held.tokens_in_flight, held.requests_in_flight, self.open) == (0, 0, 0)
        assert (waiting.waiting_calls, waiting.waiting_tokens) == (0, 0)
        tokens, requests = self.quotas.statistics().quotas
        assert tokens.used == sum(event.charged.total_tokens for event in self.events)
        assert requests.used == sum(event.charged.requests for event in self.events)
        for event in self.events:
            if event.outcome in ("unsent", "not admitted"):
                assert event.charged == Usage(requests=0)
            elif event.outcome == "refused":
                assert event.charged == Usage()
            elif event.outcome != "reconciled":
                assert event.charged.total_tokens >= event.estimated.total_tokens


async def requests(books: Books) -> None:
    async def hold() -> None:
        async with books.in_flight.reserve(1_900):
            await anyio.sleep(5)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold)
        await anyio.sleep(0.1)
        async with books.flow.request(prompt="abc" * 300, max_output_tokens=40) as call:
            chunks = chunk("a" * 300), chunk("b"), {"choices": [], **usage(33, 300)}
            tracked = call.track(stream(*chunks))
            async with contextlib.aclosing(tracked):
                async for _ in tracked:
                    await checkpoint()
        with contextlib.suppress(Refused):
            async with books.flow.request(input_tokens=100, max_output_tokens=40) as call:
                call.failed(ConnectionRefusedError())
                await anyio.sleep(1)
                raise Refused(429, retry_after="2")
        async with books.flow.request(input_tokens=100, max_output_tokens=40):
            async with books.flow.request(input_tokens=100, max_output_tokens=40) as call:
                await anyio.sleep(1)
                call.reconcile(usage(1))


async def job(books: Books) -> None:
    async def worker(item: int) -> None:
        async with books.flow.request(input_tokens=500, max_output_tokens=40) as call:
            await anyio.sleep(1)
            if item == 1:
                raise Refused(429, retry_after="1")
            call.reconcile(usage(2, 500))

    async with books.flow.map(worker, stream(*range(6)), attempts=2, max_pending=4) as results:
        for _ in range(5):
            await anext(results)


async def posts(books: Books) -> None:
    stack: Any = pytest.importorskip("httpx")

    class Body(stack.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, *parts: bytes) -> None:
            self._parts = parts
            self._is_open = True
            books.open += 1

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for part in self._parts:
                await anyio.sleep(1)
                yield part

        async def aclose(self) -> None:
            books.open -= self._is_open
            self._is_open = False
            await checkpoint()

    class Below(stack.AsyncBaseTransport):  # type: ignore[misc]
        async def handle_async_request(self, request: Any) -> Any:
            await anyio.sleep(1)
            path = request.url.path
            if path == "/refused":
                body = Body(b'{"er', b'ror": 1}')
                return stack.Response(429, headers={"retry-after": "2"}, stream=body)
            if path == "/broken":
                return stack.Response(500, stream=Body(b"x" * 70_000, b"y"))
            if path == "/moved":
                headers = {"location": "http://fake/stream"}
                return stack.Response(307, headers=headers, stream=Body(b""))
            body = Body(b"data: " + json.dumps(chunk("a" * 300)).encode() + b"\n\n", LAST, b"")
            return stack.Response(200, headers={"content-type": SSE}, stream=body)

    transport = throttled(stack)(books.flow, Below())
    client = stack.AsyncClient(transport=transport, timeout=None, follow_redirects=True)
    for path in ("moved", "refused", "broken", "stream"):
        await client.post(f"http://fake/{path}", json=chat(max_tokens=30))
    async with books.flow.request(input_tokens=10, max_output_tokens=10):
        await client.post("http://fake/moved", json=chat(max_tokens=30))
        async with client.stream("POST", "http://fake/stream", json=chat(max_tokens=30)) as left:
            async with contextlib.aclosing(left.aiter_raw()) as parts:
                await anext(parts)


async def strike_scope(scenario: Any, books: Books, n: int, late: bool) -> int:
    with anyio.CancelScope() as scope:
        struck = Struck(scenario(books), n, scope.cancel, late)
        await struck
    return struck.sleeps


async def strike_task(scenario: Any, books: Books, n: int, late: bool) -> int:
    """Natively, by asyncio."""

    async def run() -> None:
        await struck

    task = asyncio.ensure_future(run())
    struck = Struck(scenario(books), n, task.cancel, late)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return struck.sleeps


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("late", [False, True], ids=["asleep", "awake"])
@pytest.mark.parametrize("scenario", [requests, job, posts])
@pytest.mark.parametrize(
    ("backend", "strike"),
    [("asyncio", strike_scope), ("trio", strike_scope), ("asyncio", strike_task)],
    ids=["asyncio", "trio", "native"],
)
def test_cancelled_anywhere(backend: Backend, strike: Any, scenario: Any, late: bool) -> None:
    n = 0
    while True:
        n += 1
        books = Books()
        sleeps = run_virtual(backend, strike, scenario, books, n, late)
        books.check()
        if sleeps < n:
            break
    assert n > 5
