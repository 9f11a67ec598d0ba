"""One limiter and several event-loop runs, threads or processes."""

import asyncio
import copy
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
import trio
from anyio import wait_all_tasks_blocked

from tests.conftest import BACKENDS, Backend, Run, VirtualEventLoop, run_virtual
from tests.oracle import Admitted, call, greatest_window
from tokenflow import (
    Lease,
    Quota,
    QuotaStatus,
    RateLimitStatus,
    TokenLimits,
    TokenRateLimiter,
    TokenSemaphore,
)
from tokenflow._run import OUTSIDE, current_run
from tokenflow._run import Run as InternalRun
from tokenflow.limits import Limiter


class Stopwatch:
    """Real time as the limiters read it, which here passes only between runs."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def real_time(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    stopwatch = Stopwatch()
    monkeypatch.setattr(time, "monotonic", stopwatch)
    return stopwatch


def used(limiter: TokenRateLimiter) -> int:
    return limiter.statistics().quotas[0].used


# -- one run after the other --------------------------------------------------------


def per_minute() -> tuple[TokenRateLimiter, Limiter]:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    return limiter, limiter


def through_limits() -> tuple[TokenRateLimiter, Limiter]:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    return limiter, TokenLimits(limiter, TokenSemaphore(1000))


def by_tenant() -> tuple[TokenRateLimiter, Limiter]:
    limiter = TokenRateLimiter(Quota(100, by="tenant"))
    return limiter, limiter


def by_tenant_through_limits() -> tuple[TokenRateLimiter, Limiter]:
    limiter = TokenRateLimiter(Quota(100, by="tenant"))
    return limiter, TokenLimits(limiter)


@pytest.mark.parametrize("build", [per_minute, through_limits, by_tenant, by_tenant_through_limits])
@pytest.mark.usefixtures("real_time")
def test_three_runs_stay_within_one_quota(
    run: Run, build: Callable[[], tuple[TokenRateLimiter, Limiter]]
) -> None:
    """aiolimiter 292, 293; OFFAT 7: it failed in a second run, or forgot what the first used."""
    limiter, door = build()
    admitted: Admitted = []
    before = 0.0

    async def script() -> float:
        ours: Admitted = []
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(call, door, 30, ours)
        await anyio.sleep(7)
        admitted.extend((before + at, cost) for at, cost in ours)
        return anyio.current_time()

    for _ in range(3):
        before += run(script)
    assert sum(cost for _, cost in admitted) == 450
    assert greatest_window(admitted) <= 100
    assert admitted[-1][0] < 5 * 60
    assert used(limiter) <= 100


@pytest.mark.usefixtures("real_time")
def test_runs_of_both_backends_share_one_quota() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)

    async def script(cost: int) -> float:
        began = anyio.current_time()
        async with limiter.reserve(cost):
            return anyio.current_time() - began

    calls: list[tuple[Backend, int]] = [
        ("asyncio", 100),
        ("trio", 60),
        ("asyncio", 40),
        ("trio", 1),
    ]
    waits = [run_virtual(backend, script, cost) for backend, cost in calls]
    assert waits == [0, 60, 0, 60]


def test_real_time_between_two_runs_counts(run: Run, real_time: Stopwatch) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)

    async def script() -> float:
        delay = limiter.delay(100)
        async with limiter.reserve(100):
            return delay

    assert run(script) == 0
    real_time.now += 25
    assert run(script) == 35
    real_time.now += 1000
    assert run(script) == 0


@pytest.mark.usefixtures("real_time")
def test_pauses_debts_and_others_use_outlive_the_run(run: Run) -> None:
    paused, indebted, shared = (TokenRateLimiter(tokens_per_minute=100) for _ in range(3))
    slow = TokenRateLimiter(Quota(60, burst=1))
    status = RateLimitStatus(quotas=(QuotaStatus(of="tokens", remaining=10, reset=40),))

    async def first() -> None:
        paused.pause(30)
        with indebted.acquire_nowait(100) as lease:
            await anyio.sleep(10)
            lease.reconcile(200)
        shared.observe(status)
        slow.acquire_nowait(50).release()

    async def second() -> list[float]:
        return [paused.delay(1), indebted.delay(100), shared.delay(11), slow.delay(1)]

    run(first)
    assert run(second) == [20, 60, 40, 50]


@pytest.mark.usefixtures("real_time")
def test_tenants_outlive_the_run_however_many_came_after_them(run: Run) -> None:
    limiter = TokenRateLimiter(Quota(100, by="tenant"))

    async def first() -> None:
        await anyio.sleep(500)
        for tenant in range(500):
            limiter.acquire_nowait(70, tenant=tenant).release()
        await anyio.sleep(10)

    async def second() -> list[float]:
        return [limiter.delay(31, tenant=tenant) for tenant in range(0, 500, 50)]

    run(first)
    assert run(second) == [50] * 10


@pytest.mark.parametrize("kept", [True, False])
def test_a_loop_closed_with_waiters_and_leases_leaves_the_limiter_usable(
    run: Run, *, kept: bool
) -> None:
    """Its tasks were never cancelled, and are destroyed late or at once."""
    semaphore = TokenSemaphore(100)
    limits = TokenLimits(semaphore, TokenRateLimiter(tokens_per_minute=1000))
    loop = VirtualEventLoop()
    done: list[str] = []

    async def hold(limiter: Limiter, cost: int) -> None:
        async with limiter.reserve(cost):
            await anyio.sleep(1000)
            done.append("held")

    tasks = [
        loop.create_task(hold(limiter, cost))
        for limiter, cost in [(semaphore, 70), (semaphore, 60), (limits, 50), (limits, 40)]
    ]
    loop.run_until_complete(wait_all_tasks_blocked())
    assert semaphore.statistics().waiting_calls == 1
    loop.close()
    if not kept:
        forget(tasks)

    async def second() -> None:
        assert semaphore.statistics().tokens_in_flight == 0
        async with semaphore.reserve(60), limits.reserve(40):
            assert semaphore.statistics().tokens_in_flight == 100
            assert semaphore.statistics().waiting_calls == 0
            assert limits.statistics().waiting_calls == 0

    async def enter() -> None:
        (await limits.acquire(1)).release()

    run(enter)
    run(second)
    forget(tasks)
    assert semaphore.statistics().tokens_in_flight == 0
    run(second)
    assert done == []


def forget(tasks: list[asyncio.Task[None]]) -> None:
    """Destroy pending tasks, without asyncio's complaint about it."""
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    tasks.clear()


