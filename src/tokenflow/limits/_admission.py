"""Paths, barring, and the one grant step.

A call needs a *path*: a set of gates, all of which must agree before any is
charged. Calls of one path queue in one heap; only its head is tried. A head
that is refused *stands* at the gates that refused it, and bars later calls
from those and from no others. It is tried again when one of them changes, or
at the instant that one of them named; then it stands at whichever gates refuse
it now. So

- nobody overtakes at a gate for which somebody earlier stands, whichever
  limiter either came through, and
- whoever waits for one gate delays nobody who does not need that gate.

A call that needs two gates is safe from starvation by calls of its own path,
and by any traffic over the gate it stands at; not by two separate floods, each
over one of its gates.

Between calls of one limiter earlier means the limiter's order; between limiters
(priority, arrival).

`settle` makes every transition, in one synchronous step, in the task that
releases, corrects, changes a limit, leaves the queue, or whose alarm rang. It
charges before it wakes: a woken waiter already holds what it asked for. A step
costs O(log n) in the waiters of a path, and does not look at paths that stand
behind a head that is still refused.
"""

from __future__ import annotations

import math
import os
import warnings
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from threading import get_ident
from typing import Any, Literal, Protocol, final
from weakref import WeakSet, WeakValueDictionary

from tokenflow._errors import RequestTooLarge
from tokenflow._usage import Usage

from ._gate import Gate, plain_costs
from ._order import Key, Order
from ._run import OUTSIDE, Bell, Run, current_run

__all__ = ["Booking", "Path", "Queue", "Turnstile", "Waiter", "enter_all", "settle", "turnstile"]

_BACKFILL = 16
_sequence = count()


@final
class Queue:
    """What all paths of one limiter share: its order, its bound, its counts."""

    __slots__ = (
        "alone",
        "max_waiting",
        "order",
        "unreconciled",
        "waited_at",
        "waiting",
        "waiting_tokens",
        "warned_at",
    )

    def __init__(self, order: Order, max_waiting: int | None, *, alone: bool) -> None:
        self.order: Order = order
        self.max_waiting: int | None = max_waiting
        self.alone: bool = alone
        self.waiting: int = 0
        self.waiting_tokens: int = 0
        self.unreconciled: int = 0
        self.waited_at: float = -math.inf  # when a long wait was logged
        self.warned_at: float = -math.inf  # when debt was


State = Literal["queued", "granted", "failed", "gone"]


class Booking(Protocol):
    """What a waiter waits for: a lease, which the grant step fills in."""

    usage: int | Usage
    priority: int
    tenant: Hashable

    @property
    def tokens(self) -> int: ...

    def _book(self, path: Path, costs: list[int], charges: list[Any]) -> None:
        """Take what the grant step has charged."""

    def cancel(self) -> None:
        """Give all of it back: the caller is gone."""


@final
class Waiter:
    """A call in a queue, from its arrival until it is granted, fails or leaves."""

    __slots__ = (
        "alarm",
        "arrived",
        "bell",
        "costs",
        "deadline",
        "error",
        "key",
        "lease",
        "path",
        "state",
        "tokens",
    )

    def __init__(
        self, path: Path, lease: Booking, costs: list[int], now: float, bell: Bell | None
    ) -> None:
        sequence = next(_sequence)
        self.path = path
        self.lease = lease
        self.costs = costs
        self.tokens = tokens = lease.tokens
        self.arrived = now
        self.key = path.queue.order.key(
            lease.priority,
            tokens,
            lease.tenant,
            now,
            sequence,
            backlogged=path.queue.waiting > 0,
        )
        self.bell = bell
        self.state: State = "queued"
        self.error: RequestTooLarge | None = None
        self.alarm = math.inf  # when one of its gates, or a gap, may let it go
        self.deadline = math.inf  # when it gives up

    @property
    def rank(self) -> tuple[float, float]:
        """(priority, arrival): what counts between limiters."""
        return (self.lease.priority, self.key[-1])

    def wake_at(self, when: float) -> None:
        self.alarm = when
        self.arm()

    def arm(self) -> None:
        """Set the bell's alarm for whatever comes first."""
        if self.bell is not None:
            self.bell.set_alarm(min(self.alarm, self.deadline))

    def end(self, state: State) -> None:
        """Leave the queue, one way or the other."""
        self.state = state
        queue = self.path.queue
        queue.waiting -= 1
        queue.waiting_tokens -= self.tokens
        if self.path.shares:
            if state == "granted":
                queue.order.granted(self.key)
            else:
                queue.order.settle(self.lease.tenant, -self.tokens)
        if self.bell is not None and state != "gone":
            self.bell.ring()


