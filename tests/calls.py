"""Calls in tasks of their own, for tests that step through who goes when."""

from types import SimpleNamespace, TracebackType
from typing import Any, Self

import anyio
from anyio import wait_all_tasks_blocked

from tokenflow import Lease, TokenflowError, Usage
from tokenflow.limits import Limiter


class Refused(Exception):
    """As the SDKs raise them: with the response."""

    def __init__(self, status_code: int, **headers: str) -> None:
        super().__init__(f"status {status_code}")
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.response = SimpleNamespace(status_code=status_code, headers=named)


class Calls:
    """Each call has a name: it asks, notes that it started, and stays until it is told to end.

    All that have not ended when the block is left are cancelled.
    """

    def __init__(self) -> None:
        self.started: list[str] = []
        self.errors: dict[str, TokenflowError] = {}
        self.leases: dict[str, Lease] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._ends: dict[str, anyio.Event] = {}
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(exc_type, exc, traceback)

    async def start(
        self, limiter: Limiter, cost: int | Usage, *names: str, **options: Any
    ) -> list[str]:
        """Start these one by one, each until it waits or is in its body; tells who has started."""
        for name in names:
            self._tasks.start_soon(self._call, limiter, cost, name, options)
            await wait_all_tasks_blocked()
        return self.started

    async def end(self, *names: str) -> list[str]:
        """End these; tells who has started by the time everything waits again."""
        for name in names:
            self._ends[name].set()
        await wait_all_tasks_blocked()
        return self.started

    def cancel(self, *names: str) -> None:
        """Cancel these, without letting anything run."""
        for name in names:
            self._scopes[name].cancel()

    async def _call(
        self, limiter: Limiter, cost: int | Usage, name: str, options: dict[str, Any]
    ) -> None:
        self._ends[name] = end = anyio.Event()
        with anyio.CancelScope() as self._scopes[name]:
            try:
                async with limiter.reserve(cost, **options) as self.leases[name]:
                    self.started.append(name)
                    await end.wait()
            except TokenflowError as error:
                self.errors[name] = error
