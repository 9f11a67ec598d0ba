"""What a limiter costs: against its peers, and against doing nothing.

On asyncio, in CPU time: nobody here waits for a clock, and what other processes do does not count.
All contestants of a table take turns, round after round, so that a machine that slows down hits
all of them. A ratio is the median over the rounds of the ratio within each round. Every round
begins with new limiters, large enough that no call has to wait, save where waiting is the point.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import anyio
from _report import arguments, environment, publish, table

import tokenflow

TOKENS = 1_000
"""Of one call."""
PLENTY = 10**12
"""A limit that nothing here comes near to."""
ROUND_SECONDS = 0.03
"""That one contestant gets per round."""

Loop = Callable[[int], Coroutine[Any, Any, None]]
"""So many calls, one after the other."""


@dataclass(frozen=True)
class Contestant:
    name: str
    build: Callable[[], Loop]
    largest: int = 1_000_000  # calls per round; those that get slower as they fill up do fewer


@dataclass(frozen=True)
class Target:
    """`name` takes at most `most` times as long as `than`, or `than` at least `least` times."""

    name: str
    than: str
    most: float | None = None
    least: float | None = None

    def judge(self, ratio: Callable[[str, str], float]) -> tuple[str, str]:
        if self.most is not None:
            return self._told(ratio(self.name, self.than), f"<= {self.most:g}x {self.than}", 1)
        assert self.least is not None
        bound = f"{self.than} >= {self.least:g}x"
        return self._told(ratio(self.than, self.name), bound, -1)

    def _told(self, value: float, bound: str, sign: int) -> tuple[str, str]:
        limit = self.most if self.most is not None else self.least
        assert limit is not None
        met = sign * value <= sign * limit
        return bound, f"{value:.2f}x: {'met' if met else 'NOT MET'}"


@dataclass
class Race:
    title: str
    baseline: str
    contestants: list[Contestant]
    targets: list[Target] = field(default_factory=list)
    unit: str = "us per call"
    calls: int | None = None  # fixed, where a number of calls is the point


def reserve(limiter: tokenflow.TokenSemaphore | Any) -> Loop:
    async def loop(n: int) -> None:
        for _ in range(n):
            async with limiter.reserve(TOKENS):
                pass

    return loop


def enter(context: Any) -> Loop:
    async def loop(n: int) -> None:
        for _ in range(n):
            async with context:
                pass

    return loop


def call(function: Callable[..., Awaitable[object]], *args: Any, **kwargs: Any) -> Loop:
    async def loop(n: int) -> None:
        for _ in range(n):
            await function(*args, **kwargs)

    return loop


# -- the contestants -----------------------------------------------------------


async def nothing() -> None:
    """An await, and nothing else."""


def rate_limiter(per: float = 60.0) -> Loop:
    return reserve(tokenflow.TokenRateLimiter(tokenflow.Quota(PLENTY, per=per)))


def reconciled() -> Loop:
    limiter = tokenflow.TokenRateLimiter(tokens_per_minute=PLENTY)

    async def loop(n: int) -> None:
        for _ in range(n):
            async with limiter.reserve(TOKENS) as lease:
                lease.reconcile(TOKENS - 300)

    return loop


def all_three() -> Loop:
    return reserve(
        tokenflow.TokenLimits(
            tokenflow.TokenSemaphore(PLENTY),
            tokenflow.TokenRateLimiter(tokens_per_minute=PLENTY, requests_per_minute=PLENTY),
        )
    )


def aiolimiter() -> Loop:
    from aiolimiter import AsyncLimiter

    return call(AsyncLimiter(PLENTY, 60).acquire, TOKENS)


def pyrate(weight: int) -> Loop:
    from pyrate_limiter import Duration, Limiter, Rate

    return call(Limiter(Rate(PLENTY, Duration.MINUTE)).try_acquire_async, "key", weight)


def throttled() -> Loop:
    from throttled.asyncio import MemoryStore, Throttled, per_min

    throttle = Throttled(quota=per_min(PLENTY, burst=PLENTY), store=MemoryStore())
    return call(throttle.limit, "key", TOKENS)


def limits(strategy: str, cost: int) -> Loop:
    from limits import RateLimitItemPerMinute
    from limits.aio import strategies
    from limits.aio.storage import MemoryStorage

    limiter = getattr(strategies, strategy)(MemoryStorage())
    return call(limiter.hit, RateLimitItemPerMinute(PLENTY), "key", cost=cost)


def token_throttle() -> Loop:
    import token_throttle as peer

    quotas = [peer.Quota(metric="tokens", limit=PLENTY, per_seconds=60)]
    limiter = peer.RateLimiter(
        peer.PerModelConfig(quotas=peer.UsageQuotas(quotas)), backend=peer.MemoryBackendBuilder()
    )
    usage = {"tokens": TOKENS}

    async def loop(n: int) -> None:
        for _ in range(n):
            async with limiter.reserve(usage, model="any") as handle:
                handle.set_actual_usage(usage)

    return loop


SEMAPHORES = Race(
    "Reserve and release, with room",
    "asyncio.Semaphore",
    [
        Contestant("nothing (an empty `async with`)", lambda: enter(contextlib.nullcontext())),
        Contestant("asyncio.Semaphore", lambda: enter(asyncio.Semaphore(1_000))),
        Contestant("TokenSemaphore", lambda: reserve(tokenflow.TokenSemaphore(PLENTY))),
        Contestant(
            "TokenSemaphore, max_requests",
            lambda: reserve(tokenflow.TokenSemaphore(PLENTY, max_requests=1_000)),
        ),
        Contestant("TokenLimits: semaphore, two quotas", all_three),
        Contestant(
            "anyio.Semaphore, fast_acquire",
            lambda: enter(anyio.Semaphore(1_000, fast_acquire=True)),
        ),
        Contestant("anyio.Semaphore", lambda: enter(anyio.Semaphore(1_000))),
        Contestant("anyio.CapacityLimiter", lambda: enter(anyio.CapacityLimiter(1_000))),
    ],
    [
        Target("TokenSemaphore", "asyncio.Semaphore", most=3),
        Target("TokenSemaphore", "anyio.CapacityLimiter", least=2.5),
        Target("TokenLimits: semaphore, two quotas", "asyncio.Semaphore", most=6),
    ],
)

RATES = Race(
    "A rate limit, with room",
    "aiolimiter",
    [
        Contestant("nothing (an empty coroutine)", lambda: call(nothing)),
        Contestant("aiolimiter", aiolimiter),
        Contestant("TokenRateLimiter", rate_limiter),
        Contestant("TokenRateLimiter, reconciled", reconciled),
        Contestant("TokenRateLimiter, a slot per call", lambda: rate_limiter(per=0.005)),
        Contestant("throttled-py", throttled),
        Contestant(
            "limits, window counter", lambda: limits("SlidingWindowCounterRateLimiter", TOKENS)
        ),
        Contestant(
            "limits, moving window, 1 token", lambda: limits("MovingWindowRateLimiter", 1), 2_000
        ),
        Contestant("pyrate-limiter, 1 token", lambda: pyrate(1), 2_000),
        Contestant("pyrate-limiter", lambda: pyrate(TOKENS), 300),
        Contestant("token-throttle", token_throttle, 100),
    ],
    [Target("TokenRateLimiter", "aiolimiter", most=4)],
)


def through(permit: Callable[[], Any]) -> Callable[[], Loop]:
    """So many tasks at once, each holding a permit for one turn of the event loop."""

    def build() -> Loop:
        limiter = permit()

        async def task() -> None:
            async with limiter.reserve(TOKENS) if isinstance(limiter, ours) else limiter:
                await asyncio.sleep(0)

        async def loop(n: int) -> None:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(n):
                    tasks.create_task(task())

        return loop

    ours = (tokenflow.TokenSemaphore, tokenflow.TokenLimits)
    return build


PERMITS = 100
CONTENDED = Race(
    "10,000 tasks through 100 permits",
    "asyncio.Semaphore",
    [
        Contestant("nothing (no limit)", through(contextlib.nullcontext)),
        Contestant("asyncio.Semaphore", through(lambda: asyncio.Semaphore(PERMITS))),
        Contestant("TokenSemaphore", through(lambda: tokenflow.TokenSemaphore(PERMITS * TOKENS))),
        Contestant(
            "TokenSemaphore, SmallestFirst",
            through(
                lambda: tokenflow.TokenSemaphore(PERMITS * TOKENS, order=tokenflow.SmallestFirst())
            ),
        ),
        Contestant("anyio.Semaphore", through(lambda: anyio.Semaphore(PERMITS))),
        Contestant("anyio.CapacityLimiter", through(lambda: anyio.CapacityLimiter(PERMITS))),
    ],
    [Target("TokenSemaphore", "asyncio.Semaphore", most=2)],
    unit="us per task",
    calls=10_000,
)


# -- time ----------------------------------------------------------------------


async def seconds_per_call(contestant: Contestant, calls: int) -> float:
    loop = contestant.build()
    await loop(max(1, calls // 20))
    gc.collect()
    begin = time.process_time()
    await loop(calls)
    return (time.process_time() - begin) / calls


async def fitting(contestant: Contestant) -> int:
    """How many calls fill a contestant's share of a round."""
    calls = 20
    while calls < contestant.largest:
        took = calls * await seconds_per_call(contestant, calls)
        if took > ROUND_SECONDS / 2:
            return min(contestant.largest, max(1, int(calls * ROUND_SECONDS / took)))
        calls *= 2
    return contestant.largest


