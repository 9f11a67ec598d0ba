"""An OpenAI-compatible gateway: tenants share one provider's quota, and none can take it all.

    python examples/gateway.py                           a few tenants, in this process
    python examples/gateway.py --serve 127.0.0.1:8000    for everybody, with uvicorn
        [--base-url URL --api-key KEY --tpm 200000 --rpm 1000]

POST /v1/chat/completions, streamed or not. A client's key says which tenant it is. Calls wait in
one queue, where tenants take turns by their weights. 429 with Retry-After when the queue is full
or a call has waited long enough; 413 for what can never fit. Whoever hangs up gives back what
they held, and their place in the queue. GET /stats tells how it goes.

Without --base-url the provider is a fake one, whose minute is two seconds long.

Look at the table: half of "paid", with three times the weight, is through before half of "free",
"ops" does not wait for either, and "hasty" hears 429 rather than wait more than a second.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

try:
    import httpx2
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send
except ImportError as error:
    sys.exit(f"gateway: {error}: it needs pip install httpx2 starlette, and uvicorn for --serve")

import anyio

import tokenflow
from tokenflow import (
    ApproximateCounter,
    Call,
    CallEvent,
    FairShare,
    NoReplica,
    QueueFull,
    Quota,
    RequestTooLarge,
    TokenCounter,
    TokenFlow,
    TokenRateLimiter,
    UnknownModel,
    WaitTimeout,
)
from tokenflow.integrations.httpx2 import ThrottledTransport
from tokenflow.testing import FakeProvider, FakeQuota, lognormal

CHAT = "/v1/chat/completions"
LONGEST_BODY = 10_000_000  # bytes
PASSED_ON = ("content-type", "content-encoding", "retry-after", "x-request-id")


@dataclass(frozen=True, slots=True)
class Tenant:
    """`weight`: its part of what is scarce. A lower `priority` goes before all that are higher."""

    name: str
    weight: float = 1.0
    priority: int = 0
    max_wait: float = 60.0


TENANTS = {  # by key
    "key-free": Tenant("free"),
    "key-paid": Tenant("paid", weight=3.0),
    "key-hasty": Tenant("hasty", max_wait=1.0),
    "key-ops": Tenant("ops", priority=-1),
}


class Refused(Exception):
    """The gateway's own answer."""

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        error = {"message": message, "type": "gateway_error", "param": None, "code": None}
        headers = {} if retry_after is None else {"retry-after": f"{math.ceil(retry_after)}"}
        self.response = JSONResponse({"error": error}, status, headers)


