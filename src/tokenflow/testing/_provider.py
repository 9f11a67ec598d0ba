"""The provider: quotas at the door, then an answer that takes its time."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from types import ModuleType
from typing import Any, Final, Self, TypeAlias, TypedDict, final
from zlib import crc32

import anyio
from typing_extensions import Unpack

from tokenflow._usage import Usage, positive_int, positive_seconds, token_count

from ._answer import Answer, Booking, Pace, Piece, streamed, whole
from ._calls import Call, FakeCall, FakeStatistics, Outcome
from ._dialects import DIALECTS, DialectName, Headers, Reply
from ._faults import ConnectionDropped, Fault, Faults
from ._quota import Counts, Denial, FakeQuota, Ledger
from ._request import Body, FakeRequest, Invalid, approximate_tokens, read_request
from ._shapes import SHAPES, Generation, Shape
from ._transport import transport

__all__ = ["FakeProvider", "FakeSettings", "Sample", "lognormal"]

Sample: TypeAlias = float | Callable[[FakeRequest], float]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

_JSON: Final = ("content-type", "application/json")
_SSE: Final = ("content-type", "text/event-stream; charset=utf-8")
_INSUFFICIENT: Final = "You exceeded your current quota, please check your plan."


def lognormal(median: float, sigma: float = 0.8) -> Sample:
    """Values that vary by request: half are below `median`, 1 in 6 above median x e^sigma.

    >>> output = lognormal(200)
    """
    return lambda request: request.random.lognormvariate(math.log(median), sigma)


_USUAL_OUTPUT: Final = lognormal(200)


class FakeSettings(TypedDict, total=False):
    """How a `FakeProvider` answers: what every constructor takes, described there."""

    output: Sample
    first_token_seconds: Sample
    tokens_per_second: Sample
    tokens_per_chunk: int
    max_output_tokens: int
    count_tokens: Callable[[Body], int]
    cached_tokens: Callable[[FakeRequest], int]
    faults: Faults
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
    seed: int = 0
    unix_time: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        positive_int(self.tokens_per_chunk, "tokens_per_chunk")
        positive_int(self.max_output_tokens, "max_output_tokens")

    def pace(self, request: FakeRequest) -> Pace:
        first = _draw(self.first_token_seconds, request)
        rate = positive_seconds(_draw(self.tokens_per_second, request), "tokens_per_second")
        return Pace(first, rate, self.tokens_per_chunk)

    def generation(self, request: FakeRequest, *, hide_usage: bool) -> Generation:
        most = self.max_output_tokens
        if request.max_output_tokens is not None:
            most = min(most, request.max_output_tokens)
        wanted = [round(_draw(self.output, request)) for _ in range(request.choices)]
        return Generation(
            request=request,
            created=int(self.unix_time()),
            lengths=tuple(max(0, min(most, length)) for length in wanted),
            truncated=tuple(length > most for length in wanted),
            hide_usage=hide_usage,
        )


def _draw(sample: Sample, request: FakeRequest) -> float:
    return sample(request) if callable(sample) else sample


@final
class FakeProvider:
    """A language-model provider with real quota rules: an ASGI app, and a transport in process.

    It answers in the shape of its `dialect`, takes the time that generating takes, and
    refuses by `quotas`. All time is that of the event loop, so that in virtual time an
    hour of traffic costs seconds. Any model and any key is served.

    Args:
        quotas: Each call has to pass them all; a refused one is charged nothing, except
            where a quota's `counts_refused` says so.
        dialect: "openai", "azure", "groq", "anthropic" or "vllm": paths, headers, errors.
        output: Tokens of an answer before the declared maximum cuts it off: a number, or
            a function of the request. By default `lognormal(200)`.
        first_token_seconds: Until the first token, and until the headers of a stream.
        tokens_per_second: After it, per choice.
        tokens_per_chunk: Of a stream.
        max_output_tokens: The model's own maximum: what is generated at most, and what
            "declared" and "settled" count where a call declares none.
        count_tokens: Counts the input of a request's body; see `approximate_tokens`.
        cached_tokens: How much of the input was read from the cache.
        faults: What else goes wrong with a request, if anything.
        seed: For everything that varies.
        unix_time: The wall clock in which absolute times are given.

    >>> import anyio
    >>> async def main() -> list[int]:
    ...     provider = FakeProvider.openai(rpm=1)
    ...     chat = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    ...     answers = [await provider.respond("POST", "/v1/chat/completions", body=chat)
    ...                for _ in range(2)]
    ...     return [answer.status for answer in answers]

    Raises:
        TypeError, ValueError: a setting that makes no sense, or two quotas of one name.
    """

    def __init__(
        self,
        *quotas: FakeQuota,
        dialect: DialectName = "openai",
        **settings: Unpack[FakeSettings],
    ) -> None:
        names = Counter(quota.name for quota in quotas)
        if twice := [name for name, times in names.items() if times > 1]:
            raise ValueError(f"two quotas are named {twice[0]!r}: give one another name")
        if dialect not in DIALECTS:
            raise ValueError(f"dialect must be one of {tuple(DIALECTS)}, not {dialect!r}")
        self.quotas: tuple[FakeQuota, ...] = quotas
        self._dialect = DIALECTS[dialect]
        self._settings = _Settings(**settings)
        self._ledgers: dict[tuple[str, str], Ledger] = {}
        self._calls: list[Call] = []
        self._seen: Counter[int] = Counter()

    @classmethod
    def openai(
        cls,
        *,
        tpm: int | None = None,
        rpm: int | None = None,
        rpd: int | None = None,
        tpd: int | None = None,
        counts: Counts = "larger",
        **settings: Unpack[FakeSettings],
    ) -> Self:
        """Continuous buckets; a call counts at arrival, a refused one as a request."""
        requests = [(rpm, 60.0), (rpd, 86_400.0)]
        tokens = [(tpm, 60.0), (tpd, 86_400.0)]
        quotas = [
            *(
                FakeQuota(n, per=per, of="requests", counts_refused=True)
                for n, per in requests
                if n
            ),
            *(FakeQuota(n, per=per, counts=counts) for n, per in tokens if n),
        ]
        return cls(*quotas, dialect="openai", **settings)

    @classmethod
    def azure(cls, *, tpm: int, rpm: int | None = None, **settings: Unpack[FakeSettings]) -> Self:
        """Per deployment: a sum of tokens reset each minute, requests in slices of 10 s.

        `rpm` is 6 per 1,000 tokens per minute by default. What is declared counts, and is
        not corrected.
        """
        requests = rpm or max(6, tpm * 6 // 1_000)
        return cls(
            FakeQuota(requests, of="requests", rule="fixed", slices=6, by="model"),
            FakeQuota(tpm, rule="fixed", by="model"),
            dialect="azure",
            **settings,
        )

    @classmethod
    def groq(
        cls,
        *,
        tpm: int | None = None,
        rpm: int | None = None,
        rpd: int | None = None,
        tpd: int | None = None,
        **settings: Unpack[FakeSettings],
    ) -> Self:
        """Buckets that are charged what was really used, at the end, and so may go negative."""
        requests = [(rpd, 86_400.0), (rpm, 60.0)]  # the headers tell the first, that of a day
        tokens = [(tpm, 60.0), (tpd, 86_400.0)]
        quotas = [
            *(FakeQuota(n, per=per, of="requests") for n, per in requests if n),
            *(FakeQuota(n, per=per, counts="actual", free_cache=True) for n, per in tokens if n),
        ]
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
        """Buckets of requests, input and output; cached reads are free, output counts as produced.

        `counts="declared"` is the rule of before 2025: the declared maximum, at arrival.
        """
        quotas = [
            *([FakeQuota(rpm, of="requests")] if rpm else []),
            *([FakeQuota(itpm, of="input_tokens", free_cache=True)] if itpm else []),
            *([FakeQuota(otpm, of="output_tokens", counts=counts)] if otpm else []),
        ]
        return cls(*quotas, dialect="anthropic", **settings)

    @classmethod
    def vllm(cls, *, max_concurrent: int, **settings: Unpack[FakeSettings]) -> Self:
        """At most so many requests at once (also TGI and DeepSeek); 429 "overloaded" beyond."""
        quota = FakeQuota(max_concurrent, of="requests", rule="concurrency")
        return cls(quota, dialect="vllm", **settings)

    # -- answering ---------------------------------------------------------------------------

    async def respond(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | Mapping[str, Any] = b"",
    ) -> Answer:
        """Answer one request, as soon as its headers would be there; the body comes by reading.

        Whether it is admitted is decided at once. Then it waits, as long as the first
        token of a stream or the whole of another answer takes. To be cancelled is the
        client's going away.

        Raises:
            ConnectionDropped: a fault broke the connection.
        """
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        lower = {name.lower(): value for name, value in (headers or {}).items()}
        answer = self._arrive(method, path, lower, raw, anyio.current_time())
        return await answer.until_headers()

    def _arrive(
        self, method: str, path: str, headers: Mapping[str, str], raw: bytes, now: float
    ) -> Answer:
        call = Call(number=len(self._calls), path=path, arrived=now)
        self._calls.append(call)
        booking = Booking(call)
        try:
            request = self._read(method, path, headers, raw, call)
            return self._judge(request, booking, now)
        except Invalid as error:
            body = self._dialect.error(error.status, str(error))
            return _short(Reply(status=error.status, headers=[], body=body), [], booking)

    def _read(
        self, method: str, path: str, headers: Mapping[str, str], raw: bytes, call: Call
    ) -> FakeRequest:
        request = read_request(
            call.number,
            call.arrived,
            path,
            headers,
            raw,
            count_tokens=self._settings.count_tokens,
            random=self._random,
        )
        if request.endpoint not in self._dialect.endpoints:
            raise Invalid(404, f"unknown path {path}")
        if method != ("GET" if request.endpoint == "models" else "POST"):
            raise Invalid(405, f"{method} is not allowed here")
        cached = min(self._settings.cached_tokens(request), request.input_tokens)
        call.model, call.stream = request.model, request.stream
        call.input_tokens, call.cached_tokens = request.input_tokens, cached
        return replace(request, cached_tokens=cached)

    def _random(self, raw: bytes) -> Random:
        body = crc32(raw)
        self._seen[body] += 1
        return Random(f"{self._settings.seed}/{body}/{self._seen[body]}")

    def _judge(self, request: FakeRequest, booking: Booking, now: float) -> Answer:
        fault = self._settings.faults(request) or Fault()
        booking.call.fault = None if fault == Fault() else fault
        generation = self._settings.generation(request, hide_usage=fault.hide_usage)
        shape = SHAPES[request.endpoint](generation)
        if fault.is_at_the_door:
            return self._fail(request, fault, booking, now)
        ledgers = [] if request.endpoint == "models" else self._ledgers_of(request)
        if denial := self._admit(request, ledgers, booking, now):
            return self._refuse(request, denial, booking, now)
        if fault.status is not None:
            return self._fail(request, fault, booking, now)
        return self._answer(shape, fault, booking, now)

    def _ledgers_of(self, request: FakeRequest) -> list[Ledger]:
        return [self._ledger(q, getattr(request, q.by) if q.by else "") for q in self.quotas]

    def _ledger(self, quota: FakeQuota, key: str) -> Ledger:
        place = (quota.name, key)
        if place not in self._ledgers:
            self._ledgers[place] = Ledger(quota)
        return self._ledgers[place]

    def _admit(
        self, request: FakeRequest, ledgers: Iterable[Ledger], booking: Booking, now: float
    ) -> Denial | None:
        """Charge all quotas, or none and tell which one takes longest."""
        assumed = self._settings.max_output_tokens
        charges = [(each, each.quota.at_arrival(request, assumed)) for each in ledgers]
        denials = [no for ledger, cost in charges if (no := ledger.denial(cost, now))]
        if not denials:
            booking.admit(request, charges, now)
            return None
        for ledger, cost in charges:
            if ledger.quota.counts_refused and not ledger.denial(cost, now):
                booking.charge(ledger, cost, now)
        return max(denials, key=lambda no: no.wait or 0.0)

    def _refuse(self, request: FakeRequest, denial: Denial, booking: Booking, now: float) -> Answer:
        booking.call.refused_by = denial.quota.name
        reply = self._dialect.refusal(request.model, denial)
        return _short(reply, self._headers(request, now), booking)

    def _fail(self, request: FakeRequest, fault: Fault, booking: Booking, now: float) -> Answer:
        status = fault.status or 500
        message = fault.message or (_INSUFFICIENT if fault.code else f"fault {status}")
        reply = Reply(
            status=status,
            headers=self._dialect.retry_headers(fault.retry_after),
            body=self._dialect.error(status, message, fault.code),
        )
        return _short(reply, self._headers(request, now), booking, fault)

    def _answer(self, shape: Shape, fault: Fault, booking: Booking, now: float) -> Answer:
        request = shape.request
        streams = request.stream and request.endpoint != "embeddings"
        pace = self._settings.pace(request)
        if request.endpoint == "models":
            pace = pace._replace(first=0.0)
        pieces = streamed(shape, pace) if streams else whole(shape, pace)
        headers = [_SSE if streams else _JSON, *self._headers(request, now)]
        return Answer(200, headers, _with(fault, pieces), booking)

    def _headers(self, request: FakeRequest, now: float) -> Headers:
        levels = [ledger.level(now) for ledger in self._ledgers_of(request)]
        limits = self._dialect.limit_headers(levels, self._settings.unix_time())
        return [(self._dialect.request_id, f"req_{request.number}"), *limits]

    # -- other clients ------------------------------------------------------------------------

    def consume(self, usage: Usage | int, *, model: str = "", key: str = "") -> None:
        """Charge what another client uses, as far as there is room; an int is input tokens.

        `model` and `key` say whose, for quotas that keep them apart.
        """
        if not isinstance(usage, Usage):
            usage = Usage(input_tokens=token_count(usage, "usage"))
        for quota in self.quotas:
            amount: int = getattr(usage, _UNITS[quota.of])
            self._charge_foreign(quota, amount, model, key)

    async def foreign_traffic(
        self, share: float, *, every: float = 1.0, model: str = "", key: str = ""
    ) -> None:
        """Eat this share of each quota's rate, in a steady flow, until cancelled.

        A task's function: `tasks.start_soon(provider.foreign_traffic, 0.3)`.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1, not {share!r}")
        positive_seconds(every, "every")
        start, taken = anyio.current_time(), Counter[str]()
        while True:
            await anyio.sleep(every)
            elapsed = anyio.current_time() - start
            for quota in self.quotas:
                if quota.rule != "concurrency":
                    due = int(share * quota.limit * elapsed / quota.per) - taken[quota.name]
                    taken[quota.name] += due
                    self._charge_foreign(quota, due, model, key)

    def _charge_foreign(self, quota: FakeQuota, amount: int, model: str, key: str) -> None:
        whose = {"model": model, "key": key, None: ""}[quota.by]
        self._ledger(quota, whose).charge_foreign(amount, anyio.current_time())

    # -- the books ----------------------------------------------------------------------------

    @property
    def calls(self) -> tuple[FakeCall, ...]:
        """All calls so far, in order of arrival, as they stand."""
        return tuple(call.frozen() for call in self._calls)

    def worst_window(self, name: str, seconds: float | None = None) -> int:
        """The most that the quota of this name was charged within any `seconds`.

        By default its period. Other clients' traffic is not in it. A bucket may rightly
        be charged up to twice its limit in one period.
        """
        ledgers = [ledger for (named, _), ledger in self._ledgers.items() if named == name]
        if name not in (quota.name for quota in self.quotas):
            raise ValueError(f"no quota is named {name!r}: {[q.name for q in self.quotas]}")
        return max(
            (ledger.worst_window(seconds or ledger.quota.per) for ledger in ledgers), default=0
        )

    def statistics(self) -> FakeStatistics:
        """Sums over all calls so far."""
        outcomes = Counter(call.outcome for call in self._calls)
        admitted = [call for call in self._calls if call.outcome != "refused"]
        charged: Counter[str] = Counter({quota.name: 0 for quota in self.quotas})
        foreign = charged.copy()
        for call in self._calls:
            charged.update(call.charged)
        for (name, _), ledger in self._ledgers.items():
            foreign[name] += ledger.foreign
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
            foreign=dict(foreign),
        )

    # -- ways in ------------------------------------------------------------------------------

    def transport(self, httpx: ModuleType) -> Any:
        """A transport for an `AsyncClient` of `httpx`: the module httpx, or httpx2.

        Streams arrive chunk by chunk (that of httpx, `ASGITransport`, hands over whole
        bodies only), read timeouts count in the event loop's time, and a dropped connection
        is that library's `RemoteProtocolError`.
        """
        return transport(self, httpx)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """The ASGI app, for any server."""
        match scope["type"]:
            case "http":
                await self._serve(scope, receive, send)
            case "lifespan":
                await _lifespan(receive, send)
            case other:
                raise ValueError(f"a fake provider speaks http, not {other}")

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        error: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_until_disconnected, receive, tasks.cancel_scope)
            try:
                await self._send(scope, body, send)
            except Exception as broken:  # out of the task group, for whom it would be a group
                error = broken
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error

    async def _send(self, scope: Message, body: bytes, send: Send) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        try:
            answer = await self.respond(scope["method"], scope["path"], headers=headers, body=body)
        except ConnectionDropped:
            await _break(send)
            raise
        async with answer:
            encoded = [(name.encode(), value.encode()) for name, value in answer.headers]
            await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
            async for chunk in answer:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


