"""What a throttled transport does, whatever the HTTP library: that of `httpx2.py` and `httpx.py`.

Each attempt of an SDK is a call of its own: it reserves, goes, and reconciles. The
call lives as long as the response's body. Inside an open `flow.request` block the
first attempt is that call. A redirect has used nothing; who follows it calls anew.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, TracebackType
from typing import Any, Final, Protocol, Self, final
from weakref import finalize

from anyio import to_thread

from tokenflow._errors import (
    NoReplica,
    QueueFull,
    RequestTooLarge,
    TokenflowError,
    UnknownModel,
    WaitTimeout,
)
from tokenflow._run import OUTSIDE, current_run
from tokenflow._usage import Usage
from tokenflow.flow import Call, Limits, ProviderRules, TokenFlow
from tokenflow.flow._call import open_call
from tokenflow.limits._lease import log

from ._bodies import Reader, Unread, described, only_counts, parsed, reader

__all__ = ["MeteredBody", "Throttle", "Throttled"]

_IN_LOOP: Final = 1 << 19  # bytes of JSON: some milliseconds
_LONGEST_ERROR: Final = 1 << 16  # bytes that are looked at
_READABLE: Final = "gzip, deflate"
_BODILESS: Final = (204, 205)  # by what they mean; any other may have lost its body on the way


class Throttle:
    """One for each transport."""

    __slots__ = ("_body", "_flow", "_http", "_rules")

    def __init__(
        self,
        flow_or_limits: TokenFlow | Limits,
        transport: object,
        rules: ProviderRules | None,
        http: ModuleType,
        body: Callable[[Any, Reader, Callable[[BaseException | None], None]], Any],
    ) -> None:
        if not isinstance(flow_or_limits, TokenFlow):
            flow_or_limits = TokenFlow(flow_or_limits)
        if not hasattr(transport, "handle_async_request"):
            name = http.__name__
            raise TypeError(
                f"transport must be an async transport of {name}, not {transport!r}; of a "
                f"FakeProvider pass fake.transport({name})"
            )
        self._flow: TokenFlow = flow_or_limits
        self._rules = rules
        self._http = http
        self._body = body

    async def handle(self, request: Any, send: Callable[[Any], Awaitable[Any]]) -> Any:
        """Wait for room, send, and hand the response on; or answer in the server's place."""
        if not isinstance(request, self._http.Request):
            theirs, ours = type(request).__module__.partition(".")[0], self._http.__name__
            raise TypeError(
                f"this client is of {theirs} and its transport of {ours}: take the "
                f"ThrottledTransport of tokenflow.integrations.{theirs}"
            )
        generates = _may_generate(request)
        call = open_call(self._flow) if generates else None
        is_own = call is None
        if call is None:
            call = self._flow.request(**await _asked(request), rules=self._rules)
            try:
                await call.begin()
            except (RequestTooLarge, NoReplica, UnknownModel, QueueFull, WaitTimeout) as error:
                return self._answer(error)
        end = call.close if is_own else _end_of(call)
        try:
            _ask_for_what_can_be_read(request)
            with _aimed_at(getattr(call.replica, "target", None), request):
                response = await send(request)
            try:
                return await self._passed_on(call, response, end, generates=generates)
            except BaseException:
                await response.aclose()
                raise
        except BaseException as error:
            end(error)
            raise

    async def _passed_on(
        self,
        call: Call,
        response: Any,
        end: Callable[[BaseException | None], None],
        *,
        generates: bool,
    ) -> Any:
        is_read = response.is_closed  # below, or it was made whole, as mocks do
        headers = _unpacked(response.headers) if is_read else response.headers
        if response.status_code >= 300:
            if response.status_code < 400:
                call.redirected()
            else:
                await self._refused(call, response, headers)
            end(None)
            return response
        call.observe(response.headers)
        read_along: Reader = Unread()
        if generates:  # what others report was another call's
            if response.status_code in _BODILESS:
                call.reconcile(Usage(input_tokens=call.request.input_tokens))
            read_along = reader(headers, call.meter, call.reconcile)
        if is_read:
            read_along.feed(_content(response))
            read_along.finish()
            end(None)
        else:
            response.stream = self._body(response.stream, read_along, end)
        return response

    async def _refused(self, call: Call, response: Any, headers: Any) -> None:
        """Read an error's body, which says what it means, and hand it on as it was."""
        raw = b""
        try:
            if response.is_closed:
                raw = _content(response)
            else:
                raw = await self._head(response)
        finally:  # what its head says counts, whatever becomes of its body
            refusal = call.failed(self._copy(response, headers, raw))
            if refusal is not None and refusal.kind in ("too_large", "exhausted"):
                response.headers["x-should-retry"] = "false"  # else an SDK would, in vain

    async def _head(self, response: Any) -> bytes:
        """Its body, or the begin of one that is long; whoever has the response can read it all."""
        head = bytearray()
        rest = self._body(response.stream, Unread(), _nothing)
        async for chunk in rest:
            head += chunk
            if len(head) > _LONGEST_ERROR:
                response.stream = self._body(_Joined(bytes(head), rest), Unread(), _nothing)
                return bytes(head)
        await rest.aclose()
        response.stream = self._http.Response(200, content=bytes(head)).stream
        return bytes(head)

    def _copy(self, response: Any, headers: Any, raw: bytes) -> Any:
        """One that can be looked into."""
        try:
            return self._http.Response(response.status_code, headers=headers, content=raw)
        except Exception:  # it is not packed as it says
            return self._http.Response(response.status_code, headers=_unpacked(headers))

    def _answer(self, error: TokenflowError) -> Any:
        """An answer in the server's place, in the shape that SDKs know."""
        status, kind = _STATUS[type(error)]
        headers = {"x-tokenflow-error": kind, "content-type": "application/json"}
        retry_after = getattr(error, "retry_after", None)
        if status != 429:
            headers["x-should-retry"] = "false"
        elif retry_after is not None:
            headers["retry-after"] = str(math.ceil(retry_after))
            headers["retry-after-ms"] = str(math.ceil(1000 * retry_after))
        body = {"message": f"{error}", "type": kind, "code": kind, "param": None}
        for name in ("cost", "limit", "largest", "retry_after"):
            if getattr(error, name, None) is not None:
                body[name] = getattr(error, name)
        content = json.dumps({"type": "error", "error": body}).encode()
        return self._http.Response(status, headers=headers, content=content)


