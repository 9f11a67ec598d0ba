"""The memory of a KV cache, in blocks: what is held, and what is promised.

A sequence holds the blocks of its context, and is promised those of what it is
expected to come to; where it holds more, that counts, so that it does not use up
what others are promised. Blocks of a prefix that several sequences begin with are
counted once, and go with the last of them.

Invariant: `held` is the sum over sequences and shared segments, at most `total`,
and at most `promised`. Promises exceed the total when answers exceed estimates.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

from ._sequence import Segment, TokenSequence

__all__ = ["KvBlocks"]


class _Shared:
    """Blocks that all who begin with them hold together."""

    __slots__ = ("computed", "holders")

    def __init__(self) -> None:
        self.holders = 0
        self.computed = False


@final
class KvBlocks:
    """The ledger. Each operation costs a few dictionary look-ups per segment of a prefix."""

    __slots__ = ("_shared", "block_size", "held", "promised", "total")

    def __init__(self, total: int, block_size: int) -> None:
        self.total = total
        self.block_size = block_size
        self.held = 0
        self.promised = 0
        self._shared: dict[Hashable, _Shared] = {}

    def of(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block_size)

    def room(self, sequence: TokenSequence) -> int:
        """Context tokens for which it has blocks."""
        return (sequence._shared + sequence._held) * self.block_size

    def fits(self, sequence: TokenSequence) -> bool:
        """May it be admitted without breaking a promise?"""
        needed = self.of(sequence._wanted) - sequence._shared
        for segment in sequence._segments:
            if segment.chain not in self._shared:
                needed += segment.blocks
        return self.promised + needed <= self.total

    def take(self, sequence: TokenSequence) -> None:
        """Book all of its prompt, and skip what others have computed of it.

        But never its last token, without which there would be no output.
        """
        sequence._held = self.of(sequence._target) - sequence._shared
        sequence._promised = self.of(sequence._wanted) - sequence._shared
        self._add(sequence._held, sequence._promised)
        for segment in sequence._segments:  # who computed one has computed those before it
            if self._hold(segment).computed:
                sequence._prefilled = min(segment.end, sequence._target - 1)

    def grow(self, sequence: TokenSequence) -> None:
        """One more block, which has to be free."""
        self.held += 1
        sequence._held += 1
        if sequence._held > sequence._promised:
            self.promised += 1
            sequence._promised += 1

    def computed(self, sequence: TokenSequence) -> None:
        """It got further: others may skip what is complete now."""
        for segment in sequence._segments:
            if segment.end <= sequence._prefilled:
                self._shared[segment.chain].computed = True

    def give_back(self, sequence: TokenSequence) -> None:
        """Free all that it holds and nobody else does."""
        self._add(-sequence._held, -sequence._promised)
        sequence._held = sequence._promised = 0
        for segment in sequence._segments:
            shared = self._shared[segment.chain]
            shared.holders -= 1
            if not shared.holders:
                del self._shared[segment.chain]
                self._add(-segment.blocks, -segment.blocks)

    def _hold(self, segment: Segment) -> _Shared:
        shared = self._shared.get(segment.chain)
        if shared is None:
            shared = self._shared[segment.chain] = _Shared()
            self._add(segment.blocks, segment.blocks)
        shared.holders += 1
        return shared

    def _add(self, held: int, promised: int) -> None:
        self.held += held
        self.promised += promised
