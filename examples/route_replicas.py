"""Three replicas of different speed: who gets which call, by turns and by tokens.

    python examples/route_replicas.py [--calls 240]

The same calls, at the same time, go to two equal fleets: to one by round robin, to the other
through a TokenRouter, which sends each call where the least work is ahead of it for the speed
of the replica. The replicas are fakes inside this file, in real time: each works through all of
its calls at once, so the more it has the slower each of them gets.

Watch how full the replicas are, on a terminal; then look at p99, the seconds that one call in a
hundred takes longer than: by turns the slow replica has a third of the calls, and falls behind.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio

from tokenflow import Replica, TokenFlow, TokenRouter, Usage

SPEEDS = {"fast": 200_000, "medium": 100_000, "slow": 40_000}  # tokens per second
LOAD = 0.7  # of what they can do together
PART = 250  # tokens, after which a fake looks how many calls it has
REDRAW = 0.1  # seconds
WIDTH = 14  # characters of a bar
COLUMN = WIDTH + 18
FULL = 12_000  # tokens in flight


@dataclass
class FakeReplica:
    """Computes so many tokens per second, whoever they are for."""

    tokens_per_second: float
    calls: int = 0
    tokens: int = 0  # still to do

    async def answer(self, usage: Usage) -> Usage:
        left = usage.total_tokens
        self.calls += 1
        self.tokens += left
        while left > 0:
            part = min(PART, left)
            await anyio.sleep(part * self.calls / self.tokens_per_second)
            left -= part
            self.tokens -= part
        self.calls -= 1
        return usage


@dataclass
class Fleet:
    """Replicas, what sends calls to them, and what came of it."""

    name: str
    replicas: dict[str, FakeReplica]
    answer: Callable[[Usage], Awaitable[str]]  # returns which one it was
    seconds: list[float] = field(default_factory=list)
    share: Counter[str] = field(default_factory=Counter)

    async def call(self, usage: Usage) -> None:
        started = anyio.current_time()
        self.share[await self.answer(usage)] += 1
        self.seconds.append(anyio.current_time() - started)


def fakes() -> dict[str, FakeReplica]:
    return {name: FakeReplica(speed) for name, speed in SPEEDS.items()}


def round_robin() -> Fleet:
    replicas = fakes()
    turns = itertools.cycle(replicas.items())

    async def answer(usage: Usage) -> str:
        name, replica = next(turns)
        await replica.answer(usage)
        return name

    return Fleet("round robin", replicas, answer)


def routed() -> Fleet:
    replicas = fakes()
    router = TokenRouter(
        Replica(name, tokens_per_second=each.tokens_per_second, target=each)
        for name, each in replicas.items()
    )
    flow = TokenFlow(router=router)

    async def answer(usage: Usage) -> str:
        async with flow.request(input_tokens=usage.input_tokens, task="chat") as call:
            replica = call.lease.replica
            assert replica is not None
            call.reconcile(await replica.target.answer(usage))
        return replica.name

    return Fleet("TokenRouter", replicas, answer)


# -- the calls ---------------------------------------------------------------------------


def calls(count: int) -> list[tuple[float, Usage]]:
    """Seconds since the one before, and what it uses. The flow is told the prompt only."""
    chance = random.Random(4)
    usages = [
        Usage(
            input_tokens=int(chance.lognormvariate(math.log(900), 0.8)) + 1,
            output_tokens=int(chance.lognormvariate(math.log(150), 0.8)) + 1,
        )
        for _ in range(count)
    ]
    mean = sum(usage.total_tokens for usage in usages) / count
    gap = mean / (LOAD * sum(SPEEDS.values()))
    return [(chance.expovariate(1 / gap), usage) for usage in usages]


async def compare(count: int) -> None:
    fleets = [round_robin(), routed()]
    async with anyio.create_task_group() as watching:
        watching.start_soon(watch, fleets, count)
        async with anyio.create_task_group() as running:
            due = anyio.current_time()
            for gap, usage in calls(count):
                due += gap
                await anyio.sleep_until(due)
                for fleet in fleets:
                    running.start_soon(fleet.call, usage)
    print("\n" + report(fleets))


# -- what is shown -----------------------------------------------------------------------


async def watch(fleets: list[Fleet], count: int) -> None:
    """A picture that changes, where somebody is looking; elsewhere a few lines."""
    live = sys.stdout.isatty()
    shown = 0
    while True:
        finished = all(len(fleet.seconds) == count for fleet in fleets)
        if live:
            lines = picture(fleets, count)
            back = f"\x1b[{shown}A" if shown else ""
            print(back + "\n".join(f"\x1b[2K{line}" for line in lines), flush=True)
            shown = len(lines)
        else:
            print(", ".join(f"{each.name}: {len(each.seconds)} of {count}" for each in fleets))
        if finished:
            return
        await anyio.sleep(REDRAW if live else 10 * REDRAW)


def picture(fleets: list[Fleet], count: int) -> list[str]:
    rows = [["", *(fleet.name for fleet in fleets)]]
    rows += [[name, *(gauge(fleet.replicas[name]) for fleet in fleets)] for name in SPEEDS]
    rows += [["", *(f"{len(fleet.seconds)} of {count} calls" for fleet in fleets)]]
    return [f"{name:8}" + "".join(f"{cell:<{COLUMN}}" for cell in cells) for name, *cells in rows]


def gauge(replica: FakeReplica) -> str:
    filled = min(WIDTH, round(WIDTH * replica.tokens / FULL))
    bar = "#" * filled + "." * (WIDTH - filled)
    return f"[{bar}] {replica.tokens:>6,} in {replica.calls}"


def report(fleets: list[Fleet]) -> str:
    lines = [f"{'':14}{'p50':>8}{'p99':>9}   " + "".join(f"{name:>9}" for name in SPEEDS)]
    for fleet in fleets:
        seconds = sorted(fleet.seconds)
        half, most = (seconds[math.ceil(level * len(seconds)) - 1] for level in (0.5, 0.99))
        shares = [fleet.share[name] / len(seconds) for name in SPEEDS]
        lines.append(
            f"{fleet.name:14}{half:>7.3f}s{most:>8.3f}s   "
            + "".join(f"{share:>9.0%}" for share in shares)
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=240, help="to each fleet: %(default)s")
    count = parser.parse_args().calls
    if count < 1:
        parser.error(f"--calls must be at least 1, not {count}")
    anyio.run(compare, count)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
