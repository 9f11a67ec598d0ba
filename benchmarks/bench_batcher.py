"""The async batcher: CPU per item, cancelling, idling, and what the peers do when things go wrong.

    python benchmarks/bench_batcher.py [--quick] [--trace PATH]

CPU time of the process, medians of interleaved rounds, on asyncio, with a
processor that does nothing and batches of at most 64. (`--trace` is accepted
and not needed: with such a processor lengths make no difference.)
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiodataloader
import async_batcher.batcher
import batched.aio
import batchlet
from _report import environment, publish, table
from _rounds import medians

from tokenflow import TokenBatcher

NOTE = (
    "CPU times are medians of 7 rounds in which all take turns (growing queues: of 3; cancelling "
    "and idling: of one), with a processor that does nothing and batches of at most 64 items."
)
BATCH = 64
Process = Callable[[list[Any]], Awaitable[Sequence[Any]]]
Submit = Callable[[Any], Awaitable[Any]]
Peer = Callable[[Process, float], AbstractAsyncContextManager[Submit]]


@asynccontextmanager
async def tokenflow(process: Process, linger: float) -> AsyncIterator[Submit]:
    batcher: TokenBatcher[Any, Any] = TokenBatcher(
        process, BATCH * 100, tokens=lambda item: 100, max_items=BATCH, linger=linger
    )
    async with batcher:
        yield batcher.submit


@asynccontextmanager
async def plain(process: Process, linger: float) -> AsyncIterator[Submit]:
    """A list of futures: no linger, no budget, no errors, no cancelling."""
    loop = asyncio.get_running_loop()
    queue: list[tuple[Any, asyncio.Future[Any]]] = []
    drains: set[asyncio.Task[None]] = set()

    async def drain() -> None:
        while queue:
            batch = queue[:BATCH]
            del queue[:BATCH]
            results = await process([item for item, _ in batch])
            for (_, future), result in zip(batch, results, strict=True):
                future.set_result(result)

    async def submit(item: Any) -> Any:
        future = loop.create_future()
        queue.append((item, future))
        if len(queue) == 1:
            task = loop.create_task(drain())
            drains.add(task)
            task.add_done_callback(drains.discard)
        return await future

    yield submit


@asynccontextmanager
async def with_batched(process: Process, linger: float) -> AsyncIterator[Submit]:
    batcher: Any = batched.aio.AsyncBatchProcessor(
        process, batch_size=BATCH, timeout_ms=linger * 1000
    )
    try:
        yield batcher
    finally:
        if batcher._task is not None:  # it has no way to close
            batcher._task.cancel()


@asynccontextmanager
async def with_batchlet(process: Process, linger: float) -> AsyncIterator[Submit]:
    policy = batchlet.BatchPolicy(max_items=BATCH, max_tokens=BATCH * 100)
    batcher: Any = batchlet.AsyncBatcher(
        process, policy=policy, max_wait_ms=linger * 1000, max_pending_items=10**6
    )
    async with batcher:
        yield lambda item: batcher.submit(item, size=100)


@asynccontextmanager
async def with_async_batcher(process: Process, linger: float) -> AsyncIterator[Submit]:
    class Batcher(async_batcher.batcher.AsyncBatcher):  # type: ignore[misc]
        async def process_batch(self, batch: list[Any]) -> Any:
            return await process(batch)

    batcher = Batcher(max_batch_size=BATCH, max_queue_time=linger)
    try:
        yield batcher.process
    finally:
        await batcher.stop(force=True)


@asynccontextmanager
async def with_aiodataloader(process: Process, linger: float) -> AsyncIterator[Submit]:
    loader: Any = aiodataloader.DataLoader(process, max_batch_size=BATCH, cache=False)
    yield loader.load


PEERS: dict[str, Peer] = {
    "tokenflow": tokenflow,
    "a list of futures": plain,
    "aiodataloader": with_aiodataloader,
    "batchlet": with_batchlet,
    "async-batcher": with_async_batcher,
    "batched": with_batched,
}


async def nothing(items: list[Any]) -> list[Any]:
    return items


async def closed_loop(peer: Peer, callers: int, turns: int) -> float:
    """Microseconds of CPU per item: each caller submits its next one when it has its result."""

    async def caller(submit: Submit) -> None:
        for _ in range(turns):
            await submit(1)

    async with peer(nothing, 0.002) as submit:
        started = time.process_time()
        await asyncio.gather(*[caller(submit) for _ in range(callers)])
        return (time.process_time() - started) / (callers * turns) * 1e6


async def burst(peer: Peer, items: int) -> float:
    """Microseconds of CPU per item: all at once."""
    async with peer(nothing, 0.002) as submit:

        async def caller(item: int) -> Any:
            return await submit(item)

        started = time.process_time()
        await asyncio.gather(*[caller(item) for item in range(items)])
        return (time.process_time() - started) / items * 1e6


async def cancelling(peer: Peer, callers: int) -> float:
    """Microseconds of CPU per caller: all are cancelled behind a processor that hangs."""
    release = asyncio.Event()

    async def hang(items: list[Any]) -> list[Any]:
        await release.wait()
        return items

    async with peer(hang, 0.002) as submit:

        async def caller(item: int) -> Any:
            return await submit(item)

        tasks = [asyncio.create_task(caller(item)) for item in range(callers)]
        await asyncio.sleep(0.05)
        started = time.process_time()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        seconds = time.process_time() - started
        release.set()
    return seconds / callers * 1e6


async def idling(peer: Peer, seconds: float) -> float:
    """Turns of the event loop per second with nothing to do."""
    loop: Any = asyncio.get_running_loop()
    turns = 0
    run_once = loop._run_once

    def counted() -> None:
        nonlocal turns
        turns += 1
        run_once()

    async with peer(nothing, 0.002) as submit:
        await submit(1)
        await asyncio.sleep(0.05)
        loop._run_once = counted
        await asyncio.sleep(seconds)
        loop._run_once = run_once
    return max(0, turns - 2) / seconds


def run(measure: Callable[..., Any], *arguments: Any) -> Callable[[], float]:
    return lambda: float(asyncio.run(measure(*arguments)))


# Probes: what happens in the cases that hung or failed elsewhere.


async def outcome(peer: Peer, process: Process, linger: float, items: list[int]) -> str:
    """Submit all; say how many got a result, an error, or nothing within half a second."""
    try:
        async with asyncio.timeout(2), peer(process, linger) as submit:

            async def caller(item: int) -> Any:
                return await submit(item)

            tasks = [asyncio.create_task(caller(item)) for item in items]
            done, pending = await asyncio.wait(tasks, timeout=0.5)
            for task in pending:
                task.cancel()
            errors = sum(task.cancelled() or task.exception() is not None for task in done)
            return f"{len(done) - errors} ok, {errors} errors, {len(pending)} hang"
    except BaseException as error:
        return f"{type(error).__name__}"


async def one_caller_cancelled(peer: Peer) -> str:
    async def slow(items: list[Any]) -> list[Any]:
        await asyncio.sleep(0.1)
        return items

    try:
        async with asyncio.timeout(2), peer(slow, 0.01) as submit:

            async def caller(item: int) -> Any:
                return await submit(item)

            tasks = [asyncio.create_task(caller(item)) for item in range(3)]
            await asyncio.sleep(0.05)
            tasks[1].cancel()
            done, _ = await asyncio.wait([tasks[0], tasks[2]], timeout=0.5)
            good = sum(not task.cancelled() and task.exception() is None for task in done)
            for task in tasks:
                task.cancel()
            return f"{good} of 2 served"
    except BaseException as error:
        return f"{type(error).__name__}"


async def processor_cancelled(peer: Peer) -> str:
    async def dies(items: list[Any]) -> list[Any]:
        raise asyncio.CancelledError

    return await outcome(peer, dies, 0.01, [1, 2])


class Panic(BaseException):
    """As native code raises it."""


async def processor_dies(peer: Peer) -> str:
    async def dies(items: list[Any]) -> list[Any]:
        raise Panic

    return await outcome(peer, dies, 0.01, [1, 2])


async def one_bad_item(peer: Peer) -> str:
    async def process(items: list[Any]) -> list[Any]:
        return [ValueError("bad") if item == 1 else item for item in items]

    return await outcome(peer, process, 0.01, [0, 1, 2])


async def trickle(peer: Peer) -> str:
    """An item every 30 ms with a linger of 50 ms: how long does the first one wait?"""
    try:
        async with asyncio.timeout(3), peer(nothing, 0.05) as submit:

            async def caller(item: int) -> float:
                started = time.monotonic()
                await submit(item)
                return time.monotonic() - started

            tasks = []
            for item in range(20):
                tasks.append(asyncio.create_task(caller(item)))
                await asyncio.sleep(0.03)
            return f"{await tasks[0] * 1000:.0f} ms"
    except BaseException as error:
        return f"{type(error).__name__}"


PROBES: dict[str, Callable[[Peer], Awaitable[str]]] = {
    "1 of 3 callers is cancelled": one_caller_cancelled,
    "the processor is cancelled": processor_cancelled,
    "it raises a BaseException": processor_dies,
    "1 of 3 results is an exception": one_bad_item,
    "a trickle, 50 ms linger": trickle,
}


def probes() -> str:
    rows = []
    for name, peer in PEERS.items():
        if name != "a list of futures":
            rows.append((name, *[asyncio.run(probe(peer)) for probe in PROBES.values()]))  # type: ignore[arg-type]
    return table(("when", *PROBES), rows)


def costs(rounds: int, callers: int, turns: int, items: int, cancelled: tuple[int, int]) -> str:
    few, many = cancelled
    closed = medians(rounds, {n: run(closed_loop, p, callers, turns) for n, p in PEERS.items()})
    bursts = medians(rounds, {n: run(burst, p, items) for n, p in PEERS.items()})
    once = {name: peer for name, peer in PEERS.items() if name != "a list of futures"}
    less = medians(1, {name: run(cancelling, peer, few) for name, peer in once.items()})
    more = medians(1, {name: run(cancelling, peer, many) for name, peer in once.items()})
    idle = medians(1, {name: run(idling, peer, 1.0) for name, peer in PEERS.items()})
    rows = [
        (
            name,
            f"{closed[name]:.1f}",
            f"{bursts[name]:.1f}",
            *((f"{less[name]:.1f}", f"{more[name]:.1f}") if name in less else ("", "")),
            f"{idle[name]:.0f}",
        )
        for name in PEERS
    ]
    header = (
        "us of CPU per item",
        f"{callers} callers",
        f"burst of {items:,}",
        f"cancel {few:,}",
        f"cancel {many:,}",
        "idle turns/s",
    )
    return table(header, rows)


def queues(rounds: int, counts: tuple[int, ...]) -> str:
    """Does the cost of an item grow with the queue?"""
    seconds = {
        n: medians(rounds, {name: run(burst, peer, n) for name, peer in PEERS.items()})
        for n in counts
    }
    rows = [(name, *[f"{seconds[n][name]:.1f}" for n in counts]) for name in PEERS]
    return table(("burst, us of CPU per item", *[f"{n:,}" for n in counts]), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", help="not needed here")
    parser.add_argument("--quick", action="store_true", help="small inputs, few rounds")
    quick = parser.parse_args().quick
    if quick:
        parts = [costs(2, 64, 20, 2_000, (500, 2_000)), queues(2, (1_000, 10_000))]
    else:
        parts = [
            costs(7, 256, 40, 10_000, (4_000, 16_000)),
            queues(3, (10_000, 32_000, 100_000)),
        ]
    text = "\n\n".join([f"## Batcher\n\n{environment()} {NOTE}", *parts, probes()])
    publish("batcher", text, quick=quick)


if __name__ == "__main__":
    main()
