"""How much of a quota a limiter uses under load, and whether it stays within.

In virtual time: 60,000 tokens per minute, 32 workers that always have a call to make, of 50 to
8,000 tokens (log-normal, median 632, sigma 1.1), each taking 2 s. A time scale of its own makes
this exact: nothing here depends on the machine.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from _report import arguments, publish, table
from _virtual import run_virtual

from tokenflow import Fifo, Quota, SmallestFirst, TokenRateLimiter

LIMIT = 60_000
PERIOD = 60.0
WORKERS = 32
LATENCY = 2.0
SMALLEST, LARGEST = 50, 8_000
LARGE = 40_000
LARGE_ARRIVES = 120.0  # and, from one seed to the next, later and later in this minute
WINDOWS = 10
REPORTED_AFTER = 5.0
CEILING = PERIOD / (PERIOD + REPORTED_AFTER)

Admit = Callable[[int, int], AbstractAsyncContextManager[None]]
"""`async with admit(reserved, used):` waits for the quota; at the end it may say what was used."""


@dataclass(frozen=True)
class Outcome:
    share: float
    worst_window: float
    large_waited: float
    longest_waited: float = math.nan


class Load:
    """The workers and what was admitted when."""

    def __init__(self, admit: Admit, seed: int, *, factor: int, latency: float) -> None:
        self.admit = admit
        self.sizes = random.Random(seed)
        self.factor = factor
        self.latency = latency
        self.admitted: list[tuple[float, int]] = []

    async def work(self) -> None:
        while True:
            await self.call(self.size())

    async def call(self, tokens: int) -> None:
        async with self.admit(tokens * self.factor, tokens):
            self.admitted.append((asyncio.get_running_loop().time(), tokens))
            await asyncio.sleep(self.latency)

    def size(self) -> int:
        while True:
            tokens = int(self.sizes.lognormvariate(math.log(SMALLEST * LARGEST) / 2, 1.1))
            if SMALLEST <= tokens <= LARGEST:
                return tokens

    def outcome(self, large_waited: float) -> Outcome:
        """The share is that of `WINDOWS` whole periods; the first one, the warm-up, is not in it.

        The worst window is by brute force: one that begins with each admission, warm-up included.
        """
        times = [when for when, _ in self.admitted]
        sums = [0, *accumulate(tokens for _, tokens in self.admitted)]
        counted = (
            sums[bisect_left(times, (WINDOWS + 1) * PERIOD)] - sums[bisect_left(times, PERIOD)]
        )
        worst = max(
            sums[bisect_left(times, when + PERIOD)] - sums[i] for i, when in enumerate(times)
        )
        return Outcome(counted / WINDOWS / LIMIT, worst / LIMIT, large_waited)


async def simulate(load: Load, large_arrives: float | None) -> Outcome:
    clock = asyncio.get_running_loop().time
    workers = [asyncio.create_task(load.work()) for _ in range(WORKERS)]
    waited = math.nan
    if large_arrives is not None:
        await asyncio.sleep(large_arrives)
        workers.append(asyncio.create_task(load.call(LARGE)))
    await asyncio.sleep((WINDOWS + 1) * PERIOD - clock())
    for worker in workers:
        worker.cancel()
    for result in await asyncio.gather(*workers, return_exceptions=True):
        if not isinstance(result, asyncio.CancelledError | None):
            raise result
    if large_arrives is not None:
        found = [when for when, tokens in load.admitted if tokens == LARGE]
        waited = found[0] - large_arrives if found else math.inf
    return load.outcome(waited)


# -- the limiters --------------------------------------------------------------


def ours(
    *, reconciled: bool = True, burst: int | None = None, **options: Any
) -> Callable[[], Admit]:
    def build() -> Admit:
        limiter = TokenRateLimiter(Quota(LIMIT, per=PERIOD, burst=burst), **options)

        @asynccontextmanager
        async def admit(reserved: int, used: int) -> AsyncIterator[None]:
            async with limiter.reserve(reserved) as lease:
                yield
                if reconciled:
                    lease.reconcile(used)

        return admit

    return build


def aiolimiter(limit: int) -> Callable[[], Admit]:
    """Its waiters are a heap by amount, its ledger a bucket: full at first, and then refilled."""

    def build() -> Admit:
        from aiolimiter import AsyncLimiter

        limiter = AsyncLimiter(limit, PERIOD)

        @asynccontextmanager
        async def admit(reserved: int, used: int) -> AsyncIterator[None]:
            await limiter.acquire(reserved)
            yield

        return admit

    return build


DEFAULT = "Fifo(), the default"
OURS = {
    DEFAULT: ours(),
    "Fifo(backfill=False)": ours(order=Fifo(backfill=False)),
    "SmallestFirst()": ours(order=SmallestFirst()),
    "burst=8,000 (the largest call)": ours(burst=LARGEST),
    "burst=1,000": ours(burst=1_000),
}
BUCKET = {"aiolimiter": aiolimiter(LIMIT)}
HALF = {"aiolimiter, half the rate": aiolimiter(LIMIT // 2)}


def run(build: Callable[[], Admit], seeds: int, *, large: bool = False, factor: int = 1) -> Outcome:
    """Median share, worst window, median and longest wait over all seeds."""
    latency = REPORTED_AFTER if factor > 1 else LATENCY
    found = []
    for seed in range(seeds):
        load = Load(build(), seed, factor=factor, latency=latency)
        arrives = LARGE_ARRIVES + PERIOD * (seed + 0.5) / seeds if large else None
        found.append(run_virtual(simulate(load, arrives)))
    return Outcome(
        median(each.share for each in found),
        max(each.worst_window for each in found),
        median(each.large_waited for each in found),
        max(each.large_waited for each in found),
    )


def race(limiters: dict[str, Callable[[], Admit]], seeds: int, **load: Any) -> dict[str, Outcome]:
    outcomes = {}
    for name, build in limiters.items():
        print(f"... {name}", file=sys.stderr)
        try:
            outcomes[name] = run(build, seeds, **load)
        except ImportError as error:
            print(f"skipped {name}: {error} (`pip install --group bench`)", file=sys.stderr)
    return outcomes


# -- the report ----------------------------------------------------------------


def judged(name: str, value: float, bound: float, shown: str, least: bool) -> list[str]:
    met = value >= bound if least else value <= bound
    return [name, shown, f"{value:.3f}: {'met' if met else 'NOT MET'}"]


def main(seeds: int) -> str:
    plain = race({**OURS, **BUCKET, **HALF}, seeds)
    large = race({**OURS, **BUCKET}, seeds, large=True)
    twice = race(
        {
            DEFAULT: ours(),
            "burst=16,000": ours(burst=16_000),
            "never reconciled": ours(reconciled=False),
            **BUCKET,
        },
        seeds,
        factor=2,
    )
    return "\n\n".join(
        [
            "## Quota: how much of it is used",
            NOTE.format(seeds=seeds, windows=WINDOWS),
            summary(plain[DEFAULT], large[DEFAULT], twice[DEFAULT]),
            table(
                ["Saturated", "share of the quota", "worst window"],
                [[name, f"{o.share:.1%}", f"{o.worst_window:.3f}x"] for name, o in plain.items()],
            ),
            table(
                [
                    "... and one call of 40,000",
                    "share of the quota",
                    "worst window",
                    "it waits",
                    "longest",
                ],
                [
                    [
                        name,
                        f"{o.share:.1%}",
                        f"{o.worst_window:.3f}x",
                        shown_wait(o.large_waited),
                        shown_wait(o.longest_waited),
                    ]
                    for name, o in large.items()
                ],
            ),
            table(
                [
                    "Estimates twice the truth",
                    "share of the quota",
                    "of the ceiling",
                    "worst window",
                ],
                [
                    [name, f"{o.share:.1%}", f"{o.share / CEILING:.1%}", f"{o.worst_window:.3f}x"]
                    for name, o in twice.items()
                ],
            ),
        ]
    )


def summary(plain: Outcome, large: Outcome, twice: Outcome) -> str:
    waited, longest = large.large_waited / PERIOD, large.longest_waited / PERIOD
    return table(
        ["What, with the default order", "target", "this run"],
        [
            judged("Saturated: share", plain.share, 0.99, ">= 0.99", True),
            judged("Saturated: worst window", plain.worst_window, 1.0, "<= 1.000x", False),
            judged("One call of 40,000: share", large.share, 0.95, ">= 0.95", True),
            judged("One call of 40,000: worst window", large.worst_window, 1.0, "<= 1.000x", False),
            judged("One call of 40,000: median wait", waited, 1.5, "<= 1.5 windows", False),
            judged("One call of 40,000: longest wait", longest, 1.5, "<= 1.5 windows", False),
            judged("Twice the truth: share of 60/65", twice.share / CEILING, 0.97, ">= 0.97", True),
        ],
    )


def shown_wait(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < math.inf else "to the end"


NOTE = """\
In virtual time, so the same on every machine. 60,000 tokens per minute; 32 workers that always
have a call to make, of 50 to 8,000 tokens (log-normal, median 632), each taking 2 s. The share is
what was admitted in {windows} whole minutes, against {windows} times the limit; the first minute,
in which everybody begins with an empty window or a full bucket, is not in it. The worst window is
the most that was admitted in any 60 s, the first minute included. Shares are medians over {seeds}
random seeds; worst windows are the worst of them. In the second table one call of 40,000 tokens
arrives in the third minute, with each seed at another point of it: its wait depends on that, since
just after a window was filled it may have to see two of them off. In the third table calls reserve
twice what they use, and say so 5 s later: what is younger than 5 s counts twice, so the ceiling of
an even flow is 60/65 of the quota; a limiter that never hears of the truth is left with a half."""


if __name__ == "__main__":
    options = arguments(__doc__)
    publish("quota", main(3 if options.quick else 9), quick=options.quick)