class Chat:
    """The app behind CHAT. Without a router all calls go by `client`.

    With one, each goes by the client that is the `target` of the replica chosen for it:

        router = TokenRouter([Replica(url, target=client_of(url)) for url in urls])
        flow = TokenFlow(limits, router=router)
    """

    def __init__(
        self, flow: TokenFlow, tenants: Mapping[str, Tenant], client: httpx2.AsyncClient
    ) -> None:
        self._flow = flow
        self._tenants = tenants
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; it ends, and holds nothing, as soon as its client is gone."""
        async with anyio.create_task_group() as tasks:
            try:
                request = Request(scope, receive)
                tenant, body = self._tenant(request), await read(request)
                tasks.start_soon(cancel_when_gone, receive, tasks.cancel_scope)
                await self._serve(tenant, body, send)
            except Refused as refused:
                await refused.response(scope, receive, send)
            except (ClientDisconnect, OSError):
                pass  # there is nobody to be told
            tasks.cancel_scope.cancel()

    def _tenant(self, request: Request) -> Tenant:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key not in self._tenants:
            raise Refused(401, "unknown key: send one as `Authorization: Bearer ...`")
        return self._tenants[key]

    async def _serve(self, tenant: Tenant, body: dict[str, Any], send: Send) -> None:
        async with AsyncExitStack() as held:
            call = await self._admitted(held, tenant, body)
            client = self._client if call.replica is None else call.replica.target
            # Its transport is of the same flow, and settles this call by what comes back.
            request = client.stream("POST", "/chat/completions", json=body)
            try:
                response = await held.enter_async_context(request)
            except httpx2.TransportError as error:
                raise Refused(502, f"the provider does not answer: {error!r}") from error
            await pass_on(response, send)

    async def _admitted(self, held: AsyncExitStack, tenant: Tenant, body: dict[str, Any]) -> Call:
        """A call that may go now; or what to answer, where it may not."""
        try:
            asked = tokenflow.Request.from_body(body, input_tokens=0)
            call = self._flow.request(
                messages=body["messages"],
                tools=body.get("tools") or (),
                model=asked.model,
                max_output_tokens=asked.max_output_tokens,
                choices=asked.choices,
                tenant=tenant.name,
                priority=tenant.priority,
                max_wait=tenant.max_wait,
            )
            return await held.enter_async_context(call)
        except (RequestTooLarge, NoReplica) as error:
            raise Refused(413, str(error)) from error
        except (QueueFull, WaitTimeout) as error:
            raise Refused(429, str(error), error.retry_after or 1.0) from error
        except UnknownModel as error:
            raise Refused(404, str(error)) from error
        except (TypeError, ValueError) as error:
            raise Refused(400, str(error)) from error


async def read(request: Request) -> dict[str, Any]:
    """The body, if it is one of chat completions."""
    content = bytearray()
    async with aclosing(request.stream()) as chunks:
        async for chunk in chunks:
            content += chunk
            if len(content) > LONGEST_BODY:
                raise Refused(413, f"the body has more than {LONGEST_BODY:,} bytes")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise Refused(400, "the body must be a JSON object with a list of messages")
    if body.get("stream"):  # a stream tells what was used if it is asked to
        body["stream_options"] = {"include_usage": True}
    return body


async def pass_on(response: httpx2.Response, send: Send) -> None:
    """Send the provider's answer, piece by piece."""
    known = [(name, response.headers[name]) for name in PASSED_ON if name in response.headers]
    headers = [(name.encode(), value.encode()) for name, value in known]
    start = {"type": "http.response.start", "status": response.status_code, "headers": headers}
    await send(start)
    async with aclosing(response.aiter_raw()) as chunks:
        async for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body"})


