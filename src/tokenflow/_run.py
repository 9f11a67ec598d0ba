"""Event-loop runs: which one the caller is in, what time it is there, how a waiter sleeps.

Ledgers keep the time of the run that uses them, as its clock reads it. When a
gate passes to another run its times are moved: trio starts each run at a random
instant, tests run on virtual clocks, and yet ledger time must never go back, nor
stand still between two runs. So a window filled in one `anyio.run` is still as
full in the next one, less what real time has passed.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from asyncio import (
    AbstractEventLoop,
    BaseEventLoop,
    Future,
    Handle,
    _get_running_loop,
    current_task,
)
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Protocol, final
from weakref import ref

import anyio
from anyio.lowlevel import EventLoopToken, RunVar, current_token

__all__ = ["OUTSIDE", "Bell", "Latch", "Run", "current_run"]

_run: RunVar[ref[Run]] = RunVar("tokenflow.run")  # weak, or each run would keep itself alive


@final
class Run:
    """One run of an event loop, held by reference: an id could be reused."""

    __slots__ = (
        "__weakref__",
        "_monotonic",
        "_started",
        "_token",
        "bell",
        "effective_deadline",
        "is_running",
        "latch",
        "now",
        "pid",
        "thread",
    )

    now: Callable[[], float]
    """The run's clock."""

    is_running: Callable[[], bool]
    """Surely going on, in `thread`? A cheap test, which may say no where the answer is yes."""

    bell: Callable[[], Bell]
    """Something for one task of this run to sleep on."""

    latch: Callable[[], Latch]
    """The same for one ring only, without an alarm: half the cost."""

    effective_deadline: Callable[[], float]
    """-inf in a task whose scope is cancelled."""

    def __init__(self, event_loop: EventLoopToken | None) -> None:
        self.pid: int = os.getpid()
        self.thread: int = threading.get_ident()
        self._token: object = None
        if event_loop is None:
            self.now, self.is_running = time.monotonic, bool
        else:
            self._token = event_loop.native_token
            self.effective_deadline = event_loop.backend_class.current_effective_deadline
            if isinstance(self._token, AbstractEventLoop):
                self.now, self.is_running = self._token.time, self._token.is_running
                if type(self._token).time is BaseEventLoop.time:
                    self.now = time.monotonic  # what that returns, for one call less
                self.bell = partial(_AsyncioBell, self._token)
                self.latch = self._token.create_future
            else:
                trio = sys.modules["trio"]
                self.now, self.is_running = trio.lowlevel.current_clock().current_time, bool
                self.bell, self.latch = _AnyioBell, _AnyioLatch
        self._started = self.now()
        self._monotonic = time.monotonic()

    def is_of(self, loop: AbstractEventLoop | None) -> bool:
        """Is it that of this loop, of asyncio?"""
        return loop is not None and loop is self._token

    def is_live(self) -> bool:
        """Is it going on, here or in another thread of this process?"""
        if self._token is None or self.pid != os.getpid():
            return False
        if isinstance(self._token, AbstractEventLoop):
            return self._token.is_running()
        return not self.has_ended()

    def has_ended(self) -> bool:
        """Can its tasks never be woken again?"""
        if self._token is None:
            return False
        if self.pid != os.getpid():
            return True
        if isinstance(self._token, AbstractEventLoop):
            return self._token.is_closed()
        trio = sys.modules["trio"]
        try:
            self._token.run_sync_soon(_nothing, idempotent=True)  # type: ignore[attr-defined]
        except trio.RunFinishedError:
            return True
        return False

    def call_soon(self, func: Callable[[], object]) -> None:
        """From anywhere, `__del__` included: between two steps of the run, or now if it is over.

        `func` must not raise, which trio would end with.
        """
        try:
            if not self.is_live():
                func()
            elif isinstance(self._token, AbstractEventLoop):
                self._token.call_soon_threadsafe(func)
            else:
                self._token.run_sync_soon(func)  # type: ignore[attr-defined]
        except RuntimeError:  # it has just ended
            func()

    def now_or_after(self) -> float:
        """Its clock, and after its end what that would read: never less than it did."""
        if not self.has_ended():
            return self.now()
        now = self._started + time.monotonic() - self._monotonic
        foreign = isinstance(self._token, AbstractEventLoop) and not isinstance(
            self._token, BaseEventLoop
        )
        return now if foreign else max(now, self.now())  # a closed foreign loop may have no clock


