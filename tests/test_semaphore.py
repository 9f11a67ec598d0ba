"""TokenSemaphore and what all limiters share: the cases that broke other semaphores, and leases.

`python/asyncio 270` and the like name the public issue in which somebody met the fault.
"""

import asyncio
import gc
import logging
import math
import random
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint
from typing_extensions import override

from tests.calls import Calls
from tests.conftest import Run, run_virtual
from tokenflow import (
    FairShare,
    Fifo,
    Lease,
    QueueFull,
    Quota,
    RequestTooLarge,
    SmallestFirst,
    TokenLimits,
    TokenRateLimiter,
    TokenSemaphore,
    Usage,
    WaitTimeout,
)
from tokenflow.limits import Limiter, Order, SemaphoreStatistics

pytestmark = pytest.mark.anyio


def idle(semaphore: TokenSemaphore) -> bool:
    """Nothing is held, nobody waits, and the next call goes at once."""
    now = semaphore.statistics()
    semaphore.acquire_nowait(semaphore.max_tokens).release()
    return (now.tokens_in_flight, now.waiting_calls, now.waiting_tokens) == (0, 0, 0)


# -- semaphores and cancellation: what broke others ------------------------------------------


async def test_what_a_cancelled_waiter_was_granted_goes_to_the_next() -> None:
    """python/asyncio 270: released, then the granted waiter is cancelled before it runs."""
    semaphore = TokenSemaphore(1)
    async with Calls() as calls:
        await calls.start(semaphore, 1, "a", "b", "c")
        calls.leases["a"].release()
        calls.cancel("b")
        await wait_all_tasks_blocked()
        assert calls.started == ["a", "c"]
    assert idle(semaphore)


def test_a_task_cancelled_after_its_grant_passes_it_on() -> None:
    """python/asyncio 270, with `asyncio.Task.cancel` instead of a cancel scope."""

    async def main() -> None:
        semaphore = TokenSemaphore(1)
        first = await semaphore.acquire(1)
        tasks = [asyncio.create_task(semaphore.acquire(1)) for _ in "bc"]
        await wait_all_tasks_blocked()
        first.release()
        tasks[0].cancel()
        with await tasks[1]:
            assert tasks[0].cancelled()
            assert semaphore.statistics().tokens_in_flight == 1
        assert idle(semaphore)

    run_virtual("asyncio", main)


ORDERS: list[Order] = [Fifo(), SmallestFirst(), FairShare()]


@pytest.mark.parametrize("order", ORDERS, ids=["fifo", "smallest", "fair"])
async def test_thousands_of_random_cancellations_leak_nothing(order: Order) -> None:
    """cpython 90155, 93222."""
    rng = random.Random(7)
    semaphore = TokenSemaphore(10, max_requests=4, order=order)

    async def caller(scope: anyio.CancelScope, tokens: int, seconds: int) -> None:
        with scope:
            async with semaphore.reserve(tokens, tenant=tokens % 3):
                await anyio.sleep(seconds)

    async with anyio.create_task_group() as tasks:
        for _ in range(350):
            scopes = [anyio.CancelScope() for _ in range(3)]
            for scope in scopes:
                tasks.start_soon(caller, scope, rng.randint(0, 10), rng.randint(0, 2))
            await anyio.sleep(rng.choice([0, 1]))
            rng.choice(scopes).cancel()
    assert idle(semaphore)
    assert semaphore.statistics().requests_in_flight == 0


async def test_the_second_runs_when_the_head_is_cancelled_in_the_tick_of_the_release() -> None:
    """anyio 1145, in both orders of the two events."""
    semaphore = TokenSemaphore(1)
    async with Calls() as calls:
        await calls.start(semaphore, 1, "a", "b", "c", "d", "e")
        calls.cancel("b")
        calls.leases["a"].release()
        await wait_all_tasks_blocked()
        assert calls.started == ["a", "c"]
        calls.leases["c"].release()
        calls.cancel("d")
        await wait_all_tasks_blocked()
        assert calls.started == ["a", "c", "e"]
    assert idle(semaphore)


async def test_granted_and_cancelled_in_one_tick_gives_everything_back() -> None:
    """anyio 947."""
    semaphore = TokenSemaphore(10)
    async with Calls() as calls:
        await calls.start(semaphore, 10, "a", "b")
        calls.leases["a"].release()
        assert semaphore.statistics().tokens_in_flight == 10
        calls.cancel("b")
        await wait_all_tasks_blocked()
        assert calls.started == ["a"]
        assert idle(semaphore)


async def test_a_limit_lowered_and_raised_again_admits_nobody_too_many() -> None:
    """anyio 1223."""
    semaphore = TokenSemaphore(2)
    async with Calls() as calls:
        await calls.start(semaphore, 1, "a", "b")
        semaphore.max_tokens = 1
        await calls.start(semaphore, 1, "c", "d")
        semaphore.max_tokens = 2
        await wait_all_tasks_blocked()
        assert calls.started == ["a", "b"]
        assert semaphore.statistics().tokens_in_flight == semaphore.max_tokens == 2
        assert await calls.end("a") == ["a", "b", "c"]
    assert idle(semaphore)


