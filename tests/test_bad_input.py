"""Nonsense is refused before anything changes, with a message that names the value and the rule."""

import copy
import math
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import anyio
import pytest
from _pytest.mark import ParameterSet

from tokenflow import (
    BatchError,
    FairShare,
    Fifo,
    NoReplica,
    QueueFull,
    Quota,
    QuotaStatus,
    RateLimitStatus,
    Request,
    RequestTooLarge,
    SmallestFirst,
    TokenflowError,
    TokenLimits,
    TokenRateLimiter,
    TokenSemaphore,
    Usage,
    WaitTimeout,
)
from tokenflow.limits import InFlightGate, WindowGate

pytestmark = pytest.mark.anyio

NOT_COUNTS = [True, 1.0, "5", b"5", [], math.nan, math.inf]
NEGATIVE = [-1]
NOT_SECONDS = [True, "5", []]
SENSELESS_SECONDS = [-1, -0.5, math.nan]


def titled(value: object) -> str:
    return repr(value)[:60]


def table(rows: Iterable[tuple[Any, ...]]) -> list[ParameterSet]:
    """Rows whose first or last string is their name."""
    named = [(next(c for c in (row[0], row[-1]) if isinstance(c, str)), row) for row in rows]
    return [pytest.param(*row, id=f"{n}: {name}") for n, (name, row) in enumerate(named)]


# -- constructors -----------------------------------------------------------------------------

COUNTS: list[tuple[str, Callable[[Any], object]]] = [
    ("max_tokens", TokenSemaphore),
    ("max_requests", lambda n: TokenSemaphore(10, max_requests=n)),
    ("max_waiting", lambda n: TokenSemaphore(10, max_waiting=n)),
    ("max_waiting", lambda n: TokenRateLimiter(tokens_per_minute=10, max_waiting=n)),
    ("max_waiting", lambda n: TokenLimits(max_waiting=n)),
    ("limit", Quota),
    ("burst", lambda n: Quota(10, burst=n)),
    ("tokens_per_minute", lambda n: TokenRateLimiter(tokens_per_minute=n)),
    ("requests_per_minute", lambda n: TokenRateLimiter(requests_per_minute=n)),
    ("input_tokens_per_minute", lambda n: TokenRateLimiter(input_tokens_per_minute=n)),
    ("output_tokens_per_minute", lambda n: TokenRateLimiter(output_tokens_per_minute=n)),
    ("limit", WindowGate),
    ("input_tokens", lambda n: Usage(input_tokens=n)),
    ("output_tokens", lambda n: Usage(output_tokens=n)),
    ("cached_tokens", lambda n: Usage(input_tokens=9, cached_tokens=n)),
    ("cache_write_tokens", lambda n: Usage(input_tokens=9, cache_write_tokens=n)),
    ("requests", lambda n: Usage(requests=n)),
    ("max_output_tokens", lambda n: Usage(max_output_tokens=n)),
    ("input_tokens", lambda n: Request(input_tokens=n)),
    ("max_output_tokens", lambda n: Request(input_tokens=1, max_output_tokens=n)),
    ("choices", lambda n: Request(input_tokens=1, choices=n)),
]
AT_LEAST_ONE: list[tuple[str, Callable[[Any], object]]] = [
    ("limit", Quota),
    ("tokens_per_minute", lambda n: TokenRateLimiter(tokens_per_minute=n)),
    ("requests_per_minute", lambda n: TokenRateLimiter(requests_per_minute=n)),
    ("burst", lambda n: Quota(10, burst=n)),
    ("choices", lambda n: Request(input_tokens=1, choices=n)),
]
SECONDS: list[tuple[str, Callable[[Any], object]]] = [
    ("per", lambda s: Quota(10, per=s)),
    ("leeway", lambda s: Quota(10, leeway=s)),
    ("patience", SmallestFirst),
    ("lane_seconds", lambda s: SmallestFirst(lane_seconds=s)),
    ("lane_seconds", lambda s: Fifo(lane_seconds=s)),
]


