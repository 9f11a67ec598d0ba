"""One gate as the limiters see it: who stands there, and which event loop's run uses it."""

from __future__ import annotations

import os
import warnings
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, final
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from tokenflow._run import OUTSIDE, Run, current_run

from ._gate import Gate
from ._order import Key
from ._waiter import Queue, Waiter

if TYPE_CHECKING:
    from ._admission import Path

__all__ = ["Turnstile", "enter_all", "guard", "turnstile"]


@final
class Turnstile:
    """A gate, and those who stand at it: per limiter, its paths sorted by their heads' keys."""

    __slots__ = ("__weakref__", "epoch", "gate", "home", "lines", "paths", "pid", "run")

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.lines: dict[Queue, list[tuple[Key, Path]]] = {}
        self.paths: WeakSet[Path] = WeakSet()
        self.run: Run | None = _last_run(gate)
        self.epoch = 0  # how often what was in flight has been given up
        self.pid = os.getpid()
        self.home: tuple[dict[Hashable, Turnstile], Hashable] | None = None  # where it is kept

    def first(self) -> Path:
        """The earliest of those who stand here."""
        if len(self.lines) == 1:
            for line in self.lines.values():
                return line[0][1]
        return min((line[0][1] for line in self.lines.values()), key=lambda path: path.rank())

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
        with suppress(TypeError):  # some gate that cannot be weakly referenced
            _runs[self.gate] = run
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


# By id: a turnstile holds its gate, so that no id is used again while it is in here.
_turnstiles: WeakValueDictionary[int, Turnstile] = WeakValueDictionary()


# A gate may outlive all limiters over it; what it remembers is by this run's clock.
_runs: WeakKeyDictionary[Gate, Run] = WeakKeyDictionary()


def _last_run(gate: Gate) -> Run | None:
    with suppress(TypeError):
        return _runs.get(gate)
    return None


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


def guard(gates: Iterable[Gate]) -> Run:
    """Be sure that these gates may be changed from here; returns the run they go by."""
    return enter_all([turnstile(gate) for gate in gates])
