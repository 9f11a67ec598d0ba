"""What servers say in headers and bodies, and what their refusals mean."""

import copy
import math
import pickle
import socket
from email.utils import formatdate
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow import (
    NoReplica,
    QueueFull,
    QuotaStatus,
    RateLimitStatus,
    RequestTooLarge,
    WaitTimeout,
)
from tokenflow._headers import DAY, HOUR, MINUTE, MONTH
from tokenflow.providers import Refusal, classify, read_status

NOW = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC


def retry_after(text: object) -> float | None:
    return read_status({"retry-after": text}, unix_now=NOW).retry_after


# -- times ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1),
        ("120ms", 0.12),
        ("6m0s", 360),
        ("4m12.172s", 252.172),
        ("23h18m29.144s", 83_909.144),
        ("1d2h", 93_600),
        ("1 minute 5 seconds", 65),
        ("86400 seconds", 86_400),
        (" 7S ", 7),
        ("55", 55),
        ("0", 0),
        ("0.25", 0.25),
        (54, 54),
        (0.5, 0.5),
        ("2023-11-14T22:13:30Z", 10),
        ("2023-11-14T23:13:30+01:00", 10),
        (formatdate(NOW + 90, usegmt=True), 90),
        (formatdate(NOW - 90, usegmt=True), 0),  # a clock that goes slow
        ("1700000042", 42),
        ("1700000042500", 42.5),
        ("10, 20", 10),  # two headers, joined
        ("soon, 20", 20),
    ],
)
def test_a_time_is_understood(text: object, seconds: float) -> None:
    assert retry_after(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "-5s",
        "nan",
        "inf",
        "1e5",
        "1_000",
        "\u0665",  # a digit, in Arabic
        "soon",
        "s",
        "ms",
        "4m12",
        "5 parsecs",
        "5mss",
        "9" * 400,
        "9" * 5_000,
        str(2**63 - 1),
        "40000000",  # more than a year, and no instant
        "2023-13-77",
        "0001-01-01T00:00:00+23:59",
        "9999-12-31T23:59:59Z",
        "Wed, 21 Oct 2015 07:28:00 GMT",  # years ago
        "Wed, 99 Foo 99999999 07:28:00 GMT",
        None,
        True,
        [5],
        b"\xff\xfe",
    ],
)
def test_nonsense_is_no_time(text: object) -> None:
    assert retry_after(text) is None


def test_an_instant_is_read_by_the_clock_of_the_server() -> None:
    """Its `date` knows no skew between it and this machine."""
    headers = {"date": formatdate(NOW, usegmt=True), "retry-after": formatdate(NOW + 7, True)}
    assert read_status(headers).retry_after == 7


def test_without_a_date_an_instant_is_read_by_the_clock_of_this_machine() -> None:
    assert read_status({"retry-after": formatdate(None, usegmt=True)}).retry_after == pytest.approx(
        0, abs=5
    )


def test_the_more_exact_header_counts() -> None:
    headers = {"retry-after": "1", "retry-after-ms": "20"}
    assert read_status(headers).retry_after == 0.02
    assert read_status(headers | {"retry-after-ms": "-20"}).retry_after == 1


# -- headers ----------------------------------------------------------------------


def quotas(headers: object, **options: Any) -> tuple[QuotaStatus, ...]:
    return read_status(headers, unix_now=NOW, **options).quotas


def openai_style(**values: object) -> dict[str, object]:
    return {f"x-ratelimit-{name.replace('_', '-')}": value for name, value in values.items()}


