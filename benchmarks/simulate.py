"""What routing by tokens gains, in a fleet of simulated engines.

    python benchmarks/simulate.py [--trace PATH] [--quick]

It writes docs/simulation.md and, where matplotlib is installed, its pictures. The schedulers and
the routers are the real ones, only the time is simulated: nothing here depends on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import _plots
from _fleet import Call, Engine, Outcome, run
from _policies import (
    Build,
    LeastRequests,
    Random,
    RoundRobin,
    Snapshots,
    least_tokens,
    least_tokens_over_speed,
    two_choices,
)
from _report import PAGE, arguments, publish, table
from _traffic import (
    LONG_ANSWERS,
    Sample,
    by_size,
    declaring,
    in_bursts,
    invented,
    samples,
    with_documents,
)

from tokenflow import Fifo, HistoricalEstimator, SmallestFirst
from tokenflow.serving.capacity import ACCELERATORS, MODELS, Deployment

H100, A100, A10 = (
    Deployment(MODELS["Llama-3.1-8B"], ACCELERATORS[name]) for name in ("H100", "A100", "A10")
)
MIXED = (H100, H100, A100, A100)
EQUAL = (H100,) * 4
MIXED_RATE, CHAT_RATE = 50.0, 88.0
BESIDE_DOCUMENTS, DOCUMENTS = 80.0, 1.0  # of chat, and of documents, per second
BURST, LOAD = 30, 0.95
SMALL_BUDGET = 512  # tokens of a step on an A10: 66 ms
DECLARED = 4_096
SPEED = "least tokens / speed"

POLICIES: dict[str, Build] = {
    "round robin": RoundRobin,
    "random": Random,
    "least requests": LeastRequests,
    "two choices by tokens": two_choices,
    "least tokens": least_tokens,
    SPEED: least_tokens_over_speed,
}
STALE = "tokens as polled, every 1 s"

Outcomes: TypeAlias = dict[str, list[Outcome]]
"""For each contestant, one for each sample."""

Metric: TypeAlias = Callable[[Outcome], float]


# -- the scenarios -----------------------------------------------------------------------------


def fleet(
    deployments: Sequence[Deployment],
    policies: Mapping[str, Build],
    traffic: Sequence[Callable[[], list[Call]]],
) -> Outcomes:
    """All policies, each with all of the traffic, on engines that are new for each."""
    outcomes: Outcomes = {}
    for name, build in policies.items():
        print(f"... {name}", file=sys.stderr)
        outcomes[name] = []
        for seed, make in enumerate(traffic):
            engines, calls = [Engine(each) for each in deployments], make()
            run(engines, calls, build(engines, seed))
            outcomes[name].append(Outcome(calls, engines))
    return outcomes


def mixed_fleet(parts: Sequence[Sample]) -> Outcomes:
    return fleet(MIXED, POLICIES, [partial(each.calls, MIXED_RATE) for each in parts])


def plain_chat(parts: Sequence[Sample]) -> Outcomes:
    policies = {name: build for name, build in POLICIES.items() if name != SPEED}
    policies[STALE] = Snapshots
    return fleet(EQUAL, policies, [partial(each.calls, CHAT_RATE) for each in parts])


def beside_documents(parts: Sequence[Sample]) -> Outcomes:
    policies = {name: build for name, build in POLICIES.items() if name != SPEED}

    def traffic(sample: Sample) -> list[Call]:
        chat = sample.calls(BESIDE_DOCUMENTS)
        for call in chat:
            call.kind = "short" if call.request.input_tokens <= 1_024 else "chat"
        return with_documents(chat, sample.seed, rate=DOCUMENTS)

    return fleet(EQUAL, policies, [partial(traffic, each) for each in parts])


def one_replica(calls: list[Call], **scheduling: Any) -> Outcome:
    engine = Engine(A10, budget=SMALL_BUDGET, **scheduling)
    run([engine], calls, RoundRobin([engine], 0))
    return Outcome(calls, [engine])


def capacity(sample: Sample) -> float:
    """Calls per second that a replica gets through when all are there from the beginning."""
    return len(sample.times) / one_replica(sample.at_once()).seconds


def orders(parts: Sequence[Sample]) -> Outcomes:
    contestants = {
        "Fifo()": Fifo(),
        "SmallestFirst()": SmallestFirst(),
        "SmallestFirst(10)": SmallestFirst(10),
        "by size alone": SmallestFirst(1e9),
    }
    outcomes: Outcomes = {name: [] for name in contestants}
    for sample in parts:
        rate = LOAD * capacity(sample)
        for name, order in contestants.items():
            print(f"... {name}", file=sys.stderr)
            calls = by_size(in_bursts(sample.calls(rate), BURST))
            outcomes[name].append(one_replica(calls, order=order))
    return outcomes


def promises(parts: Sequence[Sample]) -> Outcomes:
    contestants: dict[str, Callable[[], dict[str, Any]]] = {
        "declared: 4,096": lambda: {"reserve": "declared"},
        "estimate, quantile 0.9": lambda: {"estimator": HistoricalEstimator(0.9)},
        "estimate, the default": dict,
        "none": lambda: {"reserve": "none"},
    }
    outcomes: Outcomes = {name: [] for name in contestants}
    for sample in parts:
        rate = LOAD * capacity(sample)
        for name, settings in contestants.items():
            print(f"... {name}", file=sys.stderr)
            calls = declaring(sample.calls(rate), DECLARED)
            outcomes[name].append(one_replica(calls, **settings()))
    return outcomes


# -- the report --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A ratio of two contestants' figures, at most so much."""

    what: str
    outcomes: Outcomes
    ours: str
    theirs: str
    metric: Metric
    bound: float

    def row(self) -> list[str]:
        pairs = zip(self.outcomes[self.ours], self.outcomes[self.theirs], strict=True)
        ratios = [self.metric(ours) / self.metric(theirs) for ours, theirs in pairs]
        ratio = median(ratios)
        verdict = "met" if ratio <= self.bound else "NOT MET"
        among = f"{min(ratios):.2f} to {max(ratios):.2f}"
        return [
            f"{self.what}: {self.ours} / {self.theirs}",
            f"<= {self.bound:.2f}",
            f"{ratio:.2f} ({among}): {verdict}",
        ]


