"""Estimators: what they promise, on streams that try to break it."""

import doctest
import importlib
import json
import math
import random
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Trace
from tokenflow._usage import Request
from tokenflow.estimation import (
    EstimateKey,
    HistoricalEstimator,
    MaxTokensEstimator,
    OutputEstimate,
    OutputEstimator,
    TaskEstimator,
)
from tokenflow.estimation._history import History, input_bucket, min_input_tokens

ASK = Request(input_tokens=1000, model="gpt-5", task="chat")
MODULES = ("_counting", "_historical", "_output", "_vocabulary")
Stream = Iterable[tuple[Request, int]]


def misses(estimator: OutputEstimator, stream: Stream) -> list[bool]:
    """Serve the stream; for each call, whether its output exceeded its estimate."""
    missed = []
    for request, output in stream:
        missed.append(output > estimator.estimate(request).tokens)
        estimator.observe(request, output)
    return missed


def share(missed: list[bool]) -> float:
    return sum(missed) / len(missed)


def lognormal(calls: int, median: float = 130, *, seed: int = 1) -> Iterator[tuple[Request, int]]:
    rng = random.Random(seed)
    for _ in range(calls):
        yield ASK, int(rng.lognormvariate(math.log(median), 1))


class TestMaxTokens:
    def test_declared_maximum_for_each_choice(self) -> None:
        asked = Request(input_tokens=9, max_output_tokens=300, choices=5)
        assert MaxTokensEstimator().estimate(asked) == (1500, 1.0)

    def test_default_where_none_is_declared(self) -> None:
        assert MaxTokensEstimator(100).estimate(ASK) == OutputEstimate(100, 0.5)

    def test_declared_zero_is_certain(self) -> None:
        embedding = Request(input_tokens=9, max_output_tokens=0)
        assert MaxTokensEstimator().estimate(embedding) == (0, 1.0)

    @pytest.mark.parametrize(("margin", "tokens"), [(0.5, 150), (1.1, 300)])
    def test_margin_never_goes_above_what_is_declared(self, margin: float, tokens: int) -> None:
        asked = Request(input_tokens=9, max_output_tokens=300)
        assert MaxTokensEstimator(margin=margin).estimate(asked).tokens == tokens

    def test_smaller_declared_maximum_comes_from_the_larger_field(self) -> None:
        """litellm 34223: max_tokens=1 beside max_completion_tokens=738."""
        body = {"max_tokens": 1, "max_completion_tokens": 738}
        asked = Request.from_body(body, input_tokens=9)
        assert MaxTokensEstimator().estimate(asked).tokens == 738


class TestTask:
    @pytest.mark.parametrize(
        ("task", "tokens"),
        [
            ("classification", 20),
            ("extraction", 100),
            ("summarization", 300),
            ("chat", 500),
            ("generation", 500),
            ("code", 800),
            ("sonnets", 500),
            (None, 500),
        ],
    )
    def test_table(self, task: str | None, tokens: int) -> None:
        asked = Request(input_tokens=9, task=task)
        assert TaskEstimator().estimate(asked) == (tokens, 0.5)

    def test_everything_can_be_set(self) -> None:
        table = TaskEstimator({"chat": 40, "sonnets": 150}, default=7)
        requests = [Request(input_tokens=9, task=task) for task in ("chat", "sonnets", "code", "x")]
        assert [table.estimate(each).tokens for each in requests] == [40, 150, 800, 7]

    def test_choices_multiply_and_the_declared_maximum_caps(self) -> None:
        asked = Request(input_tokens=9, task="chat", choices=3)
        assert TaskEstimator().estimate(asked).tokens == 1500
        capped = Request(input_tokens=9, task="chat", choices=3, max_output_tokens=100)
        assert TaskEstimator().estimate(capped) == (300, 1.0)

    def test_bad_table_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"tokens\['chat'\] must be an int"):
            TaskEstimator({"chat": 1.5})  # type: ignore[dict-item]


@pytest.mark.parametrize("margin", [0, -1, math.inf, math.nan, True])
@pytest.mark.parametrize("kind", [MaxTokensEstimator, TaskEstimator, HistoricalEstimator])
def test_bad_margins_are_refused(kind: Callable[..., object], margin: float) -> None:
    with pytest.raises(ValueError, match="margin must be a finite factor"):
        kind(margin=margin)