HEADERS: dict[str, tuple[object, list[QuotaStatus]]] = {
    "openai": (
        openai_style(
            limit_requests="500",
            limit_tokens="30000",
            remaining_requests="499",
            remaining_tokens="21446",
            reset_requests="120ms",
            reset_tokens="17.108s",
        ),
        [
            QuotaStatus(of="requests", limit=500, remaining=499, reset=0.12),
            QuotaStatus(of="tokens", limit=30_000, remaining=21_446, reset=17.108),
        ],
    ),
    "openai, requests by the day": (
        openai_style(limit_requests="10000", remaining_requests="9999", reset_requests="8.64s"),
        [QuotaStatus(of="requests", per=DAY, limit=10_000, remaining=9_999, reset=8.64)],
    ),
    "azure: bare seconds, and -1 for unknown": (
        openai_style(remaining_tokens="119000", reset_tokens="55", remaining_requests="-1"),
        [QuotaStatus(of="tokens", remaining=119_000, reset=55)],
    ),
    "anthropic": (
        {
            "anthropic-ratelimit-requests-limit": "4000",
            "anthropic-ratelimit-requests-remaining": "3000",
            "anthropic-ratelimit-requests-reset": "2023-11-14T22:13:35Z",
            "anthropic-ratelimit-input-tokens-limit": "400000",
            "anthropic-ratelimit-input-tokens-remaining": "399000",
            "anthropic-ratelimit-output-tokens-remaining": "79990",
        },
        [
            QuotaStatus(of="requests", limit=4_000, remaining=3_000, reset=15),
            # rounded to thousands, so there may be more
            QuotaStatus(of="input_tokens", limit=400_000, remaining=399_500),
            QuotaStatus(of="output_tokens", remaining=79_990),
        ],
    ),
    "mistral": (
        {
            "x-ratelimit-remaining-tokens-minute": "498000",
            "x-ratelimit-limit-tokens-month": "1000000000",
            "x-ratelimit-limit-req-minute": "60",
            "x-ratelimit-tokens-query-cost": "35",
        },
        [
            QuotaStatus(of="tokens", per=MINUTE, remaining=498_000),
            QuotaStatus(of="tokens", per=MONTH, limit=1_000_000_000),
            QuotaStatus(of="requests", per=MINUTE, limit=60),
        ],
    ),
    "cerebras": (
        {
            "x-ratelimit-limit-requests-day": "14400",
            "x-ratelimit-remaining-requests-day": "14399",
            "x-ratelimit-reset-requests-day": "33011.382867",
            "x-ratelimit-remaining-tokens-hour": "1000",
        },
        [
            QuotaStatus(of="requests", per=DAY, limit=14_400, remaining=14_399, reset=33011.382867),
            QuotaStatus(of="tokens", per=HOUR, remaining=1_000),
        ],
    ),
    "periods with per, resets in unix time": (
        {
            "x-ratelimit-remaining-tokens-per-minute": "7",
            "x-ratelimit-reset-tokens-per-minute": "1700000030",
        },
        [QuotaStatus(of="tokens", per=MINUTE, remaining=7, reset=30)],
    ),
    "pairs of bytes": (
        [(b"X-RateLimit-Remaining-Tokens", b"5"), (b"x-ratelimit-reset-tokens", b"1s")],
        [QuotaStatus(of="tokens", remaining=5, reset=1)],
    ),
    "duplicates: the first that makes sense": (
        [
            ("x-ratelimit-remaining-tokens", ""),
            ("x-ratelimit-remaining-tokens", "5"),
            ("x-ratelimit-remaining-tokens", "9"),
        ],
        [QuotaStatus(of="tokens", remaining=5)],
    ),
    "duplicates, joined": (
        {"x-ratelimit-remaining-tokens": "5, 9"},
        [QuotaStatus(of="tokens", remaining=5)],
    ),
    "whole floats": (
        openai_style(remaining_tokens="5.0", limit_tokens="5.5"),
        [QuotaStatus(of="tokens", remaining=5)],
    ),
    "misspelt, empty, in wrong units, huge": (
        {
            "x-ratelimt-remaining-tokens": "5",
            "x-ratelimit-remaining-token": "5",
            "x-ratelimit-remaining-tokens-fortnight": "5",
            "x-ratelimit-remaining-requests": "5s",
            "x-ratelimit-limit-requests": "",
            "x-ratelimit-limit-tokens": str(2**63 - 1),
            "x-ratelimit-remaining-tokens": str(10**14),
            "x-ratelimit-reset-tokens": "never",
            "anthropic-ratelimit-tokens": "5",
            "retry-after-ms": "NaN",
        },
        [],
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers(name: str) -> None:
    headers, expected = HEADERS[name]
    assert list(quotas(headers)) == expected


def test_a_period_that_the_provider_is_known_for() -> None:
    headers = openai_style(limit_requests="14400", remaining_requests="14370")
    (quota,) = quotas(headers, periods={"requests": DAY})
    assert quota.per == DAY


def test_a_period_that_a_header_names_comes_first() -> None:
    headers = openai_style(remaining_requests_minute="5")
    assert quotas(headers, periods={"requests": DAY})[0].per == MINUTE


def test_numbers_that_imply_no_known_period() -> None:
    headers = openai_style(limit_tokens=18_000, remaining_tokens=17_997, reset_tokens="7.66s")
    assert quotas(headers)[0].per is None


@pytest.mark.parametrize("remaining", [500, 501, 0])
def test_a_quota_that_is_full_or_refills_within_a_minute_implies_no_day(remaining: int) -> None:
    headers = openai_style(limit_requests=500, remaining_requests=remaining, reset_requests="60s")
    assert quotas(headers)[0].per is None


@pytest.mark.parametrize(
    "headers",
    [
        None,
        5,
        "x-ratelimit-remaining-tokens: 5",
        b"bytes",
        [],
        [None, 5, (), ("retry-after",), ("retry-after", "1", "2"), {"retry-after": "1"}],
        {5: 6, None: None, (): []},
        {"retry-after": object()},
        SimpleNamespace(items=lambda: 5),
        SimpleNamespace(items=lambda: 1 / 0),
    ],
)
def test_what_are_no_headers_says_nothing(headers: object) -> None:
    assert read_status(headers) == RateLimitStatus()


def test_endless_headers_end() -> None:
    def endless() -> Any:
        yield "retry-after", "5"
        while True:
            yield "x", "y"

    assert read_status(endless()).retry_after == 5


@pytest.mark.parametrize(("age", "read"), [(2.5, 2.5), (-1, 0), (math.nan, 0), (None, 0)])
def test_the_age_is_passed_on(age: Any, read: float) -> None:
    assert read_status({}, age=age).age == read


# -- bodies -----------------------------------------------------------------------

OPENAI_TEXT = (
    "Rate limit reached for gpt-4 in organization org-1 on tokens per min (TPM): "
    "Limit 10000, Used 8554, Requested 3082. Please try again in {}. Visit a page to learn more."
)
TOO_LARGE = (
    "Request too large for gpt-4o in organization org-1 on tokens per min (TPM): "
    "Limit 30000, Requested 36055. The input or output tokens must be reduced."
)


def gemini(*details: object, message: str = "You exceeded your current quota.") -> dict[str, Any]:
    return {
        "error": {
            "code": 429,
            "message": message,
            "status": "RESOURCE_EXHAUSTED",
            "details": list(details),
        }
    }


def violation(quota_id: str, **more: object) -> dict[str, object]:
    kind = "type.googleapis.com/google.rpc.QuotaFailure"
    return {"@type": kind, "violations": [{"quotaId": quota_id, **more}]}


def retry_info(delay: str) -> dict[str, str]:
    return {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay}


@pytest.mark.parametrize(
    ("text", "seconds"), [("9.816s", 9.816), ("1m9.696s", 69.696), ("20ms", 0.02), ("14m24s", 864)]
)
def test_openai_tells_the_delay_in_its_message(text: str, seconds: float) -> None:
    body = {"error": {"message": OPENAI_TEXT.format(text)}}
    assert read_status({}, body).retry_after == pytest.approx(seconds)


def test_azure_tells_the_delay_in_words() -> None:
    assert read_status({}, {"message": "Please retry after 6 seconds."}).retry_after == 6


def test_the_wait_that_a_message_implies() -> None:
    """wait = (used + requested - limit) / (limit / period), as public messages have it."""
    body = {"error": {"message": OPENAI_TEXT.format("a while")}}
    status = read_status({}, body)
    assert status.retry_after == pytest.approx(9.816)
    (quota,) = status.quotas
    assert quota.reset == pytest.approx(51.324)
    assert quota == QuotaStatus(
        of="tokens", per=MINUTE, limit=10_000, remaining=1_446, reset=quota.reset
    )


@given(
    limit=st.integers(1, 10**7),
    used=st.integers(0, 10**7),
    cost=st.integers(1, 10**7),
    period=st.sampled_from([("min", 60.0), ("minute", 60.0), ("day", 86_400.0), ("hour", 3600.0)]),
)
def test_the_implied_wait_is_the_formula(
    limit: int, used: int, cost: int, period: tuple[str, float]
) -> None:
    name, seconds = period
    text = f"on tokens per {name} (T): Limit {limit}, Used {used}, Requested {cost}. Visit"
    wait = max(0.0, (used + cost - limit) / (limit / seconds))
    expected = pytest.approx(wait) if cost <= limit and wait <= 366 * DAY else None
    assert read_status({}, {"error": text}).retry_after == expected


@pytest.mark.parametrize(
    ("text", "of", "per"),
    [
        ("on requests per min (RPM): Limit 3, Used 3, Requested 1.", "requests", MINUTE),
        ("on tokens per day (TPD): Limit 100000, Used 99000, Requested 2,000.", "tokens", DAY),
        ("on tokens_usage_based per min: Limit 60000, Used 0, Requested ~9.", "tokens", MINUTE),
        ("on input tokens per minute (ITPM): Limit 5, Used 5, Requested 1.", "input_tokens", 60),
        ("on images per minute (IPM): Limit 5, Used 5, Requested 1.", None, None),
        ("on tokens per min (TPM): Limit ,,, Used ,, Requested ,", "tokens", MINUTE),
        ("on tokens per fortnight: Limit 5, Used 5, Requested 1.", None, None),
    ],
)
def test_quotas_in_messages(text: str, of: str | None, per: float | None) -> None:
    found = [(quota.of, quota.per) for quota in read_status({}, {"error": text}).quotas]
    assert found == ([] if of is None else [(of, per)])


@pytest.mark.parametrize(("delay", "seconds"), [("58s", 59), ("0s", 1), ("3.5s", 4.5)])
def test_gemini_cuts_off_the_last_second(delay: str, seconds: float) -> None:
    """(langchain-google 945): RetryInfo is obeyed, and a second more."""
    assert read_status({}, gemini(retry_info(delay))).retry_after == seconds


@pytest.mark.parametrize(
    ("quota_id", "of", "per"),
    [
        ("GenerateRequestsPerMinutePerProjectPerModel-FreeTier", "requests", MINUTE),
        ("GenerateRequestsPerDayPerProjectPerModel-FreeTier", "requests", DAY),
        ("GenerateContentInputTokensPerModelPerMinute-FreeTier", "input_tokens", MINUTE),
        ("GenerateRequestsPerSomething", "requests", None),
    ],
)
def test_gemini_names_the_quota(quota_id: str, of: str, per: float | None) -> None:
    status = read_status({}, gemini(violation(quota_id, quotaValue="250")))
    assert status.quotas == (QuotaStatus(of=of, per=per, limit=250),)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        "Please try again in 9.816s.",  # no JSON: it may be what a model wrote
        b'data: {"choices": [{"delta": {"content": "Please try again in 5s."}}]}',
        b"[" * 100_000,
        b'{"error": ' * 50_000,
        b" " * (2 << 20) + b'{"message": "try again in 5s"}',
        [],
        [[]],
        5,
        {"error": 5},
        {"error": {"message": ["try again in 5s"], "details": "none"}},
        {"error": {"details": [5, None, [], {"violations": 5}, {"violations": [5, {}]}]}},
        {"choices": [{"message": {"content": "Please try again in 5s."}}]},
        gemini(retry_info("soon")),
        gemini({"retryDelay": {"seconds": 5}}),
    ],
)
def test_bodies_that_say_nothing(body: object) -> None:
    assert read_status({}, body) == RateLimitStatus()


