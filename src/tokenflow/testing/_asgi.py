"""A fake as an ASGI app: what the client does, and does not wait for, reaches it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Final, TypeAlias

import anyio

from ._answer import Answer

__all__ = ["Message", "Receive", "Send", "lifespan", "serve"]

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Respond: TypeAlias = Callable[[bytes], Awaitable[Answer]]

# No ASGI message closes a connection. But a server that has begun to answer cannot answer
# 500 when the app fails, and it begins when it is given headers, even if it refuses them.
_HEADERS_NOBODY_SENDS: Final = [(b"\0", b"\0")]


async def serve(respond: Respond, receive: Receive, send: Send) -> None:
    """Answer one request, unless its client goes away."""
    failure: Exception | None = None
    if (body := await _body(receive)) is None:
        return
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_when_disconnected, receive, tasks.cancel_scope)
        try:
            await _answer(respond(body), send)
        except Exception as error:  # raised outside: a task group would wrap it in a group
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _answer(responding: Awaitable[Answer], send: Send) -> None:
    try:
        answer = await responding
    except OSError:
        with suppress(Exception):
            await send(_start(500, _HEADERS_NOBODY_SENDS))
        raise
    async with answer:
        headers = [(name.encode(), value.encode()) for name, value in answer.headers]
        await send(_start(answer.status, headers))
        async for chunk in answer:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _body(receive: Receive) -> bytes | None:
    """What the client sends; None where it does not stay that long."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _cancel_when_disconnected(receive: Receive, scope: anyio.CancelScope) -> None:
    await receive()  # after the body there is only one thing left to tell
    scope.cancel()


async def lifespan(receive: Receive, send: Send) -> None:
    """There is nothing to start and nothing to stop."""
    for stage in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{stage}.complete"})
