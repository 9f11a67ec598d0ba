"""What a server counts, and when it says no: each rule told the time, nothing waits here.

Written without a look at `tokenflow.limits`, so that a test of one against the
other is a test. Goal: the arithmetic that providers document, or show in their
refusals, and no more; "try again in" is exact. Cost: O(1) per step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, final

from tokenflow._usage import positive_int, positive_seconds

from ._request import FakeRequest

__all__ = ["Counts", "Denial", "FakeQuota", "Ledger", "Level", "Rule", "Unit"]

Unit: TypeAlias = Literal["tokens", "input_tokens", "output_tokens", "requests"]
Rule: TypeAlias = Literal["bucket", "fixed", "concurrency"]
Counts: TypeAlias = Literal["larger", "declared", "settled", "produced", "actual"]

_LETTERS: Final[Mapping[str, str]] = MappingProxyType(
    {"tokens": "T", "input_tokens": "IT", "output_tokens": "OT", "requests": "R"}
)
_PERIODS: Final[Mapping[float, str]] = MappingProxyType({60: "M", 3600: "H", 86400: "D"})
# Rounding may leave a bucket this much short of what it was said to hold by then.
_TOLERANCE: Final = 1e-6


@final
@dataclass(frozen=True, slots=True)
class FakeQuota:
    """One quota of a server, by the server's own rule.

    Args:
        limit: In the unit that `of` names.
        per: The period, in seconds.
        of: "tokens", "input_tokens", "output_tokens" or "requests".
        rule: "bucket" holds one period's worth and refills continuously. "fixed" sums
            up from 0 in each period, the first of which begins at time 0 of the event
            loop's clock. "concurrency" counts what is being answered; `per` is ignored.
        counts: What a call's tokens are, and when they are charged.
            "larger": n x the larger of the declared maximum and a quarter of the
            characters of the request, at arrival, and never corrected.
            "declared": input + n x the declared maximum, at arrival, never corrected.
            "settled": the same, corrected to what was really used at the end.
            "produced": the input at arrival, the output as it is produced.
            "actual": nothing at arrival, what was really used at the end.
            The last two admit while anything is left, so they may go below 0.
        slices: The rule is enforced in so many slices of the period, each with its
            share of the limit: 60 requests per minute in 60 slices is one per second.
            What is larger than a slice waits for an untouched one.
        free_cache: Input read from the cache is not charged.
        counts_refused: A refused call is charged too, as far as there is room.
        by: "model" or "key" keeps one ledger for each model (Azure: deployment) or API key.
        name: In refusals, in the ledger and in statistics; by default such as "TPM".

    >>> FakeQuota(30_000, of="input_tokens", counts="produced").name
    'ITPM'

    Raises:
        TypeError, ValueError: a setting that makes no sense.
    """

    limit: int
    _: KW_ONLY
    per: float = 60.0
    of: Unit = "tokens"
    rule: Rule = "bucket"
    counts: Counts = "declared"
    slices: int = 1
    free_cache: bool = False
    counts_refused: bool = False
    by: Literal["model", "key"] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        positive_int(self.limit, "limit")
        positive_seconds(self.per, "per")
        if positive_int(self.slices, "slices") > self.limit:
            raise ValueError(
                f"slices = {self.slices} of limit = {self.limit} leave less than 1 in each"
            )
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, not {getattr(self, name)!r}")
        object.__setattr__(self, "name", self.name or self._usual_name())

    def _usual_name(self) -> str:
        if self.rule == "concurrency":
            return f"concurrent {self.of}"
        return f"{_LETTERS[self.of]}P{_PERIODS.get(self.per) or f'{self.per:g}S'}"

    @property
    def concerns_input(self) -> bool:
        """The input of a call is part of what this counts."""
        return self.of in ("tokens", "input_tokens")

    @property
    def concerns_output(self) -> bool:
        """The output of a call is part of what this counts."""
        return self.of in ("tokens", "output_tokens")

    def at_arrival(self, request: FakeRequest, assumed_output: int) -> int:
        """What is charged when `request` arrives; `assumed_output` is for none declared."""
        if self.of == "requests":
            return 1
        if self.counts == "actual":
            return 0
        declared = request.max_output_tokens
        if self.counts == "larger" and self.of == "tokens":
            return request.choices * max(declared or 0, -(-request.characters // 4))
        output = request.choices * (assumed_output if declared is None else declared)
        return self.used(request, 0 if self.counts == "produced" else output)

    def used(self, request: FakeRequest, output_tokens: int) -> int:
        """What `request` comes to, given its output."""
        if self.of == "requests":
            return 1
        cached = request.cached_tokens if self.free_cache else 0
        charged_input = (request.input_tokens - cached) * self.concerns_input
        return charged_input + output_tokens * self.concerns_output


_CHOICES: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "of": tuple(_LETTERS),
        "rule": ("bucket", "fixed", "concurrency"),
        "counts": ("larger", "declared", "settled", "produced", "actual"),
        "by": (None, "model", "key"),
    }
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Where a quota stands: what headers are made from; `reset` is seconds until it is full."""

    quota: FakeQuota
    remaining: int
    reset: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Denial:
    """Why a quota said no; `wait` is seconds, inf where waiting cannot help.

    None: only the end of another call helps.
    """

    quota: FakeQuota
    used: int
    requested: int
    wait: float | None


