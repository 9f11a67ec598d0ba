"""What a batcher counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

__all__ = ["BatcherStatistics", "Counts", "Flush"]

Flush: TypeAlias = Literal["items", "tokens", "linger", "close"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherStatistics:
    """What a batcher has done and holds. Waits run from `submit` to departure, in seconds.

    `fill` is the mean share of the budget that a batch uses. `flushes` counts
    batches by what made them ask: full by "items" or by "tokens", "linger" of
    the oldest, or "close". `cancelled` are callers who left before their result.
    """

    waiting_items: int
    waiting_tokens: int
    running_batches: int
    batches: int
    items: int
    tokens: int
    failed: int
    cancelled: int
    fill: float
    mean_wait: float
    longest_wait: float
    flushes: Mapping[str, int]


@final
class Counts:
    """The running totals behind `BatcherStatistics`."""

    def __init__(self) -> None:
        self.batches = self.items = self.tokens = self.failed = self.cancelled = 0
        self.waited = self.longest_wait = 0.0
        self.flushes: dict[str, int] = {"items": 0, "tokens": 0, "linger": 0, "close": 0}

    def departure(self, arrived: list[float], tokens: int, flush: Flush, now: float) -> None:
        self.batches += 1
        self.items += len(arrived)
        self.tokens += tokens
        self.waited += now * len(arrived) - sum(arrived)
        self.longest_wait = max(self.longest_wait, now - min(arrived))
        self.flushes[flush] += 1
