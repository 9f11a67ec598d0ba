"""What servers say in the body of a refusal, in details and in prose. Nothing here raises."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from ._headers import DAY, DURATION, MINUTE, PERIODS, count, duration, sensible, text_of
from ._usage import QuotaStatus

__all__ = ["Complaint", "document", "read_complaint"]

_AGAIN: Final = re.compile(
    rf"(?:try again|retry) (?:in|after) ({DURATION})", re.ASCII | re.IGNORECASE
)
_QUOTA: Final = re.compile(
    r"\bon (?P<of>[a-z_ ]{1,40}) per (?P<period>second|min|minute|hour|day)\b[^:]{0,30}: "
    r"limit:? (?P<limit>[\d,]+)(?:, used:? ~?(?P<used>[\d,]+))?, requested:? ~?(?P<cost>[\d,]+)",
    re.ASCII | re.IGNORECASE,
)
_UNITS: Final = {
    "requests": "requests",
    "tokens": "tokens",
    "tokens_usage_based": "tokens",
    "input tokens": "input_tokens",
    "output tokens": "output_tokens",
}
_CODES: Final = ("code", "type", "status", "Code", "error_type")
_LARGEST_BODY: Final = 1 << 20
_MOST_DETAILS: Final = 20


class Complaint(NamedTuple):
    """What can be understood of it.

    `codes` are a program's names for what is wrong; `cost` is what the call would have
    cost, in the unit of the one quota; `daily`: a day's quota ran out, whatever delay is
    named.
    """

    message: str = ""
    codes: tuple[str, ...] = ()
    quotas: tuple[QuotaStatus, ...] = ()
    cost: int | None = None
    daily: bool = False
    retry_after: float | None = None


def document(body: object) -> object:
    """A body as what it holds: parsed where it is JSON, else as text; the first of a list."""
    parsed = body
    if isinstance(body, (bytes, bytearray, str)) and len(body) <= _LARGEST_BODY:
        parsed = text_of(body)
        with suppress(ValueError, RecursionError):
            parsed = json.loads(body)
    if isinstance(parsed, list):  # Gemini, where it streams
        parsed = parsed[0] if parsed else None
    return parsed


def read_complaint(said: object) -> Complaint:
    """Understand a document: a dictionary, or a text that is all message."""
    outer: dict[Any, Any] = said if isinstance(said, dict) else {}
    error = outer.get("error") or outer.get("Error") or outer
    inner: dict[Any, Any] = error if isinstance(error, dict) else {}
    texts = (inner.get("message"), inner.get("Message"), outer.get("detail"), error, said)
    message = text_of(next((text for text in texts if isinstance(text, str)), ""))
    codes = (text_of(each.get(name)) for each in (inner, outer) for name in _CODES)
    details = _dictionaries(inner.get("details"))
    violated, stated = tuple(_violated(details)), _stated(message)
    daily = any(quota.per == DAY for quota in violated)
    delay = None if daily else _delay(message, details)
    return Complaint(
        message=message,
        codes=tuple(filter(None, codes)),
        quotas=(*violated, *stated.quotas),
        cost=stated.cost,
        daily=daily,
        retry_after=stated.retry_after if delay is None else delay,
    )


def _dictionaries(found: object) -> list[dict[Any, Any]]:
    entries = found[:_MOST_DETAILS] if isinstance(found, list) else []
    return [entry for entry in entries if isinstance(entry, dict)]


def _delay(message: str, details: list[dict[Any, Any]]) -> float | None:
    for entry in details:
        delay = duration(text_of(entry.get("retryDelay")))
        if delay is not None:
            return delay + 1.0  # Gemini cuts off what is less than a second
    again = _AGAIN.search(message)
    return duration(again[1]) if again else None


def _violated(details: list[dict[Any, Any]]) -> Iterator[QuotaStatus]:
    """Gemini's QuotaFailure; its ids read like `GenerateRequestsPerDayPerProjectPerModel`."""
    for entry in details:
        for each in _dictionaries(entry.get("violations")):
            if name := text_of(each.get("quotaId")):
                yield QuotaStatus(
                    of="input_tokens" if "Tokens" in name else "requests",
                    per=DAY if "PerDay" in name else MINUTE if "PerMinute" in name else None,
                    limit=count(text_of(each.get("quotaValue"))),
                )


def _stated(message: str) -> Complaint:
    """`... on tokens per min (TPM): Limit 10000, Used 8554, Requested 3082.`"""
    found = _QUOTA.search(message)
    of = found and _UNITS.get(found["of"].lower())
    if not found or not of:
        return Complaint()
    numbers = (found[name] or "" for name in ("limit", "used", "cost"))
    limit, used, cost = (count(number.replace(",", "")) for number in numbers)
    per = PERIODS[found["period"].lower()]
    status = QuotaStatus(of=of, per=per, limit=limit)
    if not limit or used is None:
        return Complaint(quotas=(status,), cost=cost)
    status = replace(status, remaining=max(0, limit - used), reset=sensible(used * per / limit))
    return Complaint(quotas=(status,), cost=cost, retry_after=_refilled(limit, used, cost, per))


def _refilled(limit: int, used: int, cost: int | None, per: float) -> float | None:
    """When a bucket that refills steadily has room; within 3 ms of what servers tell."""
    if cost is None or cost > limit:
        return None
    return sensible(max(0.0, (used + cost - limit) / (limit / per)))