async def run(race: Race, rounds: int) -> tuple[str, list[tuple[str, str, str]]]:
    """The race's table, and what became of its targets."""
    calls: dict[str, int] = {}
    skipped: dict[str, str] = {}
    for contestant in race.contestants:
        try:
            calls[contestant.name] = race.calls or await fitting(contestant)
        except ImportError as error:
            skipped[contestant.name] = _why(error)
            print(f"skipped {contestant.name}: {skipped[contestant.name]}", file=sys.stderr)
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for contestant in race.contestants:
            if contestant.name in calls:
                each = await seconds_per_call(contestant, calls[contestant.name])
                took[contestant.name].append(each)

    def ratio(name: str, than: str) -> float:
        return median(a / b for a, b in zip(took[name], took[than], strict=True))

    judged = [(f"{race.title}: {target.name}", *target.judge(ratio)) for target in race.targets]
    rows = [
        [name, f"{median(took[name]) * 1e6:.2f}", f"{ratio(name, race.baseline):.2f}x"]
        for name in took
    ]
    header = [race.title, race.unit, f"/ {race.baseline}"]
    absent = [f"\nNot in this run: {name}, {why}." for name, why in skipped.items()]
    return "\n".join([table(header, rows), *absent]), judged


def _why(error: ImportError) -> str:
    if sys.version_info < (3, 12) and error.name == "token_throttle":
        return "it needs Python 3.12 or newer"
    return f"{error} (`pip install --group bench`)"


