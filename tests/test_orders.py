"""Who goes first: Fifo and backfill, SmallestFirst, FairShare, priorities and lanes."""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import Any, ClassVar

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.abc import TaskGroup
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calls import Calls
from tests.conftest import BACKENDS, Backend, run_virtual
from tokenflow import (
    FairShare,
    Fifo,
    QueueFull,
    Quota,
    SmallestFirst,
    TokenLimits,
    TokenRateLimiter,
    TokenSemaphore,
)
from tokenflow.limits import Order

pytestmark = pytest.mark.anyio

orders = pytest.mark.parametrize(
    "order", [Fifo(), SmallestFirst(), FairShare()], ids=["fifo", "smallest", "fair"]
)


async def one_by_one(
    order: Order, calls: Iterable[tuple[str, int, str]], priorities: Iterable[int] = ()
) -> list[str]:
    """Queue these (name, tokens, tenant) behind a full semaphore; in which order do they go?

    Each takes all that there is, one after the other, whatever it costs.
    """
    semaphore = TokenSemaphore(10, order=order, oversize="alone")
    went: list[str] = []

    async def call(name: str, tokens: int, options: dict[str, Any]) -> None:
        async with semaphore.reserve(tokens, **options):
            went.append(name)

    async with anyio.create_task_group() as tasks:
        with semaphore.acquire_nowait(10):
            asked = zip(calls, chain(priorities, repeat(0)), strict=False)
            for (name, tokens, tenant), priority in asked:
                options = {"tenant": tenant, "priority": priority}
                tasks.start_soon(call, name, tokens, options)
                await wait_all_tasks_blocked()
    return went


# -- Fifo -------------------------------------------------------------------------------------


async def test_fifo_goes_by_arrival() -> None:
    calls = [(name, 10 + n, "") for n, name in enumerate("abcdef")]
    assert await one_by_one(Fifo(), calls) == [*"abcdef"]


@orders
async def test_priority_is_strict_and_lower_goes_first(order: Order) -> None:
    calls = [(name, 10, name) for name in "abcdef"]
    assert await one_by_one(order, calls, [2, 1, 0, 2, 1, -7]) == [*"fcbead"]


async def window_of(order: Order) -> TokenRateLimiter:
    """60 of 100 used at 0 s; the next call that is larger than 40 waits until 60 s."""
    limiter = TokenRateLimiter(tokens_per_minute=100, order=order)
    limiter.acquire_nowait(60).release()
    await anyio.sleep(1)
    return limiter


async def test_backfill_lets_a_call_go_that_leaves_the_heads_instant_alone() -> None:
    """30 + 60 fit at 60 s, another 30 would not."""
    limiter = await window_of(Fifo())
    async with Calls() as calls:
        assert await calls.start(limiter, 60, "head") == []
        assert await calls.start(limiter, 30, "fits") == ["fits"]
        assert await calls.start(limiter, 11, "would delay it") == ["fits"]
        assert await calls.start(limiter, 10, "just fits") == ["fits", "just fits"]
        await anyio.sleep(59)
        await wait_all_tasks_blocked()
        assert calls.started == ["fits", "just fits", "head"]
        assert calls.leases["head"].waited == 59


@pytest.mark.parametrize(
    "order",
    [Fifo(backfill=False), SmallestFirst(patience=0), FairShare()],
    ids=["fifo", "smallest", "fair"],
)
async def test_without_backfill_nobody_passes_the_head(order: Order) -> None:
    limiter = await window_of(order)
    async with Calls() as calls:
        await calls.start(limiter, 60, "head")
        assert await calls.start(limiter, 10, "small") == []
        await anyio.sleep(59)
        await wait_all_tasks_blocked()
        assert sorted(calls.started) == ["head", "small"]


async def test_only_the_next_sixteen_may_backfill() -> None:
    limiter = await window_of(Fifo())
    async with Calls() as calls:
        await calls.start(limiter, 60, "head", *[f"large {n}" for n in range(15)])
        assert await calls.start(limiter, 10, "the 16th") == ["the 16th"]
        await calls.start(limiter, 60, "large 16")
        assert await calls.start(limiter, 10, "the 17th") == ["the 16th"]
        calls.cancel("large 3")
        await wait_all_tasks_blocked()
        assert calls.started == ["the 16th", "the 17th"]