@pytest.mark.parametrize("value", [*NOT_COUNTS, *NEGATIVE], ids=titled)
@pytest.mark.parametrize(("name", "build"), table(COUNTS))
def test_a_count_is_an_int_of_zero_or_more(
    name: str, build: Callable[[Any], object], value: Any
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        build(value)
    assert caught.type is (ValueError if value in NEGATIVE else TypeError)
    assert f"{name} must be" in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("limit", [True, -1, 1.5, math.nan, "5", None], ids=titled)
def test_a_gates_limit_is_an_int_or_infinite(limit: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"limit must be .*{limit}"):
        InFlightGate(limit)
    assert InFlightGate(math.inf).ready_at(10**9, 0.0) == 0.0


@pytest.mark.parametrize(("name", "build"), table(AT_LEAST_ONE))
def test_zero_where_it_would_mean_none_at_all(name: str, build: Callable[[Any], object]) -> None:
    """graphrag 367, 490: a limit parsed to 0 never silently means unlimited."""
    with pytest.raises(ValueError, match=f"{name} must be an int >= 1, not 0"):
        build(0)


@pytest.mark.parametrize("build", [TokenSemaphore, Quota, WindowGate])
def test_no_limit_is_not_no_number(build: Callable[[Any], object]) -> None:
    """graphrag 367, 490: nor does None."""
    with pytest.raises(TypeError, match=r"must be an int >= .*not None"):
        build(None)


@pytest.mark.parametrize("value", [*NOT_SECONDS, *SENSELESS_SECONDS, math.inf], ids=titled)
@pytest.mark.parametrize(("name", "build"), table(SECONDS))
def test_a_time_is_a_finite_number_of_seconds(
    name: str, build: Callable[[Any], object], value: Any
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        build(value)
    assert caught.type is (TypeError if value in NOT_SECONDS else ValueError)
    assert f"{name} must be a" in str(caught.value)
    assert repr(value) in str(caught.value)


SETTINGS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: Quota(10, per=0), ValueError, "per must be more than 0 seconds, not 0"),
    (lambda: Quota(10, by="user"), ValueError, "by must be .*'user'"),  # type: ignore[arg-type]
    (lambda: Quota(10, of="token"), ValueError, "of must be one of 'tokens'.* not 'token'"),
    (lambda: Quota(10, of=5), (TypeError, ValueError), "of must be .* not 5"),  # type: ignore[arg-type,list-item]
    (lambda: Quota(10, of=None), (TypeError, ValueError), "of must be .* not None"),  # type: ignore[arg-type,list-item]
    (lambda: Quota(10, settle="never"), ValueError, "settle must be .*'never'"),  # type: ignore[arg-type]
    (lambda: Quota(10, name=5), TypeError, "name must be .*5"),  # type: ignore[arg-type]
    (TokenRateLimiter, ValueError, "without a quota limits nothing: pass tokens_per_minute"),
    (lambda: TokenRateLimiter(10), TypeError, r"Quota\(...\) objects, not 10"),  # type: ignore[arg-type]
    (lambda: TokenRateLimiter(Quota), TypeError, r"Quota\(...\) objects"),  # type: ignore[arg-type]
    (lambda: TokenLimits(10), TypeError, "limiters, gates and providers, not 10"),  # type: ignore[arg-type]
    (lambda: TokenLimits(None), TypeError, "limiters, gates and providers, not None"),  # type: ignore[arg-type]
    (lambda: TokenLimits([TokenSemaphore(1)]), TypeError, "limiters, gates and providers"),  # type: ignore[arg-type]
    (lambda: TokenLimits(TokenSemaphore), TypeError, "limiters, gates and providers"),  # type: ignore[arg-type]
    (lambda: TokenLimits(InFlightGate), TypeError, "limiters, gates and providers"),  # type: ignore[arg-type]
    (lambda: InFlightGate(10, of="token"), ValueError, "of must be .*'token'"),
    (lambda: FairShare({"a": 0}), ValueError, "weight of 'a' must be > 0 .*not 0"),
    (lambda: FairShare({"a": -1}), ValueError, "weight of 'a' must be > 0 .*not -1"),
    (lambda: FairShare({"a": math.nan}), ValueError, "weight of 'a' .*not nan"),
    (lambda: FairShare({"a": math.inf}), ValueError, "weight of 'a' .*not inf"),
    (lambda: FairShare({"a": True}), TypeError, "weight of 'a' must be a number, not True"),
    (lambda: FairShare({"a": "3"}), TypeError, "weight of 'a' must be a number, not '3'"),  # type: ignore[dict-item]
    (lambda: FairShare(3), TypeError, "weights must be .*3"),  # type: ignore[arg-type]
    (lambda: Fifo(backfill="no"), TypeError, "backfill must be .*'no'"),  # type: ignore[arg-type]
    (
        lambda: Usage(input_tokens=5, cached_tokens=4, cache_write_tokens=2),
        ValueError,
        "cached_tokens .* = 6 exceeds input_tokens = 5: both are parts",
    ),
]
for _limiter in (
    lambda **settings: TokenSemaphore(10, **settings),
    lambda **settings: TokenRateLimiter(tokens_per_minute=10, **settings),
    lambda **settings: TokenLimits(**settings),
):
    SETTINGS += [
        (lambda f=_limiter: f(oversize="allow"), ValueError, "oversize must be .*'allow'"),  # type: ignore[misc]
        (lambda f=_limiter: f(oversize=None), ValueError, "oversize must be .*None"),  # type: ignore[misc]
        (lambda f=_limiter: f(order="fifo"), TypeError, r"order must be Fifo\(\).*'fifo'"),  # type: ignore[misc]
        (lambda f=_limiter: f(order=None), TypeError, r"order must be Fifo\(\).*None"),  # type: ignore[misc]
        (lambda f=_limiter: f(order=Fifo), TypeError, r"order must be Fifo\(\).*Fifo"),  # type: ignore[misc]
    ]