def seconds(value: float) -> str:
    """To three digits, or to the second."""
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def milliseconds(value: float) -> str:
    return f"{1e3 * value:.1f}"


def count(value: float) -> str:
    return f"{value:,.0f}"


def percent(value: float) -> str:
    return f"{value:.0%}"


Column: TypeAlias = tuple[str, Metric, Callable[[float], str]]


def both(name: str, metric: Callable[[Outcome, float], float], *kinds: str) -> list[Column]:
    """p50 and p99 of a figure, of all calls or of some kinds."""

    def at(level: float) -> Metric:
        return lambda each: metric(each.of(*kinds) if kinds else each, level)

    return [(f"{name} p50", at(0.5), seconds), ("p99", at(0.99), seconds)]


FIRST = both("first token", Outcome.first_token)
WHOLE = both("whole call", Outcome.whole)
GAP: list[Column] = [
    ("ms between tokens p50", lambda each: each.gap(0.5), milliseconds),
    ("p99", lambda each: each.gap(0.99), milliseconds),
]
PREEMPTIONS: Column = ("preempted", lambda each: each.preemptions, count)
SPREAD: Column = ("spread of busy time", lambda each: each.spread, percent)
LONGEST: Column = ("longest pause", lambda each: each.longest_gap, seconds)
THROUGHPUT: Column = ("tokens/s", lambda each: each.tokens_per_second, count)
BY_PROMPT = [
    *both("chat: first token", Outcome.first_token, "short", "chat"),
    *both("up to 1,024 tokens", Outcome.first_token, "short"),
    *both("documents", Outcome.first_token, "document"),
]
BY_SIZE: list[Column] = [
    *both("small: first token", Outcome.first_token, "small"),
    *both("large: first token", Outcome.first_token, "large"),
    ("longest", lambda each: each.of("large").first_token(1.0), seconds),
    *both("all: first token", Outcome.first_token),
]
BY_PROMISE: list[Column] = [THROUGHPUT, *FIRST, PREEMPTIONS, LONGEST]