@final
class Turnstile:
    """A gate, and those who stand at it: per limiter, its paths sorted by their heads' keys."""

    __slots__ = ("__weakref__", "epoch", "gate", "home", "lines", "paths", "pid", "run")

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.lines: dict[Queue, list[tuple[Key, Path]]] = {}
        self.paths: WeakSet[Path] = WeakSet()
        self.run: Run | None = None
        self.epoch = 0  # how often what was in flight has been given up
        self.pid = os.getpid()
        self.home: tuple[dict[Hashable, Turnstile], Hashable] | None = None  # where it is kept

    def first(self) -> Path:
        """The earliest of those who stand here."""
        if len(self.lines) == 1:
            for line in self.lines.values():
                return line[0][1]
        return min((line[0][1] for line in self.lines.values()), key=Path.rank)

    def bars(self, waiter: Waiter) -> bool:
        """Does somebody stand here who goes before this call?"""
        path = waiter.path
        for line in self.lines.values():
            key, other = line[0]
            if other is path:
                if len(line) == 1:
                    continue
                key, other = line[1]
            if key < waiter.key if other.queue is path.queue else other.rank() < waiter.rank:
                return True
        return False

    def is_left_to(self, path: Path) -> bool:
        """Does nobody else stand here?"""
        line = self.lines.get(path.queue)
        return line is not None and len(self.lines) == len(line) == 1 and line[0][1] is path

    def stand(self, path: Path, key: Key) -> None:
        line = self.lines.get(path.queue)
        if line is None:
            self.lines[path.queue] = [(key, path)]
        else:
            insort(line, (key, path), key=_key)

    def move(self, path: Path, before: Key, key: Key) -> None:
        """The path that stands here has another head."""
        line = self.lines[path.queue]
        if len(line) == 1:
            line[0] = (key, path)
        else:
            self.leave(path, before)
            self.stand(path, key)

    def leave(self, path: Path, key: Key) -> None:
        line = self.lines[path.queue]
        del line[bisect_left(line, key, key=_key)]
        if not line:
            del self.lines[path.queue]

    def enter(self, run: Run) -> None:
        """It is used in this run from now on.

        If another run used it before, that one's waiters are dropped without
        waking them and its calls in flight given up; times are moved to this clock.
        """
        before, self.run = self.run, run
        if before is run:
            return
        for path in list(self.paths):
            path.leave_run()
        if before is not None:
            if before is not OUTSIDE:
                self._give_up()
            self.gate.shift(run.now() - before.now_or_after())

    def refuse_other_run(self, run: Run | None) -> None:
        """Raise RuntimeError where another run uses this gate and is still going on."""
        if self.run is not None and self.run is not run and self.run.is_live():
            raise RuntimeError(
                f"{self.gate!r} is in use by an event loop that runs in another thread: call it "
                "there, with anyio.from_thread.run_sync, or give each loop its own limiter"
            )

    def is_in_open_run(self) -> bool:
        """Is it used by a loop that may go on, though it has stopped? That one keeps its gates."""
        return self.run is not None and self.run is not OUTSIDE and not self.run.has_ended()

    def _give_up(self) -> None:
        for path in list(self.paths):
            path.drop()
        if self.gate.in_flight:
            self.gate.give_up()
            self.epoch += 1
            for path in list(self.paths):
                path.epochs = path.read_epochs()

    def keep(self) -> None:
        """Be remembered by its limiter again, which may have forgotten it while it was idle."""
        if self.home is not None:
            turnstiles, key = self.home
            turnstiles[key] = self

    def now(self) -> float:
        """The time by which its gate goes, from anywhere."""
        return 0.0 if self.run is None else self.run.now_or_after()