@pytest.mark.parametrize(("build", "error", "message"), table(SETTINGS))
def test_a_setting_that_makes_no_sense(
    build: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build()


# -- calls ------------------------------------------------------------------------------------


class Scene:
    """A limiter of each kind, in use, so that whatever a refused call changed would show."""

    def __init__(self) -> None:
        self.semaphore = TokenSemaphore(100, max_requests=10)
        self.limiter = TokenRateLimiter(
            Quota(1_000, name="mine"), Quota(50, of="requests"), order=FairShare()
        )
        self.tenants = TokenRateLimiter(Quota(1_000, by="tenant"))
        self.split = TokenRateLimiter(input_tokens_per_minute=1_000, requests_per_minute=9)
        self.limits = TokenLimits(self.semaphore, self.limiter, self.tenants)
        self.lease = self.limits.acquire_nowait(40)

    def state(self) -> object:
        limiters = (self.limits, self.limiter, self.tenants, self.split)
        return [limiter.statistics() for limiter in limiters], self.lease.usage, repr(self.lease)

    @property
    def each(self) -> list[TokenSemaphore | TokenRateLimiter | TokenLimits]:
        return [self.semaphore, self.limiter, self.tenants, self.limits]


NUMBERS: list[tuple[str, Callable[[Scene, Any], object]]] = [
    ("cost", lambda s, n: [x.acquire_nowait(n) for x in s.each[:1]]),
    ("cost", lambda s, n: s.limiter.acquire_nowait(n)),
    ("cost", lambda s, n: s.limits.acquire_nowait(n)),
    ("cost", lambda s, n: s.limits.delay(n)),
    ("usage", lambda s, n: s.lease.progress(n)),
    ("actual", lambda s, n: s.lease.reconcile(n)),
    ("max_tokens", lambda s, n: setattr(s.semaphore, "max_tokens", n)),
    ("max_requests", lambda s, n: setattr(s.semaphore, "max_requests", n)),
    ("limit", lambda s, n: s.limiter.set_limit("mine", n)),
]


@pytest.mark.parametrize("value", [*NOT_COUNTS, *NEGATIVE], ids=titled)
@pytest.mark.parametrize(("name", "call"), table(NUMBERS))
def test_a_refused_number_changes_nothing(
    name: str, call: Callable[[Scene, Any], object], value: Any
) -> None:
    scene = Scene()
    with scene.lease:
        before = scene.state()
        with pytest.raises((TypeError, ValueError)) as caught:
            call(scene, value)
        assert caught.type is (ValueError if value in NEGATIVE else TypeError)
        assert f"{name} must be an int >= 0, not {value!r}" in str(caught.value)
        assert scene.state() == before


@pytest.mark.parametrize(
    ("call", "error", "message"),
    table(
        [
            (lambda s: s.semaphore.acquire_nowait(None), TypeError, "cost .*None"),
            (lambda s: s.lease.reconcile(None), TypeError, "actual .*None.*Usage.from_response"),
            (lambda s: s.semaphore.acquire_nowait(101), RequestTooLarge, "101 .*at most 100"),
            (lambda s: s.limits.acquire_nowait(101), RequestTooLarge, "101 .*at most 100"),
            (lambda s: s.limiter.acquire_nowait(1_001), RequestTooLarge, "1,001 .*at most 1,000"),
            (lambda s: s.limits.delay(101), RequestTooLarge, "101"),
            (lambda s: s.split.acquire_nowait(7), TypeError, r"pass Usage\(input_tokens=7"),
            (lambda s: s.split.delay(7), TypeError, r"pass Usage\(input_tokens=7"),
            (lambda s: s.limiter.set_limit("their", 5), ValueError, "'their'.*'mine', 'requests'"),
            (lambda s: s.limiter.set_limit(None, 5), (TypeError, ValueError), "None"),
            (lambda s: s.limiter.set_limit("mine", None), TypeError, "limit .*None"),
            (lambda s: setattr(s.semaphore, "max_tokens", None), TypeError, "max_tokens .*None"),
            (lambda s: s.limiter.pause("5"), TypeError, "seconds .*'5'"),
            (lambda s: s.limiter.pause(None), TypeError, "seconds .*None"),
            (lambda s: s.limiter.pause(True), TypeError, "seconds .*True"),
            (lambda s: s.limiter.pause(-1), ValueError, "seconds .*-1"),
            (lambda s: s.limiter.pause(math.nan), ValueError, "seconds .*nan"),
            (lambda s: s.limiter.pause(math.inf), ValueError, "seconds .*inf"),
            (lambda s: s.limiter.observe(None), TypeError, "RateLimitStatus.*None"),
            (
                lambda s: s.limiter.observe({"remaining": 5}),
                TypeError,
                "RateLimitStatus.*remaining",
            ),
            (lambda s: s.tenants.acquire_nowait(1, tenant=[]), TypeError, "unhashable"),
            (lambda s: s.limits.acquire_nowait(1, tenant={}), TypeError, "unhashable"),
            (lambda s: s.limiter.acquire_nowait(1, tenant=[]), TypeError, "unhashable"),
            (
                lambda s: s.semaphore.acquire_nowait(1, priority="high"),
                TypeError,
                "priority .*'high'",
            ),
            (lambda s: s.semaphore.acquire_nowait(1, priority=None), TypeError, "priority .*None"),
            (
                lambda s: s.semaphore.acquire_nowait(99, priority="high"),
                TypeError,
                "priority .*'high'",
            ),
        ]
    ),
)
def test_a_refused_call_changes_nothing(
    call: Callable[[Scene], object], error: type[Exception], message: str
) -> None:
    scene = Scene()
    with scene.lease:
        before = scene.state()
        with pytest.raises(error, match=message):
            call(scene)
        assert scene.state() == before


@pytest.mark.parametrize("cost", [5, 80], ids=["would go at once", "would wait"])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_wait": "5"}, TypeError),
        ({"max_wait": True}, TypeError),
        ({"max_wait": -1}, ValueError),
        ({"max_wait": math.nan}, ValueError),
        ({"priority": "high"}, TypeError),
        ({"priority": None}, TypeError),
        ({"priority": 1.5}, TypeError),
        ({"priority": math.nan}, TypeError),
    ],
    ids=titled,
)
async def test_a_refused_option_changes_nothing(
    options: dict[str, Any], error: type[Exception], cost: int
) -> None:
    scene = Scene()
    (name, value), *_ = options.items()
    with scene.lease:
        before = scene.state()
        for limiter in (scene.semaphore, scene.limits):
            with pytest.raises(error, match=rf"{name} must be .*{value}"), anyio.fail_after(1):
                (await limiter.acquire(cost, **options)).release()
            with pytest.raises(error, match=rf"{name} must be .*{value}"), anyio.fail_after(1):
                async with limiter.reserve(cost, **options):
                    pass
        assert scene.state() == before