@pytest.mark.parametrize("built_with", [0, 5])
async def test_a_limit_of_zero_is_a_pause(built_with: int) -> None:
    """trio 3243."""
    semaphore = TokenSemaphore(built_with)
    semaphore.max_tokens = 0
    async with Calls() as calls:
        assert await calls.start(semaphore, 3, "a", "b") == []
        with pytest.raises(anyio.WouldBlock):
            semaphore.acquire_nowait(1)
        assert semaphore.delay(1) == math.inf
        semaphore.max_tokens = 5
        await wait_all_tasks_blocked()
        assert calls.started == ["a"]
        assert await calls.end("a") == ["a", "b"]
    assert idle(semaphore)


async def test_cancelling_the_head_lets_the_next_run_now() -> None:
    """golang 37852: not only at the next release."""
    semaphore = TokenSemaphore(10)
    async with Calls() as calls:
        await calls.start(semaphore, 5, "held")
        await calls.start(semaphore, 8, "large")
        assert await calls.start(semaphore, 3, "small") == ["held"]
        calls.cancel("large")
        await wait_all_tasks_blocked()
        assert calls.started == ["held", "small"]
    assert idle(semaphore)


@pytest.mark.parametrize("cost", [-1, math.nan, math.inf, True, 1.0, "1", None])
async def test_a_cost_that_makes_no_sense_changes_nothing(cost: Any) -> None:
    """golang 80183."""
    semaphore = TokenSemaphore(10)
    with semaphore.acquire_nowait(4):
        before = semaphore.statistics()
        with pytest.raises((TypeError, ValueError), match=r"cost must be an int >= 0"):
            await semaphore.acquire(cost)
        with pytest.raises((TypeError, ValueError), match=r"cost must be an int >= 0"):
            semaphore.acquire_nowait(cost)
        assert semaphore.statistics() == before


async def test_a_cost_of_zero_passes_a_full_semaphore_and_its_queue() -> None:
    """golang 80183."""
    semaphore = TokenSemaphore(10)
    async with Calls() as calls:
        await calls.start(semaphore, 10, "held", "waits")
        assert await calls.start(semaphore, 0, "zero") == ["held", "zero"]
        semaphore.max_tokens = 0
        semaphore.acquire_nowait(0).release()


async def test_a_cost_of_zero_still_counts_as_one_request() -> None:
    semaphore = TokenSemaphore(10, max_requests=1)
    with semaphore.acquire_nowait(0):
        with pytest.raises(anyio.WouldBlock):
            semaphore.acquire_nowait(0)
        semaphore.acquire_nowait(Usage(requests=0)).release()


@pytest.mark.parametrize(
    ("order", "expected"),
    [(Fifo(), ["held"]), (SmallestFirst(), ["held", "small"])],
    ids=["fifo", "smallest"],
)
async def test_fifo_blocks_behind_a_large_head_and_smallest_first_does_not(
    order: Order, expected: list[str]
) -> None:
    """golang 56910: the caller chooses."""
    semaphore = TokenSemaphore(10_000, order=order)
    async with Calls() as calls:
        await calls.start(semaphore, 5_000, "held")
        await calls.start(semaphore, 8_000, "large")
        assert await calls.start(semaphore, 3_000, "small") == expected


async def test_a_cost_above_the_limit_raises_at_once() -> None:
    """golang sync 3, 7; temporal 6034: it neither waits for ever nor walks through."""
    semaphore = TokenSemaphore(10)
    for ask in (semaphore.acquire_nowait, semaphore.delay):
        with pytest.raises(RequestTooLarge, match=r"11 .*10.*oversize=\"alone\"") as caught:
            ask(11)
        assert (caught.value.cost, caught.value.limit) == (11, 10)
    with pytest.raises(RequestTooLarge):
        await semaphore.acquire(11)
    with pytest.raises(ValueError, match="11"):
        async with semaphore.reserve(11):
            raise AssertionError("admitted")
    assert idle(semaphore)


async def test_oversize_alone_waits_until_nothing_else_is_in_flight() -> None:
    """temporal 6034, the opt-in."""
    semaphore = TokenSemaphore(10, oversize="alone")
    async with Calls() as calls:
        await calls.start(semaphore, 1, "a")
        await calls.start(semaphore, 11, "oversize")
        assert await calls.start(semaphore, 1, "b") == ["a"]
        assert await calls.end("a") == ["a", "oversize"]
        assert semaphore.statistics().tokens_in_flight == 11
        assert await calls.end("oversize") == ["a", "oversize", "b"]
        await calls.end("b")
        assert await calls.start(semaphore, 12, "again") == ["a", "oversize", "b", "again"]
    assert idle(semaphore)


async def test_a_weighted_call_is_never_granted_in_parts() -> None:
    """cats-effect 403: so a cancel can leak none."""
    semaphore = TokenSemaphore(10)
    async with Calls() as calls:
        await calls.start(semaphore, 3, "a", "b", "c")
        await calls.start(semaphore, 9, "large")
        for name, left in [("a", 6), ("b", 3)]:
            await calls.end(name)
            assert semaphore.statistics().tokens_in_flight == left
        calls.cancel("large")
        await wait_all_tasks_blocked()
        assert semaphore.statistics().tokens_in_flight == 3
    assert idle(semaphore)


