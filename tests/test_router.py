"""Which replica a call goes to, and who waits for which."""

import gc
import math
import pickle
import random
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calls import Calls
from tests.conftest import BACKENDS, Backend, Run, run_virtual
from tests.router_model import OPS, Op, drive
from tokenflow import (
    Fifo,
    NoReplica,
    QueueFull,
    Quota,
    Replica,
    RequestTooLarge,
    TokenLimits,
    TokenRateLimiter,
    TokenRouter,
    TokenSemaphore,
    Usage,
    WaitTimeout,
)
from tokenflow.limits import InFlightGate, Limiter

pytestmark = pytest.mark.anyio


def in_flight(router: TokenRouter) -> dict[str, int]:
    return {each.name: each.tokens_in_flight for each in router.statistics().replicas}


def states(router: TokenRouter) -> dict[str, str]:
    return {each.name: each.state for each in router.statistics().replicas}


def name_of(router: Limiter, cost: int | Usage = 100, **options: object) -> str:
    """Where a call would go now."""
    with router.acquire_nowait(cost, **options) as lease:  # type: ignore[arg-type]
        assert lease.replica is not None
        return lease.replica.name


def replicas(*names: str, **settings: int) -> list[Replica]:
    return [Replica(name, **settings) for name in names]  # type: ignore[arg-type]


# Loads.


async def test_a_lease_gives_back_what_it_added_whatever_was_used() -> None:
    """1,000 calls of 500 that use 200: 75,000 phantom tokens per replica elsewhere."""
    router = TokenRouter(replicas("a", "b", "c", "d"))
    for _ in range(1_000):
        async with router.reserve(500) as lease:
            lease.reconcile(200)
    assert set(in_flight(router).values()) == {0}
    for _ in range(1_000):
        async with router.reserve(500):
            pass
    assert set(in_flight(router).values()) == {0}


async def test_a_call_that_used_more_takes_nothing_from_others() -> None:
    router = TokenRouter(replicas("a"))
    other = router.acquire_nowait(300)
    async with router.reserve(200) as lease:
        lease.reconcile(500)
        assert in_flight(router) == {"a": 800}
    assert in_flight(router) == {"a": 300}
    other.release()
    assert in_flight(router) == {"a": 0}


async def test_room_comes_before_load() -> None:
    router = TokenRouter([Replica("a", max_tokens=1_000), Replica("b", max_tokens=5_000)])
    with (
        router.acquire_nowait(900, exclude={"b"}),
        router.acquire_nowait(950, exclude={"a"}),
        router.acquire_nowait(500) as lease,
    ):
        assert lease.replica is not None
        assert lease.replica.name == "b"
    assert in_flight(router) == {"a": 0, "b": 0}


async def test_without_room_anywhere_the_second_waits() -> None:
    router = TokenRouter(replicas("a", max_tokens=500))
    async with Calls() as calls:
        assert await calls.start(router, 300, "first", "second") == ["first"]
        assert in_flight(router) == {"a": 300}
        assert await calls.end("first") == ["first", "second"]
        assert in_flight(router) == {"a": 300}


async def test_ties_go_to_the_least_recently_used() -> None:
    """(Infera 103): 448 calls to 0, where ties go to the first."""
    router = TokenRouter(replicas("a", "b", "c"))
    counts: Counter[str] = Counter()
    for _ in range(300):
        counts[name_of(router)] += 1
        await anyio.sleep(0.1)
    assert counts == {"a": 100, "b": 100, "c": 100}


async def test_load_is_measured_in_seconds_not_in_tokens() -> None:
    """4,500 tokens/s against 2,800: a factor of 1.607."""
    router = TokenRouter(
        [Replica("fast", tokens_per_second=4_500), Replica("slow", tokens_per_second=2_800)]
    )
    leases = [router.acquire_nowait(1_000) for _ in range(730)]
    used = in_flight(router)
    assert used["fast"] / used["slow"] == pytest.approx(4_500 / 2_800, rel=0.01)
    for lease in leases:
        lease.release()


async def test_a_replica_of_unknown_speed_counts_as_average() -> None:
    router = TokenRouter(
        [
            Replica("fast", tokens_per_second=3_000),
            Replica("unknown"),
            Replica("slow", tokens_per_second=1_000),
        ]
    )
    assert name_of(router) == "fast"
    assert {each.name: each.load for each in router.statistics().replicas} == {
        "fast": 100,
        "unknown": 150,
        "slow": 300,
    }


async def test_the_least_load_after_taking_the_call_decides() -> None:
    """An idle slow replica would have it done later than a busy fast one."""
    router = TokenRouter(
        [Replica("fast", tokens_per_second=10_000), Replica("slow", tokens_per_second=1_000)]
    )
    with router.acquire_nowait(2_000, exclude={"slow"}):
        assert name_of(router, 1_000) == "fast"
        assert name_of(router, 10) == "slow"


async def test_many_short_calls_weigh_more_than_one_as_large() -> None:
    router = TokenRouter(replicas("a", "b"))
    with router.acquire_nowait(1_000, exclude={"b"}):
        short = [router.acquire_nowait(100, exclude={"a"}) for _ in range(10)]
        assert name_of(router) == "a"
        for lease in short:
            lease.release()


async def test_a_call_counts_before_anything_is_sent() -> None:
    """(sglang 27547): all that are asked for in one turn go to one replica."""
    router = TokenRouter(replicas(*"abcd"))
    async with Calls() as calls:
        await calls.start(router, Usage(input_tokens=32_000, output_tokens=1), *"12345678")
        assert set(in_flight(router).values()) == {64_002}


async def test_nothing_expires_while_a_call_is_under_way() -> None:
    """(litellm 40401, llm-d-router 2295): a stream of a day is still there."""
    router = TokenRouter(replicas("a", "b"))
    with router.acquire_nowait(10_000) as lease:
        for _ in range(24):
            await anyio.sleep(3_600)
            assert name_of(router) != lease.replica.name  # type: ignore[union-attr]
        assert sum(in_flight(router).values()) == 10_000
    assert sum(in_flight(router).values()) == 0


async def test_load_follows_the_calls_and_not_the_clock() -> None:
    """(litellm 40401): counters that expire sent 93.7 % of the calls to one of four."""
    router = TokenRouter(replicas(*"abcd"))
    counts: Counter[str] = Counter()

    async def call(seconds: float) -> None:
        async with router.reserve(1_000) as lease:
            counts[lease.replica.name] += 1  # type: ignore[union-attr]
            await anyio.sleep(seconds)

    async with anyio.create_task_group() as tasks:
        for n in range(400):
            tasks.start_soon(call, 120 if n % 4 else 1)
            await anyio.sleep(1)
    assert max(counts.values()) < 160
    assert sum(in_flight(router).values()) == 0


