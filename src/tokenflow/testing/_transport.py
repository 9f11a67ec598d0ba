"""A transport for httpx or httpx2 that leads to a fake, in process, chunk by chunk."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import anyio

from ._faults import ConnectionDropped

if TYPE_CHECKING:
    from ._answer import Answer
    from ._provider import FakeProvider

__all__ = ["transport"]


def transport(provider: FakeProvider, httpx: ModuleType) -> Any:
    """The body of `FakeProvider.transport`."""

    async def within(seconds: float | None, answer: Any) -> Any:
        """What `answer` returns in time, as the client's library reports it."""
        try:
            with anyio.fail_after(seconds):
                return await answer
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"nothing was read for {seconds} s") from error
        except ConnectionDropped as error:
            raise httpx.RemoteProtocolError(str(error)) from error

    class Stream(httpx.AsyncByteStream):  # type: ignore[misc, name-defined]
        def __init__(self, answer: Answer, timeout: float | None) -> None:
            self._answer = answer
            self._timeout = timeout

        def __aiter__(self) -> Stream:
            return self

        async def __anext__(self) -> bytes:
            chunk: bytes = await within(self._timeout, self._answer.__anext__())
            return chunk

        async def aclose(self) -> None:
            await self._answer.aclose()

    class Transport(httpx.AsyncBaseTransport):  # type: ignore[misc, name-defined]
        async def handle_async_request(self, request: Any) -> Any:
            body = await request.aread()
            timeout = request.extensions.get("timeout", {}).get("read")
            answer = await within(
                timeout,
                provider.respond(
                    request.method, request.url.path, headers=dict(request.headers), body=body
                ),
            )
            return httpx.Response(
                answer.status, headers=answer.headers, stream=Stream(answer, timeout)
            )

    return Transport()