class TestBuckets:
    def test_bounds_are_factors_of_four(self) -> None:
        bounds = [0, 512, 2048, 8192, 32768]
        assert [min_input_tokens(bucket) for bucket in range(5)] == bounds
        assert [input_bucket(tokens) for tokens in bounds] == [0, 1, 2, 3, 4]

    @given(st.integers(0, 1 << 40))
    def test_every_length_lies_within_its_bucket(self, tokens: int) -> None:
        bucket = input_bucket(tokens)
        assert min_input_tokens(bucket) <= tokens < min_input_tokens(bucket + 1)


class TestHistory:
    """One key's window, against a naive model."""

    @given(st.lists(st.integers(0, 50)), st.floats(0.01, 0.99), st.integers(1, 9))
    def test_reads_the_window_at_the_level(
        self, outputs: list[int], quantile: float, window: int
    ) -> None:
        history = History(quantile, window, 1)
        for output in outputs:
            history.learn(output, output > history.tokens)
        kept = outputs[-window:]
        assert history.outputs() == kept
        if kept:
            rank = int(history.level * len(kept))
            beyond = math.ceil(max(kept) * history.level)
            assert history.tokens == (sorted(kept) + [beyond] * 1000)[min(rank, len(kept))]

    @given(st.lists(st.booleans()), st.floats(0.01, 0.99))
    def test_level_adds_up_to_the_share_of_misses(self, came: list[bool], quantile: float) -> None:
        """The identity the promise rests on; stopping at 0 can only lower the misses."""
        history = History(quantile, 10, 1)
        for missed in came:
            history.learn(1, missed)
        step = 0.4 * min(0.1, quantile, 1 - quantile)
        bound = len(came) * (1 - quantile) + (history.level - quantile) / step
        assert sum(came) <= bound + 1e-6

    def test_truncated_outputs_spread_over_the_longer_ones(self) -> None:
        history = History(0.9, 100, 1)
        history.restore(0.9, range(100))
        completed = sorted(history.complete(79) for _ in range(20))
        assert len(set(completed)) >= 18
        assert completed[0] >= 80
        assert completed[-1] <= 99

    def test_nothing_longer_seen(self) -> None:
        history = History(0.9, 100, 1)
        assert history.complete(7) == 7