async def test_a_health_check_touches_no_load() -> None:
    """(vllm-router 197): one zeroes the counters of live calls."""
    router = TokenRouter(replicas("a"))
    with router.acquire_nowait(700):
        router.report("a", kv_cache_usage=0.0, running_requests=0, waiting_requests=0)
        router.cooldown("a", 1)
        router.drain("a")
        router.restore("a")
        assert in_flight(router) == {"a": 700}
        assert router.statistics().replicas[0].requests_in_flight == 1
    assert in_flight(router) == {"a": 0}


async def test_a_replica_that_returns_starts_a_new_ledger() -> None:
    """(llm-d 1950): the old call's end takes the new counter to -1."""
    router = TokenRouter(replicas("a", max_requests=5, max_tokens=1_000))
    old = router.acquire_nowait(700)
    router.remove("a")
    router.add(Replica("a", max_requests=5, max_tokens=1_000))
    assert in_flight(router) == {"a": 0}
    new = router.acquire_nowait(1_000)
    old.reconcile(800)
    old.failed()
    old.release()
    assert in_flight(router) == {"a": 1_000}
    assert states(router) == {"a": "up"}
    new.release()
    assert in_flight(router) == {"a": 0}
    assert router.statistics().replicas[0].requests_in_flight == 0


# Ends, however they come.


async def test_the_lease_lives_as_long_as_the_body() -> None:
    """(sglang 9491): the guard is dropped at the headers, while the stream runs."""
    router = TokenRouter(replicas("a"))

    async def stream() -> AsyncIterator[int]:
        async with router.reserve(500) as lease:
            for n in range(3):
                lease.progress(500 + 100 * n)
                yield n

    seen = []
    async for _ in stream():
        seen.append(in_flight(router)["a"])
        await anyio.sleep(1)
    assert seen == [500, 600, 700]
    assert in_flight(router) == {"a": 0}


async def test_a_consumer_that_disappears_leaves_nothing() -> None:
    router = TokenRouter(replicas("a"))

    async def stream() -> AsyncIterator[int]:
        async with router.reserve(500):
            while True:
                await anyio.sleep(1)
                yield 1

    chunks = stream()
    assert await anext(chunks) == 1
    assert in_flight(router) == {"a": 500}
    await chunks.aclose()  # type: ignore[attr-defined]
    assert in_flight(router) == {"a": 0}


async def test_cancelled_in_the_queue_after_the_grant_and_in_the_body() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=10_000)
    router = TokenRouter(replicas("a", max_tokens=500, max_requests=2), max_waiting=9)
    limits = TokenLimits(limiter, router)
    async with Calls() as calls:
        await calls.start(limits, 500, "body", "queued", "granted", "next")
        calls.cancel("queued")
        await wait_all_tasks_blocked()
        calls.cancel("body")
        await wait_all_tasks_blocked()
        assert calls.started == ["body", "granted"]
        calls.leases["granted"].release()  # "next" is granted, but has not resumed
        assert in_flight(router) == {"a": 500}
        assert limiter.statistics().quotas[0].used == 1_500
        calls.cancel("next")
        await wait_all_tasks_blocked()
        assert calls.started == ["body", "granted"]
        assert in_flight(router) == {"a": 0}
        assert router.statistics().replicas[0].requests_in_flight == 0
        assert limiter.statistics().quotas[0].used == 1_000
    assert router.statistics().waiting_calls == 0


async def test_a_cancelled_scope_takes_nothing() -> None:
    router = TokenRouter(replicas("a"))
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with router.reserve(100):
            pytest.fail("it went")
    assert router.statistics().replicas[0].picks == 0


# What fits.


async def test_the_context_window_and_the_capacity_are_two_limits() -> None:
    router = TokenRouter([Replica("a", max_tokens=100_000, context_window=8_192)])
    with router.acquire_nowait(8_192), router.acquire_nowait(8_192):
        pass
    with pytest.raises(RequestTooLarge) as caught:
        await router.acquire(8_193)
    assert (caught.value.cost, caught.value.limit) == (8_193, 8_192)


async def test_the_declared_maximum_has_to_fit_into_the_window() -> None:
    router = TokenRouter([Replica("small", context_window=8_000), Replica("large")])
    short = Usage(input_tokens=5_000, output_tokens=100)
    declared = Usage(input_tokens=5_000, output_tokens=100, max_output_tokens=4_000)
    assert {name_of(router, short) for _ in range(4)} == {"small", "large"}
    assert {name_of(router, declared) for _ in range(4)} == {"large"}


async def test_too_large_for_all_tells_the_largest_that_would_fit() -> None:
    router = TokenRouter(
        [
            Replica("a", max_tokens=1_000, context_window=4_000, model="small"),
            Replica("b", max_tokens=9_000, context_window=8_000, model="small"),
            Replica("c", model="large"),
        ]
    )
    for cost in (8_500, 20_000):
        with pytest.raises(RequestTooLarge) as caught:
            router.acquire_nowait(cost, model="small")
        assert (caught.value.cost, caught.value.limit) == (cost, 8_000)
    with pytest.raises(RequestTooLarge) as caught:
        router.delay(2_000, model="small", exclude=["b"])
    assert caught.value.limit == 1_000
    router.acquire_nowait(caught.value.limit, model="small", exclude=["b"]).release()
    assert name_of(router, 20_000, model="large") == "c"


async def test_a_limiter_of_its_own_limits_what_a_replica_takes() -> None:
    router = TokenRouter(
        [
            Replica("a", limiter=TokenRateLimiter(tokens_per_minute=100)),
            Replica("b", limiter=TokenRateLimiter(tokens_per_minute=1_000)),
        ]
    )
    assert {name_of(router, 500), name_of(router, 500)} == {"b"}
    with pytest.raises(RequestTooLarge) as caught:
        router.acquire_nowait(1_001)
    assert caught.value.limit == 1_000
    with pytest.raises(RequestTooLarge, match="can never pass"):
        TokenLimits(TokenSemaphore(10), router).acquire_nowait(11)


async def test_no_replica_for_a_model_is_said_at_once() -> None:
    router = TokenRouter([Replica("a", model="llama-*")])
    with pytest.raises(NoReplica, match=r"no replica serves the model 'gpt-5', only llama-\*"):
        await router.acquire(10, model="gpt-5")
    with pytest.raises(NoReplica, match="add one"):
        TokenRouter([]).acquire_nowait(10)
    assert name_of(router, model="llama-3.1-8b") == name_of(router) == "a"


async def test_all_excluded_is_said_at_once() -> None:
    router = TokenRouter(
        [Replica("a", max_tokens=900, context_window=500), Replica("b", model="m")]
    )
    with pytest.raises(NoReplica, match="every replica for this call is excluded") as caught:
        router.acquire_nowait(10, exclude={"a", "b"})
    assert caught.value.largest is None
    with pytest.raises(NoReplica) as caught:
        router.acquire_nowait(10, model="x", exclude=["a"])
    assert caught.value.largest == 500
    assert pickle.loads(pickle.dumps(caught.value)).largest == 500


