"""The sliding window as a pure ledger, against an exact log of every charge."""

import gc
import math
import random
import sys
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.oracle import greatest_window, saturate
from tests.servers import Bucket, Minute
from tokenflow import Quota, QuotaStatus, TokenRateLimiter
from tokenflow.limits import WindowGate

PER = 60.0
LIMIT = 100
SLOT = PER / 1000


class ExactLog:
    """What the ledger approximates: every charge with its instant."""

    def __init__(self) -> None:
        self.charges: dict[int, list[tuple[float, int]]] = {}

    def used(self, now: float, per: float = PER) -> int:
        pieces = [piece for charge in self.charges.values() for piece in charge]
        return sum(amount for at, amount in pieces if now - at < per)

    def shift(self, seconds: float) -> None:
        for pieces in self.charges.values():
            pieces[:] = [(at + seconds, amount) for at, amount in pieces]

    def correct(self, key: int, cost: int, now: float) -> None:
        pieces = self.charges[key]
        over = cost - sum(amount for _, amount in pieces)
        if over > 0:
            pieces.append((now, over))
        for i in reversed(range(len(pieces))):
            given = min(max(0, -over), pieces[i][1])
            pieces[i] = (pieces[i][0], pieces[i][1] - given)
            over += given


costs = st.integers(1, LIMIT)
steps = st.sampled_from([0.004, 0.0201, SLOT, 0.3, 7.0, 29.97, PER - SLOT, PER, 200.0])


class LedgerAgainstLog(RuleBasedStateMachine):
    """Charges, undos and corrections at any time; nobody looks at the slots."""

    burst: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.gate = WindowGate(LIMIT, PER, burst=self.burst)
        self.log = ExactLog()
        self.now = 1000.0
        self.open: dict[int, Any] = {}
        self.key = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.open)))

    @precondition(lambda self: self.open)
    @rule(seconds=steps)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.sampled_from([-900.0, 4000.0]))
    def another_run_begins(self, seconds: float) -> None:
        """Its clock is not the last one's."""
        self.gate.shift(seconds)
        self.log.shift(seconds)
        self.now += seconds

    @rule(cost=costs)
    def ask(self, cost: int) -> None:
        if self.gate.ready_at(cost, self.now) > self.now:
            assert self.burst or self.log.used(self.now, PER + SLOT + 1e-9) + cost > LIMIT, (
                "refused for nothing"
            )
            return
        assert self.log.used(self.now) + cost <= LIMIT, "admitted over the limit"
        self.key += 1
        self.open[self.key] = self.gate.charge(cost, self.now)
        self.log.charges[self.key] = [(self.now, cost)]

    @rule(cost=costs)
    def wait_for(self, cost: int) -> None:
        ready = self.gate.ready_at(cost, self.now)
        if self.now < ready < math.inf:
            self.now = math.nextafter(ready, -math.inf)
            again = self.gate.ready_at(cost, self.now)
            assert abs(again - ready) < 1e-9, "it could have gone before"  # but for an ulp
            self.now = ready
            assert self.gate.ready_at(cost, self.now) <= ready, "not ready at the promised instant"

    @precondition(lambda self: self.open)
    @rule(data=st.data(), cost=st.integers(0, 2 * LIMIT))
    def correct(self, data: st.DataObject, cost: int) -> None:
        key = self.pick(data)
        self.open[key] = self.gate.correct(self.open[key], cost, self.now)
        self.log.correct(key, cost, self.now)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        key = self.pick(data)
        self.gate.undo(self.open.pop(key), self.now)
        del self.log.charges[key]

    @rule(cost=st.integers(1, 2 * LIMIT))
    def try_on(self, cost: int) -> None:
        """As backfill does: charge, look, undo, all at one instant."""
        before = [self.gate.ready_at(each, self.now) for each in range(1, LIMIT + 1, 3)]
        self.gate.undo(self.gate.charge(cost, self.now), self.now)
        assert [self.gate.ready_at(each, self.now) for each in range(1, LIMIT + 1, 3)] == before

    @invariant()
    def it_counts_all_and_little_more(self) -> None:
        used = self.gate.used_at(self.now)
        assert self.log.used(self.now) <= used <= self.log.used(self.now, PER + SLOT + 1e-9)

    @invariant()
    def used_is_the_sum_of_its_slots(self) -> None:
        assert self.gate.used == sum(self.gate._amounts) == sum(self.gate._blocks)
        assert all(amount >= 0 for amount in self.gate._amounts)


