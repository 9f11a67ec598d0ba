"""What answers look like on the wire, one shape per endpoint: whole, or as a stream of events.

An answer consists of words of four bytes, one per token, so that who estimates
a token at four bytes is right.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeAlias, final

from typing_extensions import override

from ._request import Body, Endpoint, FakeRequest, Invalid

__all__ = ["SHAPES", "Generation", "Json", "Shape"]

Json: TypeAlias = dict[str, Any]

_WORD: Final = "tok "
_DIMENSIONS: Final = 8
_MAX_INPUTS: Final = 2_048


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What is going to be answered: `lengths` is tokens per choice."""

    request: FakeRequest
    created: int
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    hide_usage: bool = False

    @property
    def output_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(self.lengths)

    @property
    def text(self) -> str:
        """The first choice."""
        return _WORD * self.lengths[0]


def _event(data: object, name: str = "") -> str:
    line = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return f"event: {name}\ndata: {line}\n\n" if name else f"data: {line}\n\n"


class Shape:
    """How one endpoint writes one answer; the parts of a stream are blocks of whole events."""

    def __init__(self, answer: Generation) -> None:
        self.answer: Generation = answer
        self.request: FakeRequest = answer.request

    def whole(self) -> Json:
        """The answer in one piece."""
        raise NotImplementedError

    def opening(self) -> str:
        """What comes before the first token of a stream."""
        return ""

    def delta(self, choice: int, tokens: int) -> str:
        """A chunk of one choice."""
        return ""

    def closing(self) -> str:
        """What comes after the last token."""
        return ""

    def with_usage(self, body: Json, usage: Json) -> Json:
        """The body with its usage, unless that is to be missing."""
        return body if self.answer.hide_usage else {**body, "usage": usage}


class Chat(Shape):
    """Chat completions: chunks without names, and a usage only for those who ask for it."""

    prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    @override
    def whole(self) -> Json:
        choices = [
            {**self._choice(index), **self._text(_WORD * length)}
            for index, length in enumerate(self.answer.lengths)
        ]
        return self.with_usage({**self._head(self.whole_object), "choices": choices}, self._usage())

    @override
    def opening(self) -> str:
        role = {"role": "assistant", "content": ""}
        return "".join(self._chunk(index, role) for index in range(len(self.answer.lengths)))

    @override
    def delta(self, choice: int, tokens: int) -> str:
        return self._chunk(choice, {"content": _WORD * tokens})

    @override
    def closing(self) -> str:
        ends = [self._chunk(index, {}, end=True) for index in range(len(self.answer.lengths))]
        if self._usage_is_wanted:
            head = self._head(self.chunk_object)
            ends.append(_event({**head, "choices": [], "usage": self._usage()}))
        return "".join(ends) + _event("[DONE]")

    def _chunk(self, index: int, delta: Json, *, end: bool = False) -> str:
        choice = {**self._choice(index), **self._delta(delta)}
        if not end:
            choice["finish_reason"] = None
        chunk = {**self._head(self.chunk_object), "choices": [choice]}
        return _event({**chunk, "usage": None} if self._usage_is_wanted else chunk)

    def _head(self, kind: str) -> Json:
        return {
            "id": f"{self.prefix}-{self.request.number}",
            "object": kind,
            "created": self.answer.created,
            "model": self.request.model,
        }

    def _choice(self, index: int) -> Json:
        reason = "length" if self.answer.truncated[index] else "stop"
        return {"index": index, "logprobs": None, "finish_reason": reason}

    def _text(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, delta: Json) -> Json:
        return {"delta": delta}

    @property
    def _usage_is_wanted(self) -> bool:
        options = self.request.body.get("stream_options")
        asked = isinstance(options, dict) and options.get("include_usage") is True
        return asked and not self.answer.hide_usage

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self.request.input_tokens,
            "completion_tokens": self.answer.output_tokens,
            "total_tokens": self.request.input_tokens + self.answer.output_tokens,
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
    def _text(self, text: str) -> Json:
        return {"text": text}

    @override
    def _delta(self, delta: Json) -> Json:
        return {"text": delta.get("content", "")}


