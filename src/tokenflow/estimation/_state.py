"""What an estimator has learned, as JSON, so that a restart does not start cold."""

from __future__ import annotations

import json
import math
from typing import Final, NamedTuple

__all__ = ["LARGEST", "PRIOR_RANGE", "SavedHistory", "SavedState", "dump_state", "parse_state"]

LARGEST: Final = 1 << 40  # output tokens; nobody writes that much, and int * float stays finite
PRIOR_RANGE: Final = 64.0  # how far the factor on the prior may go, up and down
_VERSION: Final = 1


class SavedHistory(NamedTuple):
    """One key and what was seen under it; outputs oldest first."""

    model: str | None
    task: str | None
    min_input_tokens: int
    level: float
    outputs: list[int]


class SavedState(NamedTuple):
    """Everything one estimator knows; histories least recently used first."""

    quantile: float
    prior_scale: float
    histories: list[SavedHistory]


def dump_state(state: SavedState) -> str:
    """`state` as compact JSON: about four bytes per output kept."""
    return json.dumps({"version": _VERSION, **state._asdict()}, separators=(",", ":"))


def parse_state(text: str | bytes) -> SavedState:
    """The inverse of `dump_state`, for text that may be anything.

    Raises:
        ValueError: not such a state, saying where.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"estimator state is not JSON: {exc}") from exc
    _expect(isinstance(raw, dict) and raw.get("version") == _VERSION, f"version {_VERSION}", raw)
    histories = raw.get("histories")
    _expect(isinstance(histories, list), "a list of histories", histories)
    return SavedState(
        _number(raw.get("quantile"), 0.0, 1.0, "a quantile up to 1"),
        _number(raw.get("prior_scale"), 1 / PRIOR_RANGE, PRIOR_RANGE, "a sensible prior_scale"),
        [_history(each) for each in histories],
    )


def _history(raw: object) -> SavedHistory:
    _expect(isinstance(raw, list) and len(raw) == 5, "five fields in a history", raw)
    assert isinstance(raw, list)
    model, task, minimum, level, outputs = raw
    names = all(name is None or isinstance(name, str) for name in (model, task))
    _expect(names, "model and task to be strings or null", (model, task))
    _expect(_is_count(minimum), "min_input_tokens to be a count", minimum)
    counts = isinstance(outputs, list) and all(map(_is_count, outputs))
    _expect(counts, "outputs to be counts", outputs)
    level = _number(level, 0.0, float(LARGEST), "a level >= 0")
    return SavedHistory(model, task, minimum, level, outputs)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _number(value: object, least: float, largest: float, what: str) -> float:
    number = value if isinstance(value, (int, float)) and type(value) is not bool else math.nan
    _expect(least <= number <= largest, what, value)
    return float(number)


def _expect(fulfilled: bool, what: str, found: object) -> None:
    if not fulfilled:
        raise ValueError(f"estimator state is corrupt: expected {what}, found {found!r:.60}")
