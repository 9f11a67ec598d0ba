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
    """The connection to a fake broke, because a `Fault` said so."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """How one call goes wrong; what is not set is as always.

    Args:
        status: This error is the answer. 429, 503 and 529 come before the quotas are
            asked, and cost nothing; others come after, and are charged as at arrival.
        code: The error's code: "insufficient_quota" is the 429 that no waiting cures.
        message: The error's message.
        retry_after: In its headers, in seconds.
        delay: Seconds by which the headers, and all after them, are late.
        unreachable: No connection: the request never arrives. (Under a server: `drop`.)
        drop: The connection breaks after `delay`, without an answer. (uvicorn does that;
            another server may answer 500.)
        abort_after: It breaks after so many chunks; after 0 there are only headers.
        body: The answer's body is this instead.
        hide_usage: The answer does not say what was used.

    Raises:
        TypeError, ValueError: a setting that makes no sense.
    """

    status: int | None = None
    code: str | None = None
    message: str = ""
    retry_after: float | None = None
    delay: float = 0.0
    unreachable: bool = False
    drop: bool = False
    abort_after: int | None = None
    body: bytes | None = None
    hide_usage: bool = False

    def __post_init__(self) -> None:
        finite_seconds(self.delay, "delay")
        if self.retry_after is not None:
            finite_seconds(self.retry_after, "retry_after")
        if self.abort_after is not None:
            token_count(self.abort_after, "abort_after")
        if self.status is not None and not 400 <= token_count(self.status, "status") < 600:
            raise ValueError(f"status must be that of an error, 400 to 599, not {self.status}")

    @property
    def is_before_quotas(self) -> bool:
        """Nothing is charged for it."""
        return self.unreachable or self.status in (429, 503, 529)


Faults: TypeAlias = Callable[[FakeRequest], Fault | None]


def first_calls(calls: int, fault: Fault) -> Faults:
    """The first so many calls go wrong: 429, 429, then success.

    >>> faults = first_calls(2, Fault(status=429, retry_after=1.0))
    """
    token_count(calls, "calls")
    return lambda request: fault if request.number < calls else None


def some_calls(share: float, fault: Fault) -> Faults:
    """Each call goes wrong with this probability, reproducibly.

    >>> faults = some_calls(0.01, Fault(drop=True))

    Raises:
        ValueError: a share that is not from 0 to 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be from 0 to 1, not {share!r}")
    return lambda request: fault if request.random.random() < share else None
