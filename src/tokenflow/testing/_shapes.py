"""What answers look like on the wire, one shape per endpoint: whole, or as a stream of events.

An answer consists of words of four bytes, one per token, so that who estimates
a token at four bytes is right.
"""

from __future__ import annotations

import base64
import itertools
import json
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeAlias, final

from typing_extensions import override

from ._request import Body, Endpoint, FakeRequest, Invalid, count

__all__ = ["SHAPES", "Generation", "Json", "Shape", "StreamShape"]

Json: TypeAlias = dict[str, Any]

_WORD: Final = "tok "
_WIDTH: Final = 8
_MAX_INPUTS: Final = 2_048


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What is going to be answered: `lengths` is tokens per choice."""

    request: FakeRequest
    created: int
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    hide_usage: bool

    @property
    def output_tokens(self) -> int:
        """Of all choices."""
        return sum(self.lengths)


class Shape(ABC):
    """How one endpoint writes one answer."""

    def __init__(self, answer: Generation) -> None:
        self.answer: Generation = answer
        self.request: FakeRequest = answer.request
        self.texts: list[str] = [_WORD * length for length in answer.lengths]

    @abstractmethod
    def whole(self) -> Json:
        """The answer in one piece."""
        ...

    def with_usage(self, body: Json, usage: Json) -> Json:
        """The body and its usage, unless a fault hides that."""
        return body if self.answer.hide_usage else {**body, "usage": usage}


class StreamShape(Shape):
    """One that can stream as well, in blocks of whole events."""

    @abstractmethod
    def opening(self) -> str:
        """What comes before the first token."""
        ...

    @abstractmethod
    def delta(self, choice: int, tokens: int) -> str:
        """A chunk of one choice."""
        ...

    @abstractmethod
    def closing(self) -> str:
        """What comes after the last token."""
        ...

    def event(self, name: str, **fields: Any) -> str:
        """An event with a name, which is its type too."""
        return f"event: {name}\n{_data({'type': name, **fields})}"


def _data(fields: Json) -> str:
    return f"data: {json.dumps(fields, separators=(',', ':'))}\n\n"


class Chat(StreamShape):
    """Chat completions: events without names, and a usage for those who ask for it."""

    prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, answer: Generation) -> None:
        super().__init__(answer)
        self._made = 0
        options = answer.request.body.get("stream_options")
        self._options: Json = options if isinstance(options, dict) else {}

    @override
    def whole(self) -> Json:
        self._made = self.answer.output_tokens
        choices = [
            self._choice(index, self._content(text), is_last=True)
            for index, text in enumerate(self.texts)
        ]
        return self.with_usage({**self._head(self.whole_object), "choices": choices}, self._usage())

    @override
    def opening(self) -> str:
        role = self._delta(role="assistant", content="")
        return "".join(self._chunk(index, role) for index in range(len(self.texts)))

    @override
    def delta(self, choice: int, tokens: int) -> str:
        self._made += tokens
        return self._chunk(choice, self._delta(content=_WORD * tokens))

    @override
    def closing(self) -> str:
        indices = range(len(self.texts))
        events = [self._chunk(index, self._delta(), is_last=True) for index in indices]
        if self._wants_usage:
            head = self._head(self.chunk_object)
            events.append(_data({**head, "choices": [], "usage": self._usage()}))
        return "".join(events) + "data: [DONE]\n\n"

    def _chunk(self, index: int, delta: Json, *, is_last: bool = False) -> str:
        choice = self._choice(index, delta, is_last=is_last)
        chunk = {**self._head(self.chunk_object), "choices": [choice]}
        if not self._wants_usage:
            return _data(chunk)
        continuous = self._options.get("continuous_usage_stats") is True  # an option of vLLM
        return _data({**chunk, "usage": self._usage() if continuous else None})

    def _head(self, kind: str) -> Json:
        request, created = self.request, self.answer.created
        identity = {"id": f"{self.prefix}-{request.number}", "object": kind}
        return {**identity, "created": created, "model": request.model}

    def _choice(self, index: int, content: Json, *, is_last: bool) -> Json:
        reason = "length" if self.answer.truncated[index] else "stop"
        end = {"logprobs": None, "finish_reason": reason if is_last else None}
        return {"index": index, **content, **end}

    def _content(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, **delta: str) -> Json:
        return {"delta": delta}

    @property
    def _wants_usage(self) -> bool:
        return self._options.get("include_usage") is True and not self.answer.hide_usage

    def _usage(self) -> Json:
        used, made = self.request.input_tokens, self._made
        return {
            "prompt_tokens": used,
            "completion_tokens": made,
            "total_tokens": used + made,
            "prompt_tokens_details": {"cached_tokens": self.request.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


@final
class Completions(Chat):
    """The older completions: text instead of messages, and no roles."""

    prefix: ClassVar[str] = "cmpl"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    @override
    def opening(self) -> str:
        return ""

    @override
    def _content(self, text: str) -> Json:
        return {"text": text}

    @override
    def _delta(self, **delta: str) -> Json:
        return {"text": delta.get("content", "")}


@final
class Responses(StreamShape):
    """Responses: numbered events, and the usage inside the last of them."""

    def __init__(self, answer: Generation) -> None:
        super().__init__(answer)
        self._numbers = itertools.count()
        self._status = "incomplete" if answer.truncated[0] else "completed"
        self._message = {"item_id": f"msg_{answer.request.number}", "output_index": 0}
        self._text = {**self._message, "content_index": 0}

    @override
    def whole(self) -> Json:
        used, made = self.request.input_tokens, self.answer.output_tokens
        usage = {
            "input_tokens": used,
            "input_tokens_details": {"cached_tokens": self.request.cached_tokens},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used + made,
        }
        reason = {"reason": "max_output_tokens"} if self.answer.truncated[0] else None
        output = {"output": [self._item(self._status, self._part(self.texts[0]))]}
        body = {**self._response(self._status), **output, "incomplete_details": reason}
        return self.with_usage(body, usage)

    @override
    def opening(self) -> str:
        response = self._response("in_progress")
        item = self._item("in_progress")
        return (
            self.event("response.created", response=response)
            + self.event("response.in_progress", response=response)
            + self.event("response.output_item.added", output_index=0, item=item)
            + self.event("response.content_part.added", **self._text, part=self._part(""))
        )

    @override
    def delta(self, choice: int, tokens: int) -> str:
        text = {"delta": _WORD * tokens, "logprobs": []}
        return self.event("response.output_text.delta", **self._text, **text)

    @override
    def closing(self) -> str:
        text = {"text": self.texts[0], "logprobs": []}
        part = self._part(self.texts[0])
        item = self._item(self._status, part)
        return (
            self.event("response.output_text.done", **self._text, **text)
            + self.event("response.content_part.done", **self._text, part=part)
            + self.event("response.output_item.done", output_index=0, item=item)
            + self.event(f"response.{self._status}", response=self.whole())
        )

    @override
    def event(self, name: str, **fields: Any) -> str:
        return super().event(name, sequence_number=next(self._numbers), **fields)

    def _part(self, text: str) -> Json:
        return {"type": "output_text", "text": text, "annotations": []}

    def _item(self, status: str, *content: Json) -> Json:
        identity = {"id": self._message["item_id"], "type": "message", "role": "assistant"}
        return {**identity, "status": status, "content": list(content)}

    def _response(self, status: str) -> Json:
        identity = {"id": f"resp_{self.request.number}", "object": "response"}
        nothing: Json = {"output": [], "tools": [], "metadata": {}, "error": None}
        usual = {"tool_choice": "auto", "parallel_tool_calls": True, "instructions": None}
        asked = {"created_at": self.answer.created, "model": self.request.model}
        return {**identity, **asked, "status": status, **nothing, **usual}


@final
class Messages(StreamShape):
    """Anthropic's messages: input first, output counted up, the cache beside the input."""

    @override
    def whole(self) -> Json:
        content = {"content": [{"type": "text", "text": self.texts[0]}]}
        body = {**self._message(), **content, "stop_reason": self._reason}
        return self.with_usage(body, self._usage(self.answer.output_tokens))

    @override
    def opening(self) -> str:
        message = self.with_usage(self._message(), self._usage(1))
        block = {"type": "text", "text": ""}
        return (
            self.event("message_start", message=message)
            + self.event("content_block_start", index=0, content_block=block)
            + self.event("ping")
        )

    @override
    def delta(self, choice: int, tokens: int) -> str:
        text = {"type": "text_delta", "text": _WORD * tokens}
        return self.event("content_block_delta", index=0, delta=text)

    @override
    def closing(self) -> str:
        end = {"delta": {"stop_reason": self._reason, "stop_sequence": None}}
        end = self.with_usage(end, {"output_tokens": self.answer.output_tokens})
        return (
            self.event("content_block_stop", index=0)
            + self.event("message_delta", **end)
            + self.event("message_stop")
        )

    @property
    def _reason(self) -> str:
        return "max_tokens" if self.answer.truncated[0] else "end_turn"

    def _message(self) -> Json:
        identity = {"id": f"msg_{self.request.number}", "type": "message", "role": "assistant"}
        end = {"stop_reason": None, "stop_sequence": None}
        return {**identity, "model": self.request.model, "content": [], **end}

    def _usage(self, output_tokens: int) -> Json:
        cached = self.request.cached_tokens
        return {
            "input_tokens": self.request.input_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
        }


