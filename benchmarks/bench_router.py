"""What it costs to choose a replica, and what choosing by tokens gains.

    python benchmarks/bench_router.py [--trace PATH] [--quick]

Speeds are in CPU time, medians of interleaved rounds, on asyncio. The fleet is simulated: what
an engine does in a step takes as long as its memory bandwidth or its arithmetic, whichever is
slower, would take for an 8B model. Idealised, so that the ratios are the result.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import random
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from _report import arguments, environment, publish, table
from _traces import Trace, load, synthetic

from tokenflow import (
    Lease,
    Quota,
    Replica,
    TokenLimits,
    TokenRateLimiter,
    TokenRouter,
    TokenSemaphore,
    Usage,
)

SIZES = (1, 16, 64, 256, 1_000)
MOST_WHEN_FULL = 256
PLENTY = 10**12
MODEL = "llama-3.1-8b"

# -- what a choice costs -------------------------------------------------------

Work = Callable[[int], Coroutine[Any, Any, None]]


def fleet(size: int, **settings: Any) -> list[Replica]:
    """Alike, and each with some calls in flight, so that no two are equally loaded."""
    return [Replica(f"r{n}", max_tokens=PLENTY, model=MODEL, **settings) for n in range(size)]


def loaded(size: int) -> tuple[TokenRouter, list[Lease]]:
    router = TokenRouter(fleet(size))
    rng = random.Random(size)
    return router, [
        router.acquire_nowait(rng.randrange(1, 4_000), model=MODEL) for _ in range(size)
    ]


def round_robin(size: int) -> Work:
    turns = itertools.cycle(fleet(size))

    async def work(calls: int) -> None:
        for _ in range(calls):
            next(turns)

    return work


def least_of_dict(size: int) -> Work:
    """What is written when there is no library: no limits, no waiting, no cancellation."""
    loads = {replica.name: n for n, replica in enumerate(fleet(size))}

    async def work(calls: int) -> None:
        for _ in range(calls):
            name = min(loads, key=loads.__getitem__)
            loads[name] += 100
            loads[name] -= 100

    return work


def choice(size: int) -> Work:
    """The choice and its booking, without a lease around them."""
    router, held = loaded(size)
    ledgers = router._fleet.options(MODEL)
    lease = router.acquire_nowait(100, model=MODEL)

    async def work(calls: int) -> None:
        for _ in range(calls):
            ledger = router._fleet.pick(ledgers, lease, 0.0)
            assert ledger is not None
            charge = ledger.charge(100, 0.0)
            router._fleet.taken(ledger, lease)
            ledger.release(charge)

    kept.append((held, lease))
    return work


def reserve(size: int, **limits: Any) -> Work:
    router, held = loaded(size)
    kept.append(held)
    limiter = TokenLimits(router, *limits.values()) if limits else router

    async def work(calls: int) -> None:
        for _ in range(calls):
            async with limiter.reserve(100, model=MODEL):
                pass

    return work


def with_limits(size: int) -> Work:
    quotas = TokenRateLimiter(Quota(PLENTY), Quota(PLENTY, of="requests"))
    return reserve(size, semaphore=TokenSemaphore(PLENTY), quotas=quotas)


def saturated(size: int) -> Work:
    """Four times as many callers as there are places: each call waits for its turn."""
    router = TokenRouter([Replica(f"r{n}", max_tokens=100) for n in range(size)])

    async def work(calls: int) -> None:
        left = iter(range(calls))

        async def caller() -> None:
            for _ in left:
                async with router.reserve(100):
                    await asyncio.sleep(0)

        await asyncio.gather(*[caller() for _ in range(4 * size)])

    return work


kept: list[Any] = []  # leases that stay

CONTESTANTS: dict[str, Callable[[int], Work]] = {
    "round robin (itertools.cycle)": round_robin,
    "min() over a dict of loads": least_of_dict,
    "the choice, charged and released": choice,
    "TokenRouter.reserve": reserve,
    "TokenLimits: router, semaphore, two quotas": with_limits,
    "TokenRouter.reserve, always full": saturated,
}


async def calls_per_second(rounds: int) -> dict[tuple[str, int], float]:
    """Median over the rounds, in which all contestants of all sizes take turns."""
    taken: dict[tuple[str, int], list[float]] = {}
    works = {
        (name, n): make(n)
        for name, make in CONTESTANTS.items()
        for n in SIZES
        if make is not saturated or n <= MOST_WHEN_FULL
    }
    for key, work in works.items():
        await work(4 * key[1])  # warm up: each replica is reached
        taken[key] = []
    for _, (key, work) in itertools.product(range(rounds), works.items()):
        calls = max(400, 8 * key[1]) if "full" in key[0] else max(200, 8_000 // key[1])
        gc.collect()
        started = time.process_time()
        await work(calls)
        taken[key].append((time.process_time() - started) / calls)
    return {key: 1 / median(seconds) for key, seconds in taken.items()}


def speeds(rounds: int) -> tuple[str, list[list[str]]]:
    found = asyncio.run(calls_per_second(rounds))
    rows = [
        [name, *(f"{found[name, n]:,.0f}" if (name, n) in found else "" for n in SIZES)]
        for name in CONTESTANTS
    ]
    judged = []
    for name in ("the choice, charged and released", "TokenRouter.reserve"):
        for n, least in ((16, 50_000), (64, 20_000)):
            value = found[name, n]
            verdict = "met" if value >= least else "NOT MET"
            judged.append([f"{name}: {n} replicas", f">= {least:,}/s", f"{value:,.0f}: {verdict}"])
        ratio = found[name, 64] / found[name, 1_000]
        bound = 1_000 / 64
        verdict = "met" if ratio <= bound else "NOT MET"
        judged.append([f"{name}: 1,000 against 64", f"<= {bound:.1f}x", f"{ratio:.1f}x: {verdict}"])
    return table(["calls per second, by replicas", *(f"{n:,}" for n in SIZES)], rows), judged


def memory() -> str:
    """What a replica weighs, once calls have gone there."""
    rows = []
    loaded(max(SIZES))  # what grows once for all: tables of the library and of Python
    for n in SIZES[1:]:
        gc.collect()
        tracemalloc.start()
        router = TokenRouter(fleet(n))
        for _ in range(4 * n):
            router.acquire_nowait(100, model=MODEL).release()
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
        for call in range(10_000):
            router.acquire_nowait(100, model=MODEL, priority=call).release()
        gc.collect()
        later = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        rows.append([f"{n:,}", f"{used / n:,.0f}", f"{later / n:,.0f}"])
    return table(["Memory: replicas", "bytes for each", "after 10,000 more calls"], rows)


# -- what it gains -------------------------------------------------------------

WEIGHTS = 16.06e9  # bytes, 8B in fp16
KV_PER_TOKEN = 131_072  # bytes
FLOPS_PER_TOKEN = 16.06e9
STEP_TOKENS = 2_048


@dataclass
class Sequence:
    arrived: float
    input_tokens: int
    output_tokens: int
    lease: Lease | None
    prefilled: int = 0
    emitted: int = 0
    first_at: float = 0.0


@dataclass
class Engine:
    """Continuous batching: a token for each that decodes, then prompts in chunks."""

    bandwidth: float
    peak: float
    queue: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    requests: int = 0
    busy: bool = False

    def tokens_per_second(self) -> float:
        return STEP_TOKENS / self.seconds(STEP_TOKENS, 0)

    def seconds(self, tokens: int, context: int) -> float:
        memory = (WEIGHTS + context * KV_PER_TOKEN) / self.bandwidth
        return max(memory, tokens * FLOPS_PER_TOKEN / self.peak)

    def step(self, now: float) -> tuple[float, list[Sequence]]:
        """One step: when it ends, and who is done by then."""
        room, chunks = STEP_TOKENS - len(self.running), []
        while self.queue and room > 0:
            head = self.queue[0]
            chunk = min(room, head.input_tokens - head.prefilled)
            head.prefilled += chunk
            room -= chunk
            if head.prefilled < head.input_tokens:
                break
            chunks.append(self.queue.popleft())
        context = sum(each.input_tokens + each.emitted for each in self.running)
        ends = now + self.seconds(STEP_TOKENS - room, context)
        self.running += chunks
        for each in self.running:
            if each.emitted == 0:
                each.first_at = ends
            each.emitted += 1
        done = [each for each in self.running if each.emitted >= each.output_tokens]
        self.running = [each for each in self.running if each.emitted < each.output_tokens]
        return ends, done


H100 = (3.35e12, 989e12)
A100 = (2.04e12, 312e12)

Chooser = Callable[[Sequence], tuple[int, Lease | None]]


def choosers(engines: list[Engine], rng: random.Random) -> dict[str, Chooser]:
    turns = itertools.count()
    aware = [
        Replica(str(n), tokens_per_second=e.tokens_per_second()) for n, e in enumerate(engines)
    ]
    plain = [Replica(str(n)) for n in range(len(engines))]

    def routed(router: TokenRouter) -> Chooser:
        def choose(sequence: Sequence) -> tuple[int, Lease]:
            usage = Usage(
                input_tokens=sequence.input_tokens,
                output_tokens=int(200 * rng.lognormvariate(0, 0.3)),  # an estimate
            )
            lease = router.acquire_nowait(usage)
            assert lease.replica is not None
            return int(lease.replica.name), lease

        return choose

    return {
        "round robin": lambda _: (next(turns) % len(engines), None),
        "least requests": lambda _: (
            min(range(len(engines)), key=lambda n: (engines[n].requests, rng.random())),
            None,
        ),
        "TokenRouter, speeds unknown": routed(TokenRouter(plain)),
        "TokenRouter": routed(TokenRouter(aware)),
    }


def simulate(engines: list[Engine], choose: Chooser, trace: Trace, rate: float) -> list[Sequence]:
    """Poisson arrivals; each engine's next step is an event."""
    rng = random.Random(3)
    arrivals = itertools.accumulate(rng.expovariate(rate) for _ in trace)
    calls: Iterator[Sequence] = (
        Sequence(at, request.input_tokens, max(1, output), None)
        for at, (request, output) in zip(arrivals, trace, strict=False)
    )
    events: list[tuple[float, int, int, Sequence | None]] = []
    number = itertools.count()
    finished: list[Sequence] = []
    pending: dict[int, list[Sequence]] = {n: [] for n in range(len(engines))}

    def arrive() -> None:
        call = next(calls, None)
        if call is not None:
            heapq.heappush(events, (call.arrived, next(number), -1, call))

    def advance(n: int, now: float) -> None:
        engine = engines[n]
        engine.busy = bool(engine.queue or engine.running)
        if engine.busy:
            ends, pending[n] = engine.step(now)
            heapq.heappush(events, (ends, next(number), n, None))

    arrive()
    while events:
        now, _, n, call = heapq.heappop(events)
        if call is not None:
            n, call.lease = choose(call)
            engines[n].queue.append(call)
            engines[n].requests += 1
            arrive()
            if not engines[n].busy:
                advance(n, now)
            continue
        for each in pending[n]:
            engines[n].requests -= 1
            each.arrived, each.first_at = now - each.arrived, each.first_at - each.arrived
            if each.lease is not None:
                each.lease.release()
            finished.append(each)
        pending[n] = []
        advance(n, now)
    return finished


