"""What a call costs, before and after: the value types everything else speaks in."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, fields
from typing import final

__all__ = [
    "QuotaStatus",
    "RateLimitStatus",
    "Request",
    "Usage",
    "finite_seconds",
    "known_count",
    "known_seconds",
    "positive_int",
    "positive_seconds",
    "token_count",
]


def token_count(value: object, name: str, *, least: int = 0) -> int:
    """Return `value` as an int >= `least`, or say which argument is wrong and how.

    bool is refused although it is an int, and float although it may be whole:
    both are mistakes more often than counts.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{name} must be an int >= {least}, not {value!r} ({kind})") from None
    if count < least:
        raise ValueError(f"{name} must be an int >= {least}, not {count}")
    return count


def positive_int(value: object, name: str) -> int:
    """Return `value` as an int >= 1, or say which argument is wrong and how."""
    return token_count(value, name, least=1)


def finite_seconds(value: object, name: str) -> float:
    """Return `value` as finite seconds >= 0, or say which argument is wrong and how."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of seconds >= 0, not {value!r}")
    return float(value)


def known_count(value: object) -> int | None:
    """What a server said, if it is a count at all: else it is unknown."""
    return value if type(value) is int and value >= 0 else None


def known_seconds(value: object) -> float | None:
    """What a server said, if it is a time at all: else it is unknown."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if 0 <= value < math.inf else None


def positive_seconds(value: object, name: str) -> float:
    """Return `value` as finite seconds > 0, or say which argument is wrong and how."""
    number = finite_seconds(value, name)
    if number == 0:
        raise ValueError(f"{name} must be more than 0 seconds, not {value!r}")
    return number


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens and requests, estimated before a call or reported after it.

    `cached_tokens` and `cache_write_tokens` are parts of `input_tokens`;
    `output_tokens` includes reasoning. `max_output_tokens` is the declared
    maximum, for quotas that charge it at arrival; None where none was declared.

    Usages add up:

    >>> Usage(input_tokens=900, output_tokens=80) + Usage(input_tokens=100)
    Usage(input_tokens=1000, output_tokens=80, requests=2)

    Raises:
        TypeError, ValueError: a count that is not an int >= 0, or cached parts
            that exceed the input.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    requests: int = 1
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        counts = _counts_of(self)
        if set(map(type, counts)) != _INT or min(counts) < 0:
            for name, value in zip(_COUNTS, counts, strict=True):
                object.__setattr__(self, name, token_count(value, name))
        if self.max_output_tokens is not None:
            maximum = token_count(self.max_output_tokens, "max_output_tokens")
            object.__setattr__(self, "max_output_tokens", maximum)
        cached = self.cached_tokens + self.cache_write_tokens
        if cached > self.input_tokens:
            raise ValueError(
                f"cached_tokens + cache_write_tokens = {cached} exceeds input_tokens = "
                f"{self.input_tokens}: both are parts of the input, so count them there too"
            )

    @classmethod
    def from_response(cls, response: object) -> Usage:
        """Read what a call has used from its response, in any provider's shape.

        `response` is a dictionary or an SDK's object: a whole response, one chunk or
        event of a stream, a list of them (each number counts once, at its largest),
        a usage taken out of its response, or a `Usage`, which is returned as it is.
        Known are chat completions, Responses, embeddings, Anthropic messages, Gemini,
        Cohere, Bedrock's Converse, and whoever imitates them.

        >>> Usage.from_response({"usage": {"prompt_tokens": 90, "completion_tokens": 7}})
        Usage(input_tokens=90, output_tokens=7)

        Raises:
            ValueError: there is none in it: keep the estimate then.
        """
        from ._wire import read_usage  # it imports this module

        return read_usage(response)

    @property
    def total_tokens(self) -> int:
        """Input plus output."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: object) -> Usage:
        if not isinstance(other, Usage):
            return NotImplemented
        maxima = (self.max_output_tokens, other.max_output_tokens)
        return Usage(
            **{name: getattr(self, name) + getattr(other, name) for name in _COUNTS},
            max_output_tokens=None if None in maxima else sum(m or 0 for m in maxima),
        )

    def __radd__(self, other: object) -> Usage:
        """Let `sum(usages)` start from its 0."""
        return self if other == 0 else NotImplemented

    def __repr__(self) -> str:
        shown = [
            f"{each.name}={value}"
            for each in fields(self)
            if (value := getattr(self, each.name)) != each.default
        ]
        return f"Usage({', '.join(shown)})"


_COUNTS = ("input_tokens", "output_tokens", "cached_tokens", "cache_write_tokens", "requests")
_counts_of = operator.attrgetter(*_COUNTS)
_INT = {int}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What estimators and the scheduler look at before a call is made.

    `max_output_tokens` None is unknown, 0 is none (embeddings, reranking).
    `choices` is how many completions are asked for (`n`). `content` is for
    learned estimators and never shows in a repr.
    """

    input_tokens: int
    max_output_tokens: int | None = None
    task: str | None = None
    model: str | None = None
    choices: int = 1
    content: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("input_tokens", "choices", "max_output_tokens"):
            value = getattr(self, name)
            unknown = value is None and name == "max_output_tokens"
            if not unknown and (type(value) is not int or value < 0):
                object.__setattr__(self, name, token_count(value, name))
        token_count(self.choices, "choices", least=1)

    @classmethod
    def from_body(cls, body: object, *, input_tokens: int, task: str | None = None) -> Request:
        """Read the model, the declared maximum and the choices from a request's body.

        `body` is what is sent, as a dictionary or an object, in any of the dialects
        `Usage.from_response` knows. Where several maxima are given, as `max_tokens`
        beside `max_completion_tokens`, the largest counts.

        >>> Request.from_body({"model": "gpt-5", "max_tokens": 9, "n": 2}, input_tokens=80)
        Request(input_tokens=80, max_output_tokens=9, task=None, model='gpt-5', choices=2)
        """
        from ._wire import read_request  # it imports this module

        return read_request(body, input_tokens=input_tokens, task=task)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaStatus:
    """What a server said about one of its quotas; None is unknown.

    `of` is the unit ("tokens", "input_tokens", "output_tokens", "requests" or a
    quota's name), `per` its period and `reset` the time until it is full again,
    both in seconds. `refills_steadily` until then, as a bucket does, or all at once?
    """

    of: str
    per: float | None = None
    limit: int | None = None
    remaining: int | None = None
    reset: float | None = None
    refills_steadily: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimitStatus:
    """What a server said about its quotas, as parsed from one response.

    `retry_after` is how long it asks everyone to wait, and `age` how long ago the call
    was sent that brought the response, both in seconds: the server has counted at some
    instant since then.
    """

    quotas: tuple[QuotaStatus, ...] = ()
    retry_after: float | None = None
    age: float = 0.0
