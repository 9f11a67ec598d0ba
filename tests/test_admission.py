"""Who waits for whom, where calls need several gates."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from tokenflow import (
    FairShare,
    Fifo,
    Lease,
    Quota,
    TokenLimits,
    TokenRateLimiter,
    TokenSemaphore,
    Usage,
    WaitTimeout,
)
from tokenflow.limits import InFlightGate, Limiter

pytestmark = pytest.mark.anyio


class Calls:
    """Starts calls by name, and records in which order they were admitted."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self.tasks = tasks
        self.order: list[str] = []
        self.leases: dict[str, Lease] = {}
        self.scopes: dict[str, anyio.CancelScope] = {}

    async def ask(self, name: str, limiter: Limiter, cost: int | Usage, **options: Any) -> None:
        """Returns once it has been admitted or waits: trio starts tasks in any order."""
        self.tasks.start_soon(self._call, name, functools.partial(limiter.acquire, cost, **options))
        await anyio.wait_all_tasks_blocked()

    async def _call(self, name: str, acquire: Callable[[], Awaitable[Lease]]) -> None:
        with anyio.CancelScope() as self.scopes[name]:
            self.leases[name] = await acquire()
            self.order.append(name)

    async def settled(self) -> list[str]:
        await anyio.wait_all_tasks_blocked()
        return self.order

    def end(self) -> None:
        self.tasks.cancel_scope.cancel()
        for lease in self.leases.values():
            lease.release()


async def test_a_full_model_does_not_hold_up_an_idle_one() -> None:
    shared, a, b = TokenSemaphore(1000), TokenSemaphore(100), TokenSemaphore(100)
    model_a, model_b = TokenLimits(shared, a), TokenLimits(shared, b)
    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks)
        await calls.ask("a1", model_a, 100)
        await calls.ask("a2", model_a, 100)
        await calls.ask("a3", model_a, 1)
        await calls.ask("b1", model_b, 100)
        assert await calls.settled() == ["a1", "b1"]
        calls.leases["a1"].release()
        assert await calls.settled() == ["a1", "b1", "a2"]
        calls.end()
    assert shared.statistics().tokens_in_flight == 0


async def test_a_large_waiter_gets_in_although_the_other_limiter_is_flooded() -> None:
    semaphore = TokenSemaphore(100)
    large = TokenLimits(semaphore, TokenSemaphore(1000))
    small = TokenLimits(semaphore, TokenSemaphore(1000))
    order: list[str] = []

    async def flood() -> None:
        while "large" not in order:
            async with small.reserve(10):
                order.append("small")
                await anyio.sleep(1)

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(flood)
        await anyio.sleep(0.5)
        async with large.reserve(100):
            order.append("large")
    # Ten were in flight, ten waited before it; no later one was let past.
    assert order.index("large") <= 20


async def test_a_tenant_at_its_cap_delays_nobody_else() -> None:
    limiter = TokenRateLimiter(Quota(1000), Quota(100, by="tenant"))
    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks)
        await calls.ask("a1", limiter, 100, tenant="a")
        await calls.ask("a2", limiter, 100, tenant="a")
        await calls.ask("b1", limiter, 100, tenant="b")
        assert await calls.settled() == ["a1", "b1"]
        with limiter.acquire_nowait(100, tenant="c") as lease:
            assert lease.waited == 0
        calls.end()


async def test_a_tenant_at_its_cap_does_not_reserve_the_shared_gate_by_waiting() -> None:
    """Its large call is tried at the shared gate again once its own gate lets it."""
    shared = TokenSemaphore(100)
    limits = TokenLimits(shared, TokenRateLimiter(Quota(90, by="tenant")))
    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks)
        await calls.ask("a1", limits, 90, tenant="a")
        await calls.settled()
        calls.leases["a1"].release()
        await calls.ask("a2", limits, 90, tenant="a")  # waits for its own window only
        await calls.settled()
        for name in ("b1", "b2", "b3"):
            await calls.ask(name, limits, 30, tenant="b")
        assert await calls.settled() == ["a1", "b1", "b2", "b3"]
        calls.end()


