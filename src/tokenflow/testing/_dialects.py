"""How each provider tells of its limits: in the headers of every answer, and when it refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import ClassVar, Final, Literal, NamedTuple, TypeAlias, final

from typing_extensions import override

from ._faults import Fault
from ._quota import Denial, FakeQuota, Level
from ._request import Endpoint
from ._shapes import Json

__all__ = ["DIALECTS", "Dialect", "DialectName", "Headers", "Reply", "duration"]

Headers: TypeAlias = list[tuple[str, str]]
DialectName: TypeAlias = Literal["openai", "azure", "groq", "anthropic", "vllm"]

_DAY: Final = 86_400
_NO_MONEY: Final = "You exceeded your current quota, please check your plan and billing details."
_SHORTEN: Final = " The input or output tokens must be reduced in order to run successfully."


class Reply(NamedTuple):
    """An answer without a model behind it: a refusal or an error."""

    status: int
    headers: Headers
    body: Json

    @property
    def is_refusal(self) -> bool:
        """Nothing was tried."""
        return self.status in (413, 429, 503, 529)


def duration(seconds: float) -> str:
    """Seconds as OpenAI writes them, rounded up to milliseconds.

    >>> [duration(seconds) for seconds in (0, 0.0191, 1, 360, 252.172, 83909.144)]
    ['0s', '20ms', '1s', '6m0s', '4m12.172s', '23h18m29.144s']
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
    """OpenAI's own, and what those have in common who follow it."""

    endpoints: ClassVar[frozenset[Endpoint]] = frozenset(
        {"chat/completions", "completions", "embeddings", "models", "responses"}
    )
    request_id: ClassVar[str] = "x-request-id"
    too_large_status: ClassVar[int] = 429
    errors: ClassVar[Mapping[int, str]] = {500: "server_error"}

    def limit_headers(self, levels: Sequence[Level], unix_now: float) -> Headers:
        """What every answer tells about the quotas: one of requests, one of tokens."""
        told = {unit: self._told(unit, levels) for unit in ("requests", "tokens")}
        return [header for unit, level in told.items() for header in self._level(unit, level)]

    def _told(self, unit: str, levels: Sequence[Level]) -> Level | None:
        return next((level for level in levels if level.quota.of == unit), None)

    def _level(self, unit: str, level: Level | None) -> Headers:
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
        """A quota's no: never, or not yet."""
        body = self.error(429, self.message(model, denial), "rate_limit_exceeded", denial.quota.of)
        if denial.wait == math.inf:
            return Reply(self.too_large_status, [], body)
        return Reply(429, self.retry_after(denial.wait), body)

    def message(self, model: str, denial: Denial) -> str:
        """The words of a refusal."""
        quota = denial.quota
        never = denial.wait == math.inf
        used = "" if never else f"Used {denial.used}, "
        again = (
            f" Please try again in {duration(denial.wait)}." if denial.wait and not never else ""
        )
        return (
            f"{'Request too large' if never else 'Rate limit reached'} for {model} in organization "
            f"org-fake on {_called(quota)}: Limit {quota.limit}, {used}Requested "
            f"{denial.requested}.{_SHORTEN if never else again}"
        )

    def failure(self, fault: Fault, status: int) -> Reply:
        """What a fault asked for."""
        message = fault.message or (_NO_MONEY if fault.code == "insufficient_quota" else "a fault")
        return Reply(
            status, self.retry_after(fault.retry_after), self.error(status, message, fault.code)
        )

    def retry_after(self, seconds: float | None) -> Headers:
        """How long to wait, where that is known."""
        if seconds is None:
            return []
        milliseconds = ("retry-after-ms", str(_milliseconds(seconds)))
        return [milliseconds, ("retry-after", str(_whole_seconds(seconds)))]

    def error(self, status: int, message: str, code: str | None = None, kind: str = "") -> Json:
        """The body of an error."""
        kind = kind or code or self.errors.get(status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _called(quota: FakeQuota) -> str:
    period = {60.0: "min", 3_600.0: "hour", 86_400.0: "day"}.get(quota.per, f"{quota.per:g} s")
    return f"{quota.of.replace('_', ' ')} per {period} ({quota.name})"


@final
class Azure(Dialect):
    """Bare seconds, -1 for what it does not know, and a day for what never fits."""

    @override
    def _level(self, unit: str, level: Level | None) -> Headers:
        return super()._level(unit, level) or [(f"x-ratelimit-remaining-{unit}", "-1")]

    @override
    def _reset(self, seconds: float) -> str:
        return str(_whole_seconds(seconds))

    @override
    def message(self, model: str, denial: Denial) -> str:
        unit = "call" if denial.quota.of == "requests" else "token"
        seconds = _DAY if denial.wait == math.inf else _whole_seconds(denial.wait or 0)
        return (
            f"Requests to the fake operation have exceeded the {unit} rate limit of your current "
            f"pricing tier. Please retry after {seconds} seconds."
        )

    @override
    def error(self, status: int, message: str, code: str | None = None, kind: str = "") -> Json:
        code = str(status) if kind or not code else code
        return {"error": {"code": code, "message": message}}


@final
class Groq(Dialect):
    """Headers tell the requests of a day and the tokens of a minute; 413 for what never fits."""

    too_large_status: ClassVar[int] = 413

    @override
    def _told(self, unit: str, levels: Sequence[Level]) -> Level | None:
        per = _DAY if unit == "requests" else 60
        return super()._told(unit, [level for level in levels if level.quota.per == per])

    @override
    def retry_after(self, seconds: float | None) -> Headers:
        return super().retry_after(seconds)[1:]


@final
class VLLM(Dialect):
    """Answers to both chat completions and messages; knows no limits and no times."""

    endpoints: ClassVar[frozenset[Endpoint]] = Dialect.endpoints | {"messages"}

    @override
    def limit_headers(self, levels: Sequence[Level], unix_now: float) -> Headers:
        return []

    @override
    def message(self, model: str, denial: Denial) -> str:
        return "Model is overloaded"


@final
class Anthropic(Dialect):
    """Headers of its own: resets are times of day, and of tokens only the thousands are told."""

    endpoints: ClassVar[frozenset[Endpoint]] = frozenset({"messages", "models"})
    request_id: ClassVar[str] = "request-id"
    errors: ClassVar[Mapping[int, str]] = MappingProxyType(
        {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            413: "request_too_large",
            429: "rate_limit_error",
            500: "api_error",
            529: "overloaded_error",
        }
    )

    @override
    def limit_headers(self, levels: Sequence[Level], unix_now: float) -> Headers:
        told = {level.quota.of.replace("_", "-"): level for level in levels}
        if tokens := [level for level in levels if level.quota.of != "requests"]:
            told["tokens"] = min(tokens, key=lambda level: level.remaining)
        return [
            (f"anthropic-ratelimit-{unit}-{name}", value)
            for unit, level in told.items()
            for name, value in self._figures(level, unix_now).items()
        ]

    def _figures(self, level: Level, unix_now: float) -> dict[str, str]:
        exact = level.quota.of == "requests"
        reset = datetime.fromtimestamp(_whole_seconds(unix_now + level.reset), UTC)
        return {
            "limit": str(level.quota.limit),
            "remaining": str(level.remaining if exact else round(level.remaining, -3)),
            "reset": reset.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    @override
    def retry_after(self, seconds: float | None) -> Headers:
        return super().retry_after(seconds)[1:]

    @override
    def error(self, status: int, message: str, code: str | None = None, kind: str = "") -> Json:
        kind = self.errors.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}

    @override
    def message(self, model: str, denial: Denial) -> str:
        limit = f"{denial.quota.limit:,} {_called(denial.quota)}"
        return f"This request would exceed your organization's rate limit of {limit} for {model}."


DIALECTS: Final[Mapping[DialectName, Dialect]] = MappingProxyType(
    {
        "openai": Dialect(),
        "azure": Azure(),
        "groq": Groq(),
        "anthropic": Anthropic(),
        "vllm": VLLM(),
    }
)