def test_a_run_ended_by_an_error_leaves_the_limiter_usable(run: Run) -> None:
    semaphore = TokenSemaphore(100)
    leases: list[Lease] = []

    async def first() -> None:
        leases.append(await semaphore.acquire(70))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, semaphore, 60, [])
            await wait_all_tasks_blocked()
            raise LookupError

    async def second() -> None:
        async with semaphore.reserve(100):
            assert semaphore.statistics().waiting_calls == 0

    with pytest.raises(ExceptionGroup):
        run(first)
    run(second)
    leases.pop().release()
    run(second)


def test_a_lease_released_in_the_next_run_frees_nothing_twice(run: Run) -> None:
    semaphore = TokenSemaphore(100, max_requests=3)
    window = TokenRateLimiter(tokens_per_minute=1000)
    limits = TokenLimits(semaphore, window)

    async def take(cost: int) -> Lease:
        return await limits.acquire(cost)

    async def give_back(old: Lease) -> None:
        with await limits.acquire(100):
            old.progress(80)
            old.reconcile(30)
            old.release()
            old.release()
            statistics = semaphore.statistics()
            assert (statistics.tokens_in_flight, statistics.requests_in_flight) == (100, 1)
        assert semaphore.statistics().tokens_in_flight == 0
        assert semaphore.statistics().requests_in_flight == 0
        assert used(window) == 130

    run(give_back, run(take, 60))


def test_a_stopped_loop_may_go_on() -> None:
    """Not closed: its waiters are alive, and who releases from outside lets them go."""
    semaphore = TokenSemaphore(100)
    loop = VirtualEventLoop()
    lease = loop.run_until_complete(semaphore.acquire(100))
    admitted: Admitted = []
    task = loop.create_task(call(semaphore, 60, admitted))
    loop.run_until_complete(wait_all_tasks_blocked())
    lease.release()
    assert semaphore.statistics().tokens_in_flight == 60
    loop.run_until_complete(task)
    loop.close()
    assert admitted == [(0, 60)]


# -- outside of any run -------------------------------------------------------------