@pytest.mark.parametrize(
    "status",
    [
        QuotaStatus(of="tokens", limit=0),
        QuotaStatus(of="tokens", limit=-5),
        QuotaStatus(of="tokens", limit=500.5),  # type: ignore[arg-type]
        QuotaStatus(of="tokens", limit=True),
        QuotaStatus(of="tokens", limit=math.nan),  # type: ignore[arg-type]
        QuotaStatus(of="tokens", limit="500"),  # type: ignore[arg-type]
        QuotaStatus(of="tokens", remaining=-1),
        QuotaStatus(of="tokens", remaining=1.5),  # type: ignore[arg-type]
        QuotaStatus(of="tokens", remaining=math.nan),  # type: ignore[arg-type]
        QuotaStatus(of="tokens", remaining="many"),  # type: ignore[arg-type]
        QuotaStatus(of="tokens", limit=500, remaining="many"),  # type: ignore[arg-type]
        QuotaStatus(of="tokens", remaining=5_000),
        QuotaStatus(of="unheard of", remaining=0),
        QuotaStatus(of="tokens", per=3_600, remaining=0),
    ],
    ids=titled,
)
def test_what_makes_no_sense_in_an_observation_is_ignored(status: QuotaStatus) -> None:
    """A server's header must not break, or stop, the calls of a client."""
    limiter = TokenRateLimiter(tokens_per_minute=1_000)
    with limiter.acquire_nowait(100):
        before = limiter.statistics().quotas[0].used
        limiter.observe(RateLimitStatus(quotas=(status,)))
        quota = limiter.statistics().quotas[0]
        assert (quota.used, type(quota.limit)) == (before, int)
        assert quota.limit == (500 if status.limit == 500 else 1_000)


