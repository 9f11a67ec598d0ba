"""An asyncio loop in virtual time: it starts at 0.0, and an hour's sleep costs nothing."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

STALLED = 200
"""Turns of the loop at one instant, after which time moves on by a microsecond: in real time it
would have, and some limiters wait for a rounding error to pass."""


class _JumpingSelector(selectors.DefaultSelector):
    """Where a selector would wait, the clock jumps."""

    now = 0.0
    _turns = 0  # at this instant

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: every task waits, and no timer is left to wake one")
        self._turns = self._turns + 1 if timeout == 0 else 0
        self.now += 1e-6 if self._turns % STALLED == STALLED - 1 else timeout
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        # asyncio fires timers that are less than this away; its own nanosecond is lost in hours.
        self._clock_resolution = math.ulp(self._jumping.now)
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end, in a loop of its own, as asyncio.run does."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)
