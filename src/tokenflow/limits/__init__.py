"""Who may go now: in tokens in flight, tokens per minute, or both at once."""

from ._gate import Gate, InFlightGate
from ._lease import Lease
from ._limiter import Limiter, Oversize
from ._limits import BuildsLimiter, LimitsStatistics, TokenLimits
from ._order import FairShare, Fifo, Order, SmallestFirst
from ._rate import Quota, QuotaStatistics, RateLimiterStatistics, TokenRateLimiter
from ._semaphore import SemaphoreStatistics, TokenSemaphore
from ._window import Settle, WindowGate

__all__ = [
    "BuildsLimiter",
    "FairShare",
    "Fifo",
    "Gate",
    "InFlightGate",
    "Lease",
    "Limiter",
    "LimitsStatistics",
    "Order",
    "Oversize",
    "Quota",
    "QuotaStatistics",
    "RateLimiterStatistics",
    "SemaphoreStatistics",
    "Settle",
    "SmallestFirst",
    "TokenLimits",
    "TokenRateLimiter",
    "TokenSemaphore",
    "WindowGate",
]
