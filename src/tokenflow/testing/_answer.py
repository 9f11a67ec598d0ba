"""One answer on its way: a plan of pieces, each with its time, and the books beside it.

The plan is a plain iterator, and each booking one synchronous step. Only `Answer`
waits, in the task of whoever reads it: no task and no cancel scope stands behind
it, so that it may be opened in one task and closed in another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self, final

import anyio

from ._calls import FakeCall, Outcome
from ._dialects import Headers
from ._faults import ConnectionDropped, Fault
from ._quota import Ledger
from ._request import FakeRequest
from ._shapes import Generation, Shape, StreamShape

__all__ = ["Answer", "Booking", "Pace", "Piece", "kept_alive", "spoiled", "streamed", "whole"]


class Piece(NamedTuple):
    """A step of an answer: what is sent, what was produced for it, seconds after the arrival.

    The headers go out where `data` is None, and with the one that `ends` it, the call is over.
    """

    after: float
    data: bytes | None
    tokens: int = 0
    ends: bool = False


class Pace(NamedTuple):
    """How fast it is produced: seconds to the first token, tokens per second, per chunk."""

    first: float
    rate: float
    chunk: int

    def steps(self, answer: Generation) -> Iterator[tuple[float, list[tuple[int, int]]]]:
        """All choices side by side: when, and the (choice, tokens) that are complete then."""
        for start in range(0, max(answer.lengths), self.chunk):
            ends = [min(start + self.chunk, length) for length in answer.lengths]
            chunks = [(choice, end - start) for choice, end in enumerate(ends) if end > start]
            yield self.first + (max(ends) - 1) / self.rate, chunks


def whole(shape: Shape, pace: Pace) -> Iterator[Piece]:
    """Produce in silence, second by second, then answer in one piece."""
    after = pace.first
    for after, chunks in pace._replace(chunk=math.ceil(pace.rate)).steps(shape.answer):
        yield Piece(after, b"", sum(tokens for _, tokens in chunks))
    yield Piece(after, None, ends=True)
    yield Piece(after, json.dumps(shape.whole()).encode())


def streamed(shape: StreamShape, pace: Pace) -> Iterator[Piece]:
    """Answer chunk by chunk."""
    after = pace.first
    yield Piece(after, None)
    yield Piece(after, shape.opening().encode())
    for after, chunks in pace.steps(shape.answer):
        events = "".join(shape.delta(choice, tokens) for choice, tokens in chunks)
        yield Piece(after, events.encode(), sum(tokens for _, tokens in chunks))
    yield Piece(after, shape.closing().encode(), ends=True)


def kept_alive(pieces: Iterator[Piece], every: float, line: bytes) -> Iterator[Piece]:
    """Headers at once, then a line now and then until there is something to say."""
    yield Piece(0.0, None)
    due = every
    for piece in pieces:
        while due < piece.after:
            yield Piece(due, line)
            due += every
        if piece.data:
            due = math.inf
        yield piece._replace(data=piece.data or b"")


def spoiled(pieces: Iterable[Piece], fault: Fault) -> Iterator[Piece]:
    """The pieces as the fault leaves them."""
    if fault.unreachable:
        raise ConnectionRefusedError("the fake is unreachable, because a fault says so")
    if fault.drop:
        yield Piece(fault.delay, b"")
        raise ConnectionDropped("the fake closed the connection without an answer")
    late = (piece._replace(after=piece.after + fault.delay) for piece in pieces)
    replaced = late if fault.body is None else _replaced(late, fault.body)
    yield from replaced if fault.abort_after is None else _broken_off(replaced, fault.abort_after)


def _replaced(pieces: Iterator[Piece], body: bytes) -> Iterator[Piece]:
    while not (piece := next(pieces)).data:
        yield piece
    yield piece._replace(data=body, ends=True)


def _broken_off(pieces: Iterable[Piece], chunks: int) -> Iterator[Piece]:
    sent = 0
    for piece in pieces:
        if piece.data and sent == chunks:
            break
        sent += bool(piece.data)
        yield piece._replace(ends=False)
    raise ConnectionDropped(f"the fake closed the connection after {sent} chunks")


@final
class Booking:
    """What one call is charged from its arrival to its end; after that nothing more is."""

    __slots__ = ("_ledgers", "call")

    def __init__(self, call: FakeCall) -> None:
        self.call: FakeCall = call
        self._ledgers: list[tuple[Ledger, FakeRequest]] = []

    def admit(self, request: FakeRequest, ledgers: Iterable[Ledger]) -> None:
        """From now on its output counts, at these."""
        self._ledgers = [(ledger, request) for ledger in ledgers]

    def charge(self, ledger: Ledger, amount: int, now: float) -> None:
        """Charge one quota."""
        charged = self.call.charged
        charged[ledger.quota.name] = charged.get(ledger.quota.name, 0) + amount
        ledger.charge(amount, now)

    def produce(self, tokens: int, now: float) -> None:
        """So many more tokens are there."""
        self.call.output_tokens += tokens
        for ledger, request in self._ledgers:
            if ledger.quota.counts == "produced":
                grown = ledger.quota.used(request, tokens) - ledger.quota.used(request, 0)
                self.charge(ledger, grown, now)

    def end(self, outcome: Outcome, now: float) -> None:
        """Settle; only the first end counts."""
        if self.call.outcome == "running":
            self.call.outcome, self.call.ended = outcome, now
            for ledger, request in self._ledgers:
                self._settle(ledger, request, now)

    def _settle(self, ledger: Ledger, request: FakeRequest, now: float) -> None:
        quota, charged = ledger.quota, self.call.charged[ledger.quota.name]
        if quota.rule == "concurrency":
            ledger.charge(-charged, now)
        elif quota.counts in ("settled", "actual"):
            self.charge(ledger, quota.used(request, self.call.output_tokens) - charged, now)


@final
class Answer:
    """An answer whose headers are there, and whose body comes chunk by chunk.

    It is an async iterator of bytes, and an async context manager. Each chunk comes when
    it is due. To leave or close it early, or to be cancelled while waiting for a chunk,
    is the client's going away: what was not handed out was not produced. Read and close
    it from any task, but not from two at once.
    """

    __slots__ = ("_booking", "_outcome", "_pieces", "headers", "status")

    def __init__(
        self,
        status: int,
        headers: Headers,
        pieces: Iterable[Piece],
        booking: Booking,
        outcome: Outcome,
    ) -> None:
        self.status: int = status
        self.headers: Headers = headers
        fault = booking.call.fault
        self._pieces: Iterator[Piece] = spoiled(pieces, fault) if fault else iter(pieces)
        self._booking = booking
        self._outcome: Outcome = outcome

    async def until_headers(self) -> Self:
        """Wait until the headers go out; `FakeProvider.respond` has done so."""
        while (piece := await self._step()) and piece.data is not None:
            pass
        self._booking.call.status = self.status
        return self

    def __repr__(self) -> str:
        return f"<Answer {self.status}>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next chunk.

        Raises:
            ConnectionDropped: a fault broke the connection.
        """
        while piece := await self._step():
            if piece.data:
                return piece.data
        raise StopAsyncIteration

    async def _step(self) -> Piece | None:
        """Wait for the next piece; it is booked in the same step in which it is handed out."""
        try:
            if piece := next(self._pieces, None):
                await anyio.sleep_until(self._booking.call.arrived + piece.after)
        except OSError:
            self._end("failed")
            raise
        except BaseException:
            self._end("aborted")
            raise
        if piece:
            self._book(piece, anyio.current_time())
        return piece

    def _book(self, piece: Piece, now: float) -> None:
        self._booking.produce(piece.tokens, now)
        if piece.ends:
            self._booking.end(self._outcome, now)

    async def read(self) -> bytes:
        """All the rest."""
        return b"".join([chunk async for chunk in self])

    async def json(self) -> Any:
        """All the rest, parsed."""
        return json.loads(await self.read())

    async def aclose(self) -> None:
        """Go away: nothing more comes."""
        self._end("aborted")

    def _end(self, outcome: Outcome) -> None:
        self._pieces = iter(())
        self._booking.end(outcome, anyio.current_time())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
