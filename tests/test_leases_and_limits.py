"""What a lease keeps of what it was charged, and what a changed limit does and does not do."""

import asyncio
import logging
import threading

import anyio
import pytest

from tests.calls import Calls
from tokenflow import FairShare, Quota, TokenLimits, TokenRateLimiter, TokenSemaphore

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("burst", [None, 100])
async def test_a_stream_that_reports_each_chunk_keeps_its_record_small(burst: int | None) -> None:
    limiter = TokenRateLimiter(Quota(10_000, burst=burst))
    lease = limiter.acquire_nowait(1)
    for n in range(1, 5_001):
        lease.progress(n)
        await anyio.sleep(0.001)
    assert limiter.statistics().quotas[0].used == 5_000
    assert len(lease._charges[0]) < 1_000
    lease.cancel()
    assert limiter.statistics().quotas[0].used == 0


async def test_a_credit_leaves_the_schedule_of_those_behind_it() -> None:
    """100 tokens per second, one at once: 30 + 30 take until 0.6 s, less the 30 that came back."""
    limiter = TokenRateLimiter(Quota(6_000, burst=1))
    a = await limiter.acquire(30)
    b = await limiter.acquire(30)
    assert anyio.current_time() == pytest.approx(0.3)
    a.reconcile(0)
    c = await limiter.acquire(30)
    assert anyio.current_time() == pytest.approx(0.6)
    for lease in (a, b, c):
        lease.release()


async def test_an_overrun_is_not_forgotten_with_an_idle_tenant() -> None:
    limiter = TokenRateLimiter(Quota(100, by="tenant"))
    async with limiter.reserve(10, tenant="a") as lease:
        await anyio.sleep(61)
        for n in range(200):
            limiter.acquire_nowait(10, tenant=n).release()
        lease.reconcile(1_000)
    del lease
    assert limiter.delay(100, tenant="a") == 60


async def test_a_first_max_requests_from_another_thread_changes_nothing() -> None:
    semaphore = TokenSemaphore(100)
    errors: list[RuntimeError] = []

    def assign() -> None:
        try:
            semaphore.max_requests = 1
        except RuntimeError as error:
            errors.append(error)

    with semaphore.acquire_nowait(10):
        thread = threading.Thread(target=assign)
        thread.start()
        thread.join()
        assert "anyio.from_thread.run_sync" in str(errors[0])
        assert semaphore.max_requests is None
        assert semaphore.statistics().requests_in_flight is None
        assert len(list(semaphore._gates(None))) == 1
        with semaphore.acquire_nowait(10), semaphore.acquire_nowait(10):
            pass


@pytest.mark.parametrize("value", [-1, 1.5, True, "5"])
async def test_an_invalid_max_requests_adds_no_gate(value: int) -> None:
    semaphore = TokenSemaphore(100)
    with pytest.raises((TypeError, ValueError), match="max_requests must be"):
        semaphore.max_requests = value
    assert semaphore.statistics().requests_in_flight is None
    assert len(list(semaphore._gates(None))) == 1


async def test_a_limit_of_0_is_no_debt(caplog: pytest.LogCaptureFixture) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    with limiter.acquire_nowait(50) as lease:
        limiter.set_limit("tokens", 0)
        lease.reconcile(40)
        lease.reconcile(60)
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


async def test_weights_may_be_a_dict_of_floats() -> None:
    weights: dict[str, float] = {"a": 2.0, "b": 0.5}
    semaphore = TokenSemaphore(10, order=FairShare(weights))
    async with Calls() as calls:
        assert await calls.start(semaphore, 10, "a", tenant="a") == ["a"]


def test_waiters_of_a_stopped_loop_survive_a_release_from_outside() -> None:
    """The other gate of the path was only ever used outside."""

    a, b = TokenSemaphore(10), TokenSemaphore(10)
    both = TokenLimits(a, b)
    outside = b.acquire_nowait(10)
    loop = asyncio.new_event_loop()
    try:

        async def queue() -> "asyncio.Task[None]":
            async def call() -> None:
                async with a.reserve(10):
                    pass

            task = asyncio.ensure_future(call())
            await asyncio.sleep(0)
            return task

        first = loop.run_until_complete(a.acquire(10))
        waiter = loop.run_until_complete(queue())
        outside.release()
        assert both.delay(10) > 0
        assert a.statistics().waiting_calls == 1
        first.release()
        loop.run_until_complete(asyncio.wait_for(waiter, 5))
        assert a.statistics().tokens_in_flight == 0
    finally:
        loop.close()