@pytest.mark.parametrize("retry_after", [-1, 0, math.nan, math.inf])
def test_a_senseless_retry_after_is_ignored(retry_after: float) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=1_000)
    limiter.observe(RateLimitStatus(retry_after=retry_after))
    assert limiter.delay(1_000) == 0


@pytest.mark.parametrize("reset", [-1, math.nan, math.inf, "soon"], ids=titled)
def test_a_senseless_reset_means_a_whole_window(reset: Any) -> None:
    limiter = TokenRateLimiter(tokens_per_minute=1_000)
    limiter.observe(RateLimitStatus(quotas=(QuotaStatus(of="tokens", remaining=0, reset=reset),)))
    assert limiter.delay(1) == pytest.approx(60, abs=1)


def test_a_name_that_two_quotas_share_is_ambiguous() -> None:
    limiter = TokenRateLimiter(Quota(10), Quota(100, per=3_600))
    before = limiter.statistics().quotas
    with pytest.raises(ValueError, match=r"2 quotas are called 'tokens': give each its own name"):
        limiter.set_limit("tokens", 5)
    assert [quota.limit for quota in limiter.statistics().quotas] == [
        quota.limit for quota in before
    ]


@pytest.mark.parametrize("result", [-1, 1.5, None, True, "5"], ids=titled)
def test_a_cost_function_that_returns_no_count_is_named(result: Any) -> None:
    def price(usage: Usage) -> int:
        return result  # type: ignore[no-any-return]

    limiter = TokenRateLimiter(Quota(10, of=price))
    with pytest.raises((TypeError, ValueError), match=r"the result of price\(usage\) must be"):
        limiter.acquire_nowait(Usage(input_tokens=1))
    assert limiter.statistics().quotas[0].used == 0