async def test_patterns_of_models() -> None:
    router = TokenRouter(
        [Replica("any"), Replica("one", model="m[1]"), Replica("family", model="llama-3.?-8b")]
    )
    assert {name_of(router, model="m[1]") for _ in range(4)} == {"any", "one"}
    assert {name_of(router, model="llama-3.1-8b") for _ in range(4)} == {"any", "family"}
    assert {name_of(router, model="else") for _ in range(4)} == {"any"}


# Who waits for whom.


async def test_a_full_model_does_not_delay_another() -> None:
    router = TokenRouter(
        [Replica("a", max_tokens=500, model="A"), Replica("b", max_tokens=500, model="B")]
    )
    async with Calls() as calls:
        await calls.start(router, 500, "a1", "a2", model="A")
        assert await calls.start(router, 500, "b1", model="B") == ["a1", "b1"]
        assert await calls.end("b1") == ["a1", "b1"]
        assert await calls.end("a1") == ["a1", "b1", "a2"]


@pytest.mark.parametrize(
    "small",
    [
        {"max_tokens": 500},
        {"max_tokens": 700, "context_window": 600, "max_requests": 3},
        {"limiter": 500},
    ],
    ids=["capacity", "window", "quota"],
)
async def test_a_call_that_fits_one_replica_does_not_idle_the_others(
    small: dict[str, Any],
) -> None:
    if limit := small.get("limiter"):
        small = {"limiter": TokenRateLimiter(tokens_per_minute=limit)}
    router = TokenRouter([Replica("small", **small), Replica("large", max_tokens=1_000)])
    async with Calls() as calls:
        await calls.start(router, 400, "1", exclude=["small"])
        await calls.start(router, 700, "large")
        await calls.start(router, 100, "2", "3", "4")
        assert calls.started == ["1", "2", "3", "4"]
        assert in_flight(router) == {"small": 300, "large": 400}
        await calls.start(router, 400, "5")  # no room at small, and large is waited for
        assert calls.started == ["1", "2", "3", "4"]
        assert await calls.end("1") == ["1", "2", "3", "4", "large"]
        assert in_flight(router) == {"small": 300, "large": 700}


async def test_nobody_overtakes_where_an_earlier_one_waits() -> None:
    """Also not at another replica that it could use."""
    router = TokenRouter(replicas("a", "b", max_tokens=1_000))
    async with Calls() as calls:
        await calls.start(router, 800, "a1", "b1")
        await calls.start(router, 900, "large", "large too")
        assert await calls.start(router, 200, "small") == ["a1", "b1"]
        for limiter in (router, TokenLimits(router, TokenSemaphore(10_000))):
            with pytest.raises(anyio.WouldBlock):
                limiter.acquire_nowait(200)
        assert await calls.end("b1") == ["a1", "b1", "large"]
        assert await calls.end("a1") == ["a1", "b1", "large", "large too"]
        assert await calls.end("large") == ["a1", "b1", "large", "large too", "small"]


async def test_whoever_waits_is_served_by_whichever_replica_is_free_first() -> None:
    router = TokenRouter(replicas("a", "b", "c", max_tokens=500))
    async with Calls() as calls:
        await calls.start(router, 500, "a", "b", "c", "1", "2", "3", "4")
        for n, name in enumerate("cab"):
            await calls.end(name)
            freed = calls.leases[name].replica
            assert calls.leases[str(n + 1)].replica is freed
        assert calls.started == ["a", "b", "c", "1", "2", "3"]


async def test_order_is_arrival_and_nobody_barges_in() -> None:
    router = TokenRouter(replicas("a", "b", max_tokens=100))
    names = [str(n) for n in range(40)]
    async with Calls() as calls:
        await calls.start(router, 60, *names)
        for name in names[:-2]:
            await calls.end(name)
        assert calls.started == names


async def test_lanes_can_age() -> None:
    """(GIE 1861, llm-d-router 1995): strict priority starves batch traffic."""
    router = TokenRouter(replicas("a", max_tokens=100), order=Fifo(lane_seconds=5))
    async with Calls() as calls:
        await calls.start(router, 100, "first")
        await calls.start(router, 100, "batch", priority=1)
        await calls.start(router, 100, "now")
        await anyio.sleep(6)
        await calls.start(router, 100, "later")
        await calls.end("first", "now", "batch")
        assert calls.started == ["first", "now", "batch", "later"]


async def test_replicas_may_share_one_limiter() -> None:
    """(litellm 34399, 7669): a retry goes to a sibling at once, and fails for the same reason."""
    key = TokenRateLimiter(tokens_per_minute=1_000)
    router = TokenRouter([Replica("a", limiter=key), Replica("b", limiter=key), Replica("c")])
    with router.acquire_nowait(1_000, exclude=["c"]) as lease:
        assert router.delay(500, exclude=["c"]) == 60
        assert router.delay(500) == 0
    async with Calls() as calls:
        await calls.start(router, 500, "retry", exclude=["c", lease.replica.name])  # type: ignore[union-attr]
        assert await calls.start(router, 500, "elsewhere") == ["elsewhere"]
        await anyio.sleep(60)
        await wait_all_tasks_blocked()
        assert calls.started == ["elsewhere", "retry"]
        assert key.statistics().quotas[0].used == 500


async def test_a_limiter_passed_beside_the_router_is_charged_once() -> None:
    key, semaphore = TokenRateLimiter(tokens_per_minute=1_000), TokenSemaphore(900)
    router = TokenRouter(
        [Replica("a", limiter=TokenLimits(key, semaphore)), Replica("b", limiter=key)]
    )
    limits = TokenLimits(key, semaphore, router, TokenLimits(router))
    async with limits.reserve(600) as lease:
        assert key.statistics().quotas[0].used == 600
        assert semaphore.statistics().tokens_in_flight == 600
        with pytest.raises(anyio.WouldBlock):
            limits.acquire_nowait(500)
        lease.reconcile(300)
        assert key.statistics().quotas[0].used == 300
        assert semaphore.statistics().tokens_in_flight == 300
        limits.acquire_nowait(500).cancel()
    assert key.statistics().quotas[0].used == 300
    assert semaphore.statistics().tokens_in_flight == 0