def test_everything_that_does_not_wait_works_without_a_loop() -> None:
    semaphore = TokenSemaphore(100)
    window = TokenRateLimiter(tokens_per_minute=100, requests_per_minute=10)
    limits = TokenLimits(semaphore, window)
    assert limits.delay(100) == 0
    with limits.acquire_nowait(60) as lease:
        lease.progress(65)
        with pytest.raises(anyio.WouldBlock):
            limits.acquire_nowait(60)
        lease.reconcile(50)
        assert semaphore.statistics().tokens_in_flight == used(window) == 50
    limits.acquire_nowait(20).cancel()
    window.set_limit("tokens", 70)
    assert 0 < window.delay(21) <= 60
    window.pause(100)
    assert 60 < window.delay(1) <= 100
    assert repr(semaphore) == "<TokenSemaphore: 0 of 100 tokens in flight, 0 waiting>"
    assert "50 of 70 tokens" in repr(limits)
    assert window.statistics().waiting_calls == limits.statistics().waiting_calls == 0


def test_what_was_charged_before_the_first_run_counts_in_it(run: Run) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    semaphore = TokenSemaphore(100)
    limiter.acquire_nowait(100).release()
    held = semaphore.acquire_nowait(60)

    async def script() -> float:
        with pytest.raises(anyio.WouldBlock):
            semaphore.acquire_nowait(50)
        held.release()
        semaphore.acquire_nowait(100).release()
        return limiter.delay(1)

    assert 0 < run(script) <= 60
    assert used(limiter) == 100


def test_leases_of_an_ended_run_settle_without_a_loop(run: Run) -> None:
    semaphore = TokenSemaphore(100)
    window = TokenRateLimiter(tokens_per_minute=100)
    limits = TokenLimits(semaphore, window)

    async def script() -> list[Lease]:
        return [await limits.acquire(30) for _ in range(3)]

    reconciled, cancelled, released = run(script)
    reconciled.reconcile(10)
    cancelled.cancel()
    released.release()
    reconciled.release()
    assert used(window) == 40
    assert semaphore.statistics().tokens_in_flight == 0
    limits.acquire_nowait(60).release()


def test_a_release_after_the_loop_closed_wakes_nobody() -> None:
    semaphore = TokenSemaphore(100)
    loop = VirtualEventLoop()
    lease = loop.run_until_complete(semaphore.acquire(100))
    admitted: Admitted = []
    tasks = [loop.create_task(call(semaphore, 60, admitted)) for _ in range(2)]
    loop.run_until_complete(wait_all_tasks_blocked())
    loop.close()
    lease.release()
    statistics = semaphore.statistics()
    assert (statistics.tokens_in_flight, statistics.waiting_calls) == (0, 0)
    assert not any(task.done() for task in tasks)
    forget(tasks)
    assert semaphore.statistics().tokens_in_flight == 0
    assert admitted == []


def test_a_limiter_that_no_run_ever_saw_keeps_time() -> None:
    """Really sleeps 20 ms: outside of any loop there is no clock but the real one."""
    limiter = TokenRateLimiter(Quota(1, per=0.01))
    for _ in range(2):
        limiter.acquire_nowait(1).release()
        assert limiter.delay(1) <= 0.01
        time.sleep(0.02)
    assert limiter.delay(1) == 0


def test_with_real_clocks_time_neither_goes_back_nor_stalls() -> None:
    """Real clocks, and 20 ms of sleep between runs: trio starts its own at a random instant."""
    day = TokenRateLimiter(Quota(10, per=86_400))
    blink = TokenRateLimiter(Quota(10, per=0.01))
    day.acquire_nowait(10).release()

    async def script() -> float:
        assert blink.delay(10) == 0
        (await blink.acquire(10)).release()
        return day.delay(1)

    delays = [day.delay(1)]
    for _ in range(3):
        delays += [asyncio.run(script())]
        time.sleep(0.02)
        delays += [trio.run(script)]
        time.sleep(0.02)
    assert delays == sorted(delays, reverse=True)
    assert 86_000 < delays[-1] <= delays[0] - 0.1 <= 86_400


# -- other threads ------------------------------------------------------------------


