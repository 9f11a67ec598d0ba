"""Several limiters as one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, final

from ._gate import Gate
from ._limiter import Limiter, Oversize
from ._order import Fifo, Order

__all__ = ["LimitsStatistics", "TokenLimits"]


@dataclass(frozen=True, slots=True)
class LimitsStatistics:
    """`TokenLimits.statistics()`: its own queue, and what each member says.

    A gate stands for itself. `unreconciled` counts calls that left on their estimate.
    """

    members: tuple[Any, ...]
    waiting_calls: int
    waiting_tokens: int
    unreconciled: int


@final
class TokenLimits(Limiter):
    """Several limiters as one: a call is admitted by all of them, or charged to none.

    >>> import tokenflow
    >>> in_flight = tokenflow.TokenSemaphore(500_000)
    >>> per_minute = tokenflow.TokenRateLimiter(tokens_per_minute=2_000_000)
    >>> limits = tokenflow.TokenLimits(in_flight, per_minute)
    >>> limits.acquire_nowait(1_200).release()
    >>> per_minute.statistics().quotas[0].used
    1200

    Members may be used directly as well, and in other combinations. Their own
    order, `max_waiting` and `oversize` do not apply to calls that come through
    here; their pauses, limits and debts do. A gate that is reached twice is
    checked and charged once. Without members it admits everything.
    """

    __slots__ = ("_members",)

    def __init__(
        self,
        *members: Limiter | Gate,
        order: Order = Fifo(),  # noqa: B008 (stateless)
        max_waiting: int | None = None,
        oversize: Oversize = "raise",
    ) -> None:
        for member in members:
            is_gate = hasattr(member, "ready_at") and not isinstance(member, type)
            if not isinstance(member, Limiter) and not is_gate:
                raise TypeError(f"TokenLimits takes limiters and gates, not {member!r}")
        super().__init__(order=order, max_waiting=max_waiting, oversize=oversize)
        self._members = members

    def _gates(self, tenant: Hashable) -> Iterable[Gate]:
        for member in self._members:
            if isinstance(member, Limiter):
                yield from member._gates(tenant)
            else:
                yield member

    def _by_tenant(self) -> bool:
        return any(isinstance(m, Limiter) and m._by_tenant() for m in self._members)

    def statistics(self) -> LimitsStatistics:
        """Live numbers; works from anywhere."""
        members = (m.statistics() if isinstance(m, Limiter) else m for m in self._members)
        queue = self._queue
        return LimitsStatistics(
            tuple(members), queue.waiting, queue.waiting_tokens, queue.unreconciled
        )

    def __repr__(self) -> str:
        members = ", ".join(map(repr, self._members))
        return f"<TokenLimits({members}): {self._queue.waiting} waiting>"