_UNITS: Final[Mapping[str, str]] = {
    "tokens": "total_tokens",
    "input_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "requests": "requests",
}


def _short(reply: Reply, headers: Headers, booking: Booking, fault: Fault | None = None) -> Answer:
    """An answer that is there at once."""
    fault = fault or Fault()
    pieces = [Piece(0.0, None), Piece(0.0, json.dumps(reply.body).encode())]
    outcome: Outcome = "refused" if reply.status in (413, 429, 503, 529) else "failed"
    return Answer(
        reply.status,
        [_JSON, *headers, *reply.headers],
        _with(fault, iter(pieces)),
        booking,
        outcome,
    )


def _with(fault: Fault, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The pieces of an answer, as the fault spoils them."""
    sent = 0
    if fault.drop:
        yield Piece(fault.delay, b"")
        raise ConnectionDropped("the server closed the connection without an answer")
    for piece in pieces:
        late = piece._replace(after=piece.after + fault.delay)
        if piece.data and fault.body is not None:
            yield late._replace(data=fault.body)
            return
        if piece.data and sent == fault.abort_after:
            raise ConnectionDropped(f"the server closed the connection after {sent} chunks")
        sent += bool(piece.data)
        yield late


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _until_disconnected(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _break(send: Send) -> None:
    """Make a server close the connection: one that has begun to answer cannot say 500 any more."""
    with suppress(Exception):
        await send({"type": "http.response.start", "status": 500, "headers": [(b"\0", b"\0")]})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
