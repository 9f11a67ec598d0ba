"""TokenRateLimiter: what has gone wrong in other limiters, and each of its settings.

A call is told from another by its cost: `[(0, 60), (60, 50)]` is one of 60 tokens at the start
and one of 50 a minute later.
"""

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import anyio
import pytest
import trio
from anyio import wait_all_tasks_blocked
from anyio.abc import TaskGroup

from tests.oracle import Admitted, call, greatest_window, saturate, sizes
from tokenflow import (
    FairShare,
    Fifo,
    Lease,
    Quota,
    QuotaStatus,
    RateLimitStatus,
    RequestTooLarge,
    SmallestFirst,
    TokenLimits,
    TokenRateLimiter,
    TokenSemaphore,
    Usage,
    WaitTimeout,
)
from tokenflow.limits import Limiter, WindowGate

pytestmark = pytest.mark.anyio


def used(limiter: TokenRateLimiter) -> list[int]:
    return [quota.used for quota in limiter.statistics().quotas]


async def start(
    tasks: TaskGroup, limiter: Limiter, costs: Iterable[int], **kwargs: Any
) -> Admitted:
    """Calls that arrive in this order; the list fills as they are admitted."""
    admitted: Admitted = []
    for cost in costs:
        tasks.start_soon(partial(call, limiter, cost, admitted, **kwargs))
        await wait_all_tasks_blocked()
    return admitted


async def fill(limiter: Limiter, cost: int | Usage, **kwargs: Any) -> None:
    """One call that came and went."""
    async with limiter.reserve(cost, **kwargs):
        pass


# -- what has gone wrong elsewhere -------------------------------------------------


async def test_no_window_exceeds_the_limit_wherever_it_starts() -> None:
    """aiolimiter 298, 240, 200, 90: with 2 per 10 s, 3 passed within 5 s."""
    limiter = TokenRateLimiter(Quota(2, per=10, of="requests"))
    randomness = random.Random(3)
    admitted: Admitted = []

    async def one() -> None:
        async with limiter.reserve(100):
            admitted.append((anyio.current_time(), 1))

    async with anyio.create_task_group() as tasks:
        for _ in range(60):
            tasks.start_soon(one)
            await anyio.sleep(randomness.choice([0, 0.01, 3, 8, 14]))
    assert len(admitted) == 60
    assert greatest_window(admitted, 10) == 2


@pytest.mark.parametrize("order", [Fifo(), Fifo(backfill=False), SmallestFirst(), FairShare()])
async def test_idling_saves_nothing_up(order: Any) -> None:
    """Rokabot 149: idle for ten minutes, then greedy."""
    limiter = TokenRateLimiter(tokens_per_minute=1000, order=order)
    await fill(limiter, 700)
    await anyio.sleep(600)
    randomness = random.Random(1)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [randomness.randint(1, 400) for _ in range(60)])
    assert len(admitted) == 60
    assert greatest_window(admitted) <= 1000


async def test_two_bursts_about_a_minute_mark_do_not_make_twice_the_limit() -> None:
    """IronTraffic 212: fixed windows, and two counters that only look like sliding."""
    limiter = TokenRateLimiter(tokens_per_minute=100)
    async with anyio.create_task_group() as tasks:
        await anyio.sleep(59)
        first = await start(tasks, limiter, [50, 50])
        await anyio.sleep(2)
        second = await start(tasks, limiter, [50, 50])
    assert first == [(59, 50), (59, 50)]
    assert second == [(119, 50), (119, 50)]


def timers() -> int:
    """How many timers the event loop has pending, whoever set them."""
    try:
        loop: Any = asyncio.get_running_loop()
    except RuntimeError:
        runner: Any = trio._core._run.GLOBAL_RUN_CONTEXT.runner
        return int(runner.deadlines._active)
    return sum(not handle.cancelled() for handle in loop._scheduled)


async def asked_by_one_wake_up(waiters: int, monkeypatch: pytest.MonkeyPatch) -> int:
    asked = 0

    def counted(gate: WindowGate, cost: int, now: float) -> float:
        nonlocal asked
        asked += 1
        return ready_at(gate, cost, now)

    ready_at = WindowGate.ready_at
    limiter = TokenRateLimiter(tokens_per_minute=10)
    admitted: Admitted = []
    for _ in range(10):
        await fill(limiter, 1)
        await anyio.sleep(1)
    async with anyio.create_task_group() as tasks:
        for _ in range(waiters):
            tasks.start_soon(call, limiter, 1, admitted)
        await anyio.sleep(50.5)
        assert (len(admitted), timers()) == (1, 1)  # the timer is that of the head
        with monkeypatch.context() as patch:
            patch.setattr(WindowGate, "ready_at", counted)
            await anyio.sleep(1)
        assert (len(admitted), timers()) == (2, 1)
        limiter.set_limit("tokens", 100_000)
        assert limiter.statistics().waiting_calls == 0
    return asked


async def test_thousands_of_waiters_have_one_timer_and_a_wake_up_costs_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """aiolimiter 73, 290. Counted, not timed: how often the gate is asked."""
    few, many = [await asked_by_one_wake_up(n, monkeypatch) for n in (20, 3000)]
    assert 0 < many <= few


async def test_ten_at_once_at_three_per_three_seconds_all_succeed() -> None:
    """pyrate 191, 185, 184."""
    limiter = TokenRateLimiter(Quota(3, per=3, of="requests"))
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [1] * 10)
    assert [at for at, _ in admitted] == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9]


async def test_a_key_that_waits_stalls_no_other() -> None:
    """pyrate 301: one slept in the lock that all keys share."""
    limiter = TokenRateLimiter(Quota(100, by="tenant"))
    await fill(limiter, 100, tenant="a")
    async with anyio.create_task_group() as tasks:
        waits = await start(tasks, limiter, [60], tenant="a")
        goes = await start(tasks, limiter, [70, 30], tenant="b")
    assert waits == [(60, 60)]
    assert goes == [(0, 70), (0, 30)]


