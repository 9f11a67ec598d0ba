"""What a chat request costs beside its texts: the framing, the tools, the images.

Pure: everything here returns how many tokens are certain, and the texts that are
still to be counted, so that the caller can choose where to count them.

The numbers are OpenAI's, published in its cookbook and its documentation of
images, and exact for its models; others frame their messages differently but not
by more than a few tokens each. Audio and attached files cost what the server
finds in them, which cannot be told from here: they count 0.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

__all__ = ["ChatRule", "chat_cost", "chat_rule", "image_tokens"]

_PER_MESSAGE: Final = 3
_PER_NAME: Final = 1
_REPLY: Final = 3  # what primes the answer, once
_TOOLS_END: Final = 12
_PER_PROPERTY: Final = 3
_PER_ENUM_VALUE: Final = 3
_UNKNOWN_IMAGE: Final = (1024, 1024)
_JPEG_FRAMES: Final = frozenset(range(0xFFC0, 0xFFD0)) - {0xFFC4, 0xFFC8, 0xFFCC}


class ChatRule(NamedTuple):
    """What differs between model families: tokens per tool, per image, per 512-pixel tile."""

    per_tool: int = 7
    image: int = 85
    tile: int = 170


_RULES: Final = (  # the first prefix that fits
    ("gpt-4o-mini", ChatRule(7, 2833, 5667)),
    ("gpt-4o", ChatRule()),
    ("gpt-4.", ChatRule()),
    ("gpt-4", ChatRule(10)),
    ("gpt-3", ChatRule(10)),
    ("gpt-5", ChatRule(7, 70, 140)),
    ("o1", ChatRule(7, 75, 150)),
    ("o3", ChatRule(7, 75, 150)),
)


def chat_rule(model: str) -> ChatRule:
    """The rule for a bare model name; gpt-4o's for those not known."""
    return next((rule for prefix, rule in _RULES if model.startswith(prefix)), ChatRule())


def chat_cost(
    messages: Iterable[object], tools: Iterable[object], rule: ChatRule
) -> tuple[int, list[str]]:
    """Tokens of the framing, and the texts to count on top of them."""
    texts: list[str] = []
    tokens = _REPLY + sum(_message(message, rule, texts) for message in messages)
    of_tools = [_tool(tool, rule, texts) for tool in tools]
    return tokens + sum(of_tools) + (_TOOLS_END if of_tools else 0), texts


def image_tokens(width: int, height: int, *, detail: str = "high", rule: ChatRule) -> int:
    """Tokens of one image, given its size in pixels.

    Low detail costs the base alone. Otherwise the image is shrunk to fit 2,048 x
    2,048, then until its shorter side is at most 768, and costs a tile for every
    512 x 512 pixels begun on top.
    """
    if detail == "low":
        return rule.image
    shrink = min(1.0, 2048 / max(width, height))
    shrink *= min(1.0, 768 / (min(width, height) * shrink))
    # Rounding first: 768 must not become 768.0000001 and begin another tile.
    tiles = math.prod(math.ceil(round(side * shrink, 6) / 512) for side in (width, height))
    return rule.image + rule.tile * tiles


def _message(message: object, rule: ChatRule, texts: list[str]) -> int:
    fields = _plain(message)
    named = isinstance(fields, Mapping) and fields.get("name") is not None
    return _PER_MESSAGE + _PER_NAME * named + _content(fields, rule, texts)


# Not shown to the model, or not as text.
_UNSEEN: Final = frozenset(
    ("type", "id", "data", "bytes", "file_data", "url", "cache_control", "signature")
)
_AS_JSON: Final = frozenset(("input", "arguments", "args"))
_IMAGES: Final = ("image_url", "input_image", "image")  # what is asked for may be unhashable