async def test_who_moves_up_behind_one_that_went_may_backfill() -> None:
    limiter = await window_of(Fifo())
    async with Calls() as calls:
        await calls.start(limiter, 60, "head", *[f"large {n}" for n in range(16)])
        await calls.start(limiter, 10, "first")
        await calls.start(limiter, 60, "large 16")
        await calls.start(limiter, 10, "second")
        calls.cancel("large 3")
        await wait_all_tasks_blocked()
        assert calls.started == ["first"]
        calls.cancel("large 16")
        await wait_all_tasks_blocked()
        assert calls.started == ["first", "second"]


async def test_a_newcomer_whose_priority_puts_it_within_reach_may_backfill() -> None:
    limiter = await window_of(Fifo())
    async with Calls() as calls:
        await calls.start(limiter, 60, "head", priority=-1)
        await calls.start(limiter, 60, *[f"large {n}" for n in range(20)])
        assert await calls.start(limiter, 10, "last") == []
        assert await calls.start(limiter, 10, "urgent", priority=-1) == ["urgent"]


async def test_a_small_call_goes_when_those_between_it_and_the_head_have_left() -> None:
    limiter = await window_of(Fifo())
    async with Calls() as calls:
        large = [f"large {n}" for n in range(17)]
        await calls.start(limiter, 60, "head", *large)
        assert await calls.start(limiter, 5, "small") == []
        calls.cancel(*large)
        await wait_all_tasks_blocked()
        assert calls.started == ["small"]
        assert anyio.current_time() == 1


async def test_a_wait_for_a_release_is_no_known_instant() -> None:
    """golang 56910: behind a large head of a semaphore everybody waits."""
    semaphore = TokenSemaphore(100)
    limits = TokenLimits(semaphore, TokenRateLimiter(tokens_per_minute=1_000))
    async with Calls() as calls:
        await calls.start(limits, 60, "held", "head")
        assert await calls.start(limits, 1, "small") == ["held"]
        assert sorted(await calls.end("held")) == ["head", "held", "small"]


# -- SmallestFirst ----------------------------------------------------------------------------


async def test_small_calls_fill_gaps() -> None:
    calls = [("large", 3_000, ""), ("small", 10, ""), ("middle", 500, "")]
    assert await one_by_one(SmallestFirst(), calls) == ["small", "middle", "large"]


async def test_no_patience_is_order_of_arrival() -> None:
    calls = [("large", 3_000, ""), ("small", 10, ""), ("middle", 500, "")]
    assert await one_by_one(SmallestFirst(patience=0), calls) == ["large", "small", "middle"]


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3_000), st.integers(1, 2_000), st.integers(1, 800)),
        min_size=5,
        max_size=25,
    ),
    patience=st.sampled_from([0.0, 0.3, 3.0]),
)
@settings(max_examples=40)
def test_nobody_is_overtaken_by_a_call_that_came_much_later(
    backend: Backend, arrivals: list[tuple[int, int, int]], patience: float
) -> None:
    """Not by one that arrived more than patience x its own tokens / 1000 seconds later."""
    went: list[tuple[float, float, int]] = []

    async def main() -> None:
        semaphore = TokenSemaphore(2_000, order=SmallestFirst(patience))

        async def call(arrival: float, tokens: int, length: float) -> None:
            await anyio.sleep_until(arrival)
            lease = await semaphore.acquire(tokens)
            went.append((anyio.current_time() - lease.waited, anyio.current_time(), tokens))
            await anyio.sleep(length)
            lease.release()

        start = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for arrival, tokens, length in arrivals:
                tasks.start_soon(call, start + arrival / 1_000, tokens, length / 1_000)

    run_virtual(backend, main)
    assert len(went) == len(arrivals)
    for arrived, granted, tokens in went:
        for other_arrived, other_granted, _ in went:
            if other_granted < granted and other_arrived > arrived:
                assert other_arrived - arrived <= patience * tokens / 1_000 + 1e-9


# -- FairShare --------------------------------------------------------------------------------