class LedgerWithBurstAgainstLog(LedgerAgainstLog):
    """The same with a schedule on top."""

    burst = 40


TestLedgerAgainstLog = LedgerAgainstLog.TestCase
TestLedgerWithBurstAgainstLog = LedgerWithBurstAgainstLog.TestCase


def live_slots(gate: WindowGate) -> int:
    return len(gate._amounts) - gate._first


def greedy(gate: WindowGate, arrivals: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """What the gate admits of calls that go away when refused."""
    admitted = []
    for now, cost in arrivals:
        if gate.ready_at(cost, now) <= now:
            gate.charge(cost, now)
            admitted.append((now, cost))
    return admitted


def greedy_exactly(limit: int, arrivals: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """The same with a log of every charge."""
    log: deque[tuple[float, int]] = deque()
    admitted, used = [], 0
    for now, cost in arrivals:
        while log and now - log[0][0] >= PER:
            used -= log.popleft()[1]
        if used + cost <= limit:
            log.append((now, cost))
            admitted.append((now, cost))
            used += cost
    return admitted


def poisson(
    seed: int, *, per_second: float, largest: int, seconds: float
) -> list[tuple[float, int]]:
    randomness = random.Random(seed)
    arrivals, now = [], 0.0
    while (now := now + randomness.expovariate(per_second)) < seconds:
        arrivals.append((now, randomness.randint(1, largest)))
    return arrivals


@pytest.mark.parametrize("largest", [1, 30, 500])
def test_it_admits_nearly_what_an_exact_log_would(largest: int) -> None:
    limit = 10_000
    arrivals = poisson(
        1, per_second=1.2 * limit / PER / ((1 + largest) / 2), largest=largest, seconds=300
    )
    ours = sum(cost for _, cost in greedy(WindowGate(limit, PER), arrivals))
    exact = sum(cost for _, cost in greedy_exactly(limit, arrivals))
    assert exact < sum(cost for _, cost in arrivals), "the load has to exceed the limit"
    assert ours >= 0.998 * exact


@given(st.lists(st.tuples(steps, costs), min_size=1, max_size=60))
def test_no_window_holds_more_than_the_limit(gaps: list[tuple[float, int]]) -> None:
    now, arrivals = 0.0, []
    for seconds, cost in gaps:
        now += seconds
        arrivals.append((now, cost))
    assert greatest_window(greedy(WindowGate(LIMIT, PER), arrivals)) <= LIMIT


@pytest.mark.parametrize("per_second", [1, 17, 300])
def test_a_thousand_slots_are_enough_for_any_traffic(per_second: int) -> None:
    gate = WindowGate(10**9, PER)
    most = most_kept = 0
    for step in range(180 * per_second):
        gate.ready_at(1, step / per_second)
        gate.charge(1, step / per_second)
        most = max(most, live_slots(gate))
        most_kept = max(most_kept, len(gate._amounts))
    assert most <= 1001
    assert most_kept <= 2100


def calls_made(func: Callable[[], object]) -> int:
    """How many functions run, those in C included: what time would say, but exactly."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # or finalizers that it happens to run would count
    sys.setprofile(count)
    try:
        func()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def test_a_limit_of_100_000_000_costs_what_100_costs() -> None:
    """limits 268: state is O(slots), not O(tokens)."""
    arrivals = [(step * 0.05, 1 + step % 7) for step in range(3000)]
    small, large = WindowGate(100, PER), WindowGate(100_000_000, PER)
    scaled = [(now, cost * 1_000_000) for now, cost in arrivals]
    assert calls_made(lambda: greedy(small, arrivals)) == calls_made(lambda: greedy(large, scaled))
    assert live_slots(small) == live_slots(large)
    assert large.used == small.used * 1_000_000


def test_a_question_costs_the_same_with_ten_slots_and_with_a_thousand() -> None:
    few, many = WindowGate(10, PER), WindowGate(1000, PER)
    for gate in (few, many):
        for step in range(gate.limit):
            gate.charge(1, step * 0.0599)
        gate.ready_at(1, 59.9)
    assert live_slots(many) > 40 * live_slots(few)
    ask_few = calls_made(lambda: few.ready_at(5, 59.9))
    assert calls_made(lambda: many.ready_at(500, 59.9)) <= ask_few + 3


def test_exactly_at_the_limit_admits_and_exactly_at_the_period_frees() -> None:
    gate = WindowGate(LIMIT, PER)
    gate.charge(60, 0.0)
    assert gate.ready_at(40, 1.0) == 1
    assert gate.ready_at(41, 1.0) == 60
    assert gate.ready_at(41, math.nextafter(60, 0)) == 60
    assert gate.ready_at(41, 60.0) == 60


def test_a_cost_above_the_limit_is_never_ready() -> None:
    gate = WindowGate(LIMIT, PER)
    assert gate.largest() == LIMIT
    assert gate.ready_at(LIMIT + 1, 0.0) == math.inf


def test_two_charges_of_one_instant_undone_in_either_order() -> None:
    """The second one's slot must not leave with the first one's neighbour."""
    gate = WindowGate(LIMIT, PER)
    gate.charge(10, 0.0)
    cancelled = gate.charge(10, 0.01)
    gate.charge(80, 0.01)
    gate.undo(cancelled, 0.01)
    assert gate.ready_at(LIMIT, 0.02) - 0.01 >= PER
    assert gate.ready_at(20, 0.02) - 0.01 >= PER


def test_undone_in_another_run_after_the_slot_behind_it_was_taken_back() -> None:
    gate = WindowGate(LIMIT, PER)
    first, second = gate.charge(4, 0.0), gate.charge(60, 0.0)
    gate.undo(gate.charge(1, 1.0), 1.0)
    gate.shift(4_000.0)
    gate.undo(first, 4_001.0)
    assert gate.used == sum(gate._amounts) == 60
    gate.undo(second, 4_001.0)
    assert gate.used == sum(gate._amounts) == 0


def test_a_charge_corrected_to_nothing_can_still_be_undone() -> None:
    gate = WindowGate(LIMIT, PER)
    first, second = gate.charge(10, 0.0), gate.charge(10, 0.01)
    second = gate.correct(second, 0, 0.01)
    gate.undo(first, 0.01)
    third = gate.charge(70, 0.02)
    gate.undo(second, 0.02)
    assert gate.used == 70
    gate.undo(third, 0.02)
    assert gate.ready_at(LIMIT, 0.02) == 0.02


@pytest.mark.parametrize("shift", [-500.0, 10_000.0])
def test_undo_by_another_runs_clock(shift: float) -> None:
    gate = WindowGate(LIMIT, PER)
    gate.charge(60, 500.0)
    cancelled = gate.charge(40, 500.01)
    gate.shift(shift)
    gate.undo(cancelled, 501.0 + shift)
    assert gate.ready_at(40, 501.0 + shift) == 501 + shift
    assert 560 + shift <= gate.ready_at(41, 501.0 + shift) < 560.06 + shift


def test_undo_after_the_window_has_passed_gives_nothing_back_twice() -> None:
    gate = WindowGate(LIMIT, PER)
    old = gate.charge(60, 0.0)
    gate.charge(100, 60.0)
    gate.undo(old, 61.0)
    assert gate.used == 100
    assert gate.ready_at(1, 61.0) == 120


def test_a_credit_is_never_more_than_what_is_still_there() -> None:
    gate = WindowGate(LIMIT, PER)
    charge = gate.charge(60, 0.0)
    charge = gate.correct(charge, 90, 50.0)  # 60 from 0.0, 30 from 50.0
    charge = gate.correct(charge, 10, 61.0)  # 60 have left: only the 30 can be given back
    assert gate.used == 0
    charge = gate.correct(charge, 25, 62.0)
    assert gate.used == 15


def test_leeway_is_added_to_the_period() -> None:
    gate = WindowGate(LIMIT, PER, leeway=0.5)
    gate.charge(LIMIT, 0.0)
    assert gate.ready_at(1, 60.4) == 60.5


def test_a_pause_only_ever_extends() -> None:
    gate = WindowGate(LIMIT, PER)
    gate.pause(10.0)
    gate.pause(5.0)
    assert gate.ready_at(1, 1.0) == 10
    assert gate.paused_for(4.0) == 6
    assert gate.ready_at(1, 11.0) == 11


def observe(gate: WindowGate, now: float, age: float = 0.0, /, **said: Any) -> None:
    gate.observe(QuotaStatus(of="tokens", **said), now, age)


def test_foreign_use_is_replaced_and_leaves_at_its_reset() -> None:
    gate = WindowGate(LIMIT, PER)
    gate.charge(20, 0.0)
    observe(gate, 1.0, remaining=30, reset=10.0)  # 70 used, 50 of them by others
    assert gate.used_at(1.0) == 70
    assert gate.ready_at(31, 1.0) == 11
    observe(gate, 2.0, remaining=70, reset=30.0)  # 10 by others
    assert gate.used_at(2.0) == 30
    assert [gate.ready_at(cost, 2.0) for cost in (70, 80, 81, 100)] == [2, 32, 60, 60]
    assert gate.used_at(32.0) == 20
    observe(gate, 33.0, remaining=90)  # the server has counted less than we have sent
    assert gate.used_at(33.0) == 20


def test_foreign_use_without_a_reset_leaves_after_the_period() -> None:
    gate = WindowGate(LIMIT, PER)
    observe(gate, 5.0, remaining=0)
    assert gate.ready_at(1, 6.0) == 65
    observe(gate, 7.0, remaining=0, reset=9000.0)
    assert gate.ready_at(1, 8.0) == 67


@given(
    charges=st.lists(st.tuples(st.floats(0, 50), st.integers(1, 40)), max_size=12),
    remaining=st.integers(0, LIMIT),
    reset=st.floats(0, 90),
    cost=costs,
)
def test_ready_at_is_the_first_instant_with_foreign_use(
    charges: list[tuple[float, int]], remaining: int, reset: float, cost: int
) -> None:
    gate = WindowGate(LIMIT, PER)
    for at, amount in sorted(charges):
        gate.charge(amount, at)
    observe(gate, 50.0, remaining=remaining, reset=reset)
    ready = gate.ready_at(cost, 50.0)
    if ready > 50:
        assert gate.used_at(math.nextafter(ready, 0)) + cost > LIMIT
    assert gate.used_at(ready) + cost <= LIMIT


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from([0.0, 1 / 64, 0.75, 5.0, 29.0, 61.0]),  # seconds since the call before
            costs,
            st.sampled_from([1 / 16, 1.0, 12.0, 45.0, 130.0]),  # until its answer
            st.booleans(),  # does that tell what was left at its arrival?
        ),
        min_size=1,
        max_size=25,
    ),
    phase=st.sampled_from([0.0, 17.25, 59.75]),
    rounded=st.sampled_from([float, math.floor, math.ceil]),
    steadily=st.booleans(),
)
def test_a_report_that_counts_nobody_but_us_keeps_nobody_waiting(
    calls: list[tuple[float, int, float, bool]],
    phase: float,
    rounded: Callable[[float], float],
    steadily: bool,
) -> None:
    """However long calls take, and in whatever order they are answered."""
    for server in (Bucket(LIMIT), Minute(LIMIT, phase)):
        unaware, aware = WindowGate(LIMIT, PER), WindowGate(LIMIT, PER)
        sent, events = 0.0, []
        for gap, cost, latency, is_early in calls:
            sent = max(sent + gap, unaware.ready_at(cost, sent + gap))
            unaware.charge(cost, sent)
            events += [(sent, 1, sent, cost, is_early), (sent + latency, 0, sent, 0, is_early)]
        said_early: dict[float, dict[str, Any]] = {}
        for now, _, sent, cost, is_early in sorted(events):
            if cost:
                assert aware.ready_at(cost, now) <= now
                aware.charge(cost, now)
                assert server.take(cost, now) == 0
                said_early[now] = server.said(now)
            else:
                said = said_early[sent] if is_early else server.said(now)
                said |= {"reset": rounded(said["reset"]), "refills_steadily": steadily}
                observe(aware, now, now - sent, **said)


def test_what_was_left_when_a_long_call_began_is_not_what_is_left_now() -> None:
    bucket, gate = Bucket(LIMIT), WindowGate(LIMIT, PER)
    for now, cost in ((0.0, 90), (1.0, 10)):
        bucket.take(cost, now)
        gate.charge(cost, now)
    said = bucket.said(1.0)
    assert said["remaining"] == 1
    observe(gate, 71.0, 70.0, **said)
    assert gate.ready_at(LIMIT, 71.0) == 71


def test_an_answer_to_an_earlier_call_does_not_replace_what_a_later_one_told() -> None:
    gate = WindowGate(LIMIT, PER)
    observe(gate, 10.0, 1.0, remaining=40, reset=30.0)
    observe(gate, 11.0, 5.0, remaining=90, reset=33.0, limit=80)
    assert gate.limit == 80
    assert gate.used_at(11.0) == 60
    observe(gate, 12.0, 1.0, remaining=70, reset=30.0)
    assert gate.used_at(12.0) == 10


def test_without_a_reset_what_has_left_since_cannot_be_told_from_others_use() -> None:
    gate = WindowGate(LIMIT, PER)
    gate.charge(90, 0.0)
    observe(gate, 61.0, 11.0, remaining=10)
    assert gate.used_at(61.0) == 0
    observe(gate, 61.0, 0.5, remaining=10)
    assert gate.used_at(61.0) == 90


@pytest.mark.parametrize("slots", [1, 1_000, 1_024, 1_040])
def test_what_left_last_is_remembered(slots: int) -> None:
    gate = WindowGate(10**6, PER)
    for step in range(slots):
        gate.charge(1, step / 16)
    left_at = (slots - 1) / 16 + PER
    observe(gate, left_at, 1.0, remaining=10**6 - slots)
    assert gate.used_at(left_at) == 0
    observe(gate, left_at + 2.0, 1.0, remaining=10**6 - slots)
    assert gate.used_at(left_at + 2.0) == slots


def test_a_reset_that_was_rounded_up_blames_nobody() -> None:
    minute, gate = Minute(LIMIT), WindowGate(LIMIT, PER)
    minute.take(60, 60.25)
    gate.charge(60, 60.25)
    said = minute.said(61.5)
    assert said["reset"] == 58.5
    observe(gate, 61.5, **said | {"reset": 59.0})
    assert gate.used_at(61.5) == 60


def test_what_others_use_is_seen_through_our_own_use_in_a_fixed_minute() -> None:
    """A window holds what the server forgot at its full minute; others' use hid behind that."""
    minute, gate = Minute(LIMIT), WindowGate(LIMIT, PER)
    for now, cost in ((50.0, 70), (61.0, 30)):
        minute.take(cost, now)
        gate.charge(cost, now)
    minute.take(60, 62.0)  # somebody else
    observe(gate, 62.0, **minute.said(62.0))
    assert gate.used_at(62.0) == 160
    assert gate.ready_at(30, 62.0) == 120  # the server has 10 left


def test_what_others_use_of_a_bucket_leaves_as_it_refills() -> None:
    """10,000 a minute, 8,554 used and 3,082 wanted: a public message says to wait 9.816 s."""
    gate = WindowGate(10_000, PER)
    observe(gate, 0.0, remaining=10_000 - 8_554, reset=51.324, refills_steadily=True)
    assert gate.used_at(0.0) == 8_554
    assert 9.816 <= gate.ready_at(3_082, 0.0) <= 9.816 + 51.324 / 20
    assert gate.used_at(51.324) == 0


def test_what_others_had_of_a_bucket_is_not_forgotten_while_our_own_calls_hide_it() -> None:
    def report(now: float, **said: Any) -> int:
        gate.charge(10, now - 1.0)
        gate.charge(30, now - 0.5)  # may have been counted in what the first one is told
        observe(gate, now, 1.0, **said, refills_steadily=True)
        return gate.used_at(now) - gate.used

    gate = WindowGate(LIMIT, PER)
    observe(gate, 0.0, remaining=60, reset=24.0, refills_steadily=True)
    assert report(2.0, remaining=52, reset=28.8) == 38  # from 8 to 38
    assert report(3.0, remaining=9, reset=54.6) == 40  # from 11 to 41
    observe(gate, 3.0, remaining=19, reset=48.6, refills_steadily=True)
    assert gate.used_at(3.0) - gate.used == 1  # no more than is said
    assert gate.used_at(51.6) - gate.used_at(3.0) == -1
    assert report(122.0, remaining=52, reset=28.8) == 8  # that was two periods ago


def test_what_others_had_of_a_minute_is_expected_of_the_next_one_if_they_are_there() -> None:
    for after, expected in ((5.0, 30), (65.0, 0)):
        gate = WindowGate(LIMIT, PER)
        observe(gate, 50.0, remaining=60, reset=10.0)  # 40 by others
        assert gate.used_at(60.0) == 0
        now = 60.0 + after
        gate.charge(10, now - 1.0)
        gate.charge(30, now - 0.5)
        reset = 120.0 - now if now < 120 else 180.0 - now
        observe(gate, now, 1.0, remaining=75, reset=reset + 1.0)  # 15 by others, if not we
        assert gate.used_at(now) == 40 + expected
        assert gate.used_at(now + reset) == 40
        observe(gate, now, remaining=60, reset=reset)  # nobody but us
        assert gate.used_at(now) == 40


def test_a_call_of_ours_that_was_charged_too_little_proves_no_others() -> None:
    gate = WindowGate(LIMIT, PER)
    charge = gate.charge(10, 0.0)
    observe(gate, 1.0, 1.0, remaining=LIMIT - 30, reset=59.0)  # it took 30
    assert gate.used_at(1.0) == 30
    gate.correct(charge, 30, 1.0)
    gate.charge(40, 1.5)
    gate.charge(40, 1.6)
    observe(gate, 2.0, 0.5, remaining=LIMIT - 70, reset=58.0)
    assert gate.used_at(2.0) == 110


def test_more_left_than_there_can_be_is_no_report() -> None:
    gate = WindowGate(LIMIT, PER)
    observe(gate, 0.0, remaining=40, reset=60.0)
    observe(gate, 1.0, remaining=LIMIT + 1, reset=59.0)
    assert gate.used_at(1.0) == LIMIT - 40


def test_what_others_use_moves_with_the_clock() -> None:
    gate = WindowGate(LIMIT, PER)
    observe(gate, 1_000.0, remaining=0, reset=60.0)
    gate.shift(-900.0)
    assert gate.ready_at(LIMIT, 100.0) == pytest.approx(160)
    observe(gate, 101.0, remaining=LIMIT)
    assert gate.used_at(101.0) == 0
    gate.charge(30, 170.0)
    observe(gate, 171.0, 5.0, remaining=70, reset=55.0)
    assert gate.used_at(171.0) == 90


@pytest.mark.parametrize("limit", [0, -5])
def test_a_nonsensical_limit_from_a_server_is_ignored(limit: int) -> None:
    gate = WindowGate(LIMIT, PER)
    observe(gate, 0.0, limit=limit, remaining=-1, reset=-3.0)
    assert gate.limit == LIMIT
    assert gate.ready_at(LIMIT, 0.0) == 0


def test_more_remaining_than_the_limit_is_nobody() -> None:
    gate = WindowGate(LIMIT, PER)
    observe(gate, 0.0, remaining=10 * LIMIT)
    assert gate.used_at(0.0) == 0
    observe(gate, 0.0, limit=50, remaining=250, reset=math.nan)
    assert (gate.limit, gate.used_at(0.0)) == (50, 0)


def test_of_ones_own_limit_and_the_servers_the_lower_counts() -> None:
    """A batch job that was given a tenth of its account took all of it."""
    gate = WindowGate(LIMIT, PER)
    for told, counts in ((20 * LIMIT, LIMIT), (60, 60), (80, 80), (250, LIMIT), (0, LIMIT)):
        observe(gate, 0.0, limit=told)
        assert (gate.limit, gate.largest()) == (counts, counts)
    gate.limit = 400
    assert gate.limit == 250
    gate.limit = 0
    observe(gate, 0.0, limit=250, remaining=250)
    assert (gate.limit, gate.ready_at(1, 0.0)) == (0, math.inf)


def test_others_take_room_of_ours_only_where_the_account_is_nearer_to_its_limit() -> None:
    gate = WindowGate(LIMIT, PER)
    gate.charge(40, 0.0)
    observe(gate, 1.0, limit=1_000, remaining=200, reset=40.0)  # 760 by others
    assert gate.used_at(1.0) == 40
    assert [gate.ready_at(cost, 1.0) for cost in (60, 61)] == [1, 60]
    observe(gate, 2.0, remaining=30, reset=40.0)  # of 1,000 still; 930 by others
    assert gate.used_at(2.0) == 70
    assert [gate.ready_at(cost, 2.0) for cost in (30, 31, 60, 61)] == [2, 42, 42, 60]
    gate.limit = 90
    assert gate.used_at(2.0) == 60
    assert [gate.ready_at(cost, 2.0) for cost in (30, 31, 50, 51)] == [2, 42, 42, 60]


@given(
    charges=st.lists(st.tuples(st.floats(0, 50), st.integers(1, 40)), max_size=12),
    told=st.integers(1, 3 * LIMIT),
    remaining=st.integers(0, 3 * LIMIT),
    steadily=st.booleans(),
    cost=costs,
)
def test_ready_at_is_the_first_instant_at_which_both_limits_have_room(
    charges: list[tuple[float, int]], told: int, remaining: int, steadily: bool, cost: int
) -> None:
    gate = WindowGate(LIMIT, PER)
    for at, amount in sorted(charges):
        gate.charge(amount, at)
    said = {"limit": told, "remaining": remaining, "refills_steadily": steadily}
    observe(gate, 50.0, **said, reset=35.0)
    ready = gate.ready_at(cost, 50.0)
    if ready == math.inf:
        assert cost > gate.limit
    else:
        if ready > 50 + 1e-9:  # seconds
            assert gate.used_at(ready - 1e-9) + cost > gate.limit
        assert gate.used_at(ready) + cost <= gate.limit


def test_a_limit_of_nothing_is_refused_and_set_later_is_a_pause() -> None:
    with pytest.raises(ValueError, match="limit must be an int >= 1"):
        WindowGate(0, PER)
    gate = WindowGate(LIMIT, PER)
    gate.limit = 0
    assert gate.ready_at(1, 0.0) == math.inf
    assert gate.largest() == math.inf
    gate.limit = 5
    assert gate.ready_at(5, 0.0) == 0


def test_an_idle_gate_is_like_a_new_one() -> None:
    gate = WindowGate(LIMIT, PER, burst=10)
    assert gate.is_idle(0.0)
    gate.charge(50, 0.0)
    assert not gate.is_idle(59.0)
    assert gate.is_idle(60.0)
    gate.pause(90.0)
    assert not gate.is_idle(61.0)
    assert gate.is_idle(90.0)


# -- bursts -------------------------------------------------------------------


def test_after_idling_a_burst_goes_at_once_then_a_steady_flow() -> None:
    gate = WindowGate(6000, PER, burst=300)  # 100 per second
    now, went = 1000.0, []
    for _ in range(6):
        now = max(now, gate.ready_at(100, now))
        gate.charge(100, now)
        went.append(round(now, 6))
    assert went == [1000, 1000, 1000, 1001, 1002, 1003]


def test_a_call_above_the_burst_goes_when_the_schedule_is_clear_and_delays_the_next() -> None:
    gate = WindowGate(6000, PER, burst=100)
    gate.charge(50, 0.0)
    assert gate.ready_at(1000, 0.0) == 0.5
    gate.charge(1000, 0.5)
    assert gate.ready_at(1, 0.5) == pytest.approx(10.5 - 0.99)
    assert gate.ready_at(100, 0.5) == pytest.approx(10.5)


def test_a_correction_moves_the_schedule_by_the_difference() -> None:
    gate = WindowGate(6000, PER, burst=100)
    charge = gate.charge(100, 0.0)
    assert gate.ready_at(100, 0.0) == pytest.approx(1.0)
    charge = gate.correct(charge, 40, 0.0)
    assert gate.ready_at(100, 0.0) == pytest.approx(0.4)
    charge = gate.correct(charge, 240, 0.0)
    assert gate.ready_at(100, 0.0) == pytest.approx(2.4)
    gate.undo(charge, 0.0)
    assert gate.ready_at(100, 0.0) == pytest.approx(0.0)


def test_a_credit_for_what_was_worked_off_long_ago_buys_no_second_burst() -> None:
    gate = WindowGate(6000, PER, burst=100)
    old = [gate.charge(100, 0.0), gate.charge(100, 10.0)]
    for _ in range(10):
        gate.charge(10, 30.0)
    assert gate.ready_at(100, 30.0) == pytest.approx(31.0)
    gate.correct(old[0], 0, 30.0)
    assert gate.ready_at(100, 30.0) == pytest.approx(31.0)
    gate.undo(old[1], 30.0)
    assert gate.ready_at(100, 30.0) == pytest.approx(31.0)


@given(
    rounds=st.lists(
        st.tuples(st.sampled_from([0.0, 0.1, 1.0, 6.0]), st.integers(1, 6), st.integers(0, 8)),
        max_size=12,
    ),
    burst=st.sampled_from([1, 8, 20]),
)
def test_any_span_stays_within_the_flow_the_burst_and_one_call(
    rounds: list[tuple[float, int, int]], burst: int
) -> None:
    """Also where calls that were worked off long ago turn out to have used nothing."""
    gate = WindowGate(600, PER, burst=burst)  # 10 per second
    now, clear_at, busy_since = 0.0, 0.0, 0.0
    charges: list[Any] = []
    log: list[tuple[float, int]] = []
    for seconds, cost, unused in rounds:
        now += seconds
        for i in [i for i, (at, cost) in enumerate(log) if cost and at < busy_since][:unused]:
            gate.correct(charges[i], 0, now)
            log[i] = (log[i][0], 0)
        while gate.ready_at(cost, now) <= now:
            charges.append(gate.charge(cost, now))
            log.append((now, cost))
            busy_since = now if now >= clear_at else busy_since
            clear_at = max(now, clear_at) + cost * (PER / 600)
    for i, (start, _) in enumerate(log):
        within = 0
        for end, cost in log[i:]:
            within += cost
            assert within <= 10 * (end - start) + burst + 6 + 1e-6


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("burst", "share"), [(8000, 0.98), (20_000, 0.98), (2000, 0.93), (500, 0.93), (1, 0.93)]
)
async def test_a_burst_bounds_every_span_and_leaves_the_share(burst: int, share: float) -> None:
    admitted = await saturate(TokenRateLimiter(Quota(60_000, burst=burst)), 600)
    largest = max(cost for _, cost in admitted)
    for i, (start, _) in enumerate(admitted):
        within = 0
        for end, cost in admitted[i:]:
            within += cost
            assert within <= 1000 * (end - start) + burst + largest + 1e-3
    assert greatest_window(admitted) <= 60_000
    assert sum(cost for _, cost in admitted) >= share * 600_000