async def test_a_released_waiter_runs_in_the_next_turn(anyio_backend_name: str) -> None:
    """hindsight 4157: nobody polls. (trio shuffles the tasks of a turn: one more to see it.)"""
    semaphore = TokenSemaphore(1)
    async with Calls() as calls:
        await calls.start(semaphore, 1, "a", "b")
        calls.leases["a"].release()
        for _ in range(2 if anyio_backend_name == "trio" else 1):
            await checkpoint()
        assert calls.started == ["a", "b"]
        assert anyio.current_time() == 0


async def test_thousands_of_timeouts_that_race_the_grant_leak_nothing() -> None:
    """concurrency-limits 179."""
    semaphore = TokenSemaphore(50)
    outcomes = {"granted": 0, "late": 0}

    async def release(leases: list[Lease]) -> None:
        await anyio.sleep(1)
        for lease in leases:
            lease.release()

    async def wait(scope: float, max_wait: float) -> None:
        try:
            with anyio.fail_after(scope):
                async with semaphore.reserve(1, max_wait=max_wait):
                    outcomes["granted"] += 1
        except TimeoutError:
            outcomes["late"] += 1

    for _ in range(60):
        leases = [semaphore.acquire_nowait(1) for _ in range(50)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(release, leases[:20])
            for _ in range(25):
                tasks.start_soon(wait, 1, math.inf)
                tasks.start_soon(wait, math.inf, 1)
            tasks.start_soon(release, leases[20:])
        assert semaphore.statistics().tokens_in_flight == 0
    assert idle(semaphore)
    assert sum(outcomes.values()) == 3_000
    assert min(outcomes.values()) > 100


class Raises(logging.Handler):
    """An observer with a bug."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        raise LookupError("a broken log handler")


async def test_a_log_handler_that_raises_breaks_nothing() -> None:
    """dotnet runtime 85523."""
    logger, handler = logging.getLogger("tokenflow"), Raises()
    logger.addHandler(handler)
    level, logger.level = logger.level, logging.INFO
    try:
        semaphore = TokenSemaphore(10)
        first = await semaphore.acquire(10)
        async with Calls() as calls:
            await calls.start(semaphore, 10, "b")
            await anyio.sleep(6)
            first.release()
            await wait_all_tasks_blocked()
            assert calls.started == ["b"]
        assert idle(semaphore)

        limiter = TokenRateLimiter(tokens_per_minute=10)
        async with limiter.reserve(10), Calls() as calls:
            assert await calls.start(limiter, 5, "known to be long") == []
            await anyio.sleep(60)
            await wait_all_tasks_blocked()
            assert calls.started == ["known to be long"]
            await calls.end("known to be long")
        await anyio.sleep(60)
        async with limiter.reserve(5) as lease:
            lease.reconcile(20)
        limiter.pause(3)
        assert limiter.delay(1) == 60
    finally:
        logger.removeHandler(handler)
        logger.level = level


async def test_a_cost_function_that_raises_books_nothing() -> None:
    """dotnet runtime 85523: a user's code runs before anything is charged."""
    prices = {100: 7}
    limiter = TokenLimits(
        semaphore := TokenSemaphore(1000),
        window := TokenRateLimiter(Quota(1000, of=lambda usage: prices[usage.total_tokens])),
    )
    with pytest.raises(KeyError):
        await limiter.acquire(Usage(input_tokens=99))
    assert semaphore.statistics().tokens_in_flight == window.statistics().quotas[0].used == 0
    async with limiter.reserve(Usage(input_tokens=100)) as lease:
        before = limiter.statistics()
        for correct in (lease.reconcile, lease.progress):
            with pytest.raises(KeyError):
                correct(Usage(input_tokens=500))
        assert limiter.statistics() == before
        assert lease.usage == Usage(input_tokens=100)
    assert idle(semaphore)


async def test_one_task_may_hold_several_leases() -> None:
    """prefect 10632, multio 19."""
    semaphore = TokenSemaphore(10)
    async with semaphore.reserve(4), semaphore.reserve(4):
        with semaphore.acquire_nowait(2):
            assert semaphore.statistics().tokens_in_flight == 10
    assert idle(semaphore)


async def test_a_lease_may_be_released_from_another_task() -> None:
    """prefect 10632, multio 19."""
    semaphore = TokenSemaphore(10)
    leases: list[Lease] = []

    async def taker() -> None:
        leases.append(await semaphore.acquire(10))

    async def giver() -> None:
        leases.pop().release()

    for work in (taker, giver):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
    assert idle(semaphore)


async def test_shrinking_takes_effect_as_leases_return() -> None:
    """tokio 1973, 5308: and never deadlocks."""
    semaphore = TokenSemaphore(10)
    async with Calls() as calls:
        await calls.start(semaphore, 5, "a", "b")
        semaphore.max_tokens = 6
        assert semaphore.statistics().tokens_in_flight == 10
        await calls.start(semaphore, 4, "c", "d")
        assert await calls.end("a") == ["a", "b"]
        assert await calls.end("b") == ["a", "b", "c"]
        assert await calls.end("c") == ["a", "b", "c", "d"]
    assert idle(semaphore)


@pytest.mark.parametrize("value", [-1, True, 1.5, math.nan, math.inf, "10"])
@pytest.mark.parametrize("setting", ["max_tokens", "max_requests", "max_waiting"])
def test_nonsensical_settings_are_refused_at_construction(setting: str, value: Any) -> None:
    """pydantic-ai 6372."""
    settings: dict[str, Any] = {"max_tokens": 10, setting: value}
    with pytest.raises((TypeError, ValueError), match=rf"{setting} must be .*{value}"):
        TokenSemaphore(**settings)


async def test_a_stream_holds_its_lease_until_it_is_closed() -> None:
    """litellm 27955."""
    semaphore = TokenSemaphore(10)

    async def stream() -> AsyncGenerator[int]:
        async with semaphore.reserve(10) as lease:
            for tokens in range(1, 100):
                lease.progress(tokens)
                yield tokens

    async with aclosing(stream()) as chunks:
        async for tokens in chunks:
            assert semaphore.statistics().tokens_in_flight == max(10, tokens)
            if tokens == 20:
                break
        assert semaphore.statistics().tokens_in_flight == 20
    assert idle(semaphore)


async def test_a_stream_whose_consumer_goes_away_gives_its_lease_back() -> None:
    """litellm 27955. (trio warns of generators that nobody closes.)"""
    semaphore = TokenSemaphore(10)

    async def stream() -> AsyncIterator[int]:
        async with semaphore.reserve(10):
            yield 1
            yield 2

    async def consumer() -> None:
        async for _ in stream():
            assert semaphore.statistics().tokens_in_flight == 10
            return

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consumer)
        gc.collect()
        await wait_all_tasks_blocked()
    assert idle(semaphore)