def figures(title: str, outcomes: Outcomes, *columns: Column) -> str:
    """Medians over the samples."""
    rows = [
        [name, *(show(median(metric(each) for each in found)) for _, metric, show in columns)]
        for name, found in outcomes.items()
    ]
    return table([title, *(name for name, _, _ in columns)], rows)


def only(outcomes: Outcomes, names: Iterable[str]) -> Outcomes:
    return {name: outcomes[name] for name in names}


def targets(mixed: Outcomes, documents: Outcomes, ordered: Outcomes) -> str:
    def whole(each: Outcome) -> float:
        return each.whole(0.99)

    def chat(each: Outcome) -> float:
        return each.of("short", "chat").first_token(0.99)

    def large(each: Outcome) -> float:
        return each.of("large").first_token(0.99)

    def small(each: Outcome) -> float:
        return each.of("small").first_token(0.5)

    rows = [
        Target("Mixed fleet, whole call p99", mixed, SPEED, "round robin", whole, 0.25),
        Target("Mixed fleet, whole call p99", mixed, SPEED, "least requests", whole, 0.75),
        Target("Chat, first token p99", documents, "least tokens", "round robin", chat, 0.65),
        Target("Large calls, first token p99", ordered, "SmallestFirst()", "Fifo()", large, 2.0),
        Target("Small calls, first token p50", ordered, "SmallestFirst()", "Fifo()", small, 0.5),
    ]
    return table(["What", "target", "this run"], [each.row() for each in rows])