def test_a_body_may_be_bytes_text_or_parsed_and_in_a_list() -> None:
    text = '{"error": {"message": "Please try again in 5s."}}'
    parsed = {"error": {"message": "Please try again in 5s."}}
    for body in (text, text.encode(), bytearray(text.encode()), parsed, [parsed], f"[{text}]"):
        assert read_status({}, body).retry_after == 5


def test_what_headers_say_comes_before_what_the_body_says() -> None:
    headers = openai_style(limit_tokens_minute=10_000, remaining_tokens_minute=9)
    status = read_status(headers | {"retry-after": "3"}, {"error": OPENAI_TEXT.format("9s")})
    assert status.retry_after == 3
    assert [quota.remaining for quota in status.quotas] == [9]


# -- what a refusal means -----------------------------------------------------------


def response(status: int, body: object = None, /, **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return SimpleNamespace(status_code=status, headers=named, body=body)


def kind(status: int, body: object = None, /, **headers: str) -> str | None:
    refusal = classify(response(status, body, **headers))
    return refusal and refusal.kind


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (200, None),
        (204, None),
        (302, None),
        (400, "rejected"),
        (401, "rejected"),
        (402, "exhausted"),
        (403, "rejected"),
        (404, "rejected"),
        (408, None),
        (409, "rejected"),
        (413, "rejected"),
        (422, "rejected"),
        (429, "wait"),
        (498, "overloaded"),
        (499, None),
        (500, None),
        (502, None),
        (504, None),
        (529, "overloaded"),
        (HTTPStatus.SERVICE_UNAVAILABLE, "overloaded"),
    ],
)
def test_what_a_status_means(status: int, expected: str | None) -> None:
    assert kind(status) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"error": {"message": OPENAI_TEXT.format("9.816s")}}, "wait"),
        # A call above the limit is never retried (shell_gpt 653, agent-zero 711).
        ({"error": {"message": TOO_LARGE, "code": "rate_limit_exceeded"}}, "too_large"),
        ({"message": "on tokens per min (TPM): Limit 5, Used 0, Requested 6."}, "too_large"),
        ({"error": {"code": "429", "message": "Please retry after 86400 seconds."}}, "too_large"),
        # Nor is what can never pass (continue 9570, foyle 82).
        ({"error": {"code": "insufficient_quota", "message": "You exceeded"}}, "exhausted"),
        ({"type": "insufficient_quota"}, "exhausted"),
        (gemini(message="Quota exceeded for metric: requests, limit: 0"), "exhausted"),
        (gemini(violation("GenerateRequestsPerMinute", quotaValue="0")), "exhausted"),
        (gemini(message="Quota exceeded, limit: 0.5 of 10"), "wait"),
        (gemini(violation("RequestsPerDay", quotaValue="50"), retry_info("7s")), "exhausted"),
        (gemini(violation("RequestsPerMinute"), retry_info("7s")), "wait"),
        ({"message": "Too many tokens per day, please wait before trying again."}, "exhausted"),
        ({"message": "Too many tokens, please wait before trying again."}, "wait"),
        ({"error": "on tokens per day: Limit 90, Used 90, Requested 0. Try again in 5s"}, "wait"),
        ({"error": "Model is overloaded", "error_type": "overloaded"}, "overloaded"),
        ({"message": "Service tier capacity exceeded for this model."}, "overloaded"),
        ({"type": "error", "error": {"type": "rate_limit_error", "message": "Slow"}}, "wait"),
        ({"error": {"message": "Your spending cap is reached"}}, "exhausted"),
        ("<html>Too Many Requests</html>", "wait"),
        (b"overloaded", "overloaded"),
    ],
)
def test_what_the_body_of_a_429_means(body: object, expected: str) -> None:
    assert kind(429, body) == expected


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (413, {"error": {"message": TOO_LARGE}}, "too_large"),  # Groq
        (400, {"error": {"message": "Your credit balance is too low"}}, "exhausted"),
        (400, {"error": {"message": "the model says it is overloaded"}}, "rejected"),
        (500, {"error": {"code": "insufficient_quota"}}, None),
        (200, {"error": {"type": "overloaded_error"}}, None),  # it broke off a stream
    ],
)
def test_what_other_bodies_mean(status: int, body: object, expected: str | None) -> None:
    assert kind(status, body) == expected