async def test_all_or_nothing_over_limits_and_router() -> None:
    semaphore, rate = TokenSemaphore(1_000), TokenRateLimiter(Quota(1_000, by="tenant"))
    router = TokenRouter(replicas("a", "b", max_tokens=500))
    limits = TokenLimits(semaphore, rate, router)
    async with Calls() as calls:
        await calls.start(limits, 500, "a1", "a2", "a3", tenant="a")
        assert calls.started == ["a1", "a2"]
        assert rate.statistics().quotas[0].used == 1_000
        assert semaphore.statistics().tokens_in_flight == 1_000
        await calls.end("a1")  # a3 waits for its quota, and bars nobody from the replica
        await calls.start(limits, 500, "b1", tenant="b")
        assert calls.started == ["a1", "a2", "b1"]
        await calls.end("a2", "b1")
        assert calls.started == ["a1", "a2", "b1"]
        await anyio.sleep(60)
        await wait_all_tasks_blocked()
        assert calls.started == ["a1", "a2", "b1", "a3"]
    assert sum(in_flight(router).values()) == semaphore.statistics().tokens_in_flight == 0


async def test_a_tenants_quota_of_a_replica() -> None:
    router = TokenRouter(
        [
            Replica("a", limiter=TokenRateLimiter(Quota(100, by="tenant"))),
            Replica("b", limiter=TokenRateLimiter(Quota(100, by="tenant"))),
        ]
    )
    first = {name_of(router, 100, tenant="x"), name_of(router, 100, tenant="x")}
    assert first == {"a", "b"}
    assert router.delay(100, tenant="x") == 60
    assert router.delay(100, tenant="y") == 0


async def test_waiting_is_bounded() -> None:
    router = TokenRouter(replicas("a", max_tokens=100), max_waiting=1)
    async with Calls() as calls:
        await calls.start(router, 100, "1", "2", "3")
        assert isinstance(calls.errors["3"], QueueFull)
        calls.cancel("2")
        await wait_all_tasks_blocked()
        with pytest.raises(WaitTimeout):
            await router.acquire(100, max_wait=0)
        with pytest.raises(WaitTimeout) as caught:
            await router.acquire(100, max_wait=5)
        assert caught.value.retry_after is None
    router.cooldown("a", 10)
    with pytest.raises(WaitTimeout) as caught:
        await router.acquire(100, max_wait=5)
    assert caught.value.retry_after == pytest.approx(10)


async def test_a_call_without_tokens_occupies_one() -> None:
    """So that it is seen, and goes to no replica that takes nothing."""
    router = TokenRouter(replicas("a", max_tokens=100))
    with router.acquire_nowait(99), router.acquire_nowait(0), pytest.raises(anyio.WouldBlock):
        router.acquire_nowait(Usage())
    router.drain("a")
    with pytest.raises(anyio.WouldBlock):
        router.acquire_nowait(0)


async def test_small_calls_fill_gaps_while_the_first_waits_for_a_window() -> None:
    """As at any limiter: it goes no later for it."""
    router = TokenRouter(
        [
            Replica("a", limiter=TokenRateLimiter(tokens_per_minute=100)),
            Replica("b", limiter=TokenRateLimiter(tokens_per_minute=100)),
        ]
    )
    async with Calls() as calls:
        await calls.start(router, 60, "a", exclude=["b"])
        await anyio.sleep(10)
        await calls.start(router, 60, "b", exclude=["a"])
        await calls.start(router, 80, "large")
        await calls.start(router, 40, "1")  # goes to b: large will go to a
        await calls.start(router, 40, "2")
        assert calls.started == ["a", "b", "1"]
        assert calls.leases["1"].replica is router.replicas[1]
        await anyio.sleep(50)
        await wait_all_tasks_blocked()
        assert calls.started == ["a", "b", "1", "large"]
        assert calls.leases["large"].waited == pytest.approx(50)


async def test_nobody_fills_a_gap_where_the_first_could_go_any_time() -> None:
    """Somebody may leave b before the quota of a has recovered."""
    router = TokenRouter(
        [
            Replica("a", limiter=TokenRateLimiter(tokens_per_minute=100)),
            Replica("b", max_tokens=100),
        ]
    )
    async with Calls() as calls:
        await calls.start(router, 60, "a", exclude=["b"])
        await calls.start(router, 60, "b", exclude=["a"])
        await calls.start(router, 80, "large")
        assert await calls.start(router, 40, "small") == ["a", "b"]
        assert sorted(await calls.end("b")) == ["a", "b", "large", "small"]
        assert calls.leases["large"].replica is router.replicas[1]


async def test_alone_through_limits() -> None:
    router = TokenRouter([Replica("a", max_tokens=100), Replica("b", context_window=400)])
    router.drain("b")
    limits = TokenLimits(TokenSemaphore(200), router, oversize="alone")
    async with Calls() as calls:
        await calls.start(limits, 50, "first")
        await calls.start(limits, 300, "large", "large too")
        assert calls.started == ["first"]
        assert await calls.end("first") == ["first", "large"]
        assert in_flight(router) == {"a": 300, "b": 0}
        with pytest.raises(RequestTooLarge, match="context window"):
            limits.acquire_nowait(500, exclude=["a"])
        assert await calls.end("large") == ["first", "large", "large too"]


# Limits that change, while somebody waits.


@pytest.mark.parametrize("kind", ["semaphore", "quota"])
async def test_a_limit_that_is_raised_opens_a_way(kind: str) -> None:
    semaphore, rate = TokenSemaphore(100), TokenRateLimiter(tokens_per_minute=100)
    limiter = semaphore if kind == "semaphore" else rate
    router = TokenRouter([Replica("a", limiter=limiter), Replica("b", max_tokens=500)])
    async with Calls() as calls:
        await calls.start(router, 500, "1", "2")
        assert calls.started == ["1"]
        semaphore.max_tokens = 1_000
        rate.set_limit("tokens", 1_000)
        await wait_all_tasks_blocked()
        assert calls.started == ["1", "2"]
        assert in_flight(router) == {"a": 500, "b": 500}


async def test_a_limit_that_is_lowered_leaves_the_other_ways() -> None:
    semaphore = TokenSemaphore(800)
    router = TokenRouter([Replica("a", limiter=semaphore), Replica("b", max_tokens=900)])
    async with Calls() as calls:
        await calls.start(router, 800, "a", "b", "1")
        await calls.start(router, 800, "2", exclude=["b"])
        semaphore.max_tokens = 100
        await wait_all_tasks_blocked()
        assert calls.errors.keys() == {"2"}
        assert isinstance(calls.errors["2"], RequestTooLarge)
        await calls.start(router, 50, "3")  # nobody who could use a waits for it
        assert calls.started == ["a", "b"]
        on = {name: calls.leases[name].replica.name for name in "ab"}  # type: ignore[union-attr]
        await calls.end(*(name for name in "ab" if on[name] == "a"))
        assert calls.started == ["a", "b", "3"]
        assert await calls.end(*(name for name in "ab" if on[name] == "b")) == ["a", "b", "3", "1"]


