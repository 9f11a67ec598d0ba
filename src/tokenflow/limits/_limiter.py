"""The surface that all limiters share."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Hashable, Iterable
from functools import partial
from typing import Literal, NoReturn

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from tokenflow._errors import QueueFull, WaitTimeout
from tokenflow._run import Bell, Run
from tokenflow._usage import Usage, token_count

from ._admission import Path, settle
from ._fork import Choice, Fork
from ._gate import Gate
from ._lease import CANCELLED, Lease, is_due, log, priced, shown
from ._order import Order
from ._waiter import Booking, Queue, Waiter, checked_wishes

__all__ = ["Limiter", "Oversize"]

Oversize = Literal["raise", "alone"]

_LONG_WAIT = 5.0
_SWEEP = 64  # drop idle paths when there are so many, then at each doubling: O(1) amortised
_SWEEP_FORKS = 1024  # they are more work to make, and weigh no more than a tenant's window,
_SWEEP_OPTIONS = 65_536  # as long as they have few options: half a kilobyte each


class Limiter:
    """The surface of `TokenSemaphore`, `TokenRateLimiter`, `TokenLimits` and `TokenRouter`.

    `cost` is an int (total tokens) or a `Usage`. `priority`: lower goes first.
    `tenant` is any hashable name, for fair sharing and for quotas `by="tenant"`.
    `max_wait` bounds the wait, in seconds: 0 refuses rather than waits. `model`,
    `affinity`, `region` and `exclude` are for routers; what does not concern a
    limiter, it ignores. An int counts as one request, 0 included; a call that costs 0 at every
    gate goes at once. Not for deriving from: to limit something else, write a `Gate`.

    With room and nobody waiting nothing here yields to the event loop: a loop
    that does nothing but reserve starves its neighbours.

    Cancelled while waiting, a call leaves nothing behind, also when it had been
    granted but not resumed yet. A scope that is cancelled already takes nothing.
    """

    __slots__ = (
        "__weakref__",
        "_by_tenants",
        "_choice",
        "_fixed",
        "_paths",
        "_queue",
        "_sweep_at",
    )

    def __init__(self, *, order: Order, max_waiting: int | None, oversize: Oversize) -> None:
        if oversize not in ("raise", "alone"):
            raise ValueError(f'oversize must be "raise" or "alone", not {oversize!r}')
        if not isinstance(order, Order):
            raise TypeError(f"order must be Fifo(), SmallestFirst() or FairShare(), not {order!r}")
        if max_waiting is not None:
            max_waiting = token_count(max_waiting, "max_waiting")
        self._queue = Queue(order.fresh(), max_waiting, alone=oversize == "alone")
        self._paths: dict[Hashable, Path] = {}
        self._sweep_at = _SWEEP
        self._fixed: Path | None = None
        self._choice: Choice | None = None  # where there are replicas to choose from
        self._by_tenants = False  # do its forks depend on the tenant?

    def statistics(self) -> object:
        """Live numbers: a frozen dataclass, its own type for each class. Works from anywhere."""
        raise NotImplementedError  # pragma: no cover

    def _gates(self, tenant: Hashable) -> Iterable[Gate]:
        """The gates of a call by this tenant."""
        raise NotImplementedError  # pragma: no cover

    def _by_tenant(self) -> bool:
        """Does the path depend on the tenant?"""
        raise NotImplementedError  # pragma: no cover

    def reserve(
        self,
        cost: int | Usage,
        *,
        priority: int = 0,
        tenant: Hashable = None,
        max_wait: float | None = None,
        model: str | None = None,
        affinity: Hashable = None,
        region: str | None = None,
        exclude: Collection[str] = (),
    ) -> Lease:
        """`async with limiter.reserve(cost) as lease:` waits for room, and releases at the end.

        >>> import anyio, tokenflow
        >>> async def main():
        ...     async with tokenflow.TokenSemaphore(500_000).reserve(1_200) as lease:
        ...         return lease.usage
        >>> anyio.run(main)
        1200

        It opens no cancel scope and no task group: it may be left in another task.

        Raises:
            TypeError, ValueError: a cost that is no int >= 0 and no Usage.
            RequestTooLarge: the cost could never pass.
            WaitTimeout: it would take, or took, longer than `max_wait`.
            QueueFull: `max_waiting` calls are waiting already.
            NoReplica: a router has none for this call.
        """
        lease = Lease(self, cost, priority, tenant, max_wait)
        if self._choice is not None:
            lease._wishes = (model, affinity, region, exclude)
        return lease

    async def acquire(
        self,
        cost: int | Usage,
        *,
        priority: int = 0,
        tenant: Hashable = None,
        max_wait: float | None = None,
        model: str | None = None,
        affinity: Hashable = None,
        region: str | None = None,
        exclude: Collection[str] = (),
    ) -> Lease:
        """Like `reserve`, for where a block does not fit; the lease is yours to release."""
        lease = Lease(self, cost, priority, tenant, max_wait)
        lease._wishes = (model, affinity, region, exclude)
        return await lease.__aenter__()

    def acquire_nowait(
        self,
        cost: int | Usage,
        *,
        priority: int = 0,
        tenant: Hashable = None,
        model: str | None = None,
        affinity: Hashable = None,
        region: str | None = None,
        exclude: Collection[str] = (),
    ) -> Lease:
        """Like `acquire`, but raises anyio.WouldBlock where that would wait.

        Raises:
            anyio.WouldBlock: no room, or somebody waits who goes before.
            TypeError, ValueError, RequestTooLarge, NoReplica: as for `reserve`.
        """
        lease = Lease(self, cost, priority, tenant, None)
        lease._state = "waiting"
        lease._wishes = (model, affinity, region, exclude)
        lease._check_options()
        path = self._path(lease)
        lease.usage, costs = priced(path, cost)
        now = path.enter().now()
        if not path.admit(lease, costs, now):
            waiter = self._join(path, lease, costs, now)
            if waiter.state == "queued":
                waiter.path.leave(waiter, now)
                raise anyio.WouldBlock(f"no room for {shown(cost)} at {self!r}")
        return lease

    def delay(
        self,
        cost: int | Usage,
        *,
        tenant: Hashable = None,
        model: str | None = None,
        affinity: Hashable = None,
        region: str | None = None,
        exclude: Collection[str] = (),
    ) -> float:
        """Seconds until the gates would take this cost, the queue ignored.

        A lower bound when others wait. 0.0: now; `math.inf`: only a release helps.

        Raises:
            RequestTooLarge, NoReplica: it could never pass.
        """
        lease = Lease(self, cost, 0, tenant, None)
        lease._state = "waiting"
        lease._wishes = (model, affinity, region, exclude)
        path = self._path(lease)
        lease.usage, costs = priced(path, cost)
        now = path.enter().now()
        return max(0.0, path.needed(costs, lease).ready_at(costs, now) - now)

    async def _wait(self, path: Path, lease: Lease, costs: list[int], run: Run) -> None:
        waiter = self._join(path, lease, costs, run.now(), run.bell())
        if waiter.state == "queued":
            try:
                if path.timed or lease._max_wait is not None or self._queue.max_waiting is not None:
                    self._may_wait(waiter, lease._max_wait)
                while waiter.state == "queued":
                    assert waiter.bell is not None
                    await waiter.bell.wait()
                    if waiter.state == "queued":
                        self._rung(waiter, run.now())
                if run.effective_deadline() == CANCELLED:
                    await checkpoint_if_cancelled()
            except BaseException:
                lease._waited = run.now() - waiter.arrived
                self._withdraw(waiter)
                raise
            now = run.now()
            lease._waited = now - waiter.arrived
            if lease._waited > _LONG_WAIT:
                self._log_wait(lease._waited, "waited", lease, now)
        if waiter.error is not None:
            raise waiter.error

    def _join(
        self, path: Path, lease: Lease, costs: list[int], now: float, bell: Bell | None = None
    ) -> Waiter:
        """Queue a call, which grants it where that is possible; refuse an impossible one."""
        needed = path.needed(costs, lease)
        if needed is not path:
            needed.enter()
        waiter = Waiter(needed, lease, costs, now, bell)
        needed.join(waiter, now)
        return waiter

    def _may_wait(self, waiter: Waiter, max_wait: float | None) -> None:
        """Refuse to wait where that is known to be in vain."""
        queue, now = self._queue, waiter.arrived
        if queue.is_too_full_for(waiter.lease.tenant):
            self._withdraw(waiter)  # the message does not count it
            raise QueueFull(
                f"{queue.waiting} calls wait at {self!r} already, at most {queue.max_waiting} may"
                f"{', or a tenant its share of them' if queue.places else ''}: try again later, or "
                "raise max_waiting",
                retry_after=_retry_after(waiter, now),
            )
        delay = waiter.path.ready_at(waiter.costs, now) - now
        if max_wait is not None:
            if max_wait == 0 or max_wait < delay < math.inf:
                raise self._timeout(waiter, max_wait, now)
            waiter.deadline = now + max_wait
            waiter.arm()
        if _LONG_WAIT < delay < math.inf:
            self._log_wait(delay, "will wait", waiter.lease, now)

    def _rung(self, waiter: Waiter, now: float) -> None:
        """Awake but not granted: an alarm. Look at the gates again, or give up."""
        waiter.alarm = math.inf
        if waiter.path.head is waiter:
            settle(list(waiter.path.stands), (), now)
        if waiter.state == "queued":
            if now >= waiter.deadline:
                raise self._timeout(waiter, waiter.deadline - waiter.arrived, now)
            waiter.arm()

    def _timeout(self, waiter: Waiter, max_wait: float, now: float) -> WaitTimeout:
        retry_after = _retry_after(waiter, now)
        when = "only a release helps"
        if retry_after is not None:
            when = f"{retry_after:.3g} s at the earliest, more if others wait"
        self._withdraw(waiter)  # the message does not count it
        return WaitTimeout(
            f"no room for {waiter.lease.tokens:,} tokens within max_wait={max_wait:g} s at "
            f"{self!r}: {when}; retry then, or allow a longer wait",
            retry_after=retry_after,
        )

    def _withdraw(self, waiter: Waiter) -> None:
        """The caller will not have it: as if it had never asked."""
        now = waiter.path.enter().now()
        if waiter.state == "queued":
            waiter.path.leave(waiter, now)
        elif waiter.state == "granted":
            waiter.lease.cancel()

    def _path(self, lease: Booking) -> Path:
        """The path of a call; those that nobody waits on are dropped now and then."""
        if self._fixed is not None:
            return self._fixed
        if self._choice is not None:
            model, affinity, region, exclude = lease._wishes
            if exclude or affinity is not None or region is not None:
                lease._wishes = checked_wishes(model, affinity, region, exclude)
            return self._fork(lease.tenant, model)
        if not self._by_tenant():
            self._fixed = Path(self._queue, self._gates(None))
            return self._fixed
        tenant = lease.tenant
        path = self._paths.get(tenant)
        if path is None:
            self._sweep()
            path = self._paths[tenant] = Path(self._queue, self._gates(tenant))
        return path

    def _fork(self, tenant: Hashable, model: str | None) -> Path:
        """The path of calls by this tenant for this model: to any of its replicas."""
        path = self._paths.get((tenant, model) if self._by_tenants else model)
        if path is None or path.is_obsolete:
            path = self._new_fork(tenant, model)
        return path

    def _new_fork(self, tenant: Hashable, model: str | None) -> Fork:
        assert self._choice is not None
        ways = {each: list(each.gates(tenant)) for each in self._choice.options(model)}
        self._sweep(min(_SWEEP_FORKS, _SWEEP_OPTIONS // len(ways)))
        self._by_tenants = self._by_tenant()
        renew = partial(self._fork, tenant, model)
        fork = Fork(self._queue, list(self._gates(tenant)), ways, self._choice, renew)
        self._paths[(tenant, model) if self._by_tenants else model] = fork
        return fork

    def _sweep(self, least: int = _SWEEP) -> None:
        if len(self._paths) >= max(least, self._sweep_at):
            self._paths = {key: path for key, path in self._paths.items() if path.waiting}
            self._sweep_at = max(_SWEEP, 2 * len(self._paths))

    def _log_wait(self, waited: float, verb: str, lease: Booking, now: float) -> None:
        if is_due(self._queue.wait_logged_at, now):
            self._queue.wait_logged_at = now
            log(logging.INFO, "%s %.1f s for %s at %r", verb, waited, shown(lease.usage), self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: each process would get the whole "
            "quota; build it in each process, or share it through a server"
        )


def _retry_after(waiter: Waiter, now: float) -> float | None:
    delay = waiter.path.ready_at(waiter.costs, now) - now
    return max(0.0, delay) if delay < math.inf else None