@pytest.mark.parametrize(
    ("status", "told", "expected"),
    [
        (429, "false", "exhausted"),
        (429, "True", "wait"),
        (503, "false", "exhausted"),
        (409, "true", "overloaded"),
        (409, "false", "rejected"),
        (500, "true", None),
        (429, "perhaps", "wait"),
    ],
)
def test_a_server_that_says_whether_to_retry(status: int, told: str, expected: str | None) -> None:
    assert kind(status, x_should_retry=told) == expected


@pytest.mark.parametrize(("delay", "expected"), [("120", "wait"), ("120.5", "exhausted")])
def test_a_delay_beyond_the_longest_wait_is_raised_with_its_value(
    delay: str, expected: str
) -> None:
    refusal = classify(response(429, retry_after=delay))
    assert refusal is not None
    assert (refusal.kind, refusal.retry_after) == (expected, float(delay))


def test_the_longest_wait_can_be_set() -> None:
    refusal = classify(response(503, retry_after="7200"), longest_wait=7_200)
    assert refusal == Refusal(kind="overloaded", retry_after=7_200, status_code=503)


def test_the_end_of_a_fixed_period_is_when_to_come_back() -> None:
    """Cohere says nothing else, and in Unix time."""
    refusal = classify(response(429, x_ratelimit_reset="1700000012"), unix_now=NOW)
    assert refusal == Refusal(kind="wait", retry_after=12, status_code=429)


