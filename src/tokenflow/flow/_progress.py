"""A job's progress on the terminal: with tqdm where it is installed, else a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any, Final, final

from ._map import Progress, Show

__all__ = ["shown_by"]

_EVERY: Final = 2.0  # seconds of real time between two lines


def shown_by(progress: Show | bool | None) -> Show | None:
    """The function to call with each `Progress`."""
    if progress is not True:
        return progress or None
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return _Lines()
    return _Bar(tqdm)


@final
class _Bar:
    __slots__ = ("_bar", "_tqdm")

    def __init__(self, tqdm: Any) -> None:
        self._tqdm = tqdm
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = self._tqdm(total=progress.total, unit="item")
        self._bar.set_postfix_str(_rest(progress), refresh=False)
        self._bar.update(progress.done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@final
class _Lines:
    __slots__ = ("_last", "_next")

    def __init__(self) -> None:
        self._next = 0.0
        self._last: Progress | None = None  # not shown yet

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        self._last = progress
        if now >= self._next:
            self._next = now + _EVERY
            self.close()

    def close(self) -> None:
        if self._last is not None:
            print(_line(self._last), file=sys.stderr)
            self._last = None


def _line(progress: Progress) -> str:
    total = "" if progress.total is None else f" of {progress.total:,}"
    left = progress.seconds_left
    rest = "" if left is None else f", {left:,.0f} s left"
    return f"{progress.done:,}{total} done, {_rest(progress)}{rest}"


def _rest(progress: Progress) -> str:
    failed = f"{progress.failed:,} failed, " if progress.failed else ""
    return f"{failed}{progress.tokens:,} tokens, {progress.tokens_per_minute:,.0f} per minute"
