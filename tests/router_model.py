"""Random operations on a router, checked at each step against a naive model.

In the model a call is a name, a gate a string, and who stands where a set. The first of those
who came through one limiter and may go the same ways has to have gone, if one of its replicas has
room and nobody earlier stands at what it needs. If not it stands at what refuses it, until
something changes there. Whoever went had to go to one of the replicas that were open to it.
"""

from dataclasses import dataclass, field

from anyio import wait_all_tasks_blocked

from tests.calls import Calls
from tokenflow import Replica, TokenLimits, TokenRouter, TokenSemaphore
from tokenflow.limits import Limiter

Op = tuple[str, int, int]
"""What to do, to which one, with how much."""

OPS = (
    *["ask"] * 6,
    *["end"] * 4,
    "leave",
    "reconcile",
    "drain",
    "restore",
    "add",
    "remove",
    "resize shared",
    "resize key",
)

NAMES = ("a", "b", "c", "d")
SIZES = {"a": 12, "b": 9, "c": 10, "d": 6}
WINDOWS = {"b": 5}
REQUESTS = {"c": 2}
MODELS = {"a": "x", "d": "y"}
SPEEDS = {"a": 2.0, "b": 1.0}
KEYED = ("b", "c")  # they share a limiter


@dataclass
class Waiting:
    """A call, as the model sees it."""

    name: str
    cost: int
    model: str | None
    exclude: tuple[str, ...]
    shared: bool
    beside: bool
    stands: set[str] = field(default_factory=set)

    def is_served_by(self, replica: str) -> bool:
        return MODELS.get(replica) in (None, self.model or MODELS.get(replica))

    def fits(self, replica: str) -> bool:
        return (
            self.is_served_by(replica)
            and replica not in self.exclude
            and self.cost <= WINDOWS.get(replica, 99)
        )


@dataclass
class Held:
    """What a lease has added, to which stay of a replica."""

    stay: str
    cost: int
    gates: set[str]