@final
class Ledger:
    """What one quota has counted so far; everything is told the time.

    `log` has every charge as (time, amount); `foreign` is the sum of other clients'.
    """

    __slots__ = ("_slice", "_then", "_used", "foreign", "log", "quota")

    def __init__(self, quota: FakeQuota) -> None:
        self.quota: FakeQuota = quota
        self.log: list[tuple[float, int]] = []
        self.foreign: int = 0
        self._slice = quota.limit / quota.slices
        self._used = 0.0
        self._then = 0.0

    def used(self, now: float) -> float:
        """What still counts against the limit."""
        match self.quota.rule:
            case "bucket":
                refilled = max(0.0, now - self._then) * self.quota.limit / self.quota.per
                return max(0.0, self._used - refilled)
            case "fixed":
                return self._used if self._period(now) == self._period(self._then) else 0.0
            case _:
                return self._used

    def denial(self, cost: int, now: float) -> Denial | None:
        """Why `cost` cannot be charged now, if it cannot."""
        if self.quota.counts in ("produced", "actual"):
            cost = max(cost, 1)
        used = self.used(now)
        if used + min(cost, self._slice) <= self._slice + _TOLERANCE:
            return None if cost <= self.quota.limit else self._denial(cost, used, math.inf)
        return self._denial(cost, used, self._wait(cost, used, now))

    def _denial(self, cost: int, used: float, wait: float | None) -> Denial:
        return Denial(quota=self.quota, used=round(used), requested=cost, wait=wait)

    def _wait(self, cost: int, used: float, now: float) -> float | None:
        if cost > self.quota.limit:
            return math.inf
        match self.quota.rule:
            case "bucket":
                excess = used + min(cost, self._slice) - self._slice
                return excess * self.quota.per / self.quota.limit
            case "fixed":
                return self._next_period(now) - now
            case _:
                return None

    def charge(self, amount: int, now: float) -> None:
        """Count `amount`, whatever room there is; negative takes it back."""
        if amount:
            self._add(amount, now)
            self.log.append((now, amount))

    def charge_foreign(self, amount: int, now: float) -> None:
        """Count what somebody else takes, as far as there is room."""
        taken = max(0, min(amount, math.floor(self._slice - self.used(now) + _TOLERANCE)))
        self._add(taken, now)
        self.foreign += taken

    def _add(self, amount: int, now: float) -> None:
        self._used = max(0.0, self.used(now) + amount)
        self._then = now

    def worst_window(self, seconds: float) -> int:
        """The most that was charged in any span of so many seconds, foreign charges aside."""
        worst = current = first = 0
        for then, amount in self.log:
            current += amount
            while self.log[first][0] <= then - seconds:
                current -= self.log[first][1]
                first += 1
            worst = max(worst, current)
        return worst

    def level(self, now: float) -> Level:
        """What is left, and when it is full again."""
        used = self.used(now)
        reset = used * self.quota.per / self.quota.limit
        if self.quota.rule == "fixed":
            reset = self._next_period(now) - now
        return Level(
            quota=self.quota,
            remaining=max(0, math.floor(self.quota.limit - used + _TOLERANCE)),
            reset=reset,
        )

    def _period(self, now: float) -> int:
        return math.floor(now * self.quota.slices / self.quota.per + _TOLERANCE)

    def _next_period(self, now: float) -> float:
        return (self._period(now) + 1) * self.quota.per / self.quota.slices