_STATUS: Final[dict[type[TokenflowError], tuple[int, str]]] = {
    RequestTooLarge: (413, "request_too_large"),
    NoReplica: (413, "no_replica"),
    UnknownModel: (404, "unknown_model"),
    QueueFull: (429, "queue_full"),
    WaitTimeout: (429, "wait_timeout"),
}


async def _asked(request: Any) -> dict[str, Any]:
    """What a request asks for: the arguments of `flow.request`."""
    kind, _, _ = request.headers.get("content-type", "json").partition(";")
    is_json = "json" in kind.lower()
    if request.method != "POST" or not is_json:  # an upload, which may be too large to be read
        return {"input_tokens": 0, "max_output_tokens": 0}
    content: bytes = await request.aread()
    large = len(content) > _IN_LOOP
    body = await to_thread.run_sync(parsed, content) if large else parsed(content)
    return described(request.url.path, content, is_json, body)


def _may_generate(request: Any) -> bool:
    return request.method == "POST" and not only_counts(request.url.path)


def _ask_for_what_can_be_read(request: Any) -> None:
    accepted = request.headers.get("accept-encoding", "")
    if "br" in accepted or "zstd" in accepted:
        request.headers["accept-encoding"] = _READABLE


@contextmanager
def _aimed_at(target: object, request: Any) -> Iterator[None]:
    """With a router whose replicas have URLs: at the one that was chosen, for this once."""
    if not isinstance(target, str) or not target.startswith(("http://", "https://")):
        yield
        return
    asked, host = request.url, request.headers.get("host", "")
    base = type(asked)(target)
    prefix, path = base.raw_path.rstrip(b"/"), asked.raw_path
    if not path.startswith((prefix + b"/", prefix + b"?")):  # a redirect names the whole of it
        path = prefix + path
    request.url = asked.copy_with(
        scheme=base.scheme,
        host=base.host,
        port=base.port,
        raw_path=path,
    )
    request.headers["host"] = base.netloc.decode()
    try:
        yield
    finally:  # whoever sends the same request again may be sent elsewhere
        request.url, request.headers["host"] = asked, host


