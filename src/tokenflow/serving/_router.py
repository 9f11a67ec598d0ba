"""The replica with the least work ahead of it, chosen in the step that admits the call."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from statistics import pvariance
from typing import Literal, final

from tokenflow._usage import finite_seconds
from tokenflow.limits import Fifo, Gate, Limiter, Order
from tokenflow.limits._admission import changed
from tokenflow.limits._fork import reroute
from tokenflow.limits._turnstile import guard, turnstile

from ._fleet import Fleet
from ._replica import Ledger, Replica, checked_report

__all__ = ["ReplicaStatistics", "RouterStatistics", "TokenRouter"]


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """One replica now.

    `utilisation` is tokens in flight over `max_tokens`, None where there is no
    limit. `load` is what the router last compared, in tokens of the fastest replica.
    `cooling_for` is in seconds. `picks` counts the calls that went there,
    `failures` those that failed one after the other.
    """

    name: str
    state: Literal["up", "cooling", "drained"]
    cooling_for: float
    tokens_in_flight: int
    max_tokens: int | None
    requests_in_flight: int
    utilisation: float | None
    load: float
    picks: int
    failures: int


@dataclass(frozen=True, slots=True)
class RouterStatistics:
    """`TokenRouter.statistics()`. `unreconciled` counts calls that left on their estimate.

    `utilisation_variance` is over the replicas that have a limit.
    """

    replicas: tuple[ReplicaStatistics, ...]
    utilisation_variance: float
    waiting_calls: int
    waiting_tokens: int
    unreconciled: int


@final
class TokenRouter(Limiter):
    """Sends each call to the replica with the least work ahead of it that has room.

    >>> import anyio, tokenflow
    >>> router = tokenflow.TokenRouter(
    ...     [
    ...         tokenflow.Replica("a", max_tokens=1_000, target="http://a"),
    ...         tokenflow.Replica("b", max_tokens=5_000, target="http://b"),
    ...     ]
    ... )
    >>> async def main():
    ...     async with router.reserve(2_000) as lease:
    ...         return lease.replica.name
    >>> anyio.run(main)
    'b'

    Among the replicas that serve the call's `model`, are up, whose context
    window takes the call, whose name is not in `exclude`, and that have room,
    it takes the one whose load would be least after taking it: tokens in flight
    and a little for each sequence, over the replica's speed. Ties go to the
    least recently used. A call that names an `affinity` (a session, a shared
    prefix) goes where the last such call went, one that names a `region` goes to
    a replica there, as long as that one's load is at most twice the least. The
    last 10,000 affinities are remembered.

    If none has room, the call waits, in the same order as at every limiter. It
    waits for those replicas only that could take it, and delays nobody who can
    go elsewhere.

    A lease gives back exactly what it has added, to the ledger it was added to.
    `lease.failed()` spares a replica: for a second, and twice as long with each
    further failure, up to a minute; never the last one up.
    """

    __slots__ = ("_fleet",)

    def __init__(
        self,
        replicas: Iterable[Replica],
        *,
        order: Order = Fifo(),  # noqa: B008 (stateless)
        max_waiting: int | None = None,
    ) -> None:
        super().__init__(order=order, max_waiting=max_waiting, oversize="raise")
        self._fleet = Fleet()
        for replica in replicas:
            self._fleet.add(replica)
        self._choice = self._fleet

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Those it chooses from, in the order in which they came."""
        return tuple(ledger.replica for ledger in self._fleet)

    def add(self, replica: Replica) -> None:
        """One more to choose from; those who wait may go there before this returns.

        Raises:
            TypeError, ValueError: no Replica, or its name is taken.
        """
        now = guard(self._fleet).now()
        self._fleet.add(replica)
        reroute(self._fleet, now)

    def remove(self, name: str) -> None:
        """Send no more calls there. Those in flight end as they would have.

        Whoever waits and has nowhere else to go gets NoReplica, or RequestTooLarge.
        A replica that is added later under the same name starts afresh.

        Raises:
            ValueError: there is none of that name.
        """
        gates: list[Gate] = list(self._fleet)
        now = guard(gates).now()
        self._fleet.remove(name)
        reroute(gates, now)

    def cooldown(self, name: str, seconds: float) -> None:
        """Send no calls there for so many seconds; it only ever extends. Then it starts slowly.

        Calls that could go nowhere else wait. Those in flight are not touched.
        """
        ledger, seconds = self._fleet[name], finite_seconds(seconds, "seconds")
        ledger.cool(seconds, self._now(ledger))

    def drain(self, name: str) -> None:
        """Send no calls there until `restore`. Those in flight end as they would have."""
        ledger = self._fleet[name]
        self._now(ledger)
        ledger.drain()

    def restore(self, name: str) -> None:
        """Send calls there again: a tenth of its share at first, all of it after 30 seconds.

        Those who wait for it may go before this returns. Failures are forgotten.
        """
        ledger = self._fleet[name]
        now = self._now(ledger)
        ledger.restore(now)
        changed([ledger], now)

    def report(
        self,
        name: str,
        *,
        kv_cache_usage: float | None = None,
        running_requests: int | None = None,
        waiting_requests: int | None = None,
    ) -> None:
        """Take in what a replica says of itself: a share from 0 to 1, and counts.

        What it shows beyond what this router has sent counts as others' load, for
        15 seconds. A replica that has not reported counts like the average of those
        that have. It never touches what is in flight.
        """
        ledger = self._fleet[name]
        checked_report(kv_cache_usage, running_requests, waiting_requests)
        ledger.report(kv_cache_usage, running_requests, waiting_requests, self._now(ledger))

    def statistics(self) -> RouterStatistics:
        """Live numbers; works from anywhere."""
        replicas = tuple(_statistics(ledger) for ledger in self._fleet)
        used = [each.utilisation for each in replicas if each.utilisation is not None]
        queue = self._queue
        return RouterStatistics(
            replicas,
            pvariance(used) if used else 0.0,
            queue.waiting,
            queue.waiting_tokens,
            queue.unreconciled,
        )

    def _now(self, ledger: Ledger) -> float:
        """The time there; what the ledgers keep ready is about to be out of date."""
        now = guard([ledger]).now()
        self._fleet.refresh_at = -math.inf
        return now

    def _gates(self, tenant: Hashable) -> Iterable[Gate]:
        return ()

    def _by_tenant(self) -> bool:
        return self._fleet.by_tenant()

    def __repr__(self) -> str:
        ledgers = list(self._fleet)  # every refusal shows this: not the time for all statistics
        now = turnstile(ledgers[0]).now() if ledgers else 0.0
        up = sum(each.up_at <= now for each in ledgers)
        tokens = sum(each.used for each in ledgers)
        return (
            f"<TokenRouter: {up} of {len(ledgers)} replicas up, {tokens:,} tokens in flight, "
            f"{self._queue.waiting} waiting>"
        )


def _statistics(ledger: Ledger) -> ReplicaStatistics:
    cooling_for = max(0.0, ledger.up_at - turnstile(ledger).now())
    replica = ledger.replica
    return ReplicaStatistics(
        name=replica.name,
        state="drained" if cooling_for == math.inf else "cooling" if cooling_for else "up",
        cooling_for=cooling_for,
        tokens_in_flight=ledger.used,
        max_tokens=replica.max_tokens,
        requests_in_flight=ledger.calls,
        utilisation=ledger.used / replica.max_tokens if replica.max_tokens else None,
        load=ledger.load,
        picks=ledger.picks,
        failures=ledger.failures,
    )