async def test_a_thousand_at_once_at_four_per_day_are_exactly_four() -> None:
    """limits 277."""
    limiter = TokenRateLimiter(Quota(4, per=86_400, of="requests"))
    outcomes: list[bool] = []

    async def one() -> None:
        try:
            async with limiter.reserve(10, max_wait=0):
                await anyio.sleep(1)
                outcomes.append(True)
        except WaitTimeout:
            outcomes.append(False)

    async with anyio.create_task_group() as tasks:
        for _ in range(1000):
            tasks.start_soon(one)
    assert (outcomes.count(True), outcomes.count(False)) == (4, 996)


async def test_a_refused_try_consumes_nothing() -> None:
    """limits; hammer 132: 60, 60, 10 of 100 is yes, no, yes."""
    limiter = TokenRateLimiter(tokens_per_minute=100)
    limiter.acquire_nowait(60).release()
    with pytest.raises(anyio.WouldBlock):
        limiter.acquire_nowait(60)
    limiter.acquire_nowait(10).release()
    assert used(limiter) == [70]


async def test_a_limit_of_a_hundred_million_is_one_slot_like_any_other() -> None:
    """limits 268: state is O(slots), not O(tokens). test_window.py counts the steps."""
    limiter = TokenRateLimiter(tokens_per_minute=100_000_000)
    await fill(limiter, 100_000_000)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [100_000_000, 1])
    assert admitted == [(60, 100_000_000), (120, 1)]


async def test_a_call_larger_than_a_seconds_share_goes_at_once() -> None:
    """openlimit 8: at 40,000 tokens per minute an 800-token call waited for ever."""
    limiter = TokenRateLimiter(tokens_per_minute=40_000)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [800])
    assert admitted == [(0, 800)]


async def test_a_call_that_could_never_fit_raises_at_once() -> None:
    """llama_index 23202: it walked through, or waited for ever."""
    limiter = TokenRateLimiter(tokens_per_minute=100)
    with pytest.raises(RequestTooLarge, match=r"101.*at most 100.*split") as caught:
        await fill(limiter, 101)
    assert (caught.value.cost, caught.value.limit) == (101, 100)
    assert anyio.current_time() == 0
    assert used(limiter) == [0]


async def test_hours_of_odd_sizes_neither_lose_nor_gain() -> None:
    """firebase 2662, seastar 1723, polaris 3433: fractions lost or gained in refills."""
    limiter = TokenRateLimiter(tokens_per_minute=10_007)
    randomness = random.Random(5)
    costs = [randomness.randint(1, 997) for _ in range(4000)]
    ours: Admitted = []
    with anyio.move_on_after(3 * 3600):
        for cost in costs:
            await call(limiter, cost, ours)
    ideal, log, held, at = 0, deque[tuple[float, int]](), 0, 0.0
    for cost in costs:
        while held + cost > 10_007:
            left, amount = log.popleft()
            at, held = left + 60, held - amount
        if at >= 3 * 3600:
            break
        log.append((at, cost))
        ideal, held = ideal + cost, held + cost
    assert abs(sum(cost for _, cost in ours) - ideal) <= 997


async def test_the_wall_clock_may_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """ratelimit 11, langchain 24961."""
    limiter = TokenRateLimiter(tokens_per_minute=100)
    wall = [1_800_000_000.0]
    monkeypatch.setattr(time, "time", lambda: wall[0])
    await fill(limiter, 100)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [40])
        wall[0] -= 3600
        await anyio.sleep(30)
        wall[0] += 1_000_000
        with pytest.raises(anyio.WouldBlock):
            limiter.acquire_nowait(1)
    assert admitted == [(60, 40)]


async def test_a_limit_raised_during_a_long_sleep_ends_it() -> None:
    """zotero-mcp 548: sleeps have to be looked at again when limits change."""
    limiter = TokenRateLimiter(tokens_per_minute=100)
    await fill(limiter, 100)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [80, 40])
        await anyio.sleep(30)
        limiter.set_limit("tokens", 200)
    assert admitted == [(30, 80), (60, 40)]


async def test_a_limit_lowered_during_a_long_sleep_prolongs_it() -> None:
    """zotero-mcp 548, the other way."""
    limiter = TokenRateLimiter(tokens_per_minute=100)
    await fill(limiter, 50)
    await anyio.sleep(10)
    await fill(limiter, 50)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [45])
        await anyio.sleep(20)
        limiter.set_limit("tokens", 90)
    assert admitted == [(70, 45)]


async def test_a_refusal_by_the_day_or_in_flight_leaves_the_minute_alone() -> None:
    """aisix 117, litellm 39309."""
    per_minute = TokenRateLimiter(tokens_per_minute=10_000)
    per_day = TokenRateLimiter(Quota(1000, per=86_400))
    in_flight = TokenSemaphore(900)
    limits = TokenLimits(per_minute, per_day, in_flight)
    with limits.acquire_nowait(800):
        with pytest.raises(anyio.WouldBlock):
            limits.acquire_nowait(150)
        with pytest.raises(WaitTimeout):
            await fill(limits, 150, max_wait=0)
    with pytest.raises(anyio.WouldBlock):
        limits.acquire_nowait(300)
    assert used(per_minute) == used(per_day) == [800]
    assert in_flight.statistics().tokens_in_flight == 0


async def test_five_at_once_are_counted_before_they_answer() -> None:
    """litellm 18730, 5783: counted after the response, five calls used 663 of 100."""
    limiter = TokenRateLimiter(tokens_per_minute=100)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [45, 40, 35, 30, 25], hold=5)
    assert sorted(admitted) == [(0, 40), (0, 45), (60, 25), (60, 30), (60, 35)]


