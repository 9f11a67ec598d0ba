"""Options of a call that its caller cannot pass along, in a context variable."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final, final

from tokenflow.limits._lease import check_options
from tokenflow.limits._waiter import check_hashable, checked_wishes

__all__ = ["CallOptions", "call_options", "current_options"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What `call_options` sets; None is not set."""

    task: str | None = None
    tenant: Hashable = None
    priority: int | None = None
    max_wait: float | None = None
    affinity: Hashable = None
    region: str | None = None


_NOTHING: Final = CallOptions()
_current: Final = ContextVar("tokenflow.call_options", default=_NOTHING)


def current_options() -> CallOptions:
    """Those that hold here."""
    return _current.get()


@contextmanager
def call_options(
    *,
    task: str | None = None,
    tenant: Hashable = None,
    priority: int | None = None,
    max_wait: float | None = None,
    affinity: Hashable = None,
    region: str | None = None,
) -> Iterator[CallOptions]:
    """Options for every call made inside, by `flow.request` and by the transports.

    An SDK's methods have no argument for a tenant or a priority: this carries them
    past it. They hold in this task and in tasks started inside. Blocks nest, the
    inner one wins where both say something, and an argument of `flow.request` wins
    over both. None says nothing.

    >>> from tokenflow import call_options
    >>> with call_options(tenant="acme", priority=1):
    ...     with call_options(task="chat") as options:
    ...         options.tenant, options.task
    ('acme', 'chat')

    Raises:
        TypeError, ValueError: what no call could be made with.
    """
    said: dict[str, Any] = {
        "task": task,
        "tenant": tenant,
        "priority": priority,
        "max_wait": max_wait,
        "affinity": affinity,
        "region": region,
    }
    outer = _current.get()
    options = replace(outer, **{name: value for name, value in said.items() if value is not None})
    _check(options)
    _current.set(options)
    try:
        yield options
    finally:  # not reset(token): a block in an async generator may be left in another context
        _current.set(outer)


def _check(options: CallOptions) -> None:
    """Here, where it is raised as it is: out of a transport, SDKs take it for a lost connection."""
    if not isinstance(options.task, str | None):
        raise TypeError(f"task must be a str or None, not {options.task!r}")
    check_hashable(options.tenant, "tenant")
    check_options(0 if options.priority is None else options.priority, options.max_wait)
    checked_wishes(None, options.affinity, options.region, ())
