"""The batcher: the failures of others as named tests on both backends, and random histories."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import math
import random
import re
import sys
from dataclasses import dataclass
from typing import Any, Literal, Self, TypedDict, get_args

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import Backend, Run, run_virtual
from tokenflow import (
    BatcherClosed,
    BatchError,
    Lease,
    QueueFull,
    Quota,
    Replica,
    RequestTooLarge,
    TokenBatcher,
    TokenLimits,
    TokenRateLimiter,
    TokenRouter,
    TokenSemaphore,
    Usage,
    WrongResultCount,
)
from tokenflow.batching._backlog import Backlog
from tokenflow.batching._fitting import Limits

pytestmark = pytest.mark.anyio


def size(item: int) -> int:
    return item


class Processor:
    """Doubles its items, `seconds` later; remembers its batches and when they came."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.batches: list[list[int]] = []
        self.times: list[float] = []
        self.gate = anyio.Event()
        self.gate.set()
        self.poison: set[int] = set()
        self.running = self.most_running = 0

    async def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self.times.append(anyio.current_time())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
            await anyio.sleep(self.seconds)
            if poisoned := self.poison.intersection(items):
                raise ValueError(f"poison {min(poisoned)}")
            return [2 * item for item in items]
        finally:
            self.running -= 1

    def block(self) -> None:
        self.gate = anyio.Event()


class Callers:
    """Submits in tasks of their own; keeps what each got."""

    def __init__(self, batcher: TokenBatcher[int, Any], tasks: Any) -> None:
        self.batcher = batcher
        self.tasks = tasks
        self.got: dict[int, Any] = {}
        self.scopes: dict[int, anyio.CancelScope] = {}

    def submit(self, *items: int, priority: int = 0) -> None:
        for item in items:
            self.scopes[item] = anyio.CancelScope()
            self.tasks.start_soon(self._call, item, priority)

    async def _call(self, item: int, priority: int) -> None:
        with self.scopes[item]:
            try:
                self.got[item] = await self.batcher.submit(item, priority=priority)
            except Exception as error:
                self.got[item] = error


def idle(batcher: TokenBatcher[Any, Any]) -> bool:
    now = batcher.statistics()
    return now.waiting_items == now.waiting_tokens == now.running_batches == 0


# How it has gone wrong elsewhere.


async def test_a_burst_in_one_tick_keeps_the_cap() -> None:
    """osv.dev 5617."""
    processor = Processor()
    async with TokenBatcher(processor, 1_000, tokens=size, max_items=10) as batcher:
        await batcher.submit_many([1] * 95)
    assert [len(batch) for batch in processor.batches] == [10] * 9 + [5]


async def test_the_smallest_bounds_work() -> None:
    """BentoML 4856."""
    async with TokenBatcher(Processor(), 1, tokens=size, max_items=1, linger=0) as batcher:
        assert await batcher.submit_many([1, 0, 1]) == [2, 0, 2]


async def test_one_of_three_callers_leaves_a_running_batch() -> None:
    """ray 41057, langgraph 5503: the other two hung."""
    processor = Processor()
    processor.block()
    async with TokenBatcher(processor, 100, tokens=size) as batcher:
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            callers.submit(1, 2, 3)
            await anyio.sleep(1)
            callers.scopes[2].cancel()
            await wait_all_tasks_blocked()
            processor.gate.set()
        assert callers.got == {1: 2, 3: 6}
        assert await batcher.submit(4) == 8
        assert batcher.statistics().cancelled == 1


@pytest.mark.parametrize("error", [None, ValueError("bad batch")])
async def test_a_caller_leaves_in_the_tick_in_which_its_batch_ends(
    error: Exception | None,
) -> None:
    gate = anyio.Event()

    async def process(items: list[int]) -> list[int]:
        await gate.wait()
        if error is not None:
            raise error
        return items

    async with TokenBatcher(process, 100, tokens=size) as batcher:
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            callers.submit(1, 2)
            await anyio.sleep(1)
            gate.set()
            callers.scopes[1].cancel()
        assert callers.got == {2: error or 2}


async def test_nothing_is_processed_for_callers_who_are_gone() -> None:
    """ray 50046."""
    processor = Processor()
    async with TokenBatcher(processor, 100, tokens=size, linger=1) as batcher:
        with anyio.move_on_after(0.5):
            await batcher.submit_many([1, 2, 3])
        assert idle(batcher)
        await anyio.sleep(10)
        assert processor.batches == []


async def test_a_caller_who_was_cancelled_before_submits_nothing() -> None:
    processor = Processor()
    async with TokenBatcher(processor, 100, tokens=size, linger=0) as batcher:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await batcher.submit(1)
        await anyio.sleep(1)
    assert processor.batches == []


async def test_a_count_that_fails_concerns_its_item_alone() -> None:
    """ray 66140."""

    def fussy(item: int) -> int:
        if item == 13:
            raise LookupError("13")
        return item

    async with TokenBatcher(Processor(), 100, tokens=fussy) as batcher:
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            callers.submit(1, 13, 2)
        assert (callers.got[1], callers.got[2]) == (2, 4)
        assert isinstance(callers.got[13], LookupError)


class Panic(BaseException):
    pass