# -- memory --------------------------------------------------------------------


async def bytes_per_task(start: Callable[[], Coroutine[Any, Any, object]], tasks: int) -> float:
    """What a blocked task holds, the task itself included."""
    first = asyncio.create_task(start())
    await asyncio.sleep(0.01)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    blocked = [asyncio.create_task(start()) for _ in range(tasks)]
    await asyncio.sleep(0.01)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not any(task.done() for task in (first, *blocked))
    for task in (first, *blocked):
        task.cancel()
    await asyncio.gather(first, *blocked, return_exceptions=True)
    return (after - before) / tasks


async def bare() -> None:
    await asyncio.get_running_loop().create_future()


def waits_for(context: Any) -> Callable[[], Coroutine[Any, Any, None]]:
    async def wait() -> None:
        async with context:
            raise AssertionError

    return wait


def waits_at(limiter: Any) -> Callable[[], Coroutine[Any, Any, None]]:
    async def wait() -> None:
        async with limiter.reserve(TOKENS):
            raise AssertionError

    return wait


async def waiters() -> list[tuple[str, Callable[[], Coroutine[Any, Any, object]]]]:
    semaphore = tokenflow.TokenSemaphore(TOKENS)
    rate = tokenflow.TokenRateLimiter(tokens_per_minute=TOKENS, requests_per_minute=1)
    both = tokenflow.TokenLimits(semaphore, rate)
    in_use.append(semaphore.acquire_nowait(TOKENS))
    in_use.append(rate.acquire_nowait(TOKENS))
    limiter = anyio.CapacityLimiter(1)
    limiter.acquire_on_behalf_of_nowait("the benchmark")
    found: list[tuple[str, Callable[[], Coroutine[Any, Any, object]]]] = [
        ("asyncio.Semaphore", waits_for(asyncio.Semaphore(0))),
        ("TokenSemaphore", waits_at(semaphore)),
        ("TokenRateLimiter, two quotas", waits_at(rate)),
        ("TokenLimits: semaphore, two quotas", waits_at(both)),
        ("anyio.Semaphore", waits_for(anyio.Semaphore(0))),
        ("anyio.CapacityLimiter", waits_for(limiter)),
    ]
    with contextlib.suppress(ImportError):
        from aiolimiter import AsyncLimiter

        bucket = AsyncLimiter(TOKENS, 60)
        await bucket.acquire(TOKENS)
        found.append(("aiolimiter", lambda: bucket.acquire(TOKENS)))
    with contextlib.suppress(ImportError):
        import token_throttle as peer

        quotas = peer.UsageQuotas([peer.Quota(metric="tokens", limit=TOKENS, per_seconds=60)])
        throttle = peer.RateLimiter(
            peer.PerModelConfig(quotas=quotas), backend=peer.MemoryBackendBuilder()
        )
        in_use.append(await throttle.acquire_capacity({"tokens": TOKENS}, model="any"))
        wait = throttle.acquire_capacity
        found.append(("token-throttle", lambda: wait({"tokens": TOKENS}, model="any")))
    return found


