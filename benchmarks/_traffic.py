"""What arrives at a fleet: a trace at another speed, or made-up calls, and mixtures of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from _fleet import Call
from _traces import Trace, arrivals, load, synthetic

from tokenflow import Request

LONG_ANSWERS = {"input_median": 150.0, "output_median": 400.0}


@dataclass(frozen=True)
class Sample:
    """Requests and when they come, on average one per second."""

    requests: Trace
    times: Sequence[float]
    seed: int

    def calls(self, rate: float) -> list[Call]:
        """At so many per second."""
        return [
            Call(time / rate, request, output)
            for time, (request, output) in zip(self.times, self.requests, strict=True)
        ]

    def at_once(self) -> list[Call]:
        return self.calls(math.inf)

    def beginning(self, count: int) -> Sample:
        return replace(self, requests=self.requests[:count], times=self.times[:count])


def samples(path: Path | None, count: int, calls: int) -> tuple[str, list[Sample]]:
    """Consecutive parts of the conversation trace, if there is one; and what they are."""
    file = _conversations(path)
    if file is None:
        made_up = [invented(calls, seed) for seed in range(count)]
        return "made-up chat: log-normal lengths, Poisson arrivals", made_up
    trace, times = _computable(load(file)[file.stem]), arrivals(file)
    part = len(trace) // count
    return f"parts of {file.stem}, at its own gaps", [
        _sample(trace[i * part :][: min(part, calls)], times[i * part :][: min(part, calls)], i)
        for i in range(count)
    ]


def invented(
    calls: int, seed: int, *, input_median: float = 850.0, output_median: float = 130.0
) -> Sample:
    """Poisson arrivals of log-normal lengths, by default about those of the conversation trace."""
    requests = synthetic(calls, input_median=input_median, output_median=output_median, seed=seed)
    chance, now, times = random.Random(seed), 0.0, []
    for _ in requests:
        now += chance.expovariate(1.0)
        times.append(now)
    return Sample(requests, times, seed)


def with_documents(calls: Sequence[Call], seed: int, *, rate: float) -> list[Call]:
    """... and so many prompts per second of 16,000 to 60,000 tokens, evenly on a log scale."""
    chance, now, documents = random.Random(seed), 0.0, []
    while (now := now + chance.expovariate(rate)) < calls[-1].arrived:
        tokens = math.exp(chance.uniform(math.log(16_000), math.log(60_000)))
        request = Request(input_tokens=int(tokens))
        documents.append(Call(now, request, chance.randint(100, 400), "document"))
    return sorted([*calls, *documents], key=lambda call: call.arrived)


def in_bursts(calls: Sequence[Call], size: int) -> list[Call]:
    """The same calls, but always so many of them at the same instant."""
    return [replace(call, arrived=calls[i - i % size].arrived) for i, call in enumerate(calls)]


def by_size(calls: Sequence[Call]) -> list[Call]:
    """The smaller half is "small", the largest tenth "large"."""
    sizes = sorted(call.total_tokens for call in calls)
    middle, top = sizes[len(sizes) // 2], sizes[len(sizes) * 9 // 10]
    for call in calls:
        call.kind = "small" if call.total_tokens <= middle else "middle"
        if call.total_tokens > top:
            call.kind = "large"
    return list(calls)


def declaring(calls: Sequence[Call], tokens: int) -> list[Call]:
    """The same calls, with a maximum that no answer reaches, as clients send it by habit."""
    return [
        replace(
            call,
            request=replace(call.request, max_output_tokens=max(tokens, call.output_tokens)),
        )
        for call in calls
    ]


def _conversations(path: Path | None) -> Path | None:
    if path is None or path.is_file():
        return path
    return next((file for file in sorted(path.glob("*.csv")) if "conv" in file.stem), None)


def _computable(trace: Trace) -> Trace:
    """Traces have requests without a prompt or an answer: let them have a token of it."""
    return [
        (replace(request, input_tokens=max(1, request.input_tokens)), max(1, output))
        for request, output in trace
    ]


def _sample(requests: Trace, times: Sequence[float], seed: int) -> Sample:
    mean_gap = (times[-1] - times[0]) / len(times)
    return Sample(requests, [(time - times[0]) / mean_gap for time in times], seed)
