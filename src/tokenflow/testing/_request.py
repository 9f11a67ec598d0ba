"""A request as the server understands it, and what it counts in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Literal, TypeAlias, cast, final

from tokenflow._usage import token_count

__all__ = [
    "Body",
    "Endpoint",
    "FakeRequest",
    "Invalid",
    "approximate_tokens",
    "count",
    "read_request",
]

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
_MAX_CHOICES: Final = 128


class Invalid(Exception):
    """This server cannot make sense of the request: a status, and why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FakeRequest:
    """One request as the server understood it: what `output`, `faults` and the like are given.

    `number` counts from 0 in order of arrival. The names of `headers` are in lower case.
    `max_output_tokens` is the largest that was declared, if one was. `estimated_tokens`
    is what the input looks like at first sight, a quarter of its characters, and
    `input_tokens` what it turns out to be. `random` is this request's own generator,
    seeded by the provider's seed and the body: it does not depend on who came before,
    but the same body sent again has another one.
    """

    number: int
    path: str
    headers: Mapping[str, str]
    body: Body
    endpoint: Endpoint
    model: str
    stream: bool
    choices: int
    input_tokens: int
    cached_tokens: int
    estimated_tokens: int
    max_output_tokens: int | None
    random: Random = field(repr=False, compare=False)

    @property
    def key(self) -> str:
        """The API key it came with, "" without one."""
        bearer = self.headers.get("authorization", "").removeprefix("Bearer ")
        return self.headers.get("x-api-key") or self.headers.get("api-key") or bearer


def approximate_tokens(body: Body) -> int:
    """A quarter of the UTF-8 bytes of the text in a request, rounded up; token ids count 1 each.

    Text is every string in `messages`, `prompt`, `input`, `system`, `instructions` and
    `tools`, save roles and types.

    >>> approximate_tokens({"model": "m", "messages": [{"role": "user", "content": "12345"}]})
    2
    """
    return _quarter(body, lambda text: len(text.encode("utf-8", "replace")))


def _quarter(body: Body, size: Callable[[str], int]) -> int:
    leaves = list(_leaves([body.get(name) for name in _TEXT]))
    texts = [leaf for leaf in leaves if isinstance(leaf, str)]
    return len(leaves) - len(texts) - sum(map(size, texts)) // -4


def _leaves(found: list[Any]) -> Iterator[str | int]:
    """The texts and the token ids in it, however deep."""
    while found:
        match found.pop():
            case str() as text:
                yield text
            case list() as items:
                yield from (item for item in items if type(item) is int)
                found += items
            case dict() as fields:
                found += (value for name, value in fields.items() if name not in _NO_TEXT)


def read_request(
    method: str,
    path: str,
    headers: Mapping[str, str],
    raw: bytes,
    *,
    number: int,
    endpoints: Container[str],
    count_tokens: Callable[[Body], int],
    random: Random,
) -> FakeRequest:
    """Understand a request; nothing is read from the cache yet.

    Raises:
        Invalid: it makes no sense.
    """
    route = _PATH.search(path)
    if route is None or route["endpoint"] not in endpoints:
        raise Invalid(404, f"unknown path {path}")
    endpoint = cast(Endpoint, route["endpoint"])
    if method != ("GET" if endpoint == "models" else "POST"):
        raise Invalid(405, f"{method} is not allowed for {path}")
    body = {"model": ""} if endpoint == "models" else _object(raw)
    model = route["deployment"] or body.get("model")
    if not isinstance(model, str):
        raise Invalid(400, "you must provide a model parameter")
    return FakeRequest(
        number=number,
        path=path,
        headers=headers,
        body=body,
        endpoint=endpoint,
        model=model,
        stream=body.get("stream") is True,
        choices=_choices(body, endpoint),
        input_tokens=count_tokens(body),
        cached_tokens=0,
        estimated_tokens=_quarter(body, len),
        max_output_tokens=_declared(body, endpoint),
        random=random,
    )


def _object(raw: bytes) -> Body:
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
    declared = [count(body, name, 0) for name in _MAXIMA if body.get(name) is not None]
    if endpoint == "messages" and not declared:
        raise Invalid(400, "max_tokens: Field required")
    return max(declared, default=None)


def _choices(body: Body, endpoint: Endpoint) -> int:
    if endpoint not in ("chat/completions", "completions"):
        return 1
    choices = max(count(body, "n", 1), count(body, "best_of", 1), 1)
    if choices > _MAX_CHOICES:
        raise Invalid(400, f"n must be at most {_MAX_CHOICES}, not {choices}")
    return choices


def count(body: Body, name: str, default: int) -> int:
    """A whole number in a request's body; raises Invalid for what is none."""
    if body.get(name) is None:
        return default
    try:
        return token_count(body[name], name)
    except (TypeError, ValueError) as error:
        raise Invalid(400, str(error)) from None