def test_the_delay_of_a_days_quota_is_not_believed() -> None:
    refusal = classify(response(429, gemini(violation("RequestsPerDay"), retry_info("7s"))))
    assert refusal is not None
    assert refusal.retry_after is None


@pytest.mark.parametrize("name", ["too_large", "exhausted", "rejected"])
def test_some_refusals_are_permanent(name: Any) -> None:
    assert Refusal(kind=name).is_permanent


@pytest.mark.parametrize("name", ["wait", "overloaded", "unsent"])
def test_others_are_not(name: Any) -> None:
    assert not Refusal(kind=name).is_permanent


def test_the_message_is_one_short_line() -> None:
    refusal = classify(response(400, {"message": "no\n" * 400}))
    assert refusal is not None
    assert len(refusal.message) == 300
    assert refusal.message.startswith("no no no")
    assert refusal.message.endswith("...")


def test_a_refusal_is_a_value() -> None:
    refusal = Refusal(kind="wait", retry_after=1.5, message="later", status_code=429)
    assert pickle.loads(pickle.dumps(refusal)) == copy.copy(refusal) == refusal
    assert hash(refusal) == hash(copy.copy(refusal))


# -- where SDKs keep it ---------------------------------------------------------------


class SDKError(Exception):
    """As an SDK raises them: with attributes."""

    def __init__(self, **attributes: object) -> None:
        super().__init__("sdk")
        self.__dict__.update(attributes)