async def test_a_semaphore_of_a_replica_may_count_requests_later() -> None:
    semaphore = TokenSemaphore(1_000)
    beside = TokenSemaphore(1_000)
    router = TokenRouter([Replica("a", limiter=semaphore)])
    limits = TokenLimits(beside, router)
    async with Calls() as calls:
        await calls.start(limits, 900, "1", "2")
        semaphore.max_requests = 1
        beside.max_requests = 2
        assert await calls.end("1") == ["1", "2"]
        assert semaphore.statistics().requests_in_flight == 1
        await calls.start(router, 10, "3")
        assert calls.started == ["1", "2"]
        assert await calls.end("2") == ["1", "2", "3"]
    assert semaphore.statistics().requests_in_flight == 0
    assert beside.statistics().requests_in_flight == 0


# Health.


async def test_one_that_fails_fast_does_not_attract_everything() -> None:
    router = TokenRouter(replicas("good", "bad"))
    counts: Counter[str] = Counter()

    async def call() -> None:
        async with router.reserve(1_000) as lease:
            assert lease.replica is not None
            counts[lease.replica.name] += 1
            if lease.replica.name == "bad":
                lease.failed()
            else:
                await anyio.sleep(2)

    async with anyio.create_task_group() as tasks:
        for _ in range(1_000):
            tasks.start_soon(call)
            await anyio.sleep(0.1)
    assert counts["bad"] < 10


async def test_each_further_failure_doubles_the_cooldown() -> None:
    router = TokenRouter(replicas("a", "b"))
    cooled = []
    for _ in range(9):
        with router.acquire_nowait(1, exclude=["b"]) as lease:
            lease.failed()
        cooled.append(router.statistics().replicas[0].cooling_for)
        await anyio.sleep(cooled[-1])
    assert cooled == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60])
    router.acquire_nowait(1, exclude=["b"]).release()
    with router.acquire_nowait(1, exclude=["b"]) as lease:
        lease.failed()
    assert router.statistics().replicas[0].cooling_for == pytest.approx(1)


async def test_calls_that_fail_together_count_once() -> None:
    router = TokenRouter(replicas("a", "b"))
    leases = [router.acquire_nowait(1, exclude=["b"]) for _ in range(50)]
    for lease in leases:
        lease.failed()
        lease.failed()
        lease.release()
    first = router.statistics().replicas[0]
    assert first.failures == 1
    assert first.cooling_for == pytest.approx(1)


async def test_calls_from_before_a_failure_are_no_proof_of_health() -> None:
    router = TokenRouter(replicas("a", "b"))
    old = router.acquire_nowait(1, exclude=["b"])
    with router.acquire_nowait(1, exclude=["b"]) as lease:
        lease.failed()
    old.release()
    assert router.statistics().replicas[0].failures == 1


async def test_a_failure_says_how_long() -> None:
    router = TokenRouter(replicas("a", "b"))
    with router.acquire_nowait(1, exclude=["b"]) as lease:
        lease.failed(retry_after=30)
    assert router.statistics().replicas[0].cooling_for == pytest.approx(30)
    for wrong in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match="retry_after"):
            lease.failed(retry_after=wrong)
    with pytest.raises(TypeError, match="retry_after"):
        lease.failed(retry_after="30")  # type: ignore[arg-type]


async def test_the_last_one_up_is_never_cooled() -> None:
    router = TokenRouter([*replicas("a", "b"), Replica("other", model="m")])
    for name in "ab":
        with router.acquire_nowait(1, exclude=[n for n in ("a", "b", "other") if n != name]) as x:
            x.failed(retry_after=100)
    assert states(router) == {"a": "cooling", "b": "cooling", "other": "up"}
    router = TokenRouter([*replicas("a", "b"), Replica("other", model="m")])
    for name in "ab":
        with router.acquire_nowait(1, model="x", exclude={"a", "b"} - {name}) as lease:
            lease.failed(retry_after=100)
    assert states(router) == {"a": "cooling", "b": "up", "other": "up"}
    assert name_of(router, model="x") == "b"


async def test_a_failure_without_a_router_changes_nothing() -> None:
    semaphore = TokenSemaphore(10)
    with semaphore.acquire_nowait(10) as lease:
        lease.failed()
        assert semaphore.statistics().tokens_in_flight == 10
    reserved = semaphore.reserve(1)
    with pytest.raises(RuntimeError, match="failed` before anything is reserved"):
        reserved.failed()
    assert reserved.replica is None
    async with reserved:
        assert reserved.replica is None


async def test_a_failure_through_limits_cools_the_replica() -> None:
    router = TokenRouter(replicas("a", "b"))
    limits = TokenLimits(TokenSemaphore(100), router, TokenRateLimiter(tokens_per_minute=1_000))
    async with limits.reserve(10) as lease:
        lease.failed()
        lease.reconcile(20)
        assert sum(in_flight(router).values()) == 20
    assert sorted(states(router).values()) == ["cooling", "up"]
    assert sum(in_flight(router).values()) == 0


async def test_a_cooldown_ends_by_itself_and_whoever_waits_goes() -> None:
    router = TokenRouter(replicas("a", "b", max_tokens=100))
    router.cooldown("a", 10)
    router.cooldown("b", 20)
    assert states(router) == {"a": "cooling", "b": "cooling"}
    async with Calls() as calls:
        assert await calls.start(router, 100, "1", "2", "3") == []
        await anyio.sleep(10)
        await wait_all_tasks_blocked()
        assert calls.started == ["1"]
        router.cooldown("b", 5)  # it only ever extends
        router.cooldown("b", 0)
        await anyio.sleep(10)
        await wait_all_tasks_blocked()
        assert calls.started == ["1", "2"]


async def test_a_drained_replica_takes_nothing_until_it_is_restored() -> None:
    router = TokenRouter(replicas("a", "b"))
    held = router.acquire_nowait(10, exclude=["b"])
    router.drain("a")
    router.cooldown("a", 1)
    await anyio.sleep(100)
    assert states(router) == {"a": "drained", "b": "up"}
    assert {name_of(router) for _ in range(4)} == {"b"}
    router.drain("b")
    assert router.delay(10) == math.inf
    async with Calls() as calls:
        assert await calls.start(router, 10, "waits") == []
        router.restore("a")
        await wait_all_tasks_blocked()
        assert calls.started == ["waits"]
    held.release()
    assert in_flight(router) == {"a": 0, "b": 0}


async def test_a_restored_replica_starts_slowly() -> None:
    router = TokenRouter(replicas("a", "b"))
    router.drain("a")
    router.restore("a")
    shares = []
    for _ in range(3):
        leases = [router.acquire_nowait(1_000) for _ in range(100)]
        used = in_flight(router)
        shares.append(used["a"] / used["b"])
        for lease in leases:
            lease.release()
        await anyio.sleep(15)
    assert shares == pytest.approx([0.1, 0.5, 1.0], abs=0.03)


