"""What a provider's "no" means: wait, give up, or that nothing was sent at all.

One table for status codes, one for what bodies say. Pure, and nothing here raises: an
outcome is whatever somebody's server, proxy or SDK made of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from socket import gaierror
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias, final

from ._complaint import Complaint, document, read_complaint
from ._errors import NoReplica, QueueFull, RequestTooLarge, WaitTimeout
from ._headers import Headers
from ._usage import RateLimitStatus, known_seconds

__all__ = ["LONGEST_WAIT", "Refusal", "RefusalKind", "classify", "read_status", "status_of"]

RefusalKind: TypeAlias = Literal[
    "wait", "overloaded", "too_large", "exhausted", "rejected", "unsent"
]

LONGEST_WAIT: Final = 120.0

_BY_STATUS: Final[Mapping[int, RefusalKind | None]] = {
    402: "exhausted",
    408: None,  # too late for an answer; it may have been at work on one
    429: "wait",
    498: "overloaded",  # Groq, flexible tier
    499: None,
    503: "overloaded",
    529: "overloaded",  # Anthropic
}
_BY_TEXT: Final[Mapping[RefusalKind, re.Pattern[str]]] = {
    # Azure names a day where a call exceeds the limit of a minute.
    "too_large": re.compile(r"request too large|retry after 86400 seconds"),
    "exhausted": re.compile(
        r"insufficient_quota|billing_hard_limit_reached|billing_not_active"
        r"|insufficient (?:balance|credits|funds)|credit balance is too low"
        r"|spend(?:ing)? (?:limit|cap)|api usage limits|\blimit: 0(?![\d.,]*\d)"
    ),
    "overloaded": re.compile(r"overloaded|capacity[ _]exceeded"),
}
_TOKENFLOW: Final = (RequestTooLarge, QueueFull, WaitTimeout, NoReplica)
# By name, for not one of the libraries need be installed: httpx, httpx2, httpcore, aiohttp.
_UNSENT: Final = frozenset(
    {
        "ConnectError",
        "ConnectTimeout",
        "PoolTimeout",
        "UnsupportedProtocol",
        "InvalidURL",
        "ClientConnectorError",
    }
)
_SENT: Final = frozenset({"TransportError", "TimeoutException", "NetworkError", "ProtocolError"})
_DEEPEST_CHAIN: Final = 20  # they can be circular
_LONGEST_MESSAGE: Final = 300


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What a provider's "no" means; nothing was generated.

    | `kind` | means |
    |---|---|
    | `wait` | rate limited: try again after `retry_after` |
    | `overloaded` | the same, but it is the server that has no room (503, 529) |
    | `too_large` | it can never pass: more than the limit of a whole period |
    | `exhausted` | no use in trying again soon: no credit, a limit of 0, a day's quota, |
    | | told not to retry, or a `retry_after` longer than anybody should sleep |
    | `rejected` | the request itself was refused: 400, 401, 404 and the like |
    | `unsent` | it never reached the server |

    `retry_after` is in seconds, as the server named it; None where it named none.
    `message` is what it said, shortened.
    """

    kind: RefusalKind
    retry_after: float | None = None
    message: str = ""
    status_code: int | None = None

    @property
    def is_permanent(self) -> bool:
        """Would the same call, sent again soon, be refused again?"""
        return self.kind in ("too_large", "exhausted", "rejected")


def read_status(
    headers: object,
    body: object = None,
    *,
    age: float = 0.0,
    periods: Mapping[str, float] = MappingProxyType({}),
    unix_now: float | None = None,
) -> RateLimitStatus:
    """What one response says about the quotas of whoever sent it.

    `headers` is a mapping or pairs, of str or bytes; `body`, which matters for refusals, is
    bytes, text or what they parse to. `age`: how many seconds ago the call was sent. `periods`
    tells the period of a unit, in seconds, where headers name none. `unix_now` is the time by
    which instants are read: by default the response's own `date`, and without that this
    machine's clock.

    >>> said = {"x-ratelimit-remaining-tokens": "149984", "x-ratelimit-reset-tokens": "6m0s"}
    >>> (quota,) = read_status(said).quotas
    >>> quota.of, quota.remaining, quota.reset
    ('tokens', 149984, 360.0)

    A `reset` is when the quota is full again, not when the next call may go. Where limit,
    rest and reset are those of a steady refill that takes a day, `per` is a day. Whether a
    quota `refills_steadily` no header says; a `Provider` knows.
    """
    return status_of(Headers(headers, unix_now), body, age, periods)


def status_of(
    said: Headers,
    body: object,
    age: float,
    periods: Mapping[str, float],
    *,
    otherwise: float | None = None,
    refills_steadily: bool = False,
    longest_wait: float = math.inf,
) -> RateLimitStatus:
    """The body of `read_status`, and what only a `Provider` knows."""
    stated = tuple(said.quotas(periods, otherwise=otherwise, refills_steadily=refills_steadily))
    delay = said.retry_after()
    text = None if body is None else document(body)
    if isinstance(text, dict):
        complaint = read_complaint(text)
        delay = complaint.retry_after if delay is None else delay
        named = {(quota.of, quota.per): quota for quota in stated}
        for quota in complaint.quotas:
            quota = replace(quota, per=quota.per or otherwise, refills_steadily=refills_steadily)
            named.setdefault((quota.of, quota.per), quota)
        stated = tuple(named.values())
    if delay is not None and delay > longest_wait:
        delay = None
    return RateLimitStatus(quotas=stated, retry_after=delay, age=known_seconds(age) or 0.0)