# -- pickling ---------------------------------------------------------------------------------

COPIES: list[Callable[[Any], Any]] = [
    lambda value: pickle.loads(pickle.dumps(value)),
    lambda value: pickle.loads(pickle.dumps(value, protocol=2)),
    copy.copy,
    copy.deepcopy,
]
copies = pytest.mark.parametrize("copied", COPIES, ids=["pickle", "pickle 2", "copy", "deepcopy"])


@copies
@pytest.mark.parametrize(
    ("error", "attributes", "bases"),
    [
        (TokenflowError("m"), {}, (Exception,)),
        (RequestTooLarge("m", cost=8, limit=7), {"cost": 8, "limit": 7}, (ValueError,)),
        (WaitTimeout("m", retry_after=1.5), {"retry_after": 1.5}, (TimeoutError,)),
        (WaitTimeout("m", retry_after=None), {"retry_after": None}, (TimeoutError,)),
        (QueueFull("m", retry_after=2.5), {"retry_after": 2.5}, (Exception,)),
        (NoReplica("m", largest=9), {"largest": 9}, (Exception,)),
        (BatchError("m"), {}, (Exception,)),
    ],
    ids=titled,
)
def test_errors_pickle_with_their_attributes(
    error: TokenflowError,
    attributes: dict[str, Any],
    bases: tuple[type[Exception], ...],
    copied: Callable[[Any], Any],
) -> None:
    again = copied(error)
    assert type(again) is type(error)
    assert str(again) == "m"
    assert vars(again) == attributes
    assert isinstance(again, (TokenflowError, *bases))


@copies
async def test_errors_as_they_are_raised_pickle(copied: Callable[[Any], Any]) -> None:
    semaphore = TokenSemaphore(10, max_waiting=0)
    with semaphore.acquire_nowait(10):
        for cost, error in [(11, RequestTooLarge), (5, QueueFull)]:
            with pytest.raises(error) as caught:
                await semaphore.acquire(cost)
            again = copied(caught.value)
            assert (str(again), vars(again)) == (str(caught.value), vars(caught.value))


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    "limiter",
    [TokenSemaphore(1), TokenRateLimiter(tokens_per_minute=1), TokenLimits()],
    ids=lambda limiter: type(limiter).__name__,
)
def test_limiters_refuse_to_be_pickled(limiter: object, copied: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=rf"{type(limiter).__name__} .*whole quota.*each process"):
        copied(limiter)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_leases_refuse_to_be_pickled(copied: Callable[[object], object]) -> None:
    with (
        TokenSemaphore(1).acquire_nowait(1) as lease,
        pytest.raises(TypeError, match=r"lease cannot be pickled.*given back exactly once"),
    ):
        copied(lease)


