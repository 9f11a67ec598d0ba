"""What a scheduler hands out: sequences, and the steps they go in."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, final

from tokenflow._usage import Request
from tokenflow.limits._order import Key

__all__ = ["Clock", "Prefill", "Segment", "SequenceState", "Step", "TokenSequence"]

SequenceState: TypeAlias = Literal["waiting", "prefilling", "decoding", "finished", "cancelled"]
"""Where a sequence is. One that is preempted is `"waiting"` again."""


class Clock:
    """How many steps a scheduler has planned."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps: int = 0


class Segment(NamedTuple):
    """A part of a prompt that other prompts begin with too.

    `chain` is everything up to its end, so that equal parts after different
    beginnings are different; `blocks` are those that end in it, and `end` is
    where the last of them does, in tokens.
    """

    chain: Hashable
    blocks: int
    end: int


@final
class TokenSequence:
    """A request on its way through a `TokenScheduler`, which alone changes it.

    `arrived` is the `now` it was added with, `preemptions` how often it was sent
    back to be recomputed. It is hashed by identity, so it can be a key for what
    the caller knows about it.
    """

    __slots__ = (
        "_clock",
        "_ends",
        "_grows",
        "_held",
        "_key",
        "_lag",
        "_limit",
        "_long",
        "_prefilled",
        "_produced",
        "_promised",
        "_reserve",
        "_segments",
        "_shared",
        "_target",
        "arrived",
        "preemptions",
        "priority",
        "request",
        "state",
        "tenant",
    )

    def __init__(
        self,
        clock: Clock,
        request: Request,
        *,
        arrived: float,
        priority: int,
        tenant: Hashable,
        limit: int,
        reserve: int,
        segments: tuple[Segment, ...],
    ) -> None:
        self.request: Request = request
        self.arrived: float = arrived
        self.priority: int = priority
        self.tenant: Hashable = tenant
        self.state: SequenceState = "waiting"
        self.preemptions: int = 0
        self._clock = clock
        self._key: Key = ()
        # The answer: output tokens at most, reserved, and so far (unless decoding).
        self._limit = limit
        self._reserve = reserve
        self._produced = 0
        # The prompt, with the answer so far when it is recomputed: tokens, and those done.
        self._target = request.input_tokens
        self._prefilled = 0
        self._long = False
        # While decoding: context less steps, and the steps in which it needs a block, and ends.
        self._lag = 0
        self._grows = 0
        self._ends = 0
        # Blocks: of its prefix, its own, and its own including those promised.
        self._segments = segments
        self._shared = sum(segment.blocks for segment in segments)
        self._held = 0
        self._promised = 0

    @property
    def context_tokens(self) -> int:
        """Tokens of it that are in the KV cache: 0 while it waits."""
        if self.state == "decoding":
            return self._lag + self._clock.steps
        return self._prefilled

    @property
    def output_tokens(self) -> int:
        """Tokens produced so far, the one of the latest step included; none are ever lost."""
        if self.state == "decoding":
            return self.context_tokens - self.request.input_tokens + 1
        return self._produced

    @property
    def _wanted(self) -> int:
        """Context tokens to promise memory for at admission.

        The last token of an answer is never read again, so it needs no memory. Any
        other does: nobody is admitted who could not take one step more.
        """
        prompt = self.request.input_tokens
        most = max(self._target, prompt + self._limit - 1)
        return min(most, max(self._target + 1, prompt + self._reserve - 1))

    def __repr__(self) -> str:
        return (
            f"<TokenSequence: {self.state}, {self.request.input_tokens:,} input tokens, "
            f"{self.output_tokens:,} output tokens>"
        )


@final
@dataclass(frozen=True, slots=True)
class Prefill:
    """So many tokens of a prompt in one step; with the `last` of them comes an output token."""

    sequence: TokenSequence
    tokens: int
    last: bool


@final
@dataclass(frozen=True, slots=True)
class Step:
    """What an engine computes next.

    `decodes` produce one token each, and so does each of `prefills` that is the
    `last` of its prompt (unless no output was asked for). `preempted` wait again,
    and what was computed of them is gone. `finished` reach their maximum with this
    step and have left; others end when the caller says so.

    `tokens` is what the step computes, `context_tokens` what it reads, its own
    included: the arguments of `capacity.step_seconds`. A step of 0 tokens has
    nothing to do.
    """

    decodes: tuple[TokenSequence, ...]
    prefills: tuple[Prefill, ...]
    preempted: tuple[TokenSequence, ...]
    finished: tuple[TokenSequence, ...]
    tokens: int
    context_tokens: int