def in_a_thread(func: Callable[[], object]) -> BaseException | None:
    """What it raises in a thread of which the event loop knows nothing."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            func()
        except BaseException as error:  # to be looked at by the test
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return errors[0] if errors else None


SETTLE: dict[str, Callable[[Lease], None]] = {
    "release": Lease.release,
    "cancel": Lease.cancel,
    "reconcile": lambda lease: lease.reconcile(5),
    "progress": lambda lease: lease.progress(95),
}


@pytest.mark.parametrize("what", SETTLE)
def test_a_lease_is_settled_in_the_runs_own_thread(run: Run, what: str) -> None:
    window = TokenRateLimiter(tokens_per_minute=1000)
    semaphore = TokenSemaphore(100)
    limits = TokenLimits(window, semaphore)

    async def script() -> None:
        lease = await limits.acquire(60)
        error = in_a_thread(lambda: SETTLE[what](lease))
        assert isinstance(error, RuntimeError)
        assert "anyio.from_thread.run_sync" in str(error)
        assert (used(window), semaphore.statistics().tokens_in_flight) == (60, 60)
        with pytest.raises(RuntimeError, match=r"anyio\.from_thread\.run_sync"):
            await anyio.to_thread.run_sync(SETTLE[what], lease)
        await anyio.to_thread.run_sync(anyio.from_thread.run_sync, SETTLE[what], lease)
        lease.release()
        assert semaphore.statistics().tokens_in_flight == 0

    run(script)


CHANGES: dict[str, Callable[[TokenRateLimiter], object]] = {
    "acquire_nowait": lambda limiter: limiter.acquire_nowait(1),
    "delay": lambda limiter: limiter.delay(1),
    "pause": lambda limiter: limiter.pause(5),
    "observe": lambda limiter: limiter.observe(RateLimitStatus(retry_after=5)),
    "set_limit": lambda limiter: limiter.set_limit("tokens", 7),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_limiter_is_changed_in_the_runs_own_thread(run: Run, what: str) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)

    async def script() -> None:
        (await limiter.acquire(10)).release()
        error = in_a_thread(lambda: CHANGES[what](limiter))
        assert isinstance(error, RuntimeError)
        assert "anyio.from_thread.run_sync" in str(error)
        assert limiter.delay(90) == 0
        assert used(limiter) == 10

    run(script)


def test_statistics_and_repr_work_from_any_thread(run: Run) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    limits = TokenLimits(limiter, TokenSemaphore(100))

    async def script() -> None:
        async with limits.reserve(60):
            assert in_a_thread(lambda: [limits.statistics(), repr(limits), repr(limiter)]) is None
            shown = await anyio.to_thread.run_sync(repr, limits)
            assert "60 of 100 tokens per 60 s" in shown

    run(script)


@pytest.mark.parametrize("other", BACKENDS)
def test_a_call_from_another_live_run_raises(run: Run, other: Backend) -> None:
    semaphore = TokenSemaphore(100)

    async def elsewhere() -> None:
        await semaphore.acquire(1)

    async def script() -> None:
        async with semaphore.reserve(60):
            error = in_a_thread(lambda: run_virtual(other, elsewhere))
            assert isinstance(error, RuntimeError)
            assert "in another thread" in str(error)
            assert semaphore.statistics().tokens_in_flight == 60

    run(script)
    run_virtual(other, elsewhere_is_fine, semaphore)


async def elsewhere_is_fine(semaphore: TokenSemaphore) -> None:
    async with semaphore.reserve(100):
        pass


def test_two_limiters_in_two_live_runs_do_not_meet(run: Run) -> None:
    here, there = TokenSemaphore(100), TokenSemaphore(100)

    async def script() -> None:
        async with here.reserve(100):
            assert in_a_thread(lambda: run_virtual("asyncio", elsewhere_is_fine, there)) is None

    run(script)


# -- other processes ----------------------------------------------------------------


def in_a_fork(func: Callable[[], object]) -> str:
    """What it returns, or raises, in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover (measured in the parent only)
        try:
            signal.alarm(10)
            answer = str(func())
        except BaseException as error:
            answer = repr(error)
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


def warnings_of(*funcs: Callable[[], object]) -> list[int]:
    """How many warnings about a fork each of these gives, one after the other."""
    counts = []
    for func in funcs:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            func()
        counts.append(sum("forked" in str(each.message) for each in caught))
    return counts


forks = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


