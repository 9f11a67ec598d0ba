"""What a step has to be, worked out anew each time from plain lists: the scheduler's rules."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Row:
    """One request, and all there is to know about it."""

    number: int
    key: tuple[float, ...]
    priority: int
    prompt: int
    limit: int
    reserve: int
    prefix: tuple[tuple[str, int], ...]
    state: str = "waiting"
    computed: int = 0
    output: int = 0
    promised: int = 0

    @property
    def runs(self) -> bool:
        return self.state in ("prefilling", "decoding")

    @property
    def target(self) -> int:
        """Tokens to compute before it decodes."""
        return self.prompt + self.output


@dataclass
class Planned:
    """By number of row."""

    decodes: set[int] = field(default_factory=set)
    prefills: dict[int, int] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    context: int = 0


class Planner:
    """Nothing is kept but the rows, and which prefixes are complete."""

    def __init__(self, seqs: int, budget: int, blocks: int, size: int) -> None:
        self.seqs, self.budget, self.blocks, self.size = seqs, budget, blocks, size
        self.rows: list[Row] = []
        self.complete: set[tuple[tuple[str, int], ...]] = set()

    # -- memory

    def shared(self, row: Row) -> dict[tuple[tuple[str, int], ...], range]:
        """The blocks that end in each part of its prefix, by all that leads there."""
        found, end = {}, 0
        for n, (_, tokens) in enumerate(row.prefix):
            begin, end = end, end + tokens
            found[row.prefix[: n + 1]] = range(begin // self.size, end // self.size)
        return found

    def own(self, row: Row, tokens: int) -> int:
        return -(-tokens // self.size) - sum(map(len, self.shared(row).values()))

    def held(self, row: Row) -> int:
        return self.own(row, row.computed if row.state == "decoding" else row.target)

    def used(self, measure: Callable[[Row], int]) -> int:
        """Blocks of all that run, the shared ones once."""
        running = [row for row in self.rows if row.runs]
        shared = {
            (part, block) for row in running for part, r in self.shared(row).items() for block in r
        }
        return len(shared) + sum(map(measure, running))

    def promise(self, row: Row) -> int:
        return max(row.promised, self.held(row))

    def forget(self) -> None:
        """What nobody holds any more is not complete."""
        held = {part for row in self.rows if row.runs for part in self.shared(row)}
        self.complete &= held

    # -- a step

    def step(self) -> Planned:
        plan = Planned()
        self.make_room(plan)
        decoding = [row for row in self.rows if row.state == "decoding"]
        plan.decodes = {row.number for row in decoding}
        for row in decoding:
            row.computed += 1
            row.output += 1
        self.give(plan, self.budget - len(decoding))
        part = plan.decodes | plan.prefills.keys()
        plan.context = sum(row.computed for row in self.rows if row.number in part)
        self.move_on(plan)
        return plan

    def make_room(self, plan: Planned) -> None:
        """The youngest of the lowest priority go until all others have room for a token more."""
        while self.used(lambda row: self.own(row, self.next_context(row))) > self.blocks:
            running = [row for row in self.rows if row.runs]
            row = max(running, key=lambda row: (row.priority, row.number))
            row.state, row.computed, row.promised = "waiting", 0, 0
            plan.preempted.append(row.number)
        self.forget()

    @staticmethod
    def next_context(row: Row) -> int:
        return row.computed + 1 if row.state == "decoding" else row.target

    def give(self, plan: Planned, room: int) -> None:
        slots = self.seqs - sum(row.runs for row in self.rows)
        closed = bool(plan.preempted)
        want = sorted((r for r in self.rows if r.state in ("waiting", "prefilling")), key=by_key)
        level = want[0].priority if want else 0
        lanes = {self.is_long(row) for row in want if row.priority <= level}
        halves = {True: room // 2, False: room - room // 2}
        rounds: list[tuple[float, bool]] = [(float("inf"), False)]
        if len(lanes) == 2 and room > 1:
            rounds.insert(0, (level, True))
        for limit, split in rounds:
            for row in want:
                left = halves[self.is_long(row)] if split else sum(halves.values())
                if not left or row.priority > limit:
                    continue
                if row.state == "waiting":
                    closed = closed or not slots or not self.fits(row)
                    if closed:
                        continue
                    slots -= 1
                    self.admit(row)
                tokens = min(left, row.target - row.computed)
                if tokens:
                    self.take(halves, self.is_long(row), tokens, split)
                    row.computed += tokens
                    plan.prefills[row.number] = plan.prefills.get(row.number, 0) + tokens
                    self.complete |= {
                        part
                        for part, blocks in self.shared(row).items()
                        if blocks.stop * self.size <= row.computed
                    }

    @staticmethod
    def take(halves: dict[bool, int], long: bool, tokens: int, split: bool) -> None:
        first = min(tokens, halves[long])
        assert first == tokens or not split
        halves[long] -= first
        halves[not long] -= tokens - first

    def is_long(self, row: Row) -> bool:
        return row.target > self.budget // 2

    def fits(self, row: Row) -> bool:
        row.state = "prefilling"
        row.promised = self.own(row, self.wanted(row))
        used = self.used(self.promise)
        row.state, row.promised = "waiting", 0
        return used <= self.blocks

    def wanted(self, row: Row) -> int:
        """A token more than it has, or what is reserved; at most what it can come to."""
        most = row.prompt + row.limit - 1 if row.limit else row.prompt
        return max(row.target, min(most, max(row.target + 1, row.prompt + row.reserve - 1)))

    def admit(self, row: Row) -> None:
        row.state = "prefilling"
        row.promised = self.own(row, self.wanted(row))
        for part, blocks in self.shared(row).items():
            if part not in self.complete:
                break
            row.computed = min(blocks.stop * self.size, row.target - 1)

    def move_on(self, plan: Planned) -> None:
        for row in self.rows:
            if row.state == "prefilling" and row.computed == row.target:
                row.output = min(row.output + 1, row.limit)
                row.state = "decoding"
            if row.state == "decoding" and row.output == row.limit:
                row.state = "finished"
                plan.finished.add(row.number)
        self.forget()


def by_key(row: Row) -> tuple[float, ...]:
    return row.key
