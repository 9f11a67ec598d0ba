"""What a wake-up costs does not grow with what waits. Steps are counted, not seconds.

A step is one bytecode that the interpreter runs while the counted call is made.
"""

import asyncio
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from types import FrameType
from typing import Any, Self

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from tests.conftest import run_virtual
from tokenflow import (
    FairShare,
    Fifo,
    Lease,
    Quota,
    QuotaStatus,
    RateLimitStatus,
    Replica,
    SmallestFirst,
    TokenLimits,
    TokenRateLimiter,
    TokenRouter,
    TokenSemaphore,
)
from tokenflow.limits import Limiter, Order, WindowGate

pytestmark = pytest.mark.anyio

FEW, MANY = 20, 10_000  # few: more than backfill looks at


class Steps:
    """Counts bytecodes, in whatever task, while its block lasts."""

    count = 0

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self.count += event == "opcode"
        return self._trace

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *args: object) -> None:
        sys.settrace(self._before)


def steps(function: Callable[..., object], *args: object) -> int:
    """How many bytecodes it takes to call this."""
    with Steps() as counted:
        function(*args)
    return counted.count


def test_steps_are_counted() -> None:
    def loop(n: int) -> None:
        for _ in range(n):
            pass

    assert 900 * 2 <= steps(loop, 1_000) - steps(loop, 100) <= 900 * 10


@asynccontextmanager
async def waiting(
    limiter: Limiter, count: int, cost: int = 10, **options: Callable[[int], Any]
) -> AsyncIterator[list[asyncio.Task[Lease]]]:
    """So many calls in the queue, in bare tasks; an option is a function of the call's number."""
    tasks = []
    for number in range(count):
        asked = {name: option(number) for name, option in options.items()}
        tasks.append(asyncio.create_task(limiter.acquire(cost, **asked)))
    await wait_all_tasks_blocked()
    assert limiter.statistics().waiting_calls == count  # type: ignore[attr-defined]
    yield tasks
    for task in reversed(tasks):  # or each would be the head for a moment
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Lease):
            result.release()


def same(few: list[int], many: list[int]) -> None:
    """A heap 1,000 times as large is ten levels deeper, and compares in C."""
    assert [n for n in few if n == 0] == []
    assert all(b <= a * 1.2 + 50 for a, b in zip(few, many, strict=True)), (few, many)


orders = pytest.mark.parametrize(
    "order", [Fifo(), SmallestFirst(), FairShare()], ids=["fifo", "smallest", "fair"]
)


def refused(limiter: Limiter) -> None:
    with suppress(anyio.WouldBlock):
        limiter.acquire_nowait(10)


