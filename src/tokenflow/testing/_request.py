"""A request as the server understands it, and what it counts in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Literal, TypeAlias, final

from tokenflow._usage import token_count

__all__ = ["Body", "Endpoint", "FakeRequest", "Invalid", "approximate_tokens", "read_request"]

Body: TypeAlias = Mapping[str, Any]
Endpoint: TypeAlias = Literal[
    "chat/completions", "completions", "embeddings", "messages", "models", "responses"
]

_PATH: Final = re.compile(
    r"(?:^|/)(?:deployments/(?P<deployment>[^/]+)/)?"
    r"(?P<endpoint>chat/completions|completions|embeddings|messages|models|responses)/?$"
)
_TEXT: Final = ("system", "instructions", "messages", "prompt", "input", "tools")
_NO_TEXT: Final = frozenset({"role", "type", "cache_control"})
_MAXIMA: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class Invalid(Exception):
    """The request makes no sense to this server: an HTTP status and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FakeRequest:
    """One request as the server understood it: what `output`, `faults` and the like are given.

    `number` counts from 0 in order of arrival, `time` is in seconds of the event
    loop's clock. `characters` is the length of all the text in it. `random` is
    this request's own generator: seeded by the provider's seed and the body, not
    by the order of arrival; the same body sent again has another.
    """

    number: int
    time: float
    path: str
    headers: Mapping[str, str]
    body: Body
    endpoint: Endpoint
    model: str
    input_tokens: int
    cached_tokens: int
    max_output_tokens: int | None
    choices: int
    stream: bool
    characters: int
    random: Random = field(repr=False, compare=False)

    @property
    def key(self) -> str:
        """The API key it came with, "" without one."""
        bearer = self.headers.get("authorization", "").removeprefix("Bearer ")
        return self.headers.get("x-api-key") or self.headers.get("api-key") or bearer


def approximate_tokens(body: Body) -> int:
    """A quarter of the bytes of the text in a request, rounded up; token ids count one each.

    Text is every string in `messages`, `prompt`, `input`, `system`, `instructions` and
    `tools`, in UTF-8, save roles and types.

    >>> approximate_tokens({"model": "m", "messages": [{"role": "user", "content": "12345"}]})
    2
    """
    ids = sum(isinstance(leaf, int) for leaf in _leaves(body))
    return ids + -(-sum(len(text.encode("utf-8", "replace")) for text in _texts(body)) // 4)


def _texts(body: Body) -> Iterator[str]:
    return (leaf for leaf in _leaves(body) if isinstance(leaf, str))


def _leaves(body: Body) -> Iterator[str | int]:
    found = [body.get(name) for name in _TEXT]
    while found:
        match found.pop():
            case str() | int() as leaf:
                yield leaf
            case list() as items:
                found += items
            case dict() as fields:
                found += (value for name, value in fields.items() if name not in _NO_TEXT)


def read_request(
    number: int,
    time: float,
    path: str,
    headers: Mapping[str, str],
    raw: bytes,
    *,
    count_tokens: Callable[[Body], int],
    random: Callable[[bytes], Random],
) -> FakeRequest:
    """Understand a request.

    Raises:
        Invalid: with the status that says what is wrong with it.
    """
    route = _PATH.search(path)
    if route is None:
        raise Invalid(404, f"unknown path {path}")
    endpoint: Any = route["endpoint"]
    body = {} if endpoint == "models" else _json(raw)
    model = route["deployment"] or body.get("model") or ""
    if not isinstance(model, str) or not (model or endpoint == "models"):
        raise Invalid(400, "you must provide a model parameter")
    return FakeRequest(
        number=number,
        time=time,
        path=path,
        headers=headers,
        body=body,
        endpoint=endpoint,
        model=model,
        input_tokens=count_tokens(body),
        cached_tokens=0,
        max_output_tokens=_declared(body, endpoint),
        choices=_choices(body) if endpoint in ("chat/completions", "completions") else 1,
        stream=bool(body.get("stream")),
        characters=sum(map(len, _texts(body))),
        random=random(raw),
    )


def _json(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Invalid(400, "we could not parse the JSON body of your request")
    return body


def _declared(body: Body, endpoint: Endpoint) -> int | None:
    if endpoint in ("embeddings", "models"):
        return 0
    declared = [count for name in _MAXIMA if (count := _count(body, name)) is not None]
    if endpoint == "messages" and not declared:
        raise Invalid(400, "max_tokens: Field required")
    return max(declared, default=None)


def _choices(body: Body) -> int:
    return max(_count(body, "n") or 1, _count(body, "best_of") or 1)


def _count(body: Body, name: str) -> int | None:
    value = body.get(name)
    try:
        return None if value is None else token_count(value, name)
    except (TypeError, ValueError) as error:
        raise Invalid(400, str(error)) from None