async def test_cancelled_after_sending_the_estimate_stays() -> None:
    """litellm 30522."""
    limiter = TokenRateLimiter(tokens_per_minute=100)
    with anyio.move_on_after(1):
        async with limiter.reserve(70):
            await anyio.sleep_forever()
    assert used(limiter) == [70]


async def test_cancelled_in_the_queue_everything_comes_back() -> None:
    """litellm 30522, before it was sent; the next in line goes at once."""
    limiter = TokenRateLimiter(tokens_per_minute=100, order=Fifo(backfill=False))
    await fill(limiter, 60)
    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as doomed:
            cancelled = await start(doomed, limiter, [90])
            admitted = await start(tasks, limiter, [40, 30])
            await anyio.sleep(5)
            assert limiter.statistics().waiting_calls == 3
            doomed.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        assert admitted == [(5, 40)]
    assert (cancelled, admitted) == ([], [(5, 40), (60, 30)])
    assert limiter.statistics().waiting_calls == 0


GRANTS: dict[str, tuple[Callable[[TokenRateLimiter, Lease], None], int]] = {
    "set_limit": (lambda limiter, lease: limiter.set_limit("tokens", 200), 21),
    "observe": (lambda limiter, lease: said(limiter, remaining=80, reset=60), 20),
    "reconcile": (lambda limiter, lease: lease.reconcile(5), 6),
    "cancel": (lambda limiter, lease: lease.cancel(), 1),
}


@pytest.mark.parametrize("granted_by", GRANTS)
async def test_granted_and_cancelled_in_one_tick_everything_comes_back(granted_by: str) -> None:
    """litellm 30522: granted, but the body has not started."""
    grant, left = GRANTS[granted_by]
    limiter = TokenRateLimiter(tokens_per_minute=100)
    lease = limiter.acquire_nowait(20)
    said(limiter, remaining=79, reset=60)  # 1 by others
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [80])
        grant(limiter, lease)
        assert (used(limiter), limiter.statistics().waiting_calls) == ([left + 80], 0)
        tasks.cancel_scope.cancel()
    assert (admitted, used(limiter)) == ([], [left])
    lease.release()


async def test_the_timers_grant_and_a_cancel_at_one_instant_agree() -> None:
    """litellm 30522: either the body ran and is charged, or neither."""
    for early in (0, math.ulp(60.0), 0.001):
        limiter = TokenRateLimiter(tokens_per_minute=100)
        await fill(limiter, 100)
        with anyio.move_on_at(anyio.current_time() + 60 - early):
            admitted: Admitted = []
            await call(limiter, 70, admitted)
        await anyio.sleep(30)
        assert used(limiter) == [sum(cost for _, cost in admitted)]
        assert limiter.statistics().waiting_calls == 0


async def test_cached_input_counts_where_the_quota_says_so() -> None:
    """litellm 18728, librefang 4943."""

    def uncached(usage: Usage) -> int:
        return usage.total_tokens - usage.cached_tokens

    limiter = TokenRateLimiter(Quota(1000), Quota(500, of=uncached))
    await fill(limiter, Usage(input_tokens=800, cached_tokens=700, output_tokens=100))
    assert used(limiter) == [900, 200]


async def test_an_answer_is_a_reservation() -> None:
    """ouroboros 398: who was told to wait came back to find it taken, with everybody else."""
    limiter = TokenRateLimiter(tokens_per_minute=100)
    await fill(limiter, 100)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [100])
        limiter.set_limit("tokens", 200)
        assert (admitted, used(limiter)) == ([], [200])
        with pytest.raises(anyio.WouldBlock):
            limiter.acquire_nowait(1)
    assert admitted == [(0, 100)]


async def test_no_request_is_spent_while_the_tokens_are_waited_for() -> None:
    """openlimit, aiollm-gateway."""
    limiter = TokenRateLimiter(tokens_per_minute=100, requests_per_minute=3)
    await fill(limiter, 100)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [60, 70, 30, 35])
        assert used(limiter) == [100, 1]
    assert sorted(admitted) == [(60, 30), (60, 60), (120, 70), (180, 35)]


async def test_a_pause_holds_everyone_and_loses_nobody() -> None:
    """deer-flow 4294, OmniRoute 11413: retry-after was logged, and new calls went on."""
    limiter = TokenRateLimiter(tokens_per_minute=100)
    await fill(limiter, 100)
    async with anyio.create_task_group() as tasks:
        before = await start(tasks, limiter, [50])
        await anyio.sleep(50)
        limiter.pause(30)
        after = await start(tasks, limiter, [20, 30])
        with pytest.raises(anyio.WouldBlock):
            limiter.acquire_nowait(1)
    assert before == [(80, 50)]
    assert sorted(after) == [(80, 20), (80, 30)]


@pytest.mark.parametrize("limit", [0, None])
async def test_no_limit_is_not_taken_for_unlimited(limit: Any) -> None:
    """graphrag 367, 490: 0 and None silently meant unlimited."""
    with pytest.raises((TypeError, ValueError), match="limit must be"):
        Quota(limit)
    with pytest.raises(ValueError, match=r"tokens_per_minute must be an int >= 1|limits nothing"):
        TokenRateLimiter(tokens_per_minute=limit)
    with pytest.raises(ValueError, match="limits nothing"):
        TokenRateLimiter()


async def test_a_limit_set_to_0_is_a_pause() -> None:
    """graphrag 367, 490: never unlimited; calls queue."""
    limiter = TokenRateLimiter(tokens_per_minute=100)
    limiter.set_limit("tokens", 0)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [60, 500])
        await anyio.sleep(1000)
        assert (admitted, limiter.delay(1)) == ([], math.inf)
        limiter.set_limit("tokens", 1000)
    assert sorted(admitted) == [(1000, 60), (1000, 500)]


