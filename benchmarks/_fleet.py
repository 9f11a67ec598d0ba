"""A fleet of engines in simulated time: real schedulers, real routers, and a clock that jumps.

Each engine is a `TokenScheduler` whose steps take what the roofline says. Events are the arrivals
of calls and the ends of steps, one after the other, so that a run is the same each time. What is
idealised: attention costs no arithmetic, nothing is lost between steps, the network takes no time.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, Protocol

from tokenflow import Request
from tokenflow.serving import Step, TokenScheduler, TokenSequence
from tokenflow.serving.capacity import Deployment, max_cached_tokens, step_seconds


@dataclass(slots=True, eq=False)
class Call:
    """A request, how long its answer turns out to be, and when what happened to it, in seconds."""

    arrived: float
    request: Request
    output_tokens: int
    kind: str = "chat"
    began: float = math.nan  # its first token
    ended: float = math.nan
    stopped: float = math.nan  # its last token before it was preempted, until it goes on

    @property
    def total_tokens(self) -> int:
        return self.request.input_tokens + self.output_tokens

    @property
    def first_token(self) -> float:
        return self.began - self.arrived

    @property
    def whole(self) -> float:
        return self.ended - self.arrived


class Policy(Protocol):
    """What sends calls to engines."""

    def choose(self, call: Call) -> int: ...

    def ended(self, call: Call) -> None: ...


class Engine:
    """One replica. It begins a step as soon as the last one has ended."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        budget: int = 2_048,
        kv_cache_tokens: int | None = None,
        **scheduling: Any,
    ) -> None:
        pool = kv_cache_tokens or max_cached_tokens(deployment)
        self.deployment = deployment
        self.scheduler = TokenScheduler(min(256, budget), budget, pool, **scheduling)
        self.tokens_per_second = budget / self._seconds(budget, pool // 2)
        self.steps = self.tokens = self.generated = 0
        self.gaps: Counter[float] = Counter()  # seconds between two tokens of an answer: how often
        self._step: Step | None = None
        self._calls: dict[TokenSequence, Call] = {}
        self._last: dict[int, list[TokenSequence]] = {}  # by the step of their last token

    @property
    def is_idle(self) -> bool:
        return self._step is None

    @property
    def busy(self) -> float:
        """Seconds of arithmetic: an engine that decodes is never idle, however little it does."""
        peak = self.deployment.accelerator.flops_per_second
        return self.tokens * self.deployment.model.flops_per_token / peak

    def add(self, call: Call) -> None:
        self._calls[self.scheduler.add(call.request, now=call.arrived)] = call

    def begin(self, now: float) -> float:
        """Begin a step; returns when it will end, or inf if there is nothing to do."""
        if not self.scheduler.unfinished:
            self._step = None
            return math.inf
        step = self._step = self.scheduler.step()
        seconds = self._seconds(step.tokens, step.context_tokens)
        self.steps += 1
        self.tokens += step.tokens
        if step.decodes:
            self.generated += len(step.decodes)
            self.gaps[seconds] += len(step.decodes)
        for sequence in step.preempted:
            call = self._calls[sequence]
            if math.isnan(call.stopped):
                call.stopped = now
        return now + seconds

    def end(self, now: float) -> list[Call]:
        """What was begun has been computed; returns whose answers are complete."""
        assert self._step is not None
        for part in self._step.prefills:
            if part.last:
                self._emit(part.sequence, now)
        ended = []
        for sequence in self._last.pop(self.steps, ()):
            call = self._calls[sequence]
            if sequence.output_tokens == call.output_tokens:  # it was not preempted meanwhile
                self.scheduler.finish(sequence)
                del self._calls[sequence]
                call.ended = now
                ended.append(call)
        return ended

    def _emit(self, sequence: TokenSequence, now: float) -> None:
        """A prompt is complete: that is the first token, or the next one after a preemption."""
        call = self._calls[sequence]
        self.generated += 1
        if math.isnan(call.began):
            call.began = now
        else:
            self.gaps[now - call.stopped] += 1
        call.stopped = math.nan
        last = self.steps + call.output_tokens - sequence.output_tokens
        self._last.setdefault(last, []).append(sequence)

    def _seconds(self, tokens: int, context: int) -> float:
        return step_seconds(self.deployment, tokens=tokens, context_tokens=context)


def run(engines: Sequence[Engine], calls: Iterable[Call], policy: Policy) -> None:
    """Send each call where the policy says, and compute until all are answered."""
    steps: list[tuple[float, int]] = []  # when it ends, and whose it is

    def begin(at: int, now: float) -> None:
        if (ends := engines[at].begin(now)) < math.inf:
            heapq.heappush(steps, (ends, at))

    def compute_until(when: float) -> None:
        while steps and steps[0][0] <= when:
            now, at = heapq.heappop(steps)
            for call in engines[at].end(now):
                policy.ended(call)
            begin(at, now)

    for call in calls:
        compute_until(call.arrived)
        at = policy.choose(call)
        engines[at].add(call)
        if engines[at].is_idle:
            begin(at, call.arrived)
    compute_until(math.inf)


# -- what came of it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A run that is over."""

    calls: Sequence[Call]
    engines: Sequence[Engine]

    @property
    def seconds(self) -> float:
        return max(call.ended for call in self.calls)

    @property
    def tokens_per_second(self) -> float:
        return sum(call.total_tokens for call in self.calls) / self.seconds

    @property
    def busy(self) -> list[float]:
        """Each engine's share of the time."""
        return [engine.busy / self.seconds for engine in self.engines]

    @property
    def spread(self) -> float:
        """Standard deviation of the engines' busy time, over its mean."""
        return pstdev(self.busy) / fmean(self.busy)

    @property
    def preemptions(self) -> int:
        return sum(engine.scheduler.statistics().preemptions for engine in self.engines)

    @property
    def longest_gap(self) -> float:
        return max(max(engine.gaps) for engine in self.engines)

    def of(self, *kinds: str) -> Outcome:
        """The same for some of the calls."""
        return Outcome([call for call in self.calls if call.kind in kinds], self.engines)

    def first_token(self, level: float) -> float:
        return quantile([call.first_token for call in self.calls], level)

    def whole(self, level: float) -> float:
        return quantile([call.whole for call in self.calls], level)

    def gap(self, level: float) -> float:
        """Seconds between two tokens of an answer."""
        gaps = sum((engine.gaps for engine in self.engines), Counter())
        left = level * gaps.total()
        for seconds in sorted(gaps):
            left -= gaps[seconds]
            if left <= 0:
                return seconds
        return math.nan


def quantile(values: Sequence[float], level: float) -> float:
    """The value that a share `level` of all is not above."""
    return sorted(values)[math.ceil(level * len(values)) - 1] if values else math.nan
