"""Random operations on limiters that share gates, checked at each step against a naive model.

The naive model of a window is the whole log. `CheckedWindow` puts it beside every
ledger that the limiters make, and compares each answer.
"""

import logging
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import anyio

from tokenflow import (
    FairShare,
    Lease,
    Quota,
    QuotaStatus,
    RateLimitStatus,
    Replica,
    SmallestFirst,
    TokenflowError,
    TokenLimits,
    TokenRateLimiter,
    TokenRouter,
    TokenSemaphore,
    Usage,
)
from tokenflow.limits import Limiter, WindowGate
from tokenflow.limits._admission import Path
from tokenflow.limits._fork import Fork
from tokenflow.limits._turnstile import Turnstile, turnstile
from tokenflow.limits._waiter import Waiter

PER = 10.0

Op = tuple[str, int, int]
"""What to do, to which one, with how much."""

OPS = (
    "ask",
    "ask",
    "ask",
    "nowait",
    "cancel task",
    "release",
    "release",
    "progress",
    "reconcile",
    "cancel",
    "resize",
    "set limit",
    "pause",
    "observe",
    "cooldown",
    "drain",
    "restore",
    "restore",
    "replace",
    "failed",
    "turn",
    "turn",
    "turn",
    "sleep",
    "sleep",
)


class CheckedWindow:
    """A WindowGate, and beside it the exact log of what it was charged."""

    in_flight = False
    timed = True

    def __init__(self, limit: int, per: float, **settings: Any) -> None:
        self.real = WindowGate(limit, per, **settings)
        self.log: list[list[float]] = []  # [when, amount]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    @property
    def limit(self) -> int:
        return self.real.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self.real.limit = limit

    def sum_since(self, now: float, per: float) -> float:
        return sum(amount for when, amount in self.log if now - when < per)

    def check(self, now: float) -> None:
        others = sum(amount for leaves, amount in self.real._others if now < leaves)
        own = self.real.used_at(now) - others
        assert self.sum_since(now, PER) <= own <= self.sum_since(now, PER * 1.001)
        assert self.real.used == sum(self.real._amounts[self.real._first :])
        assert self.real.used == sum(self.real._blocks)
        assert min(self.real._amounts, default=0) >= 0

    def ready_at(self, cost: int, now: float) -> float:
        at = self.real.ready_at(cost, now)
        self.check(now)
        if at <= now:
            assert self.sum_since(now, PER) + cost <= self.limit
        elif at < math.inf and not self.real._foreign and not self.real.paused_for(now):
            assert self.sum_since(now, PER * 1.001) + cost > self.limit
            assert self.sum_since(at, PER) + cost <= self.limit
        return at

    def charge(self, cost: int, now: float) -> list[Any]:
        entry = [now, float(cost)]
        self.log.append(entry)
        return [self.real.charge(cost, now), entry]

    def undo(self, charge: list[Any], now: float) -> None:
        self.real.undo(charge[0], now)
        for entry in charge[1:]:
            entry[1] = 0.0
        self.check(now)

    def correct(self, charge: list[Any], cost: int, now: float) -> list[Any]:
        real, *entries = charge
        real = self.real.correct(real, cost, now)
        over = cost - sum(amount for _, amount in entries)
        if over > 0:
            entries.append([now, over])
            self.log.append(entries[-1])
        for entry in reversed(entries):  # what has left the window takes its share all the same
            given = min(entry[1], max(0, -over))
            entry[1] -= given
            over += given
        self.check(now)
        return [real, *entries]