async def test_backfill_uses_what_strict_order_leaves() -> None:
    """A simulation: 60,000 tokens per minute, 32 saturating workers, log-normal sizes."""
    backfilled = await saturate(TokenRateLimiter(tokens_per_minute=60_000), 600)
    strict = TokenRateLimiter(tokens_per_minute=60_000, order=Fifo(backfill=False))
    began = anyio.current_time()
    strictly = [(at - began, cost) for at, cost in await saturate(strict, 600)]
    assert greatest_window(backfilled) <= 60_000
    assert greatest_window(strictly) <= 60_000
    assert sum(cost for _, cost in backfilled) >= 0.994 * 600_000
    assert 0.95 * 600_000 <= sum(cost for _, cost in strictly) < 0.98 * 600_000


@pytest.mark.parametrize(
    ("order", "longest"), [(Fifo(), 120), (FairShare(), 120), (SmallestFirst(), 40 * 3 + 120)]
)
async def test_a_large_call_gets_in_among_small_ones(order: Any, longest: float) -> None:
    """Buckets let 2x through, and smallest-first queues let the large one wait for ever.

    Two windows: those ahead of it need the rest of one, and then one has to drain.
    SmallestFirst first lets it be overtaken for 3 s per 1,000 of its tokens.
    """
    limiter = TokenRateLimiter(tokens_per_minute=60_000, order=order)
    large: Admitted = []
    async with anyio.create_task_group() as tasks:

        async def arrive() -> None:
            await anyio.sleep(90)
            await call(limiter, 40_000, large, tenant="large")

        tasks.start_soon(arrive)
        admitted = await saturate(limiter, 420)
    assert [cost for _, cost in large] == [40_000]
    assert large[0][0] - 90 <= longest
    assert greatest_window(admitted + large) <= 60_000


# -- several quotas, and what they count ------------------------------------------


async def test_quotas_are_judged_together() -> None:
    limiter = TokenRateLimiter(
        Quota(100, per=10), Quota(150, per=60), Quota(3, per=60, of="requests")
    )
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [90, 55, 20])
        await anyio.sleep(9)
        assert used(limiter) == [90, 90, 1]
    assert admitted == [(0, 90), (10, 55), (60, 20)]


@pytest.mark.parametrize(
    ("quota", "shown"),
    [
        (Quota(100), "Quota(limit=100, per=60.0, of='tokens')"),
        (
            Quota(100, per=1, by="tenant", burst=5, settle="reserved", leeway=0.5, name="x"),
            "Quota(limit=100, per=1.0, of='tokens', by='tenant', burst=5, settle='reserved', "
            "leeway=0.5, name='x')",
        ),
    ],
    ids=["plain", "full"],
)
async def test_a_quotas_repr_says_what_was_set(quota: Quota, shown: str) -> None:
    assert repr(quota) == shown
    assert eval(shown) == quota


async def test_input_and_output_are_counted_apart() -> None:
    limiter = TokenRateLimiter(input_tokens_per_minute=100, output_tokens_per_minute=50)
    await fill(limiter, Usage(input_tokens=60, output_tokens=10))
    assert used(limiter) == [60, 10]
    assert limiter.delay(Usage(input_tokens=40, output_tokens=40)) == 0
    assert limiter.delay(Usage(input_tokens=0, output_tokens=41)) == 60


@pytest.mark.parametrize("of", ["input_tokens", "output_tokens", lambda usage: usage.input_tokens])
async def test_an_int_is_refused_where_the_parts_matter(of: Any) -> None:
    limiter = TokenRateLimiter(Quota(1000, of="requests"), Quota(100, of=of))
    for attempt in (limiter.acquire_nowait, limiter.delay):
        with pytest.raises(TypeError, match=r"pass Usage\(input_tokens=7, output_tokens=0\)"):
            attempt(7)
    with pytest.raises(TypeError, match=r"pass Usage\(input_tokens=7"):
        await fill(limiter, 7)
    assert used(limiter) == [0, 0]


async def test_a_quotas_function_runs_once_for_each_call() -> None:
    seen: list[Usage] = []

    def burn_down(usage: Usage) -> int:
        seen.append(usage)
        return usage.input_tokens + 5 * usage.output_tokens

    limiter = TokenRateLimiter(Quota(100, of=burn_down), tokens_per_minute=1000)
    calls = [Usage(input_tokens=50, output_tokens=n) for n in (10, 9, 8)]
    async with anyio.create_task_group() as tasks:
        for usage in calls:
            tasks.start_soon(fill, limiter, usage)
            await wait_all_tasks_blocked()
    assert seen == calls
    assert anyio.current_time() == 120


@pytest.mark.parametrize("result", [-1, 1.5, None, True])
async def test_a_functions_nonsense_is_refused_before_anything_is_charged(result: Any) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100, *[Quota(100, of=lambda _: result)])  # noqa: B026
    with pytest.raises((TypeError, ValueError), match=r"the result of <lambda>\(usage\) must be"):
        await fill(limiter, Usage(input_tokens=1))
    assert used(limiter) == [0, 0]


async def test_a_function_that_raises_charges_nothing() -> None:
    def price(usage: Usage) -> int:
        if usage.output_tokens:
            raise LookupError("no price")
        return 1

    limiter = TokenRateLimiter(Quota(100), Quota(100, of=price))
    with pytest.raises(LookupError, match="no price"):
        await fill(limiter, Usage(input_tokens=5, output_tokens=5))
    lease = limiter.acquire_nowait(Usage(input_tokens=7))
    with pytest.raises(LookupError, match="no price"):
        lease.reconcile(Usage(input_tokens=5, output_tokens=5))
    lease.release()
    assert used(limiter) == [7, 1]


