"""Event-loop runs: which one we are in, what time the ledgers read, how a waiter sleeps.

Ledger time is the clock of the current run plus an offset fixed at the first
touch in that run. It never goes back, although trio starts each run at a
random instant and tests run on virtual clocks; and real time that passes
between two runs counts. So a window filled in one `anyio.run` is still full in
the next one.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from asyncio import AbstractEventLoop, Future, TimerHandle
from collections.abc import Awaitable, Callable
from typing import Protocol, final
from weakref import ref

import anyio
from anyio.lowlevel import EventLoopToken, RunVar, current_token

__all__ = ["Bell", "Run", "current_run", "ledger_now"]

_run: RunVar[ref[Run]] = RunVar("tokenflow.run")  # weak, or each run would keep itself alive
_latest = 0.0  # the latest ledger time read in any run
_skew: float | None = None  # ledger time minus monotonic time when the last run was first touched


@final
class Run:
    """One run of an event loop, held by reference: an id could be reused."""

    __slots__ = (
        "__weakref__",
        "_clock",
        "_offset",
        "effective_deadline",
        "is_running",
        "pid",
        "thread",
        "token",
    )

    def __init__(self, event_loop: EventLoopToken) -> None:
        global _skew
        self.effective_deadline = event_loop.backend_class.current_effective_deadline
        self.pid = os.getpid()
        self.token: object = event_loop.native_token
        self.thread = threading.get_ident()
        if isinstance(self.token, AbstractEventLoop):
            self.is_running: Callable[[], bool] = self.token.is_running
            self._clock: Callable[[], float] = self.token.time
        else:
            self.is_running = _unknown
            self._clock = sys.modules["trio"].lowlevel.current_clock().current_time
        started = self._clock()
        if _skew is None:
            self._offset = 0.0
        else:
            self._offset = max(_latest, time.monotonic() + _skew) - started
        _skew = started + self._offset - time.monotonic()

    def now(self) -> float:
        """Ledger time."""
        global _latest
        now = self._clock() + self._offset
        if now > _latest:
            _latest = now
        return now

    def clock_time(self, when: float) -> float:
        """The run clock's reading at which `now()` is at least `when`."""
        reading = when - self._offset
        while reading + self._offset < when:
            reading = math.nextafter(reading, math.inf)
        return reading

    def is_cancelled(self) -> bool:
        """Is the current task inside a cancelled scope?"""
        return self.effective_deadline() == -math.inf

    def is_current(self) -> bool:
        """Is the caller inside this run, in its thread?"""
        return self.is_quickly_current() or current_run() is self

    def is_quickly_current(self) -> bool:
        """Yes, or perhaps: with one thread per running loop, this is the cheapest test."""
        return threading.get_ident() == self.thread and self.is_running()

    def is_live(self) -> bool:
        """Is this run going on, here or in another thread of this process?"""
        if self.pid != os.getpid():
            return False
        if isinstance(self.token, AbstractEventLoop):
            return self.token.is_running()
        return not self.has_ended()

    def has_ended(self) -> bool:
        """Can this run's tasks never be woken again?"""
        if self.pid != os.getpid():
            return True
        if isinstance(self.token, AbstractEventLoop):
            return self.token.is_closed()
        trio = sys.modules["trio"]
        try:
            self.token.run_sync_soon(_nothing, idempotent=True)  # type: ignore[attr-defined]
        except trio.RunFinishedError:
            return True
        return False

    def bell(self) -> Bell:
        """Something for one task of this run to sleep on."""
        if isinstance(self.token, AbstractEventLoop):
            return _AsyncioBell(self.token)
        return _AnyioBell()


def current_run() -> Run | None:
    """The run that the caller is in, or None outside of any."""
    try:
        known = _run.get(None)
    except RuntimeError:  # anyio.NoEventLoopError
        return None
    run = None if known is None else known()
    if run is None:
        run = Run(current_token())
        _run.set(ref(run))
    return run


def ledger_now(run: Run | None) -> float:
    """Ledger time as read from anywhere, for a ledger last used in `run`."""
    run = current_run() or run
    if run is None or run.has_ended():
        return _latest if _skew is None else max(_latest, time.monotonic() + _skew)
    return run.now()


def _nothing() -> None:
    pass


def _unknown() -> bool:
    return False


class Bell(Protocol):
    """What one waiter sleeps on: rung once it need not wait, or by its alarm."""

    def ring(self) -> None: ...

    def set_alarm(self, reading: float) -> None:
        """Ring at this reading of the run's clock, and not at the one set before."""

    def wait(self) -> Awaitable[object]:
        """Sleep until the next ring. Whoever wakes looks for itself what has changed."""


@final
class _AsyncioBell:
    """A bare future: an anyio.Event weighs 1.4 kB, and wakes through a second task switch."""

    __slots__ = ("_alarm", "_future", "_loop")

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._future: Future[None] = loop.create_future()
        self._alarm: TimerHandle | None = None

    def ring(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if not self._future.done():
            self._future.set_result(None)

    def set_alarm(self, reading: float) -> None:
        if self._alarm is not None:
            if self._alarm.when() == reading:
                return
            self._alarm.cancel()
            self._alarm = None
        if reading < math.inf:
            self._alarm = self._loop.call_at(reading, self._ring_alarm)

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

    def set_alarm(self, reading: float) -> None:
        self._alarm = reading
        if self._scope is not None:
            self._scope.deadline = reading

    async def wait(self) -> None:
        with anyio.CancelScope(deadline=self._alarm) as self._scope:
            await self._event.wait()
        self._scope = None
        self._alarm = math.inf
        if self._event.is_set():
            self._event = anyio.Event()