async def test_a_newcomer_through_another_limiter_does_not_slip_past_a_waiter() -> None:
    shared = TokenSemaphore(100)
    other = TokenLimits(shared, TokenSemaphore(1000))
    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks)
        await calls.ask("first", shared, 60)
        await calls.ask("large", shared, 80)
        await calls.settled()
        await calls.ask("small", other, 10)
        assert await calls.settled() == ["first"]
        with pytest.raises(anyio.WouldBlock):
            other.acquire_nowait(10)
        with pytest.raises(WaitTimeout):
            await other.acquire(10, max_wait=0)
        calls.leases["first"].release()
        assert sorted(await calls.settled()) == ["first", "large", "small"]
        calls.end()


async def test_a_better_priority_goes_before_a_waiter_of_another_limiter() -> None:
    shared = TokenSemaphore(100)
    other = TokenLimits(shared)
    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks)
        await calls.ask("first", shared, 60)
        await calls.ask("large", shared, 80, priority=1)
        await calls.settled()
        await calls.ask("urgent", other, 10, priority=0)
        assert await calls.settled() == ["first", "urgent"]
        calls.end()


async def test_whoever_stands_at_one_gate_bars_no_other() -> None:
    """The head waits for A only; B has room for it, and for others."""
    a, b = TokenSemaphore(100), TokenSemaphore(100)
    both = TokenLimits(a, b)
    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks)
        await calls.ask("a", a, 100)
        await calls.ask("both", both, 50)
        await calls.ask("b", b, 100)
        assert await calls.settled() == ["a", "b"]
        calls.leases["a"].release()  # now it waits for B, and A is free for others
        assert await calls.settled() == ["a", "b"]
        await calls.ask("a again", a, 100)
        assert await calls.settled() == ["a", "b", "a again"]
        calls.leases["b"].release()
        calls.leases["a again"].release()
        assert await calls.settled() == ["a", "b", "a again", "both"]
        calls.end()


async def test_a_head_that_leaves_a_gate_lets_those_behind_it_go_at_once() -> None:
    """The chain: cancelling what bars A frees a call that was barred there only."""
    a, b = TokenSemaphore(100), TokenSemaphore(100)
    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks)
        await calls.ask("a", a, 50)
        await calls.ask("b", b, 100)
        await calls.ask("barring", TokenLimits(a, b), 60)
        await calls.settled()
        await calls.ask("behind", TokenLimits(a, TokenSemaphore(100)), 50)
        assert await calls.settled() == ["a", "b"]
        calls.scopes["barring"].cancel()
        assert await calls.settled() == ["a", "b", "behind"]
        calls.end()


async def test_a_gate_reached_twice_is_charged_once() -> None:
    semaphore = TokenSemaphore(100)
    rate = TokenRateLimiter(tokens_per_minute=1000)
    limits = TokenLimits(semaphore, rate, TokenLimits(semaphore, rate), semaphore)
    async with limits.reserve(80):
        assert semaphore.statistics().tokens_in_flight == 80
        assert rate.statistics().quotas[0].used == 80
    assert semaphore.statistics().tokens_in_flight == 0


async def test_a_call_does_not_wait_where_it_costs_nothing() -> None:
    limiter = TokenRateLimiter(input_tokens_per_minute=1000, output_tokens_per_minute=100)
    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks)
        await calls.ask("chat", limiter, Usage(input_tokens=10, output_tokens=100))
        await calls.ask("chat too", limiter, Usage(input_tokens=10, output_tokens=100))
        await calls.ask("embedding", limiter, Usage(input_tokens=900))
        assert await calls.settled() == ["chat", "embedding"]
        calls.end()


async def test_a_call_that_costs_nothing_passes_at_once_and_counts_as_a_request() -> None:
    semaphore = TokenSemaphore(100)
    limits = TokenLimits(semaphore, TokenRateLimiter(requests_per_minute=1))
    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks)
        await calls.ask("all", semaphore, 100)
        await calls.ask("one", semaphore, 1)
        await calls.ask("none", semaphore, 0)
        await calls.ask("request", limits, 0)
        await calls.ask("request too", limits, 0)
        assert await calls.settled() == ["all", "none", "request"]
        calls.end()


