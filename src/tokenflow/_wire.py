"""Token usage and declared maxima, as providers write them.

A usage is reduced to one flat dictionary of the numbers it holds, under its own
names; streams are merged there, and only then is it interpreted, by the first
dialect that knows one of the names. So a stream that reports its input first
and its output last reads like a response that reports both at once.

What is not a whole number, or no sensible one, is unknown and never an error:
these are other people's servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, final

from ._usage import Request, Usage

__all__ = ["UsageReader", "read_request", "read_usage"]


class _Dialect(NamedTuple):
    """Names to add up for the input and the output; of names for one thing, the largest."""

    input: tuple[str, ...]
    output: tuple[str, ...]
    cached: tuple[str, ...] = ()
    written: tuple[str, ...] = ()


_CACHE: Final = ("cache_read_input_tokens", "cache_creation_input_tokens")
_DIALECTS: Final = (
    # Chat completions and all who imitate them; cache counts are inside the prompt.
    _Dialect(
        ("prompt_tokens",),
        ("completion_tokens",),
        ("prompt_tokens_details", "prompt_cache_hit_tokens", _CACHE[0]),
        _CACHE[1:],
    ),
    # Responses, Anthropic and Cohere; Anthropic's cache counts are beside the input.
    _Dialect(
        ("input_tokens", *_CACHE),
        ("output_tokens",),
        ("input_tokens_details", _CACHE[0]),
        _CACHE[1:],
    ),
    # Gemini, over REST and in its SDK: thoughts are beside the candidates.
    _Dialect(
        ("promptTokenCount", "toolUsePromptTokenCount"),
        ("candidatesTokenCount", "thoughtsTokenCount"),
        ("cachedContentTokenCount",),
    ),
    _Dialect(
        ("prompt_token_count", "tool_use_prompt_token_count"),
        ("candidates_token_count", "thoughts_token_count"),
        ("cached_content_token_count",),
    ),
    # Bedrock's Converse: cache counts are beside the input.
    _Dialect(
        ("inputTokens", "cacheReadInputTokens", "cacheWriteInputTokens"),
        ("outputTokens",),
        ("cacheReadInputTokens",),
        ("cacheWriteInputTokens",),
    ),
    # Embeddings and rerankers that report nothing else.
    _Dialect(("total_tokens",), ()),
)
_DETAILS: Final = ("prompt_tokens_details", "input_tokens_details")
_NUMBERS: Final = tuple({name for dialect in _DIALECTS for names in dialect for name in names})
_LARGEST: Final = 1 << 40  # beyond it is nonsense, and would be charged

# Where a usage is kept, from the outermost object inwards.
_PLACES: Final = (
    ("usage",),
    ("usageMetadata",),  # Gemini over REST
    ("usage_metadata",),  # its SDK
    ("response", "usage"),  # Responses: response.completed
    ("message", "usage"),  # Anthropic: message_start
    ("delta", "usage"),  # Cohere: message-end
    ("metadata", "usage"),  # Bedrock: the end of a Converse stream
    ("x_groq", "usage"),
    ("meta",),  # Cohere: embeddings and the older API
    ("response", "body", "usage"),  # a line of an OpenAI batch's results
    ("result", "message", "usage"),  # a line of an Anthropic batch's results
)
# Cohere's numbers are a level further down; what it bills is not what it processed.
_LEVELS: Final = (("tokens",), ("billed_units",), ())

_MAXIMA: Final = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "maxOutputTokens",
    "maxTokens",
)
_CHOICES: Final = ("n", "best_of", "candidateCount", "candidate_count")
_SETTINGS: Final = ("generationConfig", "generation_config", "inferenceConfig", "parameters")


@final
class UsageReader:
    """Usage, gathered from the chunks or events of one stream.

    Providers count up, so of each number the largest is kept: an event that
    repeats a field as 0 takes nothing back.

    >>> reader = UsageReader()
    >>> reader.feed({"type": "message_start", "message": {"usage": {"input_tokens": 25}}})
    >>> reader.feed({"type": "message_delta", "usage": {"output_tokens": 15}})
    >>> reader.usage
    Usage(input_tokens=25, output_tokens=15)
    """

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def feed(self, chunk: object) -> None:
        """Take what `chunk` says about usage, if anything."""
        for place in _PLACES:
            if self._take(_at(chunk, place)):
                return

    def feed_usage(self, usage: object) -> None:
        """Take a usage that has been taken out of its response already."""
        self._take(usage)

    def _take(self, usage: object) -> bool:
        for level in _LEVELS:
            found = _numbers(_at(usage, level))
            if found:
                self._numbers.update({k: max(v, self._numbers.get(k, 0)) for k, v in found.items()})
                return True
        return False

    @property
    def usage(self) -> Usage | None:
        """What has been reported so far; None where nothing was."""
        for dialect in _DIALECTS:
            if any(name in self._numbers for name in (*dialect.input, *dialect.output)):
                return _interpret(self._numbers, dialect)
        return None


def read_usage(response: object) -> Usage:
    """The body of `Usage.from_response`."""
    if isinstance(response, Usage):
        return response
    reader = UsageReader()
    for event in response if isinstance(response, (list, tuple)) else (response,):
        reader.feed(event)
    if reader.usage is None:
        reader.feed_usage(response)
    if reader.usage is None:
        raise ValueError(
            f"no token usage in this {type(response).__name__}: streams of chat completions "
            "report it only with stream_options={'include_usage': True}, in their last chunk, "
            "and a stream that broke off has none"
        )
    return reader.usage


def read_request(body: object, *, input_tokens: int, task: str | None = None) -> Request:
    """The body of `Request.from_body`."""
    model = _get(body, "model")
    return Request(
        input_tokens=input_tokens,
        max_output_tokens=_largest_setting(body, _MAXIMA),
        task=task,
        model=model if isinstance(model, str) else None,
        choices=_largest_setting(body, _CHOICES) or 1,
    )


def _largest_setting(body: object, names: tuple[str, ...]) -> int | None:
    places = (body, *(_get(body, settings) for settings in _SETTINGS))
    values = [_count(place, name) for place in places for name in names if place is not None]
    return max((value for value in values if value is not None), default=None)


def _at(found: object, place: Iterable[str]) -> object:
    for name in place:
        found = None if found is None else _get(found, name)
    return found


def _get(owner: object, name: str) -> object:
    return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)


def _count(owner: object, name: str) -> int | None:
    """A whole number that makes sense, or None; Cohere sends whole floats."""
    value = _get(owner, name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= _LARGEST else None


def _numbers(usage: object) -> dict[str, int]:
    if usage is None:
        return {}
    found = {name: _count(usage, name) for name in _NUMBERS}
    for name in _DETAILS:
        found[name] = _count(_get(usage, name), "cached_tokens")
    return {name: count for name, count in found.items() if count is not None}


def _interpret(numbers: Mapping[str, int], dialect: _Dialect) -> Usage:
    input_tokens, output_tokens = (
        sum(numbers.get(name, 0) for name in names) for names in (dialect.input, dialect.output)
    )
    cached, written = (
        max((numbers.get(name, 0) for name in names), default=0)
        for names in (dialect.cached, dialect.written)
    )
    cached = min(cached, input_tokens)
    return Usage(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached,
        cache_write_tokens=min(written, input_tokens - cached),
    )