async def test_each_tenant_has_a_quota() -> None:
    limiter = TokenRateLimiter(Quota(100, by="tenant"), Quota(150, name="all"))
    async with anyio.create_task_group() as tasks:
        a = await start(tasks, limiter, [80, 30], tenant="a")
        b = await start(tasks, limiter, [60], tenant="b")
        nobody = await start(tasks, limiter, [10])
        await anyio.sleep(1)
        assert used(limiter) == [150, 150]
        assert limiter.statistics().quotas[0].ledgers == 3
    assert (a, b, nobody) == ([(0, 80), (60, 30)], [(0, 60)], [(0, 10)])


async def test_tenants_who_are_gone_are_forgotten() -> None:
    limiter = TokenRateLimiter(Quota(100, by="tenant"))
    limits = TokenLimits(limiter)
    ledgers = []
    for tenant in range(1000):
        await fill(limiter if tenant % 2 else limits, 10, tenant=tenant)
        await anyio.sleep(1)
        if tenant % 100 == 99:
            ledgers.append(limiter.statistics().quotas[0].ledgers)
    assert max(ledgers) <= 200


async def test_forgetting_a_tenant_forgets_no_charge() -> None:
    limiter = TokenRateLimiter(Quota(100, by="tenant"))
    await fill(limiter, 100, tenant="a")
    for tenant in range(300):
        await fill(limiter, 10, tenant=tenant)
    assert limiter.delay(1, tenant="a") == 60
    await anyio.sleep(100)
    limiter.acquire_nowait(30, tenant="a").release()
    assert limiter.delay(71, tenant="a") == 60


# -- settling ---------------------------------------------------------------------


async def test_a_call_that_used_less_makes_room_at_once() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    async with anyio.create_task_group() as tasks:
        async with limiter.reserve(90) as lease:
            admitted = await start(tasks, limiter, [60])
            await anyio.sleep(5)
            lease.reconcile(40)
            await wait_all_tasks_blocked()
            assert admitted == [(5, 60)]
        assert used(limiter) == [100]
        assert limiter.statistics().unreconciled == 1  # the 60


async def test_an_overrun_is_debt_that_later_calls_wait_out() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    async with limiter.reserve(50) as lease:
        await anyio.sleep(10)
        lease.reconcile(150)
        assert used(limiter) == [150]
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [51, 49])
    assert admitted == [(70, 51), (70, 49)]


async def test_the_last_reconcile_wins_also_after_the_release() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    async with limiter.reserve(50) as lease:
        lease.reconcile(80)
        lease.reconcile(30)
    lease.reconcile(45)
    assert (used(limiter), lease.usage) == ([45], 45)


async def test_a_reconcile_after_the_window_has_passed_credits_nothing() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    async with limiter.reserve(80) as lease:
        await anyio.sleep(70)
        await fill(limiter, 90)
        lease.reconcile(10)
    assert used(limiter) == [90]
    lease.reconcile(30)
    assert used(limiter) == [110]


async def test_a_credit_is_never_more_than_each_charge_still_holds() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    async with limiter.reserve(60) as lease:
        await anyio.sleep(50)
        lease.reconcile(90)
        await anyio.sleep(15)
        await fill(limiter, 40)
        lease.reconcile(10)
    assert used(limiter) == [40]


async def test_a_stream_raises_what_it_has_used_and_never_lowers_it() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    seen = []
    async with limiter.reserve(50) as lease:
        for tokens in (10, 50, 60, 40, 120):
            lease.progress(tokens)
            seen += used(limiter)
        lease.reconcile(70)
    assert seen == [50, 50, 60, 60, 120]
    assert used(limiter) == [70]


async def test_a_lease_that_was_never_sent_gives_everything_back() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    async with anyio.create_task_group() as tasks:
        lease = await limiter.acquire(90)
        lease.progress(95)
        admitted = await start(tasks, limiter, [100])
        await anyio.sleep(1)
        lease.cancel()
        lease.reconcile(50)
        lease.release()
    assert admitted == [(1, 100)]
    assert used(limiter) == [100]


async def test_reserved_charges_the_declared_maximum_and_never_credits_it() -> None:
    limiter = TokenRateLimiter(Quota(1000, settle="reserved"))
    usage = Usage(input_tokens=10, output_tokens=5, max_output_tokens=80)
    async with limiter.reserve(usage) as lease:
        assert used(limiter) == [90]
        lease.reconcile(Usage(input_tokens=10, output_tokens=3))
        assert used(limiter) == [90]
        lease.progress(Usage(input_tokens=10, output_tokens=60))
        assert used(limiter) == [90]
        lease.reconcile(Usage(input_tokens=15, output_tokens=60))
        assert used(limiter) == [95]
        lease.reconcile(Usage(input_tokens=10, output_tokens=120))
        assert used(limiter) == [130]
        lease.reconcile(Usage(input_tokens=10, output_tokens=3))  # the last one wins
    assert used(limiter) == [90]


async def test_a_quotas_function_is_asked_once_for_each_settlement() -> None:
    asked: list[Usage] = []

    def weight(usage: Usage) -> int:
        asked.append(usage)
        return usage.total_tokens

    limiter = TokenRateLimiter(Quota(1000, of=weight, settle="reserved"))
    async with limiter.reserve(Usage(input_tokens=10, max_output_tokens=80)) as lease:
        asked.clear()
        lease.reconcile(Usage(input_tokens=10, output_tokens=3))
    assert len(asked) == 1


async def test_reserved_settles_at_the_truth_what_declared_nothing() -> None:
    """Its server never counted the estimate."""
    limiter = TokenRateLimiter(Quota(1000, settle="reserved"))
    async with anyio.create_task_group() as tasks:
        async with limiter.reserve(Usage(input_tokens=600, output_tokens=300)) as lease:
            admitted = await start(tasks, limiter, [250])
            lease.progress(Usage(input_tokens=600, output_tokens=350))
            lease.reconcile(Usage(input_tokens=600, output_tokens=140))
            assert used(limiter) == [990]
            lease.reconcile(Usage(input_tokens=600, output_tokens=10))
    assert (admitted, used(limiter)) == ([(0, 250)], [860])


