"""One answer on its way: a plan of pieces, each with its time, and the books kept beside it.

The plan is a plain iterator and every booking one synchronous step. Only
`Answer` waits, in the task of whoever reads it: there is no task and no cancel
scope behind it, so it may be opened in one task and closed in another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, final

import anyio

from ._calls import Call, Outcome
from ._dialects import Headers
from ._faults import ConnectionDropped
from ._quota import Ledger
from ._request import FakeRequest
from ._shapes import Generation, Shape

__all__ = ["Answer", "Booking", "Pace", "Piece", "streamed", "whole"]


class Piece(NamedTuple):
    """A step of an answer: seconds after the start, what is sent, what was produced for it.

    Headers go out where `data` is None.
    """

    after: float
    data: bytes | None
    tokens: int = 0


class Pace(NamedTuple):
    """How fast an answer is produced: seconds to the first token, then tokens per second."""

    first: float
    rate: float
    chunk: int

    def chunks(self, length: int) -> Iterator[tuple[float, int]]:
        """When each chunk is complete, and its tokens."""
        for start in range(0, length, self.chunk):
            end = min(start + self.chunk, length)
            yield self.first + (end - 1) / self.rate, end - start

    def steps(self, answer: Generation) -> Iterator[tuple[float, list[tuple[int, int]]]]:
        """The choices' chunks side by side: when, and (choice, tokens) of each."""
        chunks = [list(self.chunks(length)) for length in answer.lengths]
        for step in range(max(map(len, chunks))):
            there = [(i, each[step]) for i, each in enumerate(chunks) if step < len(each)]
            yield max(at for _, (at, _) in there), [(i, tokens) for i, (_, tokens) in there]


def whole(shape: Shape, pace: Pace) -> Iterator[Piece]:
    """Produce silently, then answer in one piece."""
    after = pace.first
    each_second = pace._replace(chunk=max(1, math.ceil(pace.rate)))
    for after, parts in each_second.steps(shape.answer):
        yield Piece(after, b"", sum(tokens for _, tokens in parts))
    yield Piece(after, None)
    yield Piece(after, json.dumps(shape.whole()).encode())


def streamed(shape: Shape, pace: Pace) -> Iterator[Piece]:
    """Answer chunk by chunk."""
    after = pace.first
    yield Piece(after, None)
    yield Piece(after, shape.opening().encode())
    for after, parts in pace.steps(shape.answer):
        data = "".join(shape.delta(choice, tokens) for choice, tokens in parts)
        yield Piece(after, data.encode(), sum(tokens for _, tokens in parts))
    yield Piece(after, shape.closing().encode())


@final
class Booking:
    """What one call is charged, from its arrival to its end; then nothing more."""

    __slots__ = ("_ledgers", "_request", "call")

    def __init__(self, call: Call) -> None:
        self.call: Call = call
        self._request: FakeRequest | None = None
        self._ledgers: Sequence[Ledger] = ()

    def admit(
        self, request: FakeRequest, charges: Iterable[tuple[Ledger, int]], now: float
    ) -> None:
        """Charge what counts at arrival."""
        charges = list(charges)
        self._request = request
        self._ledgers = [ledger for ledger, _ in charges]
        for ledger, amount in charges:
            self.charge(ledger, amount, now)

    def charge(self, ledger: Ledger, amount: int, now: float) -> None:
        """Charge one quota."""
        charged = self.call.charged
        charged[ledger.quota.name] = charged.get(ledger.quota.name, 0) + amount
        ledger.charge(amount, now)

    def produce(self, tokens: int, now: float) -> None:
        """So many tokens more have been produced."""
        self.call.output_tokens += tokens
        for ledger in self._ledgers:
            if ledger.quota.counts == "produced" and ledger.quota.concerns_output:
                self.charge(ledger, tokens, now)

    def end(self, outcome: Outcome, now: float) -> None:
        """Settle; only the first end counts."""
        if self.call.outcome != "running":
            return
        self.call.outcome = outcome
        self.call.ended = now
        for ledger in self._ledgers:
            self._settle(ledger, now)

    def _settle(self, ledger: Ledger, now: float) -> None:
        quota, charged = ledger.quota, self.call.charged.get(ledger.quota.name, 0)
        if quota.rule == "concurrency":
            ledger.charge(-charged, now)
        elif quota.counts in ("settled", "actual") and self._request is not None:
            self.charge(ledger, quota.used(self._request, self.call.output_tokens) - charged, now)


@final
class Answer:
    """An answer whose headers are there, and whose body comes chunk by chunk.

    An async iterator of bytes, and an async context manager: leaving it early is the
    client's going away, and so is being cancelled while it waits for the next chunk.
    Read and close it in any task, but not in two at once.
    """

    __slots__ = ("_booking", "_outcome", "_pieces", "_start", "headers", "status")

    def __init__(
        self,
        status: int,
        headers: Headers,
        pieces: Iterator[Piece],
        booking: Booking,
        outcome: Outcome = "completed",
    ) -> None:
        self.status: int = status
        self.headers: Headers = headers
        self._pieces = pieces
        self._booking = booking
        self._outcome: Outcome = outcome
        self._start = booking.call.arrived

    async def until_headers(self) -> Self:
        """Wait until its headers go out.

        Raises:
            ConnectionDropped: a fault broke the connection instead.
        """
        while await self._step() is not None:
            pass
        self._booking.call.status = self.status
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next chunk, when it is due.

        Raises:
            ConnectionDropped: a fault broke the connection.
        """
        while self._booking.call.outcome == "running":
            if data := await self._step():
                return data
        raise StopAsyncIteration

    async def _step(self) -> bytes | None:
        """Wait for the next piece, and book it in the step in which it is handed out."""
        try:
            piece = next(self._pieces, None)
            if piece is None:
                self._end(self._outcome)
                return b""
            await anyio.sleep_until(self._start + piece.after)
        except BaseException as error:
            self._end("failed" if isinstance(error, ConnectionDropped) else "aborted")
            raise
        self._booking.produce(piece.tokens, anyio.current_time())
        return piece.data

    async def read(self) -> bytes:
        """All of the rest."""
        return b"".join([chunk async for chunk in self])

    async def json(self) -> Any:
        """All of the rest, parsed."""
        return json.loads(await self.read())

    async def aclose(self) -> None:
        """Go away: nothing more is produced. Does nothing after the end."""
        self._end("aborted")

    def _end(self, outcome: Outcome) -> None:
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