async def test_a_processor_that_dies_hangs_nobody() -> None:
    """infinity 609; batched 0.1.5 hung for ever."""
    deaths: list[BaseException] = [Panic("native code"), OSError("soft")]

    async def process(items: list[int]) -> list[int]:
        if deaths:
            raise deaths.pop(0)
        return items

    async with TokenBatcher(process, 100, tokens=size) as batcher:
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            callers.submit(1, 2)
        for item in (1, 2):
            assert isinstance(callers.got[item], BatchError)
            assert isinstance(callers.got[item].__cause__, Panic)
        with pytest.raises(OSError, match="soft"):
            await batcher.submit(1)
        assert await batcher.submit(3) == 3
        assert batcher.statistics().failed == 3


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("native", [False, True])
async def test_a_processor_that_is_cancelled_hangs_nobody(native: bool) -> None:
    """On trio nothing is cancelled but through a scope."""
    first = True

    async def process(items: list[int]) -> list[int]:
        nonlocal first
        if first:
            first = False
            if native:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await anyio.sleep(1)
            raise asyncio.CancelledError
        return items

    async with TokenBatcher(process, 100, tokens=size) as batcher:
        with pytest.raises(BatchError, match="the processor died of CancelledError") as caught:
            await batcher.submit(1)
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        assert await batcher.submit(3) == 3


async def test_a_cancellation_that_is_returned_cancels_nobody() -> None:
    """asyncio.gather(return_exceptions=True) returns them."""

    async def process(items: list[int]) -> list[Any]:
        return [asyncio.CancelledError() for _ in items]

    async with TokenBatcher(process, 100, tokens=size) as batcher:
        with pytest.raises(BatchError, match=r"the processor returned CancelledError\(\)"):
            await batcher.submit(1)


async def test_closing_waits_for_the_batch_that_runs() -> None:
    """OpenViking 3438."""
    processor = Processor(seconds=60)
    async with (
        anyio.create_task_group() as tasks,
        TokenBatcher(processor, 100, tokens=size) as batcher,
    ):
        callers = Callers(batcher, tasks)
        callers.submit(1, 2)
        await anyio.sleep(1)
        callers.submit(3)
        await wait_all_tasks_blocked()
    assert callers.got == {1: 2, 2: 4, 3: 6}
    assert batcher.statistics().flushes["close"] == 1


async def test_closing_sends_what_is_not_full_yet() -> None:
    """xatu 874, AztecProtocol 22296."""
    processor = Processor()
    async with anyio.create_task_group() as tasks:
        async with TokenBatcher(processor, 100, tokens=size, max_items=10, linger=3600) as batcher:
            callers = Callers(batcher, tasks)
            callers.submit(1, 2, 3)
            await wait_all_tasks_blocked()
        assert anyio.current_time() < 3600
    assert callers.got == {1: 2, 2: 4, 3: 6}
    assert [sorted(batch) for batch in processor.batches] == [[1, 2, 3]]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_idle_it_never_wakes() -> None:
    """langgraph 6367; batched turns the loop 378 times a second."""
    loop: Any = asyncio.get_running_loop()
    before = asyncio.all_tasks()
    async with TokenBatcher(Processor(), 100, tokens=size) as batcher:
        assert await batcher.submit(1) == 2
        await wait_all_tasks_blocked()
        assert asyncio.all_tasks() == before
        assert [timer for timer in loop._scheduled if not timer.cancelled()] == []


