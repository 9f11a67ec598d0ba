"""The sliding window, as a pure ledger.

Goal: in no half-open span `[t, t + per)`, wherever it starts, is more than the
limit charged, and nearly all that an exact log would admit is admitted.

Charges less than `per / 1000` apart share a slot, and a slot leaves with its
youngest charge: the error is on the safe side, and about 1,000 slots are the
most there can be, whatever the traffic. Slots stand in arrival order; their
sums by blocks of 32 let the ledger find the instant at which enough will have
left by two short scans that run in C, so that a question costs the same with
ten slots and with a thousand.

Invariant: `used == sum(amounts)`, in integers, after every step.

Bursts follow the generic cell rate algorithm (ITU-T I.371) on top: a schedule
that runs ahead of the clock by what was admitted. A correction moves it by the
difference, unless it has caught up with the clock since: what idling has worked
off cannot be had twice.

What a server has counted beyond us is others' use. The comparison is with what it
can have counted of us, which is less than this window remembers: a minute that
resets in s seconds began 60 - s ago, and a bucket that needs s seconds to be full
again has held nothing but what came since then either. It has counted at some
instant between the sending of a call and its answer; of all these, the one that
blames others least is assumed. So a report that counts nobody but us keeps nobody
waiting, however long the call took and whatever was sent meanwhile, if each call was
charged at least what the server counts for it. Others' use
leaves as the server forgets it: in small steps where that refills steadily, or else
at the reset.

While we are busy, a report proves little: what was sent since the call that it answers
hides others' use. So what an earlier one proved, in this period or the one before, is
believed on as far as later reports leave room for it, and for twice that in a period
that began anew, since others go on while reports are on their way. Where nothing was
ever proved, nothing is believed.

A server's limit does not replace the configured one. We stay within the lower of the
two, and we and others together within the server's, if it is known: others take room
of ours only where the account would run out before we do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from typing import Literal, final

from tokenflow._usage import (
    QuotaStatus,
    Usage,
    finite_seconds,
    known_count,
    known_seconds,
    positive_int,
    positive_seconds,
)

from ._gate import CostFunction, cost_function, unit_name

__all__ = ["Settle", "WindowGate"]

Settle = Literal["actual", "reserved"]

_SLOTS = 1000
_BLOCK = 32
_ROUNDING = 1.0  # seconds: a reset may have been rounded up to whole ones
_STEPS = 20  # in which a bucket empties: nobody waits longer than a 20th of its reset too long


# What one charge put into one slot, and what it takes to undo it to the bit: the slot's
# number, the amount, which of the slot's charges it was, the slot's youngest before it, and
# the schedule before and after. A plain tuple, for speed.
_Piece = tuple[int, int, int, float, float, float]
_Charge = tuple[_Piece, ...]


@final
class WindowGate:
    """At most `limit` within any `per` seconds; see `Quota` for what each setting means.

    Each step costs O(1) amortised, `ready_at` of a call that has to wait two
    scans of at most 32 numbers.
    """

    __slots__ = (
        "__weakref__",
        "_amounts",
        "_base",
        "_blocks",
        "_burst",
        "_busy_since",
        "_clear_at",
        "_configured",
        "_first",
        "_foreign",
        "_interval",
        "_joined",
        "_last",
        "_limit",
        "_observed_at",
        "_opened",
        "_others",
        "_paused_until",
        "_period_ends",
        "_proved",
        "_proved_before",
        "_stale_at",
        "_told",
        "_width",
        "_window",
        "_youngest",
        "account_limit",
        "cost",
        "of",
        "per",
        "settle",
        "used",
    )

    in_flight = False
    timed = True

    def __init__(
        self,
        limit: int,
        per: float = 60.0,
        *,
        of: str | Callable[[Usage], int] = "tokens",
        burst: int | None = None,
        settle: Settle = "actual",
        leeway: float = 0.0,
        paused_until: float = -math.inf,
    ) -> None:
        if settle not in ("actual", "reserved"):
            raise ValueError(f'settle must be "actual" or "reserved", not {settle!r}')
        self.cost: CostFunction = cost_function(of, declared=settle == "reserved")
        self.of: str = unit_name(of)
        self.per: float = positive_seconds(per, "per")
        self.used: int = 0
        self.settle: Settle = settle  # for leases, who know what a call declared
        self._window = self.per + finite_seconds(leeway, "leeway")
        self._width = self._window / _SLOTS
        self._youngest: list[float] = []  # of each slot, the time of its last charge
        self._amounts: list[int] = []
        self._blocks: list[int] = []  # sums of _BLOCK slots each
        self._first = 0  # slots before this index have left
        self._base = 0  # the number of the slot at index 0
        self._last = -1  # and of the last one
        self._opened = -math.inf  # when the last slot was opened
        self._joined = 0  # how many charges have gone into it
        self._stale_at = math.inf  # nothing leaves before this
        self._burst = None if burst is None else positive_int(burst, "burst")
        self._clear_at = -math.inf  # when the schedule has caught up with all that was charged
        self._busy_since = -math.inf  # the last charge that found it idle
        self._foreign = 0  # what others have used, as the server counts
        self._others: list[tuple[float, int]] = []  # when how much of that leaves
        self._observed_at = -math.inf  # when the call was sent that told so
        self._proved = 0  # what others had used at least, at some time in this period
        self._proved_before = 0  # and in the one before
        self._period_ends = -math.inf
        self._paused_until = paused_until
        self._told = 0  # the server's limit, once it has named one
        self.limit = positive_int(limit, "limit")

    @property
    def limit(self) -> int:
        """The lower of what was set and what the server last told.

        Writable; wakes nobody, which is for `TokenRateLimiter.set_limit`. 0 is a pause.
        """
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._configured = limit
        self._compare_limits()

    def _compare_limits(self) -> None:
        # What we and others have together, as far as is known.
        self.account_limit: int = self._told or self._configured
        self._limit = min(self._configured, self.account_limit)
        if self._limit:
            self._interval = self.per / self._limit

    def largest(self) -> float:
        return self._limit or math.inf

    def ready_at(self, cost: int, now: float) -> float:
        if now >= self._stale_at:
            self._expire(now)
        over = self.used + cost - self._limit
        over_in_all = self.used + self._foreign + cost - self.account_limit
        if over <= 0 >= over_in_all and now >= self._paused_until and self._burst is None:
            return now  # the common case, in few steps
        if cost > self._limit:
            return math.inf
        ready = max(now, self._paused_until)
        if self._burst is not None:
            ready = max(ready, self._clear_at - max(0, self._burst - cost) * self._interval)
        if over > 0 and self._limit < self.account_limit:  # else the other says as much
            ready = max(ready, self._slots_left_at(over))
        return ready if over_in_all <= 0 else max(ready, self._drained_at(over_in_all))

    def charge(self, cost: int, now: float) -> _Charge:
        if not cost:
            return ()
        if now - self._opened >= self._width:
            before = now
            self._open(now)
        else:
            before = self._youngest[-1]
            if now > before:
                self._youngest[-1] = now
            self._joined += 1
        self._amounts[-1] += cost
        self._blocks[-1] += cost
        self.used += cost
        if self._burst is None:
            return ((self._last, cost, self._joined, before, 0.0, 0.0),)
        clear_at = self._clear_at
        if now >= clear_at:
            self._busy_since = now
        self._clear_at = max(clear_at, now) + cost * self._interval
        return ((self._last, cost, self._joined, before, clear_at, self._clear_at),)

    def undo(self, charge: _Charge, now: float) -> None:
        self._expire(now)
        for slot, amount, joined, before, clear_at, clear_after in reversed(charge):
            index = slot - self._base
            if index < self._first:
                continue
            if self._clear_at == clear_after:
                self._clear_at = clear_at
                self._add(index, -amount)
            else:
                self._give_back(index, amount)
            if slot == self._last and joined == self._joined:
                self._leave_last(before)
        self._stale_at = -math.inf

    def correct(self, charge: _Charge, cost: int, now: float) -> _Charge:
        over = cost - sum(amount for _, amount, *_ in charge)
        if over > 0:
            self._expire(now)
            # Until now the server may have counted it, and we not: that was no proof of others.
            self._proved = max(0, self._proved - over)
            self._proved_before = max(0, self._proved_before - over)
            return self._merge(self._without_gone(charge), self.charge(over, now))
        if over == 0:
            return charge
        return self._credit(charge, -over, now)

    def release(self, charge: _Charge) -> None:
        """Nothing: what was sent stays in its window."""

    def give_up(self) -> None:
        """Nothing: what was sent stays in its window."""

    def shift(self, seconds: float) -> None:
        self._youngest = [youngest + seconds for youngest in self._youngest]
        self._opened += seconds
        if self._joined:  # else nobody knows how many: the last slot was taken back
            self._joined += 1  # what charges remember of times is by the other clock
        self._stale_at = -math.inf
        self._clear_at += seconds
        self._busy_since += seconds
        self._others = [(leaves + seconds, amount) for leaves, amount in self._others]
        self._observed_at += seconds
        self._period_ends += seconds
        self._paused_until += seconds

    def pause(self, until: float) -> None:
        """Admit nothing before this instant. Only ever extends."""
        self._paused_until = max(self._paused_until, until)

    def observe(self, status: QuotaStatus, now: float, age: float = 0.0) -> None:
        """Remember the server's limit, and book what it counts beyond us until it resets.

        `age`: how many seconds ago the call was sent whose answer says so. What makes no
        sense (negative, above the limit, a limit of 0) is unknown, and so is what was
        left before a call that has been answered already.
        """
        self._expire(now)
        limit, remaining = known_count(status.limit), known_count(status.remaining)
        if limit:
            self._told = limit
            self._compare_limits()
        if remaining is None or remaining > self.account_limit or now - age < self._observed_at:
            return
        used, sent = self.account_limit - remaining, now - age
        reset = known_seconds(status.reset)
        if reset is not None and reset <= self.per + _ROUNDING:
            reset = min(reset, self.per)
            ours = self._charged_since(sent + reset - self.per - _ROUNDING)
            steps = _STEPS if status.refills_steadily else 1
            others = self._likely_others(used - ours, sent, reset, anew=steps == 1)
            self._book_others(others, sent, reset, steps)
        elif not self._has_left_since(sent):
            self._book_others(used - self.used, sent, self._window, 1)

    def _likely_others(self, least: int, sent: float, reset: float, *, anew: bool) -> int:
        """`least`, or what was proved before, where that is more, as far as the report allows."""
        if sent >= self._period_ends:
            self._proved_before = self._proved if sent < self._period_ends + self.per else 0
            self._proved, self._period_ends = 0, sent + (reset if anew else self.per)
        self._proved = max(self._proved, least)
        if not (self._proved or self._proved_before):
            return 0  # as nearly always
        most = least + self._charged_since(math.nextafter(sent, math.inf))
        # In a period that began anew they go on while reports are on their way.
        expected = min(self._proved_before, 2 * most if anew else most)
        return max(expected, min(self._proved, most))

    def _book_others(self, tokens: int, sent: float, reset: float, steps: int) -> None:
        """In place of what was booked before; it leaves in equal steps until the reset."""
        parts = [tokens * n // steps for n in range(steps + 1)] if tokens > 0 else [0]
        self._observed_at = sent
        self._foreign = parts[-1]
        self._others = [
            (sent + reset * n / steps, parts[n] - parts[n - 1]) for n in range(1, len(parts))
        ]
        self._stale_at = -math.inf

    def _charged_since(self, at: float) -> int:
        """What is in the window from `at` on, and what shares a slot with it."""
        first = bisect_left(self._youngest, at, self._first)
        return sum(self._amounts[first:])

    def _has_left_since(self, at: float) -> bool:
        """Has something left the window that the server may have counted at that instant?"""
        return self._first > 0 and self._youngest[self._first - 1] + self._window > at

    def used_at(self, now: float) -> int:
        """What counts against the limit at `now`, others' use included. Changes nothing.

        Of others' use, what they can have had of an account's limit beyond ours is left out.
        """
        used = self.used
        for index in range(self._first, len(self._youngest)):
            if now - self._youngest[index] < self._window:
                break
            used -= self._amounts[index]
        others = sum(amount for leaves, amount in self._others if now < leaves)
        return used + max(0, others - (self.account_limit - self._limit))

    def paused_for(self, now: float) -> float:
        """Seconds of pause left."""
        return max(0.0, self._paused_until - now)

    def is_idle(self, now: float) -> bool:
        """Has it nothing on account? (A limit that a server set is forgotten with it.)"""
        schedule = max(self._clear_at, self._paused_until)
        return now >= schedule and self.used_at(now) == 0

    def __repr__(self) -> str:
        return f"<{self.used:,} of {self._limit:,} {self.of} per {self.per:g} s>"

    def _expire(self, now: float) -> None:
        first, youngest, window = self._first, self._youngest, self._window
        slots = len(youngest)
        while first < slots and now - youngest[first] >= window:
            self._add(first, -self._amounts[first])
            first += 1
        self._first = first
        if first > _SLOTS:
            self._forget((first - 1) // _BLOCK * _BLOCK)  # keeps the one that left last
        while self._others and now >= self._others[0][0]:
            self._foreign -= self._others.pop(0)[1]
        self._stale_at = self._others[0][0] if self._others else math.inf
        if self._first < len(self._youngest):
            self._stale_at = min(self._stale_at, self._youngest[self._first] + window)

    def _forget(self, slots: int) -> None:
        """Drop whole blocks of slots that have left."""
        del self._youngest[:slots], self._amounts[:slots], self._blocks[: slots // _BLOCK]
        self._first -= slots
        self._base += slots

    def _open(self, now: float) -> None:
        if len(self._youngest) % _BLOCK == 0:
            self._blocks.append(0)
        self._youngest.append(now)
        self._amounts.append(0)
        self._opened = now
        self._joined = 1
        self._last += 1
        self._stale_at = min(self._stale_at, now + self._window)

    def _leave_last(self, youngest: float) -> None:
        """Take back the latest charge of the last slot; without any, it was never opened."""
        self._joined -= 1
        self._youngest[-1] = youngest
        if self._joined == 0:
            self._youngest.pop()
            self._amounts.pop()
            if len(self._youngest) % _BLOCK == 0:
                self._blocks.pop()
            self._opened = -math.inf
            self._last -= 1

    def _add(self, index: int, amount: int) -> None:
        self._amounts[index] += amount
        self._blocks[index // _BLOCK] += amount
        self.used += amount

    def _without_gone(self, charge: _Charge) -> _Charge:
        """What has left the window as one piece, so that a long stream stays small as well."""
        first = self._base + self._first
        if len(charge) < 2 or charge[1][0] >= first:
            return charge
        gone = [piece for piece in charge if piece[0] < first]
        amount = sum(piece[1] for piece in gone)
        return ((gone[-1][0], amount, *gone[-1][2:]), *charge[len(gone) :])

    def _merge(self, charge: _Charge, more: _Charge) -> _Charge:
        """One piece for each slot, so that a stream which reports every chunk stays small."""
        if not charge or charge[-1][0] != self._last:
            return charge + more
        slot, amount, joined, before, clear_at, clear_after = charge[-1]
        _, added, again, _, clear_between, clear_now = more[0]
        if again == joined + 1 and clear_between == clear_after:
            self._joined = joined
        else:  # others came between: their records hold, so this one is undone by amount alone
            joined, clear_now = -1, math.nan
        return (*charge[:-1], (slot, amount + added, joined, before, clear_at, clear_now))

    def _credit(self, charge: _Charge, tokens: int, now: float) -> _Charge:
        """Lower the pieces, the newest first; those still in the window give it back."""
        self._expire(now)
        pieces: list[_Piece] = []
        for slot, amount, joined, before, clear_at, clear_after in reversed(charge):
            given = min(tokens, amount)
            tokens -= given
            if slot - self._base >= self._first:
                self._give_back(slot - self._base, given)
            if given:  # no longer what it was: nothing to restore to the bit
                clear_after = math.nan
            pieces.append((slot, amount - given, joined, before, clear_at, clear_after))
        return tuple(reversed(pieces))

    def _give_back(self, index: int, amount: int) -> None:
        self._add(index, -amount)
        if self._youngest[index] >= self._busy_since:
            self._clear_at -= amount * self._interval

    def _drained_at(self, over: int) -> float:
        """The instant at which `over` of what counts now will have left."""
        drained = self._slots_left_at(over) if over <= self.used else math.inf
        for leaves, amount in self._others:
            over -= amount
            if leaves < drained and over <= self.used:
                rest = self._slots_left_at(over) if over > 0 else -math.inf
                drained = min(drained, max(leaves, rest))
        return drained

    def _slots_left_at(self, amount: int) -> float:
        """The instant at which the oldest slots, `amount` in all, will have left."""
        block = self._first // _BLOCK
        sums = list(accumulate(self._blocks[block:], initial=0))
        found = bisect_left(sums, amount) - 1
        start = (block + found) * _BLOCK
        inside = list(accumulate(self._amounts[start : start + _BLOCK]))
        youngest = self._youngest[start + bisect_left(inside, amount - sums[found])]
        leaves = youngest + self._window
        while leaves - youngest < self._window:
            leaves = math.nextafter(leaves, math.inf)
        return leaves