@dataclass
class World:
    """Limiters that share gates, the calls that wait at them, and the leases that they gave."""

    tasks: anyio.abc.TaskGroup
    leases: list[Lease] = field(default_factory=list)
    scopes: list[anyio.CancelScope] = field(default_factory=list)
    waits: int = 0
    grants: int = 0

    def __post_init__(self) -> None:
        self.semaphore = TokenSemaphore(100, max_requests=6)
        self.rate = TokenRateLimiter(
            Quota(200, per=PER), Quota(30, per=PER, of="requests"), order=SmallestFirst()
        )
        self.tenants = TokenRateLimiter(Quota(80, per=PER, by="tenant"))
        self.limiters: list[Limiter] = [
            self.semaphore,
            self.rate,
            self.tenants,
            TokenLimits(self.semaphore, self.rate),
            TokenLimits(self.semaphore, self.tenants, self.rate, order=FairShare({"a": 3})),
            TokenLimits(self.rate, self.semaphore, oversize="alone"),
        ]
        self.router = TokenRouter(
            [
                Replica("a", max_tokens=60, limiter=self.rate),
                Replica("b", max_tokens=90, max_requests=3, model="m", region="eu"),
                Replica("c", context_window=50, limiter=TokenLimits(self.semaphore, self.tenants)),
            ]
        )
        self.limiters += [
            self.router,
            TokenLimits(self.router, self.tenants, order=SmallestFirst()),
            TokenLimits(self.semaphore, self.router, order=FairShare(), oversize="alone"),
        ]

    async def call(self, limiter: Limiter, cost: int, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                lease = await limiter.acquire(
                    cost,
                    priority=cost % 3,
                    tenant="abc"[cost % 3],
                    max_wait=40 if cost % 5 else 3,
                    model="m" if cost % 4 else None,
                    affinity=cost % 2,
                    exclude=("b",) if cost % 7 == 0 else (),
                )
            except TokenflowError:
                return
            finally:
                self.scopes.remove(scope)
            self.grants += 1
            self.waits += lease.waited > 0
            self.leases.append(lease)

    def apply(self, what: str, which: int, amount: int) -> None:
        """One operation, in one synchronous step."""
        limiter = self.limiters[which % len(self.limiters)]
        if what == "ask":
            scope = anyio.CancelScope()
            self.scopes.append(scope)
            self.tasks.start_soon(self.call, limiter, amount, scope)
        elif what == "nowait":
            with suppress(anyio.WouldBlock, TokenflowError):
                self.leases.append(limiter.acquire_nowait(amount, tenant="abc"[which % 3]))
        elif what == "cancel task" and self.scopes:
            self.scopes[which % len(self.scopes)].cancel()
        elif what == "resize":
            self.semaphore.max_tokens = amount
        elif what == "set limit":
            self.rate.set_limit("tokens", 100 + amount)
        elif what == "pause":
            self.rate.pause(amount / 50)
        elif what in ("cooldown", "drain", "restore"):
            name, settings = "abc"[which % 3], (amount / 50,) if what == "cooldown" else ()
            getattr(self.router, what)(name, *settings)
        elif what == "replace":
            replica = self.router.replicas[which % 3]
            self.router.remove(replica.name)
            self.router.add(replica)
        elif what == "observe":
            status = QuotaStatus(of="tokens", remaining=amount * 2, reset=amount / 20)
            self.rate.observe(RateLimitStatus(quotas=(status,)))
        elif self.leases:
            self.apply_to_lease(what, self.leases[which % len(self.leases)], amount)

    def apply_to_lease(self, what: str, lease: Lease, amount: int) -> None:
        if what in ("release", "cancel"):
            self.leases.remove(lease)
        if what == "release":
            lease.release()
        elif what == "cancel":
            lease.cancel()
        elif what == "progress":
            lease.progress(Usage(input_tokens=amount))
        elif what == "reconcile":
            lease.reconcile(amount)
        elif what == "failed":
            lease.failed()

    def check(self) -> None:
        """What holds whenever all tasks wait."""
        now = anyio.current_time()
        tokens, requests = self.semaphore._gates(None)
        held = [lease for lease in self.leases if tokens in lease._path.gates]
        assert tokens.used == sum(lease.tokens for lease in held)  # type: ignore[attr-defined]
        assert requests.used == len(held)  # type: ignore[attr-defined]
        for replica, ledger in zip(self.router.replicas, self.router._fleet, strict=True):
            held = [lease for lease in self.leases if ledger in lease._path.gates]
            assert ledger.used == sum(lease.tokens or 1 for lease in held)
            assert ledger.calls == len(held)
            assert all(lease.replica is replica for lease in held)
        for limiter in self.limiters:
            waiting = 0
            for path in paths_of(limiter):
                waiting += path.waiting
                if path.waiting:
                    self.check_head(path, now)
            assert limiter._queue.waiting == waiting

    def check_head(self, path: Path, now: float) -> None:
        """Nobody waits for nothing: some gate refuses the head, or somebody goes before it."""
        head = path.head
        assert path.stands
        if not isinstance(path, Fork):
            stations = [(each, i) for i, each in enumerate(path.turnstiles)]
            assert self.is_refused(head, stations, now)
        elif not self.is_refused(head, path._required, now):
            assert all(self.is_refused(head, way, now) for way in path._ways.values())

    def is_refused(self, head: Waiter, stations: list[tuple[Turnstile, int]], now: float) -> bool:
        """Has some gate no room for it, or is it barred there?"""
        return any(
            each.bars(head) or each.gate.ready_at(head.path._asked(each.gate, cost), now) > now
            for each, i in stations
            if (cost := head.costs[i])
        )

    async def end(self) -> None:
        """All leave; afterwards nothing is held anywhere, and the windows run empty."""
        for scope in list(self.scopes):
            scope.cancel()
        await anyio.wait_all_tasks_blocked()
        for lease in self.leases:
            lease.release()
        self.leases.clear()
        self.check()
        for name in "abc":
            self.router.restore(name)
        assert not any(each.tokens_in_flight for each in self.router.statistics().replicas)
        await anyio.sleep(PER * 1.01)
        self.semaphore.max_tokens = 100
        self.rate.set_limit("tokens", 200)
        assert self.semaphore.statistics().tokens_in_flight == 0
        assert self.semaphore.statistics().requests_in_flight == 0
        assert [q.used for q in self.rate.statistics().quotas] == [0, 0]
        assert self.tenants.statistics().quotas[0].used == 0
        assert all(limiter._queue.waiting == 0 for limiter in self.limiters)
        assert all(limiter._queue.waiting_tokens == 0 for limiter in self.limiters)
        with self.limiters[4].acquire_nowait(80, tenant="a") as lease:
            assert lease.waited == 0


def paths_of(limiter: Limiter) -> list[Path]:
    """All paths of one limiter, whatever they need."""
    tenants = ("a", "b", "c", None)
    gates = [gate for tenant in tenants for gate in limiter._gates(tenant)]
    for ledger in limiter._choice.options(None) if limiter._choice is not None else ():
        gates += [gate for tenant in tenants for gate in ledger.gates(tenant)]
    paths = {path for gate in gates for path in turnstile(gate).paths}
    return [path for path in paths if path.queue is limiter._queue]


async def drive(ops: list[Op]) -> World:
    """Apply all operations, checking what holds whenever all tasks wait."""
    logging.getLogger("tokenflow").setLevel(logging.ERROR)
    try:
        with patch("tokenflow.limits._rate.WindowGate", CheckedWindow):
            return await _drive(ops)
    finally:
        logging.getLogger("tokenflow").setLevel(logging.NOTSET)


async def _drive(ops: list[Op]) -> World:
    async with anyio.create_task_group() as tasks:
        world = World(tasks)
        for what, which, amount in ops:
            if what == "turn":
                await anyio.wait_all_tasks_blocked()
                world.check()
            elif what == "sleep":
                await anyio.sleep(amount / 40)
            else:
                world.apply(what, which, amount)
        await anyio.wait_all_tasks_blocked()
        world.check()
        await world.end()
    return world
