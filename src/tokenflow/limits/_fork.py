"""Paths with alternatives: the gates that a call needs, and one set of several.

A *fork* divides into *ways*, one for each option (to a router, a replica). A
call needs the gates before the fork and those of one way. It is refused if a
gate before the fork refuses it, or if every way does, and it stands where it
is refused: at the gates before the fork, and, if no way is open, at each gate
that closes one. So nobody overtakes at an option that an earlier one waits
for and could use, and whoever waits for some options delays nobody who has
another. Gates count by identity, on whichever side of the fork they are.

Calls that may go the same ways queue in one heap, others in another: a call
that fits one option only does not keep the others idle. What is granted goes by
a *branch*: a plain path over all the gates it was charged at.

A look at a fork costs O(options), whoever waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from heapq import heappush
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final
from weakref import WeakValueDictionary

from tokenflow._errors import TokenflowError
from tokenflow._usage import Usage

from ._admission import Path, settle, too_large
from ._gate import CostFunction, Gate, plain_costs
from ._turnstile import Turnstile, turnstile
from ._waiter import Booking, Queue, Waiter

if TYPE_CHECKING:
    from tokenflow.serving import Replica

__all__ = ["Branch", "Choice", "Fork", "Option", "reroute"]


Obstacle: TypeAlias = tuple[Gate, int]
"""A gate, and a cost that it could never take."""


class Option(Gate, Protocol):
    """One of several: a gate, and whatever further ones a call needs there."""

    @property
    def replica(self) -> Replica: ...

    def gates(self, tenant: Hashable) -> Iterable[Gate]:
        """What a call by this tenant needs there."""


class Choice(Protocol):
    """What chooses between options. Pure, like a gate."""

    def options(self, model: str | None) -> Sequence[Any]:
        """Those for a model. Raises NoReplica where there is none."""

    def eligible(self, options: Sequence[Any], lease: Booking) -> Sequence[Any]:
        """Those that this call may take at all, however full they are."""

    def pick(self, options: Sequence[Any], lease: Booking, now: float) -> Any:
        """The best for a call that it may take and that have room, as far as it knows; or None."""

    def pick_open(self, options: Sequence[Any], lease: Booking, now: float) -> Any:
        """The best of some whose gates all agree."""

    def taken(self, option: Any, lease: Booking) -> None:
        """A call has been admitted there."""

    def failed(
        self, option: Any, charge: Any, lease: Booking, retry_after: float, now: float
    ) -> Any:
        """A call has failed there; returns the charge that is recorded from now on."""

    def refusal(
        self, options: Sequence[Any], lease: Booking, obstacles: Sequence[Obstacle]
    ) -> TokenflowError:
        """Why none of these could ever take the call; where it may go at all, what stops it."""


Station: TypeAlias = tuple[Turnstile, int]
"""A gate on the way, and which of a call's costs it takes."""


@final
class Branch(Path):
    """One way, from the start: the gates before the fork, and those of one option."""

    __slots__ = ("choice", "kinds", "option")

    option: Option

    def __init__(self, fork: Fork, option: Option, stations: Sequence[Station]) -> None:
        super().__init__(fork.queue, [each.gate for each, _ in stations])
        self.option = option
        self.choice = fork.choice
        self.kinds = [kind for _, kind in stations]