async def test_a_cancelled_consumer_gives_the_streams_lease_back() -> None:
    """litellm 27955."""
    semaphore = TokenSemaphore(10)

    async def stream() -> AsyncIterator[int]:
        async with semaphore.reserve(10):
            yield 1
            await anyio.sleep_forever()

    with anyio.move_on_after(1):
        async for _ in stream():
            pass
    assert idle(semaphore)


# -- limits that move -------------------------------------------------------------------------


def direct(semaphore: TokenSemaphore) -> Limiter:
    return semaphore


def combined(semaphore: TokenSemaphore) -> Limiter:
    return TokenLimits(semaphore, TokenRateLimiter(tokens_per_minute=1_000_000))


through = pytest.mark.parametrize("through", [direct, combined])
Through = Callable[[TokenSemaphore], Limiter]


@through
async def test_raising_max_tokens_admits_before_the_assignment_returns(through: Through) -> None:
    semaphore = TokenSemaphore(10)
    limiter = through(semaphore)
    async with Calls() as calls:
        await calls.start(limiter, 10, "a", "b", "c")
        semaphore.max_tokens = 25
        assert semaphore.statistics().tokens_in_flight == 20
        await wait_all_tasks_blocked()
        assert calls.started == ["a", "b"]
    assert idle(semaphore)


@through
async def test_lowering_max_tokens_fails_who_no_longer_fits_and_goes_on(through: Through) -> None:
    semaphore = TokenSemaphore(10)
    limiter = through(semaphore)
    async with Calls() as calls:
        await calls.start(limiter, 4, "held")
        await calls.start(limiter, 8, "large", "large too")
        await calls.start(limiter, 2, "small")
        semaphore.max_tokens = 7
        await wait_all_tasks_blocked()
        assert calls.started == ["held", "small"]
        assert sorted(calls.errors) == ["large", "large too"]
        error = calls.errors["large"]
        assert isinstance(error, RequestTooLarge)
        assert (error.cost, error.limit) == (8, 7)
        assert limiter.statistics().waiting_calls == 0  # type: ignore[attr-defined]
    assert idle(semaphore)


@through
async def test_raised_from_zero_to_too_little_fails_a_queued_call(through: Through) -> None:
    semaphore = TokenSemaphore(0)
    async with Calls() as calls:
        await calls.start(through(semaphore), 8, "large")
        semaphore.max_tokens = 7
        await wait_all_tasks_blocked()
        assert list(calls.errors) == ["large"]
    assert idle(semaphore)


@through
async def test_max_requests_raised_lowered_and_zero(through: Through) -> None:
    semaphore = TokenSemaphore(100, max_requests=1)
    limiter = through(semaphore)
    async with Calls() as calls:
        assert await calls.start(limiter, 1, *"abcde") == ["a"]
        semaphore.max_requests = 2
        assert semaphore.statistics().requests_in_flight == 2
        await wait_all_tasks_blocked()
        assert calls.started == ["a", "b"]
        semaphore.max_requests = 1
        assert await calls.end("a") == ["a", "b"]
        assert await calls.end("b") == ["a", "b", "c"]
        semaphore.max_requests = 0
        assert await calls.end("c") == ["a", "b", "c"]
        semaphore.max_requests = None
        await wait_all_tasks_blocked()
        assert sorted(calls.started) == [*"abcde"]
        assert semaphore.max_requests is None
    assert idle(semaphore)


