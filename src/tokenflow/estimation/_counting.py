"""How many tokens a text has: the counters.

A counter has one method, `count`. Those here add counting off the event loop and
the rules of chat messages. Two traps are closed in one place, `TiktokenCounter`:
text that looks like a special token counts as text, and no text is handed over
in pieces so long that the encoder's time grows out of proportion, or it panics.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar, final

from anyio import to_thread

from ._messages import ChatRule, chat_cost, chat_rule
from ._vocabulary import Vocabulary, bare_model, encoding_name, pieces, vocabulary

__all__ = ["ApproximateCounter", "HuggingFaceCounter", "TiktokenCounter", "TokenCounter"]

_T = TypeVar("_T")
_IN_LOOP: Final = 1 << 14  # characters: 2 ms of prose, 15 ms of the worst there is


class TokenCounter(Protocol):
    """What counts tokens. Any object that has `count` will do."""

    def count(self, text: str) -> int:
        """Return how many tokens `text` has. Never fails, whatever the text."""
        ...


class _Counter(ABC):
    """What the counters have in common; they supply `count` and `_ready`."""

    __slots__ = ("_rule",)

    def __init__(self, rule: ChatRule) -> None:
        self._rule = rule

    @abstractmethod
    def count(self, text: str) -> int:
        """Return how many tokens `text` has. Never fails, whatever the text."""

    def _ready(self) -> bool:
        """Whether `count` can start at once, without loading anything."""
        return True

    async def count_async(self, text: str) -> int:
        """`count`, in a worker thread when the text is long or nothing is loaded yet.

        Short texts are counted at once, without a scheduling point. A cancelled
        caller does not wait for the thread, which finishes its count for nobody.
        """
        return await self._off_loop(len(text), self.count, text)

    def count_messages(self, messages: Iterable[object], tools: Iterable[object] = ()) -> int:
        """Return the input tokens of a chat request: framing, texts, tools and images.

        `messages` are dictionaries or SDK objects with any fields; content may be a
        string or a list of parts. `tools` are function definitions. Images count by
        their detail and by the size in the head of a data URL, or as 1,024 x 1,024
        where only a link is known; audio and files count 0.

        >>> hello = [{"role": "user", "content": "hello"}]
        >>> ApproximateCounter().count_messages(hello)  # 3 + (2 + 2) + 3
        10
        """
        tokens, texts = chat_cost(messages, tools, self._rule)
        return tokens + self._total(texts)

    async def count_messages_async(
        self, messages: Iterable[object], tools: Iterable[object] = ()
    ) -> int:
        """`count_messages`, with the counting in a worker thread as in `count_async`."""
        tokens, texts = chat_cost(messages, tools, self._rule)
        return tokens + await self._off_loop(sum(map(len, texts)), self._total, texts)

    def _total(self, texts: Sequence[str]) -> int:
        return sum(map(self.count, texts))

    async def _off_loop(self, size: int, count: Callable[[_T], int], what: _T) -> int:
        if size <= _IN_LOOP and self._ready():
            return count(what)
        return await to_thread.run_sync(count, what, abandon_on_cancel=True)


@final
class ApproximateCounter(_Counter):
    """Counts UTF-8 bytes: needs no vocabulary, and is never far too low.

    At the default of 3 bytes per token, against cl100k: prose 88 % too high, JSON 9 %
    too low, Chinese 14 %, emoji 52 %. Four *characters* per token, the usual rule, is
    closer for prose and 79 to 90 % too low for the last two.

    >>> ApproximateCounter().count("tokens")
    2
    """

    __slots__ = ("_bytes_per_token",)

    def __init__(self, bytes_per_token: float = 3.0) -> None:
        super().__init__(ChatRule())
        if isinstance(bytes_per_token, bool) or not 0 < bytes_per_token < math.inf:
            raise ValueError(f"bytes_per_token must be a number > 0, not {bytes_per_token!r}")
        self._bytes_per_token = bytes_per_token

    def count(self, text: str) -> int:
        """Return the length in bytes over `bytes_per_token`, rounded up."""
        size = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
        return math.ceil(size / self._bytes_per_token)

    def __repr__(self) -> str:
        return f"ApproximateCounter({self._bytes_per_token})"


_fallback: Final = ApproximateCounter()


@final
class TiktokenCounter(_Counter):
    """Counts with tiktoken, by the name of a model or of an encoding.

    Provider prefixes ("openai/gpt-4o"), fine-tunes ("ft:gpt-4.1-mini:...") and
    deployments named after a model ("prod-gpt4o") are understood. Every other
    model counts as o200k_base, which is a fair estimate for Claude and Gemini.

    Exact up to 65,536 characters; longer texts are cut there, between words where
    there are any, and then exact as well.

    The vocabulary is loaded on first use, once in a process, in a thread. `count`
    waits for that, so in an event loop use `count_async`, or `await prepare()` at the
    start. Where it cannot be loaded, or not within `load_timeout` seconds, counting
    goes on with `ApproximateCounter` and one `RuntimeWarning`; a vocabulary that
    arrives later is used from then on. All methods may be called from any thread.

    >>> counter = TiktokenCounter("gpt-5")
    >>> counter
    TiktokenCounter('gpt-5')
    """

    __slots__ = ("_load_timeout", "_model", "_vocabulary")

    def __init__(self, model: str, *, load_timeout: float = 10.0) -> None:
        super().__init__(chat_rule(bare_model(model)))
        self._model = model
        self._load_timeout = load_timeout
        self._vocabulary: Vocabulary | None = None

    def _resolve(self) -> Vocabulary:
        """The vocabulary, loaded or not. Imports tiktoken the first time."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary(encoding_name(self._model))
        return self._vocabulary

    def _ready(self) -> bool:
        return self._vocabulary is not None and self._vocabulary.settled

    @property
    def encoding_name(self) -> str:
        """The name of the encoding used for this model. Imports tiktoken, loads nothing."""
        return self._resolve().name

    @property
    def exact(self) -> bool:
        """Whether the vocabulary is there. False before the first use."""
        return self._vocabulary is not None and self._vocabulary.encoding is not None

    async def prepare(self) -> None:
        """Load the vocabulary in a thread, if it is not loaded; tries again after a failure.

        Returns after `load_timeout` seconds at the latest; `exact` tells how it went.
        Do it before there is traffic: for its last step, 0.2 s and more, tiktoken keeps
        the interpreter to itself, and no thread helps against that.
        """
        await to_thread.run_sync(self._prepare, abandon_on_cancel=True)

    def _prepare(self) -> None:
        self._resolve().retry()
        self._resolve().load(self._load_timeout)

    def count(self, text: str) -> int:
        """Return the tokens of `text`, special-token text counted as text. Never fails."""
        found = self._resolve()
        encoding = found.encoding or found.load(self._load_timeout)
        if encoding is None:
            return _fallback.count(text)
        return sum(_encoded(encoding.encode_ordinary, piece) for piece in pieces(text))

    def __reduce__(self) -> tuple[Callable[[str], TiktokenCounter], tuple[str]]:
        """Pickle the name; the process that unpickles it loads for itself."""
        return partial(TiktokenCounter, load_timeout=self._load_timeout), (self._model,)

    def __repr__(self) -> str:
        return f"TiktokenCounter({self._model!r})"