@final
class Fork(Path):
    """A path that ends in one of several options.

    `costs` here has one entry for each way of counting, not one for each gate.
    """

    __slots__ = (
        "_branches",
        "_functions",
        "_open",
        "_required",
        "_stations",
        "_ways",
        "choice",
        "is_obsolete",
        "options",
        "renew",
    )

    def __init__(
        self,
        queue: Queue,
        required: Sequence[Gate],
        ways: Mapping[Option, Sequence[Gate]],
        choice: Choice,
        renew: Callable[[], Path],
        base: Fork | None = None,
    ) -> None:
        super().__init__(queue, chain(required, *ways.values()))
        self.choice = choice
        self.options = list(ways)
        self.renew = renew  # this fork again, as it is by then
        self.is_obsolete = False
        self._variants = WeakValueDictionary()
        self._branches: dict[Option, Branch] = {}
        self._open: list[Option] = []  # what the last look found
        self._stations: dict[int, Station] = {} if base is None else base._stations
        self._functions: list[CostFunction] = [] if base is None else base._functions
        if base is None:
            self._count()
        self.plain = plain_costs(self._functions)
        self.only, self.counts_int, self.held = None, False, []
        before = {id(gate): self._stations[id(gate)] for gate in required}
        self._required = list(before.values())
        self._ways = {
            option: [self._stations[id(gate)] for gate in gates if id(gate) not in before]
            for option, gates in ways.items()
        }

    def _count(self) -> None:
        """Tell the ways of counting apart: most replicas share one or two."""
        kinds: dict[int, int] = {}
        for each in self.turnstiles:
            function = each.gate.cost
            kind = kinds.setdefault(id(function), len(kinds))
            if kind == len(self._functions):
                self._functions.append(function)  # kept, or the next may have its id
            self._stations[id(each.gate)] = (each, kind)

    def read_epochs(self) -> tuple[int, ...]:
        """None: leases are booked on branches."""
        return ()

    def branch(self, option: Option) -> Branch:
        """The way to this option."""
        found = self._branches.get(option)
        if found is None:
            stations = [*self._required, *self._ways[option]]
            found = self._branches[option] = Branch(self, option, stations)
        return found

    def price(self, cost: int | Usage) -> list[int]:
        return [function(cost) for function in self._functions]

    def ready_at(self, costs: Sequence[int], now: float) -> float:
        before = self._ready_at(self._required, costs, now)
        return max(before, min(self._ready_at(way, costs, now) for way in self._ways.values()))

    def _ready_at(self, stations: Iterable[Station], costs: Sequence[int], now: float) -> float:
        ready = -math.inf
        for each, kind in stations:
            if costs[kind]:
                ready = max(ready, each.gate.ready_at(self._asked(each.gate, costs[kind]), now))
        return ready

    # -- newcomers ---------------------------------------------------------

    def admit(self, lease: Booking, costs: list[int], now: float) -> bool:
        choice = self.choice
        option = choice.pick(self.options, lease, now)
        if option is None:
            return False
        if not self._admit_to(option, lease, costs, now):
            open_ways = self._open_at_once(lease, costs, now)
            if not open_ways:
                return False
            option = choice.pick_open(open_ways, lease, now)
            self._admit_to(option, lease, costs, now)
        choice.taken(option, lease)
        return True

    def _admit_to(self, option: Option, lease: Booking, costs: Sequence[int], now: float) -> bool:
        branch = self._branches.get(option) or self.branch(option)
        return branch.admit(lease, [costs[kind] for kind in branch.kinds], now)

    def _open_at_once(self, lease: Booking, costs: Sequence[int], now: float) -> list[Option]:
        """The options at which nobody stands, and whose gates agree."""
        if not self._agree(self._required, costs, now):
            return []
        eligible = self.choice.eligible(self.options, lease)
        return [option for option in eligible if self._agree(self._ways[option], costs, now)]

    def _agree(self, stations: Iterable[Station], costs: Sequence[int], now: float) -> bool:
        for each, kind in stations:
            if costs[kind] and (each.lines or each.gate.ready_at(costs[kind], now) > now):
                return False
        return True

    # -- the queue ---------------------------------------------------------

    def needed(self, costs: Sequence[int], lease: Booking) -> Path:
        """The path on which a call queues: over those ways that it could ever go.

        Raises:
            RequestTooLarge, NoReplica: there are none.
        """
        options = self._possible(costs, lease)
        if len(options) == len(self.options) and 0 not in costs:
            return self
        key = (tuple(cost > 0 for cost in costs), tuple(map(id, options)))
        variant = self._variants.get(key)
        if variant is None:
            required = [each.gate for each, _ in self._required]
            ways = {each: [t.gate for t, _ in self._ways[each]] for each in options}
            variant = Fork(self.queue, required, ways, self.choice, self.renew, self)
            self._variants[key] = variant
        return variant

    def _possible(self, costs: Sequence[int], lease: Booking) -> list[Option]:
        """The options that the call could ever take; raises where there are none."""
        obstacle = self._obstacle(self._required, costs)
        if obstacle is not None:
            raise too_large(*obstacle)
        obstacles: list[Obstacle] = []
        options: list[Option] = []
        for option in self.choice.eligible(self.options, lease):
            obstacle = self._obstacle(self._ways[option], costs)
            if obstacle is None:
                options.append(option)
            else:
                obstacles.append(obstacle)
        if not options:
            raise self.choice.refusal(self.options, lease, obstacles)
        return options

    def _obstacle(self, stations: Iterable[Station], costs: Sequence[int]) -> Obstacle | None:
        """The gate that could never take its cost, if there is one."""
        if not self.queue.alone:
            for each, kind in stations:
                if costs[kind] > each.gate.largest():
                    return each.gate, costs[kind]
        return None

    def extend(self, gate: Gate) -> None:
        """One of its limiters has one more gate from now on."""
        if not self.is_obsolete:
            reroute(self.gates, self.enter().now())

    def sift(self, opened: list[Turnstile], fresh: list[Path], *, lowered: bool = True) -> None:
        """Whoever waits here may have other options now: all queue anew, where they stood."""
        forks: list[Any] = [self, *self._variants.values()]
        waiters = [waiter for fork in forks for waiter in fork._clear(opened)]
        for waiter in waiters:
            try:
                base = self.renew()
                costs = base.price(waiter.lease.usage)
                path = base.needed(costs, waiter.lease)
                path.enter()
            except Exception as error:  # as if it had asked now
                waiter.error = error
                waiter.end("failed")
            else:
                waiter.path, waiter.costs = path, costs
                heappush(path._heap, (waiter.key, waiter))
                fresh.append(path)

    def _clear(self, opened: list[Turnstile]) -> list[Waiter]:
        """Take all out of the queue."""
        opened += self._step_back()
        waiters = [waiter for _, waiter in self._heap if waiter.state == "queued"]
        if self._armed is not None and self._armed.state == "queued":
            self._armed.wake_at(math.inf)
        self._heap.clear()
        self._dead, self._armed = 0, None
        return waiters

    def _forget(self) -> None:
        """Keep no option alive: limiters drop what is obsolete only when they look for it."""
        self.options, self.gates, self.turnstiles, self._required = [], [], [], []
        self._ways, self._stations, self._branches = {}, {}, {}

    # -- trying ------------------------------------------------------------

    def _refusals(
        self, waiter: Waiter, now: float, company: bool
    ) -> tuple[list[Turnstile], float, float]:
        """As for any path; and the open ways are kept for whoever goes.

        The instant is known only if that of every way is: somebody who went by
        the others would make the head wait for them.
        """
        before: dict[Turnstile, float] = {}
        known = self._note_refusals(before, self._required, waiter, now, company)
        closed: dict[Turnstile, float] = {}
        soonest, latest = math.inf, -math.inf
        self._open = []
        for option, way in self._ways.items():
            ready = self._note_refusals(closed, way, waiter, now, company)
            if ready == -math.inf:
                self._open.append(option)
                continue
            if ready < soonest:
                soonest = ready
            if ready > latest:
                latest = ready
        if not self._open:
            before |= closed
            known = max(known, soonest if latest < math.inf else latest)
        return list(before), known, min(before.values(), default=math.inf)

    def _note_refusals(
        self,
        refused: dict[Turnstile, float],
        stations: Sequence[Station],
        waiter: Waiter,
        now: float,
        company: bool,
    ) -> float:
        """Note which of these refuse it, until when; returns when none will, -inf if none does."""
        known, alone, costs = -math.inf, self.queue.alone, waiter.costs
        for each, kind in stations:
            cost = costs[kind]
            if not cost:
                continue
            if company and each.bars(waiter):
                ready = math.inf
            else:
                ready = each.gate.ready_at(self._asked(each.gate, cost) if alone else cost, now)
                if ready <= now:
                    continue
            refused[each] = ready
            if ready > known:
                known = ready
        return known

    def _grant(self, waiter: Waiter, now: float) -> None:
        option = self.choice.pick_open(self._open, waiter.lease, now)
        self._let_go_by(option, waiter, self._charge_by(option, waiter, now))

    def _fits_before(self, head: Waiter, waiter: Waiter, known: float, now: float) -> bool:
        for _ in range(2):  # the head's instant is that of one way: another leaves it alone
            option = self.choice.pick_open(self._open, waiter.lease, now)
            if option is None:
                break
            charges = self._charge_by(option, waiter, now)
            if self.ready_at(head.costs, now) <= known:
                self._let_go_by(option, waiter, charges)
                return True
            self.branch(option).undo(charges, now)
            self._open.remove(option)
        return False

    def _charge_by(self, option: Option, waiter: Waiter, now: float) -> list[Any]:
        branch = self.branch(option)
        return branch.charge([waiter.costs[kind] for kind in branch.kinds], now)

    def _let_go_by(self, option: Option, waiter: Waiter, charges: list[Any]) -> None:
        branch = self.branch(option)
        waiter.lease._book(branch, [waiter.costs[kind] for kind in branch.kinds], charges)
        self.choice.taken(option, waiter.lease)
        self._let_go(waiter)


def reroute(gates: Iterable[Gate], now: float) -> None:
    """There are other options than before: whoever waits for one of these gates chooses anew."""
    paths = {path for gate in gates for path in turnstile(gate).paths}
    forks = [path for path in paths if isinstance(path, Fork)]
    opened: list[Turnstile] = []
    fresh: list[Path] = []
    for fork in forks:
        fork.is_obsolete = True
    for fork in forks:
        fork.sift(opened, fresh)
        fork._forget()
    settle(dict.fromkeys(opened), dict.fromkeys(fresh), now)