def _unpacked(headers: Any) -> Any:
    """Those of the same body, not compressed; a copy that keeps what is not ASCII."""
    headers = headers.copy()
    headers.pop("content-encoding", None)
    return headers


def _content(response: Any) -> bytes:
    """Of one that is closed; nothing if it was not read."""
    try:
        content: bytes = response.content
    except RuntimeError:
        return b""
    return content


def _end_of(call: Call) -> Callable[[BaseException | None], None]:
    """The end of one attempt within a call whose block will end the call itself."""

    def end(error: BaseException | None) -> None:
        if error is not None and not call.is_told:
            call.failed(error)

    return end


class Throttled:
    """A transport that is throttled, as far as it is the same for every HTTP library."""

    _transport: Any
    _throttle: Throttle

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._transport.__aexit__(exc_type, exc, traceback)

    async def aclose(self) -> None:
        """Close the transport below."""
        await self._transport.aclose()

    def __repr__(self) -> str:
        return f"<ThrottledTransport over {self._transport!r}>"


class Source(Protocol):
    """A body as the HTTP library gives it."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None: ...


def _nothing(error: BaseException | None) -> None:
    """The end of what has been settled already."""


@final
class _Joined:
    """What has been read of a body, and the rest of it."""

    __slots__ = ("_head", "_rest")

    def __init__(self, head: bytes, rest: Source) -> None:
        self._head = head
        self._rest = rest

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._head
        async for chunk in self._rest:
            yield chunk

    async def aclose(self) -> None:
        await self._rest.aclose()


class MeteredBody:
    """A response's body on its way through: read along, and its call ended with it.

    Whoever stops reading closes it, as HTTP clients do; one that is only dropped is
    ended after the garbage collector found it, which may be in any thread, and in the
    middle of a step.
    """

    def __init__(
        self, source: Source, read_along: Reader, end: Callable[[BaseException | None], None]
    ) -> None:
        self._source = source
        self._chunks = aiter(source)
        self._reader = read_along
        self._end = end
        run = current_run() or OUTSIDE
        # Not __del__: this keeps the call from being garbage together with its body.
        self._if_dropped = finalize(self, run.call_soon, partial(_let_go, read_along, end))
        self._if_dropped.atexit = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk = await anext(self._chunks)
        except StopAsyncIteration:
            self._over(self._reader.finish)
            raise
        except BaseException as error:
            self._over(self._reader.close, error)
            raise
        self._reader.feed(chunk)
        return chunk

    async def aclose(self) -> None:
        try:
            self._over(self._reader.close)
            is_in_use = getattr(self._chunks, "ag_running", False)  # by another task, which it ends
            if isinstance(self._chunks, AsyncGenerator) and not is_in_use:
                await self._chunks.aclose()
        finally:
            await self._source.aclose()

    def _over(self, settle: Callable[[], None], error: BaseException | None = None) -> None:
        if self._if_dropped.detach() is not None:  # else it is over already
            try:
                settle()
            finally:
                self._end(error)


def _let_go(read_along: Reader, end: Callable[[BaseException | None], None]) -> None:
    try:
        try:
            read_along.close()
        finally:
            end(None)
    except Exception as error:
        log(logging.ERROR, "a response that was dropped could not be settled: %r", error)
