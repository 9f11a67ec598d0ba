"""What a batcher moves: items, the calls that wait for them, and results matched to both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Generic, Literal, Protocol, TypeVar, final

from tokenflow._errors import BatchError

from ._packing import wrong_count

__all__ = ["Countdown", "Item", "as_error", "rows_of"]

T = TypeVar("T")
R = TypeVar("R")


class Settable(Protocol):
    """What an item sets once it is settled: the latch its caller awaits, or a countdown."""

    def done(self) -> bool: ...

    def set_result(self, result: None, /) -> None: ...


@final
class Countdown:
    """Sets a latch when it has been set once for each of several items."""

    __slots__ = ("_latch", "left")

    def __init__(self, latch: Settable, items: int) -> None:
        self._latch = latch
        self.left = items

    def done(self) -> bool:
        return self._latch.done()

    def set_result(self, result: None, /) -> None:
        self.left -= 1
        if not self.left:
            self._latch.set_result(None)


@final
class Item(Generic[T, R]):
    """One item on its way: queued, then running, then settled. Or settled at once, if cancelled."""

    __slots__ = (
        "_error",
        "_latch",
        "_result",
        "_traceback",
        "arrived",
        "priority",
        "state",
        "tokens",
        "value",
    )

    _result: R

    def __init__(
        self, value: T, tokens: int, priority: int, arrived: float, latch: Settable
    ) -> None:
        self.value = value
        self.tokens = tokens
        self.priority = priority
        self.arrived = arrived
        self.state: Literal["queued", "running", "settled"] = "queued"
        self._latch = latch
        self._error: BaseException | None = None

    def settle(self, result: R) -> None:
        """Wake its caller with a result. Not when it is settled."""
        self._result = result
        self.state = "settled"
        if not self._latch.done():
            self._latch.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Wake its caller with an error. Not when it is settled."""
        self._error, self._traceback = error, error.__traceback__
        self.state = "settled"
        if not self._latch.done():
            self._latch.set_result(None)

    def outcome(self) -> R:
        """The result, or the error: one instance may go to many callers, so each resets it."""
        if self._error is None:
            return self._result
        error, self._error = self._error, None
        try:
            raise error.with_traceback(self._traceback)
        finally:
            del error, self._traceback


def rows_of(results: Any, expected: int) -> list[Any]:
    """The results as a list of the right length, or an error that says what is wrong."""
    if isinstance(results, (str, bytes, Mapping, AbstractSet)) or not isinstance(results, Iterable):
        raise BatchError(
            f"process must return a list with one result per item, not {type(results).__name__}"
        )
    rows = list(results)
    if len(rows) != expected:
        raise wrong_count("process()", expected, len(rows))
    return rows


def as_error(row: BaseException) -> Exception:
    """An item's error; a cancellation or an exit that was *returned* must not become one."""
    if isinstance(row, Exception):
        return row
    error = BatchError(f"the processor returned {row!r} for this item")
    error.__cause__ = row
    return error