class TestHistorical:
    def test_the_prior_serves_first(self) -> None:
        estimator = HistoricalEstimator()
        assert estimator.estimate(ASK) == (500, 0.5)

    def test_blends_in_proportion_until_min_samples(self) -> None:
        estimator = HistoricalEstimator(0.9, prior=TaskEstimator({"chat": 100}), min_samples=4)
        seen = []
        for _ in range(5):
            seen.append(estimator.estimate(ASK))
            estimator.observe(ASK, 20)
        confidences = [estimate.confidence for estimate in seen]
        assert confidences == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9])
        assert [estimate.tokens for estimate in seen] == [100, 80, 60, 40, 20]

    def test_kinds_of_calls_are_told_apart(self) -> None:
        estimator = HistoricalEstimator(min_samples=1)
        kinds = [
            Request(input_tokens=tokens, model=model, task=task)
            for tokens in (100, 600)
            for model in ("a", None)
            for task in ("chat", None)
        ]
        for output, kind in enumerate(kinds):
            estimator.observe(kind, output)
        assert [estimator.estimate(kind).tokens for kind in kinds] == list(range(8))

    @given(
        st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 500), st.integers(1, 4))),
        st.floats(0.1, 4),
    )
    def test_never_above_what_is_declared(
        self, calls: list[tuple[int, int, int]], margin: float
    ) -> None:
        estimator = HistoricalEstimator(min_samples=2, window=5, margin=margin)
        for output, declared, choices in calls:
            asked = Request(input_tokens=9, max_output_tokens=declared, choices=choices)
            assert 0 <= estimator.estimate(asked).tokens <= declared * choices
            estimator.observe(asked, output)

    def test_choices_multiply(self) -> None:
        """openai-python 605: n=5 is charged five times."""
        estimator = HistoricalEstimator(min_samples=1, window=1)
        estimator.observe(Request(input_tokens=9, choices=5), 499)
        assert estimator.estimate(Request(input_tokens=9)).tokens == 100
        assert estimator.estimate(Request(input_tokens=9, choices=3)).tokens == 300

    def test_margin_comes_on_top(self) -> None:
        estimator = HistoricalEstimator(min_samples=1, window=1, margin=1.1)
        estimator.observe(ASK, 100)
        assert estimator.estimate(ASK).tokens == 111  # rounded up: 1.1 is a little more

    def test_declared_zero_teaches_nothing(self) -> None:
        estimator = HistoricalEstimator(min_samples=1)
        embedding = Request(input_tokens=9, max_output_tokens=0)
        assert estimator.estimate(embedding) == (0, 1.0)
        estimator.observe(embedding, 0)
        assert estimator.statistics().calls == 0

    @pytest.mark.parametrize("tokens", [True, 1.5, math.nan, "9", None])
    def test_what_is_no_count_is_refused(self, tokens: Any) -> None:
        estimator = HistoricalEstimator()
        with pytest.raises(TypeError, match="output_tokens must be an int >= 0"):
            estimator.observe(ASK, tokens)
        assert estimator.statistics().calls == 0

    def test_negative_is_refused(self) -> None:
        with pytest.raises(ValueError, match="output_tokens must be an int >= 0"):
            HistoricalEstimator().observe(ASK, -1)

    def test_absurd_outputs_do_not_overflow(self) -> None:
        estimator = HistoricalEstimator(min_samples=1)
        for exponent in range(400):
            estimator.observe(ASK, 10**exponent)
        assert 10**9 < estimator.estimate(ASK).tokens < 10**14

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"quantile": 1.0}, "quantile must be between 0 and 1"),
            ({"quantile": math.nan}, "quantile must be between 0 and 1"),
            ({"quantile": True}, "quantile must be between 0 and 1"),
            ({"min_samples": 0}, "min_samples must be an int >= 1, not 0"),
            ({"window": 0}, "window must be an int >= 1, not 0"),
            ({"min_samples": 11, "window": 10}, "min_samples must be between 1 and window = 10"),
            ({"max_keys": 0}, "max_keys must be an int >= 1, not 0"),
        ],
    )
    def test_bad_settings_are_refused(self, kwargs: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            HistoricalEstimator(**kwargs)

    @pytest.mark.parametrize("name", ["min_samples", "window", "max_keys"])
    @pytest.mark.parametrize("size", [1.0, True, math.nan, "9"])
    def test_sizes_are_counts(self, name: str, size: Any) -> None:
        with pytest.raises(TypeError, match=f"{name} must be an int >= 1"):
            HistoricalEstimator(**{name: size})

    def test_a_model_of_ones_own_as_prior_is_used_while_there_is_no_history(self) -> None:
        told: list[tuple[int, bool]] = []
        asked: list[int] = []

        class Tenth:
            def estimate(self, request: Request) -> OutputEstimate:
                asked.append(request.input_tokens)
                return OutputEstimate(request.input_tokens // 10, 0.8)

            def observe(
                self, request: Request, output_tokens: int, *, truncated: bool = False
            ) -> None:
                told.append((output_tokens, truncated))

        estimator = HistoricalEstimator(prior=Tenth(), min_samples=2)
        assert estimator.estimate(ASK) == (100, 0.8)
        for output in (10, 20, 30):
            estimator.observe(ASK, output, truncated=output == 20)
        assert told == [(10, False), (20, True)]
        estimator.estimate(ASK)
        assert len(asked) == 3  # once for the estimate, once for each observation

    def test_keys_are_bounded_and_the_longest_unused_goes(self) -> None:
        estimator = HistoricalEstimator(max_keys=3)
        for task in ("a", "b", "c", "a", "d", *map(str, range(1000)), "a", "x", "y"):
            estimator.observe(Request(input_tokens=9, task=task), 1)
        kept = [key.task for key in estimator.statistics_by_key()]
        assert kept == ["a", "x", "y"]


class TestCoverage:
    """The share of under-estimates is the promised one, whatever the stream."""

    @pytest.mark.parametrize("quantile", [0.5, 0.8, 0.9, 0.95])
    def test_steady(self, quantile: float) -> None:
        missed = misses(HistoricalEstimator(quantile), lognormal(6000))
        assert share(missed) == pytest.approx(1 - quantile, abs=0.01)

    def test_steady_at_99_per_cent(self) -> None:
        assert share(misses(HistoricalEstimator(0.99), lognormal(9000))) == pytest.approx(
            0.01, abs=0.003
        )

    @pytest.mark.parametrize("factor", [10, 0.1])
    def test_after_an_abrupt_change(self, factor: float) -> None:
        estimator = HistoricalEstimator()
        misses(estimator, lognormal(4000))
        after = misses(estimator, lognormal(2000, 130 * factor, seed=2))
        assert share(after) == pytest.approx(0.1, abs=0.03)

    def test_drifting_up_and_down(self) -> None:
        drift = [
            (ask, int(output * (1 + 0.9 * math.sin(at / 500))))
            for at, (ask, output) in enumerate(lognormal(10_000))
        ]
        assert share(misses(HistoricalEstimator(), drift)) == pytest.approx(0.1, abs=0.01)

    def test_growing_for_ever(self) -> None:
        growing = [(ask, int(n * 1.001**at)) for at, (ask, n) in enumerate(lognormal(9000))]
        assert share(misses(HistoricalEstimator(), growing)) == pytest.approx(0.1, abs=0.01)

    def test_every_output_longer_than_all_before(self) -> None:
        rising = [(ask, 100 + at) for at, (ask, _) in enumerate(lognormal(9000))]
        assert share(misses(HistoricalEstimator(), rising)) <= 0.11

    def test_tasks_that_are_always_new(self) -> None:
        """Every call comes from the prior, and the table says 500 where the median is 130."""
        new = [
            (Request(input_tokens=9, task=f"task {at}"), output)
            for at, (_, output) in enumerate(lognormal(8000))
        ]
        assert share(misses(HistoricalEstimator(), new)) == pytest.approx(0.1, abs=0.01)

    def test_outputs_that_are_all_alike_are_never_under_estimated(self) -> None:
        estimator = HistoricalEstimator()
        misses(estimator, [(ASK, 42)] * 3000)
        assert not any(misses(estimator, [(ASK, 42)] * 100))
        assert estimator.estimate(ASK).tokens == 42

    def test_then_one_that_differs(self) -> None:
        """Having stopped at 0, the level is not so far down that it would take for ever."""
        estimator = HistoricalEstimator()
        misses(estimator, [(ASK, 42)] * 9000)
        assert share(misses(estimator, lognormal(2000))) == pytest.approx(0.1, abs=0.03)

    def test_feedback_that_comes_late(self) -> None:
        """32 calls are always in flight: each estimate is 32 observations old."""
        estimator = HistoricalEstimator()
        stream = list(lognormal(6000))
        missed = []
        for at, (ask, output) in enumerate(stream):
            missed.append(output > estimator.estimate(ask).tokens)
            if at >= 32:
                estimator.observe(*stream[at - 32])
        assert share(missed) == pytest.approx(0.1, abs=0.015)


class TestTruncated:
    def test_cut_off_outputs_do_not_drag_the_quantile_down(self) -> None:
        """Half of the calls are cut at a random point; the 90th percentile stays put."""
        rng = random.Random(3)
        whole, cut, naive = (HistoricalEstimator() for _ in range(3))
        for ask, output in lognormal(8000):
            limit = int(rng.lognormvariate(math.log(200), 1))
            whole.observe(ask, output)
            cut.observe(ask, min(output, limit), truncated=limit < output)
            naive.observe(ask, min(output, limit))
        levels = [sum(e._histories.popitem()[1].outputs()) for e in (whole, cut, naive)]
        assert levels[1] == pytest.approx(levels[0], rel=0.15)
        assert levels[2] < 0.7 * levels[0]

    def test_a_storm_of_aborts_changes_nothing(self) -> None:
        estimator = HistoricalEstimator()
        misses(estimator, lognormal(3000))
        before = estimator.estimate(ASK).tokens
        for _ in range(1500):
            estimator.observe(ASK, 0, truncated=True)
        assert estimator.estimate(ASK).tokens == pytest.approx(before, rel=0.3)

    def test_reaching_the_declared_maximum_counts_as_cut_off(self) -> None:
        estimator = HistoricalEstimator()
        misses(estimator, lognormal(3000))
        before = estimator.estimate(ASK).tokens
        short = Request(input_tokens=1000, model="gpt-5", task="chat", max_output_tokens=16)
        for _ in range(1500):
            estimator.observe(short, 16)
        assert estimator.estimate(ASK).tokens == pytest.approx(before, rel=0.3)


class TestStatistics:
    def test_worked_example(self) -> None:
        estimator = TaskEstimator({"chat": 100})
        for output in (50, 100, 200, 0):
            estimator.observe(ASK, output)
        seen = estimator.statistics()
        assert (seen.calls, seen.under_estimated, seen.coverage) == (4, 1, 0.75)
        assert (seen.input_tokens, seen.estimated_tokens, seen.output_tokens) == (4000, 400, 350)
        assert seen.ratio == 4400 / 4350
        assert (seen.error_p50, seen.error_p99) == (2.0, 100.0)

    def test_before_the_first_call(self) -> None:
        seen = HistoricalEstimator().statistics()
        assert (seen.coverage, seen.ratio, seen.error_p50) == (1.0, 1.0, 0.0)

    def test_by_key(self) -> None:
        estimator = HistoricalEstimator()
        for tokens in (100, 600, 600):
            estimator.observe(Request(input_tokens=tokens, model="m", task="t"), 500)
        calls = {key: seen.calls for key, seen in estimator.statistics_by_key().items()}
        assert calls == {EstimateKey("m", "t", 0): 1, EstimateKey("m", "t", 512): 2}
        assert estimator.statistics().calls == 3

    def test_forgotten_keys_stay_in_the_totals(self) -> None:
        estimator = HistoricalEstimator(max_keys=2)
        for task in "abcda":
            estimator.observe(Request(input_tokens=9, task=task), 500)
        estimator.load_json(estimator.to_json())
        seen = estimator.statistics()
        assert (seen.calls, seen.input_tokens, seen.output_tokens) == (5, 45, 2500)
        assert all(each.calls == 0 for each in estimator.statistics_by_key().values())

    def test_an_error_p99_above_2_is_normal(self) -> None:
        """So it is no alarm: a well calibrated estimator has it on ordinary traffic."""
        estimator = HistoricalEstimator()
        misses(estimator, lognormal(3000))
        seen = estimator.statistics()
        assert seen.coverage == pytest.approx(0.9, abs=0.01)
        assert seen.error_p99 > 2

    def test_repr_shows_live_numbers(self) -> None:
        estimator = TaskEstimator()
        estimator.observe(ASK, 500)
        assert repr(estimator) == "<TaskEstimator calls=1 coverage=1.000 ratio=1.000>"


def trained(**kwargs: Any) -> HistoricalEstimator:
    estimator = HistoricalEstimator(**kwargs)
    misses(estimator, lognormal(300))
    estimator.observe(Request(input_tokens=0), 7)
    return estimator


class TestState:
    def test_round_trip(self) -> None:
        old, new = trained(), HistoricalEstimator()
        new.load_json(old.to_json().encode())
        assert new.to_json() == old.to_json()
        assert new.estimate(ASK) == old.estimate(ASK)
        stream = list(lognormal(500, seed=4))
        assert misses(new, stream) == misses(old, stream)

    def test_smaller_sizes_keep_the_latest(self) -> None:
        new = HistoricalEstimator(window=10, min_samples=5, max_keys=1)
        new.load_json(trained().to_json())
        assert [key.model for key in new.statistics_by_key()] == [None]
        new = HistoricalEstimator(window=10, min_samples=5)
        new.load_json(trained().to_json())
        kept = [output for _, output in lognormal(300)][-10:]
        assert json.loads(new.to_json())["histories"][0][4] == kept

    def test_another_quantile_calibrates_afresh(self) -> None:
        new = HistoricalEstimator(0.5)
        new.load_json(trained().to_json())
        assert new.estimate(ASK).tokens == pytest.approx(130, rel=0.3)

    def test_a_key_without_outputs_is_no_harm(self) -> None:
        state = json.loads(trained().to_json())
        state["histories"].append(["m", None, 0, 0.9, []])
        new = HistoricalEstimator()
        new.load_json(json.dumps(state))
        assert new.estimate(Request(input_tokens=1, model="m")) == (
            math.ceil(500 * state["prior_scale"]),
            0.5,
        )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"version": 2}, "expected version 1"),
            ({"version": None}, "expected version 1"),
            ({"quantile": "0.9"}, "expected a quantile up to 1, found '0.9'"),
            ({"quantile": 1.5}, "expected a quantile up to 1"),
            ({"prior_scale": math.nan}, "expected a sensible prior_scale, found nan"),
            ({"prior_scale": 10**400}, "expected a sensible prior_scale"),
            ({"prior_scale": 0}, "expected a sensible prior_scale"),
            ({"histories": {}}, "expected a list of histories"),
            ({"histories": [[1]]}, "expected five fields in a history"),
            ({"histories": [[1, None, 0, 0.9, []]]}, "expected model and task"),
            ({"histories": [[None, None, -1, 0.9, []]]}, "expected min_input_tokens"),
            ({"histories": [[None, None, 0, True, []]]}, "expected a level >= 0"),
            ({"histories": [[None, None, 0, -0.1, []]]}, "expected a level >= 0"),
            ({"histories": [[None, None, 0, 0.9, [1, -1]]]}, "expected outputs to be counts"),
            ({"histories": [[None, None, 0, 0.9, [1, 2.0]]]}, "expected outputs to be counts"),
            ({"histories": [[None, None, 0, 0.9, 5]]}, "expected outputs to be counts"),
        ],
    )
    def test_corrupt_state_says_where_and_changes_nothing(
        self, change: dict[str, Any], message: str
    ) -> None:
        estimator = trained()
        before = estimator.to_json()
        with pytest.raises(ValueError, match=message):
            estimator.load_json(json.dumps({**json.loads(before), **change}))
        assert estimator.to_json() == before

    @pytest.mark.parametrize(
        "text", ["", "{", "[1]", "nul", b"\xff\xfe\x00", "[" * 100_000, "1" * 5000, "null"]
    )
    def test_text_that_is_no_state(self, text: str | bytes) -> None:
        with pytest.raises(ValueError, match="estimator state is"):
            HistoricalEstimator().load_json(text)

    @given(st.data())
    def test_damaged_anywhere_it_loads_or_refuses(self, data: st.DataObject) -> None:
        estimator = HistoricalEstimator(min_samples=1)
        estimator.observe(ASK, 5)
        text = estimator.to_json()
        at = data.draw(st.integers(0, len(text)))
        damage = data.draw(st.text(max_size=3))
        cut = data.draw(st.integers(0, 4))
        fresh = HistoricalEstimator()
        try:
            fresh.load_json(text[:at] + damage + text[at + cut :])
        except ValueError:
            assert fresh.to_json() == HistoricalEstimator().to_json()
        assert fresh.estimate(ASK).tokens >= 0


