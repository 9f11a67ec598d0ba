"""Ways to choose an engine for a call: what is usually done, and what `TokenRouter` does."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import cycle

from _fleet import Call, Engine, Policy

from tokenflow import HistoricalEstimator, Lease, Replica, TokenRouter, Usage

Build = Callable[[Sequence[Engine], int], Policy]
"""A policy for these engines, with a seed."""


class RoundRobin:
    def __init__(self, engines: Sequence[Engine], seed: int) -> None:
        self._turns = cycle(range(len(engines)))

    def choose(self, call: Call) -> int:
        return next(self._turns)

    def ended(self, call: Call) -> None:
        pass


class Random:
    def __init__(self, engines: Sequence[Engine], seed: int) -> None:
        self._choices = random.Random(seed)
        self._engines = range(len(engines))

    def choose(self, call: Call) -> int:
        return self._choices.choice(self._engines)

    def ended(self, call: Call) -> None:
        pass


class LeastRequests:
    """In flight; ties go to the least recently used."""

    def __init__(self, engines: Sequence[Engine], seed: int) -> None:
        self._requests = [0] * len(engines)
        self._turns = [0] * len(engines)
        self._sent: dict[Call, int] = {}

    def choose(self, call: Call) -> int:
        at = min(range(len(self._turns)), key=lambda at: (self._requests[at], self._turns[at]))
        self._requests[at] += 1
        self._turns[at] = max(self._turns) + 1
        self._sent[call] = at
        return at

    def ended(self, call: Call) -> None:
        self._requests[self._sent.pop(call)] -= 1


class Snapshots:
    """The least tokens in flight, as polled: those of up to so many seconds ago."""

    def __init__(self, engines: Sequence[Engine], seed: int, *, every: float = 1.0) -> None:
        self._tokens = [0] * len(engines)
        self._seen = [0] * len(engines)
        self._every = every
        self._due = 0.0
        self._sent: dict[Call, int] = {}

    def choose(self, call: Call) -> int:
        if call.arrived >= self._due:
            self._seen = self._tokens.copy()
            self._due = call.arrived + self._every
        at = self._seen.index(min(self._seen))
        self._tokens[at] += call.total_tokens
        self._sent[call] = at
        return at

    def ended(self, call: Call) -> None:
        self._tokens[self._sent.pop(call)] -= call.total_tokens


class Routed:
    """`TokenRouter`, on estimates like those of a `TokenFlow`: a 0.9 quantile of past answers."""

    def __init__(
        self, engines: Sequence[Engine], seed: int, *, speeds: bool, choices: int | None = None
    ) -> None:
        self._names = [str(at) for at in range(len(engines))]
        self.router = TokenRouter(
            Replica(name, tokens_per_second=engine.tokens_per_second if speeds else None)
            for name, engine in zip(self._names, engines, strict=True)
        )
        self._excluded = 0 if choices is None else len(engines) - choices
        self._chance = random.Random(seed)
        self._estimator = HistoricalEstimator()
        self._leases: dict[Call, Lease] = {}

    def choose(self, call: Call) -> int:
        usage = Usage(
            input_tokens=call.request.input_tokens,
            output_tokens=self._estimator.estimate(call.request).tokens,
        )
        exclude = self._chance.sample(self._names, self._excluded)
        lease = self._leases[call] = self.router.acquire_nowait(usage, exclude=exclude)
        assert lease.replica is not None
        return int(lease.replica.name)

    def ended(self, call: Call) -> None:
        self._leases.pop(call).release()
        self._estimator.observe(call.request, call.output_tokens)


def two_choices(engines: Sequence[Engine], seed: int) -> Policy:
    return Routed(engines, seed, speeds=False, choices=2)


def least_tokens(engines: Sequence[Engine], seed: int) -> Policy:
    return Routed(engines, seed, speeds=False)


def least_tokens_over_speed(engines: Sequence[Engine], seed: int) -> Policy:
    return Routed(engines, seed, speeds=True)
