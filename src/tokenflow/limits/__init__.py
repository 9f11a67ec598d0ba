"""Who may go now: in tokens in flight, tokens per minute, or both at once."""

from ._gate import Gate, InFlightGate
from ._limiter import Lease, Limiter, LimitsStatistics, TokenLimits
from ._order import FairShare, Fifo, Order, SmallestFirst
from ._rate import Quota, QuotaStatistics, RateLimiterStatistics, TokenRateLimiter
from ._semaphore import SemaphoreStatistics, TokenSemaphore
from ._window import WindowGate

__all__ = [
    "FairShare",
    "Fifo",
    "Gate",
    "InFlightGate",
    "Lease",
    "Limiter",
    "LimitsStatistics",
    "Order",
    "Quota",
    "QuotaStatistics",
    "RateLimiterStatistics",
    "SemaphoreStatistics",
    "SmallestFirst",
    "TokenLimits",
    "TokenRateLimiter",
    "TokenSemaphore",
    "WindowGate",
]
