"""How each provider writes its limits: in the headers of every answer, and when it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from typing_extensions import override

from ._quota import Denial, Level
from ._request import Endpoint
from ._shapes import Json

__all__ = ["DIALECTS", "Dialect", "DialectName", "Headers", "Reply"]

Headers: TypeAlias = list[tuple[str, str]]
DialectName: TypeAlias = Literal["openai", "azure", "groq", "anthropic", "vllm"]

_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "RPM": "requests per min (RPM)",
        "RPD": "requests per day (RPD)",
        "TPM": "tokens per min (TPM)",
        "TPD": "tokens per day (TPD)",
    }
)
_ERROR_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        529: "overloaded_error",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A short answer: a refusal or an error."""

    status: int
    headers: Headers
    body: Json


def duration(seconds: float) -> str:
    """Seconds as OpenAI writes them, rounded up to milliseconds.

    >>> [duration(s) for s in (0, 0.0201, 1, 360, 252.172, 83909.144)]
    ['0s', '21ms', '1s', '6m0s', '4m12.172s', '23h18m29.144s']
    """
    milliseconds = _milliseconds(seconds)
    if 0 < milliseconds < 1_000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    larger = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{larger}{rest / 1000:g}s"


def _milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000 - 1e-6)


def _whole_seconds(seconds: float) -> int:
    return math.ceil(seconds - 1e-9)


class Dialect:
    """What the providers in OpenAI's tradition have in common; OpenAI itself."""

    endpoints: frozenset[Endpoint] = frozenset(
        {"chat/completions", "completions", "embeddings", "models", "responses"}
    )
    too_large_status = 429
    request_id = "x-request-id"

    def limit_headers(self, levels: Sequence[Level], unix_now: float) -> Headers:
        """The headers of every answer."""
        headers: Headers = []
        for unit in ("requests", "tokens"):
            level = next((each for each in levels if each.quota.of == unit), None)
            headers += self._limit_headers(unit, level)
        return headers

    def _limit_headers(self, unit: str, level: Level | None) -> Headers:
        if level is None:
            return []
        return [
            (f"x-ratelimit-limit-{unit}", str(level.quota.limit)),
            (f"x-ratelimit-remaining-{unit}", str(level.remaining)),
            (f"x-ratelimit-reset-{unit}", self._reset(level.reset)),
        ]

    def _reset(self, seconds: float) -> str:
        return duration(seconds)

    def refusal(self, model: str, denial: Denial) -> Reply:
        """What a quota's no is: too large for ever, or come again."""
        if denial.wait == math.inf:
            body = self._quota_error(denial, self._too_large(model, denial))
            return Reply(status=self.too_large_status, headers=[], body=body)
        body = self._quota_error(denial, self._limited(model, denial))
        return Reply(status=429, headers=self.retry_headers(denial.wait), body=body)

    def retry_headers(self, seconds: float | None) -> Headers:
        """How long to wait, where that is known."""
        if seconds is None:
            return []
        return [
            ("retry-after-ms", str(_milliseconds(seconds))),
            ("retry-after", str(_whole_seconds(seconds))),
        ]

    def _quota_error(self, denial: Denial, message: str) -> Json:
        return self.error(429, message, "rate_limit_exceeded", denial.quota.of)

    def _limited(self, model: str, denial: Denial) -> str:
        wait = "" if denial.wait is None else f" Please try again in {duration(denial.wait)}."
        return (
            f"Rate limit reached for {model} in organization org-fake on {_called(denial)}: "
            f"Limit {denial.quota.limit}, Used {denial.used}, Requested {denial.requested}.{wait}"
        )

    def _too_large(self, model: str, denial: Denial) -> str:
        return (
            f"Request too large for {model} in organization org-fake on {_called(denial)}: "
            f"Limit {denial.quota.limit}, Requested {denial.requested}. "
            "The input or output tokens must be reduced in order to run successfully."
        )

    def error(self, status: int, message: str, code: str | None = None, kind: str = "") -> Json:
        """The body of an error."""
        kind = kind or code or _error_type(status)
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _called(denial: Denial) -> str:
    return _NAMES.get(denial.quota.name, denial.quota.name)


