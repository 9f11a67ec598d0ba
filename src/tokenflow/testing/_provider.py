"""The provider: quotas at the door, then an answer that takes its time.

All that one event decides is decided in one synchronous step: at arrival, at
each chunk, at the end. `_answer` waits between them.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import ModuleType
from typing import Any, Final, Self, TypeAlias, TypedDict, final
from zlib import crc32

import anyio
from typing_extensions import Unpack

from tokenflow._usage import Usage, finite_seconds, positive_int, positive_seconds, token_count

from ._answer import Answer, Booking, Pace, Piece, kept_alive, streamed, whole
from ._asgi import Message, Receive, Send, lifespan, serve
from ._calls import FakeCall, FakeStatistics, Outcome
from ._dialects import DIALECTS, DialectName, Headers, Reply
from ._door import Door
from ._faults import Fault, Faults
from ._quota import Counts, FakeQuota, Level, Unit
from ._request import Body, FakeRequest, Invalid, approximate_tokens, read_request
from ._shapes import SHAPES, Generation, Shape, StreamShape
from ._transport import transport

__all__ = ["FakeProvider", "FakeSettings", "Sample", "lognormal"]

Sample: TypeAlias = float | Callable[[FakeRequest], float]

_JSON: Final = ("content-type", "application/json")
_SSE: Final = ("content-type", "text/event-stream; charset=utf-8")


def lognormal(median: float, sigma: float = 0.8) -> Sample:
    """Values that vary by request: half are below `median`, 1 in 6 above median x e^sigma.

    >>> output = lognormal(200)
    """
    return lambda request: request.random.lognormvariate(math.log(median), sigma)


_USUAL_OUTPUT: Final = lognormal(200)


class FakeSettings(TypedDict, total=False):
    """What every constructor of `FakeProvider` takes; described there."""

    output: Sample
    first_token_seconds: Sample
    tokens_per_second: Sample
    tokens_per_chunk: int
    max_output_tokens: int
    count_tokens: Callable[[Body], int]
    cached_tokens: Callable[[FakeRequest], int]
    faults: Faults
    keep_alive_seconds: float | None
    seed: int
    unix_time: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    output: Sample = _USUAL_OUTPUT
    first_token_seconds: Sample = 0.5
    tokens_per_second: Sample = 50.0
    tokens_per_chunk: int = 1
    max_output_tokens: int = 4_096
    count_tokens: Callable[[Body], int] = approximate_tokens
    cached_tokens: Callable[[FakeRequest], int] = lambda request: 0
    faults: Faults = lambda request: None
    keep_alive_seconds: float | None = None
    seed: int = 0
    unix_time: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        positive_int(self.tokens_per_chunk, "tokens_per_chunk")
        positive_int(self.max_output_tokens, "max_output_tokens")
        if self.keep_alive_seconds is not None:
            positive_seconds(self.keep_alive_seconds, "keep_alive_seconds")

    def pace(self, request: FakeRequest) -> Pace:
        first = finite_seconds(_draw(self.first_token_seconds, request), "first_token_seconds")
        rate = positive_seconds(_draw(self.tokens_per_second, request), "tokens_per_second")
        return Pace(first, rate, self.tokens_per_chunk)

    def generation(self, request: FakeRequest, fault: Fault | None) -> Generation:
        declared = request.max_output_tokens
        most = self.max_output_tokens if declared is None else min(declared, self.max_output_tokens)
        wanted = [max(0, round(_draw(self.output, request))) for _ in range(request.choices)]
        return Generation(
            request=request,
            created=int(self.unix_time()),
            lengths=tuple(min(most, length) for length in wanted),
            truncated=tuple(length > most for length in wanted),
            hide_usage=fault is not None and fault.hide_usage,
        )


def _draw(sample: Sample, request: FakeRequest) -> float:
    return sample(request) if callable(sample) else sample


@final
class FakeProvider:
    """A language-model provider with real quota rules, for tests of what calls it.

    It is an ASGI app for any server, and without one a `transport` for httpx and httpx2.
    It answers as its `dialect` does, whatever model and key it is asked with, takes the
    time that generating takes, refuses by its quotas, and keeps books. It waits by the
    event loop's clock and runs on asyncio and trio, so that in virtual time an hour of
    traffic takes as long as computing it.

    >>> import anyio
    >>> async def main() -> None:
    ...     provider = FakeProvider.openai(rpm=1, output=20)
    ...     chat = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
    ...     for _ in range(2):
    ...         answer = await provider.respond("POST", "/v1/chat/completions", body=chat)
    ...         print(answer.status)
    >>> anyio.run(main)
    200
    429

    Args:
        quotas: A call has to pass them all, and is charged by all or, if refused, by none.
        dialect: Whose paths, headers and errors: "openai", "azure", "groq", "anthropic",
            or "vllm", who speaks both languages and tells of no limits.
        output: Tokens of an answer, or of each choice, unless the declared maximum cuts
            it off: a number, or a function of the request. By default `lognormal(200)`.
        first_token_seconds: Until the first token; a number or a function, as the next.
        tokens_per_second: From there on.
        tokens_per_chunk: In streams.
        max_output_tokens: What the model generates at most, and what "declared" and
            "settled" count for a call that declares nothing.
        count_tokens: Counts the input in a request's body.
        cached_tokens: How much of a request's input is read from the cache.
        faults: What else goes wrong with a request; None is nothing.
        keep_alive_seconds: Headers go out at once, and until the first token an empty
            line every so often, as from DeepSeek.
        seed: For all that varies.
        unix_time: The wall clock, for headers that tell a time of day.

    Raises:
        TypeError, ValueError: a setting that makes no sense, or two quotas of one name.
    """

    def __init__(
        self,
        *quotas: FakeQuota,
        dialect: DialectName = "openai",
        **settings: Unpack[FakeSettings],
    ) -> None:
        names = [quota.name for quota in quotas]
        if len(set(names)) < len(names):
            raise ValueError(f"quotas need names of their own, not {names}: set name=")
        if dialect not in DIALECTS:
            raise ValueError(f"dialect must be one of {tuple(DIALECTS)}, not {dialect!r}")
        self.quotas: tuple[FakeQuota, ...] = quotas
        self._name: str = dialect
        self._dialect = DIALECTS[dialect]
        self._settings = _Settings(**settings)
        self._door = Door(quotas, self._settings.max_output_tokens)
        self._calls: list[FakeCall] = []
        self._seen: Counter[int] = Counter()

    @classmethod
    def openai(
        cls,
        *,
        rpm: int | None = None,
        tpm: int | None = None,
        rpd: int | None = None,
        tpd: int | None = None,
        counts: Counts = "larger",
        **settings: Unpack[FakeSettings],
    ) -> Self:
        """Buckets, charged at arrival. A refused call still counts as a request."""
        quotas = (
            *_buckets("requests", rpm, rpd, counts_refused=True),
            *_buckets("tokens", tpm, tpd, counts=counts),
        )
        return cls(*quotas, dialect="openai", **settings)

    @classmethod
    def azure(cls, *, tpm: int, rpm: int | None = None, **settings: Unpack[FakeSettings]) -> Self:
        """For each deployment, sums: of tokens per minute, of requests per 10 seconds.

        Tokens are what a call declares, at arrival, and are not given back. `rpm` is 6 for
        each 1,000 of `tpm`, unless it is given.
        """
        requests = max(6, tpm * 6 // 1_000) if rpm is None else rpm
        quotas = (
            FakeQuota(requests, of="requests", rule="fixed", slices=6, by="model"),
            FakeQuota(tpm, rule="fixed", by="model"),
        )
        return cls(*quotas, dialect="azure", **settings)

    @classmethod
    def groq(
        cls,
        *,
        rpm: int | None = None,
        tpm: int | None = None,
        rpd: int | None = None,
        tpd: int | None = None,
        **settings: Unpack[FakeSettings],
    ) -> Self:
        """Buckets that are charged what was used, at the end, and so may go below 0."""
        quotas = (
            *_buckets("requests", rpm, rpd),
            *_buckets("tokens", tpm, tpd, counts="actual", free_cache=True),
        )
        return cls(*quotas, dialect="groq", **settings)

    @classmethod
    def anthropic(
        cls,
        *,
        rpm: int | None = None,
        itpm: int | None = None,
        otpm: int | None = None,
        counts: Counts = "produced",
        **settings: Unpack[FakeSettings],
    ) -> Self:
        """Buckets of requests, of input save cached reads, and of output as it is produced.

        With `counts="declared"` the declared maximum counts at arrival, as until 2025.
        """
        quotas = (
            *_buckets("requests", rpm),
            *_buckets("input_tokens", itpm, free_cache=True),
            *_buckets("output_tokens", otpm, counts=counts),
        )
        return cls(*quotas, dialect="anthropic", **settings)

    @classmethod
    def vllm(cls, *, max_requests: int, **settings: Unpack[FakeSettings]) -> Self:
        """At most so many requests at a time, as at vLLM, TGI and (kept alive) DeepSeek."""
        quota = FakeQuota(max_requests, of="requests", rule="concurrency")
        return cls(quota, dialect="vllm", **settings)

    async def respond(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | Body = b"",
    ) -> Answer:
        """Take one request, and return when the headers of its answer would be there.

        Whether it is admitted is decided before anything waits. The headers of a stream
        come with its first token, others when all is produced. Being cancelled here is
        the client's going away: of an answer that is no stream, what was produced in the
        full seconds until then counts.

        Raises:
            ConnectionDropped, ConnectionRefusedError: a fault said so.
        """
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        lower = {name.lower(): value for name, value in (headers or {}).items()}
        call = FakeCall(
            number=len(self._calls),
            path=path.partition("?")[0],
            arrived=anyio.current_time(),
        )
        self._calls.append(call)
        return await self._arrive(method, lower, raw, Booking(call)).until_headers()

    def _arrive(
        self, method: str, headers: Mapping[str, str], raw: bytes, booking: Booking
    ) -> Answer:
        try:
            request = self._read(method, headers, raw, booking.call)
            return self._judge(request, booking)
        except Invalid as error:
            body = self._dialect.error(error.status, str(error))
            return self._reply(Reply(error.status, [], body), (), booking)
        except BaseException:  # out of a function of the user's
            booking.end("failed", booking.call.arrived)
            raise

    def _read(
        self, method: str, headers: Mapping[str, str], raw: bytes, call: FakeCall
    ) -> FakeRequest:
        request = read_request(
            method,
            call.path,
            headers,
            raw,
            number=call.number,
            endpoints=self._dialect.endpoints,
            count_tokens=self._settings.count_tokens,
            random=self._random(raw),
        )
        cached = min(self._settings.cached_tokens(request), request.input_tokens)
        call.model, call.stream = request.model, request.stream
        call.input_tokens, call.cached_tokens = request.input_tokens, cached
        return replace(request, cached_tokens=cached)

    def _random(self, raw: bytes) -> Random:
        body = crc32(raw)
        self._seen[body] += 1
        return Random(f"{self._settings.seed} {body} {self._seen[body]}")

    def _judge(self, request: FakeRequest, booking: Booking) -> Answer:
        fault = booking.call.fault = self._settings.faults(request)
        shape = SHAPES[request.endpoint](self._settings.generation(request, fault))
        denial = None
        if request.endpoint != "models" and not (fault and fault.is_before_quotas):
            denial = self._door.admit(request, booking)
        levels = self._door.levels(request, booking.call.arrived)
        if denial is not None:
            booking.call.refused_by = denial.quota.name
            return self._reply(self._dialect.refusal(request.model, denial), levels, booking)
        if fault and fault.status:
            return self._reply(self._dialect.failure(fault, fault.status), levels, booking)
        return self._generate(shape, levels, booking)

    def _generate(self, shape: Shape, levels: Sequence[Level], booking: Booking) -> Answer:
        pace = self._settings.pace(shape.request)
        if shape.request.stream and isinstance(shape, StreamShape):
            pieces, kind, empty = streamed(shape, pace), _SSE, b": keep-alive\n\n"
        else:
            pieces, kind, empty = whole(shape, pace), _JSON, b"\n"
        if every := self._settings.keep_alive_seconds:
            pieces = kept_alive(pieces, every, empty)
        headers = [kind, *self._headers(levels, booking.call)]
        return Answer(200, headers, pieces, booking, "completed")

    def _reply(self, reply: Reply, levels: Sequence[Level], booking: Booking) -> Answer:
        """An answer that is there at once: a refusal or an error."""
        body = json.dumps(reply.body).encode()
        pieces = (Piece(0.0, None, ends=True), Piece(0.0, body))
        headers = [_JSON, *self._headers(levels, booking.call), *reply.headers]
        outcome: Outcome = "refused" if reply.is_refusal else "failed"
        return Answer(reply.status, headers, pieces, booking, outcome)

    def _headers(self, levels: Sequence[Level], call: FakeCall) -> Headers:
        limits = self._dialect.limit_headers(levels, self._settings.unix_time())
        return [(self._dialect.request_id, f"req_{call.number}"), *limits]

    def consume(self, usage: Usage | int, *, model: str = "", key: str = "") -> None:
        """Charge what another client uses right now, as far as there is room for it.

        An int is the input of one request. `model` and `key` say whose quotas, where
        they are kept apart.
        """
        if not isinstance(usage, Usage):
            usage = Usage(input_tokens=token_count(usage, "usage"))
        self._door.consume(usage, model, key, anyio.current_time())

    async def foreign_traffic(
        self, share: float, *, every: float = 1.0, model: str = "", key: str = ""
    ) -> None:
        """Consume this share of all quotas, bit by bit each `every` seconds, until cancelled.

        For a task of its own: `tasks.start_soon(provider.foreign_traffic, 0.3)`.

        Raises:
            ValueError: a share that is not from 0 to 1, a time that makes no sense.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1, not {share!r}")
        seconds = positive_seconds(every, "every")
        while True:
            await anyio.sleep(seconds)
            self._door.consume_share(share, seconds, model, key, anyio.current_time())

    @property
    def calls(self) -> tuple[FakeCall, ...]:
        """The books: all calls in order of arrival, as they stand."""
        return tuple(call.copy() for call in self._calls)

    def worst_window(self, name: str, seconds: float | None = None) -> int:
        """The most that the quota of this name was charged in any `seconds`, or in its period.

        Of one model or key, where it keeps them apart; without other clients' traffic.
        By rights a bucket can be charged twice its limit in one period, and no more.
        """
        return self._door.worst_window(name, seconds)

    def statistics(self) -> FakeStatistics:
        """Sums over all calls so far."""
        outcomes = Counter(call.outcome for call in self._calls)
        admitted = [call for call in self._calls if call.outcome != "refused"]
        charged = Counter({quota.name: 0 for quota in self.quotas})
        for call in self._calls:
            charged.update(call.charged)
        return FakeStatistics(
            calls=len(self._calls),
            running=outcomes["running"],
            completed=outcomes["completed"],
            refused=outcomes["refused"],
            failed=outcomes["failed"],
            aborted=outcomes["aborted"],
            input_tokens=sum(call.input_tokens for call in admitted),
            output_tokens=sum(call.output_tokens for call in admitted),
            charged=dict(charged),
            foreign=self._door.foreign(),
        )

    def __repr__(self) -> str:
        now = self.statistics()
        return (
            f"<FakeProvider {self._name}: {now.calls:,} calls, {now.running:,} running, "
            f"{now.refused:,} refused>"
        )

    def transport(self, httpx: ModuleType) -> Any:
        """A transport for the `AsyncClient` of `httpx`, which is that module, or httpx2.

        Chunks come one by one, other than from those libraries' `ASGITransport`, which
        waits for the whole body. Its read timeout counts by the event loop's clock, and
        what faults do to the connection raises as that library would.
        """
        return transport(httpx, self)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """The ASGI app. A connection that a fault breaks is one more exception in its log."""
        if scope["type"] == "lifespan":
            return await lifespan(receive, send)
        if scope["type"] != "http":
            raise ValueError(f"a fake provider speaks http, not {scope['type']}")
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }

        async def respond(body: bytes) -> Answer:
            return await self.respond(scope["method"], scope["path"], headers=headers, body=body)

        return await serve(respond, receive, send)


def _buckets(
    of: Unit, minute: int | None, day: int | None = None, **rule: Any
) -> tuple[FakeQuota, ...]:
    limits = ((minute, 60.0), (day, 86_400.0))
    return tuple(FakeQuota(n, per=per, of=of, **rule) for n, per in limits if n is not None)