def requests(calls: Iterable[tuple[int, int]]) -> list[tuple[Request, int]]:
    return [(Request(input_tokens=tokens), output) for tokens, output in calls]


class TestTraces:
    """With `--traces`, on what real calls have used."""

    @pytest.mark.parametrize(
        ("name", "ratio", "declared"), [("conv", 1.10, 3.84), ("code", 1.05, 2.96)]
    )
    def test_ten_per_cent_at_a_fraction_of_the_tokens(
        self, name: str, ratio: float, declared: float, trace: Trace
    ) -> None:
        historical, maximum = HistoricalEstimator(0.9), MaxTokensEstimator(4096)
        for request, output in requests(trace(f"azure_2023_{name}")):
            historical.observe(request, output)
            maximum.observe(request, output)
        assert historical.statistics().coverage == pytest.approx(0.9, abs=0.005)
        assert historical.statistics().ratio <= ratio
        assert maximum.statistics().ratio == pytest.approx(declared, abs=0.01)

    def test_within_three_points_after_abrupt_changes(self, trace: Trace) -> None:
        conv, code = (requests(trace(f"azure_2023_{name}")) for name in ("conv", "code"))
        estimator = HistoricalEstimator(0.9)
        misses(estimator, conv)
        for after in (code, conv):
            missed = misses(estimator, after)
            assert share(missed[:2000]) == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("module", ["_usage", "_wire", *(f"estimation.{name}" for name in MODULES)])
def test_examples_in_docstrings(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(f"tokenflow.{module}"))
    assert (failed, bool(tried)) == (0, True)


def test_the_calibration_example_reads_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parent.parent / "examples" / "calibrate.py"
    file = tmp_path / "trace.csv"
    file.write_bytes(b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n0,100,10\r\n1,200,20")
    monkeypatch.setattr(sys, "argv", [str(example), "--trace", str(file)])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.startswith("2 calls")