in_use: list[Any] = []


async def measure_memory(tasks: int) -> tuple[str, list[tuple[str, str, str]]]:
    floor = await bytes_per_task(bare, tasks)
    rows = [["nothing (a bare blocked task)", "0"]]
    judged = []
    for name, start in await waiters():
        above = await bytes_per_task(start, tasks) - floor
        rows.append([name, f"{above:,.0f}"])
        if name.startswith("Token"):
            verdict = "met" if above <= 2_000 else "NOT MET"
            judged.append(
                (f"Memory of a waiter: {name}", "<= 2,000 bytes", f"{above:,.0f}: {verdict}")
            )
    for lease in in_use:
        if isinstance(lease, tokenflow.Lease):
            lease.release()
    return table(["A task that waits", "bytes above a bare one"], rows), judged


async def main(*, quick: bool) -> str:
    rounds = 7 if quick else 15
    tables, judged = [], []
    for race in (SEMAPHORES, RATES, CONTENDED):
        print(f"... {race.title}", file=sys.stderr)
        text, verdicts = await run(race, rounds if race is not CONTENDED else 7)
        tables.append(text)
        judged += verdicts
    text, verdicts = await measure_memory(500 if quick else 2_000)
    tables.append(text)
    judged += verdicts
    summary = table(["What", "target", "this run"], judged)
    return "\n\n".join(["## Limits: what a call costs", environment() + NOTE, summary, *tables])


NOTE = """ Times are medians
of CPU time, ratios the medians of the ratios within each round: below 1.00x is faster than the
peer. A call is of 1,000 tokens where nothing else is said. `a slot per call` is the worst case of
the sliding window: calls so far apart that each one opens a slot, and sees an old one off."""


if __name__ == "__main__":
    options = arguments(__doc__)
    publish("limits", asyncio.run(main(quick=options.quick)), quick=options.quick)
