"""The OpenAI SDK under a small quota: its code stays as it is, save the line that makes the client.

    python examples/openai_sdk.py [--base-url URL --api-key KEY --tpm 30000 --rpm 500]

Chats, streams and embeddings, all at once, and far more than fits into a minute. By default
they go to a fake provider in this process, whose minute is one second long.

Look at the last two lines: nothing is refused, and hardly any of the quota is left over.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

try:
    import openai
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient
except ImportError as error:
    sys.exit(f"openai_sdk: {error}: this shows OpenAI's SDK, so pip install openai")

import anyio

from tokenflow import (
    ApproximateCounter,
    CallEvent,
    Quota,
    TokenFlow,
    TokenRateLimiter,
    call_options,
)
from tokenflow.testing import FakeProvider, FakeQuota

if int(openai.__version__.partition(".")[0]) >= 3:
    import httpx2 as httpx

    from tokenflow.integrations.httpx2 import ThrottledTransport
else:
    import httpx  # type: ignore[no-redef]

    from tokenflow.integrations.httpx import ThrottledTransport  # type: ignore[assignment]

QUESTION = "What is the difference between a token bucket and a sliding window? "


# -- code that knows nothing of limits ---------------------------------------------------


async def chat(client: AsyncOpenAI) -> None:
    await client.chat.completions.create(
        model="gpt-5", messages=[{"role": "user", "content": QUESTION}], max_tokens=300
    )


async def stream(client: AsyncOpenAI) -> None:
    chunks = await client.chat.completions.create(
        model="gpt-5",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=300,
        stream=True,
        stream_options={"include_usage": True},  # without it, the estimate stays charged
    )
    async for _ in chunks:
        pass


async def embed(client: AsyncOpenAI) -> None:
    await client.embeddings.create(model="text-embedding-3-small", input=[QUESTION * 5] * 4)


# -- and the limits ----------------------------------------------------------------------


async def main(asked: argparse.Namespace) -> None:
    minute = 60.0 if asked.base_url else 1.0
    fake = FakeProvider(
        FakeQuota(asked.tpm, per=minute, counts="larger", name="tokens"),
        FakeQuota(asked.rpm, per=minute, of="requests"),
        output=120,
        first_token_seconds=0.05,
        tokens_per_second=500,
    )
    limits = TokenRateLimiter(  # what a call declares counts, and is not corrected: OpenAI's rule
        Quota(asked.tpm, per=minute, settle="reserved", leeway=0.1),
        Quota(asked.rpm, per=minute, of="requests"),
    )
    calls: list[CallEvent] = []
    flow = TokenFlow(limits, counter=ApproximateCounter(4.0), observers=[calls.append])
    transport = ThrottledTransport(flow, None if asked.base_url else fake.transport(httpx))
    client = AsyncOpenAI(
        base_url=asked.base_url or "http://fake/v1",
        api_key=asked.api_key,
        http_client=DefaultAsyncHttpxClient(transport=transport),
    )
    async with client, anyio.create_task_group() as tasks:
        for kind in (chat, stream, embed):
            with call_options(task=kind.__name__):
                for _ in range(12):
                    tasks.start_soon(kind, client)
    report(calls)
    if not asked.base_url:
        share = fake.worst_window("tokens") / asked.tpm
        print(f"the provider refused {fake.statistics().refused}; at its busiest it was charged")
        print(f"{share:.0%} of the quota in one of its minutes, each a second long")


def report(calls: list[CallEvent]) -> None:
    print(f"{'':10}{'calls':>8}{'tokens':>10}{'waited at most':>18}")
    for task in sorted({str(call.request.task) for call in calls}):
        mine = [call for call in calls if call.request.task == task]
        tokens = sum(call.charged.total_tokens for call in mine)
        print(f"{task:10}{len(mine):8}{tokens:10,}{max(call.waited for call in mine):16.1f} s")


def at_least(least: int) -> Callable[[str], int]:
    """For argparse: a whole number, and none that is too small for what follows."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least:,}, not {text}")
        return int(text)

    return number


def url(text: str) -> str:
    """For argparse."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise argparse.ArgumentTypeError(f"must be as http://127.0.0.1:8000/v1 is, not {text!r}")
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", type=url, help="a real server instead of the fake one")
    parser.add_argument("--api-key", default="none", help="for that server")
    parser.add_argument(
        "--tpm",
        type=at_least(400),
        default=3_000,
        help="tokens per minute: %(default)s, and at least 400, for a call takes up to 340",
    )
    parser.add_argument(
        "--rpm", type=at_least(1), default=500, help="requests per minute: %(default)s"
    )
    asked = parser.parse_args()
    try:
        anyio.run(main, asked)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except ExceptionGroup as failed:
        sys.exit(f"openai_sdk: {asked.base_url or 'the fake'}: {failed.exceptions[0]!r}")