# Reports.


async def test_pressure_counts_on_an_empty_ledger() -> None:
    router = TokenRouter(replicas("a", "b", max_tokens=50_000))
    router.report("a", kv_cache_usage=0.99)
    router.report("b", kv_cache_usage=0.10)
    assert {name_of(router) for _ in range(10)} == {"b"}
    with router.acquire_nowait(20_000, exclude=["a"]):
        assert {name_of(router) for _ in range(10)} == {"b"}
    unlimited = TokenRouter(replicas("a", "b"))
    unlimited.report("a", kv_cache_usage=0.99)
    unlimited.report("b", kv_cache_usage=0.0)
    assert {name_of(unlimited) for _ in range(10)} == {"b"}


async def test_a_report_adds_only_what_the_ledger_does_not_know() -> None:
    router = TokenRouter(replicas("a", "b", max_tokens=10_000))
    leases = [router.acquire_nowait(1_000, exclude=["b"]) for _ in range(4)]
    router.report("a", kv_cache_usage=0.4, running_requests=3, waiting_requests=1)
    router.report("b", kv_cache_usage=0.0, running_requests=0)
    before = router.statistics().replicas[0].load
    assert name_of(router) == "b"
    assert router.statistics().replicas[0].load == before == 4_000 + 5 * 100
    for lease in leases:
        lease.release()
    assert {name_of(router) for _ in range(4)} == {"a", "b"}


async def test_others_sequences_count() -> None:
    router = TokenRouter(replicas("a", "b"))
    router.report("a", running_requests=30, waiting_requests=10)
    router.report("b", running_requests=5)
    with router.acquire_nowait(3_000, exclude=["a"]):
        assert name_of(router) == "b"
    with router.acquire_nowait(4_000, exclude=["a"]):
        assert name_of(router) == "a"


async def test_a_stale_report_of_idleness_attracts_nothing() -> None:
    """(GIE 1497): reports age out, and unknown is not idle."""
    router = TokenRouter(replicas("idle once", "busy", max_tokens=50_000))
    router.report("idle once", kv_cache_usage=0.0)
    router.report("busy", kv_cache_usage=0.6)
    assert {name_of(router) for _ in range(4)} == {"idle once"}
    await anyio.sleep(14.9)
    router.report("busy", kv_cache_usage=0.6)
    assert {name_of(router) for _ in range(4)} == {"idle once"}
    await anyio.sleep(0.1)
    assert {name_of(router) for _ in range(4)} == {"idle once", "busy"}
    await anyio.sleep(15)
    assert {name_of(router) for _ in range(4)} == {"idle once", "busy"}


async def test_stale_reports_send_no_herd_anywhere() -> None:
    """(vllm-router 178): loads polled every 5 s, and all go to whoever was least loaded then."""
    router = TokenRouter(replicas(*"abcd", max_tokens=1_000_000))
    for name, usage in zip("abcd", (0.001, 0.002, 0.002, 0.002), strict=True):
        router.report(name, kv_cache_usage=usage)
    leases = [router.acquire_nowait(1_000) for _ in range(100)]
    used = in_flight(router)
    assert max(used.values()) - min(used.values()) <= 2_000
    for lease in leases:
        lease.release()


# Preferences.


async def test_an_affinity_stays_where_it_was_until_that_is_twice_as_loaded() -> None:
    router = TokenRouter(replicas("a", "b", "c"))
    home = name_of(router, affinity="session")
    assert {name_of(router, affinity="session") for _ in range(5)} == {home}
    others = {"a", "b", "c"} - {home}
    with router.acquire_nowait(1_000, exclude=others):
        assert name_of(router, 1_000, affinity="session") == home
        with router.acquire_nowait(1, exclude=others):
            moved = name_of(router, 1_000, affinity="session")
            assert moved != home
    assert {name_of(router, affinity="session") for _ in range(5)} == {moved}


async def test_any_number_of_models_and_tenants_leaves_few_paths() -> None:
    router = TokenRouter(replicas(*"abcd"))
    limits = TokenLimits(TokenRateLimiter(Quota(1_000, by="tenant")), router)
    for number in range(3_000):
        for limiter in (router, limits):
            limiter.acquire_nowait(1, model=f"model {number}", tenant=number).release()
    assert len(router._paths) <= len(limits._paths) <= 1_024


async def test_affinities_are_forgotten_in_the_end() -> None:
    router = TokenRouter(replicas("a", "b"))
    for session in range(10_050):
        router.acquire_nowait(1, affinity=session).release()
    assert len(router._fleet._affinities) == 10_000
    router.remove("a")
    assert len(router._fleet._affinities) == 5_000
    assert name_of(router, affinity=10_048) == name_of(router, affinity=10_049) == "b"


async def test_an_affinity_does_not_lead_to_one_that_is_down_full_or_gone() -> None:
    router = TokenRouter(replicas("a", "b", max_tokens=1_000))
    home = name_of(router, affinity="x")
    other = "ab".replace(home, "")
    with router.acquire_nowait(950, exclude=[other]):
        assert name_of(router, affinity="x") == other
    assert name_of(router, affinity="x") == other
    router.drain(other)
    assert name_of(router, affinity="x") == home
    router.remove(home)
    router.add(Replica(home, max_tokens=1_000))
    assert name_of(router, affinity="x") == home
    assert name_of(router, affinity="x", exclude=[other]) == home


async def test_a_region_is_preferred_until_it_is_twice_as_loaded() -> None:
    router = TokenRouter(
        [Replica("e1", region="eu"), Replica("e2", region="eu"), Replica("u1", region="us")]
    )
    assert {name_of(router, region="eu") for _ in range(6)} == {"e1", "e2"}
    assert {name_of(router, region="us") for _ in range(6)} == {"u1"}
    assert {name_of(router, region="elsewhere") for _ in range(6)} == {"e1", "e2", "u1"}
    with router.acquire_nowait(5_000, region="us"):
        assert name_of(router, region="us") in ("e1", "e2")
    with router.acquire_nowait(50, region="us"):
        assert name_of(router, region="us") == "u1"
    assert name_of(router, affinity="x", region="us") == "u1"
    assert name_of(router, affinity="x", region="eu") == "u1"


async def test_preferences_hold_for_those_who_wait() -> None:
    router = TokenRouter([Replica("e", region="eu"), Replica("u", region="us")])
    router.drain("e")
    router.drain("u")
    async with Calls() as calls:
        await calls.start(router, 100, "eu", region="eu")
        await calls.start(router, 100, "us", region="us")
        router.restore("u")
        await wait_all_tasks_blocked()
        assert {calls.leases[name].replica.name for name in ("eu", "us")} == {"u"}  # type: ignore[union-attr]


