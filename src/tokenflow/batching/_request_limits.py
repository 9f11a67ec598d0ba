"""What one request may hold, per provider. Figures drift: check them, and make your own.

All are frozen values, so `dataclasses.replace(OPENAI_EMBEDDINGS, max_items=1_000)` adapts one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypedDict, final

from ._fitting import positive

__all__ = [
    "AZURE_OPENAI_EMBEDDINGS",
    "COHERE_EMBEDDINGS",
    "DASHSCOPE_EMBEDDINGS",
    "GEMINI_EMBEDDINGS",
    "MISTRAL_EMBEDDINGS",
    "OPENAI_BATCH",
    "OPENAI_EMBEDDINGS",
    "REQUEST_LIMITS",
    "VERTEX_EMBEDDINGS",
    "PackArguments",
    "RequestLimits",
]

_UNBOUNDED = 2**62


class PackArguments(TypedDict):
    """The part of the arguments of `pack`, `pack_stream` and `TokenBatcher` that is a limit."""

    token_budget: int
    max_items: int | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What one request may hold; None is unlimited, or not documented.

    `max_tokens` is for the whole request, `max_item_tokens` for each item in it,
    `max_bytes` for its body.
    """

    max_items: int | None = None
    max_item_tokens: int | None = None
    max_tokens: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_items", "max_item_tokens", "max_tokens", "max_bytes"):
            if getattr(self, name) is not None:
                positive(getattr(self, name), name)

    def pack_arguments(self, token_budget: int | None = None) -> PackArguments:
        """Budget and item cap for the packers, at most `token_budget` where that is given.

        Items above `max_item_tokens` are yours to split first: no packing makes
        them fit.

        >>> OPENAI_EMBEDDINGS.pack_arguments()
        {'token_budget': 300000, 'max_items': 2048}
        """
        most = _UNBOUNDED if self.max_tokens is None else self.max_tokens
        wanted = most if token_budget is None else positive(token_budget, "token_budget")
        return {"token_budget": min(most, wanted), "max_items": self.max_items}


OPENAI_EMBEDDINGS: Final = RequestLimits(max_items=2_048, max_item_tokens=8_192, max_tokens=300_000)
AZURE_OPENAI_EMBEDDINGS: Final = RequestLimits(max_items=2_048, max_item_tokens=8_192)
COHERE_EMBEDDINGS: Final = RequestLimits(max_items=96)
GEMINI_EMBEDDINGS: Final = RequestLimits(max_items=100)
VERTEX_EMBEDDINGS: Final = RequestLimits(max_items=250)
MISTRAL_EMBEDDINGS: Final = RequestLimits(max_tokens=16_384)
DASHSCOPE_EMBEDDINGS: Final = RequestLimits(max_items=10)
OPENAI_BATCH: Final = RequestLimits(max_items=50_000, max_bytes=200_000_000)

REQUEST_LIMITS: Final[Mapping[str, RequestLimits]] = MappingProxyType(
    {
        "openai/embeddings": OPENAI_EMBEDDINGS,
        "azure/embeddings": AZURE_OPENAI_EMBEDDINGS,
        "cohere/embeddings": COHERE_EMBEDDINGS,
        "gemini/embeddings": GEMINI_EMBEDDINGS,
        "vertex/embeddings": VERTEX_EMBEDDINGS,
        "mistral/embeddings": MISTRAL_EMBEDDINGS,
        "dashscope/embeddings": DASHSCOPE_EMBEDDINGS,
        "openai/batch": OPENAI_BATCH,
    }
)