@final
class Embeddings(Shape):
    """Embeddings; they mean nothing, but the same text has the same."""

    def __init__(self, answer: Generation) -> None:
        super().__init__(answer)
        self._items = _inputs(answer.request.body)
        self._width = count(answer.request.body, "dimensions", _WIDTH)

    @override
    def whole(self) -> Json:
        data = [
            {"object": "embedding", "index": index, "embedding": self._vector(item)}
            for index, item in enumerate(self._items)
        ]
        tokens = self.request.input_tokens
        body = {"object": "list", "model": self.request.model, "data": data}
        return self.with_usage(body, {"prompt_tokens": tokens, "total_tokens": tokens})

    def _vector(self, item: object) -> list[float] | str:
        seed = zlib.crc32(json.dumps(item).encode())
        vector = [(seed >> place % 24 & 255) / 256 for place in range(self._width)]
        if self.request.body.get("encoding_format") != "base64":  # what OpenAI's library asks for
            return vector
        return base64.b64encode(struct.pack(f"<{self._width}f", *vector)).decode()


def _inputs(body: Body) -> list[Any]:
    given = body.get("input")
    items = given if isinstance(given, list) else [given]
    if items and type(items[0]) is int:
        return [items]
    if not items or None in items:
        raise Invalid(400, "input must be a text, or a list with at least one")
    if len(items) > _MAX_INPUTS:
        raise Invalid(400, f"input may have at most {_MAX_INPUTS} items, not {len(items)}")
    return items


@final
class Models(Shape):
    """A list with one model; any other is answered for as well."""

    @override
    def whole(self) -> Json:
        names = {"id": "fake", "object": "model", "type": "model", "display_name": "Fake"}
        rest = {"created": self.answer.created, "owned_by": "tokenflow"}
        return {"object": "list", "data": [{**names, **rest}], "has_more": False}


SHAPES: Final[Mapping[Endpoint, type[Shape]]] = MappingProxyType(
    {
        "chat/completions": Chat,
        "completions": Completions,
        "embeddings": Embeddings,
        "messages": Messages,
        "models": Models,
        "responses": Responses,
    }
)
