"""The provider's own books: what was asked, answered and charged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final

from ._faults import Fault

__all__ = ["Call", "FakeCall", "FakeStatistics", "Outcome"]

Outcome: TypeAlias = Literal["running", "completed", "refused", "failed", "aborted"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FakeCall:
    """One call, as the provider has it in its books.

    `outcome` is "running", "completed", "refused" (by a quota: `refused_by`, or at the door
    by a fault), "failed" (an error, or a connection that a fault broke) or "aborted" (the
    client went away). `status` is None where no headers were sent. `output_tokens` is
    what was produced until its end. `charged` has what it was charged per quota's name.
    Times are in seconds of the event loop's clock.
    """

    number: int
    path: str
    model: str
    stream: bool
    arrived: float
    ended: float | None
    outcome: Outcome
    status: int | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    charged: Mapping[str, int]
    refused_by: str | None
    fault: Fault | None


@final
@dataclass(slots=True, kw_only=True)
class Call:
    """The same while it can still change."""

    number: int
    path: str
    arrived: float
    model: str = ""
    stream: bool = False
    ended: float | None = None
    outcome: Outcome = "running"
    status: int | None = None
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    charged: dict[str, int] = field(default_factory=dict)
    refused_by: str | None = None
    fault: Fault | None = None

    def frozen(self) -> FakeCall:
        """How it stands."""
        return FakeCall(
            number=self.number,
            path=self.path,
            model=self.model,
            stream=self.stream,
            arrived=self.arrived,
            ended=self.ended,
            outcome=self.outcome,
            status=self.status,
            input_tokens=self.input_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            charged=dict(self.charged),
            refused_by=self.refused_by,
            fault=self.fault,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FakeStatistics:
    """Sums over all calls; `charged` and `foreign` are per quota's name.

    `foreign` is what `FakeProvider.consume` took. Tokens are those of calls that were
    admitted.
    """

    calls: int
    running: int
    completed: int
    refused: int
    failed: int
    aborted: int
    input_tokens: int
    output_tokens: int
    charged: Mapping[str, int]
    foreign: Mapping[str, int]
