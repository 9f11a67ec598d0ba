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

A path may fork, where one of several sets of gates will do: see `_fork`.

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
from collections.abc import Callable, Collection, Hashable, Iterable, MutableMapping, Sequence
from heapq import heapify, heappop, heappush
from threading import get_ident
from typing import TYPE_CHECKING, Any

from tokenflow._errors import RequestTooLarge
from tokenflow._run import OUTSIDE, Run, current_run
from tokenflow._usage import Usage

from ._gate import Gate, plain_costs
from ._order import Key
from ._turnstile import Turnstile, enter_all, turnstile
from ._waiter import Booking, Queue, Waiter

if TYPE_CHECKING:
    from ._fork import Option

__all__ = ["Path", "changed", "settle", "too_large"]

_BACKFILL = 16


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
        "_known",
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

    option: Option | None = None
    """What a router chose, where this is the way to it."""

    is_obsolete: bool = False
    """Does it lead to what is no longer there?"""

    def __init__(self, queue: Queue, gates: Iterable[Gate]) -> None:
        self.queue = queue
        self.shares = queue.order.shares
        self.turnstiles = [turnstile(gate) for gate in {id(gate): gate for gate in gates}.values()]
        self.gates = [t.gate for t in self.turnstiles]
        self.timed = any(gate.timed for gate in self.gates)
        self.backfills = queue.order.backfill and self.timed
        self.plain = plain_costs(gate.cost for gate in self.gates)
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
        self._known = math.inf  # the instant at which all gates will have let the head go
        self._variants: MutableMapping[Hashable, Path] = {}
        self._reach: Key | None = None  # the last that may backfill; None: all may
        self.stands: list[Turnstile] = []
        for each in self.turnstiles:
            each.paths.add(self)

    def needed(self, costs: Sequence[int], lease: Booking) -> Path:
        """The path on which a call queues.

        One that costs nothing at some of these gates has its own heap over the same
        gates, so that it does not wait behind calls that wait for those.

        Raises:
            RequestTooLarge: it could never pass.
        """
        error = self.refuse_oversize(costs)
        if error is not None:
            raise error
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
        self.plain = plain_costs(gate.cost for gate in self.gates)
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
        if self.run is not None and (self.is_here() or current_run() is self.run):
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
        self.queue.arrives(waiter.lease.tenant, waiter.tokens)
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

    def sift(self, opened: list[Turnstile], fresh: list[Path], *, lowered: bool) -> None:
        """A limit has changed: fail those whom it has made impossible.

        Where it stood is added to `opened`, and what is to be tried to `fresh`.
        """
        if lowered and self.waiting:
            opened += self._fail_oversize()
            fresh.append(self)

    def _fail_oversize(self) -> list[Turnstile]:
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
            if cost > gate.largest():
                return too_large(gate, cost)
        return None

    # -- trying ------------------------------------------------------------

    def admit(self, lease: Booking, costs: list[int], now: float) -> bool:
        """For a newcomer: check all gates, then charge them all; or leave everything as it is."""
        for each, cost in zip(self.turnstiles, costs):  # noqa: B905 (hot, one cost for each)
            if cost and (each.lines or each.gate.ready_at(cost, now) > now):
                return False
        if self.shares:
            queue = self.queue
            arrival = (lease.priority, lease.tokens, lease.tenant, now, 0)
            queue.order.granted(queue.order.key(*arrival, backlogged=queue.waiting > 0))
        charges = []
        for gate, cost in zip(self.gates, costs):  # noqa: B905
            charges.append(gate.charge(cost, now))
        lease._book(self, costs, charges)
        return True

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
            refused, self._known, wake = self._refusals(head, now, company)
            if refused:
                self._stand(refused, key)
                self._arm(head, wake)
                if refused == stood:
                    return []
                stays = set(refused)
                return [each for each in stood if each not in stays]
            self._grant(head, now)
            if company or crowded:
                break
        return self._step_back()

    def fill_gaps(self, now: float) -> None:
        """Backfill: let later calls go that leave the head's known instant alone.

        Each is charged tentatively, and undone if the instant moves. The head's
        alarm is for whichever comes first, its own instant or that of one of them.
        """
        known = self._known
        if known < math.inf:
            head, company = self.head, self._has_company()
            _, known, wake = self._refusals(head, now, company)
        self._reach = None if known < math.inf else ()  # all, or nobody until it is tried again
        if known == math.inf or self.waiting == 1:
            return
        granted = True
        while granted:  # others move up behind those that went
            granted = False
            behind = self._behind_head()
            self._reach = behind[-1].key if len(behind) == _BACKFILL else None
            for waiter in behind:
                refused, ready, _ = self._refusals(waiter, now, company)
                if refused:
                    wake = min(wake, ready)
                elif self._fits_before(head, waiter, known, now):
                    granted = True
        self._arm(head, wake)

    def _fits_before(self, head: Waiter, waiter: Waiter, known: float, now: float) -> bool:
        """Grant it, if that leaves the head's instant where it is."""
        charges = self.charge(waiter.costs, now)
        if self.ready_at(head.costs, now) > known:
            self.undo(charges, now)
            return False
        waiter.lease._book(self, waiter.costs, charges)
        self._let_go(waiter)
        return True

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

    def _grant(self, waiter: Waiter, now: float) -> None:
        """Charge a call that nothing refuses."""
        waiter.lease._book(self, waiter.costs, self.charge(waiter.costs, now))
        self._let_go(waiter)

    def _let_go(self, waiter: Waiter) -> None:
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
            opened = [each for each in opened if each.lines and each.first() is not path]
        else:
            opened = [each for each in opened if each.lines]
            if path.waiting:  # one was granted, and others may be earlier than the next
                untried.append(path)
        if left:
            known = set(opened)
            opened += [each for each in left if each.lines and each not in known]
    for path in gaps:  # once everybody stands where others can see it
        if path.waiting:
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


def changed(
    gates: Iterable[Gate], now: float, *, lowered: bool = False, raised: bool = False
) -> None:
    """Gates were set from outside: who can go now goes.

    Where a limit was lowered, those who can no longer ever fit fail.
    """
    opened = [turnstile(gate) for gate in gates]
    fresh: list[Path] = []
    if not (lowered or raised or any(each.lines for each in opened)):
        return
    if lowered or raised:
        for path in {path for each in opened for path in each.paths}:
            path.sift(opened, fresh, lowered=lowered)
    settle(dict.fromkeys(opened), dict.fromkeys(fresh), now)


def too_large(gate: Gate, cost: int) -> RequestTooLarge:
    """The error for a cost that this gate could never take."""
    largest = int(gate.largest())
    return RequestTooLarge(
        f"a cost of {cost:,} can never pass {gate!r}: at most {largest:,} fit; split "
        'the call, raise the limit, or make the limiter with oversize="alone"',
        cost=cost,
        limit=largest,
    )