def answer(status: int, **attributes: object) -> SimpleNamespace:
    return SimpleNamespace(status_code=status, headers={"retry-after": "3"}, **attributes)


SDK_ERRORS: dict[str, Exception] = {
    "openai, with the inner error as body": SDKError(
        status_code=429, response=answer(429), body={"message": "slow down"}, code="rate_limited"
    ),
    "anthropic, groq": SDKError(
        status_code=429, response=answer(429), body={"error": {"message": "slow down"}}
    ),
    "google-genai": SDKError(
        code=429,
        status="RESOURCE_EXHAUSTED",
        response=answer(429),
        details={"error": {"message": "slow down"}},
    ),
    "google-genai over aiohttp": SDKError(
        code=429,
        response=SimpleNamespace(headers={"retry-after": "3"}, status=429),
        details={"error": {"message": "slow down"}},
    ),
    "mistralai, cohere": SDKError(
        status_code=429, headers={"retry-after": "3"}, body='{"message": "slow down"}'
    ),
    "botocore": SDKError(
        response={
            "Error": {"Code": "ThrottlingException", "Message": "slow down"},
            "ResponseMetadata": {"HTTPStatusCode": 429, "HTTPHeaders": {"retry-after": "3"}},
        }
    ),
    "httpx, raise_for_status after reading": SDKError(
        response=answer(429, content=b'{"error": {"message": "slow down"}}')
    ),
    "text only": SDKError(response=answer(429, content=None, text="slow\ndown")),
}


