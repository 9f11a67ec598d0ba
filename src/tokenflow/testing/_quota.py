"""What a server counts, and when it says no: every rule is told the time.

Goal: the arithmetic that providers document, or that shows in their refusals,
and no more. It is written without `tokenflow.limits`, so that trying one
against the other proves something. Invariant: after the wait that a refusal
tells, and without other traffic, the same call is admitted. Cost: O(1) a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, final, get_args

from tokenflow._usage import positive_int, positive_seconds

from ._request import FakeRequest

__all__ = ["Counts", "Denial", "FakeQuota", "Ledger", "Level", "Owner", "Rule", "Unit"]

Unit: TypeAlias = Literal["tokens", "input_tokens", "output_tokens", "requests"]
Rule: TypeAlias = Literal["bucket", "fixed", "concurrency"]
Counts: TypeAlias = Literal["larger", "declared", "settled", "produced", "actual"]
Owner: TypeAlias = Literal["model", "key"]

_LETTERS: Final[Mapping[str, str]] = MappingProxyType(
    {"tokens": "T", "input_tokens": "IT", "output_tokens": "OT", "requests": "R"}
)
_PERIODS: Final[Mapping[float, str]] = MappingProxyType({60: "M", 3_600: "H", 86_400: "D"})
# Rounding may make an instant come so much too early, in seconds: not to be held against anyone.
_INSTANT: Final = 1e-7


@final
@dataclass(frozen=True, slots=True)
class FakeQuota:
    """One quota of a server, by the server's own rule.

    Args:
        limit: In the unit that `of` names.
        per: The period, in seconds.
        of: "tokens", "input_tokens", "output_tokens" or "requests".
        rule: "bucket" holds a period's worth and refills continuously. "fixed" sums up,
            and starts from 0 at every multiple of the period on the event loop's clock.
            "concurrency" counts what is being answered, and has no period.
        counts: What a call's tokens are, and when they are charged.
            "larger": n x the larger of the declared maximum and a quarter of the
            characters sent, at arrival, and never corrected.
            "declared": input + n x declared maximum, at arrival, and never corrected.
            "settled": the same, corrected to what was really used at the end.
            "produced": the input at arrival, the output as it is produced.
            "actual": its input has to fit, but what was really used is charged at the end.
            By the last two a quota may go below 0.
        slices: The rule is enforced in slices of the period, with a slice of the limit
            each: 60 requests per minute in 60 slices are one per second. A call larger
            than a slice needs one that is untouched.
        free_cache: Input read from the cache is not charged.
        counts_refused: A call that another quota refuses is charged nevertheless.
        by: "model" (Azure: the deployment) or "key" keeps one ledger for each.
        name: In refusals and in the books; by default such as "TPM".

    >>> FakeQuota(30_000, of="input_tokens", free_cache=True).name
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
    by: Owner | None = None
    name: str = ""

    def __post_init__(self) -> None:
        positive_int(self.limit, "limit")
        positive_seconds(self.per, "per")
        if positive_int(self.slices, "slices") > self.limit:
            raise ValueError(
                f"limit = {self.limit} in {self.slices} slices leaves them less than 1"
            )
        for name, known in _KNOWN.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {known}, not {value!r}")
        object.__setattr__(self, "name", self.name or self._usual_name())

    def _usual_name(self) -> str:
        if self.rule == "concurrency":
            return f"concurrent {self.of}"
        return f"{_LETTERS[self.of]}P{_PERIODS.get(self.per) or f'{self.per:g}S'}"

    def used(self, request: FakeRequest, output_tokens: int) -> int:
        """What `request` comes to, with so much output."""
        if self.of == "requests":
            return 1
        cached = request.cached_tokens if self.free_cache else 0
        charged = 0 if self.of == "output_tokens" else request.input_tokens - cached
        return charged if self.of == "input_tokens" else charged + output_tokens

    def at_arrival(self, request: FakeRequest, assumed_output: int) -> int:
        """What is charged when `request` arrives; `assumed_output` is for none declared."""
        declared = request.max_output_tokens
        if self.of == "requests":
            return 1
        if self.counts == "actual":
            return 0
        if self.counts == "larger" and self.of == "tokens":
            return request.choices * max(declared or 0, request.estimated_tokens)
        each = assumed_output if declared is None else declared
        return self.used(request, 0 if self.counts == "produced" else request.choices * each)

    def needed(self, request: FakeRequest, assumed_output: int) -> int:
        """What must be left for `request` to be admitted."""
        if self.counts in ("produced", "actual"):
            return max(1, self.used(request, 0))
        return self.at_arrival(request, assumed_output)


