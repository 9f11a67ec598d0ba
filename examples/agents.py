"""Many agents, one quota: none starves, though one of them asks for far more than its share.

    python examples/agents.py [--burst 150] [--tokens-per-minute 6000]

Ten agents work side by side, each step by step: it looks something up (embeddings), makes a
plan, asks for two drafts at once, and streams its answer. An eleventh has 150 questions and
asks them all at the start. First in order of arrival, then with FairShare. The agents use the
OpenAI SDK and know nothing of limits. The provider is a fake one, whose minute is one second.

Look at the last three rows: with FairShare the ten wait less and are done sooner, and it is the
burst that is done last.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import mean

try:
    import openai
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient
except ImportError as error:
    sys.exit(f"agents: {error}: the agents use OpenAI's SDK, so pip install openai")

import anyio

from tokenflow import (
    ApproximateCounter,
    CallEvent,
    FairShare,
    Fifo,
    Quota,
    TokenFlow,
    TokenRateLimiter,
    call_options,
)
from tokenflow.testing import FakeProvider, FakeQuota, lognormal

if int(openai.__version__.partition(".")[0]) >= 3:
    import httpx2 as httpx

    from tokenflow.integrations.httpx2 import ThrottledTransport
else:
    import httpx  # type: ignore[no-redef]

    from tokenflow.integrations.httpx import ThrottledTransport  # type: ignore[assignment]

MINUTE = 1.0
BURST = "the burst"
AGENTS = [f"agent {number}" for number in range(1, 11)]
QUESTION = "Which of these numbers are wrong, and why? " * 4


# -- the agents ---------------------------------------------------------------------------


class Agent:
    """Its steps depend on each other; what is said about one goes along by `call_options`."""

    def __init__(self, name: str, client: AsyncOpenAI) -> None:
        self._name = name
        self._client = client

    async def work(self) -> None:
        """One question, from start to end."""
        with call_options(tenant=self._name):
            await self.recall()
            await self.chat("plan")
            async with anyio.create_task_group() as tasks:  # tasks inherit the options
                tasks.start_soon(self.chat, "draft")
                tasks.start_soon(self.chat, "draft")
            await self.answer()

    async def rush(self, questions: int) -> None:
        """A lot of them at once."""
        with call_options(tenant=self._name):
            async with anyio.create_task_group() as tasks:
                for _ in range(questions):
                    tasks.start_soon(self.chat, "rush")

    async def recall(self) -> None:
        with call_options(task="recall"):
            await self._client.embeddings.create(model="text-embedding-3-small", input=QUESTION)

    async def chat(self, task: str) -> None:
        with call_options(task=task):
            await self._client.chat.completions.create(
                model="gpt-5", messages=[{"role": "user", "content": QUESTION}], max_tokens=150
            )

    async def answer(self) -> None:
        with call_options(task="answer"):
            stream = await self._client.chat.completions.create(
                model="gpt-5",
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=150,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for _ in stream:
                pass


# -- what they share ----------------------------------------------------------------------


async def run(order: Fifo | FairShare, burst: int, limit: int) -> dict[str, str]:
    """All of it once; returns what to show."""
    print(f"{type(order).__name__} ...", flush=True)
    provider = FakeProvider(
        FakeQuota(limit, per=MINUTE, counts="larger", name="tokens"),
        output=lognormal(80),
        first_token_seconds=0.02,
        tokens_per_second=2_000,
        tokens_per_chunk=10,
    )
    # The leeway is for the way to the provider, which is long for a minute of one second.
    quota = Quota(limit, per=MINUTE, settle="reserved", leeway=0.2)
    calls: list[CallEvent] = []
    flow = TokenFlow(
        TokenRateLimiter(quota, order=order),
        counter=ApproximateCounter(4.0),
        observers=[calls.append],
    )
    transport = ThrottledTransport(flow, provider.transport(httpx))
    client = AsyncOpenAI(
        base_url="http://fake/v1",
        api_key="none",
        http_client=DefaultAsyncHttpxClient(transport=transport),
    )
    done: dict[str, float] = {}
    began = time.monotonic()

    async def finish(name: str) -> None:
        agent = Agent(name, client)
        await (agent.work() if name in AGENTS else agent.rush(burst))
        done[name] = time.monotonic() - began

    async with client, anyio.create_task_group() as tasks:
        for name in (BURST, *AGENTS):
            tasks.start_soon(finish, name)
    waited = [sum(call.waited for call in calls if call.tenant == name) for name in AGENTS]
    most = provider.worst_window("tokens")
    return {
        "calls": f"{len(calls)}",
        "refused by the provider": f"{provider.statistics().refused}",
        "most of the quota in a minute": f"{most / limit:.0%}",
        "each of the ten waited, in all": f"{mean(waited):.1f} s",
        "the ten were done after": f"{max(done[name] for name in AGENTS):.1f} s",
        "the burst was done after": f"{done[BURST]:.1f} s",
    }


async def main(burst: int, limit: int) -> None:
    columns = [await run(order, burst, limit) for order in (Fifo(), FairShare())]
    print(f"\n{'':34}{'Fifo':>10}{'FairShare':>12}")
    for label in columns[0]:
        print(f"{label:34}{columns[0][label]:>10}{columns[1][label]:>12}")


def at_least(least: int) -> Callable[[str], int]:
    """For argparse: a whole number, and none that is too small for what follows."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least:,}, not {text}")
        return int(text)

    return number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--burst",
        type=at_least(0),
        default=150,
        metavar="N",
        help="questions of the eleventh agent",
    )
    parser.add_argument(
        "--tokens-per-minute",
        type=at_least(250),
        default=6_000,
        metavar="N",
        help="the quota: %(default)s, and at least 250, for a call takes up to 200",
    )
    asked = parser.parse_args()
    try:
        anyio.run(main, asked.burst, asked.tokens_per_minute)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
