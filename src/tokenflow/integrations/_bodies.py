"""Bodies as they pass by: what a request asks for, and what a response has used.

Pure, and in bounded memory: a response is never held back, and of a long one only
the two ends are kept. Whatever the bytes, nothing here raises.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol, final

from tokenflow._wire import read_settings
from tokenflow.flow import Meter

__all__ = ["Reader", "Unread", "described", "only_counts", "parsed", "reader"]

_WHOLE: Final = 1 << 20  # a JSON answer up to this size is parsed as it is
_END: Final = 1 << 16  # of a longer one so much is kept at each end; usage is at one of them
_LONGEST_LINE: Final = 1 << 20
_INFLATED: Final = 1 << 20  # so much is unpacked at a time, whatever is packed in it
_BOM: Final = b"\xef\xbb\xbf"
_BYTES_PER_TOKEN: Final = 3
_NO_OUTPUT: Final = ("embed", "moderation", "rerank", "/images/", "/audio/")  # in tokens
_COUNTING: Final = frozenset(
    ("count_tokens", "count-tokens", "counttokens", "input_tokens", "tokenize", "detokenize")
)
_LAST: Final = ("message_stop", "response.completed", "response.incomplete", "response.failed")

Body = dict[str, Any]


# -- requests ---------------------------------------------------------------


def parsed(content: bytes) -> Any:
    """JSON, or None where it is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(content.decode())  # as nearly all is: saves asking how it is encoded
    with suppress(ValueError, RecursionError):
        return json.loads(content)
    return None