# Replicas that come and go.


async def test_one_that_is_added_takes_those_who_wait() -> None:
    router = TokenRouter([Replica("a", max_tokens=500, model="A")])
    async with Calls() as calls:
        await calls.start(router, 500, "1", "2", "3", model="A")
        await calls.start(router, 400, "4")
        router.add(Replica("b", max_tokens=1_000))
        await wait_all_tasks_blocked()
        assert sorted(calls.started) == ["1", "2", "3"]
        assert in_flight(router) == {"a": 500, "b": 1_000}
        with pytest.raises(ValueError, match="there is a replica 'b' already"):
            router.add(Replica("b"))
        assert sorted(await calls.end("2")) == ["1", "2", "3", "4"]


async def test_one_that_is_removed_fails_those_who_have_nowhere_else_to_go() -> None:
    router = TokenRouter(
        [Replica("a", max_tokens=500), Replica("b", max_tokens=900), Replica("m", model="m")]
    )
    async with Calls() as calls:
        await calls.start(router, 500, "on a", model="x", exclude=["b"])
        await calls.start(router, 900, "on b", model="x")
        await calls.start(router, 900, "b only", model="x")
        await calls.start(router, 100, "either", model="x")
        await calls.start(router, 100, "excludes a", model="x", exclude=["a"])
        router.remove("b")
        await wait_all_tasks_blocked()
        assert {name: type(error) for name, error in calls.errors.items()} == {
            "b only": RequestTooLarge,
            "excludes a": NoReplica,
        }
        assert calls.started == ["on a", "on b"]
        router.remove("a")
        await wait_all_tasks_blocked()
        assert isinstance(calls.errors["either"], NoReplica)
        assert router.statistics().waiting_calls == 0
        await calls.end("on a", "on b")
    with pytest.raises(ValueError, match="no replica is called 'a': 'm'"):
        router.remove("a")


async def test_those_who_wait_keep_their_place_when_replicas_come_and_go() -> None:
    router = TokenRouter(replicas("a", max_tokens=100))
    names = [str(n) for n in range(10)]
    async with Calls() as calls:
        await calls.start(router, 100, *names)
        for n, name in enumerate(names[:-1]):
            router.add(Replica(f"drained {n}", max_tokens=100))
            router.drain(f"drained {n}")
            if n % 2:
                router.remove(f"drained {n}")
            taken = len(calls.started)
            await calls.end(name)
            assert len(calls.started) >= taken
        await wait_all_tasks_blocked()
        assert sorted(calls.started, key=int) == names


async def test_an_error_of_an_added_replica_is_the_waiters() -> None:
    """A quota that cannot price what a waiter said: as if it had asked now."""
    router = TokenRouter(replicas("a", max_tokens=100))

    errors: list[TypeError] = []

    async def ask() -> None:
        try:
            await router.acquire(100)
        except TypeError as error:
            errors.append(error)

    async with Calls() as calls, anyio.create_task_group() as tasks:
        await calls.start(router, 100, "1")
        tasks.start_soon(ask)
        await calls.start(router, Usage(input_tokens=100), "2")
        limiter = TokenRateLimiter(Quota(1_000, of="input_tokens"))
        router.add(Replica("b", limiter=limiter))
        await wait_all_tasks_blocked()
        assert "has to know its parts" in str(errors[0])
        assert calls.started == ["1", "2"]
        assert limiter.statistics().quotas[0].used == 100


# Input, and what is shown.


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"name": ""}, ValueError),
        ({"name": 1}, TypeError),
        ({"max_tokens": 0}, ValueError),
        ({"max_tokens": True}, TypeError),
        ({"context_window": -1}, ValueError),
        ({"max_requests": 1.5}, TypeError),
        ({"tokens_per_second": 0}, ValueError),
        ({"tokens_per_second": math.nan}, ValueError),
        ({"tokens_per_second": "9"}, TypeError),
        ({"model": 3}, TypeError),
        ({"model": ""}, ValueError),
        ({"region": 3}, TypeError),
        ({"limiter": 5}, TypeError),
        ({"limiter": InFlightGate(5)}, TypeError),
        ({"limiter": TokenRouter([])}, ValueError),
        ({"limiter": TokenLimits(TokenRouter([]))}, ValueError),
    ],
)
def test_a_replica_that_makes_no_sense(wrong: dict[str, object], error: type) -> None:
    with pytest.raises(error, match=next(iter(wrong))):
        Replica(**{"name": "a"} | wrong)  # type: ignore[arg-type]