@pytest.mark.parametrize("name", SDK_ERRORS)
def test_sdk_errors(name: str) -> None:
    expected = Refusal(kind="wait", retry_after=3, message="slow down", status_code=429)
    assert classify(SDK_ERRORS[name]) == expected


@pytest.mark.parametrize("name", SDK_ERRORS)
def test_an_sdk_error_that_caused_another(name: str) -> None:
    error = SDKError()
    error.__cause__ = SDKError()
    error.__cause__.__cause__ = SDK_ERRORS[name]
    refusal = classify(error)
    assert refusal is not None
    assert refusal.kind == "wait"


def test_an_sdk_error_that_only_happened_before_says_nothing_about_this_call() -> None:
    """A fallback to another provider was sent, and failed in its own way."""
    error = SDKError()
    error.__context__ = SDK_ERRORS["anthropic, groq"]
    assert classify(error) is None


def test_what_a_web_framework_raises_is_the_answer_to_somebody_else() -> None:
    assert classify(SDKError(status_code=404, detail="no such conversation")) is None
    assert classify(SDKError(code=404, description="no such page", response=None)) is None


def test_a_body_that_was_not_read_stays_unread() -> None:
    class Unread:
        status_code = 429
        headers: dict[str, str] = {}  # noqa: RUF012

        @property
        def content(self) -> bytes:
            raise RuntimeError("the stream has not been read")

    class Requests(Unread):
        _content = False

        @property
        def content(self) -> bytes:
            raise KeyboardInterrupt("it would read the stream")

        text = content

    for unread in (Unread(), Requests()):
        for outcome in (unread, SDKError(response=unread)):
            assert classify(outcome) == Refusal(kind="wait", status_code=429)


def test_an_outcome_that_is_neither_response_nor_exception() -> None:
    class Hostile:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    for outcome in (None, 5, "429", b"", {}, {"status_code": 429}, object(), Hostile(), Hostile):
        assert classify(outcome) is None
    for status in (None, True, "429", 4290, 0, -1, math.nan, object()):
        assert classify(SimpleNamespace(status_code=status, headers={})) is None


# -- what was never sent ----------------------------------------------------------------


def transport_error(name: str, *bases: str) -> Exception:
    """Told by name: no HTTP library needs to be installed for this."""
    ancestors: tuple[type, ...] = (Exception,)
    for base in reversed(bases):
        ancestors = (type(base, ancestors, {}),)
    error: Exception = type(name, ancestors, {})("refused")
    return error


