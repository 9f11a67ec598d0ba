"""The order of grants is the order of arrival, whichever limiters the calls came through."""

import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calls import Calls
from tests.conftest import BACKENDS, Backend, run_virtual
from tokenflow import Quota, TokenLimits, TokenRateLimiter, TokenSemaphore
from tokenflow.limits import Limiter

pytestmark = pytest.mark.anyio

TWENTY = [str(n) for n in range(20)]


async def queue_alternately(calls: Calls, cost: int, *limiters: Limiter) -> None:
    for n, name in enumerate(TWENTY):
        await calls.start(limiters[n % len(limiters)], cost, name)


async def test_a_semaphore_used_directly_and_through_others() -> None:
    semaphore = TokenSemaphore(100)
    async with Calls() as calls:
        await calls.start(semaphore, 100, "all")
        await queue_alternately(
            calls, 10, semaphore, TokenLimits(semaphore), TokenLimits(semaphore, TokenSemaphore(99))
        )
        assert calls.started == ["all"]
        started = await calls.end("all")
        assert started[0] == "all"
        assert sorted(started[1:], key=int) == TWENTY[:10]
        assert sorted((await calls.end(*TWENTY[:3]))[11:], key=int) == TWENTY[10:13]


async def test_tenants_of_one_limiter() -> None:
    semaphore = TokenSemaphore(100)
    limits = TokenLimits(semaphore, TokenRateLimiter(Quota(1_000, by="tenant")))
    async with Calls() as calls:
        await calls.start(semaphore, 100, "all")
        for n, name in enumerate(TWENTY):
            await calls.start(limits, 10, name, tenant=n % 3)
        assert sorted((await calls.end("all"))[1:], key=int) == TWENTY[:10]


@pytest.mark.parametrize("limit", [50, 100])
async def test_a_limit_that_is_raised_from_0(limit: int) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=100)
    limiter.set_limit("tokens", 0)
    async with Calls() as calls:
        await queue_alternately(calls, 10, limiter, TokenLimits(limiter))
        limiter.set_limit("tokens", limit)
        await wait_all_tasks_blocked()
        assert sorted(calls.started, key=int) == TWENTY[: limit // 10]


async def test_a_semaphore_that_is_resized_from_0() -> None:
    semaphore = TokenSemaphore(100)
    semaphore.max_tokens = 0
    async with Calls() as calls:
        await queue_alternately(calls, 10, semaphore, TokenLimits(semaphore))
        semaphore.max_tokens = 50
        await wait_all_tasks_blocked()
        assert sorted(calls.started, key=int) == TWENTY[:5]


events = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 6), st.sampled_from([1, 2, 3, 9])),
    st.tuples(st.just("ask"), st.integers(0, 6), st.sampled_from([1, 2, 3, 9])),
    st.tuples(st.just("end"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("leave"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("resize"), st.integers(0, 2), st.sampled_from([0, 4, 9, 12])),
)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100)
@given(ops=st.lists(events, min_size=10, max_size=40))
def test_whoever_goes_is_who_a_naive_model_says(
    backend: Backend, ops: list[tuple[str, int, int]]
) -> None:
    run_virtual(backend, compare, ops)


async def compare(ops: list[tuple[str, int, int]]) -> None:
    """The model looks at all who wait, in order of arrival: each goes that fits, and bars later
    ones from its gate if it does not.
    """
    limits = [12, 9, 10]
    semaphores = [TokenSemaphore(limit, oversize="alone") for limit in limits]
    roomy = TokenSemaphore(10_000)
    needs = [(0,), (0,), (0,), (1,), (1,), (2,), (2,)]
    limiters: list[Limiter] = [
        semaphores[0],
        TokenLimits(semaphores[0], oversize="alone"),
        TokenLimits(semaphores[0], roomy, oversize="alone"),
        semaphores[1],
        TokenLimits(roomy, semaphores[1], oversize="alone"),
        TokenLimits(semaphores[2], oversize="alone"),
        TokenLimits(semaphores[2], roomy, oversize="alone"),
    ]
    queue: list[tuple[str, tuple[int, ...], int]] = []
    held: dict[str, tuple[tuple[int, ...], int]] = {}
    used = [0, 0, 0]

    def serve() -> None:
        barred: set[int] = set()
        for entry in list(queue):
            name, need, cost = entry
            refused = {
                i
                for i in need
                if i in barred or not limits[i] or used[i] + min(cost, limits[i]) > limits[i]
            }
            if refused:
                barred |= refused
            else:
                queue.remove(entry)
                held[name] = need, cost
                for i in need:
                    used[i] += cost

    async with Calls() as calls:
        for number, (what, which, amount) in enumerate(ops):
            if what == "ask":
                queue.append((str(number), needs[which], amount))
                serve()
                await calls.start(limiters[which], amount, str(number))
            elif what == "end" and held:
                name = list(held)[which % len(held)]
                need, cost = held.pop(name)
                for i in need:
                    used[i] -= cost
                serve()
                await calls.end(name)
            elif what == "leave" and queue:
                name, *_ = queue.pop(which % len(queue))
                serve()
                calls.cancel(name)
                await wait_all_tasks_blocked()
            elif what == "resize":
                limits[which] = amount
                serve()
                semaphores[which].max_tokens = amount
                await wait_all_tasks_blocked()
            assert [each.statistics().tokens_in_flight for each in semaphores] == used
            assert {name for name in calls.started if name in held} == set(held)
            assert not {name for name, *_ in queue} & set(calls.started)