@final
class Responses(Shape):
    """Responses: numbered events with names, and the usage inside the last of them."""

    def __init__(self, answer: Generation) -> None:
        super().__init__(answer)
        self._numbers = count()
        self._status = "incomplete" if answer.truncated[0] else "completed"
        self._place = {"item_id": f"msg_{answer.request.number}", "output_index": 0}
        self._part_place = {**self._place, "content_index": 0}

    @override
    def whole(self) -> Json:
        body = {**self._response(self._status), "output": [self._item(self._status)]}
        if self.answer.truncated[0]:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        return self.with_usage(body, self._usage())

    @override
    def opening(self) -> str:
        response = self._response("in_progress")
        item = {**self._item("in_progress"), "content": []}
        part = {"type": "output_text", "text": "", "annotations": []}
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._part_place, part=part)
        )

    @override
    def delta(self, choice: int, tokens: int) -> str:
        text = {"delta": _WORD * tokens, "logprobs": []}
        return self._event("response.output_text.delta", **self._part_place, **text)

    @override
    def closing(self) -> str:
        whole = self.whole()
        item = whole["output"][0]
        text = {"text": self.answer.text, "logprobs": []}
        return (
            self._event("response.output_text.done", **self._part_place, **text)
            + self._event("response.content_part.done", **self._part_place, part=item["content"][0])
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{self._status}", response=whole)
        )

    def _event(self, name: str, **fields: Any) -> str:
        return _event({"type": name, "sequence_number": next(self._numbers), **fields}, name)

    def _item(self, status: str) -> Json:
        return {
            "id": self._place["item_id"],
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [{"type": "output_text", "text": self.answer.text, "annotations": []}],
        }

    def _response(self, status: str) -> Json:
        return {
            "id": f"resp_{self.request.number}",
            "object": "response",
            "created_at": self.answer.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": self.request.model,
            "output": [],
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
        }

    def _usage(self) -> Json:
        return {
            "input_tokens": self.request.input_tokens,
            "input_tokens_details": {"cached_tokens": self.request.cached_tokens},
            "output_tokens": self.answer.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.request.input_tokens + self.answer.output_tokens,
        }


@final
class Messages(Shape):
    """Anthropic's messages: input first, output counted up, the cache beside the input."""

    @override
    def whole(self) -> Json:
        text = {"type": "text", "text": self.answer.text}
        body = {**self._message(), "content": [text], "stop_reason": self._reason}
        return self.with_usage(body, self._usage(self.answer.output_tokens))

    @override
    def opening(self) -> str:
        message = self.with_usage(self._message(), self._usage(1))
        block = {"type": "text", "text": ""}
        return (
            self._event("message_start", message=message)
            + self._event("content_block_start", index=0, content_block=block)
            + self._event("ping")
        )

    @override
    def delta(self, choice: int, tokens: int) -> str:
        text = {"type": "text_delta", "text": _WORD * tokens}
        return self._event("content_block_delta", index=0, delta=text)

    @override
    def closing(self) -> str:
        end = {"delta": {"stop_reason": self._reason, "stop_sequence": None}}
        usage = {"output_tokens": self.answer.output_tokens}
        return (
            self._event("content_block_stop", index=0)
            + self._event("message_delta", **self.with_usage(end, usage))
            + self._event("message_stop")
        )

    def _event(self, name: str, **fields: Any) -> str:
        return _event({"type": name, **fields}, name)

    @property
    def _reason(self) -> str:
        return "max_tokens" if self.answer.truncated[0] else "end_turn"

    def _message(self) -> Json:
        return {
            "id": f"msg_{self.request.number}",
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _usage(self, output_tokens: int) -> Json:
        return {
            "input_tokens": self.request.input_tokens - self.request.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.request.cached_tokens,
            "output_tokens": output_tokens,
        }


@final
class Embeddings(Shape):
    """Embeddings; they mean nothing, but the same text has the same. They never stream."""

    def __init__(self, answer: Generation) -> None:
        super().__init__(answer)
        self._items = _inputs(answer.request.body)

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
        width = self.request.body.get("dimensions") or _DIMENSIONS
        seed = zlib.crc32(json.dumps(item).encode())
        vector = [((seed >> (i % 24)) % 256) / 256 for i in range(width)]
        if self.request.body.get("encoding_format") != "base64":
            return vector
        return base64.b64encode(struct.pack(f"<{width}f", *vector)).decode()


def _inputs(body: Body) -> list[Any]:
    given = body.get("input")
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        return [given]
    if not isinstance(given, list) or not given:
        raise Invalid(400, "'input' must be a string or a non-empty array")
    if len(given) > _MAX_INPUTS:
        raise Invalid(400, f"'input' has {len(given)} items, the maximum is {_MAX_INPUTS}")
    return given


@final
class Models(Shape):
    """The list of models, with one in it; a call may name any other as well."""

    @override
    def whole(self) -> Json:
        model = {"id": "fake", "object": "model", "type": "model", "display_name": "Fake"}
        times = {"created": self.answer.created, "created_at": "2026-01-01T00:00:00Z"}
        listed = {**model, **times, "owned_by": "tokenflow"}
        return {"object": "list", "data": [listed], "has_more": False}


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
