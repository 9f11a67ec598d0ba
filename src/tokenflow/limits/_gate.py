"""What stands between a call and its start: the Gate protocol, and the in-flight gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, final

from tokenflow._usage import Usage, token_count

__all__ = [
    "CostFunction",
    "Gate",
    "InFlightGate",
    "cost_function",
    "counts_tokens",
    "plain_costs",
    "unit_name",
]

CostFunction = Callable[[int | Usage], int]


class Gate(Protocol):
    """One ledger with one limit.

    A gate is pure: no clock, no loop, no I/O. `now` is in seconds and, for a
    `timed` gate, never goes back, except as `shift` says. It does not know who
    waits: whoever asks looks at `ready_at` first and books with `charge` in the
    same synchronous step. Changing a gate (its limit, say) wakes nobody. But for
    `cost`, nothing here may raise.

    What `charge` and `correct` return is the gate's own record of a charge. It
    is handed back unchanged, and the latest one counts.

    Write one to limit something else; `TokenLimits` takes gates beside limiters:

    >>> from tokenflow.limits import InFlightGate
    >>> gate = InFlightGate(1000)
    >>> charge = gate.charge(600, now=0.0)
    >>> gate.ready_at(400, now=0.0), gate.ready_at(401, now=0.0)
    (0.0, inf)
    """

    in_flight: bool
    """Does a charge end with its lease (True), or stay until time takes it (False)?"""

    timed: bool
    """Does it need the time? One that doesn't has to accept any `now`: it may be given 0."""

    def cost(self, cost: int | Usage, /) -> int:
        """What a call costs here, in this gate's unit; an int is total tokens.

        Raises TypeError where an int does not say enough.
        """

    def largest(self) -> float:
        """The largest cost it could ever take as it is set now; `math.inf` while paused at 0."""

    def ready_at(self, cost: int, now: float) -> float:
        """The instant at which `cost` could be admitted, if nothing else happens.

        A time already past means now; `math.inf`: only a release or a change helps.
        """

    def charge(self, cost: int, now: float) -> Any:
        """Book `cost`, whether or not it fits."""

    def undo(self, charge: Any, now: float) -> None:
        """Take a charge back as if it had never been."""

    def correct(self, charge: Any, cost: int, now: float) -> Any:
        """Make `cost` of what was charged, past the limit if it must be."""

    def release(self, charge: Any) -> None:
        """The call is over. Called for gates that are `in_flight` only."""

    def give_up(self) -> None:
        """The run that all calls in flight belonged to is over; they will not be released.

        Called for gates that are `in_flight` only.
        """

    def shift(self, seconds: float) -> None:
        """Another clock is used from now on: move all remembered times by so much."""


@final
class InFlightGate:
    """At most `limit` in flight at a time: of tokens, or of requests (`of="requests"`).

    Invariant: `used` is the sum of the charges neither released nor undone.
    A limit of 0 is a pause; `math.inf` only counts. O(1) in time and memory.
    """

    __slots__ = ("__weakref__", "cost", "limit", "of", "used")

    in_flight = True
    timed = False

    def __init__(self, limit: float, *, of: str = "tokens") -> None:
        self.of: str = of
        self.cost: CostFunction = cost_function(of)
        self.limit: float = limit if limit == math.inf else token_count(limit, "limit")
        self.used: int = 0

    def largest(self) -> float:
        return self.limit or math.inf

    def ready_at(self, cost: int, now: float) -> float:
        return now if self.used + cost <= self.limit and self.limit else math.inf

    def charge(self, cost: int, now: float) -> int:
        self.used += cost
        return cost

    def undo(self, charge: int, now: float) -> None:
        self.used -= charge

    def correct(self, charge: int, cost: int, now: float) -> int:
        self.used += cost - charge
        return cost

    def release(self, charge: int) -> None:
        self.used -= charge

    def give_up(self) -> None:
        self.used = 0

    def shift(self, seconds: float) -> None:
        """Nothing: it remembers no time."""

    def __repr__(self) -> str:
        return f"<{self.used:,} of {self.limit:,} {self.of} in flight>"


def unit_name(of: str | Callable[[Usage], int]) -> str:
    """How a quota of this unit is called where it has no name of its own."""
    return of if isinstance(of, str) else getattr(of, "__name__", "units")


def cost_function(of: str | Callable[[Usage], int], *, declared: bool = False) -> CostFunction:
    """How a quota of this unit counts a call.

    With `declared`, output counts as at least the declared maximum.

    Raises:
        ValueError: an unknown unit.
    """
    if callable(of):
        return _custom(of)
    try:
        return (_DECLARED if declared else _ACTUAL)[of]
    except (KeyError, TypeError):
        units = ", ".join(map(repr, _ACTUAL))
        raise ValueError(f"of must be one of {units} or a function, not {of!r}") from None


def counts_tokens(cost: CostFunction) -> bool:
    """Is an int cost counted as it is?"""
    return cost is _tokens or cost is _declared_tokens


def plain_costs(costs: Iterable[CostFunction]) -> list[bool] | None:
    """For calls that cost an int: which functions count the int, the others one request.

    None where some function does neither.
    """
    counts = [(counts_tokens(cost), cost is _requests) for cost in costs]
    return [tokens for tokens, _ in counts] if all(map(any, counts)) else None


def _tokens(cost: int | Usage) -> int:
    return cost if isinstance(cost, int) else cost.input_tokens + cost.output_tokens


def _requests(cost: int | Usage) -> int:
    return 1 if isinstance(cost, int) else cost.requests


def _input_tokens(cost: int | Usage) -> int:
    return _usage(cost, "input_tokens").input_tokens


def _output_tokens(cost: int | Usage) -> int:
    return _usage(cost, "output_tokens").output_tokens


def _declared_tokens(cost: int | Usage) -> int:
    return cost if isinstance(cost, int) else cost.input_tokens + _declared_output(cost)


def _declared_output(cost: int | Usage) -> int:
    usage = _usage(cost, "output_tokens")
    return max(usage.output_tokens, usage.max_output_tokens or 0)


def _custom(function: Callable[[Usage], int]) -> CostFunction:
    name = unit_name(function)
    counts_int = getattr(function, "counts_int", False)

    def cost(cost: int | Usage) -> int:
        if counts_int and type(cost) is int:
            return cost
        return token_count(function(_usage(cost, name)), f"the result of {name}(usage)")

    return cost


def _usage(cost: int | Usage, quota: str) -> Usage:
    if isinstance(cost, Usage):
        return cost
    raise TypeError(
        f"the cost {cost} is a total, but a quota of {quota} has to know its parts: "
        f"pass Usage(input_tokens={cost}, output_tokens=0), split as it really is"
    )


_ACTUAL: dict[str, CostFunction] = {
    "tokens": _tokens,
    "input_tokens": _input_tokens,
    "output_tokens": _output_tokens,
    "requests": _requests,
}
_DECLARED: dict[str, CostFunction] = _ACTUAL | {
    "tokens": _declared_tokens,
    "output_tokens": _declared_output,
}
