"""What a stream has used so far, and what that means when it ends, or does not."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Generic, TypeVar, final

from tokenflow._usage import Usage, token_count
from tokenflow._wire import UsageReader, emitted_text, is_cut_off, is_last
from tokenflow.estimation import TokenCounter
from tokenflow.limits._lease import log

from ._input import APPROXIMATE, count_emitted

if TYPE_CHECKING:
    from ._call import Call

__all__ = ["Meter", "TrackedStream"]

T = TypeVar("T")
_PIECE: Final = 1_000  # characters that are counted together
_BYTES_PER_TOKEN: Final = 4  # about, until then


@final
class Meter:
    """Counts what a stream emits, and settles its call when the stream is over.

    `feed` takes chunks or events, dictionaries or SDK objects, in the order in which
    they come. `finish` is for a stream that came to its end, `close` for one that did
    not, or of which nobody wants the rest; whichever comes first counts.
    """

    __slots__ = (
        "_call",
        "_counter",
        "_emitted",
        "_is_complete",
        "_reader",
        "_text",
        "_truncated",
        "_unfinished",
        "events",
        "is_over",
    )

    def __init__(self, call: Call, counter: TokenCounter) -> None:
        self._call = call
        self._counter: TokenCounter = counter
        self._reader = UsageReader()
        self._emitted = 0  # and counted
        self._text = ""  # emitted, and not counted yet: many small pieces would count too much
        self._truncated = False
        self._unfinished = False  # Anthropic reports at the start what is not the end
        self._is_complete = False  # all has been said, though the stream may go on
        self.is_over: bool = False
        self.events: int = 0

    @property
    def output_tokens(self) -> int:
        """What has been emitted so far: as reported, or as counted if that is more."""
        reported = self._reader.usage
        size = len(self._text.encode(errors="replace"))
        emitted = self._emitted - (-size // _BYTES_PER_TOKEN)
        return max(emitted, 0 if reported is None else reported.output_tokens)

    @property
    def usage(self) -> Usage:
        """What exists so far."""
        reported = self._reader.usage or Usage()
        input_tokens = reported.input_tokens or self._call.request.input_tokens
        return replace(reported, input_tokens=input_tokens, output_tokens=self.output_tokens)

    def feed(self, event: object) -> None:
        """Take in one chunk; what is emitted beyond the estimate is charged now."""
        self.events += 1
        self._reader.feed(event)
        text = emitted_text(event)
        self._text += text
        if len(self._text) >= _PIECE:
            self._count_text()
        if self._reader.is_fed or text:
            self._is_complete = self._reader.is_fed and is_last(event)
        self._truncated = self._truncated or is_cut_off(event)
        kind = event.get("type") if isinstance(event, dict) else getattr(event, "type", None)
        if kind in ("message_start", "message_delta"):
            self._unfinished = kind == "message_start"
        if self.output_tokens > self._call.usage.output_tokens:
            self._call.progress(self.usage)

    def _count_text(self) -> None:
        """By the counter, or what is near it: its error is not to end the response."""
        text, self._text = self._text, ""
        try:
            self._emitted += token_count(count_emitted(self._counter, text), "a count")
        except Exception as error:
            log(logging.ERROR, "the counter %r raised %r in a stream", self._counter, error)
            self._counter = APPROXIMATE
            self._emitted += self._counter.count(text)

    def finish(self) -> None:
        """The stream is complete: what it reported is the truth."""
        if not self.is_over:
            self._is_complete = True
            self.close()

    def close(self) -> None:
        """It broke off, or nobody listens any more: the estimate, or what was emitted if more.

        If it had reported its usage at its end already, that is the truth nevertheless.
        """
        if not self.is_over:
            self.catch_up()
            self.is_over = True

    def catch_up(self) -> None:
        """Charge what is known by now."""
        if self.is_over:
            return
        if self._text:
            self._count_text()
        reported = self._reader.usage
        if self._is_complete and reported is not None and not self._unfinished:
            self._call.reconcile(reported)
            self._call._truncated = self._truncated
        else:
            self._call.progress(self.usage)


@final
class TrackedStream(Generic[T]):
    """A stream that passes through a call's books; see `Call.track`."""

    __slots__ = ("_fed", "_iterator", "_meter", "_stream")

    def __init__(self, stream: AsyncIterable[T], meter: Meter) -> None:
        self._fed = meter.events
        self._stream = stream
        self._iterator: AsyncIterator[T] = aiter(stream)
        self._meter = meter

    def __aiter__(self) -> TrackedStream[T]:
        return self

    async def __anext__(self) -> T:
        try:
            chunk = await anext(self._iterator)
        except StopAsyncIteration:
            self._meter.finish()
            raise
        except BaseException:
            self._meter.close()
            raise
        if self._meter.events == self._fed:  # else a transport below reads the same stream
            self._fed += 1
            self._meter.feed(chunk)
        return chunk

    async def aclose(self) -> None:
        """Close the stream, and settle: it will emit no more."""
        try:
            self._meter.close()
        finally:
            try:
                if self._iterator is not self._stream:
                    await _close(self._iterator)
            finally:
                await _close(self._stream)


async def _close(owner: object) -> None:
    """Streams of one kind have `aclose`, of another `close`, some an async one."""
    close = getattr(owner, "aclose", None) or getattr(owner, "close", None)
    closing = close() if close is not None else None
    if inspect.isawaitable(closing):
        await closing