def _encoded(encode: Callable[[str], Sequence[int]], piece: str) -> int:
    """Tokens of one piece, or an estimate of them should the encoder panic."""
    try:
        return len(encode(piece))
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":  # Rust's; it is no Exception, nor importable
            raise
        return _fallback.count(piece)


@final
class HuggingFaceCounter(_Counter):
    """Counts with a `tokenizers.Tokenizer` that you pass in; nothing is imported.

    `chat_template` turns messages and tools into the text the model sees, as
    `lambda messages, tools: tokenizer.apply_chat_template(messages, tools=tools,
    tokenize=False)` does with one of transformers. Without it chats are counted by
    OpenAI's rule.

    Raises:
        ValueError: the tokenizer truncates or pads, so that it could not count.
    """

    __slots__ = ("_chat_template", "_tokenizer")

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: Callable[[list[Any], list[Any]], str] | None = None,
    ) -> None:
        super().__init__(ChatRule())
        for setting in ("truncation", "padding"):
            if getattr(tokenizer, setting, None) is not None:
                raise ValueError(
                    f"the tokenizer has {setting} enabled, so its counts would be wrong: "
                    f"pass a copy of it after no_{setting}()"
                )
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    def count(self, text: str) -> int:
        """Return the tokens of `text`, without the special ones that frame a prompt."""
        return sum(map(self._encoded, pieces(text)))

    def _encoded(self, piece: str) -> int:
        clean = piece.encode(errors="replace").decode()  # lone surrogates are no UTF-8
        return len(self._tokenizer.encode(clean, add_special_tokens=False).ids)

    def count_messages(self, messages: Iterable[object], tools: Iterable[object] = ()) -> int:
        """Return the tokens of the chat template's text, or of OpenAI's rule without one."""
        if self._chat_template is None:
            return super().count_messages(messages, tools)
        return self.count(self._chat_template(list(messages), list(tools)))

    async def count_messages_async(
        self, messages: Iterable[object], tools: Iterable[object] = ()
    ) -> int:
        """`count_messages`, with the counting in a worker thread as in `count_async`."""
        if self._chat_template is None:
            return await super().count_messages_async(messages, tools)
        return await self.count_async(self._chat_template(list(messages), list(tools)))

    def __repr__(self) -> str:
        return f"HuggingFaceCounter({self._tokenizer!r:.60})"