async def test_reserved_never_credits_a_total_that_says_nothing_of_a_maximum() -> None:
    for asked, actual in ((90, Usage(input_tokens=9)), (Usage(input_tokens=90), 9), (90, 9)):
        limiter = TokenRateLimiter(Quota(1000, settle="reserved"))
        with limiter.acquire_nowait(asked) as lease:
            lease.reconcile(actual)
            lease.reconcile(actual)
            assert used(limiter) == [90]
            lease.reconcile(Usage(input_tokens=130))
        assert used(limiter) == [130]


async def test_a_refused_call_tried_again_counts_its_declared_maximum_again() -> None:
    limiter = TokenRateLimiter(Quota(1000, settle="reserved"))
    with limiter.acquire_nowait(Usage(input_tokens=10, max_output_tokens=80)) as lease:
        lease.refused()
        assert used(limiter) == [0]
        lease.reconcile(Usage(input_tokens=10, output_tokens=3))
    assert used(limiter) == [90]


async def test_reserved_gives_back_what_was_never_sent() -> None:
    limiter = TokenRateLimiter(Quota(100, settle="reserved"))
    limiter.acquire_nowait(90).cancel()
    assert used(limiter) == [0]


async def test_reserved_beside_actual_settle_each_in_its_way() -> None:
    limiter = TokenRateLimiter(Quota(1000), Quota(500, of="output_tokens", settle="reserved"))
    async with limiter.reserve(
        Usage(input_tokens=100, output_tokens=50, max_output_tokens=400)
    ) as lease:
        assert used(limiter) == [150, 400]
        lease.reconcile(Usage(input_tokens=100, output_tokens=20))
    assert used(limiter) == [120, 400]


async def test_estimates_of_twice_the_truth_leave_a_burst_quota_most_of_its_share() -> None:
    """A reconcile moves the schedule by the difference."""
    limiter = TokenRateLimiter(Quota(60_000, burst=4000))
    size = sizes(7)
    really = 0

    async def worker() -> None:
        nonlocal really
        while True:
            tokens = size()
            async with limiter.reserve(2 * tokens) as lease:
                await anyio.sleep(5)
                lease.reconcile(tokens)
                really += tokens

    with anyio.move_on_after(300):
        async with anyio.create_task_group() as tasks:
            for _ in range(64):
                tasks.start_soon(worker)
    assert really >= 0.74 * 300_000


# -- leeway, oversize -------------------------------------------------------------


async def test_leeway_lengthens_the_window() -> None:
    limiter = TokenRateLimiter(Quota(100, leeway=0.25))
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [100, 1])
    assert admitted == [(0, 100), (60.25, 1)]


async def test_an_oversize_call_goes_alone() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100, oversize="alone")
    await fill(limiter, 10)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [150, 90, 20])
    assert admitted == [(0, 90), (60, 150), (120, 20)]


async def test_an_oversize_call_goes_at_once_into_an_empty_window() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100, oversize="alone")
    assert limiter.delay(150) == 0
    await fill(limiter, 150)
    assert limiter.delay(150) == limiter.delay(1) == 60


# -- pause ------------------------------------------------------------------------


async def test_a_pause_only_ever_extends() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    limiter.pause(20)
    limiter.pause(5)
    assert limiter.statistics().quotas[0].paused_for == 20
    await anyio.sleep(10)
    limiter.pause(15)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [100])
    assert admitted == [(25, 100)]
    assert limiter.statistics().quotas[0].paused_for == 0


async def test_a_pause_holds_calls_that_come_through_token_limits() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    limits = TokenLimits(TokenSemaphore(1000), limiter)
    limiter.pause(20)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limits, [50])
    assert admitted == [(20, 50)]


async def test_a_pause_holds_tenants_that_first_show_up_during_it() -> None:
    limiter = TokenRateLimiter(Quota(100, by="tenant"))
    limits = TokenLimits(limiter)
    limiter.pause(20)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [50], tenant="new")
        through = await start(tasks, limits, [60], tenant="newer")
    assert admitted == [(20, 50)]
    assert through == [(20, 60)]


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, True, "5", None])
async def test_a_nonsensical_pause_is_refused(seconds: Any) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    with pytest.raises((TypeError, ValueError), match="seconds must be a"):
        limiter.pause(seconds)
    assert limiter.delay(100) == 0


# -- observe ----------------------------------------------------------------------


def said(limiter: TokenRateLimiter, *, of: str = "tokens", **status: Any) -> None:
    """What the server said about one quota."""
    limiter.observe(RateLimitStatus(quotas=(QuotaStatus(of=of, **status),)))


async def test_what_others_use_is_booked_and_replaced() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    await fill(limiter, 20)
    said(limiter, remaining=30, reset=40)
    assert used(limiter) == [70]
    said(limiter, remaining=60, reset=40)
    assert used(limiter) == [40]
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [61, 39])
    assert admitted == [(40, 61), (60, 39)]


async def test_what_others_use_is_gone_after_the_period_at_the_latest() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    said(limiter, remaining=0, reset=5000)
    assert limiter.delay(1) == 60
    said(limiter, remaining=0)
    assert limiter.delay(1) == 60
    said(limiter, remaining=0, reset=0)
    assert limiter.delay(100) == 0


async def test_a_better_observation_lets_waiters_go() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    limits = TokenLimits(limiter)
    said(limiter, remaining=0, limit=100)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limits, [50, 60])
        await anyio.sleep(10)
        said(limiter, remaining=70)
        await anyio.sleep(10)
        said(limiter, remaining=50, limit=300)
    assert admitted == [(10, 50), (70, 60)]


