"""The answers that run: each gets one token in every step.

They all advance together, so nothing is done for each of them: a sequence is its
distance from the number of steps, and comes up again only in the step in which it
outgrows its blocks, and in which it ends. A step costs O(1) for each of those, and
a copy of the list.
"""

from __future__ import annotations

from typing import final

from ._blocks import KvBlocks
from ._sequence import Clock, TokenSequence

__all__ = ["Decoding"]


@final
class Decoding:
    """Sequences by when they joined. `context` is the sum of their context tokens.

    Who leaves stays in the lists of steps to come, none of which is further away than
    a block has tokens; when they come up they do not count.
    """

    __slots__ = ("_blocks", "_ending", "_growing", "clock", "context", "sequences")

    def __init__(self, blocks: KvBlocks) -> None:
        self._blocks = blocks
        self._growing: dict[int, list[TokenSequence]] = {}
        self._ending: dict[int, list[TokenSequence]] = {}
        self.clock = Clock()
        self.context = 0
        self.sequences: dict[TokenSequence, None] = {}

    def join(self, sequence: TokenSequence) -> None:
        """Its prompt is complete: from the next step on it decodes."""
        sequence.state = "decoding"
        sequence._lag = lag = sequence._prefilled - self.clock.steps
        sequence._ends = sequence.request.input_tokens + sequence._limit - 1 - lag
        self._watch(sequence, self._blocks.room(sequence) + 1 - lag)
        self.sequences[sequence] = None
        self.context += sequence._prefilled

    def leave(self, sequence: TokenSequence) -> None:
        """It ends, or gives way; what it has produced is kept."""
        sequence._produced = sequence.output_tokens
        self.context -= sequence.context_tokens
        del self.sequences[sequence]

    def coming_up(self) -> list[TokenSequence]:
        """Take out those that may outgrow their blocks in the coming step."""
        return self._growing.pop(self.clock.steps + 1, [])

    def outgrows(self, sequence: TokenSequence) -> bool:
        """Does it need a block for the coming step, still?"""
        return sequence.state == "decoding" and sequence._grows == self.clock.steps + 1

    def grow(self, sequence: TokenSequence) -> None:
        """Give it a block, which has to be free."""
        self._blocks.grow(sequence)
        self._watch(sequence, sequence._grows + self._blocks.block_size)

    def advance(self) -> tuple[TokenSequence, ...]:
        """One token more for each."""
        self.clock.steps += 1
        self.context += len(self.sequences)
        return tuple(self.sequences)

    def ended(self) -> list[TokenSequence]:
        """Take out those that have just reached their maximum."""
        steps = self.clock.steps
        listed = self._ending.pop(steps, ())
        return [each for each in listed if each.state == "decoding" and each._ends == steps]

    def _watch(self, sequence: TokenSequence, grows: int) -> None:
        """Let it come up when it needs a block, or when it ends without needing one before."""
        sequence._grows = grows
        if grows <= sequence._ends:
            self._growing.setdefault(grows, []).append(sequence)
        else:
            self._ending.setdefault(sequence._ends, []).append(sequence)
