"""What planning a step costs, and what an answer should be promised.

    python benchmarks/bench_scheduler.py [--trace PATH] [--quick]

The cost of a step is CPU time, against a planner that walks over all that run, as
one would write it first, and against copying the list of them. What to promise is a
replay in virtual time: a step takes as long as the roofline says.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from _report import arguments, environment, publish, table
from _traces import Trace, load, synthetic

from tokenflow import HistoricalEstimator, OutputEstimator, Request
from tokenflow.serving import Reserve, TokenScheduler, TokenSequence
from tokenflow.serving.capacity import ACCELERATORS, MODELS, Deployment, step_seconds

LLAMA = Deployment(MODELS["Llama-3.1-8B"], ACCELERATORS["H100"])
BUDGET = 2_048
BLOCK = 16
TARGET = 200.0


# -- the cost of a step ------------------------------------------------------------------------


@dataclass
class Running:
    context: int
    left: int
    blocks: int


class Walk:
    """The same for decodes alone: each that runs is looked at in each step."""

    def __init__(self, running: int) -> None:
        self.running = [Running(500 + n, 10**6, (500 + n) // BLOCK + 1) for n in range(running)]
        self.free = 10**6

    def step(self) -> list[Running]:
        decodes = []
        for each in self.running:
            if each.context + 1 > each.blocks * BLOCK:
                if not self.free:
                    continue
                self.free -= 1
                each.blocks += 1
            each.context += 1
            each.left -= 1
            if each.left:
                decodes.append(each)
        self.running = decodes
        return decodes


class Copy:
    """Nothing but the list of those who decode."""

    def __init__(self, running: int) -> None:
        self.running = list(range(running))

    def step(self) -> tuple[int, ...]:
        return tuple(self.running)


def decoding(running: int) -> TokenScheduler:
    """All at another place of their blocks, and far from their end."""
    scheduler = TokenScheduler(running, 2 * running + BUDGET, 10**7)
    for n in range(running):
        scheduler.add(Request(input_tokens=500 + n, max_output_tokens=9_000), now=0.0)
    while scheduler.statistics().decoding < running:
        scheduler.step()
    return scheduler


class Mixed:
    """All slots taken, a queue before them, prompts in chunks, and about one end per step."""

    def __init__(self, running: int) -> None:
        self.scheduler = TokenScheduler(running, 9 * running, 4_000 * running)
        self.rng = random.Random(1)
        while self.scheduler.statistics().decoding < running - 2:
            self.refill()
            self.scheduler.step()

    def refill(self) -> None:
        while self.scheduler.unfinished < self.scheduler.max_num_seqs + 20:
            tokens = self.rng.randint(20, 3_000)
            request = Request(input_tokens=tokens, max_output_tokens=self.rng.randint(2, 510))
            self.scheduler.add(request, now=0.0)


def timed(step: Callable[[], object], steps: int, before: Callable[[], None]) -> list[float]:
    taken = []
    for _ in range(steps):
        before()
        started = time.process_time_ns()
        step()
        taken.append((time.process_time_ns() - started) / 1e3)
    return taken


def cost(running: int, rounds: int, steps: int) -> dict[str, tuple[float, float]]:
    """Microseconds of a step by contender, median and p99: the medians of all rounds."""
    decodes, mixed = decoding(running), Mixed(running)
    contenders: dict[str, tuple[Callable[[], object], Callable[[], None]]] = {
        "TokenScheduler, decodes alone": (decodes.step, lambda: None),
        "TokenScheduler, mixed": (mixed.scheduler.step, mixed.refill),
        "a walk over all, decodes alone": (Walk(running).step, lambda: None),
        "a copy of the list, nothing else": (Copy(running).step, lambda: None),
    }
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, (step, before) in contenders.items():
            taken = sorted(timed(step, steps, before))
            seen[name].append((statistics.median(taken), taken[len(taken) * 99 // 100]))
    return {
        name: (
            statistics.median(median for median, _ in each),
            statistics.median(p99 for _, p99 in each),
        )
        for name, each in seen.items()
    }


def costs(quick: bool) -> str:
    rounds, steps = (3, 200) if quick else (9, 800)
    measured = {running: cost(running, rounds, steps) for running in (64, 256, 1_024)}
    targets = []
    for name in ("TokenScheduler, decodes alone", "TokenScheduler, mixed"):
        median = measured[256][name][0]
        verdict = "met" if median <= TARGET else "NOT MET"
        targets.append(
            (f"{name}, 256 running", f"<= {TARGET:.0f} us", f"{median:.0f} us: {verdict}")
        )
    rows = [
        (name, *(f"{m[name][0]:.1f} / {m[name][1]:.1f}" for m in measured.values()))
        for name in measured[256]
    ]
    header = ("us per step, median / p99", *(f"{running:,} running" for running in measured))
    return f"{table(('A step', 'target', 'this run'), targets)}\n\n{table(header, rows)}"


# -- what to promise ---------------------------------------------------------------------------


def replay(trace: Trace, rate: float, memory: int, reserve: Reserve, learn: float) -> list[str]:
    """Poisson arrivals at a replica with so much memory; what came of it."""
    estimator: OutputEstimator = HistoricalEstimator(learn)
    scheduler = TokenScheduler(256, BUDGET, memory, reserve=reserve, estimator=estimator)
    rng = random.Random(1)
    waiting = list(reversed(trace))
    lengths: dict[TokenSequence, int] = {}
    first: dict[TokenSequence, float] = {}
    now, arrival = 0.0, rng.expovariate(rate)
    while waiting or scheduler.unfinished:
        while waiting and arrival <= now:
            request, length = waiting.pop()
            declared = Request(
                input_tokens=max(1, request.input_tokens), max_output_tokens=max(4_096, length)
            )
            lengths[scheduler.add(declared, now=arrival)] = max(1, length)
            arrival += rng.expovariate(rate)
        step = scheduler.step()
        if not step.tokens:
            now = arrival
            continue
        now += step_seconds(LLAMA, tokens=step.tokens, context_tokens=step.context_tokens)
        complete = [part.sequence for part in step.prefills if part.last]
        for sequence in complete:
            first.setdefault(sequence, now - sequence.arrived)
        for sequence in (*step.decodes, *complete):
            if sequence.output_tokens == lengths[sequence]:
                scheduler.finish(sequence)
    seen, waits = scheduler.statistics(), sorted(first.values())
    return [
        f"{sum(lengths.values()) / now:,.0f}",
        f"{waits[len(waits) // 2]:.2f}",
        f"{waits[len(waits) * 99 // 100]:.1f}",
        f"{seen.preemptions:,}",
        f"{seen.recomputed_tokens / 1e3:,.0f}k",
    ]


def promises(traces: dict[str, Trace], quick: bool) -> str:
    policies: list[tuple[str, Reserve, float]] = [
        ("declared (4,096)", "declared", 0.5),
        ("none", "none", 0.5),
        *((f"estimate, quantile {q:g}", "estimate", q) for q in (0.3, 0.5, 0.7, 0.9)),
    ]
    tables = []
    for name, trace in traces.items():
        part, rate, memory = trace[: 500 if quick else 3_000], 24.0, 100_000
        header = (
            f"{name}: {rate:g} requests/s, {memory:,} tokens of memory",
            "output tokens/s",
            "TTFT p50, s",
            "p99, s",
            "preemptions",
            "recomputed",
        )
        rows = [
            (
                what + (" (default)" if (reserve, q) == ("estimate", 0.5) else ""),
                *replay(part, rate, memory, reserve, q),
            )
            for what, reserve, q in policies
        ]
        tables.append(table(header, rows))
    return "\n\n".join(tables)


def main() -> None:
    asked = arguments(__doc__)
    traces = load(asked.trace)
    traces["synthetic, long answers"] = synthetic(
        3_000, input_median=150, output_median=400, seed=3
    )
    text = f"""\
## Scheduler: what planning a step costs

{environment()} CPU time of one
`step()`. Mixed: all slots taken and a queue before them, prompts of up to 3,000 tokens cut to fit
what is left of 9 tokens per slot. Blocks are of {BLOCK} tokens.

{costs(asked.quick)}

What an answer is promised at admission (`reserve=`), replayed in virtual time: an 8B model on an
H100 by the roofline, {BUDGET:,} tokens a step, and memory for few. TTFT
is the time to the first token, queueing included.

{promises(traces, asked.quick)}"""
    publish("scheduler", text, quick=asked.quick)


if __name__ == "__main__":
    main()
