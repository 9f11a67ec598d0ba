"""Whole calls against each provider's own quota rules, and what a transport costs.

    python benchmarks/bench_flow.py [--quick]

The quotas are the fake provider's, which knows nothing of tokenflow's ledgers, in virtual time:
5,000 calls of mixed size from 64 tasks. The transport is timed in real time, in process, against
the same transport without it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from typing import Any

import anyio
import httpx2
from _report import arguments, environment, publish, table
from _virtual import run_virtual

from tokenflow import ApproximateCounter, Call, TokenFlow, providers
from tokenflow.integrations.httpx2 import ThrottledTransport
from tokenflow.providers import Provider
from tokenflow.testing import FakeProvider

CALLS = 5_000
TASKS = 64
FOREIGN_SHARE = 0.3
DECLARED = 1_024
COUNTER = ApproximateCounter(4.0)
NOTE = (
    f"In virtual time: {CALLS:,} calls of mixed size (chat: log-normal input of median 800 tokens, "
    "output of median 200, declared maximum 1,024), from 64 tasks, each retried until it is "
    "answered. `used` is what the provider charged, of what its scarcest quota allowed in the time "
    "that the calls took. Without tokenflow a refused call waits as long as it is told, and is "
    "sent again, as SDKs do. The other client eats 30 % of every quota, unannounced."
)


@dataclass(frozen=True)
class Setting:
    name: str
    provider: Callable[..., FakeProvider]
    preset: Callable[[], Provider]
    path: str = "/v1/chat/completions"


SETTINGS = [
    Setting(
        "OpenAI: bucket, declared maximum at arrival",
        lambda **more: FakeProvider.openai(tpm=300_000, rpm=3_000, **more),
        lambda: providers.openai(tpm=300_000, rpm=3_000, counts="larger"),
    ),
    Setting(
        "OpenAI, requests scarce",
        lambda **more: FakeProvider.openai(tpm=3_000_000, rpm=150, **more),
        lambda: providers.openai(tpm=3_000_000, rpm=150, counts="larger"),
    ),
    Setting(
        "Azure: fixed minute, requests per 10 s",
        lambda **more: FakeProvider.azure(tpm=300_000, **more),
        lambda: providers.azure(tpm=300_000),
        "/openai/deployments/gpt-5/chat/completions",
    ),
    Setting(
        "Anthropic: input and output apart, as produced",
        lambda **more: FakeProvider.anthropic(rpm=1_000, itpm=200_000, otpm=60_000, **more),
        lambda: providers.anthropic(rpm=1_000, itpm=200_000, otpm=60_000),
        "/v1/messages",
    ),
    Setting(
        "Groq: bucket that may go negative, actual usage",
        lambda **more: FakeProvider.groq(tpm=300_000, rpm=3_000, **more),
        lambda: providers.groq(tpm=300_000, rpm=3_000),
    ),
]


@dataclass(frozen=True)
class Outcome:
    refused: int
    answered: int
    used: float
    early: int  # refused calls that were sent again before their time

    def cells(self) -> list[str]:
        return [f"{self.refused:,}", f"{self.used:.1%}", f"{self.answered:,}", f"{self.early:,}"]


class Load:
    """Calls of mixed size, from a fixed number of tasks, against one provider."""

    def __init__(self, setting: Setting, calls: int, flow: TokenFlow | None, seed: int) -> None:
        self.setting = setting
        self.flow = flow
        rng = random.Random(seed)
        self.sizes = deque(
            (min(8_000, int(rng.lognormvariate(6.7, 0.8))), int(rng.lognormvariate(5.3, 0.7)))
            for _ in range(calls)
        )
        self.provider = setting.provider(
            output=lambda request: int(request.headers["x-output"]), unix_time=anyio.current_time
        )
        self.answered = 0
        self.early = 0

    async def run(self, foreign: bool) -> Outcome:
        async with anyio.create_task_group() as everything:
            if foreign:
                other = partial(self.provider.foreign_traffic, FOREIGN_SHARE, model="gpt-5")
                everything.start_soon(other)
            async with anyio.create_task_group() as tasks:
                for _ in range(TASKS):
                    tasks.start_soon(self.work)
            everything.cancel_scope.cancel()
        return self.outcome()

    async def work(self) -> None:
        while self.sizes:
            size = self.sizes.popleft()
            not_before = 0.0
            while (wait := await self.call(*size, not_before)) is not None:
                not_before = anyio.current_time() + wait
                if self.flow is None:
                    await anyio.sleep(wait)

    async def call(self, input_tokens: int, output_tokens: int, not_before: float) -> float | None:
        """Seconds to wait before the next attempt; None: it was answered."""
        messages = [{"role": "user", "content": "word" * input_tokens}]
        body = {"model": "gpt-5", "messages": messages, "max_tokens": DECLARED}
        headers = {"x-output": str(output_tokens)}
        if self.flow is None:
            return await self.send(body, headers, not_before, None)
        # Counted here: a thread, for the long ones, knows nothing of virtual time.
        size = COUNTER.count_messages(messages)
        asked = self.flow.request(input_tokens=size, model="gpt-5", max_output_tokens=DECLARED)
        async with asked as call:
            return await self.send(body, headers, not_before, call)

    async def send(
        self, body: dict[str, Any], headers: dict[str, str], not_before: float, call: Call | None
    ) -> float | None:
        self.early += anyio.current_time() < not_before - 1e-6
        path = self.setting.path
        async with await self.provider.respond("POST", path, headers=headers, body=body) as answer:
            content = await answer.read()
            # As every server says, and this one's clock is the loop's.
            told = dict(answer.headers) | {"date": formatdate(anyio.current_time(), usegmt=True)}
            if answer.status == 200:
                self.answered += 1
                if call is not None:
                    call.observe(told)
                    call.reconcile(json.loads(content))
                return None
            if call is not None:
                call.failed(_Response(answer.status, told, content))
            exact = told.get("retry-after-ms")  # the other is in whole seconds
            return float(told["retry-after"]) if exact is None else float(exact) / 1_000

    def outcome(self) -> Outcome:
        statistics = self.provider.statistics()
        elapsed = anyio.current_time()
        shares = [
            statistics.charged[quota.name] / (quota.limit * elapsed / quota.per)
            for quota in self.provider.quotas
            if quota.rule != "concurrency"
        ]
        return Outcome(statistics.refused, self.answered, max(shares), self.early)


@dataclass(frozen=True)
class _Response:
    status_code: int
    headers: dict[str, str]
    content: bytes


async def play(setting: Setting, calls: int, *, throttled: bool, foreign: bool) -> Outcome:
    flow = None
    if throttled:
        flow = TokenFlow(setting.preset())
    return await Load(setting, calls, flow, seed=1).run(foreign)


def quotas(calls: int) -> str:
    rows = []
    for setting in SETTINGS:
        for name, throttled, foreign in (
            ("without", False, False),
            ("tokenflow", True, False),
            ("tokenflow, beside another client", True, True),
        ):
            outcome = run_virtual(play(setting, calls, throttled=throttled, foreign=foreign))
            rows.append([setting.name, name, *outcome.cells()])
    return table(["Quota rule", "", "refused", "used", "answered", "retried early"], rows)


def overhead(calls: int) -> str:
    """Microseconds of CPU of one call, with and without the transport, in turns."""
    seconds: dict[str, list[float]] = {"bare": [], "throttled": []}

    async def measure() -> None:
        tpm, rpm = 2_000_000_000, 10_000_000
        provider = FakeProvider.openai(
            tpm=tpm, rpm=rpm, first_token_seconds=0.0, tokens_per_second=1e9, output=20
        )
        below = provider.transport(httpx2)
        flow = TokenFlow(providers.openai(tpm=tpm, rpm=rpm), counter=COUNTER)
        body = {"model": "gpt-5", "messages": [{"role": "user", "content": "hello " * 100}]}
        transports = {"bare": below, "throttled": ThrottledTransport(flow, below)}
        clients = {name: httpx2.AsyncClient(transport=each) for name, each in transports.items()}
        for _ in range(calls):
            for name, client in clients.items():  # in turns, so that noise meets both
                started = time.process_time()
                await client.post("http://fake/v1/chat/completions", json=body)
                seconds[name].append(time.process_time() - started)

    asyncio.run(measure())
    bare, throttled = (1e6 * statistics.median(each) for each in seconds.values())
    pairs = zip(*seconds.values(), strict=True)
    added = 1e6 * statistics.median(with_it - without for without, with_it in pairs)
    met = "met" if added <= 150 else "missed"
    return table(
        ["One call, in process", "us", "added"],
        [
            ["httpx2 and the fake provider", f"{bare:.0f}", ""],
            ["through the transport", f"{throttled:.0f}", f"{added:.0f} us (<= 150: {met})"],
        ],
    )


def main() -> None:
    options = arguments(__doc__)
    logging.getLogger("tokenflow").setLevel(logging.ERROR)  # what is refused is in the table
    calls = CALLS // 10 if options.quick else CALLS
    text = "\n\n".join(
        [
            "## Whole calls",
            NOTE,
            quotas(calls),
            f"{environment()} Medians of the CPU time of single calls, and of the differences "
            "between one and the next.",
            overhead(300 if options.quick else 3_000),
        ]
    )
    publish("flow", text, quick=options.quick)


if __name__ == "__main__":
    main()