@dataclass
class World:
    """A router and limits over it, and what should be in flight at each of their gates."""

    calls: Calls
    queue: list[Waiting] = field(default_factory=list)
    held: dict[str, Held] = field(default_factory=dict)
    stays: dict[str, str] = field(default_factory=dict)  # of each name, its ledger
    ledgers: set[str] = field(default_factory=set)
    drained: set[str] = field(default_factory=set)
    restored: set[str] = field(default_factory=set)  # just now, so that they start slowly
    changed: set[str] = field(default_factory=set)
    barred: set[str] = field(default_factory=set)
    number: int = 0
    waits: int = 0
    choices: int = 0

    def __post_init__(self) -> None:
        self.shared, self.key = TokenSemaphore(24), TokenSemaphore(14)
        self.limits: dict[str, int] = {"shared": 24, "key": 14}
        self.router = TokenRouter([])
        for name in NAMES[:3]:
            self.add(name)
        self.limiters: list[tuple[Limiter, bool, bool]] = [
            (self.router, False, False),
            (TokenLimits(self.shared, self.router), True, False),
            (TokenLimits(self.router, self.key, self.shared), True, True),
        ]

    def add(self, name: str) -> None:
        self.number += 1
        self.stays[name] = f"{name}{self.number}"
        self.ledgers.add(self.stays[name])
        self.limits[self.stays[name]] = SIZES[name]
        self.limits[f"requests of {self.stays[name]}"] = REQUESTS.get(name, 99)
        self.router.add(
            Replica(
                name,
                max_tokens=SIZES[name],
                context_window=WINDOWS.get(name),
                max_requests=REQUESTS.get(name),
                model=MODELS.get(name),
                tokens_per_second=SPEEDS.get(name),
                limiter=self.key if name in KEYED else None,
            )
        )

    async def apply(self, what: str, which: int, amount: int) -> None:
        """One operation, and all that follows from it."""
        self.changed = set()
        if what == "ask":
            await self.ask(which, amount)
        elif what == "end" and self.held:
            name = list(self.held)[which % len(self.held)]
            await self.calls.end(name)
            self.changed = set(self.held.pop(name).gates)
        elif what == "leave" and self.queue:
            call = self.queue.pop(which % len(self.queue))
            self.changed = set(call.stands)
            self.calls.cancel(call.name)
        elif what == "reconcile" and self.held:
            name = list(self.held)[which % len(self.held)]
            self.calls.leases[name].reconcile(amount)
            self.held[name].cost = amount
            self.changed = set(self.held[name].gates)
        else:
            self.change(what, which, amount)
        await wait_all_tasks_blocked()

    async def ask(self, which: int, amount: int) -> None:
        limiter, shared, beside = self.limiters[which % 3]
        model = (None, "x", "y")[which // 3 % 3]
        exclude = (("a",), ("b", "d"), (), ())[which // 9 % 4]
        name = str(self.number)
        self.number += 1
        self.queue.append(Waiting(name, amount, model, exclude, shared, beside))
        await self.calls.start(limiter, amount, name, model=model, exclude=exclude)

    def change(self, what: str, which: int, amount: int) -> None:
        name = NAMES[which % len(NAMES)]
        if what == "add" and name not in self.stays:
            self.look_again(self.queue)
            self.add(name)
        elif what == "remove" and name in self.stays:
            self.look_again(self.queue)
            self.drained.discard(self.stays.pop(name))
            self.router.remove(name)
        elif what == "drain" and name in self.stays:
            self.drained.add(self.stays[name])
            self.router.drain(name)
        elif what == "restore" and name in self.stays:
            self.drained.discard(self.stays[name])
            self.restored.add(self.stays[name])
            self.changed = {self.stays[name]}
            self.router.restore(name)
        elif what == "resize shared":
            self.resize("shared", self.shared, 8 + amount)
        elif what == "resize key":
            self.resize("key", self.key, amount)

    def resize(self, gate: str, semaphore: TokenSemaphore, limit: int) -> None:
        self.changed = {gate}
        if limit != self.limits[gate]:
            self.look_again([call for call in self.queue if self.may_need(gate, call)])
        self.limits[gate] = semaphore.max_tokens = limit

    def may_need(self, gate: str, call: Waiting) -> bool:
        return gate in self.before(call) or (
            gate == "key" and any(call.is_served_by(name) for name in KEYED if name in self.stays)
        )

    def look_again(self, waiting: list[Waiting]) -> None:
        """These have other ways than before."""
        for call in waiting:
            self.changed |= call.stands
            call.stands = set()

    # -- what the model says -----------------------------------------------

    def ways(self, call: Waiting) -> dict[str, set[str]]:
        """The gates of each replica that the call could ever use."""
        found: dict[str, set[str]] = {}
        for name, stay in self.stays.items():
            gates = {stay, f"requests of {stay}"} | ({"key"} if name in KEYED else set())
            gates -= self.before(call)
            if call.fits(name) and all(self.could(gate, call.cost) for gate in gates):
                found[stay] = gates
        return found

    def before(self, call: Waiting) -> set[str]:
        return {*(["shared"] if call.shared else []), *(["key"] if call.beside else [])}

    def could(self, gate: str, cost: int) -> bool:
        return gate.startswith("requests") or cost <= (self.limits[gate] or 99)

    def used(self, gate: str) -> int:
        requests = gate.startswith("requests")
        least = gate in self.ledgers
        return sum(
            1 if requests else h.cost or least for h in self.held.values() if gate in h.gates
        )

    def refuses(self, gate: str, cost: int) -> bool:
        amount = 1 if gate.startswith("requests") else cost
        if gate in self.ledgers:
            amount = amount or 1  # a call occupies at least one
        over = self.used(gate) + amount > self.limits[gate]
        return amount > 0 and (over or gate in self.drained or gate in self.barred)

    def check(self) -> None:
        """Whoever could go has gone, and nobody else."""
        for call in list(self.queue):
            if not self.ways(call) or not all(
                self.could(gate, call.cost) for gate in self.before(call)
            ):
                assert call.name in self.calls.errors
                self.queue.remove(call)
        while due := [call for call in self.heads() if self.is_due(call)]:
            self.try_one(due[0])
        for call in self.queue:
            assert call.name not in self.calls.started
            assert call.name not in self.calls.errors
            self.waits += 1
        self.compare()

    def heads(self) -> list[Waiting]:
        """The first of those who came through one limiter and may go the same ways."""
        lines: dict[object, Waiting] = {}
        for call in self.queue:
            line = (call.shared, call.beside, call.model, call.cost > 0, frozenset(self.ways(call)))
            lines.setdefault(line, call)
        return list(lines.values())

    def is_due(self, call: Waiting) -> bool:
        """New as a head, or the first who stands where something has changed?"""
        return not call.stands or any(self.first_at(gate) is call for gate in self.changed)

    def first_at(self, gate: str) -> Waiting | None:
        return next((call for call in self.queue if gate in call.stands), None)

    def try_one(self, call: Waiting) -> None:
        before, ways = self.before(call), self.ways(call)
        stood, call.stands = call.stands, set()
        self.barred = set().union(
            *(c.stands for c in self.queue[: self.queue.index(call)])  # by those who came earlier
        )
        stands = {gate for gate in before if self.refuses(gate, call.cost)}
        shut = {
            stay: {gate for gate in gates if self.refuses(gate, call.cost)}
            for stay, gates in ways.items()
        }
        is_open = [stay for stay, gates in shut.items() if not gates]
        if not is_open:
            stands = stands.union(*shut.values())
        call.stands = stands
        self.changed |= stood - stands
        if stands:
            self.changed = {g for g in self.changed if self.first_at(g) is not call}
        else:
            self.grant(call, before | ways[self.gone_to(call, is_open)])

    def gone_to(self, call: Waiting, is_open: list[str]) -> str:
        assert call.name in self.calls.started
        replica = self.calls.leases[call.name].replica
        assert replica is not None
        stay = self.stays[replica.name]
        loads = {each: self.load(each, call.cost) for each in is_open}
        assert loads[stay] == min(loads.values())
        self.choices += len(is_open) > 1
        return stay

    def load(self, stay: str, cost: int) -> float:
        """What it would have to do after taking the call."""
        speeds = [SPEEDS[name] for name in self.stays if name in SPEEDS]
        speed = SPEEDS.get(stay[0], sum(speeds) / len(speeds) if speeds else 1.0)
        pace = max(speeds, default=1.0) / speed * (10 if stay in self.restored else 1)
        return (self.used(stay) + 100 * (self.used(f"requests of {stay}") + 1) + (cost or 1)) * pace

    def grant(self, call: Waiting, gates: set[str]) -> None:
        self.queue.remove(call)
        stay = next(gate for gate in gates if gate in self.stays.values())
        self.held[call.name] = Held(stay, call.cost, gates)

    def compare(self) -> None:
        """All that is in flight anywhere is the sum of the live leases."""
        for each in self.router.statistics().replicas:
            stay = self.stays[each.name]
            assert each.tokens_in_flight == self.used(stay)
            assert each.requests_in_flight == self.used(f"requests of {stay}")
        assert self.shared.statistics().tokens_in_flight == self.used("shared")
        assert self.key.statistics().tokens_in_flight == self.used("key")
        waiting = sum(limiter._queue.waiting for limiter, _, _ in self.limiters)
        assert waiting == len(self.queue)


async def drive(ops: list[Op]) -> World:
    """Apply all operations, and check after each."""
    async with Calls() as calls:
        world = World(calls)
        for what, which, amount in ops:
            await world.apply(what, which, amount)
            world.check()
        for name in [*world.held, *(call.name for call in world.queue)]:
            calls.cancel(name)
        world.held.clear()
        world.queue.clear()
        await wait_all_tasks_blocked()
        world.compare()
    return world
