"""Token usage, texts and declared maxima, as providers write them.

A usage is reduced to one flat dictionary of the numbers it holds, under its own
names; streams are merged there, and only then is it interpreted, by the first
dialect that knows one of the names. So a stream that reports its input first
and its output last reads like a response that reports both at once.

What is not a whole number, or no sensible one, is unknown and never an error:
these are other people's servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypedDict, final

from ._usage import Request, Usage

__all__ = [
    "Settings",
    "UsageReader",
    "emitted_text",
    "is_cut_off",
    "is_last",
    "read_request",
    "read_settings",
    "read_usage",
]


class Settings(TypedDict):
    """What `Request` is told by a body."""

    model: str | None
    max_output_tokens: int | None
    choices: int


class _Dialect:
    """Names to add up for the input and the output; of names for one thing, the largest."""

    __slots__ = ("cached", "input", "marks", "output", "written")

    def __init__(
        self,
        input: tuple[str, ...],
        output: tuple[str, ...],
        cached: tuple[str, ...] = (),
        written: tuple[str, ...] = (),
    ) -> None:
        self.input, self.output, self.cached, self.written = input, output, cached, written
        self.marks = frozenset(input + output)  # by which it is known


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
_DETAILS: Final = frozenset(("prompt_tokens_details", "input_tokens_details"))
_NUMBERS: Final = frozenset(
    name for each in _DIALECTS for name in (*each.input, *each.output, *each.cached, *each.written)
)
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
_LEVELS: Final = ("tokens", "billed_units")

_MAXIMA: Final = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "maxOutputTokens",
    "maxTokens",
)
_CHOICES: Final = ("n", "best_of", "candidateCount", "candidate_count")
# Where a chunk keeps its text; of two names for the same reasoning a server sends one.
_DELTAS: Final = (
    "content",
    "reasoning_content",
    "reasoning",
    "refusal",
    "text",
    "thinking",
    "partial_json",
)
_CUT_OFF: Final = ("length", "max_tokens", "MAX_TOKENS", "incomplete")
_GOES_ON: Final = ("", "in_progress", "queued")
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

    __slots__ = ("_numbers", "_usage", "is_fed")

    def __init__(self) -> None:
        self.is_fed: bool = False  # did the last chunk say anything?
        self._numbers: dict[str, int] = {}
        self._usage: Usage | None = None  # what they mean

    def feed(self, chunk: object) -> None:
        """Take what `chunk` says about usage, if anything."""
        self.is_fed = False
        for place in _PLACES:
            found = _at(chunk, place)
            if found is not None and self._take(found):
                self.is_fed = True
                return

    def feed_usage(self, usage: object) -> None:
        """Take a usage that has been taken out of its response already."""
        self._take(usage)

    def _take(self, usage: object) -> bool:
        found: dict[str, int] = {}
        for owner in (*_present(usage, _LEVELS), usage):
            found = found or _numbers(owner)
        if not found:
            return False
        for name, known in self._numbers.items():
            found[name] = max(known, found.get(name, 0))
        self._numbers = found
        self._usage = _meaning(found)
        return True

    @property
    def usage(self) -> Usage | None:
        """What has been reported so far; None where nothing was."""
        return self._usage


def read_usage(response: object) -> Usage:
    """The body of `Usage.from_response`."""
    if isinstance(response, Usage):
        return response
    reader = UsageReader()
    for event in response if isinstance(response, (list, tuple)) else (response,):
        reader.feed(event)
    if reader.usage is None:
        reader.feed_usage(response)
    usage = reader.usage
    if usage is None:
        raise ValueError(f"no token usage in this {type(response).__name__}: {_remedy(response)}")
    return usage


def _remedy(response: object) -> str:
    if callable(getattr(response, "json", None)):
        return "pass what its json() returns"
    if isinstance(response, (str, bytes)) or response is None:
        return "pass the response as the SDK returns it, or its JSON as a dictionary"
    return (
        "streams of chat completions report it only with "
        "stream_options={'include_usage': True}, in their last chunk, and a stream that broke "
        "off has none"
    )


def read_request(body: object, *, input_tokens: int, task: str | None = None) -> Request:
    """The body of `Request.from_body`."""
    return Request(input_tokens=input_tokens, task=task, **read_settings(body))


def read_settings(body: object) -> Settings:
    """What a request's body says of the output, and of whom it is asked."""
    places = [body, *_present(body, _SETTINGS)]
    model = _get(body, "model")
    return {
        "model": model if isinstance(model, str) else None,
        "max_output_tokens": _largest(places, _MAXIMA),
        "choices": _largest(places, _CHOICES) or 1,
    }