def _key(entry: tuple[Key, Path]) -> Key:
    return entry[0]


_turnstiles: WeakValueDictionary[int, Turnstile] = WeakValueDictionary()


def turnstile(gate: Gate) -> Turnstile:
    """The gate's turnstile: one for each gate, by identity, whoever asks."""
    found = _turnstiles.get(id(gate))
    if found is None:
        found = _turnstiles[id(gate)] = Turnstile(gate)
    return found


def enter_all(turnstiles: Sequence[Turnstile]) -> Run:
    """Bring these gates into the caller's run, or outside of any; all of them or none."""
    run = current_run()
    for each in turnstiles:
        each.refuse_other_run(run)
    if run is None:
        run = next((each.run for each in turnstiles if each.is_in_open_run()), None) or OUTSIDE
    _warn_of_fork(turnstiles)
    for each in turnstiles:
        each.enter(run)
    return run


def _warn_of_fork(turnstiles: Sequence[Turnstile]) -> None:
    pid = os.getpid()
    inherited = [each for each in turnstiles if each.pid != pid]
    for each in inherited:
        each.pid = pid
    if any(each.run is not None for each in inherited):
        warnings.warn(
            f"{inherited[0].gate!r} was in use before this process was forked: parent and child "
            "now each admit the whole limit; build limiters in the child",
            RuntimeWarning,
            stacklevel=2,
        )


def _after_fork() -> None:
    """In the child no loop is running, although the inherited ones say so."""
    for each in list(_turnstiles.values()):
        for path in each.paths:
            path.leave_run()


if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(after_in_child=_after_fork)