def test_no_task_is_destroyed_while_pending(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with TokenBatcher(Processor(), 100, tokens=size) as batcher:
            await batcher.submit(1)

    run(main)
    gc.collect()
    assert caplog.records == []


async def test_the_oldest_waits_for_the_linger_at_most() -> None:
    """jasperfx 533: each item armed the timer anew, so a trickle never went."""
    processor = Processor()
    async with (
        TokenBatcher(processor, 1_000, tokens=size, linger=0.9) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        for item in range(20):
            callers.submit(item)
            await anyio.sleep(0.25)
    assert processor.times == pytest.approx([0.9, 1.9, 2.9, 3.9, 4.9])
    assert batcher.statistics().longest_wait == pytest.approx(0.9)


async def test_each_batch_has_a_full_linger_of_its_own() -> None:
    """mimir 15805: the timer of a batch that went by size fired for the next one."""
    processor = Processor()
    async with (
        TokenBatcher(processor, 100, tokens=size, max_items=2, linger=1) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        callers.submit(1)
        await anyio.sleep(0.75)
        callers.submit(2)
        await anyio.sleep(0.125)
        callers.submit(3)
    assert processor.batches == [[1, 2], [3]]
    assert processor.times == pytest.approx([0.75, 1.875])
    assert batcher.statistics().flushes == {"items": 1, "tokens": 0, "linger": 1, "close": 0}


async def test_the_linger_of_a_cancelled_oldest_is_not_the_next_ones() -> None:
    processor = Processor()
    async with (
        TokenBatcher(processor, 100, tokens=size, linger=1) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        callers.submit(1)
        await anyio.sleep(0.5)
        callers.submit(2)
        await wait_all_tasks_blocked()
        callers.scopes[1].cancel()
    assert processor.batches == [[2]]
    assert processor.times == pytest.approx([1.5])


async def test_full_means_now() -> None:
    """aiokafka 1137: the linger acted as a rate limit."""
    processor = Processor()
    async with TokenBatcher(processor, 100, tokens=size, linger=3600) as batcher:
        await batcher.submit_many([50] * 20)
        assert processor.times == [0.0] * 10
    assert batcher.statistics().flushes["tokens"] == 10


async def test_results_belong_to_their_items_out_of_order() -> None:
    """rig 2345, graphiti 1732, llama_index 19537."""

    async def slow_first(items: list[int]) -> list[int]:
        await anyio.sleep(100 - items[0])
        return [2 * item for item in items]

    async with TokenBatcher(slow_first, 1_000, tokens=size, max_items=3, max_concurrent=8) as b:
        assert await b.submit_many(range(20)) == [2 * item for item in range(20)]


async def test_an_exception_in_the_results_is_that_items_error() -> None:
    """LitServe 340: one bad item failed all callers."""

    async def process(items: list[int]) -> list[int | Exception]:
        return [ValueError("bad") if item == 2 else item for item in items]

    async with TokenBatcher(process, 100, tokens=size) as batcher:
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            callers.submit(1, 2, 3)
        assert (callers.got[1], callers.got[3]) == (1, 3)
        assert isinstance(callers.got[2], ValueError)


@pytest.mark.parametrize("results", [[1, 2], [1, 2, 3, 4], []])
async def test_the_wrong_number_of_results_shifts_nobodys(results: list[int]) -> None:
    """BentoML 1593."""

    async def process(items: list[int]) -> list[int]:
        return results

    async with TokenBatcher(process, 100, tokens=size) as batcher:
        with pytest.raises(
            WrongResultCount, match=rf"needs 3 results, one for each, and got {len(results)}"
        ) as caught:
            await batcher.submit_many([1, 2, 3])
        assert (caught.value.expected, caught.value.received) == (3, len(results))


@pytest.mark.parametrize("results", [None, "ab", {1: 2, 3: 4}, {1, 2}, 7])
async def test_results_that_have_no_order_are_refused(results: Any) -> None:
    async def process(items: list[int]) -> Any:
        return results

    async with TokenBatcher(process, 100, tokens=size) as batcher:
        with pytest.raises(BatchError, match="process must return a list with one result per"):
            await batcher.submit_many([1, 2])


@pytest.mark.parametrize("count", [1, 2, 100, 101])
async def test_a_poison_item_is_isolated(count: int) -> None:
    """msgvault 296: the batch was tried again unchanged until it was given up."""
    processor = Processor()
    processor.poison = {count // 2}
    async with TokenBatcher(processor, 10_000, tokens=size, isolate_errors=True) as batcher:
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            callers.submit(*range(count))
        bad = callers.got.pop(count // 2)
        assert isinstance(bad, ValueError)
        assert callers.got == {item: 2 * item for item in range(count) if item != count // 2}
    assert len(processor.batches) <= 1 + 2 * math.ceil(math.log2(count))


async def test_an_outage_is_not_multiplied_by_isolating() -> None:
    processor = Processor()
    processor.poison = set(range(1_000))
    async with TokenBatcher(processor, 10**6, tokens=size, isolate_errors=True) as batcher:
        with pytest.raises(ValueError, match="poison"):
            await batcher.submit_many(range(1_000))
    assert len(processor.batches) <= 1 + 4 * 10


async def test_a_caller_who_leaves_is_not_tried_again() -> None:
    processor = Processor(seconds=1)
    processor.poison = {3}
    async with (
        TokenBatcher(processor, 100, tokens=size, linger=0, isolate_errors=True) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        callers.submit(3, 4)
        await anyio.sleep(0.5)
        callers.scopes[3].cancel()
    assert callers.got == {4: 8} or isinstance(callers.got[4], ValueError)
    assert processor.batches[1:] in ([], [[4]])


async def test_what_does_not_fit_leads_the_next_batch() -> None:
    """ray 59059: it went to the back of the queue."""
    processor = Processor()
    async with TokenBatcher(processor, 100, tokens=size) as batcher:
        await batcher.submit_many([60, 50, 10, 10, 40])
    assert processor.batches == [[60], [50, 10, 10], [40]]


async def test_process_sees_no_callers_context() -> None:
    """BentoML 2989: every later span hung on the first caller's trace."""
    trace = contextvars.ContextVar("trace", default="none")
    seen: list[str] = []

    async def process(items: list[int]) -> list[int]:
        seen.append(trace.get())
        trace.set("left behind")
        return items

    trace.set("opener")
    async with TokenBatcher(process, 100, tokens=size, linger=0) as batcher:
        for item in range(3):
            trace.set(f"caller {item}")
            await batcher.submit(item)
    assert seen == ["opener"] * 3


class Lane:
    """What a backlog holds; counts how often it is looked for."""

    looked_for = 0

    def __init__(self, tokens: int, priority: int = 0, arrived: float = 0.0) -> None:
        self.tokens = tokens
        self.priority = priority
        self.arrived = arrived

    def __eq__(self, other: object) -> bool:
        Lane.looked_for += 1
        return self is other

    def __hash__(self) -> int:
        Lane.looked_for += 1
        return id(self)


def looks_in_a_backlog(length: int) -> tuple[int, int]:
    """How often items are hashed and compared to cancel ten in the middle, and to send a batch."""
    backlog: Backlog[Lane] = Backlog(Limits(8_192, 64))
    items = [Lane(100) for _ in range(length)]
    for item in items:
        backlog.push(item)
    before = Lane.looked_for
    for item in random.Random(37).sample(items[length // 4 :], 10):
        backlog.drop(item)
    cancelled = Lane.looked_for
    backlog.take(backlog.head()[0])
    return cancelled - before, Lane.looked_for - cancelled


def test_a_longer_queue_is_not_searched_more() -> None:
    """batchlet 0.1.0: cancelling 32,000 queued callers took 14 s."""
    cancels, dispatch = looks_in_a_backlog(1_000)
    more_cancels, more_dispatch = looks_in_a_backlog(30_000)
    assert more_cancels <= 1.5 * cancels  # but for collisions in the hash table
    assert more_dispatch <= 1.5 * dispatch


class Steps:
    """Counts calls of Python and C functions."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        gc.collect()
        gc.disable()  # or finalizers that it happens to run would count
        sys.setprofile(self._step)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _step(self, frame: object, event: str, arg: object) -> None:
        self.count += event in ("call", "c_call")


async def steps_with_queue(length: int) -> tuple[int, int]:
    """What one cancelled caller costs, and one batch, with so many others in the queue."""
    turns = [anyio.Event() for _ in range(length)]
    waiting = iter(turns)

    async def process(items: list[int]) -> list[int]:
        await next(waiting).wait()
        return items

    async with (
        anyio.create_task_group() as tasks,
        TokenBatcher(process, 10**6, tokens=size, max_items=10, linger=0) as batcher,
    ):
        callers = Callers(batcher, tasks)
        callers.submit(*range(10))
        await wait_all_tasks_blocked()
        callers.submit(*range(10, length))
        await wait_all_tasks_blocked()
        with Steps() as cancel:
            callers.scopes[length // 2].cancel()
            await wait_all_tasks_blocked()
        with Steps() as dispatch:
            turns[0].set()
            await wait_all_tasks_blocked()
        assert batcher.statistics().waiting_items == length - 21
        for turn in turns:
            turn.set()
    return cancel.count, dispatch.count


async def test_a_cancel_and_a_dispatch_cost_the_same_however_long_the_queue() -> None:
    """batchlet 0.1.0: 91 us of CPU per item in a burst of 100,000, against 21 for a plain list."""
    cancel, dispatch = await steps_with_queue(100)
    more_cancel, more_dispatch = await steps_with_queue(1_500)
    assert more_cancel == pytest.approx(cancel, rel=0.2)
    assert more_dispatch == pytest.approx(dispatch, rel=0.2)


# The surface.


async def test_lower_priorities_go_first() -> None:
    processor = Processor()
    processor.block()
    async with (
        TokenBatcher(processor, 100, tokens=size, max_items=2, linger=0) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        callers.submit(1)
        await wait_all_tasks_blocked()
        callers.submit(2, 3)
        await wait_all_tasks_blocked()
        callers.submit(4, priority=-1)
        callers.submit(5, priority=1)
        await wait_all_tasks_blocked()
        processor.gate.set()
    assert processor.batches[0] == [1]
    assert processor.batches[1][0] == 4
    assert processor.batches[2][1:] == [5]


async def test_a_priority_is_a_whole_number() -> None:
    async with TokenBatcher(Processor(), 100, tokens=size) as batcher:
        for priority in (math.nan, "urgent", None):
            with pytest.raises(TypeError, match="priority must be an int"):
                await batcher.submit(1, priority=priority)  # type: ignore[arg-type]
        assert await batcher.submit(1) == 2


async def test_foreign_ints_are_counts() -> None:
    class Foreign:
        def __index__(self) -> int:
            return 60

    async with TokenBatcher(Processor(), 100, tokens=lambda item: Foreign()) as batcher:  # type: ignore[arg-type,return-value]
        await batcher.submit_many([1, 2])
        assert batcher.statistics().flushes["tokens"] == 1


def test_a_run_that_is_cut_off_leaves_nothing_behind() -> None:
    """Without a word from anything, although nobody can be woken any more."""
    processor = Processor()
    batcher = TokenBatcher(processor, 100, tokens=size, max_concurrent=2, linger=0)

    async def main() -> None:
        async with batcher:
            await batcher.submit(1)

    async def forever(items: list[int]) -> list[int]:
        await asyncio.get_running_loop().create_future()
        return items

    batcher._process = forever
    for _ in range(2):
        loop = asyncio.new_event_loop()
        task = loop.create_task(main())
        loop.call_later(0.001, loop.stop)
        loop.run_forever()
        loop.close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        del task
        gc.collect()
    batcher._process = processor
    assert run_virtual("asyncio", main) is None


async def test_no_more_batches_run_than_allowed() -> None:
    processor = Processor(seconds=1)
    async with TokenBatcher(processor, 100, tokens=size, max_items=2, max_concurrent=3) as batcher:
        await batcher.submit_many([1] * 20)
    assert processor.most_running == 3
    assert processor.times == pytest.approx([0, 0, 0, 1, 1, 1, 2, 2, 2, 3])


async def test_the_queue_can_be_bounded() -> None:
    processor = Processor()
    processor.block()
    async with (
        TokenBatcher(processor, 100, tokens=size, max_waiting=2, max_items=1) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        callers.submit(1)
        await wait_all_tasks_blocked()
        callers.submit(2, 3, 4)
        await wait_all_tasks_blocked()
        refused = [item for item, got in callers.got.items() if isinstance(got, QueueFull)]
        assert len(refused) == 1
        with pytest.raises(QueueFull, match="2 items wait already and 1 more would pass max_wait"):
            await batcher.submit(5)
        processor.gate.set()


async def test_submit_many_queues_all_or_none() -> None:
    processor = Processor()
    async with TokenBatcher(processor, 10, tokens=size, max_waiting=3) as batcher:
        for items, error in (([1, 11], RequestTooLarge), ([1] * 4, QueueFull)):
            with pytest.raises(error):
                await batcher.submit_many(items)
        assert await batcher.submit_many([]) == []
        assert processor.batches == []


async def test_submit_many_raises_the_first_error_once_all_are_settled() -> None:
    async def process(items: list[int]) -> list[int | Exception]:
        await anyio.sleep(items[0])
        return [ValueError(str(item)) for item in items]

    async with TokenBatcher(process, 10, tokens=size, max_items=1, max_concurrent=3) as batcher:
        with pytest.raises(ValueError, match="3"):
            await batcher.submit_many([3, 1, 9])
        assert anyio.current_time() == 9


async def test_an_item_above_the_budget() -> None:
    processor = Processor()
    async with TokenBatcher(processor, 10, tokens=size) as batcher:
        with pytest.raises(RequestTooLarge, match="an item has 11 tokens, above the budget of 10"):
            await batcher.submit(11)
    async with TokenBatcher(processor, 10, tokens=size, oversize="alone") as batcher:
        await batcher.submit_many([4, 11, 4])
    assert processor.batches == [[4], [11], [4]]


async def test_padded_batches() -> None:
    processor = Processor()
    async with (
        TokenBatcher(processor, 100, tokens=size, padded=True, linger=1) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        callers.submit(60)
        await wait_all_tasks_blocked()
        callers.scopes[60].cancel()
        await wait_all_tasks_blocked()
        callers.submit(20, 21)  # would be full, were the 60 still there
        await anyio.sleep(0.5)
        assert processor.batches == []
        callers.submit(22, 23, 24)
        await wait_all_tasks_blocked()
        assert [len(batch) for batch in processor.batches] == [4]
    assert sorted(item for batch in processor.batches for item in batch) == [20, 21, 22, 23, 24]


async def test_outside_its_block_it_takes_nothing() -> None:
    batcher = TokenBatcher(Processor(), 10, tokens=size)
    with pytest.raises(BatcherClosed, match="the batcher is new: submit inside its `async with`"):
        await batcher.submit(1)
    async with batcher:
        with pytest.raises(RuntimeError, match="the batcher is open already"):
            await batcher.__aenter__()
    with pytest.raises(BatcherClosed, match="the batcher is closed"):
        await batcher.submit(1)
    async with batcher:
        assert await batcher.submit(1) == 2


def test_it_serves_one_run_after_another(run: Run) -> None:
    batcher = TokenBatcher(Processor(), 10, tokens=size)

    async def main() -> int:
        async with batcher:
            return await batcher.submit(1)

    assert [run(main), run(main)] == [2, 2]
    assert batcher.statistics().batches == 2


async def test_another_threads_event_loop_is_refused() -> None:
    async with TokenBatcher(Processor(), 10, tokens=size) as batcher:

        async def elsewhere() -> str:
            with pytest.raises(RuntimeError, match="entered in another event loop"):
                await batcher.submit(1)
            return "refused"

        assert await anyio.to_thread.run_sync(run_virtual, "asyncio", elsewhere) == "refused"


async def test_left_by_an_exception_everyone_is_told() -> None:
    processor = Processor(seconds=3600)
    async with anyio.create_task_group() as tasks:
        batcher = TokenBatcher(processor, 100, tokens=size, max_items=2)
        callers = Callers(batcher, tasks)

        async def block() -> None:
            async with batcher:
                callers.submit(1, 2, 3)
                await anyio.sleep(1)
                raise LookupError("mine")

        with pytest.raises(LookupError, match="mine"):
            await block()
    assert all(isinstance(callers.got[item], BatcherClosed) for item in (1, 2, 3))
    assert anyio.current_time() == 1
    assert idle(batcher)


async def test_cancelled_while_it_drains_everyone_is_told() -> None:
    processor = Processor(seconds=3600)
    async with anyio.create_task_group() as tasks:
        with anyio.move_on_after(1):
            async with TokenBatcher(processor, 100, tokens=size, max_items=2) as batcher:
                callers = Callers(batcher, tasks)
                callers.submit(1, 2, 3)
                await wait_all_tasks_blocked()
    assert all(isinstance(callers.got[item], BatcherClosed) for item in (1, 2, 3))
    assert idle(batcher)


async def test_an_error_beside_the_blocks_own_is_not_hidden() -> None:
    async def process(items: list[int]) -> list[int]:
        raise SystemExit(3)

    if anyio.get_cancelled_exc_class() is asyncio.CancelledError:
        pytest.skip("asyncio lets SystemExit out of the loop itself")
    with pytest.raises(BaseExceptionGroup) as caught:
        async with TokenBatcher(process, 100, tokens=size) as batcher:
            await batcher.submit(1)
    assert caught.group_contains(SystemExit) if hasattr(caught, "group_contains") else caught


async def test_one_error_for_many_callers_keeps_a_short_traceback() -> None:
    processor = Processor()
    processor.poison = {0}
    async with TokenBatcher(processor, 10_000, tokens=size) as batcher:
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            callers.submit(*range(100))
        errors = {id(error): error for error in callers.got.values()}
        assert len(errors) == 1
        length, traceback = 0, next(iter(errors.values())).__traceback__
        while traceback is not None:
            length, traceback = length + 1, traceback.tb_next
        assert length < 10


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token_budget": 0}, "token_budget must be an int >= 1"),
        ({"max_items": True}, "max_items must be an int >= 1"),
        ({"max_concurrent": 0}, "max_concurrent must be an int >= 1"),
        ({"max_waiting": -1}, "max_waiting must be an int >= 0"),
        ({"linger": -1}, "linger must be seconds >= 0"),
        ({"linger": math.nan}, "linger must be seconds >= 0"),
        ({"oversize": "split"}, 'oversize must be "raise" or "alone"'),
    ],
)
async def test_nonsense_is_refused_at_construction(wrong: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"token_budget": 10, "tokens": size, **wrong}
    with pytest.raises(ValueError, match=re.escape(message)):
        TokenBatcher(Processor(), **arguments)


async def test_its_repr_and_statistics_tell_where_it_stands() -> None:
    processor = Processor()
    processor.block()
    async with (
        TokenBatcher(processor, 100, tokens=size, max_items=2, linger=2) as batcher,
        anyio.create_task_group() as tasks,
    ):
        Callers(batcher, tasks).submit(30, 40, 50)
        await wait_all_tasks_blocked()
        held = re.escape("1 items waiting (") + r"\d+" + re.escape(" tokens), 1 of 1 batches runn")
        assert re.search(held, repr(batcher))
        await anyio.sleep(1)
        processor.gate.set()
    done = batcher.statistics()
    assert (done.batches, done.items, done.tokens) == (2, 3, 120)
    assert done.fill == pytest.approx(0.6)
    assert done.longest_wait == pytest.approx(1) or done.longest_wait == pytest.approx(2)
    assert TokenBatcher(processor, 1, tokens=size).statistics().fill == 0


# At a limiter.


def in_flight(limiter: TokenSemaphore) -> int:
    return limiter.statistics().tokens_in_flight


async def test_a_batch_reserves_what_it_holds_and_gives_it_back() -> None:
    limiter = TokenSemaphore(100)
    held: list[int] = []

    async def process(items: list[int]) -> list[int]:
        held.append(in_flight(limiter))
        return items

    async with TokenBatcher(process, 50, tokens=size, limiter=limiter) as batcher:
        await batcher.submit_many([20, 20, 20])
    assert held == [40, 20]
    assert in_flight(limiter) == 0


async def test_while_it_waits_the_batch_stays_open() -> None:
    limiter = TokenSemaphore(100)
    processor = Processor()
    async with (
        TokenBatcher(processor, 60, tokens=size, linger=1, limiter=limiter) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        with await limiter.acquire(95):
            callers.submit(10)
            await anyio.sleep(2)  # it asks for 10 at 1
            callers.submit(11, 12)
            await anyio.sleep(2)
            callers.submit(40)  # no longer fits: it leads the next batch
            await wait_all_tasks_blocked()
            assert processor.batches == []
    assert [sorted(batch) for batch in processor.batches] == [[10, 11, 12], [40]]
    assert in_flight(limiter) == 0


async def test_a_batch_grows_by_what_there_is_room_for() -> None:
    limiter = TokenSemaphore(100)
    processor = Processor()
    async with (
        TokenBatcher(processor, 90, tokens=size, limiter=limiter) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        blocker, other = await limiter.acquire(50), await limiter.acquire(50)
        callers.submit(10)
        await anyio.sleep(1)
        for item in (11, 12, 13, 14, 15):
            callers.submit(item)
            await wait_all_tasks_blocked()
        blocker.release()  # room for 50: 10 was asked, half of the other 65 is granted
        await wait_all_tasks_blocked()
        assert processor.batches[0] == [10, 11, 12]
        other.release()
    assert [item for batch in processor.batches for item in batch] == [10, 11, 12, 13, 14, 15]
    assert in_flight(limiter) == 0


async def test_a_batch_that_grows_overtakes_nobody() -> None:
    limiter = TokenSemaphore(100)
    processor = Processor()
    order: list[str] = []

    async def other() -> None:
        async with limiter.reserve(60):
            order.append("other")

    async with (
        TokenBatcher(processor, 90, tokens=size, linger=0, limiter=limiter) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        blocker, small = await limiter.acquire(60), await limiter.acquire(40)
        callers.submit(10)
        await wait_all_tasks_blocked()
        tasks.start_soon(other)
        await wait_all_tasks_blocked()
        callers.submit(30)
        await wait_all_tasks_blocked()
        small.release()  # 40 free: 10 goes, the other 30 would fit, but somebody waits
        await wait_all_tasks_blocked()
        assert (processor.batches, order) == ([[10]], [])
        blocker.release()
    assert processor.batches == [[10], [30]]


async def test_a_cancelled_item_leaves_the_batch_at_the_limiter() -> None:
    limiter = TokenSemaphore(100)
    processor = Processor()
    processor.block()
    async with (
        TokenBatcher(processor, 60, tokens=size, linger=0, limiter=limiter) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        blocker = await limiter.acquire(100)
        callers.submit(10, 20, 30)
        await wait_all_tasks_blocked()
        callers.scopes[20].cancel()
        await wait_all_tasks_blocked()
        blocker.release()
        await wait_all_tasks_blocked()
        assert [sorted(batch) for batch in processor.batches] == [[10, 30]]
        assert in_flight(limiter) == 40
        processor.gate.set()
    assert callers.got == {10: 20, 30: 60}


async def test_when_all_leave_the_limiter_is_asked_no_longer() -> None:
    limiter = TokenSemaphore(100)
    processor = Processor()
    async with (
        TokenBatcher(processor, 60, tokens=size, linger=0, limiter=limiter) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        with await limiter.acquire(60):
            callers.submit(50)
            await wait_all_tasks_blocked()
            assert limiter.statistics().waiting_calls == 1
            callers.scopes[50].cancel()
            await wait_all_tasks_blocked()
            assert limiter.statistics().waiting_calls == 0
            limiter.acquire_nowait(40).release()
            callers.submit(7)  # and it is ready for the next
            await wait_all_tasks_blocked()
            assert processor.batches == [[7]]


async def test_withdrawn_and_asked_again_in_one_tick() -> None:
    limiter = TokenSemaphore(100)
    processor = Processor()
    async with (
        TokenBatcher(processor, 60, tokens=size, linger=0, limiter=limiter) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        blocker = await limiter.acquire(100)
        callers.submit(50)
        await wait_all_tasks_blocked()
        callers.scopes[50].cancel()
        callers.submit(7)
        blocker.release()
    assert callers.got == {7: 14}
    assert in_flight(limiter) == 0


async def test_an_urgent_item_that_does_not_fit_the_grant_is_asked_for_anew() -> None:
    limiter = TokenSemaphore(100)
    processor = Processor()
    async with (
        TokenBatcher(processor, 90, tokens=size, linger=0, limiter=limiter) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        blocker, small = await limiter.acquire(80), await limiter.acquire(20)
        callers.submit(10)
        await wait_all_tasks_blocked()
        callers.submit(85, priority=-1)
        await wait_all_tasks_blocked()
        small.release()
        await wait_all_tasks_blocked()
        assert (processor.batches, in_flight(limiter)) == ([], 80)
        blocker.release()
    assert processor.batches == [[85], [10]]


async def test_growing_spends_no_second_request() -> None:
    """Requests are scarce and tokens are not: the batch fills up while it waits for its turn."""
    limiter = TokenRateLimiter(Quota(1, per=10, of="requests"), tokens_per_minute=10_000)
    processor = Processor()
    async with (
        TokenBatcher(processor, 1_000, tokens=size, linger=0, limiter=limiter) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        for item in range(40):
            callers.submit(item)
            await anyio.sleep(0.51)
    assert [len(batch) for batch in processor.batches] == [1, 19, 20]
    assert processor.times == pytest.approx([0, 10, 20])


async def test_the_rate_is_kept_and_used() -> None:
    limiter = TokenRateLimiter(Quota(1_000, per=10))
    processor = Processor()
    async with (
        TokenBatcher(processor, 300, tokens=size, limiter=limiter, max_concurrent=4) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        for item in range(100):
            callers.submit(item % 50 + 10)
            await anyio.sleep(0.05)
    sent = [(at, sum(batch)) for at, batch in zip(processor.times, processor.batches, strict=True)]
    for start, _ in sent:
        assert sum(tokens for at, tokens in sent if start <= at < start + 10 - 1e-9) <= 1_000
    assert sum(tokens for _, tokens in sent) == sum(i % 50 + 10 for i in range(100))
    assert max(processor.times) < 40


async def test_an_input_only_quota_takes_batches() -> None:
    limiter = TokenLimits(TokenRateLimiter(input_tokens_per_minute=100), TokenSemaphore(100))
    async with TokenBatcher(Processor(), 100, tokens=size, limiter=limiter) as batcher:
        assert await batcher.submit_many([50, 50]) == [100, 100]


async def test_a_budget_that_can_never_pass_fails_at_construction() -> None:
    with pytest.raises(RequestTooLarge):
        TokenBatcher(Processor(), 101, tokens=size, limiter=TokenSemaphore(100))


def test_it_is_built_before_any_loop_with_a_limiter(run: Run) -> None:
    batcher = TokenBatcher(Processor(), 10, tokens=size, limiter=TokenSemaphore(10))

    async def main() -> int:
        async with batcher:
            return await batcher.submit(1)

    assert run(main) == 2


async def test_a_limit_that_was_lowered_fails_the_batch_and_not_the_batcher() -> None:
    limiter = TokenSemaphore(100)
    async with TokenBatcher(Processor(), 60, tokens=size, limiter=limiter) as batcher:
        limiter.max_tokens = 40
        with pytest.raises(RequestTooLarge):
            await batcher.submit(50)
        assert await batcher.submit(30) == 60
        assert batcher.statistics().failed == 1


async def test_isolating_reserves_every_further_call() -> None:
    limiter = TokenRateLimiter(Quota(1_000, per=60))
    processor = Processor()
    processor.poison = {100}
    async with (
        TokenBatcher(processor, 400, tokens=size, limiter=limiter, isolate_errors=True) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        callers.submit(100, 101, 102)
    assert (callers.got[101], callers.got[102]) == (202, 204)
    spent = sum(sum(batch) for batch in processor.batches)
    assert limiter.statistics().quotas[0].used == spent


async def test_isolating_at_a_limiter_that_refuses() -> None:
    limiter = TokenSemaphore(100)

    async def process(items: list[int]) -> list[int]:
        limiter.max_tokens = 9
        raise ValueError("bad batch")

    async with TokenBatcher(
        process, 60, tokens=size, padded=True, limiter=limiter, isolate_errors=True
    ) as batcher:
        with pytest.raises(RequestTooLarge):
            await batcher.submit_many([10, 10])


class RoutedLease:
    """A lease that says where its call goes."""

    def __init__(self, lease: Lease, replica: str) -> None:
        self._lease = lease
        self.replica = replica

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lease, name)


class Routed(TokenSemaphore):  # type: ignore[misc]
    """A limiter that chooses, like a router."""

    replicas: tuple[str, ...] = ("a",)

    async def acquire(self, cost: int | Usage, **options: Any) -> Any:
        return RoutedLease(await super().acquire(cost, **options), self.replicas[0])

    def acquire_nowait(self, cost: int | Usage, **options: Any) -> Any:
        return RoutedLease(super().acquire_nowait(cost, **options), self.replicas[-1])


@pytest.mark.parametrize("replicas", [("a",), ("a", "b")])
async def test_with_a_router_process_sees_the_replica(replicas: tuple[str, ...]) -> None:
    limiter = Routed(100)
    limiter.replicas = replicas
    seen: list[tuple[object, list[int]]] = []

    async def process(items: list[int], lease: Lease) -> list[int]:
        seen.append((lease.replica, items))
        return items

    async with (
        TokenBatcher(process, 60, tokens=size, linger=0, limiter=limiter) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        blocker = await limiter.acquire(100)
        callers.submit(10)
        await wait_all_tasks_blocked()
        callers.submit(11)
        await wait_all_tasks_blocked()
        blocker.release()
    grown = replicas == ("a",)
    assert seen == [("a", [10, 11])] if grown else [("a", [10]), ("a", [11])]
    assert in_flight(limiter) == 0


@pytest.mark.parametrize("through", ["router", "limits"])
async def test_batches_go_to_the_replicas_that_a_router_chose(through: str) -> None:
    router = TokenRouter([Replica("a", max_tokens=100), Replica("b", max_tokens=100)])
    limiter = router if through == "router" else TokenLimits(TokenSemaphore(1_000), router)
    seen: list[tuple[str, int]] = []

    async def process(items: list[int], lease: Lease) -> list[int]:
        assert lease.replica is not None
        seen.append((lease.replica.name, lease.tokens))
        await anyio.sleep(1)
        return items

    async with TokenBatcher(
        process, 80, tokens=size, linger=0, max_concurrent=4, limiter=limiter
    ) as batcher:
        assert await batcher.submit_many([40] * 8) == [40] * 8
        assert anyio.current_time() == pytest.approx(2)  # two at a time: one to each
    assert sorted(seen) == [("a", 80), ("a", 80), ("b", 80), ("b", 80)]
    assert all(each.tokens_in_flight == 0 for each in router.statistics().replicas)
    with pytest.raises(RequestTooLarge):
        TokenBatcher(process, 101, tokens=size, limiter=limiter)


# What always holds.


@dataclass
class Call:
    """One caller: submits `items` at `at` seconds, and gives up after `patience`."""

    at: float
    items: list[int]
    priority: int
    patience: float


@dataclass
class Answer:
    """What the processor does with one batch, `seconds` later."""

    seconds: float
    fault: Literal["none", "raises", "dies", "too few", "a bad item"]


class Surroundings(TypedDict):
    """How the batcher is set up."""

    linger: float
    max_concurrent: int
    padded: bool
    isolate_errors: bool


Ending = Literal["closed", "left by an error", "cancelled"]

CALLS = st.builds(
    Call,
    at=st.sampled_from([0.0, 0.0, 0.002, 0.005, 0.1, 0.3, 1.0, 2.0]),
    items=st.lists(st.integers(0, 100), min_size=1, max_size=4),
    priority=st.sampled_from([0, 0, 0, -1, 1]),
    patience=st.sampled_from([math.inf, math.inf, 0.0, 0.005, 0.2, 1.0]),
)
ANSWERS = st.builds(
    Answer,
    seconds=st.sampled_from([0.0, 0.0, 0.01, 0.5]),
    fault=st.sampled_from(["none", "none", "raises", "dies", "too few", "a bad item"]),
)
SURROUNDINGS = st.fixed_dictionaries(
    {
        "linger": st.sampled_from([0.0, 0.005, 0.3]),
        "max_concurrent": st.sampled_from([1, 3]),
        "padded": st.booleans(),
        "isolate_errors": st.booleans(),
    }
)


class Script:
    """Plays one history, and keeps what each caller got."""

    def __init__(self, answers: list[Answer], limiter: TokenSemaphore | None, **how: Any) -> None:
        self.answers = iter(answers)
        self.limiter = limiter
        self.padded: bool = how["padded"]
        self.batcher = TokenBatcher(
            self.process, 100, tokens=size, max_items=5, limiter=limiter, **how
        )
        self.got: list[tuple[Call, Any]] = []

    async def process(self, items: list[int]) -> list[Any]:
        assert 0 < len(items) <= 5
        assert (max(items) * len(items) if self.padded else sum(items)) <= 100
        answer = next(self.answers, Answer(0.0, "none"))
        await anyio.sleep(answer.seconds)
        if answer.fault == "raises":
            raise ValueError("all of them")
        if answer.fault == "dies":
            raise Panic
        results: list[Any] = [2 * item for item in items]
        if answer.fault == "a bad item":
            results[-1] = KeyError(items[-1])
        return results[answer.fault == "too few" :]

    async def call(self, call: Call) -> None:
        await anyio.sleep(call.at)
        outcome: Any = "gave up"
        with anyio.move_on_after(call.patience):
            try:
                if len(call.items) == 1:
                    outcome = [await self.batcher.submit(call.items[0], priority=call.priority)]
                else:
                    outcome = await self.batcher.submit_many(call.items, priority=call.priority)
            except Exception as error:
                outcome = error
        self.got.append((call, outcome))

    async def play(self, calls: list[Call], ending: Ending, end: float) -> None:
        with anyio.fail_after(1_000):
            async with anyio.create_task_group() as tasks:
                for call in calls:
                    tasks.start_soon(self.call, call)
                with anyio.CancelScope() as scope, contextlib.suppress(LookupError):
                    async with self.batcher:
                        await anyio.sleep(end)
                        if ending == "left by an error":
                            raise LookupError
                        if ending == "cancelled":
                            scope.cancel()


def rightful(call: Call, outcome: Any, *, faulty: bool, cut_off: bool) -> bool:
    """May this caller have got this?"""
    if outcome == "gave up":
        return call.patience < math.inf
    if isinstance(outcome, BatcherClosed):  # before or after the block, or thrown out of it
        return cut_off
    if isinstance(outcome, KeyError):
        return faulty and outcome.args[0] in call.items
    if isinstance(outcome, Exception):
        return faulty and isinstance(outcome, (ValueError, BatchError))
    return bool(outcome == [2 * item for item in call.items])


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@settings(max_examples=100)
@given(
    st.lists(CALLS, max_size=12),
    st.lists(ANSWERS, max_size=6),
    SURROUNDINGS,
    st.booleans(),
    st.sampled_from(get_args(Ending)),
    st.sampled_from([0.0, 0.003, 0.5, 3.0]),
)
def test_each_caller_gets_its_own_and_nothing_is_left(
    backend: Backend,
    calls: list[Call],
    answers: list[Answer],
    surroundings: Surroundings,
    limited: bool,
    ending: Ending,
    end: float,
) -> None:
    limiter = TokenSemaphore(120) if limited else None
    script = Script(answers, limiter, **surroundings)
    run_virtual(backend, script.play, calls, ending, end)
    assert len(script.got) == len(calls)
    faulty = any(answer.fault != "none" for answer in answers)
    for call, outcome in script.got:
        cut_off = ending != "closed" or call.at >= end
        assert rightful(call, outcome, faulty=faulty, cut_off=cut_off), (call, outcome)
    assert idle(script.batcher)
    if limiter is not None:
        assert in_flight(limiter) == limiter.statistics().waiting_calls == 0