def tokens_of(went: list[str], sizes: dict[str, int]) -> Iterator[Counter[str]]:
    """Tokens by tenant after each call that went; a call is named for its tenant."""
    had: Counter[str] = Counter()
    for tenant in went:
        had[tenant] += sizes[tenant]
        yield had


async def test_two_backlogged_tenants_stay_within_their_largest_calls() -> None:
    sizes = {"large": 1_000, "small": 100}
    calls = [("large", 1_000, "large")] * 30 + [("small", 100, "small")] * 300
    went = await one_by_one(FairShare(), calls)
    assert Counter(went) == {"large": 30, "small": 300}
    for had in tokens_of(went[:300], sizes):
        assert abs(had["large"] - had["small"]) <= 1_100


async def test_weights_of_one_to_three_give_one_to_three() -> None:
    sizes = {"a": 400, "b": 100}
    calls = [("a", 400, "a")] * 50 + [("b", 100, "b")] * 300
    went = await one_by_one(FairShare({"a": 1, "b": 3}), calls)
    for had in tokens_of(went[:250], sizes):
        assert abs(had["a"] / 1 - had["b"] / 3) <= 400 / 1 + 100 / 3
    assert had["b"] / had["a"] == pytest.approx(3, rel=0.1)


async def test_an_idle_tenant_gets_no_credit() -> None:
    semaphore = TokenSemaphore(10, order=FairShare())
    for _ in range(1_000):
        semaphore.acquire_nowait(10, tenant="busy").release()
    async with Calls() as calls:
        await calls.start(semaphore, 10, "now", tenant="busy")
        await calls.start(semaphore, 10, "b1", "b2", "b3", tenant="busy")
        await calls.start(semaphore, 10, "i1", "i2", "i3", tenant="idle")
        for _ in range(6):
            await calls.end(calls.started[-1])
    tenants = [name[0] for name in calls.started[1:]]
    assert sorted(tenants[:2]) == sorted(tenants[2:4]) == sorted(tenants[4:]) == ["b", "i"]


def test_who_asks_alone_gets_everything() -> None:
    semaphore = TokenSemaphore(100, order=FairShare({"a": 0.001, "b": 1_000}))
    leases = [semaphore.acquire_nowait(10, tenant="a") for _ in range(10)]
    assert semaphore.statistics().tokens_in_flight == 100
    for lease in leases:
        lease.release()


async def test_calls_cancelled_in_the_queue_cost_their_tenant_nothing() -> None:
    went: list[list[str]] = []
    for cancelled in (0, 100):
        semaphore = TokenSemaphore(10, order=FairShare())
        async with Calls() as calls:
            await calls.start(semaphore, 10, "held")
            gone = [f"gone {n}" for n in range(cancelled)]
            await calls.start(semaphore, 10, *gone, tenant="a")
            calls.cancel(*gone)
            await wait_all_tasks_blocked()
            for n in range(5):
                await calls.start(semaphore, 10, f"b{n}", tenant="b")
                await calls.start(semaphore, 10, f"a{n}", tenant="a")
            for _ in range(11):
                await calls.end(calls.started[-1])
            went.append(calls.started)
    assert went[0] == went[1]
    assert went[0][1:5] == ["b0", "a0", "b1", "a1"]


async def test_a_reconcile_adds_its_difference() -> None:
    """Two tenants ask for 100 a call; one of them turns out to take 1,000."""
    semaphore = TokenSemaphore(100, order=FairShare())
    had: Counter[str] = Counter()

    async def worker(tenant: str, actual: int) -> None:
        while True:
            async with semaphore.reserve(100, tenant=tenant) as lease:
                await anyio.sleep(1)
                lease.reconcile(actual)
                had[tenant] += actual

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(worker, "as asked", 100)
            tasks.start_soon(worker, "more", 1_000)
        for _ in range(600):
            await anyio.sleep(1)
            assert abs(had["as asked"] - had["more"]) <= 4 * 1_100
        tasks.cancel_scope.cancel()
    assert min(had.values()) > 20_000


