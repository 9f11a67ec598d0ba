"""The Anthropic SDK under a small quota: only the line that makes the client is another one.

    python examples/anthropic_sdk.py [--base-url URL --api-key KEY --itpm 30000 --otpm 8000]

Messages and streams, all at once, under limits on requests, input and output. By default they
go to a fake provider in this process, whose minute is one second long.

Look at the last two lines: nothing is refused, and little of the output's quota is left over.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

try:
    import anthropic
    from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
    from anthropic.types import MessageParam
except ImportError as error:
    sys.exit(f"anthropic_sdk: {error}: this shows Anthropic's SDK, so pip install anthropic")

import anyio

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
        raise argparse.ArgumentTypeError(f"must be as http://127.0.0.1:8000 is, not {text!r}")
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", type=url, help="a real server instead of the fake one")
    parser.add_argument("--api-key", default="none", help="for that server")
    parser.add_argument("--model", default="claude", help="for that server")
    parser.add_argument(
        "--rpm", type=at_least(1), default=50, help="requests per minute: %(default)s"
    )
    parser.add_argument(
        "--itpm",
        type=at_least(200),
        default=10_000,
        help="input tokens per minute: %(default)s, and at least 200, for a call takes 130",
    )
    parser.add_argument(
        "--otpm",
        type=at_least(1_000),
        default=2_000,
        help="output tokens per minute: %(default)s, and at least 1000, which a call declares",
    )
    asked = parser.parse_args()
    try:
        anyio.run(main, asked)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except ExceptionGroup as failed:
        sys.exit(f"anthropic_sdk: {asked.base_url or 'the fake'}: {failed.exceptions[0]!r}")