def emitted_text(event: object) -> str:
    """What one chunk or event of a stream adds to the output, reasoning and tool calls included."""
    texts: list[str] = []
    kind = _get(event, "type")
    delta = _get(event, "delta")
    if isinstance(delta, str):  # Responses: response.output_text.delta and its like
        texts.append(delta)
    elif kind == "content_block_delta":  # Anthropic
        _gather(delta, _DELTAS, texts)
    for choice in _list(_get(event, "choices")):
        _gather(choice, ("text",), texts)
        delta = _get(choice, "delta")
        _gather(delta, _DELTAS, texts)
        for call in _list(_get(delta, "tool_calls")):
            _gather(_get(call, "function"), ("name", "arguments"), texts)
    for candidate in _list(_get(event, "candidates")):
        for part in _list(_at(candidate, ("content", "parts"))):
            _gather(part, ("text",), texts)
    return "".join(texts)


def is_cut_off(response: object) -> bool:
    """Does it say that the output met its maximum, so that it would have been longer?"""
    return any(reason in _CUT_OFF for reason in _reasons(response))


def is_last(event: object) -> bool:
    """Does an event with a usage in it end its stream, whatever may follow?"""
    if _get(event, "choices") == []:  # chat completions, with `include_usage`
        return True
    return any(isinstance(reason, str) and reason not in _GOES_ON for reason in _reasons(event))


def _reasons(response: object) -> Iterator[object]:
    """Why it stopped; None where it has not."""
    for choices in ("choices", "candidates"):
        for choice in _list(_get(response, choices)):
            yield from _present(choice, ("finish_reason", "finishReason"))
    for owner in (response, *_present(response, ("delta", "response"))):
        yield from _present(owner, ("stop_reason", "status", "stopReason"))


def _gather(owner: object, names: tuple[str, ...], texts: list[str]) -> None:
    for name in names:
        text = None if owner is None else _get(owner, name)
        if isinstance(text, str):
            texts.append(text)


def _list(found: object) -> Iterable[object]:
    return found if isinstance(found, (list, tuple)) else ()


def _largest(places: Iterable[object], names: tuple[str, ...]) -> int | None:
    """Of all settings with one of these names; None where there is none that makes sense."""
    counts = [_count(value) for place in places for value in _present(place, names)]
    return max((count for count in counts if count is not None), default=None)


def _at(found: object, place: Iterable[str]) -> object:
    for name in place:
        found = None if found is None else _get(found, name)
    return found


def _get(owner: object, name: str) -> object:
    if type(owner) is dict or isinstance(owner, Mapping):  # the first is much faster
        return owner.get(name)
    return getattr(owner, name, None)


def _present(owner: object, names: tuple[str, ...]) -> list[object]:
    """What is there under these names."""
    if type(owner) is dict:  # the same in fewer steps
        return [owner[name] for name in names if name in owner and owner[name] is not None]
    return [found for name in names if (found := _get(owner, name)) is not None]


def _count(value: object) -> int | None:
    """A whole number that makes sense, or None; Cohere sends whole floats."""
    if type(value) is int:
        return value if 0 <= value <= _LARGEST else None
    return _count(int(value)) if isinstance(value, float) and value.is_integer() else None


def _numbers(usage: object) -> dict[str, int]:
    """Those it holds that make sense."""
    if type(usage) is dict:  # the same in fewer steps
        values = {name: usage[name] for name in _NUMBERS.intersection(usage)}
    else:
        values = {name: _get(usage, name) for name in _NUMBERS if usage is not None}
    for name in _DETAILS.intersection(values):
        values[name] = _get(values[name], "cached_tokens")
    return {name: count for name, value in values.items() if (count := _count(value)) is not None}


def _meaning(numbers: Mapping[str, int]) -> Usage | None:
    for dialect in _DIALECTS:
        if not dialect.marks.isdisjoint(numbers):
            return _interpret(numbers, dialect)
    return None


def _interpret(numbers: Mapping[str, int], dialect: _Dialect) -> Usage:
    input_tokens = sum([numbers.get(name, 0) for name in dialect.input])
    cached = max([numbers.get(name, 0) for name in dialect.cached], default=0)
    written = max([numbers.get(name, 0) for name in dialect.written], default=0)
    cached = min(cached, input_tokens)
    return Usage(
        input_tokens=input_tokens,
        output_tokens=sum([numbers.get(name, 0) for name in dialect.output]),
        cached_tokens=cached,
        cache_write_tokens=min(written, input_tokens - cached),
    )
