"""At most so many tokens in flight."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import final

from tokenflow._usage import token_count

from ._admission import changed
from ._gate import Gate, InFlightGate
from ._limiter import Limiter, Oversize
from ._order import Fifo, Order
from ._turnstile import guard, turnstile

__all__ = ["SemaphoreStatistics", "TokenSemaphore"]


@dataclass(frozen=True, slots=True)
class SemaphoreStatistics:
    """`TokenSemaphore.statistics()`. `unreconciled` counts calls that left on their estimate.

    Requests are counted from the first time that `max_requests` is set.
    """

    tokens_in_flight: int
    max_tokens: int
    requests_in_flight: int | None
    max_requests: int | None
    waiting_calls: int
    waiting_tokens: int
    unreconciled: int


@final
class TokenSemaphore(Limiter):
    """At most `max_tokens` in flight at a time, and at most `max_requests` requests.

    >>> import anyio, tokenflow
    >>> semaphore = tokenflow.TokenSemaphore(1_000)
    >>> async def call(tokens):
    ...     async with semaphore.reserve(tokens):
    ...         await anyio.sleep(0.01)
    >>> async def main():
    ...     async with anyio.create_task_group() as tasks:
    ...         for tokens in (600, 600, 300):  # the second waits for the first
    ...             tasks.start_soon(call, tokens)
    >>> anyio.run(main)

    The default order is first come, first served: behind a large call that
    waits, small ones wait too. `SmallestFirst` lets them fill the gap. Permits
    are never granted in parts.

    `max_tokens` and `max_requests` can be set while running: raising admits
    waiters before the assignment returns; lowering takes effect as leases come
    back, and fails those in the queue that could no longer fit. 0 is a pause.
    Calls that were in flight before `max_requests` was first set are not counted in it.

    With `oversize="alone"` a call above `max_tokens` goes when nothing else is in
    flight, instead of raising RequestTooLarge.
    """

    __slots__ = ("_requests", "_tokens")

    def __init__(
        self,
        max_tokens: int,
        *,
        max_requests: int | None = None,
        order: Order = Fifo(),  # noqa: B008 (stateless)
        max_waiting: int | None = None,
        oversize: Oversize = "raise",
    ) -> None:
        self._tokens = InFlightGate(token_count(max_tokens, "max_tokens"))
        self._requests: InFlightGate | None = None
        if max_requests is not None:
            self._requests = InFlightGate(_request_limit(max_requests), of="requests")
        super().__init__(order=order, max_waiting=max_waiting, oversize=oversize)

    @property
    def max_tokens(self) -> int:
        """Tokens that may be in flight. Writable."""
        return int(self._tokens.limit)

    @max_tokens.setter
    def max_tokens(self, limit: int) -> None:
        self._resize(self._tokens, token_count(limit, "max_tokens"))

    @property
    def max_requests(self) -> int | None:
        """Requests that may be in flight; None is no limit. Writable."""
        if self._requests is None or self._requests.limit == math.inf:
            return None
        return int(self._requests.limit)

    @max_requests.setter
    def max_requests(self, limit: int | None) -> None:
        requests = _request_limit(limit)
        guard(self._gates(None))
        if self._requests is None:
            self._requests = InFlightGate(math.inf, of="requests")
            for path in list(turnstile(self._tokens).paths):
                path.extend(self._requests)
        self._resize(self._requests, requests)

    def statistics(self) -> SemaphoreStatistics:
        """Live numbers; works from anywhere."""
        return SemaphoreStatistics(
            self._tokens.used,
            self.max_tokens,
            self._requests and self._requests.used,
            self.max_requests,
            self._queue.waiting,
            self._queue.waiting_tokens,
            self._queue.unreconciled,
        )

    def _gates(self, tenant: Hashable) -> tuple[Gate, ...]:
        return (self._tokens,) if self._requests is None else (self._tokens, self._requests)

    def _by_tenant(self) -> bool:
        return False

    def _resize(self, gate: InFlightGate, limit: float) -> None:
        now = guard([gate]).now()
        largest = gate.largest()
        gate.limit = limit
        changed([gate], now, lowered=gate.largest() < largest, raised=gate.largest() > largest)

    def __repr__(self) -> str:
        return (
            f"<TokenSemaphore: {self._tokens.used:,} of {self.max_tokens:,} tokens in flight, "
            f"{self._queue.waiting} waiting>"
        )


def _request_limit(limit: int | None) -> float:
    return math.inf if limit is None else token_count(limit, "max_requests")