@through
async def test_max_requests_set_for_the_first_time_while_running(through: Through) -> None:
    """Who is in flight already is not counted, and can be given back in every way."""
    semaphore = TokenSemaphore(100)
    limiter = through(semaphore)
    early = [await limiter.acquire(10) for _ in range(4)]
    async with Calls() as calls:
        await calls.start(limiter, 95, "waits")
        semaphore.max_requests = 1
        early[0].progress(12)
        early[1].reconcile(Usage(input_tokens=10, requests=3))
        early[1].reconcile(Usage(input_tokens=9, requests=2))
        early[2].cancel()
        early[3].reconcile(8)
        assert semaphore.statistics().requests_in_flight == 0
        for lease in early:
            lease.release()
        await wait_all_tasks_blocked()
        assert calls.started == ["waits"]
        assert semaphore.statistics().requests_in_flight == 1
        assert await calls.start(limiter, 1, "second") == ["waits"]
        assert await calls.end("waits") == ["waits", "second"]
    assert idle(semaphore)
    assert semaphore.statistics().requests_in_flight == 0


async def test_oversize_alone_is_still_paused_by_zero() -> None:
    semaphore = TokenSemaphore(0, oversize="alone")
    async with Calls() as calls:
        assert await calls.start(semaphore, 11, "a") == []
        semaphore.max_tokens = 10
        await wait_all_tasks_blocked()
        assert calls.started == ["a"]


async def test_oversize_alone_survives_a_lowered_limit() -> None:
    semaphore = TokenSemaphore(10, oversize="alone")
    async with Calls() as calls:
        await calls.start(semaphore, 10, "a", "b")
        semaphore.max_tokens = 5
        assert await calls.end("a") == ["a", "b"]
    assert idle(semaphore)


# -- statistics and repr ----------------------------------------------------------------------


async def test_statistics_and_repr_show_live_numbers() -> None:
    semaphore = TokenSemaphore(1_500, max_requests=7)
    async with Calls() as calls:
        await calls.start(semaphore, 1_200, "a", "b")
        await calls.start(semaphore, Usage(input_tokens=200, output_tokens=10), "c")
        assert semaphore.statistics() == SemaphoreStatistics(
            tokens_in_flight=1_200,
            max_tokens=1_500,
            requests_in_flight=1,
            max_requests=7,
            waiting_calls=2,
            waiting_tokens=1_410,
            unreconciled=0,
        )
        assert repr(semaphore) == ("<TokenSemaphore: 1,200 of 1,500 tokens in flight, 2 waiting>")
        calls.leases["a"].reconcile(1_000)
        await calls.end("a")
        assert sorted(calls.started) == ["a", "b", "c"]
        await calls.end("b", "c")
    assert semaphore.statistics().unreconciled == 2
    assert semaphore.statistics().waiting_tokens == 0


async def test_combined_statistics_show_the_members() -> None:
    semaphore, window = TokenSemaphore(100), TokenRateLimiter(tokens_per_minute=1_000)
    limits = TokenLimits(semaphore, window)
    async with Calls() as calls:
        await calls.start(limits, 60, "a", "b")
        statistics = limits.statistics()
        assert statistics.members == (semaphore.statistics(), window.statistics())
        assert (statistics.waiting_calls, statistics.waiting_tokens) == (1, 60)
        assert semaphore.statistics().waiting_calls == 0
        assert repr(limits) == f"<TokenLimits({semaphore!r}, {window!r}): 1 waiting>"


def test_statistics_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        TokenSemaphore(1).statistics().max_tokens = 2  # type: ignore[misc]


# -- waits that end ---------------------------------------------------------------------------


async def test_max_wait_ends_the_wait_and_leaves_nothing() -> None:
    semaphore = TokenSemaphore(10)
    with semaphore.acquire_nowait(10):
        with pytest.raises(WaitTimeout, match="max_wait=3") as caught:
            await semaphore.acquire(5, max_wait=3)
        assert anyio.current_time() == 3
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.retry_after is None
        assert semaphore.statistics().waiting_calls == 0
    assert idle(semaphore)


async def test_max_wait_bounds_the_wait_and_not_the_body() -> None:
    semaphore = TokenSemaphore(10)
    async with semaphore.reserve(10, max_wait=1):
        await anyio.sleep(10)
    assert idle(semaphore)


async def test_max_wait_lets_the_next_run_when_a_head_gives_up() -> None:
    semaphore = TokenSemaphore(10)
    async with Calls() as calls:
        await calls.start(semaphore, 5, "held")
        await calls.start(semaphore, 8, "large", max_wait=2)
        await calls.start(semaphore, 3, "small")
        await anyio.sleep(2)
        await wait_all_tasks_blocked()
        assert calls.started == ["held", "small"]
        assert calls.leases["small"].waited == 2
        assert isinstance(calls.errors["large"], WaitTimeout)


async def test_a_max_wait_of_zero_refuses_rather_than_waits() -> None:
    semaphore = TokenSemaphore(10)
    async with semaphore.reserve(10, max_wait=0):
        with pytest.raises(WaitTimeout):
            await semaphore.acquire(1, max_wait=0)
    assert idle(semaphore)


async def test_an_infinite_max_wait_waits() -> None:
    semaphore = TokenSemaphore(10)
    async with Calls() as calls:
        await calls.start(semaphore, 10, "a", "b", max_wait=math.inf)
        await anyio.sleep(1_000)
        assert await calls.end("a") == ["a", "b"]


