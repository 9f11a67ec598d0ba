"""What a call sends, counted: messages, a prompt or prompts, or a number that is known already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from anyio import to_thread

from tokenflow.estimation import ApproximateCounter, TokenCounter
from tokenflow.estimation._messages import ChatRule, chat_cost

__all__ = ["APPROXIMATE", "Prompt", "count_emitted", "count_messages", "count_prompt"]

Prompt: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
"""A text or texts, or their tokens: what `prompt` and `input` of the APIs may be."""

_IN_LOOP: Final = 1 << 14  # characters, as in the counters
APPROXIMATE: Final = ApproximateCounter(4.0)
"""Near the truth, where being too high would charge it."""


async def count_messages(
    counter: TokenCounter, messages: Iterable[object], tools: Iterable[object]
) -> int:
    """Tokens of a chat request; by OpenAI's rule where the counter has none of its own."""
    own = getattr(counter, "count_messages_async", None)
    if own is not None:
        counted: int = await own(messages, tools)
        return counted
    tokens, texts = chat_cost(messages, tools, ChatRule())
    return tokens + await _count_texts(counter, texts)


async def count_prompt(counter: TokenCounter, prompt: Prompt) -> int:
    """Tokens of a prompt, or of all of them."""
    texts, tokens = [prompt] if isinstance(prompt, str) else [], 0
    for part in () if isinstance(prompt, str) else prompt:
        if isinstance(part, str):
            texts.append(part)
        else:  # tokens that somebody has made already
            tokens += 1 if isinstance(part, int) else len(part)
    return tokens + await _count_texts(counter, texts)


def count_emitted(counter: TokenCounter, text: str) -> int:
    """Tokens of a piece of output, at once: exact if the vocabulary is there already."""
    return (counter if _is_ready(counter) else APPROXIMATE).count(text)


async def _count_texts(counter: TokenCounter, texts: Sequence[str]) -> int:
    if sum(map(len, texts)) <= _IN_LOOP and _is_ready(counter):
        return sum(map(counter.count, texts))
    return await to_thread.run_sync(lambda: sum(map(counter.count, texts)), abandon_on_cancel=True)


def _is_ready(counter: TokenCounter) -> bool:
    """Can it count without loading anything first? Foreign ones are trusted to."""
    ready = getattr(counter, "_ready", None)
    return ready is None or bool(ready())
