"""A batch job: one worker over many items, with bounded memory and an error for each that failed.

The limits decide who goes when; this bounds only how many items are on their way,
those that wait in a queue included. An item's place is taken when it is read from
the input, and free again when its result is handed out, so that nothing piles up
at either end.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Sized
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import isawaitable
from random import Random
from types import TracebackType
from typing import Any, Final, Generic, Literal, Self, TypeVar, final

import anyio
from anyio.abc import TaskGroup

from tokenflow._errors import QueueFull, TokenflowError, WaitTimeout
from tokenflow._refusal import Refusal
from tokenflow._usage import known_seconds, positive_int
from tokenflow.limits._lease import log

__all__ = ["Job", "MapResult", "MapResults", "Progress", "Show", "classified", "current_job"]

T = TypeVar("T")
R = TypeVar("R")

_FIRST_DELAY: Final = 1.0
_LONGEST_DELAY: Final = 60.0
_RATE_OVER: Final = 60.0  # seconds of the past that the rate and the time left go by


@final
@dataclass(frozen=True, slots=True)
class MapResult(Generic[T, R]):
    """What became of one item: its `value`, or the `error` that its worker raised.

    `index` is its place in the input. `attempts` is how often the worker was called.
    """

    index: int
    item: T
    value: R | None = None
    error: Exception | None = None
    attempts: int = 1

    def unwrap(self) -> R:
        """The value; raises the error if there is one."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job is. None is unknown: a total of no length, a rate with no past.

    `tokens` counts what the flow's calls made by the workers were charged.
    """

    done: int
    failed: int
    total: int | None
    tokens: int
    tokens_per_minute: float
    seconds_left: float | None


@final
class Job:
    """The books of one job: what its calls were charged, and how fast it goes."""

    __slots__ = ("_outer", "_past", "_started", "done", "failed", "tokens", "total")

    def __init__(self, total: int | None, now: float) -> None:
        self._outer = current_job.get()
        self.done: int = 0
        self.failed: int = 0
        self.tokens: int = 0
        self.total: int | None = total
        self._started = now
        self._past: deque[tuple[float, int, int]] = deque([(now, 0, 0)], maxlen=1000)

    def charge(self, tokens: int) -> None:
        """A call of one of its workers was charged so much; it counts in the outer job too."""
        self.tokens += tokens
        if self._outer is not None:
            self._outer.charge(tokens)

    def count(self, failed: bool, now: float) -> Progress:
        """One more item is through."""
        self.done += 1
        self.failed += failed
        past = self._past
        if now - past[-1][0] >= _RATE_OVER / 500:
            past.append((now, self.done, self.tokens))
        while len(past) > 1 and past[1][0] <= now - _RATE_OVER:
            past.popleft()
        since, done, tokens = past[0]
        seconds = now - since
        items_per_second = (self.done - done) / seconds if seconds else 0.0
        left = None
        if self.total is not None and items_per_second:
            left = max(0, self.total - self.done) / items_per_second
        return Progress(
            done=self.done,
            failed=self.failed,
            total=self.total,
            tokens=self.tokens,
            tokens_per_minute=60 * (self.tokens - tokens) / seconds if seconds else 0.0,
            seconds_left=left,
        )


current_job: Final[ContextVar[Job | None]] = ContextVar("tokenflow.job", default=None)

Show = Callable[[Progress], object]


@final
class MapResults(Generic[T, R]):
    """The results of `TokenFlow.map`: iterate over them inside its `async with`.

    After it, what was finished can still be taken; then RuntimeError, if there was more.
    """

    __slots__ = (
        "_attempts",
        "_changed",
        "_classify",
        "_failure",
        "_in_order",
        "_is_left",
        "_items",
        "_job",
        "_max_pending",
        "_next",
        "_pending",
        "_random",
        "_read_all",
        "_ready",
        "_show",
        "_tasks",
        "_worker",
    )

    def __init__(
        self,
        worker: Callable[[T], Awaitable[R]],
        items: Iterable[T] | AsyncIterable[T],
        classify: Callable[[object], Refusal | None],
        *,
        order: Literal["completed", "input"],
        max_pending: int,
        attempts: int,
        show: Show | None,
    ) -> None:
        if order not in ("completed", "input"):
            raise ValueError(f'order must be "completed" or "input", not {order!r}')
        if not callable(worker):
            raise TypeError(f"worker must be an async function of one item, not {worker!r}")
        if not isinstance(items, (Iterable, AsyncIterable)):
            raise TypeError(f"items must be an iterable or an async one, not {items!r}")
        self._worker = worker
        self._items = items
        self._classify = classify
        self._in_order = order == "input"
        self._max_pending = positive_int(max_pending, "max_pending")
        self._attempts = positive_int(attempts, "attempts")
        self._show = show
        self._tasks: TaskGroup | None = None
        self._pending = 0  # read from the input, and not handed out yet
        self._next = 0  # the index to hand out next, in order of input
        self._ready: dict[int, MapResult[T, R]] = {}  # by index, in order of completion
        self._read_all = False
        self._is_left = False
        self._failure: Exception | None = None
        self._random = Random(0)  # for jitter

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RuntimeError("a map can be entered once: call flow.map(...) again")
        total = len(self._items) if isinstance(self._items, Sized) else None
        self._job = Job(total, anyio.current_time())
        self._changed = anyio.Event()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._feed)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        """Left before the end, or by an error, what is still on its way is cancelled."""
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        self._is_left = True
        self._notify()
        cancels = (anyio.get_cancelled_exc_class(), BaseExceptionGroup)
        try:
            if isinstance(exc, cancels) and not isinstance(exc, Exception):
                return await self._tasks.__aexit__(exc_type, exc, traceback)
            await self._tasks.__aexit__(None, None, None)
            return None  # the caller's own error, as it is and in no group
        finally:
            self._close_show()

    def _close_show(self) -> None:
        if (close := getattr(self._show, "close", None)) is not None:
            try:
                close()
            except Exception as error:
                log(logging.ERROR, "the progress %r raised %r", self._show, error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MapResult[T, R]:
        if self._tasks is None:
            raise RuntimeError("write `async with flow.map(...) as results:` around the loop")
        while (result := self._take()) is None:
            if self._read_all and not self._pending:
                if self._failure is not None:
                    raise self._failure
                raise StopAsyncIteration
            if self._is_left:
                raise RuntimeError("the map's block has been left, and with it what was pending")
            await self._changed.wait()
        return result

    def _take(self) -> MapResult[T, R] | None:
        index = self._next if self._in_order else next(iter(self._ready), -1)
        result = self._ready.pop(index, None)
        if result is not None:
            self._next += 1
            self._pending -= 1
            self._notify()
        return result

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _feed(self) -> None:
        """Read the input, as far ahead as may be pending."""
        assert self._tasks is not None
        index = 0
        try:
            async with aclosing(_each(self._items)) as items:
                async for item in items:
                    self._pending += 1
                    self._tasks.start_soon(self._work, index, item)
                    index += 1
                    while self._pending >= self._max_pending:
                        await self._changed.wait()
        except Exception as error:  # the input's own; what it gave until then is finished first
            self._failure = error
        self._read_all = True
        self._notify()

    async def _work(self, index: int, item: T) -> None:
        current_job.set(self._job)
        for attempt in range(1, self._attempts + 1):
            result = await self._attempt(index, item, attempt)
            if result.error is None or attempt == self._attempts:
                break
            delay = self._delay(result.error, attempt)
            if delay is None:
                break
            await anyio.sleep(delay)
        self._ready[index] = result
        progress = self._job.count(result.error is not None, anyio.current_time())
        if self._show is not None:
            try:
                self._show(progress)
            except Exception as error:
                log(logging.ERROR, "the progress %r raised %r", self._show, error)
        self._notify()

    async def _attempt(self, index: int, item: T, attempt: int) -> MapResult[T, R]:
        try:
            working = self._worker(item)
            if not isawaitable(working):
                raise TypeError(
                    f"the worker must be an async function: {self._worker!r} returned "
                    f"{working!r}; run what blocks with anyio.to_thread.run_sync"
                )
            return MapResult(index, item, await working, None, attempt)
        except Exception as error:
            return MapResult(index, item, None, error, attempt)
        except BaseExceptionGroup as errors:  # trio's, of a worker with tasks of its own
            cancelled, others = errors.split(anyio.get_cancelled_exc_class())
            if cancelled is None or not isinstance(others, ExceptionGroup):
                raise
            raise cancelled from None
        except anyio.get_cancelled_exc_class() as cancelled:
            if anyio.current_effective_deadline() == -math.inf:
                raise
            inside = RuntimeError("the worker was cancelled, though the job was not")
            inside.__cause__ = cancelled
            return MapResult(index, item, None, inside, attempt)

    def _delay(self, error: Exception, attempt: int) -> float | None:
        """Seconds until another attempt may help; None: never."""
        if isinstance(error, TokenflowError) and not isinstance(error, (QueueFull, WaitTimeout)):
            return None
        refusal = classified(self._classify, error)
        if refusal is None or refusal.is_permanent:
            return None
        told = known_seconds(refusal.retry_after)
        if told is not None:
            return told
        delay = min(_FIRST_DELAY * 2.0 ** (attempt - 1), _LONGEST_DELAY)
        return delay * self._random.uniform(0.5, 1.0)

    def __repr__(self) -> str:
        if self._tasks is None:
            return "<map, not begun>"
        job = self._job
        total = "" if job.total is None else f" of {job.total:,}"
        return (
            f"<map{' (left)' * self._is_left}: {job.done:,}{total} done, {job.failed:,} failed, "
            f"{0 if self._is_left else self._pending:,} pending, {job.tokens:,} tokens>"
        )


def classified(classify: Callable[[Any], Refusal | None], outcome: object) -> Refusal | None:
    """What it means; unknown where rules of the user's own raise, which would hide it."""
    try:
        return classify(outcome)
    except Exception as error:
        log(logging.ERROR, "%r could not be classified: %r", outcome, error)
        return None


async def _each(items: Iterable[T] | AsyncIterable[T]) -> AsyncGenerator[T, None]:
    """One by one; closed early, it closes an async input too."""
    if not isinstance(items, AsyncIterable):
        for item in items:
            yield item
        return
    source = aiter(items)
    try:
        async for item in source:
            yield item
    finally:
        if isinstance(source, AsyncGenerator):
            await source.aclose()
