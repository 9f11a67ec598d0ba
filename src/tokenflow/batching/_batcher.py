"""Batches for live callers: each submits one item, and gets the result of its own.

One task per batch, from first to last: it lingers, reserves at the limiter,
takes what the queue then holds, processes it and hands out the results. At most
one such task is before its departure (it *gathers*), so there is one timer, one
place in the limiter's queue, and none of either when nothing is queued.

`_reservation` says why a batch asks the limiter as it does.

Invariant: an item is queued, or in one batch that is running, or settled; and
settled once, whatever happens to its batch.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import copy_context
from threading import get_ident
from types import TracebackType
from typing import Generic, Literal, Self, TypeAlias, TypeVar, final

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from tokenflow._errors import BatcherClosed, BatchError, QueueFull
from tokenflow._run import Bell, Run, current_run
from tokenflow._usage import token_count
from tokenflow.limits import Lease, Limiter

from ._backlog import Backlog
from ._counts import BatcherStatistics, Counts, Flush
from ._fitting import Limits, positive
from ._items import Countdown, Item, as_error, rows_of
from ._packing import too_large
from ._reservation import charge, give_back, grown

__all__ = ["TokenBatcher"]

T = TypeVar("T")
R = TypeVar("R")

Results: TypeAlias = Awaitable[Sequence[R | Exception]]
Process: TypeAlias = Callable[[list[T]], Results[R]] | Callable[[list[T], Lease], Results[R]]


@final
class TokenBatcher(Generic[T, R]):
    """Gathers what many callers submit into batches, and hands each its own result.

    `process` is an async function that gets the items of one batch and returns
    one result per item, in order. An exception instance in what it returns is
    that item's error. What it raises is the error of all, unless
    `isolate_errors` is set: then a failed batch is halved and tried again, so
    that one bad item costs O(log n) calls and fails alone. At most about
    4 log2(n) extra calls are made; what still fails by then fails together.

    A batch goes when it is full, by `token_budget` (with `padded` that is
    longest x count) or `max_items`, or when its *oldest* item has waited
    `linger` seconds. An item that does not fit leads the next one. At most
    `max_concurrent` batches are on their way. `linger=0` gathers what is
    submitted in one turn of the event loop.

    With `limiter`, a batch reserves its tokens, as the input of one request,
    before it goes. `linger` bounds the time until it asks. While it waits
    there it stays open up to its budget, and a cancelled item leaves it. Each
    further call that `isolate_errors` makes is reserved anew. Where the limiter
    is a router, `process(items, lease)` is called: `lease.replica` was chosen.

    >>> import anyio, tokenflow
    >>> async def upper(texts: list[str]) -> list[str]:
    ...     return [text.upper() for text in texts]
    >>> async def main() -> list[str]:
    ...     async with tokenflow.TokenBatcher(upper, 8_192, tokens=len) as batcher:
    ...         return await batcher.submit_many(["a", "b"])
    >>> anyio.run(main)
    ['A', 'B']

    Leaving the block takes no more items, sends what is queued without
    lingering, and waits for it. Left by an exception or a cancellation, what is
    under way is cancelled, and callers elsewhere get `BatcherClosed`.

    `process` runs in a copy of the context in which the batcher was entered, so
    no caller's context variables (a trace, a deadline) stick to others' items.
    When it is cancelled, or dies of something that is no `Exception`, the
    callers of its batch get `BatchError` and the next batch goes on; KeyboardInterrupt
    and SystemExit end the block as well.

    Raises:
        ValueError: a budget, bound or duration that makes no sense.
        RequestTooLarge: the whole budget could never pass the limiter.
    """

    def __init__(
        self,
        process: Process[T, R],
        token_budget: int,
        *,
        tokens: Callable[[T], int],
        max_items: int | None = None,
        linger: float = 0.005,
        max_concurrent: int = 1,
        max_waiting: int | None = None,
        padded: bool = False,
        limiter: Limiter | None = None,
        oversize: Literal["raise", "alone"] = "raise",
        isolate_errors: bool = False,
    ) -> None:
        if isinstance(linger, bool) or not linger >= 0:
            raise ValueError(f"linger must be seconds >= 0, not {linger!r}")
        if oversize not in ("raise", "alone"):
            raise ValueError(f'oversize must be "raise" or "alone", not {oversize!r}')
        self._limits = Limits.checked(token_budget, max_items, padded)
        self._process: Callable[..., Results[R]] = process
        self._tokens = tokens
        self._linger = linger
        self._max_concurrent = positive(max_concurrent, "max_concurrent")
        self._max_waiting = None if max_waiting is None else token_count(max_waiting, "max_waiting")
        self._limiter = limiter
        self._takes_oversize = oversize == "alone"
        self._isolates = isolate_errors
        if limiter is not None:
            limiter.delay(charge(self._limits.token_budget))
        self._counts = Counts()
        self._state: Literal["new", "open", "closing", "closed"] = "new"
        self._begin()

    def _begin(self) -> None:
        """The state of one run; what an earlier one left, if it was cut off, is nobody's."""
        self._backlog: Backlog[Item[T, R]] = Backlog(self._limits)
        self._running = 0
        self._gathering = False
        self._bell: Bell | None = None  # of the task that lingers
        self._asking: anyio.CancelScope | None = None  # of the task at the limiter

    async def __aenter__(self) -> Self:
        if self._state in ("open", "closing") and not self._run.has_ended():
            raise RuntimeError("the batcher is open already: enter it once, and share it")
        run = current_run()
        assert run is not None
        self._begin()
        self._run: Run = run
        self._context = copy_context()
        self._tasks: TaskGroup = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._state = "open"
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        if exc_type is GeneratorExit and self._run.has_ended():
            self._state = "closed"
            return None
        if self._state == "open":
            self._state = "closing"
        self._look()
        try:
            return await self._tasks.__aexit__(exc_type, exc, traceback)
        except BaseExceptionGroup as group:
            if group.exceptions == (exc,):
                return None  # what the block raised, as it raised it
            raise
        finally:
            self._abandon()

    async def submit(self, item: T, *, priority: int = 0) -> R:
        """Queue an item and wait for its result.

        Lower `priority` goes first, within a priority the earlier one. Cancelled
        while queued, the item is gone and costs nothing; while its batch runs,
        the batch goes on for the others.

        Raises:
            RequestTooLarge: the item is above the budget (unless `oversize="alone"`).
            QueueFull: `max_waiting` items are queued already.
            BatcherClosed: the batcher is not open, or was left by an exception.
            BatchError: the batch has no result for this item; `__cause__` says why.
            Exception: whatever `process` raised or returned for it, and whatever
                `tokens` raised for it.
        """
        run = self._open_run()
        size = self._size(item)
        if self._max_waiting is not None:
            self._expect_room(1, self._max_waiting)
        if run.effective_deadline() == -math.inf:
            await checkpoint()
        latch = run.latch()
        queued: Item[T, R] = Item(item, size, priority, run.now(), latch)
        self._backlog.push(queued)
        self._look()
        try:
            await latch
        except BaseException as error:
            self._leave([queued], error)
            raise
        return queued.outcome()

    async def submit_many(self, items: Iterable[T], *, priority: int = 0) -> list[R]:
        """Queue several items in one step and wait for all results, in order of the items.

        All are queued or none. If some fail, the first one's error is raised
        once all are settled; use `submit` in tasks of your own to see each.

        Raises:
            As `submit` does; also `QueueFull` where not all of them find room.
        """
        run = self._open_run()
        values = list(items)
        sizes = [self._size(value) for value in values]
        if self._max_waiting is not None:
            self._expect_room(len(values), self._max_waiting)
        if run.effective_deadline() == -math.inf:
            await checkpoint()
        latch = run.latch()
        countdown = Countdown(latch, len(values))
        now = run.now()
        queued: list[Item[T, R]] = [
            Item(value, size, priority, now, countdown)
            for value, size in zip(values, sizes, strict=True)
        ]
        for item in queued:
            self._backlog.push(item)
        self._look()
        try:
            if countdown.left:
                await latch
        except BaseException as error:
            self._leave(queued, error)
            raise
        return [item.outcome() for item in queued]

    def statistics(self) -> BatcherStatistics:
        """What it has done since it was built, and what it holds. Works anywhere."""
        counts, batches, items = self._counts, self._counts.batches, self._counts.items
        return BatcherStatistics(
            waiting_items=self._backlog.count,
            waiting_tokens=self._backlog.tokens,
            running_batches=self._running - self._gathering,
            batches=batches,
            items=items,
            tokens=counts.tokens,
            failed=counts.failed,
            cancelled=counts.cancelled,
            fill=counts.tokens / (self._limits.token_budget * batches) if batches else 0.0,
            mean_wait=counts.waited / items if items else 0.0,
            longest_wait=counts.longest_wait,
            flushes=dict(counts.flushes),
        )

    def __repr__(self) -> str:
        return (
            f"<TokenBatcher {self._state}: {self._backlog.count} items waiting "
            f"({self._backlog.tokens} tokens), {self._running - self._gathering} of "
            f"{self._max_concurrent} batches running>"
        )

    # From the callers' tasks.

    def _open_run(self) -> Run:
        if self._state != "open":
            raise BatcherClosed(
                f"the batcher is {self._state}: submit inside its `async with` block"
            )
        run = self._run
        if not (get_ident() == run.thread and run.is_running()) and current_run() is not run:
            raise RuntimeError(
                "the batcher was entered in another event loop: go there with "
                "anyio.from_thread.run, or enter one here"
            )
        return run

    def _size(self, value: T) -> int:
        size = self._tokens(value)
        if type(size) is not int or size < 0:
            size = token_count(size, "tokens(item)")
        if size > self._limits.token_budget and not self._takes_oversize:
            raise too_large("an item", size, self._limits.token_budget)
        return size

    def _expect_room(self, items: int, max_waiting: int) -> None:
        waiting = self._backlog.count
        if waiting + items > max_waiting:
            raise QueueFull(
                f"{waiting} items wait already and {items} more would pass "
                f"max_waiting={max_waiting}: submit fewer at once, or raise it"
            )

    def _leave(self, items: list[Item[T, R]], error: BaseException) -> None:
        """Their caller is gone: out of the queue, or out of their running batch's mind."""
        if isinstance(error, GeneratorExit) and self._run.has_ended():
            return  # the queue went with the run
        for item in items:
            if item.state == "queued":
                self._backlog.drop(item)
            if item.state != "settled":
                item.state = "settled"
                self._counts.cancelled += 1
        self._look()

    # The one place where a change of the queue has its consequences.

    def _look(self) -> None:
        """Start to gather, or tell the task that gathers that it need not wait any longer."""
        if not self._gathering:
            waiting = self._backlog.count and self._state != "closed"
            if waiting and self._running < self._max_concurrent:
                self._gathering = True
                self._running += 1
                self._context.copy().run(self._tasks.start_soon, self._run_batch)
        elif self._bell is not None:
            if not self._backlog.count or self._state != "open" or self._backlog.is_full():
                self._bell.ring()
        elif self._asking is not None and not self._backlog.count:
            self._asking.cancel()

    # From the batch's task.

    async def _run_batch(self) -> None:
        """One batch, from its first item to its last result."""
        try:
            try:
                batch, leases = await self._gathered()
            finally:
                self._gathering = False
            self._look()
            await self._processed(batch, leases)
        except GeneratorExit:  # the run is over: there is nobody to tell, and no loop to do it
            self._state = "closed"
            raise
        except BaseException:
            self._abandon()
            raise
        finally:
            self._running -= 1
            self._look()

    async def _gathered(self) -> tuple[list[Item[T, R]], list[Lease]]:
        """Linger, reserve, and take what the queue holds by then; possibly nothing."""
        flush = await self._lingered()
        if self._limiter is None:
            return self._departed(*self._backlog.head(), flush), []
        while self._backlog.count:
            asked = self._backlog.head()[1]
            lease = await self._asked(self._limiter, asked)
            if lease is None:
                continue
            leases = grown(self._limiter, lease, self._backlog.head()[1] - asked)
            batch, cost = self._backlog.head(sum(lease.tokens for lease in leases))
            if batch:
                give_back(leases, cost)
                return self._departed(batch, cost, flush), leases
            for lease in leases:  # cancels or priorities have put a larger item first
                lease.cancel()
        return [], []

    async def _lingered(self) -> Flush:
        """Wait until the batch is full, its oldest item is old enough, or the queue is empty."""
        bell = self._run.bell()
        try:
            while self._backlog.count:
                if self._backlog.is_full():
                    capped = self._backlog.count >= (self._limits.max_items or math.inf)
                    return "items" if capped else "tokens"
                if self._state != "open":
                    return "close"
                due = self._backlog.oldest() + self._linger
                if due <= self._run.now():
                    return "linger"
                self._bell = bell
                bell.set_alarm(due)
                await bell.wait()
            return "linger"
        finally:
            self._bell = None
            bell.set_alarm(math.inf)

    async def _asked(self, limiter: Limiter, cost: int) -> Lease | None:
        """Wait for a lease; None if the queue emptied meanwhile, or its head was refused."""
        lease = None
        with anyio.CancelScope() as self._asking:
            try:
                lease = await limiter.acquire(charge(cost))
            except Exception as error:
                self._fail(self._departed(*self._backlog.head(), None), error)
        self._asking = None
        return lease

    def _departed(
        self, batch: list[Item[T, R]], cost: int, flush: Flush | None
    ) -> list[Item[T, R]]:
        """Take them out of the queue; `flush` None: they never go."""
        self._backlog.take(batch)
        for item in batch:
            item.state = "running"
        if batch and flush is not None:
            self._counts.departure([item.arrived for item in batch], cost, flush, self._run.now())
        return batch

    async def _processed(self, batch: list[Item[T, R]], leases: list[Lease]) -> None:
        """Settle every item of a batch, whatever `process` does."""
        try:
            error = await self._tried(batch, leases)
            if error is not None:
                await self._isolated(batch, error)
        except GeneratorExit:
            raise
        except BaseException as cause:
            ours = self._is_ours(cause)
            error = (
                _closed_early()
                if ours
                else BatchError(
                    f"the processor died of {cause!r}: its batch has no results; "
                    "submit the items again once that is mended"
                )
            )
            error.__cause__ = cause
            self._fail(batch, error)
            if ours:
                raise

    def _is_ours(self, cause: BaseException) -> bool:
        """Does it end the block, other than one that came out of `process` alone?"""
        if isinstance(cause, anyio.get_cancelled_exc_class()):
            return self._run.effective_deadline() == -math.inf
        return isinstance(cause, (KeyboardInterrupt, SystemExit))

    async def _tried(self, batch: list[Item[T, R]], leases: list[Lease]) -> Exception | None:
        """Call `process` once and hand out its results; or return why there are none."""
        values = [item.value for item in batch]
        try:
            if not values:
                return None
            if leases and leases[0].replica is not None:
                rows = rows_of(await self._process(values, leases[0]), len(batch))
            else:
                rows = rows_of(await self._process(values), len(batch))
        except Exception as error:
            return error
        finally:
            for lease in leases:
                lease.release()
        for item, row in zip(batch, rows, strict=True):
            if item.state == "running":
                if isinstance(row, BaseException):
                    self._fail([item], as_error(row))
                else:
                    item.settle(row)
        return None

    async def _isolated(self, batch: list[Item[T, R]], error: Exception) -> None:
        """Halve what failed until the bad items are alone, or there were too many calls."""
        calls = 4 * len(batch).bit_length() if self._isolates else 0
        failed = [(batch, error)]
        while failed:
            group, error = failed.pop()
            group = [item for item in group if item.state == "running"]
            if len(group) < 2 or calls < 2:
                self._fail(group, error)
                continue
            calls -= 2
            middle = len(group) // 2
            for half in (group[middle:], group[:middle]):
                reason = await self._tried_again(half)
                if reason is not None:
                    failed.append((half, reason))

    async def _tried_again(self, half: list[Item[T, R]]) -> Exception | None:
        """Another call, reserved anew: the first one has spent its tokens."""
        leases: list[Lease] = []
        if self._limiter is not None:
            sizes = [item.tokens for item in half]
            cost = max(sizes) * len(sizes) if self._limits.padded else sum(sizes)
            try:
                leases = [await self._limiter.acquire(charge(cost))]
            except Exception as error:
                return error
        return await self._tried(half, leases)

    def _fail(self, batch: list[Item[T, R]], error: BaseException) -> None:
        for item in batch:
            if item.state == "running":
                self._counts.failed += 1
                item.fail(error)

    def _abandon(self) -> None:
        """Nothing will be processed any more: tell those who wait."""
        self._state = "closed"
        batch, _ = self._backlog.head()
        while batch:
            self._backlog.take(batch)
            for item in batch:
                item.fail(_closed_early())
            batch, _ = self._backlog.head()


def _closed_early() -> BatchError:
    return BatcherClosed("the batcher was left by an exception before the item had its result")
