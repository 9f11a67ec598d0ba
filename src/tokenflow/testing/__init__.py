"""A provider to test against: real quota rules, real headers, real streams, no network, no keys.

Does what you have built stay within the quota, and how long does it take? Let it
call a `FakeProvider`, and read the provider's books:

>>> import anyio
>>> from tokenflow import TokenRateLimiter, Usage
>>> from tokenflow.testing import FakeProvider
>>> async def throttled(provider: FakeProvider, limiter: TokenRateLimiter) -> None:
...     chat = {"model": "any", "messages": [{"role": "user", "content": "1234" * 600}]}
...     async with limiter.reserve(Usage(input_tokens=600, output_tokens=400)) as lease:
...         answer = await provider.respond("POST", "/v1/chat/completions", body=chat)
...         lease.reconcile(Usage.from_response(await answer.json()))
>>> async def main() -> None:
...     provider = FakeProvider.openai(tpm=6_000, output=100)
...     limiter = TokenRateLimiter(tokens_per_minute=6_000)
...     async with anyio.create_task_group() as tasks:
...         for _ in range(20):
...             tasks.start_soon(throttled, provider, limiter)
...     total = provider.statistics()
...     print(f"{total.completed} answered, {total.refused} refused; {anyio.current_time():.1f} s")
>>> anyio.run(main)  # in virtual time, if your tests have it
20 answered, 0 refused; 125.0 s

Clients built on httpx or httpx2, such as the providers' own, reach it in process:

    http = openai.DefaultAsyncHttpxClient(transport=provider.transport(httpx2))
    client = openai.AsyncOpenAI(api_key="any", base_url="http://fake/v1", http_client=http)

and everything else over a socket: `uvicorn my_module:provider`, as it is an ASGI app.
"""

from ._answer import Answer
from ._calls import FakeCall, FakeStatistics, Outcome
from ._dialects import DialectName
from ._faults import ConnectionDropped, Fault, Faults, first_calls, some_calls
from ._provider import FakeProvider, FakeSettings, Sample, lognormal
from ._quota import Counts, FakeQuota, Owner, Rule, Unit
from ._request import Body, Endpoint, FakeRequest, approximate_tokens

__all__ = [
    "Answer",
    "Body",
    "ConnectionDropped",
    "Counts",
    "DialectName",
    "Endpoint",
    "FakeCall",
    "FakeProvider",
    "FakeQuota",
    "FakeRequest",
    "FakeSettings",
    "FakeStatistics",
    "Fault",
    "Faults",
    "Outcome",
    "Owner",
    "Rule",
    "Sample",
    "Unit",
    "approximate_tokens",
    "first_calls",
    "lognormal",
    "some_calls",
]