OUTSIDE = Run(None)
"""What happens outside of any event loop, on the monotonic clock."""


class _Here(threading.local):
    run: ref[Run] | None = None
    """The last that was found in this thread."""


_here = _Here()


def current_run() -> Run | None:
    """The run that the caller is in, or None outside of any."""
    last = None if _here.run is None else _here.run()
    try:
        # Outside of its tasks it may be trio's, which is a guest there. (The function with the
        # underscore is documented: it returns None where the other one raises.)
        if last is not None and last.is_of(_get_running_loop()) and current_task() is not None:
            return last
        known = _run.get(None)
    except RuntimeError:  # as anyio.NoEventLoopError
        return None
    run = None if known is None else known()
    if run is None:
        run = Run(current_token())
        _run.set(ref(run))
    _here.run = ref(run)
    return run


def _nothing() -> None:
    pass


class Bell(Protocol):
    """What one waiter sleeps on: rung once it need not wait, or by its alarm."""

    def ring(self) -> None: ...

    def set_alarm(self, when: float) -> None:
        """Ring at this time of the run's clock, and not at the one set before."""

    def wait(self) -> Awaitable[object]:
        """Sleep until the next ring. Whoever wakes looks for itself what has changed."""


@final
class _AsyncioBell:
    """A bare future: an anyio.Event weighs 1.4 kB, and adds a task switch to each wake-up."""

    __slots__ = ("_alarm", "_future", "_loop", "_when")

    _when: float  # of the alarm, if one is set: uvloop's handles do not tell

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._future: Future[None] = loop.create_future()
        self._alarm: Handle | None = None

    def ring(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if not self._future.done():
            self._future.set_result(None)

    def set_alarm(self, when: float) -> None:
        if self._alarm is not None:
            if self._when == when:
                return
            self._alarm.cancel()
            self._alarm = None
        self._when = when
        if when < math.inf:
            self._alarm = self._loop.call_at(when, self._ring_alarm)

    def _ring_alarm(self) -> None:
        self._alarm = None
        self.ring()

    def wait(self) -> Future[None]:
        if self._future.done():
            self._future = self._loop.create_future()
        return self._future


@final
class _AnyioBell:
    __slots__ = ("_alarm", "_event", "_scope")

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._scope: anyio.CancelScope | None = None
        self._alarm = math.inf

    def ring(self) -> None:
        self._event.set()

    def set_alarm(self, when: float) -> None:
        self._alarm = when
        if self._scope is not None:
            self._scope.deadline = when

    async def wait(self) -> None:
        with anyio.CancelScope(deadline=self._alarm) as self._scope:
            await self._event.wait()
        self._scope = None
        self._alarm = math.inf
        if self._event.is_set():
            self._event = anyio.Event()


class Latch(Protocol):
    """What one waiter awaits, once: the part of `asyncio.Future` that is needed for it."""

    def done(self) -> bool:
        """Whether it was set, or its waiter is gone: it is not to be set again."""

    def set_result(self, result: None, /) -> None:
        """Let the waiter go on."""

    def __await__(self) -> Generator[Any, None, object]: ...


@final
class _AnyioLatch:
    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = anyio.Event()

    def done(self) -> bool:
        return self._event.is_set()

    def set_result(self, result: None, /) -> None:
        self._event.set()

    def __await__(self) -> Generator[Any, None, object]:
        return self._event.wait().__await__()