async def test_a_cancelled_lease_costs_its_tenant_nothing() -> None:
    """It was never sent."""
    semaphore = TokenSemaphore(10, order=FairShare())
    async with Calls() as calls:
        await calls.start(semaphore, 10, "held", tenant="c")
        calls.leases["held"].release()
        for _ in range(50):
            semaphore.acquire_nowait(10, tenant="a").cancel()
        with semaphore.acquire_nowait(10, tenant="c"):
            for name in ("a1", "b1", "a2", "b2"):
                await calls.start(semaphore, 10, name, tenant=name[0])
        await wait_all_tasks_blocked()
        for _ in range(3):
            await calls.end(calls.started[-1])
    assert calls.started == ["held", "a1", "b1", "a2", "b2"]


async def test_each_limiter_keeps_its_own_account() -> None:
    """Also when they were given one and the same order."""
    order = FairShare()
    other, semaphore = TokenSemaphore(10, order=order), TokenSemaphore(10, order=order)
    for _ in range(100):
        other.acquire_nowait(10, tenant="a").release()
    async with Calls() as calls:
        await calls.start(semaphore, 10, "held")
        for name in ("a1", "a2", "b1", "b2"):
            await calls.start(semaphore, 10, name, tenant=name[0])
        for _ in range(4):
            await calls.end(calls.started[-1])
    assert calls.started == ["held", "a1", "b1", "a2", "b2"]


class Tenant:
    """A name that tells how many of its kind are still known to somebody."""

    alive: ClassVar[int] = 0

    def __init__(self) -> None:
        Tenant.alive += 1

    def __del__(self) -> None:
        Tenant.alive -= 1


def test_a_million_tenants_leave_no_memory_behind() -> None:
    order = FairShare().fresh()
    for sequence in range(1_000_000):
        tenant = sequence if sequence % 10 else Tenant()
        order.granted(order.key(0, 10, tenant, 0.0, sequence, backlogged=False))
    del tenant
    assert Tenant.alive <= 100
    del order
    assert Tenant.alive == 0


def test_a_backlog_of_ever_new_tenants_is_bounded_too() -> None:
    order = FairShare().fresh()
    most = 0
    for sequence in range(60_000):
        order.granted(order.key(0, 10, Tenant(), 0.0, sequence, backlogged=True))
        most = max(most, Tenant.alive)
    assert most <= 20_001


def test_tenants_that_came_and_went_leave_no_memory_behind() -> None:
    """Through all that a call of a tenant touches: the order, its path, its ledger."""

    async def main() -> int:
        semaphore = TokenSemaphore(100, order=FairShare())
        limiter = TokenRateLimiter(Quota(100, by="tenant"), order=FairShare())
        limits = TokenLimits(semaphore, limiter, order=FairShare())
        most = 0
        for n in range(2_500):
            tenant = Tenant()
            limits.acquire_nowait(10, tenant=tenant).release()
            limiter.acquire_nowait(10, tenant=tenant).release()
            if n % 100 == 0:
                await anyio.sleep(60)
                most = max(most, Tenant.alive)
        return most

    assert run_virtual("asyncio", main) <= 1_000
    gc.collect()
    assert Tenant.alive == 0


# -- lanes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "bound"),
    [
        (Fifo(lane_seconds=10), 30),
        (SmallestFirst(lane_seconds=10), 30),
        (Fifo(lane_seconds=0), 0),
        (Fifo(), 200),
        (SmallestFirst(), 200),
    ],
    ids=repr,
)
async def test_lanes_bound_the_wait_of_the_lowest(order: Order, bound: float) -> None:
    """One of priority 3 in a flood of priority 0, which alone takes all there is for 200 s."""
    semaphore = TokenSemaphore(10, order=order)
    waited: list[float] = []

    async def flood() -> None:
        async with semaphore.reserve(10):
            await anyio.sleep(1)

    async def low() -> None:
        async with semaphore.reserve(10, priority=3) as lease:
            waited.append(lease.waited)

    async with anyio.create_task_group() as tasks:
        for second in range(200):
            tasks.start_soon(flood)
            await wait_all_tasks_blocked()
            if second == 0:
                tasks.start_soon(low)
                await wait_all_tasks_blocked()
                tasks.start_soon(flood)
            await anyio.sleep(1)
    assert bound <= waited[0] <= bound + 2


