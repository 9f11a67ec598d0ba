"""The SDKs look the platform up in a thread, and virtual time knows no threads."""

import importlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any


def inline(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def call(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return call


for name in ("openai", "anthropic"):
    with suppress(ImportError):
        client: Any = importlib.import_module(f"{name}._base_client")
        client.asyncify = inline
