"""What servers say in headers: how much is left of which quota, and when to come back.

Nothing here raises, and nothing is guessed: what is no count, no time and no name that the
tables know is unknown. These are other people's servers, and proxies before them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar, final

from ._usage import QuotaStatus

__all__ = [
    "DAY",
    "DURATION",
    "HOUR",
    "MINUTE",
    "MONTH",
    "PERIODS",
    "Headers",
    "count",
    "duration",
    "sensible",
    "text_of",
]

T = TypeVar("T")

MINUTE: Final = 60.0
HOUR: Final = 3_600.0
DAY: Final = 86_400.0
MONTH: Final = 31 * DAY  # the longest there is: a window of that length is safe for all

PERIODS: Final[Mapping[str, float]] = {
    "second": 1.0,
    "min": MINUTE,
    "minute": MINUTE,
    "hour": HOUR,
    "day": DAY,
    "month": MONTH,
}
_SECONDS: Final[Mapping[str, float]] = {
    name: seconds
    for names, seconds in (
        ("milliseconds millisecond ms", 0.001),
        ("seconds second secs sec s", 1.0),
        ("minutes minute mins min m", MINUTE),
        ("hours hour h", HOUR),
        ("days day d", DAY),
    )
    for name in names.split()
}
_AMOUNT: Final = r"\d{1,15}(?:\.\d{1,30})?"
_UNIT: Final = rf"(?:{'|'.join(_SECONDS)})(?![a-z])"
DURATION: Final = rf"(?:{_AMOUNT} ?{_UNIT} ?)+"
"""A pattern: `9.816s`, `23h18m29.144s`, `86400 seconds`."""

_NUMBER: Final = re.compile(_AMOUNT, re.ASCII)
_DURATION: Final = re.compile(DURATION, re.ASCII)
_PART: Final = re.compile(rf"({_AMOUNT}) ?({_UNIT})", re.ASCII)

_QUOTA: Final = re.compile(
    "x-ratelimit-(?P<what>limit|remaining|reset)"
    "-(?P<of>requests|req|tokens|input-tokens|output-tokens)"
    "(?:-(?:per-)?(?P<period>second|minute|hour|day|month))?"
)
_ANTHROPIC_QUOTA: Final = re.compile(
    "anthropic-ratelimit-(?P<of>requests|tokens|input-tokens|output-tokens)"
    "-(?P<what>limit|remaining|reset)(?P<period>)"
)
_UNITS: Final = {
    "requests": "requests",
    "req": "requests",  # Mistral
    "tokens": "tokens",
    "input-tokens": "input_tokens",
    "output-tokens": "output_tokens",
}

_LARGEST: Final = 1 << 40  # some say "unlimited" with the largest 64-bit number
_SURELY_SENSIBLE: Final = 12  # digits
_LONGEST: Final = 366 * DAY
_UNIX: Final = 1e9  # from here on a number is an instant, and
_UNIX_MILLISECONDS: Final = 1e11  # from here on one in milliseconds
_MOST_HEADERS: Final = 1_000
_ROUNDING: Final = 500  # of Anthropic's thousands, at most
_LONGEST_NAME: Final = 100
_LONGEST_TEXT: Final = 2_000


@final
class Headers:
    """The headers of one response, and the time by which it goes.

    Of several headers of one name, the first that can be understood counts.
    """

    __slots__ = ("_pairs", "_unix_now")

    def __init__(self, headers: object, unix_now: float | None = None) -> None:
        self._pairs = _pairs(headers)
        self._unix_now = unix_now

    def _now(self) -> float:
        now = self.first("date", _instant) if self._unix_now is None else self._unix_now
        return time.time() if now is None else now

    def first(self, name: str, parse: Callable[[str], T | None]) -> T | None:
        """What the header of this name says."""
        for each, text in self._pairs:
            if each == name and (value := _either(text, parse)) is not None:
                return value
        return None

    def seconds(self, text: str) -> float | None:
        """A number of seconds, a duration, or what is left until an instant."""
        number = _number(text)
        if number is None:
            length = duration(text)
            instant = _instant(text) if length is None else None
            return length if instant is None else self._until(instant)
        if number < _UNIX:
            return sensible(number)
        return self._until(number if number < _UNIX_MILLISECONDS else number / 1000)

    def retry_after(self) -> float | None:
        """Seconds to wait before the next try; the more exact header counts."""
        exact = self.first("retry-after-ms", _milliseconds)
        return self.first("retry-after", self.seconds) if exact is None else exact

    def quotas(
        self,
        periods: Mapping[str, float],
        *,
        otherwise: float | None = None,
        refills_steadily: bool = False,
    ) -> Iterator[QuotaStatus]:
        """What each quota is at; `periods` is for units whose headers name none.

        Where nothing implies a period it is `otherwise`.
        """
        known: dict[tuple[str, float | None], dict[str, Any]] = {}
        for name, text in self._pairs:
            field = _field(name)
            if field is not None:
                parse = self.seconds if field.what == "reset" else field.read
                value = parse(text)
                if value is None:
                    value = _either(text, parse)
                if value is not None:
                    known.setdefault((field.of, field.per), {}).setdefault(field.what, value)
        for (of, named), numbers in known.items():
            limit = numbers.get("limit")
            if limit and limit < numbers.get("remaining", 0) <= limit + _ROUNDING:
                numbers["remaining"] = limit
            per = named or periods.get(of) or _implied_period(**numbers) or otherwise
            yield QuotaStatus(of=of, per=per, refills_steadily=refills_steadily, **numbers)

    def _until(self, instant: float) -> float | None:
        """0.0 where clocks differ a little; an instant long past is nonsense."""
        left = instant - self._now()
        return sensible(left if left < -DAY else max(0.0, left))


def count(text: str) -> int | None:
    """A whole number that makes sense."""
    if text.isdecimal() and text.isascii() and len(text) <= _SURELY_SENSIBLE:
        return int(text)  # as nearly all are
    number = _number(text)
    return int(number) if number is not None and number <= _LARGEST and number % 1 == 0 else None


def duration(text: str) -> float | None:
    """`120ms`, `6m0s`, `1 minute`: in seconds."""
    text = text.strip().lower()
    part = _PART.fullmatch(text)
    if part is not None:  # as most are
        return sensible(float(part[1]) * _SECONDS[part[2]])
    if not _DURATION.fullmatch(text):
        return None
    return sensible(sum(float(n) * _SECONDS[unit] for n, unit in _PART.findall(text)))


def sensible(seconds: float) -> float | None:
    """A time that can be waited for, or None."""
    return seconds if 0 <= seconds <= _LONGEST else None


def text_of(value: object) -> str:
    """What can be read as text; empty where nothing can."""
    if isinstance(value, str):
        return value[:_LONGEST_TEXT]
    if isinstance(value, (bytes, bytearray)):
        return value[:_LONGEST_TEXT].decode(errors="replace")
    return str(value) if type(value) in (int, float) else ""


def _pairs(headers: Any) -> list[tuple[str, str]]:
    """Those that may matter here."""
    pairs: list[tuple[str, str]] = []
    with suppress(Exception):
        raw = getattr(headers, "raw", None)  # of httpx: as they came, pairs of bytes
        if type(raw) is list:
            return [
                (known, text_of(text))
                for name, text in raw[:_MOST_HEADERS]
                if (known := _known_name(name[:_LONGEST_NAME]))
            ]
    with suppress(Exception):
        items = headers.items() if hasattr(headers, "items") else headers
        for item in islice(items, _MOST_HEADERS):
            if isinstance(item, (tuple, list)) and len(item) == 2:
                name, text = item
                known = _known_name(name[:_LONGEST_NAME]) if isinstance(name, (bytes, str)) else ""
                if known:
                    pairs.append((known, text_of(text)))
    return pairs


@lru_cache(1_000)
def _known_name(name: bytes | str) -> str:
    """A header's name as it is looked up; empty for one that says nothing here."""
    text = text_of(name).strip().lower()
    return text if "rate" in text or "retry" in text or text == "date" else ""