async def test_without_lanes_priorities_wait_for_all_of_lower_number() -> None:
    calls = [("low", 10, ""), ("a", 10, ""), ("b", 10, "")]
    assert await one_by_one(Fifo(lane_seconds=5), calls, [1, 0, 0]) == ["a", "b", "low"]
    assert await one_by_one(Fifo(lane_seconds=0), calls, [1, 0, 0]) == ["low", "a", "b"]


def test_orders_say_what_they_are() -> None:
    orders = [
        Fifo(),
        Fifo(backfill=False, lane_seconds=2.5),
        SmallestFirst(),
        SmallestFirst(1.5, lane_seconds=10),
        FairShare(),
        FairShare({"a": 3}),
    ]
    assert [repr(order) for order in orders] == [
        "Fifo()",
        "Fifo(backfill=False, lane_seconds=2.5)",
        "SmallestFirst(3)",
        "SmallestFirst(1.5, lane_seconds=10)",
        "FairShare()",
        "FairShare({'a': 3})",
    ]


# -- places in a queue --------------------------------------------------------------------------


class Places:
    """Who got a place in a queue of 20 for a semaphore that is full."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.semaphore = TokenSemaphore(10, order=FairShare(weights), max_waiting=20)
        self.waiting: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    async def call(self, tenant: str) -> None:
        self.waiting[tenant] += 1
        try:
            async with self.semaphore.reserve(10, tenant=tenant):
                pass
        except QueueFull:
            self.refused[tenant] += 1
        finally:
            self.waiting[tenant] -= 1

    async def arrive(self, tasks: TaskGroup, tenant: str, calls: int) -> int:
        """How many of them wait now?"""
        for _ in range(calls):
            tasks.start_soon(self.call, tenant)
        await wait_all_tasks_blocked()
        return self.waiting[tenant]


async def test_one_who_floods_the_queue_leaves_others_their_share_of_it() -> None:
    places = Places({"b": 3})
    async with anyio.create_task_group() as tasks:
        with places.semaphore.acquire_nowait(10):
            assert await places.arrive(tasks, "a", 100) == 20
            assert await places.arrive(tasks, "b", 100) == 15  # 3 of 4
            assert await places.arrive(tasks, "a", 10) == 20
            assert await places.arrive(tasks, "c", 10) == 4  # 1 of 5
            assert places.semaphore.statistics().waiting_calls == 39
            with pytest.raises(QueueFull, match=r"39 calls wait .* at most 20 may, or a tenant"):
                await places.semaphore.acquire(10, tenant="a")
    assert places.refused == {"a": 90, "b": 85, "c": 6}
    assert places.semaphore.statistics().waiting_calls == 0


async def test_however_many_tenants_there_are_twice_as_many_wait_at_most() -> None:
    places = Places({})
    async with anyio.create_task_group() as tasks:
        with places.semaphore.acquire_nowait(10):
            await places.arrive(tasks, "a", 20)
            for name in range(100):
                await places.arrive(tasks, f"tenant {name}", 20)
            assert 20 < places.semaphore.statistics().waiting_calls <= 40


async def test_who_leaves_the_queue_gives_back_the_place() -> None:
    places = Places({})
    with places.semaphore.acquire_nowait(10):
        async with anyio.create_task_group() as tasks:
            await places.arrive(tasks, "a", 20)
            assert await places.arrive(tasks, "b", 11) == 10
            tasks.cancel_scope.cancel()
        async with anyio.create_task_group() as tasks:
            assert await places.arrive(tasks, "b", 25) == 20
            tasks.cancel_scope.cancel()
    assert places.semaphore._queue.places == {}


async def test_without_shares_places_go_to_whoever_comes_first() -> None:
    semaphore = TokenSemaphore(10, max_waiting=1)
    with semaphore.acquire_nowait(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(semaphore.acquire, 1)
            await wait_all_tasks_blocked()
            with pytest.raises(QueueFull, match=r"1 calls wait at .* already, at most 1 may"):
                await semaphore.acquire(1, tenant="b")
            tasks.cancel_scope.cancel()