def main() -> None:
    options = arguments(__doc__)
    runs, calls = (1, 400) if options.quick else (3, 5_000)
    traffic, parts = samples(options.trace, runs, calls)
    fewer = [each.beginning(calls // 3) for each in parts]
    lasting = [invented(calls // 4, each.seed, **LONG_ANSWERS) for each in parts]

    mixed, documents, equal = mixed_fleet(parts), beside_documents(parts), plain_chat(parts)
    ordered, promised, promised_long = orders(fewer), promises(fewer), promises(lasting)

    polled = only(equal, ["round robin", "least tokens", STALE])
    equal.pop(STALE)
    text = TEXT.format(
        traffic=traffic,
        samples=f"{runs} x {len(parts[0].times):,}",
        burst=BURST,
        load=percent(LOAD),
        targets=targets(mixed, documents, ordered),
        mixed=figures("2 x H100 + 2 x A100", mixed, *FIRST, *WHOLE, *GAP, PREEMPTIONS, SPREAD),
        documents=figures("4 x H100", documents, *BY_PROMPT, SPREAD),
        equal=figures("4 x H100", equal, *FIRST, *WHOLE, *GAP, PREEMPTIONS, SPREAD),
        polled=figures("4 x H100", polled, *FIRST, *WHOLE, SPREAD),
        orders=figures("1 x A10", ordered, *BY_SIZE),
        promised=figures("1 x A10, chat", promised, *BY_PROMISE),
        promised_long=figures("1 x A10, long answers", promised_long, *BY_PROMISE),
    )
    page = PAGE.with_name("simulation.md")
    if not options.quick:
        replicas = [each.accelerator.name for each in MIXED]
        _plots.draw(mixed, ordered, replicas, page.with_name("images"))
    publish("simulation", text, quick=options.quick, path=page, introduction=INTRODUCTION)
    if options.quick:
        print("(the targets are for a full run: in a few seconds no queue grows long)")


INTRODUCTION = """\
# Simulation

What choosing by tokens gains, in a fleet of simulated engines. The routers and the schedulers are
the library's own; only the time is simulated, so that a run is the same on every machine.
`python benchmarks/simulate.py --trace PATH` runs it again, draws the pictures and writes this
page; no number here was written by hand. The traces it can replay are those that Microsoft Azure
has published under CC BY 4.0 (AzurePublicDataset, LLM inference 2023).
"""

TEXT = """\
Traffic: {traffic}; {samples} calls,
and each figure is the median of as many runs. Times are in seconds where nothing else is said.

{targets}

An engine is a `TokenScheduler` with 256 slots and 2,048 tokens a step, for Llama-3.1-8B; a step
takes what `capacity.step_seconds` says. That is ideal hardware: attention costs no arithmetic, and
nothing is lost between two steps or on the network. So compare ratios. The router is told a
prompt's tokens and guesses the answer's, like a `TokenFlow`: a 0.9 quantile of the answers so
far. `least tokens` is a `TokenRouter` that does not know the speeds, `two choices` is the same
among two replicas drawn for each call. Busy is the time that an engine's arithmetic would take;
its spread is the standard deviation over the replicas, against the mean.

## Fast and slow replicas: what the speeds are worth

50 calls per second, less than half of what the fleet's arithmetic could do. Round robin gives the
A100s as much as the H100s, which is nearly all they can do, and their queues grow. Whoever looks
at what is in flight avoids that, whether it counts calls or tokens: a slow replica's calls stay
longer. Knowing the speeds, the router need not find out by letting them pile up.

{mixed}

![Seconds by percentile of calls, for each policy](images/simulation-latency.svg)

![Busy time of each replica, for each policy](images/simulation-busy.svg)

## Chat beside long documents

80 calls per second of chat, and one prompt of 16,000 to 60,000 tokens, to equal replicas. Counted
as calls, a document is one like any other. Counted in tokens, chat goes where no document is.
Prompts of up to half a step's budget have nothing to gain from that, since the scheduler keeps half
of each step for them; they pay a little for the fuller replicas to which all the chat goes.

{documents}

## Equal replicas, plain chat: a small gain

88 calls per second, half of what the fleet's arithmetic can do. Calls are alike, and there are many
of them, so that turns are nearly as even as tokens: there is little to gain here. Chance does worse
than turns, also with two choices.

{equal}

## Numbers that are polled

The same fleet and traffic, by tokens in flight as they were up to a second ago, exactly known.
Between two looks all calls go to the one that was least loaded. This is why a router counts what it
sends itself, and what replicas report only adds to that.

{polled}

## Small before large, without starving the large

One replica whose memory is full before its arithmetic is: an A10, with room for 27,000 tokens of
context, 512 tokens a step. Calls come in bursts of {burst}, at {load} of what it gets through.
`by size alone` is `SmallestFirst` with a patience without end. Small is the smaller half of all,
large the largest tenth. No call overtakes a large one that arrived earlier by more than the
patience, 3 s or 10 s, for each 1,000 of the large one's tokens; by size alone there is no bound.

{orders}

![Seconds to the first token of small and of large calls](images/simulation-order.svg)

## What an answer is promised of the memory

The same replica at {load} of what it gets through, with calls that declare 4,096 output tokens, as
clients do by habit. Promised what they declare, few run at a time. With an estimate, admission
counts the larger of promised and held: more run, and where answers are short beside their prompts
nobody is ever preempted. With none, even more do, the first token comes soonest, and the price is
paid later: answers that stop in the middle, until they are computed again. The longest pause is the
longest that an answer stood still.

{promised}

Where answers are long and hard to guess (a median of 400 tokens after prompts of 150), the median,
which is the default, preempts some, and a high quantile wastes what it keeps free.

{promised_long}
"""


if __name__ == "__main__":
    main()
