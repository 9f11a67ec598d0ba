"""What a sliding window promises, checked by brute force over all that was admitted."""

import random
from collections.abc import Callable, Hashable
from typing import TypeAlias

import anyio

from tokenflow import Usage
from tokenflow.limits import Limiter

Admitted: TypeAlias = list[tuple[float, int]]


def greatest_window(admitted: Admitted, per: float = 60.0) -> int:
    """The most admitted in any half-open span of `per` seconds, wherever it starts.

    A span that holds the most can be moved until it starts at an admission. Both ways to
    say that one lies in it are tried, since they may round differently.
    """
    return max(
        max(
            sum(cost for at, cost in admitted if start <= at < start + per),
            sum(cost for at, cost in admitted if start <= at and at - start < per),
        )
        for start, _ in admitted
    )


async def call(
    limiter: Limiter,
    cost: int | Usage,
    admitted: Admitted,
    *,
    hold: float = 0.0,
    priority: int = 0,
    tenant: Hashable = None,
) -> None:
    """One call, recorded at the instant at which it may start."""
    async with limiter.reserve(cost, priority=priority, tenant=tenant) as lease:
        admitted.append((anyio.current_time(), lease.tokens))
        if hold:
            await anyio.sleep(hold)


def sizes(seed: int) -> Callable[[], int]:
    """Log-normal between 50 and 8,000 tokens: many small calls and a long tail."""
    randomness = random.Random(seed)
    return lambda: min(8000, max(50, int(randomness.lognormvariate(6.4, 1.0))))


async def saturate(limiter: Limiter, seconds: float, *, workers: int = 32) -> Admitted:
    """Workers whose next call is always ready: what went in that time."""
    admitted: Admitted = []
    size = sizes(7)

    async def worker() -> None:
        while True:
            await call(limiter, size(), admitted, hold=0.2)

    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as tasks:
            for _ in range(workers):
                tasks.start_soon(worker)
    return admitted
