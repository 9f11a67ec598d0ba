"""Limits, batching and routing for language models, with the token as the unit of work."""

from ._errors import (
    BatchError,
    NoReplica,
    QueueFull,
    RequestTooLarge,
    TokenflowError,
    WaitTimeout,
)
from ._usage import QuotaStatus, RateLimitStatus, Request, Usage
from .limits import (
    FairShare,
    Fifo,
    Lease,
    Quota,
    SmallestFirst,
    TokenLimits,
    TokenRateLimiter,
    TokenSemaphore,
)

__all__ = [
    "BatchError",
    "FairShare",
    "Fifo",
    "Lease",
    "NoReplica",
    "QueueFull",
    "Quota",
    "QuotaStatus",
    "RateLimitStatus",
    "Request",
    "RequestTooLarge",
    "SmallestFirst",
    "TokenLimits",
    "TokenRateLimiter",
    "TokenSemaphore",
    "TokenflowError",
    "Usage",
    "WaitTimeout",
]
