"""The virtual clocks of conftest.py, on which every other test relies."""

import asyncio
import math
import threading
import time

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import current_token

from tests.conftest import BACKENDS, Backend, Run, run_virtual, virtual_time

pytestmark = pytest.mark.anyio


async def test_an_hour_passes_at_once() -> None:
    started, really_started = anyio.current_time(), time.monotonic()
    await anyio.sleep(3600)
    assert anyio.current_time() - started == 3600
    assert time.monotonic() - really_started < 5


async def test_a_year_is_reached_exactly() -> None:
    """asyncio sleeps for a day at most in one go."""
    await anyio.sleep_until(365 * 86_400)
    assert anyio.current_time() == 365 * 86_400


async def test_the_clock_starts_at_zero_and_stands_while_tasks_run() -> None:
    for _ in range(100):
        await anyio.lowlevel.checkpoint()
    assert anyio.current_time() == 0


async def test_timers_fire_in_order_each_at_its_time() -> None:
    fired: list[tuple[float, str]] = []

    async def sleeper(seconds: float, name: str) -> None:
        await anyio.sleep(seconds)
        fired.append((anyio.current_time(), name))

    async with anyio.create_task_group() as tasks:
        for seconds, name in [(30, "c"), (10, "a"), (0.25, "first"), (20, "b")]:
            tasks.start_soon(sleeper, seconds, name)
    assert fired == [(0.25, "first"), (10, "a"), (20, "b"), (30, "c")]


async def test_a_timeout_passes_virtually_too() -> None:
    with pytest.raises(TimeoutError), anyio.fail_after(600):
        await anyio.sleep_forever()
    assert anyio.current_time() == 600


async def test_wait_all_tasks_blocked_lets_no_time_pass() -> None:
    steps: list[str] = []

    async def worker() -> None:
        for step in ["one", "two", "three"]:
            steps.append(step)
            await anyio.lowlevel.checkpoint()
        await anyio.sleep(0.001)
        steps.append("slept")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker)
        await wait_all_tasks_blocked()
        assert steps == ["one", "two", "three"]
        assert anyio.current_time() == 0
    assert steps[-1] == "slept"


async def test_wait_all_tasks_blocked_lets_a_cancellation_arrive() -> None:
    ended: list[str] = []

    async def worker(scope: anyio.CancelScope) -> None:
        with scope:
            await anyio.sleep_forever()
        ended.append("cancelled")

    async with anyio.create_task_group() as tasks:
        scopes = [anyio.CancelScope() for _ in range(2)]
        tasks.start_soon(worker, scopes[0])
        await wait_all_tasks_blocked()
        tasks.start_soon(worker, scopes[1])
        for scope in scopes:
            scope.cancel()
        await wait_all_tasks_blocked()
        assert ended == ["cancelled", "cancelled"]


async def test_wait_all_tasks_blocked_can_be_cancelled() -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await wait_all_tasks_blocked()
    assert scope.cancelled_caught
    await anyio.sleep(1)


async def test_a_timer_never_fires_early() -> None:
    """Not even by less than asyncio's clock resolution."""
    seen: list[float] = []

    async def sleeper(deadline: float) -> None:
        await anyio.sleep_until(deadline)
        seen.append(anyio.current_time())

    deadlines = [60, math.nextafter(60, 61), 60 + 4e-10]
    async with anyio.create_task_group() as tasks:
        for deadline in deadlines:
            tasks.start_soon(sleeper, deadline)
    assert all(now >= deadline for now, deadline in zip(seen, deadlines, strict=True))


async def test_a_worker_threads_result_arrives() -> None:
    """Really sleeps 20 ms: the thread must outlast the loop's first look."""

    def work() -> str:
        time.sleep(0.02)
        return "done"

    assert await anyio.to_thread.run_sync(work) == "done"


async def test_a_thread_can_call_into_the_loop() -> None:
    event = anyio.Event()

    def work() -> None:
        anyio.from_thread.run_sync(event.set)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, work)
        await event.wait()
    assert event.is_set()


async def test_a_quick_thread_answers_before_the_next_timer() -> None:
    with anyio.fail_after(3600):
        assert await anyio.to_thread.run_sync(lambda: "done") == "done"
    await anyio.sleep(3600)


def test_each_run_is_new_and_starts_at_zero(run: Run) -> None:
    async def main(seconds: float) -> tuple[float, object]:
        assert anyio.current_time() == 0
        await anyio.sleep(seconds)
        return anyio.current_time(), current_token()

    first, second, third = [run(main, seconds) for seconds in (1, 20, 300)]
    assert [first[0], second[0], third[0]] == [1, 20, 300]
    assert len({first[1], second[1], third[1]}) == 3


def test_run_passes_errors_on(run: Run) -> None:
    async def main() -> None:
        await anyio.sleep(1)
        raise LookupError("as it was")

    with pytest.raises(LookupError, match="as it was"):
        run(main)


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_thread_can_run_a_loop(backend: Backend) -> None:
    async def main() -> float:
        await anyio.sleep(60)
        return anyio.current_time()

    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(run_virtual(backend, main)))
    thread.start()
    thread.join()
    assert results == [60]


def test_a_thread_can_call_into_a_loop_that_only_waits() -> None:
    with anyio.from_thread.start_blocking_portal("asyncio", virtual_time("asyncio")) as portal:
        assert portal.call(anyio.sleep, 60) is None
        assert portal.call(anyio.current_time) == 60


def test_a_deadlock_raises_instead_of_hanging() -> None:
    async def main() -> None:
        await anyio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock: every task waits"):
        run_virtual("asyncio", main)
    assert run_virtual("asyncio", asyncio.sleep, 1) is None