async def cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def gateway(
    limits: TokenRateLimiter,
    tenants: Mapping[str, Tenant],
    *,
    base_url: str,
    api_key: str = "none",
    transport: httpx2.AsyncBaseTransport | None = None,
    counter: TokenCounter | None = None,
) -> Starlette:
    """The whole of it; `transport` leads to the provider, by default over the network."""
    got: dict[str, Counter[str]] = {tenant.name: Counter() for tenant in tenants.values()}

    def observe(event: CallEvent) -> None:
        got[str(event.tenant)][event.outcome] += 1
        got[str(event.tenant)]["tokens"] += event.charged.total_tokens

    async def stats(request: Request) -> JSONResponse:
        now = limits.statistics()
        quotas = {each.name: {"used": each.used, "limit": each.limit} for each in now.quotas}
        waiting = {"calls": now.waiting_calls, "tokens": now.waiting_tokens}
        return JSONResponse({"waiting": waiting, "quotas": quotas, "tenants": got})

    flow = TokenFlow(limits, counter=counter, observers=[observe])
    client = httpx2.AsyncClient(
        base_url=base_url,
        headers={"authorization": f"Bearer {api_key}"},
        transport=ThrottledTransport(flow, transport),
        timeout=httpx2.Timeout(10, read=600),
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    chat = Route(CHAT, Chat(flow, tenants, client), methods=["POST"])
    return Starlette(routes=[chat, Route("/stats", stats)], lifespan=lifespan)


def shared(
    tpm: int, rpm: int, tenants: Mapping[str, Tenant], minute: float, max_waiting: int = 60
) -> TokenRateLimiter:
    """One queue for all. The declared maximum counts, and is not corrected: OpenAI's rule."""
    return TokenRateLimiter(
        Quota(tpm, per=minute, settle="reserved"),
        Quota(rpm, per=minute, of="requests"),
        order=FairShare({tenant.name: tenant.weight for tenant in tenants.values()}),
        max_waiting=max_waiting,
    )


# -- a few tenants, in process -----------------------------------------------------------

MINUTE = 2.0  # of the fake provider
WORDS = "What is the difference between a token bucket and a sliding window? "


def fake_provider(tpm: int, rpm: int) -> FakeProvider:
    return FakeProvider(
        FakeQuota(tpm, per=MINUTE, counts="larger"),
        FakeQuota(rpm, per=MINUTE, of="requests"),
        output=lognormal(100),
        first_token_seconds=0.05,
        tokens_per_second=1_000,
        tokens_per_chunk=20,
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """What a tenant got."""

    tenant: str
    status: int
    after: float  # seconds since the start


async def demo(app: Starlette) -> None:
    """All ask at once, for more than there is, and more of them than may wait."""
    answers: list[Answer] = []
    began = time.monotonic()

    async def ask(key: str, repeat: int = 1) -> None:
        body = {
            "model": "gpt-5",
            "messages": [{"role": "user", "content": WORDS * repeat}],
            "max_tokens": 200,
            "stream": repeat % 2 == 0,
        }
        headers = {"authorization": f"Bearer {key}"}
        response = await client.post(CHAT, json=body, headers=headers)
        after = time.monotonic() - began
        answers.append(Answer(TENANTS[key].name, response.status_code, after))

    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(base_url="http://gateway", transport=transport) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "key-free", 10_000)  # more than fits into a minute
            for number in range(30):
                for key in ("key-free", "key-paid", "key-hasty"):
                    tasks.start_soon(ask, key, number % 4 + 1)
            await anyio.sleep(MINUTE)
            for _ in range(5):
                tasks.start_soon(ask, "key-ops")
        report(answers)
        print("GET /stats:", (await client.get("/stats")).text)


def report(answers: list[Answer]) -> None:
    print(f"{'tenant':10}{'200':>6}{'429':>6}{'413':>6}{'half of them after':>21}{'all after':>13}")
    for tenant in TENANTS.values():
        mine = [each for each in answers if each.tenant == tenant.name]
        counts = "".join(f"{sum(e.status == status for e in mine):6}" for status in (200, 429, 413))
        served = sorted(each.after for each in mine if each.status == 200)
        times = [f"{after:.1f} s" for after in served] or ["-"]
        print(f"{tenant.name:10}{counts}{times[(len(times) - 1) // 2]:>21}{times[-1]:>13}")


def at_least(least: int) -> Callable[[str], int]:
    """For argparse: a whole number, and none that is too small for what follows."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least:,}, not {text}")
        return int(text)

    return number


def address(text: str) -> tuple[str, int]:
    """For argparse."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, as in 127.0.0.1:8000, not {text}")
    return host.strip("[]") or "127.0.0.1", int(port)


def url(text: str) -> str:
    """For argparse."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise argparse.ArgumentTypeError(f"must be as http://127.0.0.1:8000/v1 is, not {text!r}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--serve", type=address, metavar="HOST:PORT", help="with uvicorn, until interrupted"
    )
    parser.add_argument("--base-url", type=url, help="of a real provider, with /v1")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY", "none"),
        help="for the provider; by default the environment's OPENAI_API_KEY",
    )
    parser.add_argument(
        "--tpm", type=at_least(1), default=5_000, help="tokens per minute: %(default)s"
    )
    parser.add_argument(
        "--rpm", type=at_least(1), default=500, help="requests per minute: %(default)s"
    )
    asked = parser.parse_args()
    if asked.base_url:
        limits = shared(asked.tpm, asked.rpm, TENANTS, 60.0)
        app = gateway(limits, TENANTS, base_url=asked.base_url, api_key=asked.api_key)
    else:
        app = gateway(
            shared(asked.tpm, asked.rpm, TENANTS, MINUTE),
            TENANTS,
            base_url="http://fake/v1",
            transport=fake_provider(asked.tpm, asked.rpm).transport(httpx2),
            counter=ApproximateCounter(4.0),
        )
    if asked.serve:
        serve(app, *asked.serve)
    elif asked.base_url:
        parser.error("--base-url goes with --serve: the tenants in this process ask in earnest")
    else:
        anyio.run(demo, app)


def serve(app: Starlette, host: str, port: int) -> None:
    try:
        import uvicorn
    except ImportError:
        raise SystemExit("--serve needs uvicorn: pip install uvicorn") from None
    uvicorn.run(app, host=host, port=port)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