def classify(
    outcome: object, *, longest_wait: float = LONGEST_WAIT, unix_now: float | None = None
) -> Refusal | None:
    """What kind of refusal a call ended with; None: it was none, or nobody can tell.

    `outcome` is a response (`status_code`, `headers`, and the body where it has been read
    already: nothing here reads a stream), or what an SDK raised, also as the cause of another
    exception. A 500, a time-out or a broken connection is no refusal: it may have generated.

    A delay beyond `longest_wait` seconds is neither slept nor clipped: "exhausted", with the
    delay in `retry_after`, for the caller to decide.

    >>> class Response:
    ...     status_code = 429
    ...     headers = {"retry-after-ms": "9816"}
    >>> classify(Response())
    Refusal(kind='wait', retry_after=9.816, message='', status_code=429)
    """
    if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
        return None
    for each, is_cause in _chain(outcome):
        answer = _answer(each) if is_cause else None
        if answer is not None:
            return _judge(answer, longest_wait, unix_now)
        names = {base.__name__ for base in type(each).__mro__}
        if isinstance(each, (*_TOKENFLOW, ConnectionRefusedError, gaierror)) or names & _UNSENT:
            delay = known_seconds(_attribute(each, "retry_after"))
            return Refusal(kind="unsent", retry_after=delay, message=_message(each))
        if names & _SENT:
            return None
    return None


class _Answer(NamedTuple):
    status: int
    headers: object
    said: object


def _judge(answer: _Answer, longest_wait: float, unix_now: float | None) -> Refusal | None:
    headers, complaint = Headers(answer.headers, unix_now), read_complaint(answer.said)
    kind = _kind(answer.status, headers.first("x-should-retry", str.lower), complaint)
    if kind is None:
        return None
    delay = headers.retry_after()
    if delay is None:
        delay = complaint.retry_after
    if delay is None:  # Cohere: the end of a fixed period
        delay = headers.first("x-ratelimit-reset", headers.seconds)
    if kind in ("wait", "overloaded") and delay is not None and delay > longest_wait:
        kind = "exhausted"
    return Refusal(
        kind=kind,
        retry_after=delay,
        message=_shortened(complaint.message),
        status_code=answer.status,
    )


def _kind(status: int, should_retry: str | None, complaint: Complaint) -> RefusalKind | None:
    kind = _BY_STATUS.get(status, "rejected" if 400 <= status < 500 else None)
    if kind is None:
        return None
    if any(quota.limit and (complaint.cost or 0) > quota.limit for quota in complaint.quotas):
        return "too_large"
    text = " ".join((*complaint.codes, complaint.message)).lower()
    for meaning, pattern in _BY_TEXT.items():
        if pattern.search(text) and not (kind == "rejected" and meaning == "overloaded"):
            return meaning
    if complaint.daily or any(quota.limit == 0 for quota in complaint.quotas):
        return "exhausted"
    if kind == "rejected":
        return "overloaded" if should_retry == "true" else "rejected"
    if complaint.retry_after is None and "per day" in text:
        return "exhausted"
    return "exhausted" if should_retry == "false" else kind


def _chain(outcome: object) -> Iterator[tuple[object, bool]]:
    """It and what is behind it; is that its cause, or did it only happen before?

    What merely happened before says nothing about the last call: that may have been another.
    But it can have failed only after it could not connect.
    """
    is_cause = True
    for _ in range(_DEEPEST_CHAIN):
        yield outcome, is_cause
        if not isinstance(outcome, BaseException):
            return
        behind = outcome.__cause__
        if behind is None and not outcome.__suppress_context__:
            behind, is_cause = outcome.__context__, False
        if behind is None:
            return
        outcome = behind


def _answer(outcome: object) -> _Answer | None:
    """Status, headers and body, wherever this object keeps them."""
    response = _attribute(outcome, "response")
    meta = response.get("ResponseMetadata") if isinstance(response, dict) else None
    meta = meta if isinstance(meta, dict) else {}  # botocore
    statuses = (
        *(_attribute(response, name) for name in ("status_code", "status")),
        *(_attribute(outcome, name) for name in _own_statuses(outcome)),
        meta.get("HTTPStatusCode"),
    )
    status = next((each for each in statuses if isinstance(each, int) and 100 <= each < 600), None)
    if status is None:
        return None
    headers = (_attribute(outcome, "headers"), _attribute(response, "headers"))
    found = next((each for each in headers if each is not None), meta.get("HTTPHeaders"))
    return _Answer(int(status), found, _said(outcome, response))


def _own_statuses(outcome: object) -> tuple[str, ...]:
    """Not those of a web framework's exception: that is what its raiser answers somebody else."""
    received = any(_attribute(outcome, name) is not None for name in ("body", "details"))
    if isinstance(outcome, Exception) and not received:
        return ()
    return ("status_code", "status", "code")


def _said(outcome: object, response: object) -> object:
    places = (
        *(_attribute(outcome, name) for name in ("body", "details")),
        *(_attribute(owner, name) for owner in (response, outcome) for name in _read(owner)),
        response,
    )
    documents = map(document, places)
    return next((each for each in documents if each and isinstance(each, (dict, str))), None)


def _read(response: object) -> tuple[str, ...]:
    """Where a body is that has been read. With requests, to look at it is to read it."""
    return () if _attribute(response, "_content") is False else ("body", "content", "text")


def _attribute(owner: object, name: str) -> object:
    with suppress(Exception):
        return getattr(owner, name, None)
    return None


def _message(error: object) -> str:
    with suppress(Exception):
        return _shortened(str(error))
    return ""


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 3] + "..."