class _Field(NamedTuple):
    """What a header says that is about a quota."""

    of: str
    per: float | None
    what: str
    read: Callable[[str], int | None]


@lru_cache(1_000)
def _field(name: str) -> _Field | None:
    found = _QUOTA.fullmatch(name) or _ANTHROPIC_QUOTA.fullmatch(name)
    if found is None:
        return None
    read = _rounded if name.endswith("tokens-remaining") else count
    return _Field(_UNITS[found["of"]], PERIODS.get(found["period"]), found["what"], read)


def _either(text: str, parse: Callable[[str], T | None]) -> T | None:
    """Headers of one name may have been joined, and dates have commas of their own."""
    value = parse(text.strip())
    if value is None and "," in text:
        parsed = (parse(part.strip()) for part in text.split(", "))
        value = next((value for value in parsed if value is not None), None)
    return value


def _number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None


def _rounded(text: str) -> int | None:
    """Anthropic rounds to thousands: as much as there can be, lest it looks used."""
    tokens = count(text)
    return tokens + _ROUNDING if tokens is not None and tokens % 1000 == 0 else tokens


def _milliseconds(text: str) -> float | None:
    number = _number(text)
    return None if number is None else sensible(number / 1000)


def _instant(text: str) -> float | None:
    """Unix time of an RFC 3339 or an HTTP date."""
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        with suppress(Exception):  # the latter finds many ways to fail
            instant = parse(text)
            return instant.replace(tzinfo=instant.tzinfo or UTC).timestamp()
    return None


def _implied_period(
    limit: int | None = None, remaining: int | None = None, reset: float | None = None
) -> float | None:
    """A day, if it refills steadily and so slowly: of 10,000 requests one is back in 8.64 s."""
    if limit is None or remaining is None or reset is None or remaining >= limit:
        return None
    period = reset * limit / (limit - remaining)
    return DAY if abs(period - DAY) < 0.1 * DAY else None