@pytest.mark.parametrize(
    "error",
    [
        transport_error("ConnectError", "NetworkError", "TransportError"),
        transport_error("ConnectTimeout", "TimeoutException", "TransportError"),
        transport_error("PoolTimeout", "TimeoutException"),
        transport_error("UnsupportedProtocol", "TransportError"),
        transport_error("ClientConnectorDNSError", "ClientConnectorError"),
        ConnectionRefusedError("refused"),
        socket.gaierror("refused"),
        RequestTooLarge("refused"),
        NoReplica("refused"),
        QueueFull("refused"),
        WaitTimeout("refused"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("chain", [[], ["__cause__"], ["__cause__", "__context__"]])
def test_what_was_never_sent(error: Exception, chain: list[str]) -> None:
    for link in chain:
        wrapper = SDKError(status_code=None, body=None)
        setattr(wrapper, link, error)
        error = wrapper
    assert classify(error) == Refusal(kind="unsent", message="refused")


def test_what_a_limiter_refused_says_when_to_come_back() -> None:
    refusal = classify(WaitTimeout("no room", retry_after=4.5))
    assert refusal == Refusal(kind="unsent", retry_after=4.5, message="no room")


def test_what_broke_after_it_was_sent_is_no_refusal() -> None:
    """Also where an earlier attempt could not connect."""
    for error in (
        transport_error("ReadTimeout", "TimeoutException", "TransportError"),
        transport_error("RemoteProtocolError", "ProtocolError"),
    ):
        error.__context__ = transport_error("ConnectError", "TransportError")
        wrapper = SDKError()
        wrapper.__cause__ = error
        assert classify(error) is classify(wrapper) is None


def test_a_suppressed_context_is_not_looked_at() -> None:
    error = SDKError()
    error.__context__ = ConnectionRefusedError()
    error.__suppress_context__ = True
    assert classify(error) is None


def test_a_circular_chain_ends() -> None:
    one, two = SDKError(), SDKError()
    one.__cause__, two.__cause__ = two, one
    assert classify(one) is None


def test_a_cancellation_is_no_refusal() -> None:
    error = KeyboardInterrupt()
    error.__cause__ = ConnectionRefusedError()
    assert classify(error) is None


@pytest.mark.anyio
async def test_a_cancelled_call_is_no_refusal() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.cancel_scope.cancel()
        with pytest.raises(anyio.get_cancelled_exc_class()) as caught:
            await anyio.lowlevel.checkpoint()
    caught.value.__cause__ = ConnectionRefusedError()
    assert classify(caught.value) is None


def test_an_error_without_words() -> None:
    class Wordless(ConnectionRefusedError):
        def __str__(self) -> str:
            raise RuntimeError

    assert classify(Wordless()) == Refusal(kind="unsent")


# -- whatever comes -----------------------------------------------------------------

NAMES = [
    name
    for headers, _ in HEADERS.values()
    for name in (headers if isinstance(headers, dict) else dict(headers))  # type: ignore[call-overload]
]
names = st.sampled_from([*NAMES, "retry-after", "retry-after-ms", "date", "x-should-retry"])
texts = st.one_of(
    st.text(max_size=30),
    st.binary(max_size=30),
    st.from_regex(r"-?\d{0,25}(\.\d{0,25})?(ms|[smhd])?", fullmatch=True),
    st.from_regex(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|[+-]\d\d:\d\d)", fullmatch=True),
    st.from_regex(r"[A-Z][a-z]{2}, \d{1,2} (Oct|Nov) \d{1,6} \d\d:\d\d:\d\d [A-Z+-]{1,5}"),
    st.floats().map(str),
    st.integers(),
    st.floats(),
    st.none(),
)
pairs = st.lists(st.tuples(st.one_of(names, texts), texts), max_size=8)
leaves = st.one_of(texts, st.sampled_from([OPENAI_TEXT, TOO_LARGE, "limit: 0", "per day"]))
keys = st.sampled_from(
    ["error", "Error", "message", "code", "type", "details", "violations", "quotaId", "retryDelay"]
)
bodies = st.one_of(
    st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4)
    ),
    st.binary(max_size=50),
)


def is_sane(number: float | None) -> bool:
    return number is None or 0 <= number < math.inf


@given(headers=st.one_of(pairs, pairs.map(dict), bodies), body=bodies, age=st.floats())
def test_any_headers_and_body_are_read_without_an_error(
    headers: object, body: object, age: float
) -> None:
    status = read_status(headers, body, age=age)
    assert is_sane(status.retry_after)
    assert is_sane(status.age)
    for quota in status.quotas:
        for number in (quota.per, quota.limit, quota.remaining, quota.reset):
            assert is_sane(number)
        assert type(quota.limit) in (int, type(None))
        assert type(quota.remaining) in (int, type(None))


@given(status=st.one_of(st.sampled_from([400, 429, 503]), st.integers(), texts), data=st.data())
def test_any_outcome_is_judged_without_an_error(status: object, data: st.DataObject) -> None:
    attributes = {"status_code": status, "headers": data.draw(pairs), "body": data.draw(bodies)}
    for outcome in (
        SimpleNamespace(**attributes),
        SDKError(**attributes),
        SDKError(response=SimpleNamespace(**attributes)),
        SDKError(response={"ResponseMetadata": data.draw(bodies), "Error": data.draw(bodies)}),
    ):
        refusal = classify(outcome)
        assert refusal is None or is_sane(refusal.retry_after)
