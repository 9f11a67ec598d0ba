"""The provider's own books: what was asked, answered and charged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self, TypeAlias, final

from ._faults import Fault

__all__ = ["FakeCall", "FakeStatistics", "Outcome"]

Outcome: TypeAlias = Literal["running", "completed", "refused", "failed", "aborted"]


@final
@dataclass(slots=True, kw_only=True)
class FakeCall:
    """One call, as it stood in the provider's books when they were read.

    `outcome` is "running", "completed", "refused" (by the quota named in `refused_by`, or
    by a fault with its status), "failed" (an error, or a fault broke the connection) or
    "aborted" (the client went away). `status` is None as long as no headers were sent.
    `output_tokens` is what was produced for it, `charged` what it was charged, by the
    names of the quotas. Times are in seconds of the event loop's clock.
    """

    number: int
    path: str
    arrived: float
    ended: float | None = None
    outcome: Outcome = "running"
    status: int | None = None
    model: str = ""
    stream: bool = False
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    charged: dict[str, int] = field(default_factory=dict)
    refused_by: str | None = None
    fault: Fault | None = None

    def copy(self) -> Self:
        """How it stands."""
        return replace(self, charged=self.charged.copy())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FakeStatistics:
    """Sums over all calls so far; the tokens are those of calls that were not refused.

    `charged` is by the names of the quotas, and so is `foreign`: what other clients took.
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