def gains(trace: Trace, quick: bool) -> str:
    """p99 of the time to the first token, and of the whole call."""
    rows: dict[str, list[str]] = {}
    header = ["p99 seconds: first token, whole call"]
    trace = trace[: 4_000 if quick else 19_000]
    for title, kinds, rate in (
        ("2 H100 + 2 A100, 50/s", (H100, H100, A100, A100), 50.0),
        ("4 H100, 88/s", (H100,) * 4, 88.0),
    ):
        header.append(title)
        for name in choosers([Engine(*kind) for kind in kinds], random.Random(5)):
            engines = [Engine(*kind) for kind in kinds]
            choose = choosers(engines, random.Random(5))[name]
            done = simulate(engines, choose, trace, rate)
            first = quantiles((each.first_at for each in done), n=100)[98]
            whole = quantiles((each.arrived for each in done), n=100)[98]
            rows.setdefault(name, [name]).append(f"{first:.3f}, {whole:.2f}")
    return table(header, list(rows.values()))


def main() -> None:
    options = arguments(__doc__)
    memory_table = memory()  # first, while nothing else is there
    text, judged = speeds(3 if options.quick else 7)
    traces = load(options.trace)
    name, trace = next(
        ((name, trace) for name, trace in traces.items() if "conv" in name),
        ("made up", synthetic(19_000, input_median=900.0, output_median=130.0, seed=1)),
    )
    parts = [
        "## Router",
        environment() + NOTE,
        table(["What", "target", "this run"], judged),
        text,
        memory_table,
        f"Requests: {name}.",
        gains(trace, options.quick),
    ]
    publish("router", "\n\n".join(parts), quick=options.quick)


NOTE = """ Calls per second of
CPU time on asyncio, one after the other; medians of rounds in which all take turns. `always full`
has four callers for each place, so that every call waits and the fleet is looked at for each
release. The last table is a simulation of idealised engines that serve an 8B model: an even fleet
gains little from counting tokens, an uneven one from knowing the speeds."""


if __name__ == "__main__":
    main()
