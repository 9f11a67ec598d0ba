"""TokenFlow.request: what is reserved, and what each way out charges."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from tokenflow import (
    ApproximateCounter,
    Call,
    CallEvent,
    HistoricalEstimator,
    QueueFull,
    Quota,
    Replica,
    Request,
    RequestTooLarge,
    TaskEstimator,
    TiktokenCounter,
    TokenFlow,
    TokenLimits,
    TokenRateLimiter,
    TokenSemaphore,
    UnknownModel,
    Usage,
    WaitTimeout,
    call_options,
)

from .calls import Refused

pytestmark = pytest.mark.anyio


class Limited:
    """A flow whose every quantity can be looked at, and what its observers were told."""

    def __init__(self, **options: Any) -> None:
        self.in_flight = TokenSemaphore(100_000)
        self.quotas = TokenRateLimiter(tokens_per_minute=100_000, requests_per_minute=100)
        self.events: list[CallEvent] = []
        self.flow = TokenFlow(
            TokenLimits(self.in_flight, self.quotas),
            counter=ApproximateCounter(),
            estimator=HistoricalEstimator(prior=TaskEstimator(default=500)),
            observers=[self.events.append],
            **options,
        )

    def request(self, **options: Any) -> Call:
        return self.flow.request(**{"input_tokens": 1_000, **options})

    @property
    def used(self) -> tuple[int, int]:
        """Tokens and requests in the window."""
        tokens, requests = self.quotas.statistics().quotas
        return tokens.used, requests.used

    @property
    def held(self) -> int:
        return self.in_flight.statistics().tokens_in_flight

    @property
    def outcomes(self) -> list[str]:
        return [event.outcome for event in self.events]

    @property
    def learned(self) -> tuple[int, float]:
        statistics = self.flow.statistics().estimator
        return statistics.calls, statistics.ratio


def chunk(text: str = "", **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "index": 0}], **more}


def usage(output_tokens: int, input_tokens: int = 1_000) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": input_tokens, "completion_tokens": output_tokens}}


class TestWaysOut:
    """The table in the documentation of `Call`, row by row."""

    async def test_reconciled(self) -> None:
        limited = Limited()
        async with limited.request() as call:
            assert call.estimated == Usage(input_tokens=1_000, output_tokens=500)
            assert (limited.held, limited.used) == (1_500, (1_500, 1))
            call.reconcile(usage(80))
            assert limited.used == (1_080, 1)
        assert (limited.held, limited.used) == (0, (1_080, 1))
        assert limited.outcomes == ["reconciled"]
        assert limited.events[0].charged == Usage(input_tokens=1_000, output_tokens=80)
        assert limited.learned[0] == 1

    async def test_more_than_estimated_is_charged_too(self) -> None:
        limited = Limited()
        async with limited.request() as call:
            call.reconcile(Usage(input_tokens=1_000, output_tokens=72_000))
        assert limited.used == (73_000, 1)  # (graphrag 757)

    async def test_an_int_is_the_total(self) -> None:
        limited = Limited()
        async with limited.request() as call:
            call.reconcile(1_200)
            assert call.usage == Usage(input_tokens=1_000, output_tokens=200)
        assert limited.used == (1_200, 1)

    async def test_a_response_without_usage_changes_nothing(self) -> None:
        limited = Limited()
        async with limited.request() as call:
            with pytest.raises(ValueError, match="no token usage"):
                call.reconcile({"choices": []})
        assert limited.used == (1_500, 1)
        assert limited.outcomes == ["abandoned"]

    async def test_refused_keeps_the_request_and_pauses_everyone(self) -> None:
        limited = Limited()
        with pytest.raises(Refused):
            async with limited.request():
                raise Refused(429, retry_after="7")
        assert (limited.held, limited.used) == (0, (0, 1))
        assert limited.outcomes == ["refused"]
        assert limited.learned[0] == 0
        started = anyio.current_time()
        async with limited.request() as call:
            assert anyio.current_time() - started == pytest.approx(7)
            assert call.waited == pytest.approx(7)

    async def test_refused_then_another_attempt_in_the_same_block(self) -> None:
        limited = Limited()
        async with limited.request() as call:
            refusal = call.failed(Refused(429, retry_after="1"))
            assert refusal is not None
            assert refusal.kind == "wait"
            assert limited.used == (0, 1)
            await anyio.sleep(1)
            call.reconcile(usage(50))
        assert limited.used == (1_050, 1)
        assert limited.outcomes == ["reconciled"]

    async def test_refused_under_a_quota_that_never_credits(self) -> None:
        limiter = TokenRateLimiter(Quota(10_000, settle="reserved"), Quota(9, of="requests"))
        flow = TokenFlow(limiter)
        with pytest.raises(Refused):
            async with flow.request(input_tokens=10, max_output_tokens=4_000):
                assert [each.used for each in limiter.statistics().quotas] == [4_010, 1]
                raise Refused(429)
        assert [each.used for each in limiter.statistics().quotas] == [0, 1]

    async def test_a_permanent_refusal(self) -> None:
        limited = Limited()
        with pytest.raises(Refused):
            async with limited.request():
                raise Refused(400)
        assert limited.used == (0, 1)
        refusal = limited.events[0].refusal
        assert refusal is not None
        assert refusal.is_permanent

    async def test_could_not_connect(self) -> None:
        limited = Limited()
        with pytest.raises(ConnectionRefusedError):
            async with limited.request():
                raise ConnectionRefusedError
        assert (limited.held, limited.used) == (0, (0, 0))
        assert limited.outcomes == ["unsent"]
        assert limited.events[0].charged.total_tokens == 0

    async def test_an_exception_keeps_the_estimate(self) -> None:
        limited = Limited()
        with pytest.raises(ZeroDivisionError):
            async with limited.request():
                raise ZeroDivisionError
        assert (limited.held, limited.used) == (0, (1_500, 1))
        assert limited.outcomes == ["failed"]

    async def test_an_exception_after_the_usage_is_known(self) -> None:
        limited = Limited()
        with pytest.raises(ZeroDivisionError):
            async with limited.request() as call:
                call.reconcile(usage(3))
                raise ZeroDivisionError
        assert limited.used == (1_003, 1)
        assert limited.outcomes == ["reconciled"]

    async def test_cancelled_in_the_body(self) -> None:
        limited = Limited()
        with anyio.CancelScope() as scope:
            async with limited.request():
                scope.cancel()
                await anyio.sleep(1)
        assert (limited.held, limited.used) == (0, (1_500, 1))
        assert limited.outcomes == ["failed"]

    async def test_cancelled_while_it_waits(self) -> None:
        limited = Limited()
        with limited.in_flight.acquire_nowait(99_000):
            async with anyio.create_task_group() as tasks:

                async def wait() -> None:
                    async with limited.request():
                        pytest.fail("there is no room")

                tasks.start_soon(wait)
                await wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
        assert (limited.held, limited.used) == (0, (0, 0))
        assert limited.outcomes == ["not admitted"]

    @pytest.mark.parametrize("stage", ["model", "counter", "rules", "estimator"])
    async def test_what_cannot_be_counted_or_estimated(self, stage: str) -> None:
        class Broken:
            def count(self, text: str) -> int:
                raise ZeroDivisionError

            def estimate(self, request: Request) -> Any:
                raise ZeroDivisionError

            def observe(self, request: Request, tokens: int, *, truncated: bool = False) -> None:
                pytest.fail("nothing was generated")

        events: list[CallEvent] = []
        flow = TokenFlow(
            {"gpt-*": TokenSemaphore(10)},
            counter=Broken() if stage == "counter" else ApproximateCounter(),
            estimator=Broken() if stage == "estimator" else None,
            observers=[events.append],
        )
        rules: Any = object() if stage == "rules" else None
        model = "claude" if stage == "model" else "gpt-5"
        with pytest.raises((UnknownModel, ZeroDivisionError, AttributeError)) as caught:
            await flow.request(prompt="a", model=model, tenant="acme", rules=rules).begin()
        (event,) = events
        assert (event.outcome, event.error) == ("not admitted", caught.value)
        assert (event.tenant, event.request.model) == ("acme", model)
        assert event.estimated == event.charged == Usage(requests=0)
        assert flow.statistics().outcomes == {"not admitted": 1}

    async def test_cancelled_while_it_is_counted(self) -> None:
        class Slow:
            def _ready(self) -> bool:
                return False

            def count(self, text: str) -> int:
                started.set()
                done.wait(10)
                return 1

        started, done = threading.Event(), threading.Event()
        events: list[CallEvent] = []
        flow = TokenFlow(TokenSemaphore(10), counter=Slow(), observers=[events.append])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flow.request(prompt="a").begin)
            await anyio.to_thread.run_sync(started.wait, 10)
            tasks.cancel_scope.cancel()
        done.set()
        assert [event.outcome for event in events] == ["not admitted"]
        assert isinstance(events[0].error, anyio.get_cancelled_exc_class())
        assert flow.statistics().outcomes == {"not admitted": 1}

    async def test_left_without_a_word(self) -> None:
        limited = Limited()
        async with limited.request():
            pass
        assert limited.used == (1_500, 1)
        assert limited.outcomes == ["abandoned"]
        assert limited.learned[0] == 0

    async def test_reconciled_after_the_block(self) -> None:
        limited = Limited()
        async with limited.request() as call:
            pass
        call.reconcile(usage(10))
        assert limited.used == (1_010, 1)


class TestStreams:
    async def stream(self, *chunks: Any, error: BaseException | None = None) -> AsyncIterator[Any]:
        for each in chunks:
            await anyio.sleep(1)
            yield each
        if error is not None:
            raise error

    async def test_finished_with_its_usage(self) -> None:
        limited = Limited()
        chunks = [chunk("hel"), chunk("lo"), {"choices": [], **usage(2)}]
        async with limited.request() as call:
            received = [each async for each in call.track(self.stream(*chunks))]
            assert limited.used == (1_002, 1)
        assert received == chunks
        assert limited.outcomes == ["reconciled"]
        assert limited.learned[0] == 1

    async def test_anthropic(self) -> None:
        limited = Limited()
        start = {"input_tokens": 25, "cache_read_input_tokens": 5, "output_tokens": 1}
        events = [
            {"type": "message_start", "message": {"usage": start}},
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hello"}},
            {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 9}},
            {"type": "message_stop"},
        ]
        async with limited.request() as call:
            async for _ in call.track(self.stream(*events)):
                pass
        assert call.usage == Usage(input_tokens=30, output_tokens=9, cached_tokens=5)

    async def test_a_start_alone_is_no_usage(self) -> None:
        """What Anthropic reports at the start says nothing of the output."""
        limited = Limited()
        start = {"type": "message_start", "message": {"usage": {"input_tokens": 25}}}
        async with limited.request() as call:
            async for _ in call.track(self.stream(start)):
                pass
        assert limited.used == (1_500, 1)
        assert limited.outcomes == ["abandoned"]

    async def test_emission_beyond_the_estimate_is_charged_as_it_comes(self) -> None:
        limited = Limited()
        seen = []
        async with limited.request(max_output_tokens=2) as call:
            async for _ in call.track(self.stream(chunk("abc"), chunk("d" * 9), chunk("e" * 30))):
                seen.append((limited.held, limited.used[0]))
        # Counted by the length at first, and exactly in the end.
        assert seen == [(1_002, 1_002), (1_003, 1_003), (1_011, 1_011)]
        assert limited.used == (1_014, 1)

    async def test_a_refusal_after_the_first_letters_takes_nothing_back(self) -> None:
        limited = Limited()
        async with limited.request() as call:
            async for _ in call.track(self.stream(chunk("Hi!"))):
                call.failed(Refused(429))
        assert limited.outcomes == ["failed"]
        assert limited.used == (1_500, 1)

    async def test_many_small_chunks_count_as_one_text(self) -> None:
        limited = Limited()
        async with limited.request(max_output_tokens=2) as call:
            async for _ in call.track(self.stream(*(chunk("tok ") for _ in range(400)))):
                pass
        assert call.usage.output_tokens == pytest.approx(
            ApproximateCounter().count("tok " * 400), 2
        )

    async def test_broken_off_by_the_server(self) -> None:
        limited = Limited()
        broken = self.stream(chunk("a" * 3_000), error=OSError("reset"))
        with pytest.raises(OSError, match="reset"):
            async with limited.request(max_output_tokens=100) as call:
                async for _ in call.track(broken):
                    pass
        assert limited.used == (2_000, 1)
        assert limited.outcomes == ["failed"]
        assert limited.learned[0] == 1  # at least that long

    async def test_broken_off_early_keeps_the_estimate(self) -> None:
        limited = Limited()
        with pytest.raises(OSError, match="reset"):
            async with limited.request() as call:
                async for _ in call.track(self.stream(chunk("a" * 30), error=OSError("reset"))):
                    pass
        assert limited.used == (1_500, 1)

    async def test_a_refusal_in_the_middle_keeps_what_was_emitted(self) -> None:
        """(TokenHub 102)"""
        limited = Limited()
        broken = self.stream(chunk("a" * 3_000), error=Refused(429, retry_after="3"))
        with pytest.raises(Refused):
            async with limited.request(max_output_tokens=100) as call:
                async for _ in call.track(broken):
                    pass
        assert limited.used == (2_000, 1)
        assert limited.quotas.statistics().quotas[0].paused_for == pytest.approx(3)

    async def test_abandoned_with_aclose(self) -> None:
        limited = Limited()
        source = self.stream(chunk("a" * 3_000), chunk("b"))
        async with limited.request(max_output_tokens=100) as call:
            stream = call.track(source)
            await anext(stream)
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(source)  # it is closed as well
        assert limited.used == (2_000, 1)
        assert limited.outcomes == ["abandoned"]

    async def test_abandoned_without_aclose(self) -> None:
        limited = Limited()
        async with contextlib.aclosing(self.stream(chunk("a" * 3_000), chunk("b"))) as source:  # type: ignore[type-var]
            async with limited.request(max_output_tokens=100) as call:
                async for _ in call.track(source):
                    break
        assert limited.used == (2_000, 1)

    async def test_cancelled_in_the_middle(self) -> None:
        limited = Limited()
        async with contextlib.aclosing(self.stream(chunk("a" * 3_000), chunk("b"))) as source:  # type: ignore[type-var]
            with anyio.move_on_after(1.5):
                async with limited.request(max_output_tokens=100) as call:
                    async for _ in call.track(source):
                        pass
        assert (limited.held, limited.used) == (0, (2_000, 1))
        assert limited.outcomes == ["failed"]

    async def test_read_to_its_end_after_the_block(self) -> None:
        limited = Limited()
        async with limited.request() as call:
            stream = call.track(self.stream(chunk("hello"), usage(4)))
        async for _ in stream:
            pass
        assert limited.used == (1_004, 1)


class TestWhatIsReserved:
    async def test_messages_are_counted(self) -> None:
        limited = Limited()
        messages = [{"role": "user", "content": "abc" * 100}]
        async with limited.flow.request(messages=iter(messages)) as call:
            assert call.request.input_tokens == 3 + 2 + 100 + 3
            assert "abc" not in repr(call.request)

    @pytest.mark.parametrize(
        ("prompt", "tokens"),
        [("abc", 1), (["abc", "abcdef"], 3), ([11, 12, 13], 3), ([[1, 2], [3]], 3), ([], 0)],
    )
    async def test_prompts_are_counted(self, prompt: Any, tokens: int) -> None:
        limited = Limited()
        async with limited.flow.request(prompt=prompt, max_output_tokens=0) as call:
            assert call.estimated == Usage(input_tokens=tokens, max_output_tokens=0)

    async def test_a_counter_that_only_counts(self) -> None:
        class Letters:
            def count(self, text: str) -> int:
                return len(text)

        flow = TokenFlow(counter=Letters())
        async with flow.request(messages=[{"role": "user", "content": "hello"}]) as call:
            assert call.request.input_tokens == 3 + 4 + 5 + 3
        async with flow.request(prompt="x" * 100_000) as call:  # off the loop
            assert call.request.input_tokens == 100_000

    async def test_declared_maxima_cap_the_estimate_and_multiply(self) -> None:
        limited = Limited()
        async with limited.request(max_output_tokens=100, choices=3) as call:
            assert call.estimated.output_tokens == 300
            assert call.estimated.max_output_tokens == 300

    async def test_an_estimator_of_ones_own_is_capped_as_well(self) -> None:
        class Wild:
            def estimate(self, request: object) -> Any:
                return SimpleNamespace(tokens=9_999)

            def observe(self, *args: object, **more: object) -> None:
                pass

        flow = TokenFlow(estimator=Wild())
        async with flow.request(input_tokens=1, max_output_tokens=7) as call:
            assert call.estimated.output_tokens == 7

    async def test_call_options_reach_it_and_arguments_win(self) -> None:
        limited = Limited()
        with call_options(tenant="acme", task="chat", priority=3, max_wait=0):
            async with limited.request() as call:
                assert (call.lease.tenant, call.lease.priority) == ("acme", 3)
                assert call.request.task == "chat"
            async with limited.request(tenant="other", priority=0, task="code") as call:
                assert (call.lease.tenant, call.lease.priority) == ("other", 0)
                assert call.request.task == "code"
            with limited.in_flight.acquire_nowait(100_000), pytest.raises(WaitTimeout):
                await limited.request().__aenter__()
        async with limited.request() as call:
            assert (call.lease.tenant, call.request.task) == (None, None)

    @pytest.mark.parametrize(
        ("wrong", "error", "says"),
        [
            ({"max_wait": -1}, ValueError, "max_wait must be >= 0 seconds, not -1"),
            ({"max_wait": math.nan}, ValueError, "max_wait must be >= 0 seconds, not nan"),
            ({"max_wait": "1"}, TypeError, "max_wait must be a number of seconds or None"),
            ({"priority": "x"}, TypeError, "priority must be an int"),
            ({"priority": ""}, TypeError, "priority must be an int"),
            ({"priority": True}, TypeError, "priority must be an int"),
            ({"tenant": []}, TypeError, r"tenant must be hashable, not \[\]"),
            ({"affinity": ([],)}, TypeError, r"affinity must be hashable, not \(\[\],\)"),
            ({"region": 1}, TypeError, "region must be a str or None, not 1"),
            ({"task": []}, TypeError, r"task must be a str or None, not \[\]"),
        ],
    )
    async def test_hostile_options_are_refused_where_they_are_said(
        self, wrong: dict[str, Any], error: type[Exception], says: str
    ) -> None:
        with call_options(tenant="acme", max_wait=math.inf):
            with pytest.raises(error, match=says), call_options(**wrong):
                pytest.fail("entered")
            async with Limited().request() as call:
                assert call.lease.tenant == "acme"

    async def test_too_large_and_full(self) -> None:
        limited = Limited()
        with pytest.raises(RequestTooLarge):
            await limited.request(input_tokens=200_000).__aenter__()
        flow = TokenFlow(semaphore := TokenSemaphore(10, max_waiting=0), observers=[])
        with semaphore.acquire_nowait(10), pytest.raises(QueueFull):
            await flow.request(input_tokens=1, max_output_tokens=1).__aenter__()
        assert limited.outcomes == ["not admitted"]
        assert isinstance(limited.events[0].error, RequestTooLarge)
        assert flow.statistics().outcomes == {"not admitted": 1}

    @pytest.mark.parametrize(
        "inputs", [{}, {"prompt": "a", "input_tokens": 1}, {"messages": [], "prompt": ""}]
    )
    def test_one_input_and_no_more(self, inputs: dict[str, Any]) -> None:
        with pytest.raises(TypeError, match="one of messages, prompt and input_tokens"):
            TokenFlow().request(**inputs)

    @pytest.mark.parametrize("kind", [str, bytes, dict])
    def test_what_is_no_list_of_messages(self, kind: Any) -> None:
        with pytest.raises(
            TypeError, match=f"messages must be a list of them, not a {kind.__name__}"
        ):
            TokenFlow().request(messages=kind())

    @pytest.mark.parametrize(
        "wrong", [{"input_tokens": -1}, {"input_tokens": True}, {"choices": 0}]
    )
    def test_hostile_numbers(self, wrong: dict[str, Any]) -> None:
        with pytest.raises((TypeError, ValueError)):
            TokenFlow().request(**{"input_tokens": 1, **wrong})

    async def test_one_that_is_never_entered_warns(self) -> None:
        with pytest.warns(RuntimeWarning, match="<Call, not admitted yet> was never entered"):
            TokenFlow().request(input_tokens=1)

    async def test_entered_once_and_used_inside(self) -> None:
        call = TokenFlow().request(input_tokens=1)
        with pytest.raises(RuntimeError, match="has not begun"):
            call.reconcile(1)
        async with call:
            with pytest.raises(RuntimeError, match="entered once"):
                await call.__aenter__()


class TestModels:
    async def test_the_first_pattern_that_matches(self) -> None:
        small, large = TokenSemaphore(1_000), TokenSemaphore(9_000)
        flow = TokenFlow({"gpt-*-mini": small, "gpt-*": large})
        async with flow.request(input_tokens=10, model="gpt-5-mini", max_output_tokens=0):
            async with flow.request(input_tokens=20, model="gpt-5", max_output_tokens=0):
                assert small.statistics().tokens_in_flight == 10
                assert large.statistics().tokens_in_flight == 20

    async def test_no_match_is_an_error_that_names_the_patterns(self) -> None:
        flow = TokenFlow({"gpt-*": TokenSemaphore(1_000)})
        with pytest.raises(UnknownModel, match=r"'claude'.*'gpt-\*'") as raised:
            await flow.request(input_tokens=1, model="claude").__aenter__()
        assert raised.value.model == "claude"

    @pytest.mark.parametrize(
        ("wrong", "error", "says"),
        [
            ({"limits": {}}, ValueError, "no pattern at all in limits"),
            ({"counter": {}}, ValueError, "no pattern at all in counter"),
            ({"limits": {1: None}}, TypeError, "a pattern in limits must be a str, not 1"),
            ({"counter": {None: ApproximateCounter()}}, TypeError, "a pattern in counter"),
            ({"limits": [None]}, TypeError, r"limits must be a limiter, .*, not \[None\]"),
            ({"limits": {"*": 5}}, TypeError, "limits must be a limiter, .*, not 5"),
            ({"router": 5}, TypeError, "router must be a TokenRouter or another limiter, not 5"),
        ],
    )
    def test_what_no_call_could_go_by(
        self, wrong: dict[str, Any], error: type[Exception], says: str
    ) -> None:
        with pytest.raises(error, match=says):
            TokenFlow(**wrong)

    async def test_one_object_under_two_patterns_is_one_family(self) -> None:
        shared = TokenSemaphore(1_000)
        flow = TokenFlow({"a": shared, "b": shared})
        async with flow.request(input_tokens=600, model="a", max_output_tokens=0):
            with pytest.raises(WaitTimeout):
                call = flow.request(input_tokens=600, model="b", max_output_tokens=0, max_wait=0)
                await call.__aenter__()

    async def test_counters_by_pattern(self) -> None:
        flow = TokenFlow(counter={"bytes": ApproximateCounter(1.0), "*": ApproximateCounter(10.0)})
        for model, tokens in (("bytes", 30), ("other", 3)):
            async with flow.request(prompt="a" * 30, model=model) as call:
                assert call.request.input_tokens == tokens

    def test_the_default_is_tiktoken_by_name_and_bounded(self) -> None:
        flow = TokenFlow()
        counter = flow._counters.of("gpt-5")
        assert isinstance(counter, TiktokenCounter)
        assert flow._counters.of("gpt-5") is counter
        for i in range(1_000):
            flow._counters.of(f"model-{i}")
        assert len(flow._counters._loaded) == 64


class TestObservers:
    async def test_one_that_raises_harms_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        def broken(event: CallEvent) -> None:
            raise ZeroDivisionError

        told: list[CallEvent] = []
        semaphore = TokenSemaphore(10_000)
        flow = TokenFlow(semaphore, observers=[broken, told.append])
        async with flow.request(input_tokens=1):
            pass
        assert semaphore.statistics().tokens_in_flight == 0
        assert len(told) == 1
        assert "ZeroDivisionError" in caplog.text

    async def test_times(self) -> None:
        limited = Limited()
        limited.quotas.pause(2)
        async with limited.request():
            await anyio.sleep(3)
        assert limited.events[0].waited == pytest.approx(2)
        assert limited.events[0].seconds == pytest.approx(3)

    async def test_times_of_those_that_were_not_admitted(self) -> None:
        limited = Limited()
        with limited.in_flight.acquire_nowait(100_000):
            with anyio.move_on_after(3):
                await limited.request().begin()
            with pytest.raises(WaitTimeout):
                await limited.request(max_wait=5).begin()
            with pytest.raises(WaitTimeout):
                await limited.request(max_wait=0).begin()
        assert [event.waited for event in limited.events] == pytest.approx([3, 5, 0])
        assert limited.outcomes == 3 * ["not admitted"]

    async def test_statistics_and_repr(self) -> None:
        limited = Limited()
        async with limited.request() as call:
            call.reconcile(usage(10))
            assert "open" in repr(call)
        statistics = limited.flow.statistics()
        assert (statistics.calls, statistics.tokens) == (1, 1_010)
        assert statistics.limits["*"].members[0].tokens_in_flight == 0
        assert "1 calls, 1,010 tokens" in repr(limited.flow)
        assert "reconciled" in repr(call)


class TestLearning:
    async def test_the_estimate_follows_what_was_observed(self) -> None:
        limited = Limited()
        for _ in range(200):
            async with limited.request() as call:
                call.reconcile(Usage(input_tokens=1_000, output_tokens=40))
            limited.quotas.set_limit("tokens", 10_000_000)
            limited.quotas.set_limit("requests", 10_000)
        async with limited.request() as call:
            assert call.estimated.output_tokens == 40

    async def test_a_length_cap_is_no_short_output(self) -> None:
        observed: list[tuple[int, bool]] = []

        class Spy:
            def estimate(self, request: object) -> Any:
                return SimpleNamespace(tokens=10)

            def observe(self, request: object, tokens: int, *, truncated: bool = False) -> None:
                observed.append((tokens, truncated))

        flow = TokenFlow(estimator=Spy())
        for reason in ("stop", "length"):
            async with flow.request(input_tokens=1) as call:
                call.reconcile({"choices": [{"finish_reason": reason}], **usage(5)})
        assert observed == [(5, False), (5, True)]


async def test_those_who_wait_are_seen_at_the_limits_that_were_given() -> None:
    semaphore = TokenSemaphore(150)
    flow = TokenFlow(semaphore, counter=ApproximateCounter())
    assert repr(flow).count("no limit") == 1
    async with anyio.create_task_group() as tasks:
        async with flow.request(input_tokens=100, max_output_tokens=50):
            for _ in range(3):
                tasks.start_soon(flow.request(input_tokens=100, max_output_tokens=0).begin)
            await wait_all_tasks_blocked()
            statistics = semaphore.statistics()
            assert (statistics.waiting_calls, statistics.waiting_tokens) == (3, 300)
            tasks.cancel_scope.cancel()


def test_a_replica_is_no_limit() -> None:
    with pytest.raises(TypeError, match="limits must be a limiter, a Provider"):
        TokenFlow(Replica("a", max_tokens=10))  # type: ignore[arg-type]
