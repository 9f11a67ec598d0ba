"""A transport for httpx2 that reserves and reconciles: for SDKs whose code is not to change.

Needs `httpx2`, which the SDK brings along; the extra is called `httpx2`.
"""

from __future__ import annotations

from typing import Final, final

import httpx2

from tokenflow.flow import Limits, ProviderRules, TokenFlow

from ._throttle import MeteredBody, Throttle, Throttled

__all__ = ["ThrottledTransport"]

# The limits decide how many there are. Idle ones are given up before uvicorn, and so vLLM, closes
# them, after 5 seconds: what crosses with that is lost in a ReadError. There is no bound on their
# number, for to enforce one httpcore closes connections that it has just given out (httpcore 1110).
_CONNECTIONS: Final = httpx2.Limits(
    max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0
)


@final
class _Body(MeteredBody, httpx2.AsyncByteStream):
    """A body, as httpx2 wants it."""


@final
class ThrottledTransport(Throttled, httpx2.AsyncBaseTransport):
    """Puts every request of a client through a flow, on its way to another transport.

    >>> import httpx2, tokenflow
    >>> from tokenflow.integrations.httpx2 import ThrottledTransport
    >>> limits = tokenflow.TokenRateLimiter(tokens_per_minute=60_000)
    >>> client = httpx2.AsyncClient(transport=ThrottledTransport(limits))

    It is for async clients only.

    With an SDK: `AsyncOpenAI(http_client=DefaultAsyncHttpxClient(transport=...))`,
    which keeps the SDK's own timeouts; Anthropic's has a class of the same name. Set
    `max_retries` low: the limits do the waiting.

    A request's model, messages, declared maximum and choices are read from its JSON;
    it waits until its tokens fit, and that time is not counted by the SDK's timeouts.
    It is charged what its response, or the end of its stream, reports. A refused
    attempt gives its tokens back, "retry after" holds everyone, and headers that say
    what is left of a quota are heeded. Chat completions report a stream's usage only
    with `stream_options={"include_usage": True}`; without it the estimate stays.
    A 204 is charged for its input; whatever else says nothing keeps the estimate, an
    empty body as well. Embeddings, rerankings, moderations, images and audio reserve no
    output. Requests that it does not understand count by their size; uploads, reads and
    those that only have tokens counted as one request. `call_options` gives a call its
    tenant, priority or task.

    Instead of raising, which SDKs wrap or retry, it answers in the server's place: 413
    with a body that names cost and limit where a call can never fit, 404 where no
    pattern matches its model, and 429 with `Retry-After` where the queue is full or
    `max_wait` is too short.

    Inside an open `flow.request` of the same flow the first POST, and what it is redirected
    to, settles that call; another one, or a second attempt, is a call of its own.

    With a router whose replicas' targets are URLs, a request goes to the one chosen; the
    path in its URL is put before that of the request, unless it is there already.

    Args:
        flow_or_limits: A `TokenFlow`, or whatever it takes as limits.
        transport: What sends; by default one of httpx2 without a bound on connections,
            since the limits decide how many there are. A client with a transport heeds
            no proxies of the environment, and one with `proxy=` or `mounts=` sends past
            the limits: pass `transport=httpx2.AsyncHTTPTransport(proxy=...)` here, as
            well as what else it is to have of `verify`, `cert` and `http2`.
        provider: A `Provider` whose rules hold, where the limits are not one.
    """

    def __init__(
        self,
        flow_or_limits: TokenFlow | Limits,
        transport: httpx2.AsyncBaseTransport | None = None,
        *,
        provider: ProviderRules | None = None,
    ) -> None:
        if transport is None:
            transport = httpx2.AsyncHTTPTransport(limits=_CONNECTIONS)
        self._transport = transport
        self._throttle = Throttle(flow_or_limits, transport, provider, httpx2, _Body)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Wait for room, send, and hand the response on."""
        response: httpx2.Response = await self._throttle.handle(
            request, self._transport.handle_async_request
        )
        return response
