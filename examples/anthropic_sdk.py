"""The Anthropic SDK under a small quota: only the line that makes the client is another one.

    python examples/anthropic_sdk.py [--base-url URL --api-key KEY --itpm 30000 --otpm 8000]

Messages and streams, all at once, under limits on requests, input and output. By default they
go to a fake provider in this process, whose minute is one second long.
"""

from __future__ import annotations

import argparse

import anthropic
import anyio
from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
from anthropic.types import MessageParam

from tokenflow import (
    ApproximateCounter,
    CallEvent,
    Quota,
    TokenFlow,
    TokenRateLimiter,
    call_options,
)
from tokenflow.testing import FakeProvider, FakeQuota, lognormal

if int(anthropic.__version__.partition(".")[0]) >= 1:
    import httpx2 as httpx

    from tokenflow.integrations.httpx2 import ThrottledTransport
else:
    import httpx  # type: ignore[no-redef]

    from tokenflow.integrations.httpx import ThrottledTransport  # type: ignore[assignment]

HELLO: list[MessageParam] = [{"role": "user", "content": "Summarise what follows. " + "word " * 99}]


# -- code that knows nothing of limits ---------------------------------------------------


async def message(client: AsyncAnthropic, model: str) -> None:
    await client.messages.create(model=model, messages=HELLO, max_tokens=1_000)


async def stream(client: AsyncAnthropic, model: str) -> None:
    async with client.messages.stream(model=model, messages=HELLO, max_tokens=1_000) as events:
        async for _ in events.text_stream:
            pass


# -- and the limits ----------------------------------------------------------------------


async def main(asked: argparse.Namespace) -> None:
    minute = 60.0 if asked.base_url else 1.0
    fake = FakeProvider(
        FakeQuota(asked.rpm, per=minute, of="requests"),
        FakeQuota(asked.itpm, per=minute, of="input_tokens", counts="produced"),
        FakeQuota(asked.otpm, per=minute, of="output_tokens", counts="produced", name="output"),
        dialect="anthropic",
        output=lognormal(150, 0.4),
        first_token_seconds=0.05,
        tokens_per_second=500,
    )
    limits = TokenRateLimiter(
        Quota(asked.rpm, per=minute, of="requests"),
        Quota(asked.itpm, per=minute, of="input_tokens"),
        Quota(asked.otpm, per=minute, of="output_tokens", leeway=0.1),
    )
    calls: list[CallEvent] = []
    flow = TokenFlow(limits, counter=ApproximateCounter(4.0), observers=[calls.append])
    transport = ThrottledTransport(flow, None if asked.base_url else fake.transport(httpx))
    client = AsyncAnthropic(
        base_url=asked.base_url or "http://fake",
        api_key=asked.api_key,
        http_client=DefaultAsyncHttpxClient(transport=transport),
    )
    async with client, anyio.create_task_group() as tasks:
        for kind in (message, stream):
            with call_options(task=kind.__name__):
                for _ in range(18):
                    tasks.start_soon(kind, client, asked.model)
    report(calls)
    if not asked.base_url:
        share = fake.worst_window("output") / asked.otpm
        print(f"the provider refused {fake.statistics().refused}; at its busiest it was charged")
        print(f"{share:.0%} of its output in one of its minutes, each a second long")


def report(calls: list[CallEvent]) -> None:
    print(f"{'':10}{'calls':>8}{'input':>10}{'output':>10}{'waited at most':>18}")
    for task in sorted({str(call.request.task) for call in calls}):
        mine = [call for call in calls if call.request.task == task]
        read = sum(call.charged.input_tokens for call in mine)
        written = sum(call.charged.output_tokens for call in mine)
        waited = max(call.waited for call in mine)
        print(f"{task:10}{len(mine):8}{read:10,}{written:10,}{waited:16.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", help="a real server instead of the fake one")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="claude")
    parser.add_argument("--rpm", type=int, default=50, help="requests per minute")
    parser.add_argument("--itpm", type=int, default=10_000, help="input tokens per minute")
    parser.add_argument("--otpm", type=int, default=2_000, help="output tokens per minute")
    anyio.run(main, parser.parse_args())
