"""Both backends in virtual time: an hour's sleep takes microseconds.

Async tests (`pytestmark = pytest.mark.anyio`) run once on asyncio and once on trio. Time moves
only when nothing else can happen, and then straight to the next timer. A thread's work takes
real time, of which neither clock knows: a timer set beside it may fire before it answers.
"""

import asyncio
import csv
import math
import os
import selectors
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, TypeVarTuple

import anyio
import hypothesis
import pytest
import trio
from anyio._backends._asyncio import AsyncIOBackend
from trio.testing import MockClock
from typing_extensions import override

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Backend: TypeAlias = Literal["asyncio", "trio"]
BACKENDS: tuple[Backend, ...] = ("asyncio", "trio")

THREAD_GRACE = 0.005
"""Real seconds that a thread started in a run has to answer before a timer fires."""
THREAD_PATIENCE = 10.0
"""Real seconds to wait for a thread when there is no timer either."""

hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile(
    "soak",
    deadline=None,
    max_examples=10_000,
    stateful_step_count=200,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--traces", type=Path, help="a directory of CSV traces, for the tests that replay some"
    )


Trace: TypeAlias = Callable[[str], list[tuple[int, int]]]
"""The type of the `trace` fixture."""


@pytest.fixture
def trace(request: pytest.FixtureRequest) -> Trace:
    """trace("azure_2023_conv"): input and output tokens per call, or a skip where it is not given.

    Traces are not part of the project. The benchmarks take the same as `--trace`, which to
    pytest is something else.
    """
    path: Path | None = request.config.getoption("--traces")

    def read(name: str) -> list[tuple[int, int]]:
        file = path / f"{name}.csv" if path else None
        if file is None or not file.is_file():
            pytest.skip(f"needs --traces DIRECTORY, with {name}.csv in it")
        with file.open(newline="") as rows:
            return [
                (int(row["ContextTokens"]), int(row["GeneratedTokens"]))
                for row in csv.DictReader(rows)
            ]

    return read


class JumpingSelector(selectors.DefaultSelector):
    """Takes what is ready; if nothing is, moves the clock by the timeout instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.waiting_for_idle: list[asyncio.Future[None]] = []
        self._older_threads = frozenset(threading.enumerate())

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self.waiting_for_idle:
            return self._tell_that_all_is_idle()
        if timeout is None:
            return self._wait_for_a_thread()
        if self._threads_of_this_run():
            ready = super().select(THREAD_GRACE)
        if not ready:
            self.now += timeout
        return ready

    def _threads_of_this_run(self) -> bool:
        return not self._older_threads.issuperset(threading.enumerate())

    def _threads_that_may_wake_it(self) -> bool:
        """Those of this run, and those that started it; not the idle daemons that trio keeps."""
        return self._threads_of_this_run() or any(
            not thread.daemon
            for thread in threading.enumerate()
            if thread is not threading.current_thread()
        )

    def _tell_that_all_is_idle(self) -> list[tuple[selectors.SelectorKey, int]]:
        for future in self.waiting_for_idle:
            if not future.done():
                future.set_result(None)
        self.waiting_for_idle.clear()
        return []

    def _wait_for_a_thread(self) -> list[tuple[selectors.SelectorKey, int]]:
        give_up_at = time.monotonic() + THREAD_PATIENCE
        while self._threads_that_may_wake_it() and time.monotonic() < give_up_at:
            if ready := super().select(0.05):
                return ready
        raise RuntimeError(
            "deadlock: every task waits, and no timer and no thread is left to wake one"
        )


class VirtualEventLoop(asyncio.SelectorEventLoop):
    """An asyncio loop that starts at 0.0 and reads its selector's clock."""

    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    @override
    def time(self) -> float:
        # asyncio fires what is less than the resolution away. An ulp makes that "now", however
        # late it is; asyncio's own nanosecond is too early at first, and is lost after half a year.
        self._clock_resolution = math.ulp(self._jumping.now)
        return self._jumping.now

    async def wait_all_tasks_blocked(self) -> None:
        """What trio does: returns when the loop would have to wait, before any time passes."""
        future = self.create_future()
        self._jumping.waiting_for_idle.append(future)
        await future


async def _wait_all_tasks_blocked(cls: type[AsyncIOBackend]) -> None:
    loop = asyncio.get_running_loop()
    await (loop.wait_all_tasks_blocked() if isinstance(loop, VirtualEventLoop) else _polling())


# anyio's way on asyncio is to poll every 0.1 s, which in virtual time lets timers fire meanwhile.
_polling = AsyncIOBackend.wait_all_tasks_blocked
AsyncIOBackend.wait_all_tasks_blocked = classmethod(_wait_all_tasks_blocked)  # type: ignore[method-assign,assignment]


def virtual_time(backend: Backend) -> dict[str, Any]:
    """The backend options of one run in virtual time, starting at 0.0."""
    if backend == "trio":
        return {"clock": MockClock(autojump_threshold=0)}
    return {"loop_factory": VirtualEventLoop}


def run_virtual(backend: Backend, func: Callable[[*Ts], Awaitable[T]], /, *args: *Ts) -> T:
    """A run of its own in virtual time: a new event loop at each call, starting at 0.0."""
    options = virtual_time(backend)
    if backend == "trio":  # anyio.run drops trio's options before anyio 4.14
        return trio.run(func, *args, **options)
    return anyio.run(func, *args, backend=backend, backend_options=options)


class Run(Protocol):
    """The type of the `run` fixture."""

    def __call__(self, func: Callable[[*Ts], Awaitable[T]], /, *args: *Ts) -> T: ...


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[Backend, dict[str, Any]]:
    """The backend of an async test, in virtual time."""
    return request.param, virtual_time(request.param)


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest) -> Run:
    """For plain tests: run(async_func, *args) is a run of its own, however often it is called."""

    def run(func: Callable[[*Ts], Awaitable[T]], /, *args: *Ts) -> T:
        return run_virtual(request.param, func, *args)

    return run