async def test_a_limit_that_the_server_lowered_and_raised_again_is_followed() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    await fill(limiter, 40)
    async with anyio.create_task_group() as tasks:
        said(limiter, limit=50)
        admitted = await start(tasks, limiter, [45])
        await anyio.sleep(10)
        said(limiter, limit=500)
    assert admitted == [(10, 45)]
    assert limiter.statistics().quotas[0].limit == 100


async def test_a_limit_below_the_accounts_stays() -> None:
    """A job's tenth of an account became all of it with the first answer."""
    limiter = TokenRateLimiter(tokens_per_minute=100)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [80, 30])
        said(limiter, limit=1_000, remaining=300, reset=60)  # 620 by others
        await wait_all_tasks_blocked()
        assert (used(limiter), limiter.statistics().quotas[0].limit) == ([80], 100)
    assert admitted == [(0, 80), (60, 30)]
    with pytest.raises(RequestTooLarge):
        limiter.acquire_nowait(101)


async def test_no_server_ends_a_pause_by_limit() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    limiter.set_limit("tokens", 0)
    said(limiter, limit=1_000, remaining=1_000)
    assert limiter.delay(1) == math.inf


async def test_a_lower_limit_fails_those_it_makes_impossible() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    await fill(limiter, 100)

    async def hear() -> None:
        await anyio.sleep(10)
        said(limiter, limit=50)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hear)
        with pytest.raises(RequestTooLarge):
            await fill(limiter, 60)
    assert anyio.current_time() == 10


@pytest.mark.parametrize(
    "status",
    [
        {"limit": 0},
        {"limit": -7},
        {"remaining": -1},
        {"remaining": 1000},
        {"of": "images", "remaining": 0},
        {"per": 3600, "remaining": 0},
        {"of": "requests", "remaining": 0},
        {},
    ],
)
async def test_what_makes_no_sense_or_matches_nothing_is_ignored(status: dict[str, Any]) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    said(limiter, **status)
    assert limiter.delay(100) == 0
    assert limiter.statistics().quotas[0].limit == 100


@pytest.mark.parametrize("retry_after", [0, -1, math.nan, math.inf])
async def test_a_nonsensical_retry_after_is_ignored(retry_after: float) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    limiter.observe(RateLimitStatus(retry_after=retry_after))
    assert limiter.delay(100) == 0


async def test_a_retry_after_pauses() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    limiter.observe(RateLimitStatus(retry_after=7.5))
    assert limiter.delay(1) == 7.5


async def test_a_status_that_could_mean_two_quotas_is_ignored() -> None:
    limiter = TokenRateLimiter(Quota(100), Quota(1000, per=86_400, name="day"))
    said(limiter, remaining=0)
    assert used(limiter) == [0, 0]
    said(limiter, remaining=10, per=86_400)
    assert used(limiter) == [0, 990]
    said(limiter, remaining=10, limit=100)
    assert used(limiter) == [90, 990]
    said(limiter, of="day", remaining=400)
    assert used(limiter) == [90, 600]


async def test_a_status_is_matched_by_a_limit_adopted_before() -> None:
    limiter = TokenRateLimiter(Quota(100), Quota(1000, per=86_400))
    said(limiter, limit=200, per=60)
    said(limiter, limit=200, remaining=50)  # 150 by others
    assert used(limiter) == [50, 0]


async def test_an_observation_for_one_tenant_concerns_no_other() -> None:
    limiter = TokenRateLimiter(Quota(100, by="tenant"))
    status = RateLimitStatus(quotas=(QuotaStatus(of="tokens", remaining=0, reset=30),))
    limiter.observe(status, tenant="a")
    assert limiter.delay(1, tenant="a") == 30
    assert limiter.delay(100, tenant="b") == 0


# -- set_limit --------------------------------------------------------------------


async def test_a_raised_limit_lets_waiters_go_before_it_returns() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    await fill(limiter, 100)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [50, 60])
        limiter.set_limit("tokens", 150)
        assert (used(limiter), limiter.statistics().waiting_calls) == ([150], 1)
    assert admitted == [(0, 50), (60, 60)]


async def test_a_lowered_limit_fails_who_cannot_fit_and_goes_on_with_the_next() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100, order=Fifo(backfill=False))
    limits = TokenLimits(limiter)
    await fill(limiter, 40)
    errors: list[RequestTooLarge] = []

    async def too_large(through: Limiter) -> None:
        try:
            await fill(through, 80)
        except RequestTooLarge as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(too_large, limiter)
        await wait_all_tasks_blocked()
        tasks.start_soon(too_large, limits)
        admitted = await start(tasks, limiter, [20, 15])
        await anyio.sleep(10)
        limiter.set_limit("tokens", 60)
    assert [(error.cost, error.limit) for error in errors] == [(80, 60), (80, 60)]
    assert admitted == [(10, 20), (60, 15)]


async def test_a_lowered_limit_keeps_what_was_charged() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    await fill(limiter, 100)
    limiter.set_limit("tokens", 50)
    assert used(limiter) == [100]
    assert limiter.delay(50) == 60


async def test_quotas_are_found_by_name_then_by_unit() -> None:
    limiter = TokenRateLimiter(
        Quota(100), Quota(1000, per=86_400, name="day"), Quota(9, of="requests", name="calls")
    )
    limiter.set_limit("day", 2000)
    limiter.set_limit("tokens", 200)
    limiter.set_limit("requests", 8)
    assert [quota.limit for quota in limiter.statistics().quotas] == [200, 2000, 8]
    with pytest.raises(ValueError, match=r"no quota is called 'week'.*'tokens', 'day', 'calls'"):
        limiter.set_limit("week", 1)


async def test_an_ambiguous_name_is_refused() -> None:
    limiter = TokenRateLimiter(Quota(100), Quota(1000, per=86_400))
    with pytest.raises(ValueError, match="2 quotas are called 'tokens'"):
        limiter.set_limit("tokens", 1)


