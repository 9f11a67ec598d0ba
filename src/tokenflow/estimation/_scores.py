"""How good the estimates were: totals and recent error ratios, for alarms.

Worth an alarm: `coverage` leaving its promise, and `ratio`, the sum of what was
reserved over the sum of what was used. The p99 of single errors is not: an
estimate that covers nine calls in ten is several times too high for many of
them, by design.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, final

__all__ = ["EstimateKey", "EstimateStatistics", "Score"]


class EstimateKey(NamedTuple):
    """What calls are told apart by; `min_input_tokens` is where their length bucket begins."""

    model: str | None
    task: str | None
    min_input_tokens: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateStatistics:
    """What an estimator promised, against what came.

    Counts and sums are over all calls observed, in tokens; `estimated_tokens` and
    `output_tokens` are the outputs. `error_p50` and `error_p99` are quantiles of
    estimate / actual over the latest calls, 0.0 before the first.
    """

    calls: int
    under_estimated: int
    input_tokens: int
    estimated_tokens: int
    output_tokens: int
    error_p50: float
    error_p99: float

    @property
    def coverage(self) -> float:
        """Share of calls that used no more than estimated; 1.0 before the first."""
        return 1 - self.under_estimated / self.calls if self.calls else 1.0

    @property
    def ratio(self) -> float:
        """Input plus estimated output over input plus actual output, summed; 1.0 before the first.

        This is what an estimate costs in throughput: a limiter that reserves it
        lets 1/ratio through of what it could.
        """
        actual = self.input_tokens + self.output_tokens
        return (self.input_tokens + self.estimated_tokens) / actual if actual else 1.0


@final
class Score:
    """Running totals, and the last `recent` error ratios. O(1) per call."""

    __slots__ = ("calls", "estimated", "input", "output", "ratios", "under")

    def __init__(self, recent: int) -> None:
        self.calls = self.under = self.input = self.estimated = self.output = 0
        self.ratios: deque[float] = deque(maxlen=recent)

    def add(self, input_tokens: int, estimated: int, output: int) -> float:
        """Enter one finished call; returns its error ratio."""
        self.calls += 1
        self.under += output > estimated
        self.input += input_tokens
        self.estimated += estimated
        self.output += output
        ratio = estimated / (output or 1)
        self.ratios.append(ratio)
        return ratio

    def absorb(self, other: Score) -> None:
        """Add the totals of `other`; its error ratios stay its own."""
        self.calls += other.calls
        self.under += other.under
        self.input += other.input
        self.estimated += other.estimated
        self.output += other.output

    def statistics(self) -> EstimateStatistics:
        """A frozen copy, with the quantiles worked out. O(r log r) in the ratios kept."""
        ratios = sorted(self.ratios) or [0.0]
        return EstimateStatistics(
            calls=self.calls,
            under_estimated=self.under,
            input_tokens=self.input,
            estimated_tokens=self.estimated,
            output_tokens=self.output,
            error_p50=ratios[len(ratios) // 2],
            error_p99=ratios[len(ratios) * 99 // 100],
        )