async def test_a_max_wait_that_is_known_to_be_in_vain_raises_at_once() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=10)
    limiter.acquire_nowait(10).release()
    with pytest.raises(WaitTimeout, match="60 s at the earliest, more if others wait") as caught:
        await limiter.acquire(5, max_wait=59)
    assert anyio.current_time() == 0
    assert caught.value.retry_after == 60
    async with limiter.reserve(5, max_wait=60) as lease:
        assert lease.waited == anyio.current_time() == 60


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    semaphore = TokenSemaphore(10, max_waiting=2)
    async with Calls() as calls:
        await calls.start(semaphore, 10, *"abcd")
        assert list(calls.errors) == ["d"]
        error = calls.errors["d"]
        assert isinstance(error, QueueFull)
        assert error.retry_after is None
        assert "max_waiting" in str(error)
        calls.cancel("b")
        await wait_all_tasks_blocked()
        await calls.start(semaphore, 10, "e")
        assert semaphore.statistics().waiting_calls == 2
        assert await calls.end("a") == ["a", "c"]
    assert idle(semaphore)


async def test_a_queue_of_zero_refuses_whoever_would_wait() -> None:
    limiter = TokenRateLimiter(tokens_per_minute=10, max_waiting=0)
    async with limiter.reserve(10):
        await anyio.sleep(15)
        with pytest.raises(QueueFull) as caught:
            await limiter.acquire(1)
        assert caught.value.retry_after == 45


# -- three ways to ask ------------------------------------------------------------------------


async def test_three_ways_to_ask_are_one() -> None:
    semaphore = TokenSemaphore(10, max_requests=3)
    options: dict[str, Any] = {
        "priority": 1, "tenant": "t", "model": "m", "affinity": "a", "region": "r"
    }  # fmt: skip
    seen = []
    async with semaphore.reserve(4, max_wait=9, **options) as lease:
        seen.append((semaphore.statistics(), lease.usage, lease.waited, lease.replica))
    with await semaphore.acquire(4, max_wait=9, **options) as lease:
        seen.append((semaphore.statistics(), lease.usage, lease.waited, lease.replica))
    with semaphore.acquire_nowait(4, **options) as lease:
        seen.append((semaphore.statistics(), lease.usage, lease.waited, lease.replica))
    usages = [(now.tokens_in_flight, now.requests_in_flight, *rest) for now, *rest in seen]
    assert usages == [(4, 1, 4, 0.0, None)] * 3
    assert [now.unreconciled for now, *_ in seen] == [0, 1, 2]
    assert idle(semaphore)


async def test_delay_takes_what_the_others_take() -> None:
    options: dict[str, Any] = {"tenant": "t", "model": "m", "affinity": "a", "region": "r"}
    assert TokenSemaphore(10).delay(1, **options) == 0.0


async def test_nowait_does_not_pass_a_waiter() -> None:
    semaphore = TokenSemaphore(10)
    async with Calls() as calls:
        await calls.start(semaphore, 5, "held")
        await calls.start(semaphore, 8, "large")
        before = semaphore.statistics()
        with pytest.raises(anyio.WouldBlock):
            semaphore.acquire_nowait(1)
        assert semaphore.statistics() == before
        semaphore.acquire_nowait(1, priority=-1).release()


async def test_delay_ignores_the_queue() -> None:
    semaphore = TokenSemaphore(10)
    async with Calls() as calls:
        await calls.start(semaphore, 5, "held")
        await calls.start(semaphore, 8, "large")
        assert [semaphore.delay(cost) for cost in (0, 5, 6)] == [0.0, 0.0, math.inf]


async def test_a_cancelled_scope_takes_nothing() -> None:
    semaphore = TokenSemaphore(10)
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with semaphore.reserve(1):
            raise AssertionError("admitted")
    assert scope.cancelled_caught
    assert semaphore.statistics().unreconciled == 0
    assert idle(semaphore)


async def test_a_reservation_is_entered_once_and_with_async() -> None:
    semaphore = TokenSemaphore(10)
    reservation = semaphore.reserve(5)
    with pytest.raises(RuntimeError, match="async with"), reservation:
        raise AssertionError("entered")
    for correct in (reservation.progress, reservation.reconcile):
        with pytest.raises(RuntimeError, match="before anything is reserved"):
            correct(1)
    reservation.release()
    async with reservation:
        with pytest.raises(RuntimeError, match="held already is released by plain `with lease:`"):
            await reservation.__aenter__()
    with pytest.raises(RuntimeError, match=r"entered once: call reserve\(\) again"):
        await reservation.__aenter__()
    assert idle(semaphore)


async def test_an_exception_in_the_body_releases() -> None:
    semaphore = TokenSemaphore(10)
    with pytest.raises(LookupError):
        async with semaphore.reserve(10):
            raise LookupError
    with pytest.raises(LookupError), await semaphore.acquire(10):
        raise LookupError
    assert idle(semaphore)


# -- leases -----------------------------------------------------------------------------------