def described(path: str, content: bytes, is_json: bool, body: Any) -> dict[str, Any]:
    """The arguments of `flow.request` for a request; one nobody understands counts by its size.

    An upload counts as a request and nothing else: what a server finds in a file
    cannot be told by its size. So does one that only has tokens counted.
    """
    if not isinstance(body, dict):
        size = -(-len(content) // _BYTES_PER_TOKEN) if is_json else 0
        return {"input_tokens": size, "max_output_tokens": 0}
    options: dict[str, Any] = {**read_settings(body)}
    options["model"] = options["model"] or _model_in(path)
    if only_counts(path):
        return options | {"input_tokens": 0, "max_output_tokens": 0, "choices": 1}
    end = "/".join(["", *path.lower().split("/")[-2:]])  # before it there may be any name
    if any(kind in end for kind in _NO_OUTPUT) and not end.endswith("/completions"):
        options |= {"max_output_tokens": 0, "choices": 1}
    found = _input(body, path)
    if found is None:
        found = {"input_tokens": -(-len(content) // _BYTES_PER_TOKEN)}
    return options | found


def only_counts(path: str) -> bool:
    """Does it answer how many tokens something has? Nothing is generated, though it looks so."""
    last = path.lower().rpartition("/")[2]
    return not _COUNTING.isdisjoint(last.split(":"))


def _input(body: Body, path: str) -> dict[str, Any] | None:
    messages = _messages(body, path)
    if messages is not None:
        return {"messages": messages, "tools": _list(body.get("tools"))}
    for name in ("input", "prompt", "texts", "inputs"):
        if _is_prompt(body.get(name)):
            return {"prompt": body[name]}
    return None


def _messages(body: Body, path: str) -> list[Any] | None:
    """The chat in it: of chat completions, Anthropic, Responses, Gemini, Bedrock."""
    for name in ("messages", "contents"):
        if isinstance(body.get(name), list):
            return [*_system(body), *body[name]]
    items = body.get("input")
    if path.endswith("/responses") and isinstance(items, (str, list)):
        asked = [{"role": "user", "content": items}] if isinstance(items, str) else items
        return [*_system(body), *asked]
    return None


def _system(body: Body) -> list[Any]:
    names = ("system", "instructions", "systemInstruction", "system_instruction")
    return [{"role": "system", "content": body[name]} for name in names if body.get(name)]


def _is_prompt(found: object) -> bool:
    if isinstance(found, str):
        return True
    return isinstance(found, list) and all(
        isinstance(part, (str, list)) or type(part) is int for part in found
    )


def _list(found: object) -> list[Any]:
    return found if isinstance(found, list) else []


def _model_in(path: str) -> str | None:
    """Azure's and Gemini's paths name what the body does not."""
    parts = path.split("/")
    for before in ("deployments", "models", "model"):
        if before in parts[:-1]:
            name = parts[parts.index(before) + 1]
            return name.partition(":")[0] or None
    return None


# -- responses --------------------------------------------------------------


class Reader(Protocol):
    """Takes a response's body in pieces, and settles the call at its end."""

    def feed(self, data: bytes) -> None: ...

    def finish(self) -> None:
        """It is complete."""

    def close(self) -> None:
        """It is not, and will not be."""


def reader(
    headers: Mapping[str, str], meter: Callable[[], Meter], reconcile: Callable[[object], None]
) -> Reader:
    """The one for this content type and encoding."""
    is_stream = "event-stream" in headers.get("content-type", "").lower()
    plain = Events(meter()) if is_stream else Document(reconcile)
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return plain
    return Compressed(plain, readable=encoding in ("gzip", "x-gzip", "deflate"))


@final
class Unread:
    """A body that says nothing about the call."""

    def feed(self, data: bytes) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


@final
class Events:
    """Server-sent events of JSON. Of a line that is too long the end is looked at, as of documents.

    Nearly all events are one line, which needs no look at the next one; the lines of
    others are put together.
    """

    __slots__ = ("_after_cr", "_is_cut", "_lines", "_meter", "_rest", "_size")

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._after_cr = False
        self._rest = bytearray()  # of a line
        self._is_cut = False
        self._lines: list[bytes] = []  # of an event that is none yet
        self._size = 0

    def feed(self, data: bytes) -> None:
        if data and (self._after_cr or b"\r" in data):
            data = self._without_cr(data)
        self._rest += data
        if b"\n" in data:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                self._take(line)
        if len(self._rest) > _LONGEST_LINE:
            del self._rest[:-_END]
            self._is_cut = True

    def _without_cr(self, data: bytes) -> bytes:
        """A line may end in CR, LF or both, and a piece of the body between the two."""
        if self._after_cr:
            data = data.removeprefix(b"\n")
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _take(self, line: bytearray) -> None:
        line = line.removeprefix(_BOM)
        if self._is_cut:
            self._is_cut = False
            self._pass_on(_usage_in(line.decode(errors="replace")))
        elif line.startswith(b"data:"):
            self._take_data(bytes(line[5:]))
        elif not line.strip():  # the end of an event
            if len(self._lines) > 1:
                self._pass_on(parsed(b"\n".join(self._lines)))
            self._forget()

    def _take_data(self, data: bytes) -> None:
        if data.strip() == b"[DONE]":  # some clients do not read on
            self._meter.finish()
        elif self._pass_on(parsed(data)) or self._size + len(data) > _LONGEST_LINE:
            self._forget()
        else:
            self._lines.append(data)
            self._size += len(data)

    def _pass_on(self, event: object) -> bool:
        if not isinstance(event, dict):
            return False
        self._meter.feed(event)
        if event.get("type") in _LAST:
            self._meter.finish()
        return True

    def _forget(self) -> None:
        self._lines.clear()
        self._size = 0

    def finish(self) -> None:
        self._take(self._rest)
        self._take(bytearray())
        self._meter.finish()

    def close(self) -> None:
        self._meter.close()


@final
class Document:
    """One JSON document. Of a long one (embeddings) only the ends are looked at."""

    __slots__ = ("_head", "_reconcile", "_size", "_tail")

    def __init__(self, reconcile: Callable[[object], None]) -> None:
        self._reconcile = reconcile
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        room = max(0, _WHOLE - len(self._head))
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * _END:
            del self._tail[:-_END]

    def finish(self) -> None:
        body = self._found()
        try:
            self._reconcile(body)
        except ValueError:  # no usage in it: the estimate stays
            return

    def close(self) -> None:
        """The estimate stays."""

    def _found(self) -> object:
        if self._size <= len(self._head):
            return parsed(bytes(self._head))
        ends = (bytes(self._tail), bytes(self._head[:_END]))
        found = (_usage_in(end.decode(errors="replace")) for end in ends)
        return next((usage for usage in found if usage is not None), None)


def _usage_in(text: str) -> Any:
    """The last object called usage in a part of a document."""
    for name in ('"usage"', '"usageMetadata"'):
        at = text.rfind(name)
        start = text.find("{", at)
        if at >= 0 and not text[at + len(name) : start].strip(" \t\r\n:"):
            try:
                return {name.strip('"'): json.JSONDecoder().raw_decode(text, start)[0]}
            except (ValueError, RecursionError):
                continue
    return None


@final
class Compressed:
    """Reads along what passes by compressed; what it cannot read it leaves at the estimate."""

    __slots__ = ("_is_new", "_plain", "_zlib")

    def __init__(self, plain: Events | Document, *, readable: bool) -> None:
        self._plain = plain
        self._zlib = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32) if readable else None
        self._is_new = True

    def feed(self, data: bytes) -> None:
        is_new, self._is_new = self._is_new, False
        try:
            self._inflate(data)
        except zlib.error:
            self._zlib = None
            if is_new:  # some servers leave out the head of what they call deflate
                self._zlib = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
                self.feed(data)

    def _inflate(self, data: bytes) -> None:
        while self._zlib is not None and data and not self._zlib.eof:  # it would keep the rest
            self._plain.feed(self._zlib.decompress(data, _INFLATED))
            data = self._zlib.unconsumed_tail

    def finish(self) -> None:
        if self._zlib is None:
            self._plain.close()
        else:
            with suppress(zlib.error):
                self._plain.feed(self._zlib.flush())
            self._plain.finish()

    def close(self) -> None:
        self._plain.close()
