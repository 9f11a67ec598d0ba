"""What can go wrong besides quotas, on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

from tokenflow._errors import TokenflowError
from tokenflow._usage import finite_seconds, token_count

from ._request import FakeRequest

__all__ = ["ConnectionDropped", "Fault", "Faults", "first_calls", "some_calls"]


@final
class ConnectionDropped(TokenflowError, ConnectionError):
    """The fake's connection broke, because a `Fault` said so."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """How one call goes wrong; what is not given is as always.

    Args:
        status: Answered instead of what was asked for. 429, 503 and 529 come from the
            door, where nothing was charged; any other after the quotas.
        code: The error's code: "insufficient_quota" is the 429 that waiting does not cure.
        message: The error's message.
        retry_after: Seconds, in the headers.
        delay: Seconds before the headers, beyond the usual ones.
        drop: The connection breaks instead of answering.
        abort_after: It breaks after so many chunks of the answer; 0 is after the headers.
        body: This is answered instead, as it is.
        hide_usage: The answer does not say what was used.

    Raises:
        TypeError, ValueError: a setting that makes no sense.
    """

    status: int | None = None
    code: str | None = None
    message: str = ""
    retry_after: float | None = None
    delay: float = 0.0
    drop: bool = False
    abort_after: int | None = None
    body: bytes | None = None
    hide_usage: bool = False

    def __post_init__(self) -> None:
        finite_seconds(self.delay, "delay")
        for name in ("status", "abort_after"):
            if getattr(self, name) is not None:
                token_count(getattr(self, name), name)
        if self.retry_after is not None:
            finite_seconds(self.retry_after, "retry_after")

    @property
    def is_at_the_door(self) -> bool:
        """It comes before the quotas are asked."""
        return self.status in (429, 503, 529)


Faults: TypeAlias = Callable[[FakeRequest], Fault | None]


def first_calls(calls: int, fault: Fault) -> Faults:
    """The first so many calls go wrong, as in 429, 429, then success.

    >>> faults = first_calls(2, Fault(status=429, retry_after=1.0))
    """
    calls = token_count(calls, "calls")
    return lambda request: fault if request.number < calls else None


def some_calls(share: float, fault: Fault) -> Faults:
    """Each call goes wrong with this probability, reproducibly.

    >>> faults = some_calls(0.01, Fault(drop=True))
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be from 0 to 1, not {share!r}")
    return lambda request: fault if request.random.random() < share else None