@final
class Path:
    """The gates that a call needs, and the calls that wait for all of them.

    Invariant: while anybody waits, the head is alive and stands somewhere.
    """

    __slots__ = (
        "__weakref__",
        "_armed",
        "_dead",
        "_heap",
        "_key",
        "_reach",
        "_variants",
        "backfills",
        "counts_int",
        "epochs",
        "gates",
        "held",
        "is_running",
        "only",
        "plain",
        "queue",
        "run",
        "shares",
        "stands",
        "thread",
        "timed",
        "turnstiles",
    )

    def __init__(self, queue: Queue, gates: Iterable[Gate]) -> None:
        self.queue = queue
        self.shares = queue.order.shares
        self.turnstiles = [turnstile(gate) for gate in {id(gate): gate for gate in gates}.values()]
        self.gates = [t.gate for t in self.turnstiles]
        self.timed = any(gate.timed for gate in self.gates)
        self.backfills = queue.order.backfill and self.timed
        self.plain = plain_costs(self.gates)
        self.only = self.gates[0] if len(self.gates) == 1 and not self.shares else None
        self.counts_int = self.plain == [True]  # the one gate's cost is the int itself
        self.held = [(i, t) for i, t in enumerate(self.turnstiles) if t.gate.in_flight]
        self.run: Run | None = None
        self.thread = 0  # of the run, and
        self.is_running: Callable[[], bool] = bool  # is it going on? Kept here for the fast path
        self.epochs = self.read_epochs()
        self._heap: list[tuple[Key, Waiter]] = []
        self._armed: Waiter | None = None  # who has an alarm set for its gates
        self._dead = 0
        self._key: Key = ()  # under which it stands
        self._variants: dict[tuple[bool, ...], Path] = {}
        self._reach: Key | None = None  # the last that may backfill; None: all may
        self.stands: list[Turnstile] = []
        for each in self.turnstiles:
            each.paths.add(self)

    def needed(self, costs: Sequence[int]) -> Path:
        """The path on which a call queues that costs nothing at some of these gates.

        Its own heap over the same gates, so that it does not wait behind calls that
        wait for those.
        """
        if 0 not in costs:
            return self
        needs = tuple(cost > 0 for cost in costs)
        path = self._variants.get(needs)
        if path is None:
            path = self._variants[needs] = Path(self.queue, self.gates)
        return path

    def read_epochs(self) -> tuple[int, ...]:
        """The turnstiles' epochs: a lease of others holds nothing in flight there any more."""
        return tuple(each.epoch for each in self.turnstiles)

    def extend(self, gate: Gate) -> None:
        """One more gate, for calls admitted from now on."""
        each = turnstile(gate)
        self.held.append((len(self.gates), each))
        self.gates.append(gate)
        self.turnstiles.append(each)
        self.plain = plain_costs(self.gates)
        self.only = None
        self.counts_int = False
        self.epochs = self.read_epochs()
        each.paths.add(self)
        self.leave_run()
        for _, waiter in self._heap:
            waiter.costs.append(gate.cost(waiter.lease.usage))

    # -- runs --------------------------------------------------------------

    def is_here(self) -> bool:
        """Surely in the run that uses this path? The fast path asks this, and no more."""
        return get_ident() == self.thread and self.is_running()

    def enter(self) -> Run:
        """Be sure that the caller may use this path here and now; returns the run it goes by.

        Raises:
            RuntimeError: another thread's run uses one of its gates, and is still going on.
        """
        if self.run is not None and self.is_here():
            return self.run
        run = enter_all(self.turnstiles)
        self.run = run
        if run is not OUTSIDE:
            self.thread, self.is_running = run.thread, run.is_running
        return run

    def leave_run(self) -> None:
        """Forget the run that the fast path knows."""
        self.run, self.thread, self.is_running = None, 0, bool

    # -- the queue ---------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._heap) - self._dead

    @property
    def head(self) -> Waiter:
        return self._heap[0][1]

    def rank(self) -> tuple[float, float]:
        """That of the head."""
        return self._heap[0][1].rank

    def goes_before(self, other: Path) -> bool:
        if self.queue is other.queue:
            return self._heap[0][0] < other._heap[0][0]
        return self.rank() < other.rank()

    def join(self, waiter: Waiter, now: float) -> None:
        """Queue a call; it may be granted at once."""
        self.queue.waiting += 1
        self.queue.waiting_tokens += waiter.tokens
        heappush(self._heap, (waiter.key, waiter))
        if self._heap[0][1] is waiter:
            settle(self._step_back(), (self,), now)
        elif self._is_in_reach(waiter):
            settle((), (self,), now)

    def leave(self, waiter: Waiter, now: float) -> None:
        """Take a call out of the queue; what it barred is tried again now."""
        was_head = self._heap[0][1] is waiter
        waiter.end("gone")
        self._bury()
        if was_head:
            settle(self._step_back(), (self,), now)
        elif self._is_in_reach(waiter):  # another one moves up, and may go
            settle((), (self,), now)

    def _is_in_reach(self, waiter: Waiter) -> bool:
        """Is it among those who may go before the head?"""
        return self.backfills and (self._reach is None or waiter.key <= self._reach)

    def drop(self) -> None:
        """Forget all waiters, without waking them: their run is over."""
        for _, waiter in self._heap:
            if waiter.state == "queued":
                waiter.bell = None
                waiter.end("gone")
        self._heap.clear()
        self._dead = 0
        self._armed = None
        self._step_back()

    def fail_oversize(self) -> list[Turnstile]:
        """Fail those whose cost a lowered limit has made impossible; returns where it stood."""
        for _, waiter in list(self._heap):
            if waiter.state == "queued":
                waiter.error = self.refuse_oversize(waiter.costs)
                if waiter.error is not None:
                    waiter.end("failed")
                    self._bury()
        return self._step_back()

    def refuse_oversize(self, costs: Sequence[int]) -> RequestTooLarge | None:
        """The error for a call that could never pass, or None."""
        if self.queue.alone:
            return None
        for gate, cost in zip(self.gates, costs, strict=True):
            if cost > (largest := gate.largest()):
                return RequestTooLarge(
                    f"a cost of {cost:,} can never pass {gate!r}: at most {largest:,} fit; split "
                    'the call, raise the limit, or make the limiter with oversize="alone"',
                    cost=cost,
                    limit=int(largest),
                )
        return None

    # -- trying ------------------------------------------------------------

    def ready_at(self, costs: Sequence[int], now: float) -> float:
        """The instant at which all gates would take it, the queue ignored."""
        ready = -math.inf
        for gate, cost in zip(self.gates, costs, strict=True):
            if cost:
                ready = max(ready, gate.ready_at(self._asked(gate, cost), now))
        return ready

    def charge(self, costs: Sequence[int], now: float) -> list[Any]:
        if len(costs) == 1:
            return [self.gates[0].charge(costs[0], now)]
        pairs = zip(self.gates, costs)  # noqa: B905 (hot, and one cost for each gate)
        return [gate.charge(cost, now) for gate, cost in pairs]

    def price(self, cost: int | Usage) -> list[int]:
        """What a call costs at each gate: all that may run a user's code."""
        if self.plain is not None and isinstance(cost, int):
            return [cost if counts_tokens else 1 for counts_tokens in self.plain]
        return [gate.cost(cost) for gate in self.gates]

    def undo(self, charges: Sequence[Any], now: float) -> None:
        for gate, charge in zip(self.gates, charges, strict=True):
            gate.undo(charge, now)

    def attempt(self, now: float, *, crowded: bool) -> list[Turnstile]:
        """Try the head, and while nobody else is at these gates the next ones.

        `crowded`: other heads, which stand nowhere yet, are to be tried in this step.
        Returns the turnstiles at which it stood, and now does not.
        """
        stood = self.stands
        company = self._has_company()
        while self._heap:
            key, head = self._heap[0]
            refused, _, wake = self._refusals(head, now, company)
            if refused:
                self._stand(refused, key)
                self._arm(head, wake)
                return [] if refused == stood else [e for e in stood if e not in refused]
            self._grant(head, self.charge(head.costs, now))
            if company or crowded:
                break
        return self._step_back()

    def fill_gaps(self, now: float) -> None:
        """Backfill: let later calls go that leave the head's known instant alone.

        Each is charged tentatively, and undone if the instant moves. The head's
        alarm is for whichever comes first, its own instant or that of one of them.
        """
        head, company = self.head, self._has_company()
        _, known, wake = self._refusals(head, now, company)
        if known == math.inf:
            return
        behind = self._behind_head()
        self._reach = behind[-1].key if len(behind) == _BACKFILL else None
        for waiter in behind:
            refused, ready, _ = self._refusals(waiter, now, company)
            if refused:
                wake = min(wake, ready)
                continue
            charges = self.charge(waiter.costs, now)
            if self.ready_at(head.costs, now) <= known:
                self._grant(waiter, charges)
            else:
                self.undo(charges, now)
        self._arm(head, wake)

    def _has_company(self) -> bool:
        """Does anybody else stand at one of these gates?"""
        for each in self.turnstiles:  # noqa: SIM110 (hot: a generator costs as much as the rest)
            if each.lines and not each.is_left_to(self):
                return True
        return False

    def _arm(self, head: Waiter, when: float) -> None:
        """One alarm for each path: its head's."""
        armed, self._armed = self._armed, head
        if armed is not None and armed is not head and armed.state == "queued":
            armed.wake_at(math.inf)
        if when != head.alarm:
            head.wake_at(when)

    def _refusals(
        self, waiter: Waiter, now: float, company: bool
    ) -> tuple[list[Turnstile], float, float]:
        """The turnstiles that refuse it; the instant by which all will have room (inf: unknown);
        the first instant at which one of them has.
        """
        refused: list[Turnstile] = []
        known, wake = -math.inf, math.inf
        alone = self.queue.alone
        for each, cost in zip(self.turnstiles, waiter.costs, strict=True):
            if not cost:
                continue
            if company and each.bars(waiter):
                refused.append(each)
                known = math.inf
                continue
            asked = self._asked(each.gate, cost) if alone else cost
            ready = each.gate.ready_at(asked, now)
            if ready > now:
                refused.append(each)
                known = max(known, ready)
                wake = min(wake, ready)
        return refused, known, wake

    def _behind_head(self) -> list[Waiter]:
        """The next 16 in their order, out of a heap that stays as it is."""
        heap = self._heap
        edge = [(heap[i][0], i) for i in range(1, min(3, len(heap)))]
        heapify(edge)
        found: list[Waiter] = []
        for _ in range(2 * _BACKFILL):  # twice: dead ones are passed over
            if not edge or len(found) == _BACKFILL:
                break
            _, index = heappop(edge)
            if heap[index][1].state == "queued":
                found.append(heap[index][1])
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heappush(edge, (heap[child][0], child))
        return found

    def _asked(self, gate: Gate, cost: int) -> int:
        """With oversize="alone" an impossible cost asks for an empty gate."""
        if self.queue.alone:
            largest = gate.largest()
            if cost > largest:
                return int(largest)
        return cost

    def _grant(self, waiter: Waiter, charges: list[Any]) -> None:
        waiter.lease._book(self, waiter.costs, charges)
        waiter.end("granted")
        self._bury()

    def _bury(self) -> None:
        """One in the heap is dead: keep the head alive, and the dead fewer than the living."""
        self._dead += 1
        heap = self._heap
        while heap and heap[0][1].state != "queued":
            heappop(heap)
            self._dead -= 1
        if self._dead > len(heap) // 2:
            heap[:] = [entry for entry in heap if entry[1].state == "queued"]
            heapify(heap)
            self._dead = 0

    def _stand(self, refused: list[Turnstile], key: Key) -> None:
        if refused == self.stands:
            for each in refused if key != self._key else ():
                each.move(self, self._key, key)
        else:
            self._step_back()
            for each in refused:
                each.stand(self, key)
        self.stands, self._key = refused, key

    def _step_back(self) -> list[Turnstile]:
        """Stand nowhere; returns where it stood."""
        stood, self.stands = self.stands, []
        for each in stood:
            each.leave(self, self._key)
        return stood

    def __repr__(self) -> str:
        gates = ", ".join(map(repr, self.gates))
        return f"<limits {gates}; {self.waiting} waiting>"