_KNOWN: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "of": get_args(Unit),
        "rule": get_args(Rule),
        "counts": get_args(Counts),
        "by": (None, *get_args(Owner)),
    }
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Where a quota stands; `reset` is in how many seconds it will be full again."""

    quota: FakeQuota
    remaining: int
    reset: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Denial:
    """A quota's no; `wait` is in seconds, inf for ever, None until another call ends."""

    quota: FakeQuota
    used: int
    requested: int
    wait: float | None


@final
class Ledger:
    """What one quota has counted. `log` has the charges as (time, amount), foreign ones aside."""

    __slots__ = ("_grain", "_slice", "_then", "_used", "foreign", "log", "quota")

    def __init__(self, quota: FakeQuota) -> None:
        self.quota: FakeQuota = quota
        self.log: list[tuple[float, int]] = []
        self.foreign: float = 0.0
        self._slice = quota.limit / quota.slices
        self._grain = quota.limit / quota.per * _INSTANT
        self._used = 0.0
        self._then = 0.0

    def used(self, now: float) -> float:
        """What still counts."""
        if self.quota.rule == "bucket":
            refilled = max(0.0, now - self._then) * self.quota.limit / self.quota.per
            return max(0.0, self._used - refilled)
        if self.quota.rule == "fixed" and self._period(now) != self._period(self._then):
            return 0.0
        return self._used

    def denial(self, needed: int, now: float) -> Denial | None:
        """Why so much cannot be had now, if it cannot."""
        used = self.used(now)
        excess = used + min(needed, self._slice) - self._slice
        if needed > self.quota.limit:
            wait: float | None = math.inf
        elif excess <= self._grain:
            return None
        else:
            wait = self._wait(excess, now)
        return Denial(quota=self.quota, used=round(used), requested=needed, wait=wait)

    def _wait(self, excess: float, now: float) -> float | None:
        if self.quota.rule == "bucket":
            return excess * self.quota.per / self.quota.limit
        return self._next_period(now) - now if self.quota.rule == "fixed" else None

    def charge(self, amount: int, now: float) -> None:
        """Count `amount`, whatever room there is; less than 0 gives it back."""
        if amount:
            self._add(amount, now)
            self.log.append((now, amount))

    def charge_foreign(self, amount: float, now: float) -> None:
        """Count what somebody else takes, as far as there is room."""
        taken = max(0.0, min(amount, self._slice - self.used(now)))
        self._add(taken, now)
        self.foreign += taken

    def _add(self, amount: float, now: float) -> None:
        self._used = max(0.0, self.used(now) + amount)
        self._then = now

    def level(self, now: float) -> Level:
        """What is left, and when it is full again."""
        used = self.used(now)
        fixed = self.quota.rule == "fixed"
        reset = self._next_period(now) - now if fixed else used * self.quota.per / self.quota.limit
        remaining = max(0, math.floor(self.quota.limit - used + self._grain))
        return Level(quota=self.quota, remaining=remaining, reset=reset)

    def worst_window(self, seconds: float | None) -> int:
        """The most that was charged in any half-open span of so many seconds, or of a period."""
        span = self.quota.per if seconds is None else positive_seconds(seconds, "seconds")
        worst = current = first = 0
        for then, amount in self.log:
            current += amount
            while then - self.log[first][0] > span - _INSTANT:
                current -= self.log[first][1]
                first += 1
            worst = max(worst, current)
        return worst

    def _period(self, now: float) -> int:
        return math.floor((now + _INSTANT) * self.quota.slices / self.quota.per)

    def _next_period(self, now: float) -> float:
        return (self._period(now) + 1) * self.quota.per / self.quota.slices