async def test_several_gates_admit_all_or_charge_none() -> None:
    """openlimit: the request quota was spent while the call still waited for the tokens."""
    semaphore = TokenSemaphore(100)
    rate = TokenRateLimiter(tokens_per_minute=1000, requests_per_minute=10)
    limits = TokenLimits(semaphore, rate)
    with semaphore.acquire_nowait(60):
        with pytest.raises(anyio.WouldBlock):
            limits.acquire_nowait(50)
        with anyio.move_on_after(1):
            await limits.acquire(50)
    assert [quota.used for quota in rate.statistics().quotas] == [0, 0]


async def test_fair_shares_hold_between_tenants_who_each_have_a_quota_too() -> None:
    """Each tenant has a path of its own; the limiter's order counts between them all the same."""
    limiter = TokenRateLimiter(Quota(10, per=1.0), Quota(1000, by="tenant"), order=FairShare())
    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks)
        for i in range(20):
            await calls.ask(f"a{i}", limiter, 10, tenant="a")
        await calls.settled()
        for i in range(3):
            await calls.ask(f"b{i}", limiter, 10, tenant="b")
        await anyio.sleep(6.5)
        assert [name for name in calls.order if name[0] == "b"] == ["b0", "b1", "b2"]
        assert len(calls.order) == 7
        calls.end()


async def test_a_custom_gate_takes_part() -> None:
    gate = InFlightGate(50)
    limits = TokenLimits(TokenSemaphore(100), gate)
    async with limits.reserve(40):
        assert gate.used == 40
        with pytest.raises(anyio.WouldBlock):
            limits.acquire_nowait(20)
    assert gate.used == 0


async def test_without_members_everything_is_admitted() -> None:
    async with TokenLimits().reserve(10**12) as lease:
        assert lease.waited == 0


# Cancelled in the same tick as the grant, before the body has started: at a window gate.


async def queued_at_window(calls: Calls, rate: TokenRateLimiter, limits: Limiter) -> None:
    await calls.ask("first", limits, 100)
    await calls.settled()
    await calls.ask("second", limits, 100)
    await calls.settled()
    assert calls.order == ["first"]


@pytest.mark.parametrize("how", ["release", "reconcile", "timer", "set_limit"])
async def test_granted_and_cancelled_in_one_tick_gives_everything_back(how: str) -> None:
    semaphore = TokenSemaphore(100 if how == "release" else 1000)
    rate = TokenRateLimiter(Quota(1000 if how == "release" else 100), order=Fifo())
    limits = TokenLimits(semaphore, rate)
    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks)
        await queued_at_window(calls, rate, limits)
        if how == "release":
            calls.leases["first"].release()
        elif how == "reconcile":
            calls.leases["first"].reconcile(0)
        elif how == "set_limit":
            rate.set_limit("tokens", 200)
        else:
            calls.leases["first"].release()
            anyio_deadline = anyio.current_time() + 60
            calls.scopes["second"].deadline = anyio_deadline
            await anyio.sleep_until(anyio_deadline + 1)
        granted = semaphore.statistics().tokens_in_flight
        if how in ("reconcile", "set_limit"):
            assert granted == (100 if how == "reconcile" else 200)  # booked before it woke
        calls.scopes["second"].cancel()
        await calls.settled()
        assert calls.order == ["first"]
        used = rate.statistics().quotas[0].used
        assert used == {"release": 100, "reconcile": 0, "set_limit": 100, "timer": 0}[how]
        calls.leases["first"].release()
        assert semaphore.statistics().tokens_in_flight == 0
        assert rate.delay(100) == (
            0 if how != "set_limit" and how != "release" else rate.delay(100)
        )
        calls.end()


async def test_after_a_cancelled_grant_the_next_is_tried_at_once() -> None:
    rate = TokenRateLimiter(Quota(100))
    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks)
        await queued_at_window(calls, rate, rate)
        await calls.ask("third", rate, 100)
        await calls.settled()
        calls.leases["first"].reconcile(0)
        calls.scopes["second"].cancel()
        assert await calls.settled() == ["first", "third"]
        calls.end()