def test_a_router_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="names are unique"):
        TokenRouter(replicas("a", "a"))
    with pytest.raises(TypeError, match="takes Replica"):
        TokenRouter(["a"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="one router"):
        TokenLimits(TokenRouter([]), TokenRouter([]))


@pytest.mark.parametrize("exclude", ["ab", [Replica("a")], [1]])
async def test_exclude_takes_names(exclude: object) -> None:
    router = TokenRouter(replicas("a", "b"))
    with pytest.raises(TypeError, match="exclude must be a collection of replicas' names"):
        router.acquire_nowait(10, exclude=exclude)  # type: ignore[arg-type]
    assert in_flight(router) == {"a": 0, "b": 0}


@pytest.mark.parametrize("wrong", [{"affinity": []}, {"region": 5}, {"model": 5}])
async def test_a_wish_that_makes_no_sense_does_not_wait(wrong: dict[str, Any]) -> None:
    router = TokenRouter(replicas("a", max_tokens=100))
    with router.acquire_nowait(100):
        for ask in (router.delay, router.acquire_nowait):
            with pytest.raises(TypeError, match=next(iter(wrong))):
                ask(100, **wrong)
        with pytest.raises(TypeError, match=next(iter(wrong))):
            await router.acquire(100, **wrong)
    assert router.statistics().waiting_calls == 0


async def test_whom_to_exclude_is_what_was_said_when_asked() -> None:
    router = TokenRouter(replicas("a", "b", max_tokens=100))
    tried = {"a"}
    async with Calls() as calls:
        await calls.start(router, 100, "a", "b", "waits", exclude=tried)
        tried.add("b")
        router.add(Replica("c", max_tokens=10))
        await wait_all_tasks_blocked()
        assert calls.started == ["a"]
        await calls.end("a")
        assert calls.started == ["a", "b"]
        assert not calls.errors


@pytest.mark.parametrize(
    ("report", "error"),
    [
        ({"kv_cache_usage": 99}, ValueError),
        ({"kv_cache_usage": -0.1}, ValueError),
        ({"kv_cache_usage": math.nan}, ValueError),
        ({"kv_cache_usage": "0.5"}, TypeError),
        ({"kv_cache_usage": True}, TypeError),
        ({"running_requests": -1}, ValueError),
        ({"waiting_requests": 1.5}, TypeError),
    ],
)
async def test_a_report_that_makes_no_sense(report: dict[str, object], error: type) -> None:
    router = TokenRouter(replicas("a", "b"))
    with pytest.raises(error, match=next(iter(report))):
        router.report("a", **report)  # type: ignore[arg-type]
    assert {name_of(router), name_of(router)} == {"a", "b"}


async def test_unknown_names() -> None:
    router = TokenRouter(replicas("a"))
    for act in (router.drain, router.restore, router.remove, router.report):
        with pytest.raises(ValueError, match="no replica is called 'x': 'a'"):
            act("x")
    with pytest.raises(ValueError, match="no replica is called"):
        router.cooldown("x", 1)
    with pytest.raises(ValueError, match="seconds"):
        router.cooldown("a", -1)
    assert states(router) == {"a": "up"}


def test_a_target_is_never_shown() -> None:
    replica = Replica("a", target="sk-secret", max_tokens=10, model="m", region="eu")
    router = TokenRouter([replica])
    with router.acquire_nowait(5) as lease:
        assert lease.replica is replica
        assert replica.target == "sk-secret"
        shown = [repr(each) for each in (replica, router, lease, router._fleet["a"])]
        shown += [repr(router.statistics()), str(replica), repr(TokenLimits(router))]
    assert "secret" not in "".join(shown)
    assert repr(replica) == "Replica(name='a', max_tokens=10, model='m', region='eu')"


def test_live_numbers() -> None:
    router = TokenRouter([*replicas("a", "b", max_tokens=1_000), Replica("c")])
    with router.acquire_nowait(500, exclude=["b", "c"]):
        router.drain("c")
        assert repr(router) == (
            "<TokenRouter: 2 of 3 replicas up, 500 tokens in flight, 0 waiting>"
        )
        statistics = router.statistics()
        assert [each.utilisation for each in statistics.replicas] == [0.5, 0.0, None]
        assert statistics.utilisation_variance == 0.0625
        assert statistics.replicas[0].picks == statistics.replicas[0].requests_in_flight == 1
    assert TokenRouter([]).statistics().utilisation_variance == 0.0
    assert [each.name for each in router.replicas] == ["a", "b", "c"]


def test_replicas_compare_by_their_settings() -> None:
    assert Replica("a", target=[1]) == Replica("a", target=[2])
    assert hash(Replica("a", target=[1])) == hash(Replica("a"))
    assert pickle.loads(pickle.dumps(Replica("a", max_tokens=5))) == Replica("a", max_tokens=5)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(TokenRouter([]))


# Runs of the event loop.


def test_in_a_new_run_cooldowns_and_reports_go_on(run: Run) -> None:
    router = TokenRouter(replicas("a", "b", max_tokens=1_000))

    async def first() -> None:
        router.report("a", kv_cache_usage=0.5)
        router.report("b", kv_cache_usage=0.0)
        router.drain("b")
        lease = await router.acquire(700)
        lease._state = "released"  # it goes with the run
        await anyio.sleep(1_000)
        router.cooldown("a", 1_000)

    async def second() -> None:
        assert states(router) == {"a": "cooling", "b": "drained"}
        lease = await router.acquire(700)
        assert 990 < lease.waited < 1_010
        assert in_flight(router) == {"a": 700, "b": 0}
        lease.release()
        assert in_flight(router) == {"a": 0, "b": 0}

    run(first)
    run(second)


def test_in_a_new_run_what_time_changes_goes_on(run: Run) -> None:
    """Its clock starts anew, long before the times that the last one has noted."""
    reports, starts = TokenRouter(replicas("a", "b")), TokenRouter(replicas("a", "b"))

    async def first() -> None:
        await anyio.sleep(1_000)
        reports.report("a", running_requests=0)
        reports.report("b", running_requests=50)
        assert {name_of(reports) for _ in range(4)} == {"a"}
        starts.restore("a")
        assert {name_of(starts) for _ in range(4)} == {"b"}

    async def second() -> None:
        assert {name_of(reports) for _ in range(4)} == {"a"}
        assert {name_of(starts) for _ in range(4)} == {"b"}
        await anyio.sleep(15)
        assert {name_of(reports) for _ in range(4)} == {"a", "b"}
        assert {name_of(starts) for _ in range(4)} == {"b"}
        await anyio.sleep(15)
        assert {name_of(starts) for _ in range(4)} == {"a", "b"}

    run(first)
    run(second)


async def test_what_was_removed_is_kept_alive_by_nobody() -> None:
    class Client:
        pass

    client = Client()
    gone = weakref.ref(client)
    router = TokenRouter([*replicas("a"), Replica("b", target=client)])
    limits = TokenLimits(TokenSemaphore(1_000), router)
    for limiter in (router, limits):
        for model in ("x", "y", None):
            limiter.acquire_nowait(10, model=model, affinity=model).release()
    router.remove("b")
    del client
    gc.collect()
    assert gone() is None


async def test_from_another_thread_nothing_changes() -> None:
    router = TokenRouter(replicas("a", "b"))
    lease = await router.acquire(10)
    calls: list[Callable[[], object]] = [
        lambda: router.cooldown("a", 5),
        lambda: router.drain("a"),
        lambda: router.restore("a"),
        lambda: router.report("a", kv_cache_usage=1.0),
        lambda: router.add(Replica("c")),
        lambda: router.remove("a"),
        lambda: router.acquire_nowait(5),
        lease.release,
        lease.failed,
    ]
    errors: list[RuntimeError] = []

    def others() -> None:
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                errors.append(error)

    before = router.statistics()
    thread = threading.Thread(target=others)
    thread.start()
    thread.join()
    assert len(errors) == len(calls)
    assert all("from_thread" in str(error) for error in errors)
    assert router.statistics() == before
    lease.release()
    assert set(in_flight(router).values()) == {0}


def test_outside_of_any_run() -> None:
    router = TokenRouter(replicas("a", "b"))
    with router.acquire_nowait(5):
        router.add(Replica("c"))
        router.remove("a")
    assert {name_of(router) for _ in range(4)} == {"b", "c"}


# Against a naive model.

ops = st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 39), st.integers(0, 12)), max_size=60)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100)
@given(ops=ops)
def test_any_operations_agree_with_the_naive_model(backend: Backend, ops: list[Op]) -> None:
    run_virtual(backend, drive, ops)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_random_operations_wait_and_choose(backend: Backend) -> None:
    rng = random.Random(7)
    worlds = []
    for _ in range(20):
        ops = [(rng.choice(OPS), rng.randrange(40), rng.randrange(13)) for _ in range(60)]
        worlds.append(run_virtual(backend, drive, ops))
    assert sum(world.waits for world in worlds) > 500
    assert sum(world.choices for world in worlds) > 50