@copies
@pytest.mark.parametrize(
    "value",
    [
        Usage(input_tokens=9, output_tokens=3, cached_tokens=4, requests=2, max_output_tokens=5),
        Request(input_tokens=9, task="chat", choices=3),
        Quota(10, per=3, of="requests", by="tenant", burst=4, settle="reserved", leeway=1),
        QuotaStatus(of="tokens", limit=5, reset=1.5),
        RateLimitStatus(quotas=(QuotaStatus(of="tokens"),), retry_after=3),
        TokenSemaphore(5).statistics(),
        TokenRateLimiter(tokens_per_minute=10).statistics(),
        TokenLimits(TokenSemaphore(5)).statistics(),
    ],
    ids=titled,
)
def test_values_pickle_and_compare(value: Any, copied: Callable[[Any], Any]) -> None:
    again = copied(value)
    assert again == value
    assert hash(again) == hash(value)
    assert repr(again) == repr(value)


# -- usage ------------------------------------------------------------------------------------


def test_usages_add_up() -> None:
    one = Usage(input_tokens=900, output_tokens=80, cached_tokens=500, max_output_tokens=100)
    two = Usage(input_tokens=100, cache_write_tokens=50, requests=3, max_output_tokens=7)
    both = Usage(
        input_tokens=1_000,
        output_tokens=80,
        cached_tokens=500,
        cache_write_tokens=50,
        requests=4,
        max_output_tokens=107,
    )
    assert one + two == two + one == sum([one, two]) == both
    assert both.total_tokens == 1_080
    assert sum([one]) is one
    assert (one + Usage()).max_output_tokens is None
    assert (Usage(max_output_tokens=0) + Usage(max_output_tokens=0)).max_output_tokens == 0


@pytest.mark.parametrize("other", [1, 1.5, None, "1", (1,)], ids=titled)
def test_a_usage_adds_to_nothing_else(other: Any) -> None:
    with pytest.raises(TypeError):
        Usage() + other
    with pytest.raises(TypeError):
        other + Usage()


@pytest.mark.parametrize(
    ("usage", "shown"),
    [
        (Usage(), "Usage()"),
        (Usage(input_tokens=5), "Usage(input_tokens=5)"),
        (Usage(requests=0), "Usage(requests=0)"),
        (Usage(requests=2, max_output_tokens=0), "Usage(requests=2, max_output_tokens=0)"),
        (
            Usage(input_tokens=5, output_tokens=1, cached_tokens=2, cache_write_tokens=3),
            "Usage(input_tokens=5, output_tokens=1, cached_tokens=2, cache_write_tokens=3)",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_usages_repr_is_how_to_make_it(usage: Usage, shown: str) -> None:
    assert repr(usage) == shown
    assert eval(shown, {"Usage": Usage}) == usage


def test_usages_are_values() -> None:
    usage = Usage(input_tokens=5)
    assert usage == Usage(input_tokens=5, requests=1)
    assert usage != Usage(input_tokens=5, requests=2)
    assert len({usage, Usage(input_tokens=5), Usage(output_tokens=5)}) == 2
    with pytest.raises(AttributeError):
        usage.input_tokens = 6  # type: ignore[misc]
    with pytest.raises(TypeError):
        Usage(5)  # type: ignore[call-arg]


def test_an_object_that_is_an_index_counts_as_its_int() -> None:
    """As the integers of numpy are."""

    class Five:
        def __index__(self) -> int:
            return 5

    five: Any = Five()
    assert type(Usage(input_tokens=five, max_output_tokens=five).input_tokens) is int
    semaphore = TokenSemaphore(five)
    with semaphore.acquire_nowait(five) as lease:
        assert (semaphore.statistics().tokens_in_flight, lease.usage) == (5, 5)
        lease.reconcile(five)
        assert type(semaphore.statistics().tokens_in_flight) is int


def test_a_requests_content_never_shows() -> None:
    request = Request(input_tokens=5, content="secret")
    assert "secret" not in repr(request)
    assert request == Request(input_tokens=5, content="other")
