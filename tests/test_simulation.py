"""The benchmarks' simulated fleet, at a small size: what it counts, and who does best in it."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import _plots
import pytest
import simulate
from _fleet import Call, Engine, Outcome, quantile, run
from _policies import (
    Build,
    LeastRequests,
    Random,
    RoundRobin,
    Routed,
    Snapshots,
    least_tokens,
    least_tokens_over_speed,
    two_choices,
)
from _traffic import by_size, declaring, in_bursts, invented, samples, with_documents

from tokenflow import Fifo, Request, SmallestFirst
from tokenflow.serving.capacity import Deployment, step_seconds

POLICIES: list[Build] = [
    RoundRobin,
    Random,
    LeastRequests,
    Snapshots,
    two_choices,
    least_tokens,
    least_tokens_over_speed,
]


def play(
    deployments: Sequence[Deployment], build: Build, calls: Sequence[Call], seed: int = 1
) -> Outcome:
    """On engines of its own, and with copies of the calls."""
    engines = [Engine(each) for each in deployments]
    copies = [replace(call) for call in calls]
    run(engines, copies, build(engines, seed))
    return Outcome(copies, engines)


def times(outcome: Outcome) -> list[tuple[float, float]]:
    return [(call.began, call.ended) for call in outcome.calls]


@pytest.mark.parametrize("build", POLICIES)
def test_the_same_seed_gives_the_same_run(build: Build) -> None:
    calls = invented(50, seed=3).calls(40.0)
    assert times(play(simulate.MIXED, build, calls)) == times(play(simulate.MIXED, build, calls))


@pytest.mark.parametrize("build", [Random, two_choices])
def test_another_seed_gives_another_run(build: Build) -> None:
    calls = invented(50, seed=3).calls(40.0)
    first, other = (play(simulate.MIXED, build, calls, seed) for seed in (1, 2))
    assert times(first) != times(other)


@pytest.mark.parametrize("build", POLICIES)
def test_every_call_gets_all_its_tokens(build: Build) -> None:
    calls = invented(50, seed=4).calls(60.0)
    outcome = play(simulate.MIXED, build, calls)
    assert all(call.arrived < call.began <= call.ended for call in outcome.calls)
    assert all(engine.is_idle and not engine.scheduler.unfinished for engine in outcome.engines)
    generated = sum(engine.generated for engine in outcome.engines)
    assert generated == sum(call.output_tokens for call in calls)
    computed = sum(call.total_tokens - 1 for call in calls)  # the last token is not read again
    assert sum(engine.tokens for engine in outcome.engines) == computed


def test_preempted_calls_get_all_their_tokens_too() -> None:
    calls = declaring(invented(60, seed=5, output_median=400.0).at_once(), 4_096)
    engine = Engine(simulate.A10, budget=512, kv_cache_tokens=16_000, reserve="none")
    run([engine], calls, RoundRobin([engine], 0))
    outcome = Outcome(calls, [engine])
    assert outcome.preemptions > 20
    assert engine.generated == sum(call.output_tokens for call in calls)
    assert engine.gaps.total() == sum(call.output_tokens - 1 for call in calls)
    longest_step = step_seconds(simulate.A10, tokens=512)
    assert outcome.longest_gap > 10 * longest_step  # who is preempted is kept waiting


def test_a_router_holds_nothing_afterwards() -> None:
    engines = [Engine(each) for each in simulate.EQUAL]
    policy = Routed(engines, 0, speeds=True)
    run(engines, invented(50, seed=6).calls(40.0), policy)
    held = policy.router.statistics().replicas
    assert [each.tokens_in_flight for each in held] == [0, 0, 0, 0]
    assert sum(each.picks for each in held) == 50


def test_one_call_takes_as_long_as_its_steps() -> None:
    call = Call(arrived=7.0, request=Request(input_tokens=5_000), output_tokens=3)
    outcome = play([simulate.H100], RoundRobin, [call])

    def step(tokens: int, context: int) -> float:
        return step_seconds(simulate.H100, tokens=tokens, context_tokens=context)

    prompt = step(2_048, 2_048) + step(2_048, 4_096) + step(904, 5_000)
    answer = step(1, 5_001) + step(1, 5_002)
    assert outcome.first_token(1.0) == pytest.approx(prompt)
    assert outcome.whole(1.0) == pytest.approx(prompt + answer)
    assert outcome.gap(1.0) == pytest.approx(step(1, 5_002))
    assert outcome.busy == [pytest.approx(5_002 * 16.06e9 / 989e12 / outcome.seconds)]


class TestWhoDoesBest:
    """Ratios of p99, with room for other traffic than this."""

    def test_in_a_mixed_fleet_who_knows_the_speeds(self) -> None:
        calls = invented(300, seed=3).calls(simulate.MIXED_RATE)
        turns, requests, tokens, speeds = (
            play(simulate.MIXED, build, calls).first_token(0.99)
            for build in (RoundRobin, LeastRequests, least_tokens, least_tokens_over_speed)
        )
        assert speeds < 0.6 * requests
        assert speeds < 0.6 * tokens
        assert max(requests, tokens) < 0.8 * turns

    def test_beside_documents_who_counts_tokens(self) -> None:
        calls = with_documents(invented(200, seed=1).calls(80.0), 1, rate=2.0)
        turns, requests, tokens = (
            play(simulate.EQUAL, build, calls).of("chat").first_token(0.99)
            for build in (RoundRobin, LeastRequests, least_tokens)
        )
        assert tokens < 0.65 * min(turns, requests)

    def test_not_who_looks_at_stale_numbers(self) -> None:
        """(vllm-router 178) Between two polls all calls go to the one that was least loaded."""
        calls = invented(150, seed=1).calls(simulate.CHAT_RATE)
        stale, turns, live = (
            play(simulate.EQUAL, build, calls).first_token(0.99)
            for build in (Snapshots, RoundRobin, least_tokens)
        )
        assert stale > 3 * max(turns, live)

    def test_small_calls_wait_less_and_large_ones_not_for_ever(self) -> None:
        calls = by_size(in_bursts(invented(300, seed=0).calls(2.3), simulate.BURST))
        fifo, patient, by_size_alone = (
            simulate.one_replica([replace(call) for call in calls], order=order)
            for order in (Fifo(), SmallestFirst(), SmallestFirst(1e9))
        )
        small, small_before = (each.of("small").first_token(0.5) for each in (patient, fifo))
        assert small < 0.5 * small_before
        large, large_before, starved = (
            each.of("large").first_token(0.99) for each in (patient, fifo, by_size_alone)
        )
        assert large < 2 * large_before < starved


class TestTraffic:
    def test_a_trace_at_another_rate(self, tmp_path: Path) -> None:
        """With the seven digits, the line ends and the missing end of Azure's."""
        (tmp_path / "code.csv").write_bytes(b"TIMESTAMP,ContextTokens,GeneratedTokens")
        lines = [f"2023-11-16 18:00:0{n}.1234567,{100 + n},{n}" for n in (0, 2, 3, 8)]
        text = "\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines])
        (tmp_path / "conversations.csv").write_bytes(text.encode())
        name, (first, second) = samples(tmp_path, 2, 10)
        assert "conversations" in name
        assert [call.arrived for call in first.calls(4.0)] == [0.0, pytest.approx(0.5)]
        calls = second.calls(1.0)
        assert [(call.request.input_tokens, call.output_tokens) for call in calls] == [
            (103, 3),
            (108, 8),
        ]
        assert [call.output_tokens for call in first.calls(1.0)] == [1, 2]  # 0 cannot be computed

    def test_without_a_trace_it_is_made_up(self) -> None:
        name, made_up = samples(None, 2, 30)
        assert "made-up" in name
        assert [len(sample.calls(1.0)) for sample in made_up] == [30, 30]
        assert made_up[0].requests != made_up[1].requests

    def test_bursts(self) -> None:
        calls = invented(7, seed=1).calls(1.0)
        arrivals = [call.arrived for call in in_bursts(calls, 3)]
        assert arrivals == [calls[i].arrived for i in (0, 0, 0, 3, 3, 3, 6)]


class TestReport:
    @pytest.mark.parametrize(
        ("level", "value"), [(0.5, 2.0), (0.51, 3.0), (0.99, 4.0), (1.0, 4.0), (0.01, 1.0)]
    )
    def test_quantiles(self, level: float, value: float) -> None:
        assert quantile([3.0, 1.0, 4.0, 2.0], level) == value

    def test_a_target_that_is_missed_says_so(self) -> None:
        calls = invented(30, seed=1).calls(40.0)
        found = {"a": [play(simulate.EQUAL, RoundRobin, calls)]}
        target = simulate.Target("Calls", found, "a", "a", lambda each: each.whole(0.5), 0.9)
        assert target.row() == ["Calls: a / a", "<= 0.90", "1.00 (1.00 to 1.00): NOT MET"]
        assert replace(target, bound=1.0).row()[-1].endswith(": met")

    def test_without_matplotlib_there_are_no_pictures(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        _plots.draw({}, {}, [], tmp_path)
        assert "no pictures" in capsys.readouterr().out
        assert not list(tmp_path.iterdir())