@pytest.mark.parametrize("limit", [-1, 1.5, True, None, "7"])
async def test_a_nonsensical_limit_is_refused_and_changes_nothing(limit: Any) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    with pytest.raises((TypeError, ValueError), match="limit must be an int >= 0"):
        limiter.set_limit("tokens", limit)
    assert limiter.statistics().quotas[0].limit == 100


async def test_every_tenants_limit_is_set_those_to_come_included() -> None:
    limiter = TokenRateLimiter(Quota(100, by="tenant"))
    await fill(limiter, 100, tenant="a")
    async with anyio.create_task_group() as tasks:
        a = await start(tasks, limiter, [40], tenant="a")
        limiter.set_limit("tokens", 150)
        b = await start(tasks, limiter, [150], tenant="b")
    assert (a, b) == ([(0, 40)], [(0, 150)])


# -- delay, max_wait --------------------------------------------------------------


async def test_delay_says_when_the_gates_would_take_it() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    await fill(limiter, 30)
    await anyio.sleep(10)
    await fill(limiter, 30)
    assert [limiter.delay(cost) for cost in (40, 41, 70, 71, 100)] == [0, 50, 50, 60, 60]
    limiter.pause(55)
    assert limiter.delay(1) == 55
    with pytest.raises(RequestTooLarge):
        limiter.delay(101)


async def test_a_wait_known_to_be_too_long_is_refused_at_once() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    await fill(limiter, 100)
    with pytest.raises(
        WaitTimeout, match=r"max_wait=59.*60 s at the earliest, more if others wait"
    ) as caught:
        await fill(limiter, 1, max_wait=59)
    assert caught.value.retry_after == 60
    assert anyio.current_time() == 0
    assert limiter.statistics().waiting_calls == 0
    await fill(limiter, 1, max_wait=60)
    assert anyio.current_time() == 60


async def test_a_wait_that_others_make_too_long_is_given_up_in_time() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    await fill(limiter, 100)
    async with anyio.create_task_group() as tasks:
        admitted = await start(tasks, limiter, [100, 60])
        with pytest.raises(WaitTimeout) as caught:
            await fill(limiter, 50, max_wait=70)
        assert (anyio.current_time(), caught.value.retry_after) == (70, 50)
    assert admitted == [(60, 100), (120, 60)]


async def test_max_wait_bounds_the_wait_and_not_the_body() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    async with limiter.reserve(100, max_wait=1) as lease:
        await anyio.sleep(1000)
    assert lease.waited == 0
    async with limiter.reserve(100, max_wait=1):
        pass


async def test_a_wait_shortened_in_time_ends_well() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    limiter.set_limit("tokens", 0)
    async with anyio.create_task_group() as tasks:

        async def resume() -> None:
            await anyio.sleep(5)
            limiter.set_limit("tokens", 100)

        tasks.start_soon(resume)
        async with limiter.reserve(100, max_wait=10) as lease:
            assert lease.waited == 5


# -- what it tells ----------------------------------------------------------------


async def test_statistics_and_repr_are_live() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=60_000, requests_per_minute=500)
    await fill(limiter, 1200)
    async with anyio.create_task_group() as tasks:
        await start(tasks, limiter, [59_000, 500])
        limiter.pause(70)
        tokens, requests = limiter.statistics().quotas
        assert (tokens.name, tokens.per, tokens.limit, tokens.used) == ("tokens", 60, 60_000, 1700)
        assert (requests.name, requests.used, requests.ledgers) == ("requests", 2, 1)
        assert tokens.paused_for == 70
        assert limiter.statistics().waiting_calls == 1
        assert limiter.statistics().waiting_tokens == 59_000
        assert repr(limiter) == (
            "<TokenRateLimiter: 1,700 of 60,000 tokens per 60 s (paused for 70.0 s), "
            "2 of 500 requests per 60 s (paused for 70.0 s), 1 waiting>"
        )
    await anyio.sleep(60)
    assert used(limiter) == [0, 0]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


async def test_pauses_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    limiter = TokenRateLimiter(Quota(100, by="tenant"))
    limiter.pause(20)
    limiter.pause(0)
    limiter.pause(5)
    limiter.pause(25)  # one of many that come at once: within ten seconds one line is enough
    await anyio.sleep(10)
    limiter.observe(RateLimitStatus(retry_after=30))
    assert [message[:19] for message in warned(caplog)] == [
        "paused for 20.0 s: ",
        "paused for 30.0 s: ",
    ]
    assert {record.name for record in caplog.records} == {"tokenflow"}


async def test_debt_is_logged_also_after_a_long_wait_was(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tokenflow")
    limiter = TokenRateLimiter(tokens_per_minute=100)
    lease = limiter.acquire_nowait(100)
    async with anyio.create_task_group() as tasks:
        await start(tasks, limiter, [50])
        assert [record.levelname for record in caplog.records] == ["INFO"]
        lease.reconcile(130)
        lease.release()
        assert len(warned(caplog)) == 1
        assert "130 of 100" in warned(caplog)[0]


async def test_a_long_wait_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tokenflow")
    limiter = TokenRateLimiter(tokens_per_minute=100)
    await fill(limiter, 96)
    async with anyio.create_task_group() as tasks:
        await start(tasks, limiter, [50, 45, 40])
    messages = [record.message for record in caplog.records]
    assert 2 <= len(messages) <= 3
    assert "will wait 60.0 s for 50 tokens" in messages[0]
    assert "96 of 100" in messages[0]
    assert "waiting" in messages[0]


async def test_a_short_wait_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="tokenflow")
    limiter = TokenRateLimiter(Quota(100, per=4))
    await fill(limiter, 100)
    await fill(limiter, 100)
    assert caplog.records == []
