"""Vocabularies of tiktoken: which one a model has, and getting hold of it.

Loading takes a third of a second from disk and, the first time, a download that
has no timeout. So each vocabulary is loaded by a thread of its own, a daemon:
whoever needs it waits for it as long as he likes, in a worker thread if he is
async, and nobody is held up by a network that swallows packets, not even the
interpreter's exit.
"""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from tiktoken import Encoding

__all__ = ["Vocabulary", "bare_model", "encoding_name", "vocabulary"]

_UNKNOWN: Final = "o200k_base"
_FAMILY: Final = re.compile(r"(?<![a-z0-9])(?:chatgpt|gpt|o\d|text-embedding|davinci|babbage).*")


def bare_model(model: str) -> str:
    """The model's own name, without provider, fine-tune and deployment around it.

    >>> [bare_model(name) for name in ("azure/prod_gpt4o", "ft:gpt-4.1-mini:acme::id", "claude")]
    ['gpt-4o', 'gpt-4.1-mini', 'claude']
    """
    name = model.lower().rpartition("/")[2].removeprefix("ft:").partition(":")[0]
    family = _FAMILY.search(name.replace("_", "-"))
    return re.sub(r"^gpt(?=\d)", "gpt-", family.group()) if family else name


def encoding_name(model: str) -> str:
    """The encoding of a model, or `model` itself where it names one; o200k_base when unknown."""
    import tiktoken

    if model in tiktoken.list_encoding_names():
        return model
    try:
        return tiktoken.encoding_name_for_model(bare_model(model))
    except KeyError:
        return _UNKNOWN


@final
class Vocabulary:
    """One encoding, loaded once in a process, by the first who asks.

    Invariant: `encoding` is set before `settled` is true, and never unset.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.encoding: Encoding | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._started: float | None = None
        self._warned = False

    @property
    def settled(self) -> bool:
        """True once loading has ended, one way or the other."""
        return self._ended.is_set()

    def load(self, timeout: float) -> Encoding | None:
        """Wait for the encoding until `timeout` seconds after loading began; None without it.

        Blocks; any thread may call it. The first time it comes back empty-handed it
        warns, and says what to do.
        """
        with self._lock:
            if self._started is None:
                self._started = time.monotonic()
                threading.Thread(target=self._run, name=f"load {self.name}", daemon=True).start()
            give_up_at = self._started + timeout
        self._ended.wait(max(0.0, give_up_at - time.monotonic()))
        if self.encoding is None:
            self._warn()
        return self.encoding

    def _run(self) -> None:
        try:
            import tiktoken

            self.encoding = tiktoken.get_encoding(self.name)
        except BaseException as exc:  # tiktoken panics with one; nobody else would see it
            self._error = exc
        finally:
            self._ended.set()

    def retry(self) -> None:
        """Let the next `load` start over, if loading has failed."""
        with self._lock:
            if self._ended.is_set() and self.encoding is None:
                self._ended.clear()
                self._started = self._error = None

    def _warn(self) -> None:
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            reason = repr(self._error) if self._error else "loading it takes too long"
            warnings.warn(
                f"the vocabulary {self.name} is not available ({reason:.200}): counting by bytes "
                "instead, which is up to twice too high for prose. To have it offline, load it "
                "once with TIKTOKEN_CACHE_DIR set to a directory that you keep",
                RuntimeWarning,
                stacklevel=4,
            )


vocabulary = lru_cache(maxsize=16)(Vocabulary)
"""The process's vocabulary of a name."""


_BOUNDARY: Final = re.compile(
    r"\S(?= )|[^\W_](?=[\n\r,.;:!?()\[\]{}\u3001\u3002\uff0c\uff1f\uff01])"
)


def pieces(text: str, size: int = 1 << 16) -> Iterator[str]:
    """Cut `text` into pieces of at most `size` characters, where no token spans the cut.

    That is before a space that ends a word, or between a letter or digit and a
    punctuation mark or newline: every encoding's pattern ends a token there, and
    none looks back. Only where the last 256 characters of a piece have no such
    place is it cut at its end, which may split a token. The default size is a power
    of two because that is how long runs of one character are merged.
    """
    start = 0
    while len(text) - start > size:
        end = start + size
        for boundary in _BOUNDARY.finditer(text, max(start, end - 256), end):
            end = boundary.end()
        yield text[start:end]
        start = end
    yield text[start:]
