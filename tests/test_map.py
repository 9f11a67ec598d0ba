"""TokenFlow.map: a batch job that loses nothing and stops cleanly."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from tokenflow import (
    Call,
    QueueFull,
    RequestTooLarge,
    TokenFlow,
    TokenRateLimiter,
    TokenSemaphore,
)
from tokenflow.flow import MapResult, Progress

from .calls import Refused
from .conftest import Backend

pytestmark = pytest.mark.anyio


async def double(item: int) -> int:
    await anyio.sleep(1 / (1 + item))  # later items are done sooner
    return 2 * item


async def collect(flow: TokenFlow, worker: Any, items: Any, **options: Any) -> list[Any]:
    async with flow.map(worker, items, **options) as results:
        return [result async for result in results]


class TestResults:
    async def test_in_order_of_completion(self) -> None:
        results = await collect(TokenFlow(), double, range(4))
        assert [result.index for result in results] == [3, 2, 1, 0]
        assert [result.value for result in results] == [6, 4, 2, 0]

    async def test_in_order_of_input(self) -> None:
        results = await collect(TokenFlow(), double, range(4), order="input")
        assert results == [MapResult(i, i, 2 * i) for i in range(4)]

    async def test_nothing(self) -> None:
        assert await collect(TokenFlow(), double, []) == []

    async def test_an_async_input_without_a_length(self) -> None:
        closed = []

        async def numbers() -> AsyncIterator[int]:
            try:
                for i in range(100):
                    await anyio.sleep(0.1)
                    yield i
            finally:
                closed.append(True)

        results = await collect(TokenFlow(), double, numbers(), max_pending=3)
        assert sorted(result.unwrap() for result in results) == [2 * i for i in range(100)]
        assert closed == [True]

    async def test_one_error_stops_nobody(self) -> None:
        """(LightRAG 1653)"""

        async def worker(item: int) -> int:
            return 10 // item

        results = await collect(TokenFlow(), worker, [1, 0, 2], order="input")
        assert [result.value for result in results] == [10, None, 5]
        assert isinstance(results[1].error, ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            results[1].unwrap()
        assert results[0].unwrap() == 10

    async def test_the_inputs_own_error_comes_after_its_results(self) -> None:
        def broken() -> Iterator[int]:
            yield 1
            yield 2
            raise OSError("the disk")

        seen = []
        async with TokenFlow().map(double, broken()) as results:
            with pytest.raises(OSError, match="the disk"):
                async for result in results:
                    seen.append(result.value)
        assert set(seen) == {2, 4}

    async def test_a_worker_cancelled_from_inside_is_an_error(
        self, anyio_backend: tuple[Backend, Any]
    ) -> None:
        if anyio_backend[0] == "trio":
            pytest.skip("trio has no way to do that")

        async def worker(item: int) -> int:
            raise asyncio.CancelledError

        (result,) = await collect(TokenFlow(), worker, [1])
        assert "cancelled, though the job was not" in str(result.error)


class TestBounds:
    @pytest.mark.parametrize("order", ["completed", "input"])
    async def test_reads_no_further_than_it_may(self, order: Any) -> None:
        """(feeds.fun 539, fast-graphrag 32)"""
        read, running = 0, 0
        most = 0

        def items() -> Iterator[int]:
            nonlocal read
            for i in range(1_000):
                read += 1
                yield i

        async def worker(item: int) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await anyio.sleep(1 + item % 3)
            running -= 1
            return item

        taken = 0
        flow = TokenFlow()
        async with flow.map(worker, items(), max_pending=10, order=order) as results:
            await wait_all_tasks_blocked()
            assert read == 10
            await anyio.sleep(100)
            assert read == 10  # nobody has taken a result
            async for _ in results:
                taken += 1
                assert read <= taken + 10
        assert (taken, most) == (1_000, 10)

    @pytest.mark.parametrize("wrong", [0, -1, True, 1.5])
    def test_hostile_bounds(self, wrong: Any) -> None:
        for name in ("max_pending", "attempts"):
            with pytest.raises((TypeError, ValueError), match=name):
                TokenFlow().map(double, [], **{name: wrong})

    def test_what_is_no_worker_or_no_input(self) -> None:
        with pytest.raises(TypeError, match="worker must be an async function of one item, not 5"):
            TokenFlow().map(5, [])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="items must be an iterable or an async one, not 5"):
            TokenFlow().map(double, 5)  # type: ignore[arg-type]

    def test_an_unknown_order(self) -> None:
        with pytest.raises(ValueError, match="order"):
            TokenFlow().map(double, [], order="random")  # type: ignore[arg-type]


class TestLeaving:
    async def test_early(self) -> None:
        semaphore = TokenSemaphore(10)
        flow = TokenFlow(semaphore)
        cancelled = []

        async def worker(item: int) -> int:
            async with flow.request(input_tokens=10, max_output_tokens=0):
                try:
                    await anyio.sleep(1)
                except BaseException:
                    cancelled.append(item)
                    raise
            return item

        async with flow.map(worker, range(100)) as results:
            async for _ in results:
                break
            await wait_all_tasks_blocked()
        assert len(cancelled) == 1  # the others waited for room
        assert semaphore.statistics().tokens_in_flight == 0
        assert semaphore.statistics().waiting_calls == 0

    async def test_by_an_error_of_ones_own(self) -> None:
        with pytest.raises(ZeroDivisionError):  # and not in an ExceptionGroup
            async with TokenFlow().map(double, range(100)):
                raise ZeroDivisionError

    async def test_cancelled(self) -> None:
        with anyio.move_on_after(0.3) as scope:
            async with TokenFlow().map(double, range(2)) as results:
                async for _ in results:
                    pass
        assert scope.cancelled_caught

    async def test_used_wrongly(self) -> None:
        results = TokenFlow().map(double, [1])
        with pytest.raises(RuntimeError, match="around the loop"):
            await anext(results)
        assert "not begun" in repr(results)
        async with results:
            with pytest.raises(RuntimeError, match="entered once"):
                await results.__aenter__()


class TestAttempts:
    async def run(self, *errors: Exception, attempts: int = 3) -> tuple[Any, float]:
        """One item whose worker fails with these first; the result, and when it came."""
        left = list(errors)

        async def worker(item: int) -> str:
            if left:
                raise left.pop(0)
            return "done"

        (result,) = await collect(TokenFlow(), worker, [1], attempts=attempts)
        return result, anyio.current_time()

    async def test_waits_as_told_and_goes_by_the_latest(self) -> None:
        """(litellm 20722)"""
        started = anyio.current_time()
        errors = Refused(429, retry_after="2"), Refused(429, retry_after="40")
        result, now = await self.run(*errors)
        assert (result.value, result.attempts) == ("done", 3)
        assert now - started == pytest.approx(42)

    async def test_waits_longer_each_time_where_nothing_is_said(self) -> None:
        started = anyio.current_time()
        result, now = await self.run(Refused(429), ConnectionRefusedError())
        assert (result.value, result.attempts) == ("done", 3)
        assert 1.5 <= now - started <= 3

    async def test_a_full_queue_is_worth_another(self) -> None:
        result, _ = await self.run(QueueFull("full", retry_after=1.0))
        assert result.value == "done"

    @pytest.mark.parametrize(
        "error", [Refused(400), ZeroDivisionError(), RequestTooLarge("no", cost=2, limit=1)]
    )
    async def test_what_is_permanent_fails_at_once(self, error: Exception) -> None:
        """(shell_gpt 653, continue 9570)"""
        result, _ = await self.run(error)
        assert (result.error, result.attempts) == (error, 1)

    async def test_until_there_are_none_left(self) -> None:
        errors = [Refused(429, retry_after="1") for _ in range(3)]
        result, _ = await self.run(*errors, attempts=2)
        assert (result.error, result.attempts) == (errors[1], 2)

    async def test_a_job_through_a_quota_loses_nothing(self) -> None:
        """(gbrain 3796)"""
        flow = TokenFlow(TokenRateLimiter(tokens_per_minute=10_000))
        refusals = 5

        async def worker(item: int) -> int:
            nonlocal refusals
            async with flow.request(input_tokens=100, max_output_tokens=0) as call:
                await anyio.sleep(0.5)
                if refusals:
                    refusals -= 1
                    raise Refused(429, retry_after="30")
                call.reconcile(100)
            return item

        results = await collect(flow, worker, range(1_000), attempts=2, max_pending=300)
        assert sorted(result.value for result in results) == list(range(1_000))


class TestProgress:
    async def test_counts_tokens_and_time(self) -> None:
        flow = TokenFlow()

        async def worker(item: int) -> int:
            await anyio.sleep(6 * (item + 1))
            async with flow.request(input_tokens=50, max_output_tokens=0):
                return 1 // (item - 1)

        shown: list[Progress] = []
        await collect(flow, worker, range(4), progress=shown.append)
        assert [(each.done, each.failed, each.total) for each in shown] == [
            (1, 0, 4),
            (2, 1, 4),
            (3, 1, 4),
            (4, 1, 4),
        ]
        assert [each.tokens for each in shown] == [50, 100, 150, 200]
        assert shown[1].tokens_per_minute == pytest.approx(500)
        assert shown[1].seconds_left == pytest.approx(12)

    async def test_the_rate_is_that_of_the_last_minute(self) -> None:
        flow = TokenFlow()

        async def worker(item: int) -> None:
            async with flow.request(input_tokens=100, max_output_tokens=0):
                await anyio.sleep(60 if item < 10 else 6)

        shown: list[Progress] = []
        await collect(flow, worker, range(40), progress=shown.append, max_pending=1)
        assert shown[9].tokens_per_minute == pytest.approx(100)
        assert shown[-1].tokens_per_minute == pytest.approx(1_000)

    async def test_one_that_raises_stops_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        def broken(progress: Progress) -> None:
            raise ZeroDivisionError

        assert len(await collect(TokenFlow(), double, range(3), progress=broken)) == 3
        assert "ZeroDivisionError" in caplog.text

    @pytest.mark.parametrize("installed", [True, False])
    async def test_on_the_terminal(
        self,
        installed: bool,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        if installed:
            pytest.importorskip("tqdm")
        else:
            monkeypatch.setitem(__import__("sys").modules, "tqdm", None)
        flow = TokenFlow()
        await collect(flow, double, range(3), progress=True)
        assert ("3/3" if installed else "3 of 3 done") in capsys.readouterr().err
        await collect(flow, double, iter(range(3)), progress=True)
        assert ("3item" if installed else "3 done") in capsys.readouterr().err

    async def test_calls_of_an_inner_job_count(self) -> None:
        flow = TokenFlow()

        async def inner(item: int) -> None:
            async with flow.request(input_tokens=item, max_output_tokens=0):
                pass

        async def outer(item: int) -> None:
            await collect(flow, inner, [item, item])

        shown: list[Progress] = []
        await collect(flow, outer, [3, 4], progress=shown.append)
        assert shown[-1].tokens == 14

    async def test_a_call_counts_where_it_was_made_wherever_it_ends(self) -> None:
        flow = TokenFlow()
        foreign = await flow.request(input_tokens=100, max_output_tokens=0).begin()

        async def worker(item: int) -> Call:
            foreign.close()
            return await flow.request(input_tokens=item, max_output_tokens=0).begin()

        async with flow.map(worker, [5]) as results:
            async for result in results:
                result.unwrap().close()
        assert results._job.tokens == 5

    async def test_calls_of_other_jobs_do_not_count(self) -> None:
        flow = TokenFlow()

        async def worker(item: int) -> None:
            async with flow.request(input_tokens=item, max_output_tokens=0):
                pass

        shown: list[Progress] = []
        async with flow.map(worker, [5], progress=shown.append) as results:
            await worker(100)
            async for _ in results:
                pass
        assert shown[-1].tokens == 5
        assert "1 of 1 done" in repr(results)
        assert not math.isnan(shown[-1].tokens_per_minute)


async def test_a_worker_that_is_not_async_is_told_so() -> None:
    worker: Any = int  # which is called, and returns no awaitable
    async with TokenFlow().map(worker, [1]) as results:
        (result,) = [each async for each in results]
    with pytest.raises(TypeError, match=r"must be an async function: .* returned 1; .*to_thread"):
        result.unwrap()


async def test_what_was_left_is_not_pending() -> None:
    async def sleep(item: int) -> None:
        await anyio.sleep(item)

    async with TokenFlow().map(sleep, range(9)) as results:
        async for _ in results:
            break
    assert repr(results) == "<map (left): 1 of 9 done, 0 failed, 0 pending, 0 tokens>"
