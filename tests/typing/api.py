"""The public API as its users write it. Never run: the type checkers read it."""

from collections.abc import AsyncIterator
from typing import assert_type

import tokenflow
from tokenflow.flow import MapResult, Progress


async def limits() -> None:
    semaphore = tokenflow.TokenSemaphore(500_000, max_requests=64)
    quotas = tokenflow.TokenRateLimiter(
        tokenflow.Quota(30_000, of="input_tokens"),
        tokenflow.Quota(9, of=lambda usage: usage.requests, name="calls"),
        tokens_per_minute=60_000,
        order=tokenflow.FairShare({"paid": 3}),
    )
    both = tokenflow.TokenLimits(semaphore, quotas, order=tokenflow.SmallestFirst())
    async with both.reserve(1_200, tenant="acme", priority=1, max_wait=5) as lease:
        assert_type(lease, tokenflow.Lease)
        lease.reconcile(tokenflow.Usage(input_tokens=900, output_tokens=80))
    with await semaphore.acquire(10) as lease:
        assert_type(lease.waited, float)
    assert_type(both.delay(10), float)
    assert_type(quotas.statistics().quotas[0].used, int)


async def estimates(counter: tokenflow.TokenCounter) -> None:
    assert_type(counter.count("text"), int)
    estimator: tokenflow.OutputEstimator = tokenflow.HistoricalEstimator(0.9)
    assert_type(estimator.estimate(tokenflow.Request(input_tokens=9)).tokens, int)
    assert_type(tokenflow.Usage.from_response(object()), tokenflow.Usage)


async def embed(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts]


async def batches() -> None:
    packed = tokenflow.pack(["a", "b"], 10, tokens=len)
    assert_type(packed, list[tokenflow.Batch[str]])
    assert_type(tokenflow.restore(packed, [[1], [2]]), list[int])
    async with tokenflow.TokenBatcher(embed, 8_192, tokens=len) as batcher:
        assert_type(await batcher.submit("text"), float)


async def chunks() -> AsyncIterator[bytes]:
    yield b""


async def measure(text: str) -> int:
    return len(text)


def show(progress: Progress) -> None:
    assert_type(progress.seconds_left, float | None)


async def flow() -> None:
    whole = tokenflow.TokenFlow(
        {"gpt-*": tokenflow.TokenSemaphore(10), "*": tokenflow.TokenLimits()},
        counter=tokenflow.ApproximateCounter(),
        observers=[lambda event: print(event.outcome)],
    )
    async with whole.request(prompt="text", model="gpt-5", max_output_tokens=9) as call:
        assert_type(call, tokenflow.Call)
        async for chunk in call.track(chunks()):
            assert_type(chunk, bytes)
        call.reconcile({"usage": {"total_tokens": 9}})
    async with whole.map(measure, ["a", "b"], attempts=3, progress=show) as results:
        async for result in results:
            assert_type(result, MapResult[str, int])
            assert_type(result.unwrap(), int)