def _content(content: object, rule: ChatRule, texts: list[str]) -> int:
    """Collect every text in `content`, however nested; returns the tokens of its images."""
    tokens, pending = 0, [content]
    while pending:
        found = _plain(pending.pop())
        if isinstance(found, str):
            texts.append(found)
        elif isinstance(found, Mapping) and found.get("type") in _IMAGES:
            tokens += _image(found, rule)
        elif isinstance(found, Mapping):
            pending.extend(
                _json(value) if name in _AS_JSON else value
                for name, value in found.items()
                if name not in _UNSEEN
            )
        elif isinstance(found, (list, tuple)):
            pending.extend(found)
    return tokens


def _json(value: object) -> object:
    """As it is sent; what cannot be written, for depth or by its keys, counts by its texts."""
    try:
        return json.dumps(value, default=str)
    except (RecursionError, TypeError):
        return value


def _plain(found: object) -> object:
    """SDK objects as dictionaries; everything else as it is."""
    dump = getattr(found, "model_dump", None)
    return dump() if callable(dump) else found


def _tool(tool: object, rule: ChatRule, texts: list[str]) -> int:
    """One function, as OpenAI nests it, or flat as in Responses and Anthropic's API."""
    outer = _mapping(_plain(tool))
    function = _mapping(outer.get("function")) or outer
    schema = _mapping(function.get("parameters") or function.get("input_schema"))
    texts.append(f"{function.get('name', '')}:{_described(function)}")
    return rule.per_tool + sum(_properties(schema, texts))


def _properties(schema: Mapping[str, object], texts: list[str]) -> Iterator[int]:
    """Tokens of each part of a JSON schema, those of nested objects and lists included."""
    pending = [schema]
    while pending:
        properties = _mapping(pending.pop().get("properties"))
        yield _PER_PROPERTY if properties else 0
        for name, raw in properties.items():
            value = _mapping(raw)
            texts.append(f"{name}:{value.get('type', '')}:{_described(value)}")
            yield _PER_PROPERTY
            enum = value.get("enum")
            if isinstance(enum, (list, tuple)):
                texts.extend(map(str, enum))
                yield _PER_ENUM_VALUE * (len(enum) - 1)
            pending.extend((value, _mapping(value.get("items"))))


def _described(owner: Mapping[str, object]) -> str:
    return str(owner.get("description") or "").removesuffix(".")


def _mapping(found: object) -> Mapping[str, object]:
    return found if isinstance(found, Mapping) else {}


def _image(part: Mapping[str, object], rule: ChatRule) -> int:
    source = part.get("image_url") or part.get("source") or part
    fields = _mapping(source)
    detail = fields.get("detail") or part.get("detail") or "high"
    data = fields.get("url") or fields.get("data") or source
    width, height = _image_size(data if isinstance(data, str) else "")
    return image_tokens(width, height, detail=str(detail), rule=rule)


def _image_size(data: str) -> tuple[int, int]:
    """Width and height from the head of base64 data; of anything else, 1024 x 1024.

    That is four tiles, as most images sent by URL have; eight are the most.
    """
    encoded = data.partition(",")[2] if data.startswith("data:") else data
    try:
        head = base64.b64decode(encoded[:65536])
        size = _png(head) or _gif(head) or _jpeg(head) or _UNKNOWN_IMAGE
    except (ValueError, struct.error):
        return _UNKNOWN_IMAGE
    return size if all(size) else _UNKNOWN_IMAGE


def _png(head: bytes) -> tuple[int, int] | None:
    return struct.unpack_from(">II", head, 16) if head.startswith(b"\x89PNG") else None


def _gif(head: bytes) -> tuple[int, int] | None:
    return struct.unpack_from("<HH", head, 6) if head.startswith(b"GIF8") else None


def _jpeg(head: bytes) -> tuple[int, int] | None:
    """The first frame header; segments before it are stepped over by their lengths."""
    at = 2 if head.startswith(b"\xff\xd8\xff") else len(head)
    while at + 9 <= len(head):
        marker, length = struct.unpack_from(">HH", head, at)
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", head, at + 5)
            return width, height
        at += 2 + length
    return None
