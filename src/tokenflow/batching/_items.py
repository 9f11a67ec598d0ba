"""What a batcher moves: items, the calls that wait for them, and results matched to both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar, final

from tokenflow._errors import BatchError
from tokenflow.limits._run import Bell

from ._packing import wrong_count

__all__ = ["Call", "Item", "as_error", "rows_of"]

T = TypeVar("T")
R = TypeVar("R")


@final
class Call:
    """One `submit` or `submit_many`, asleep until the last of its items is settled."""

    __slots__ = ("bell", "unsettled")

    def __init__(self, bell: Bell, items: int) -> None:
        self.bell = bell
        self.unsettled = items


@final
class Item(Generic[T, R]):
    """One item on its way. Settled once: later calls to `settle` and `fail` do nothing."""

    __slots__ = (
        "_call",
        "_error",
        "_result",
        "_traceback",
        "arrived",
        "priority",
        "state",
        "tokens",
        "value",
    )

    _result: R

    def __init__(self, value: T, tokens: int, priority: int, arrived: float, call: Call) -> None:
        self.value = value
        self.tokens = tokens
        self.priority = priority
        self.arrived = arrived
        self.state: Literal["queued", "running", "settled"] = "queued"
        self._call = call
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def settle(self, result: R) -> None:
        self._result = result
        self._ring()

    def fail(self, error: BaseException) -> None:
        if self.state != "settled":
            self._error, self._traceback = error, error.__traceback__
            self._ring()

    def _ring(self) -> None:
        self.state = "settled"
        self._call.unsettled -= 1
        if not self._call.unsettled:
            self._call.bell.ring()

    def outcome(self) -> R:
        """The result, or the error: one instance may go to many callers, so each resets it."""
        error, self._error = self._error, None
        if error is None:
            return self._result
        try:
            raise error.with_traceback(self._traceback)
        finally:
            del error
            self._traceback = None


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