def held(semaphore: TokenSemaphore, window: TokenRateLimiter) -> tuple[int, int]:
    return semaphore.statistics().tokens_in_flight, window.statistics().quotas[0].used


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("", (100, 100)),
        ("progress 150", (150, 150)),
        ("progress 50", (100, 100)),
        ("progress 150, progress 120", (150, 150)),
        ("progress 5000", (5000, 5000)),
        ("reconcile 40", (40, 40)),
        ("reconcile 0", (0, 0)),
        ("reconcile 40, progress 60", (60, 60)),
        ("reconcile 40, reconcile 70", (70, 70)),
        ("reconcile 2000", (2000, 2000)),
        ("progress 300, reconcile 40", (40, 40)),
        ("release", (0, 100)),
        ("release, release", (0, 100)),
        ("release, cancel", (0, 100)),
        ("release, reconcile 40", (0, 40)),
        ("release, reconcile 170, reconcile 30", (0, 30)),
        ("release, progress 150", (0, 150)),
        ("reconcile 40, release", (0, 40)),
        ("cancel", (0, 0)),
        ("cancel, cancel", (0, 0)),
        ("cancel, release", (0, 0)),
        ("cancel, reconcile 40", (0, 0)),
        ("cancel, progress 400", (0, 0)),
        ("reconcile 40, cancel", (0, 0)),
        ("reconcile 2000, cancel", (0, 0)),
        ("progress 150, reconcile 20, progress 90, cancel", (0, 0)),
    ],
)
async def test_what_a_lease_holds(steps: str, expected: tuple[int, int]) -> None:
    semaphore, window = TokenSemaphore(1_000), TokenRateLimiter(tokens_per_minute=1_000)
    with TokenLimits(semaphore, window).acquire_nowait(100) as lease:
        for step in filter(None, steps.split(", ")):
            verb, *tokens = step.split()
            getattr(lease, verb)(*map(int, tokens))
        assert held(semaphore, window) == expected
    assert held(semaphore, window)[0] == 0


async def test_what_a_correction_frees_is_granted_at_once() -> None:
    semaphore = TokenSemaphore(10)
    async with Calls() as calls:
        await calls.start(semaphore, 10, "a")
        await calls.start(semaphore, 6, "b", "c")
        calls.leases["a"].reconcile(4)
        assert semaphore.statistics().tokens_in_flight == 10
        await wait_all_tasks_blocked()
        assert calls.started == ["a", "b"]
        calls.leases["b"].cancel()
        await wait_all_tasks_blocked()
        assert calls.started == ["a", "b", "c"]
    assert idle(semaphore)


async def test_an_overrun_holds_others_back_until_it_is_released() -> None:
    semaphore = TokenSemaphore(10)
    async with Calls() as calls:
        await calls.start(semaphore, 5, "a")
        calls.leases["a"].progress(13)
        assert await calls.start(semaphore, 1, "b") == ["a"]
        assert await calls.end("a") == ["a", "b"]


async def test_a_usage_and_its_total_hold_the_same() -> None:
    semaphore = TokenSemaphore(100, max_requests=9)
    with semaphore.acquire_nowait(Usage(input_tokens=30, output_tokens=12, requests=2)) as lease:
        statistics = semaphore.statistics()
        assert (statistics.tokens_in_flight, statistics.requests_in_flight) == (42, 2)
        lease.reconcile(Usage(input_tokens=30, output_tokens=2, requests=1))
        statistics = semaphore.statistics()
        assert (statistics.tokens_in_flight, statistics.requests_in_flight) == (32, 1)
    assert idle(semaphore)


async def test_a_dropped_lease_warns_and_names_its_cost() -> None:
    semaphore = TokenSemaphore(10_000)
    lease = semaphore.acquire_nowait(1_200)
    with pytest.warns(ResourceWarning, match=r"1,200 tokens.*without being released"):
        del lease
    assert semaphore.statistics().tokens_in_flight == 1_200


async def test_a_reservation_that_is_never_entered_warns_and_names_its_cost() -> None:
    semaphore = TokenSemaphore(10_000)
    reservation = semaphore.reserve(1_200)
    with pytest.warns(RuntimeWarning, match=r"1,200 tokens.*was never entered.*async with"):
        del reservation
    with pytest.warns(RuntimeWarning, match="1,200 tokens"):
        semaphore.reserve(1_200)
    assert idle(semaphore)


async def test_a_reservation_is_entered_by_one_task_only() -> None:
    """Also while the first that entered it still waits."""
    semaphore = TokenSemaphore(100)
    lease = semaphore.acquire_nowait(100)
    reservation = semaphore.reserve(50)
    errors: list[RuntimeError] = []

    async def enter() -> None:
        try:
            async with reservation:
                pass
        except RuntimeError as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(enter)
        tasks.start_soon(enter)
        await wait_all_tasks_blocked()
        lease.release()
    assert [str(error) for error in errors] == [
        "a reservation can be entered once: call reserve() again"
    ]
    assert idle(semaphore)


async def test_leases_that_are_given_back_or_refused_do_not_warn() -> None:
    semaphore = TokenSemaphore(10)
    semaphore.acquire_nowait(1).release()
    semaphore.acquire_nowait(1).cancel()
    with pytest.raises(RequestTooLarge):
        semaphore.acquire_nowait(11)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert caught == []


async def test_a_lease_shows_what_it_is() -> None:
    semaphore = TokenSemaphore(10_000)
    lease = semaphore.reserve(1_200)
    seen = [repr(lease)]
    async with lease:
        seen.append(repr(lease))
        lease.reconcile(Usage(input_tokens=7))
    seen.append(repr(lease))
    assert seen == [
        "<Lease of 1,200 tokens, asked>",
        "<Lease of 1,200 tokens, held>",
        "<Lease of Usage(input_tokens=7), released>",
    ]