def _error_type(status: int) -> str:
    return _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


class Azure(Dialect):
    """Bare seconds, -1 for what is not known, and a day's wait for what never fits."""

    @override
    def _limit_headers(self, unit: str, level: Level | None) -> Headers:
        return super()._limit_headers(unit, level) or [(f"x-ratelimit-remaining-{unit}", "-1")]

    @override
    def _reset(self, seconds: float) -> str:
        return str(_whole_seconds(seconds))

    @override
    def _quota_error(self, denial: Denial, message: str) -> Json:
        return {"error": {"code": "429", "message": message}}

    @override
    def _limited(self, model: str, denial: Denial) -> str:
        return self._retry_after(denial, _whole_seconds(denial.wait or 0))

    @override
    def _too_large(self, model: str, denial: Denial) -> str:
        return self._retry_after(denial, 86_400)

    def _retry_after(self, denial: Denial, seconds: int) -> str:
        unit = "call" if denial.quota.of == "requests" else "token"
        return (
            f"Requests to the fake operation have exceeded the {unit} rate limit of your current "
            f"pricing tier. Please retry after {seconds} seconds."
        )


class Groq(Dialect):
    """OpenAI's headers, whole seconds in retry-after, and 413 for what never fits."""

    too_large_status = 413

    @override
    def retry_headers(self, seconds: float | None) -> Headers:
        return [each for each in super().retry_headers(seconds) if each[0] == "retry-after"]


class VLLM(Dialect):
    """No limits to tell of, no time to wait; who serves both chat completions and messages."""

    endpoints: frozenset[Endpoint] = Dialect.endpoints | {"messages"}

    @override
    def limit_headers(self, levels: Sequence[Level], unix_now: float) -> Headers:
        return []

    @override
    def _limited(self, model: str, denial: Denial) -> str:
        return "Model is overloaded"

    @override
    def _quota_error(self, denial: Denial, message: str) -> Json:
        return self.error(429, message, "overloaded")


class Anthropic(Dialect):
    """Headers of their own, absolute resets, and only thousands of what remains."""

    endpoints: frozenset[Endpoint] = frozenset({"messages", "models"})
    request_id = "request-id"

    @override
    def limit_headers(self, levels: Sequence[Level], unix_now: float) -> Headers:
        headers: Headers = []
        for level in levels:
            name = level.quota.of.replace("_", "-")
            exact = level.quota.of == "requests"
            remaining = level.remaining if exact else round(level.remaining, -3)
            reset = datetime.fromtimestamp(_whole_seconds(unix_now + level.reset), UTC)
            headers += [
                (f"anthropic-ratelimit-{name}-limit", str(level.quota.limit)),
                (f"anthropic-ratelimit-{name}-remaining", str(remaining)),
                (f"anthropic-ratelimit-{name}-reset", reset.strftime("%Y-%m-%dT%H:%M:%SZ")),
            ]
        return headers

    @override
    def retry_headers(self, seconds: float | None) -> Headers:
        return [each for each in super().retry_headers(seconds) if each[0] == "retry-after"]

    @override
    def _quota_error(self, denial: Denial, message: str) -> Json:
        return self.error(429, message)

    @override
    def _limited(self, model: str, denial: Denial) -> str:
        unit = denial.quota.of.replace("_", " ")
        return (
            f"This request would exceed the rate limit for your organization of "
            f"{denial.quota.limit:,} {unit} per minute (model: {model})."
        )

    @override
    def _too_large(self, model: str, denial: Denial) -> str:
        return self._limited(model, denial)

    @override
    def error(self, status: int, message: str, code: str | None = None, kind: str = "") -> Json:
        error = {"type": kind or _error_type(status), "message": message}
        return {"type": "error", "error": error, "request_id": None}


_make: Final[Mapping[DialectName, Callable[[], Dialect]]] = MappingProxyType(
    {"openai": Dialect, "azure": Azure, "groq": Groq, "anthropic": Anthropic, "vllm": VLLM}
)
DIALECTS: Final[Mapping[DialectName, Dialect]] = MappingProxyType(
    {name: make() for name, make in _make.items()}
)
