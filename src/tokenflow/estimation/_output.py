"""How long an answer will be: the estimators.

An output's length is known only when it is over, yet limits charge for it when
the call begins. Reserving the declared maximum is safe and halves throughput;
an average runs out for every second call. `HistoricalEstimator` reserves a
quantile of what calls of the kind have used lately, and sees to it that the
quantile is the real one.

All of this is pure: no clock, no lock, no I/O. Like everything that keeps books
here, an estimator belongs to one thread.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, final

from tokenflow._usage import Request, token_count

from ._scores import EstimateStatistics, Score

__all__ = [
    "MaxTokensEstimator",
    "OutputEstimate",
    "OutputEstimator",
    "ScoredEstimator",
    "TaskEstimator",
]

TASK_TOKENS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "classification": 20,
        "extraction": 100,
        "summarization": 300,
        "chat": 500,
        "generation": 500,
        "code": 800,
    }
)
_RECENT: Final = 2000


class OutputEstimate(NamedTuple):
    """Output tokens to reserve for a call, all its choices together.

    `confidence` is the share of such calls expected to need no more: 1.0 where
    the declared maximum makes it certain.
    """

    tokens: int
    confidence: float


class OutputEstimator(Protocol):
    """What says how long answers will be, and learns from how long they were.

    Both methods run in the event loop: they neither wait nor fail for any valid
    request. A model of your own plugs in by having them. One that trusts a
    regression on the prompt's length, and corrects its offset as answers come in:

    >>> class Linear:
    ...     offset = 50.0
    ...
    ...     def estimate(self, request):
    ...         return OutputEstimate(round(self.offset + 0.2 * request.input_tokens), 0.5)
    ...
    ...     def observe(self, request, output_tokens, *, truncated=False):
    ...         self.offset += 0.05 * (output_tokens - self.estimate(request).tokens)
    >>> linear = Linear()
    >>> linear.estimate(Request(input_tokens=1000)).tokens
    250

    As `HistoricalEstimator(prior=Linear())` it would serve until there is history.
    """

    def estimate(self, request: Request) -> OutputEstimate:
        """Return what to reserve for the output of `request`. Changes nothing."""
        ...

    def observe(self, request: Request, output_tokens: int, *, truncated: bool = False) -> None:
        """Learn that `request` ended with `output_tokens`, over all its choices.

        `truncated` says that it was cut off, so that it would have needed at
        least that much: an abort, a length cap, a broken stream.
        """
        ...


class ScoredEstimator(ABC):
    """What the estimators have in common: the margin, the cap, the totals.

    Invariant: what is handed out is never above choices x declared maximum.
    """

    __slots__ = ("_margin", "_score")

    def __init__(self, margin: float) -> None:
        if isinstance(margin, bool) or not 0 < margin < math.inf:
            raise ValueError(f"margin must be a finite factor > 0, not {margin!r}")
        self._margin = 1 if margin == 1 else margin  # int x int stays exact, and is faster
        self._score = Score(_RECENT)

    @abstractmethod
    def estimate(self, request: Request) -> OutputEstimate:
        """Return what to reserve for the output of `request`. Changes nothing."""

    def observe(self, request: Request, output_tokens: int, *, truncated: bool = False) -> None:
        """Keep the score; the estimates stay what they are."""
        output_tokens = token_count(output_tokens, "output_tokens")
        self._score.add(request.input_tokens, self.estimate(request).tokens, output_tokens)

    def _hand_out(self, request: Request, tokens: float, confidence: float) -> OutputEstimate:
        wanted = math.ceil(tokens * request.choices * self._margin)
        declared = request.max_output_tokens
        if declared is None or wanted < declared * request.choices:
            return OutputEstimate(wanted, confidence)
        return OutputEstimate(declared * request.choices, 1.0)

    def statistics(self) -> EstimateStatistics:
        """How the estimates compare with what was observed, over all calls."""
        return self._score.statistics()

    def __repr__(self) -> str:
        score = self.statistics()
        return (
            f"<{type(self).__name__} calls={score.calls} coverage={score.coverage:.3f} "
            f"ratio={score.ratio:.3f}>"
        )


@final
class MaxTokensEstimator(ScoredEstimator):
    """The declared maximum, for each choice: never too low, usually far too high.

    For servers that reserve it themselves at arrival. `default` serves where none
    is declared, at confidence 0.5. A margin below 1.0 reserves a share of the
    maximum; above, it matters only to the default.

    >>> MaxTokensEstimator().estimate(Request(input_tokens=9, max_output_tokens=256, choices=2))
    OutputEstimate(tokens=512, confidence=1.0)
    """

    __slots__ = ("_default",)

    def __init__(self, default: int = 4096, *, margin: float = 1.0) -> None:
        super().__init__(margin)
        self._default = token_count(default, "default")

    def estimate(self, request: Request) -> OutputEstimate:
        """Return the declared maximum x choices, or the default."""
        declared = request.max_output_tokens
        return self._hand_out(request, self._default if declared is None else declared, 0.5)


@final
class TaskEstimator(ScoredEstimator):
    """A table from task to output tokens: the guess to start from, before any history.

    `tokens` adds to the built-in table or overrides it: classification 20,
    extraction 100, summarization 300, chat and generation 500, code 800. `default`
    is for every other task, and for none.

    >>> table = TaskEstimator({"haiku": 30}, margin=1.1)
    >>> table.estimate(Request(input_tokens=9, task="haiku")).tokens
    33
    """

    __slots__ = ("_default", "_tokens")

    def __init__(
        self,
        tokens: Mapping[str, int] = MappingProxyType({}),
        *,
        default: int = 500,
        margin: float = 1.0,
    ) -> None:
        super().__init__(margin)
        own = {task: token_count(count, f"tokens[{task!r}]") for task, count in tokens.items()}
        self._tokens: dict[str | None, int] = {}
        self._tokens.update(TASK_TOKENS)
        self._tokens.update(own)
        self._default = token_count(default, "default")

    def estimate(self, request: Request) -> OutputEstimate:
        """Return the table's entry x choices, at most what is declared."""
        return self._hand_out(request, self._tokens.get(request.task, self._default), 0.5)
