"""Several limiters as one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, final

from tokenflow._usage import RateLimitStatus

from ._gate import Gate
from ._limiter import Limiter, Oversize
from ._order import Fifo, Order
from ._rate import TokenRateLimiter

__all__ = ["BuildsLimiter", "LimitsStatistics", "TokenLimits"]


class BuildsLimiter(Protocol):
    """What knows its limits and makes a limiter over them: a `Provider`, for one."""

    def limiter(self) -> Limiter:
        """A new one."""


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
    checked and charged once. One of them may be a `TokenRouter`: its replica is
    chosen in the same step. Without members it admits everything.

    Of a member that is no limiter but makes one (a `Provider`), the limiter that it
    made here is in `members`.
    """

    __slots__ = ("_makers", "_members")

    def __init__(
        self,
        *members: Limiter | Gate | BuildsLimiter,
        order: Order = Fifo(),  # noqa: B008 (stateless)
        max_waiting: int | None = None,
        oversize: Oversize = "raise",
    ) -> None:
        super().__init__(order=order, max_waiting=max_waiting, oversize=oversize)
        self._members = tuple(map(_member, members))
        self._makers = tuple(m for m in members if m not in self._members)
        choices = {m._choice for m in self._members if isinstance(m, Limiter)} - {None}
        if len(choices) > 1:
            raise ValueError("TokenLimits takes one router: put all replicas into that one")
        self._choice = next(iter(choices), None)

    @classmethod
    def joined(cls, limits: Limiter, other: Limiter) -> TokenLimits:
        """Both, with the queue of the first: its order, bound and oversize rule, and its counts."""
        both = cls(limits, other)
        both._queue = limits._queue
        return both

    @property
    def members(self) -> tuple[Limiter | Gate, ...]:
        """The limiters and gates, in the order in which they were passed."""
        return self._members

    @property
    def makers(self) -> tuple[Any, ...]:
        """The providers among what was passed: those that made a member."""
        return self._makers

    def pause(self, seconds: float, /) -> None:
        """Admit nothing for so many seconds: pauses each rate limiter among the members.

        Raises:
            ValueError: there is none; only a window can be paused.
        """
        limiters = list(self.rate_limiters())
        if not limiters:
            raise ValueError("no member can be paused: add a TokenRateLimiter or a provider")
        for limiter in limiters:
            limiter.pause(seconds)

    def observe(self, status: RateLimitStatus, *, tenant: Hashable = None) -> None:
        """Let each rate limiter among the members take in what concerns its quotas.

        A budget of your own that counts the same unit over the same period would follow the
        server's numbers too, where they are lower: then observe at the server's limiter in
        `members`.
        """
        for limiter in self.rate_limiters():
            limiter.observe(status, tenant=tenant)

    def rate_limiters(self) -> Iterator[TokenRateLimiter]:
        """All rate limiters among the members, and theirs."""
        for member in self._members:
            if isinstance(member, TokenRateLimiter):
                yield member
            elif isinstance(member, TokenLimits):
                yield from member.rate_limiters()

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


def _member(member: Any) -> Limiter | Gate:
    if isinstance(member, Limiter):
        return member
    if not isinstance(member, type):
        if hasattr(member, "ready_at"):
            gate: Gate = member
            return gate
        made = member.limiter() if callable(getattr(member, "limiter", None)) else None
        if isinstance(made, Limiter):
            return made
    raise TypeError(f"TokenLimits takes limiters, gates and providers, not {member!r}")
