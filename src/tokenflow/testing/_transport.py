"""A fake as the transport of an httpx or httpx2 client: in process, chunk by chunk.

Each of the two accepts only streams of its own kind, so their classes are made
from the module that the user's client comes from.
"""

from __future__ import annotations

from collections.abc import Awaitable
from types import ModuleType
from typing import Any, Protocol, Self, TypeVar

import anyio

from ._answer import Answer
from ._faults import ConnectionDropped

__all__ = ["Responder", "transport"]

T = TypeVar("T")


class Responder(Protocol):
    """What the transport needs of a `FakeProvider`."""

    async def respond(
        self, method: str, path: str, *, headers: dict[str, str], body: bytes
    ) -> Answer:
        """Answer one request."""
        ...


class _Link:
    """Errors and timeouts as the library of one client has them."""

    def __init__(self, httpx: ModuleType, read_timeout: float | None) -> None:
        self._httpx: Any = httpx
        self._timeout = read_timeout

    async def read(self, step: Awaitable[T]) -> T:
        try:
            with anyio.move_on_after(self._timeout):
                return await step
        except ConnectionDropped as error:
            raise self._httpx.RemoteProtocolError(str(error)) from error
        except ConnectionRefusedError as error:
            raise self._httpx.ConnectError(str(error)) from error
        raise self._httpx.ReadTimeout(f"nothing came for {self._timeout:g} s")


class _Stream:
    def __init__(self, link: _Link, answer: Answer) -> None:
        self._link = link
        self._answer = answer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        return await self._link.read(self._answer.__anext__())

    async def aclose(self) -> None:
        await self._answer.aclose()


class _Transport:
    def __init__(self, httpx: ModuleType, provider: Responder) -> None:
        self._httpx: Any = httpx
        self._stream: Any = type("FakeStream", (_Stream, self._httpx.AsyncByteStream), {})
        self._provider = provider

    def __repr__(self) -> str:
        return f"<FakeTransport of {self._httpx.__name__} to {self._provider!r}>"

    async def handle_async_request(self, request: Any) -> Any:
        link = _Link(self._httpx, request.extensions.get("timeout", {}).get("read"))
        headers, body = dict(request.headers), await request.aread()
        answer = await link.read(
            self._provider.respond(request.method, request.url.path, headers=headers, body=body)
        )
        stream = self._stream(link, answer)
        return self._httpx.Response(answer.status, headers=answer.headers, stream=stream)


def transport(httpx: Any, provider: Responder) -> Any:
    """The body of `FakeProvider.transport`."""
    return type("FakeTransport", (_Transport, httpx.AsyncBaseTransport), {})(httpx, provider)
