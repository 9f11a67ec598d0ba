"""The estimator that learns: a calibrated rolling quantile per kind of call."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final, final

from tokenflow._usage import Request, positive_int, token_count

from ._history import History, input_bucket, min_input_tokens
from ._output import OutputEstimate, OutputEstimator, ScoredEstimator, TaskEstimator
from ._scores import EstimateKey, EstimateStatistics, Score
from ._state import LARGEST, PRIOR_RANGE, SavedHistory, SavedState, dump_state, parse_state

__all__ = ["HistoricalEstimator"]

_PRIOR_STEP: Final = 0.1
_Key = tuple[str | None, str | None, int]
_estimate: Final = tuple.__new__  # past the generated constructor, which takes twice as long


@final
class HistoricalEstimator(ScoredEstimator):
    """The `quantile` of the latest `window` outputs of the same model, task and input length.

    Input length counts by factors of four (below 512, 2,048, 8,192, ...): it is
    what halves the over-reservation. Until a key has seen `min_samples` calls its
    quantile is blended with the `prior`, in proportion. The prior is asked, and
    told what came, only then; a common factor on it is learned, so that a wrong
    table, or a stream of tasks that are always new, is put right as well.

    *The promise*: on any stream of calls whose outputs differ, drifting or
    jumping, the share of under-estimated ones converges to 1 - `quantile`. The
    level that is read off the window is corrected after each call by whether the
    estimate held (see `History`), so an abrupt change shows for some hundred calls,
    not until the window has turned over. `margin` and declared maxima come on top of that and
    can only lower the share (a margin below 1.0 raises it). Estimates are judged
    as they stand when the call is observed.

    Truncated outputs, and those that reached their declared maximum, are
    *censored*: they count as something longer that the window has seen (again, see
    `History`), not as short. Calls that declare 0 teach nothing.

    Memory is bounded: `max_keys` keys of `window` ints, of which the longest
    unobserved is forgotten. O(log window) comparisons and a short memmove a call.

    >>> estimator = HistoricalEstimator(0.9, min_samples=10)
    >>> question = Request(input_tokens=800, model="gpt-5", task="chat")
    >>> estimator.estimate(question).tokens  # nothing seen: the prior
    500
    >>> for at in range(300):
    ...     estimator.observe(question, 37 * at % 100)
    >>> 85 <= estimator.estimate(question).tokens <= 95
    True

    Raises:
        TypeError, ValueError: a quantile outside (0, 1), a size that is not an
            int >= 1, a margin not above 0.
    """

    __slots__ = (
        "_histories",
        "_max_keys",
        "_min_samples",
        "_prior",
        "_quantile",
        "_scale",
        "_window",
    )

    def __init__(
        self,
        quantile: float = 0.9,
        *,
        prior: OutputEstimator | None = None,
        min_samples: int = 100,
        window: int = 2000,
        max_keys: int = 512,
        margin: float = 1.0,
    ) -> None:
        super().__init__(margin)
        if isinstance(quantile, bool) or not 0 < quantile < 1:
            raise ValueError(f"quantile must be between 0 and 1, not {quantile!r}")
        min_samples = positive_int(min_samples, "min_samples")
        window = positive_int(window, "window")
        positive_int(max_keys, "max_keys")
        if min_samples > window:
            raise ValueError(
                f"min_samples must be between 1 and window = {window}, not {min_samples}: "
                "a key that never has enough would be served by the prior for ever"
            )
        self._quantile = quantile
        self._prior = TaskEstimator() if prior is None else prior
        self._min_samples = min_samples
        self._window = window
        self._max_keys = max_keys
        self._histories: OrderedDict[_Key, History] = OrderedDict()
        self._scale = 1.0

    def estimate(self, request: Request) -> OutputEstimate:
        """Return the calibrated quantile for calls like this, at most what is declared."""
        history = self._histories.get(_key(request))
        if history is not None and history.weight == 1.0:
            if request.max_output_tokens is None:  # _hand_out(), for one call less
                wanted = history.tokens * request.choices
                if self._margin != 1:
                    wanted = math.ceil(wanted * self._margin)
                return _estimate(OutputEstimate, (wanted, self._quantile))
            return self._hand_out(request, history.tokens, self._quantile)
        prior = self._prior.estimate(request)
        weight = history.weight if history else 0.0
        confidence = prior.confidence + weight * (self._quantile - prior.confidence)
        return self._hand_out(request, self._blend(history, request, prior), confidence)

    def _blend(self, history: History | None, request: Request, prior: OutputEstimate) -> float:
        """Tokens for one choice while there is little history or none."""
        guess = prior.tokens / request.choices * self._scale
        return guess + history.weight * (history.tokens - guess) if history else guess

    def observe(self, request: Request, output_tokens: int, *, truncated: bool = False) -> None:
        """Learn that `request` ended with `output_tokens`, over all its choices.

        `truncated` says that it would have needed at least that much. An output that
        reached the declared maximum counts as truncated without being told.
        """
        if type(output_tokens) is not int or not 0 <= output_tokens <= LARGEST:
            output_tokens = min(token_count(output_tokens, "output_tokens"), LARGEST)
        declared, choices = request.max_output_tokens, request.choices
        if declared == 0:
            return
        key = _key(request)
        history = self._histories.get(key) or self._added(key)
        self._histories.move_to_end(key)
        cold = history.weight < 1.0
        tokens: float = history.tokens
        estimated = history.tokens * choices
        if cold:
            tokens = self._blend(history, request, self._prior.estimate(request))
        if cold or self._margin != 1:
            estimated = math.ceil(tokens * choices * self._margin)
        if declared is not None:
            estimated = min(estimated, declared * choices)
        ratio = history.score.add(request.input_tokens, estimated, output_tokens)
        self._score.ratios.append(ratio)
        output = output_tokens if choices == 1 else -(-output_tokens // choices)
        if truncated or (declared is not None and output >= declared):
            output = history.complete(output)
        if cold:
            self._correct_prior(output > tokens)
            self._prior.observe(request, output_tokens, truncated=truncated)
        history.learn(output, output > tokens)

    def _added(self, key: _Key) -> History:
        """A new history for this key; the one longest unused goes when there are too many."""
        if len(self._histories) >= self._max_keys:
            self._score.absorb(self._histories.popitem(last=False)[1].score)
        history = self._histories[key] = History(self._quantile, self._window, self._min_samples)
        return history

    def statistics(self) -> EstimateStatistics:
        """How the estimates compare with what was observed, over all calls and keys."""
        total = Score(0)
        total.ratios = self._score.ratios
        for score in (self._score, *(each.score for each in self._histories.values())):
            total.absorb(score)
        return total.statistics()

    def _correct_prior(self, missed: bool) -> None:
        """Move the factor on the prior as `History` moves its level, but by ratios.

        This is quantile tracking (Angelopoulos, Candes and Tibshirani 2023) of
        log(output / prior), pooled over all keys that have little history.
        """
        move = _PRIOR_STEP * (self._quantile if missed else self._quantile - 1)
        self._scale = min(max(self._scale * math.exp(move), 1 / PRIOR_RANGE), PRIOR_RANGE)

    def statistics_by_key(self) -> dict[EstimateKey, EstimateStatistics]:
        """`statistics()` of each model, task and input length; error ratios over the last 200."""
        return {_public(key): each.score.statistics() for key, each in self._histories.items()}

    def to_json(self) -> str:
        """What has been learned, for `load_json` after a restart; statistics are not in it."""
        saved = [
            SavedHistory(*_public(key), each.level, each.outputs())
            for key, each in self._histories.items()
        ]
        return dump_state(SavedState(self._quantile, self._scale, saved))

    def load_json(self, state: str | bytes) -> None:
        """Replace what has been learned by what `to_json` returned, here or elsewhere.

        Sizes may differ: the latest keys and outputs that fit are kept. With another
        quantile the outputs are kept and the calibration begins afresh.

        Raises:
            ValueError: not such a state, saying where; nothing has changed then.
        """
        saved = parse_state(state)
        same = saved.quantile == self._quantile
        self._scale = saved.prior_scale if same else 1.0
        while self._histories:
            self._score.absorb(self._histories.popitem()[1].score)
        for model, task, least, level, outputs in saved.histories[-self._max_keys :]:
            key = (model, task, input_bucket(least))
            history = self._histories.get(key) or self._added(key)
            self._histories.move_to_end(key)
            history.restore(level if same else self._quantile, outputs)


def _key(request: Request) -> _Key:
    # input_bucket, written out: this is the one place where a call's cost shows
    bucket = ((request.input_tokens >> 9).bit_length() + 1) >> 1
    return (request.model, request.task, bucket)


def _public(key: _Key) -> EstimateKey:
    model, task, bucket = key
    return EstimateKey(model, task, min_input_tokens(bucket))