@pytest.mark.parametrize(
    ("order", "many"),
    [(Fifo(), MANY), (SmallestFirst(), 2_000), (FairShare(), 2_000)],
    ids=["fifo", "smallest", "fair"],
)
def test_a_wake_up_costs_the_same_whoever_waits(order: Order, many: int) -> None:
    """aiolimiter 73, 290."""

    async def main(count: int) -> list[int]:
        semaphore = TokenSemaphore(10, order=order)
        lease = semaphore.acquire_nowait(10)
        async with waiting(semaphore, count, tenant=lambda n: n % 7) as tasks:
            tasks[count // 2].cancel()
            return [
                steps(lease.reconcile, 8),
                steps(refused, semaphore),
                steps(lease.reconcile, 9),
                steps(lease.release),
            ]

    same(run_virtual("asyncio", main, FEW), run_virtual("asyncio", main, many))


def test_a_newcomer_and_a_leaver_cost_the_same_whoever_waits() -> None:
    async def main(count: int) -> list[int]:
        semaphore = TokenSemaphore(10)
        counted = []
        with semaphore.acquire_nowait(10):
            async with waiting(semaphore, count) as tasks:
                with Steps() as arrival:
                    tasks.append(asyncio.create_task(semaphore.acquire(10)))
                    await wait_all_tasks_blocked()
                counted.append(arrival.count)
                for task in (tasks[0], tasks[count // 2]):
                    with Steps() as departure:
                        task.cancel()
                        await wait_all_tasks_blocked()
                    counted.append(departure.count)
        return counted

    same(run_virtual("asyncio", main, FEW), run_virtual("asyncio", main, 2_000))


def test_many_tenants_that_wait_at_one_gate_cost_what_a_few_do() -> None:
    """Each tenant is a path of its own."""

    async def main(tenants: int) -> list[int]:
        semaphore = TokenSemaphore(10)
        limits = TokenLimits(semaphore, TokenRateLimiter(Quota(100, by="tenant")))
        lease = limits.acquire_nowait(10, tenant=0)
        async with waiting(limits, tenants, tenant=lambda n: n):
            return [steps(refused, limits), steps(lease.release)]

    same(run_virtual("asyncio", main, FEW), run_virtual("asyncio", main, 1_000))


@pytest.mark.parametrize("several", [False, True], ids=["one path", "a path for each tenant"])
def test_a_router_looks_once_whoever_waits(several: bool) -> None:
    async def main(count: int) -> list[int]:
        rate = TokenRateLimiter(Quota(10**6, by="tenant" if several else None))
        router = TokenRouter([Replica(name, max_tokens=10) for name in "abcd"])
        limits = TokenLimits(rate, router)
        leases = [limits.acquire_nowait(10) for _ in "abcd"]
        async with waiting(limits, count, tenant=lambda n: n * several) as tasks:
            with Steps() as arrival:
                tasks.append(asyncio.create_task(limits.acquire(10, tenant=1)))
                await wait_all_tasks_blocked()
            tasks[count // 2].cancel()
            return [
                arrival.count,
                steps(leases[0].reconcile, 9),
                *(steps(lease.release) for lease in leases),
                steps(router.cooldown, "a", 1),
            ]

    same(run_virtual("asyncio", main, FEW), run_virtual("asyncio", main, 500))


def test_an_observation_costs_the_same_whoever_waits() -> None:
    """A client observes after each response."""
    status = RateLimitStatus(quotas=(QuotaStatus(of="tokens", limit=10, remaining=0, reset=50),))

    async def main(count: int) -> list[int]:
        limiter = TokenRateLimiter(tokens_per_minute=10)
        limiter.acquire_nowait(10).release()
        async with waiting(limiter, count):
            return [steps(limiter.observe, status)]

    same(run_virtual("asyncio", main, FEW), run_virtual("asyncio", main, 2_000))


def test_cancelled_waiters_behind_a_paused_head_cost_nothing_later() -> None:
    async def main(count: int) -> list[int]:
        semaphore = TokenSemaphore(10)
        semaphore.max_tokens = 0
        async with waiting(semaphore, 2 + count) as tasks:
            for task in tasks[1:-1]:
                task.cancel()
            await wait_all_tasks_blocked()
            counted = [steps(refused, semaphore), steps(setattr, semaphore, "max_tokens", 10)]
            assert semaphore.statistics().tokens_in_flight == 10
            return counted

    same(run_virtual("asyncio", main, FEW), run_virtual("asyncio", main, MANY))


def test_cancelling_them_all_costs_each_the_same() -> None:
    """A cancelled entry stays in the heap for a while; they are swept out together."""

    async def main(count: int) -> int:
        semaphore = TokenSemaphore(10)
        with semaphore.acquire_nowait(10):
            async with waiting(semaphore, count + 1) as tasks:
                with Steps() as counted:
                    for task in tasks[1:]:
                        task.cancel()
                    await wait_all_tasks_blocked()
        return counted.count // count

    same([run_virtual("asyncio", main, 50)], [run_virtual("asyncio", main, 1_000)])


@pytest.mark.parametrize("burst", [None, 5_000])
def test_a_window_of_a_thousand_slots_costs_what_ten_cost(burst: int | None) -> None:
    def fill(slots: int) -> list[int]:
        gate = WindowGate(10_000, 60.0, burst=burst)
        now = 0.0
        for _ in range(slots):
            now += 60 / 1_050
            charge = gate.charge(10_000 // slots, now)
        counted = [steps(gate.ready_at, cost, now) for cost in (1, 5_000, 10_000)]
        counted.append(steps(gate.correct, charge, 3, now))
        counted.append(steps(gate.charge, 7, now))
        counted.append(steps(gate.undo, gate.charge(7, now), now))
        assert gate.used == 10_000 - 10_000 // slots + 3 + 7
        return counted

    same(fill(10), fill(1_000))


def test_a_window_never_has_more_than_about_a_thousand_slots() -> None:
    """limits 268: nor does the ledger grow with its limit."""
    gate = WindowGate(100_000_000, 60.0)
    tracemalloc.start()
    try:
        sizes = []
        for minute in range(10):
            for step in range(3_000):
                now = 60 * minute + step / 50
                assert gate.ready_at(1, now) == now
                gate.charge(1, now)
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(sizes) < 200_000
    assert max(sizes[2:]) < 1.5 * sizes[1]


# -- timers -----------------------------------------------------------------------------------


def timers() -> int:
    loop: Any = asyncio.get_running_loop()
    return sum(not handle.cancelled() for handle in loop._scheduled)


@orders
def test_one_path_has_one_timer(order: Order) -> None:
    """aiolimiter 73, 290."""

    async def main() -> list[int]:
        limiter = TokenRateLimiter(tokens_per_minute=100, order=order)
        limiter.acquire_nowait(100).release()
        counted = []
        async with waiting(limiter, 1_000):
            for _ in range(3):
                counted.append(timers())
                await anyio.sleep(60)
        return counted

    assert run_virtual("asyncio", main) == [1, 1, 1]


def test_a_head_that_was_overtaken_keeps_no_timer() -> None:
    async def main() -> int:
        limiter = TokenRateLimiter(tokens_per_minute=100)
        limiter.acquire_nowait(100).release()
        async with waiting(limiter, 50, priority=lambda n: -n):
            return timers()

    assert run_virtual("asyncio", main) == 1


def test_calls_that_wait_for_a_release_need_no_timer() -> None:
    async def main() -> int:
        semaphore = TokenSemaphore(10)
        with semaphore.acquire_nowait(10):
            async with waiting(semaphore, 100):
                return timers()

    assert run_virtual("asyncio", main) == 0


def test_nothing_wakes_while_all_must_wait() -> None:
    """hindsight 4157: nobody polls; the head sleeps to its instant in one go."""

    async def main() -> int:
        limiter = TokenRateLimiter(tokens_per_minute=100)
        limiter.acquire_nowait(100).release()
        async with waiting(limiter, 100, cost=100):
            with Steps() as counted:
                await anyio.sleep(59)
        return counted.count

    assert run_virtual("asyncio", main) < 1_500
