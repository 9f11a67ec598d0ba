"""The error tree.

Messages are lower case and name the value, the limit and the remedy. What a
program needs is in attributes, which survive pickling.
"""

from __future__ import annotations

from typing import final

__all__ = [
    "BatchError",
    "BatcherClosed",
    "NoReplica",
    "QueueFull",
    "RequestTooLarge",
    "TokenflowError",
    "UnknownModel",
    "WaitTimeout",
    "WrongResultCount",
]


class TokenflowError(Exception):
    """Base of every error that tokenflow defines."""


@final
class RequestTooLarge(TokenflowError, ValueError):
    """A cost that could never be admitted: waiting or retrying cannot help.

    `cost` and `limit` are in the unit of the gate that refused it; `limit` is
    the largest cost that would fit.
    """

    def __init__(self, message: str, *, cost: int | None = None, limit: int | None = None) -> None:
        super().__init__(message)
        self.cost = cost
        self.limit = limit


@final
class WaitTimeout(TokenflowError, TimeoutError):
    """The wait would exceed `max_wait`, or did; nothing was charged.

    `retry_after` is in seconds, and None where only a release by another call helps.
    It is the earliest that the limits allow: those who wait already come first, so
    add some jitter when you pass it on.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@final
class QueueFull(TokenflowError):
    """The limiter already has `max_waiting` calls in its queue; nothing was charged.

    `retry_after` as for `WaitTimeout`.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@final
class NoReplica(TokenflowError):
    """No replica could take the call, now or later.

    `largest` is the largest cost, in tokens, that some replica would take, where one is known.
    """

    def __init__(self, message: str, *, largest: int | None = None) -> None:
        super().__init__(message)
        self.largest = largest


@final
class UnknownModel(TokenflowError, LookupError):
    """No pattern of a flow matches `model`, so that nothing says what limits it."""

    def __init__(self, message: str, *, model: str | None = None) -> None:
        super().__init__(message)
        self.model = model


class BatchError(TokenflowError):
    """Base of what can go wrong with a batch and its processor.

    Raised itself where a processor died: `__cause__` is what it died of.
    """


@final
class BatcherClosed(BatchError):
    """The batcher takes no items: it was not entered yet, or it is closed."""


@final
class WrongResultCount(BatchError):
    """A batch has `expected` items, but came back with `received` results.

    Nobody gets a result: which of them are missing cannot be known.
    """

    def __init__(
        self, message: str, *, expected: int | None = None, received: int | None = None
    ) -> None:
        super().__init__(message)
        self.expected = expected
        self.received = received