def settle(changed: Iterable[Turnstile], fresh: Collection[Path], now: float) -> None:
    """The grant step: let go whoever can, the earliest first.

    `changed` are turnstiles at which something may have become possible,
    `fresh` are paths whose heads have not been tried yet.
    """
    opened = [each for each in changed if each.lines]
    untried = [path for path in fresh if path.waiting] if fresh else []
    gaps: list[Path] = []
    while opened or untried:
        path = _earliest(opened, untried)
        if path in untried:
            untried.remove(path)
        left = path.attempt(now, crowded=bool(untried))
        if path.stands:
            if path.backfills and path not in gaps:
                gaps.append(path)
            opened = [
                e for e in opened if e.lines and (e.first() is not path or e not in path.stands)
            ]
        else:
            opened = [each for each in opened if each.lines]
            if path.waiting:  # one was granted, and others may be earlier than the next
                untried.append(path)
        if left:
            opened += [each for each in left if each.lines and each not in opened]
    for path in gaps:  # once everybody stands where others can see it
        if path.waiting > 1:
            path.fill_gaps(now)


def _earliest(opened: list[Turnstile], untried: list[Path]) -> Path:
    """Whose head is to be tried next."""
    if len(opened) == 1 and not untried:
        return opened[0].first()
    earliest, *others = [each.first() for each in opened] + untried
    for path in others:
        if path is not earliest and path.goes_before(earliest):
            earliest = path
    return earliest