class TestFork:
    pytestmark = forks

    def test_a_limiter_used_in_a_run_warns_once_in_the_child(self, run: Run) -> None:
        limiter = TokenRateLimiter(tokens_per_minute=100, requests_per_minute=100)

        async def script() -> None:
            (await limiter.acquire(10)).release()

        def child() -> list[int]:
            return warnings_of(lambda: asyncio.run(script()), lambda: limiter.acquire_nowait(1))

        run(script)
        assert in_a_fork(child) == "[1, 0]"
        assert warnings_of(lambda: run(script)) == [0]

    def test_a_limiter_charged_outside_of_any_run_warns_too(self) -> None:
        limiter = TokenRateLimiter(tokens_per_minute=100)
        limiter.acquire_nowait(10).release()

        def child() -> list[int]:
            return warnings_of(lambda: limiter.acquire_nowait(10), lambda: limiter.delay(1))

        assert in_a_fork(child) == "[1, 0]"

    def test_a_new_limiter_does_not_warn(self) -> None:
        limiter = TokenSemaphore(100)
        assert in_a_fork(lambda: warnings_of(lambda: limiter.acquire_nowait(1))) == "[0]"

    def test_the_child_starts_from_what_the_parent_had_used(self, run: Run) -> None:
        limiter = TokenRateLimiter(tokens_per_minute=100)
        semaphore = TokenSemaphore(100)

        async def script() -> None:
            (await limiter.acquire(70)).release()

        def child() -> tuple[int, int]:
            warnings.simplefilter("ignore")
            semaphore.acquire_nowait(100)  # what the parent has in flight is the parent's
            return used(limiter), semaphore.statistics().tokens_in_flight

        run(script)
        assert in_a_fork(child) == "(70, 100)"

    def test_a_fork_inside_a_running_loop_can_use_it_in_its_own(self) -> None:
        """As multiprocessing does from async code."""
        semaphore = TokenSemaphore(100)
        limiter = TokenRateLimiter(tokens_per_minute=100)

        async def child() -> list[tuple[float, int]]:
            admitted: Admitted = []
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(call(semaphore, 100, admitted, hold=5))
                tasks.create_task(call(semaphore, 60, admitted))
                tasks.create_task(call(limiter, 100, admitted))
            return [(round(at), cost) for at, cost in admitted]

        def work() -> object:
            with asyncio.Runner(loop_factory=VirtualEventLoop) as runner:
                warned = warnings_of(lambda: runner.run(call(semaphore, 1, [])))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return warned, runner.run(child())

        async def parent() -> str:
            async with semaphore.reserve(1), limiter.reserve(100):
                return in_a_fork(work)

        answer = run_virtual("asyncio", parent)
        assert answer == "([1], [(0, 100), (5, 60), (60, 100)])"


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_limiters_and_leases_cannot_be_pickled_or_copied(
    duplicate: Callable[[object], object],
) -> None:
    semaphore, window = TokenSemaphore(100), TokenRateLimiter(tokens_per_minute=100)
    for limiter in (semaphore, window, TokenLimits(semaphore, window)):
        with pytest.raises(TypeError, match="each process would get the whole quota"):
            duplicate(limiter)
    with (
        semaphore.acquire_nowait(1) as lease,
        pytest.raises(TypeError, match="given back exactly once"),
    ):
        duplicate(lease)


@pytest.mark.parametrize(
    "value", [Quota(100, by="tenant"), RateLimitStatus(quotas=(QuotaStatus(of="tokens"),))]
)
def test_values_can_be_pickled(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value


# -- from another thread into a run ------------------------------------------------


def test_soon_is_in_the_runs_own_thread_and_after_its_end_at_once(run: Run) -> None:
    threads: list[int] = []

    def note() -> None:
        threads.append(threading.get_ident())

    async def main() -> InternalRun:
        here = current_run()
        assert here is not None
        here.call_soon(note)
        assert threads == []
        await anyio.to_thread.run_sync(here.call_soon, note)
        await wait_all_tasks_blocked()
        return here

    ended = run(main)
    assert threads == 2 * [threading.get_ident()]
    ended.call_soon(note)
    OUTSIDE.call_soon(note)
    with pytest.MonkeyPatch.context() as patch:  # it ends in between
        patch.setattr(InternalRun, "is_live", lambda self: True)
        ended.call_soon(note)
    assert len(threads) == 5