async def test_an_exit_stack_holds_leases_and_may_be_closed_in_another_task() -> None:
    semaphore = TokenSemaphore(10)
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(semaphore.reserve(3))
        moved = stack.pop_all()
    assert semaphore.statistics().tokens_in_flight == 9
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(moved.aclose)
    assert idle(semaphore)


async def test_a_generator_opened_in_one_task_is_closed_in_another() -> None:
    """As dependency injection does; it would break with a cancel scope inside."""
    semaphore = TokenSemaphore(10)

    async def dependency() -> AsyncIterator[Lease]:
        async with semaphore.reserve(10) as lease:
            yield lease

    opened = dependency()

    async def opener() -> None:
        await anext(opened)

    async def closer() -> None:
        with pytest.raises(StopAsyncIteration):
            await anext(opened)

    for step in (opener, closer):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step)
    assert idle(semaphore)


# -- logging ----------------------------------------------------------------------------------


class Logged(logging.Handler):
    """(virtual time, level, message) of all that tokenflow logs."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[float, str, str]] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((anyio.current_time(), record.levelname, record.getMessage()))


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[tuple[float, str, str]]]:
    caplog.set_level(logging.INFO, "tokenflow")
    handler = Logged()
    logger = logging.getLogger("tokenflow")
    logger.addHandler(handler)
    yield handler.records
    logger.removeHandler(handler)


async def test_a_wait_beyond_five_seconds_is_logged(logged: list[tuple[float, str, str]]) -> None:
    semaphore = TokenSemaphore(1_000)
    for seconds in (5, 5.5):
        async with Calls() as calls:
            await calls.start(semaphore, 1_000, "a", "b")
            await anyio.sleep(seconds)
            await calls.end("a")
            await calls.end("b")
    assert [record[:2] for record in logged] == [(10.5, "INFO")]
    assert logged[0][2] == (
        "waited 5.5 s for 1,000 tokens at "
        "<TokenSemaphore: 1,000 of 1,000 tokens in flight, 0 waiting>"
    )


async def test_waits_are_logged_every_ten_seconds_at_most(
    logged: list[tuple[float, str, str]],
) -> None:
    semaphore = TokenSemaphore(1)

    async def caller() -> None:
        async with semaphore.reserve(1):
            await anyio.sleep(1)

    async with anyio.create_task_group() as tasks:
        for _ in range(40):
            tasks.start_soon(caller)
    times = [time for time, *_ in logged]
    assert times == [6, 16, 26, 36]


async def test_a_known_long_wait_is_logged_when_it_begins(
    logged: list[tuple[float, str, str]],
) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=10)
    limiter.acquire_nowait(10).release()
    (await limiter.acquire(1)).release()
    assert logged[0][:2] == (0, "INFO")
    assert "will wait 60.0 s for 1 tokens" in logged[0][2]
    assert "10 of 10 tokens per 60 s, 1 waiting" in logged[0][2]


async def test_pauses_and_debt_are_warned_of(logged: list[tuple[float, str, str]]) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=10)
    limiter.pause(3)
    with pytest.raises(WaitTimeout):
        await limiter.acquire(1, max_wait=1)
    await anyio.sleep(20)
    with await limiter.acquire(10) as lease:
        lease.reconcile(11)
    assert [record[:2] for record in logged] == [(0, "WARNING"), (20, "WARNING")]
    assert "paused for 3.0 s" in logged[0][2]
    assert "debt" in logged[1][2]


async def test_a_logged_wait_does_not_hide_a_debt(logged: list[tuple[float, str, str]]) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=10)
    limiter.acquire_nowait(10).release()
    async with limiter.reserve(10) as lease:
        assert [record[:2] for record in logged] == [(0, "INFO"), (60, "INFO")]
        lease.reconcile(20)
    assert [record[:2] for record in logged[2:]] == [(60, "WARNING")]


# -- what else could go wrong -----------------------------------------------------------------


def test_it_can_be_built_and_used_before_any_loop(run: Run) -> None:
    semaphore = TokenSemaphore(10)
    lease = semaphore.acquire_nowait(4)
    assert semaphore.statistics().tokens_in_flight == 4
    assert semaphore.delay(7) == math.inf
    lease.release()

    async def main() -> None:
        async with semaphore.reserve(10):
            await checkpoint()

    for _ in range(3):
        run(main)
    assert idle(semaphore)


async def test_a_tenant_that_cannot_be_hashed_waits_as_others_do() -> None:
    """Where nobody shares by tenant it is only handed on."""
    semaphore = TokenSemaphore(100)
    went: list[object] = []

    async def call(tenant: Any) -> None:
        async with semaphore.reserve(60, tenant=tenant):
            went.append(tenant)

    async with anyio.create_task_group() as tasks:
        with semaphore.acquire_nowait(100):
            for tenant in (["acme"], "b"):
                tasks.start_soon(call, tenant)
                await wait_all_tasks_blocked()
    assert went == [["acme"], "b"]
    assert semaphore.statistics().tokens_in_flight == 0
