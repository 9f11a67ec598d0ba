"""What an engine computes next: continuous batching, as a pure planner of steps.

Goal: every running answer gets a token in every step, prompts fill what is left of
the step's budget, and memory runs out as seldom as possible and for as few.

Invariant: a step's tokens <= max_num_batched_tokens; sequences that run <=
max_num_seqs; the blocks they hold <= the cache's; and whoever was added waits,
runs, or has ended.

`_prompts` says who goes before whom, `_decoding` why a step is cheap, `_blocks` what
counts as memory.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from tokenflow._errors import RequestTooLarge
from tokenflow._usage import Request, positive_int
from tokenflow.estimation import HistoricalEstimator, OutputEstimator
from tokenflow.limits import Fifo, Order

from ._blocks import KvBlocks
from ._decoding import Decoding
from ._prompts import Prompts
from ._sequence import Prefill, Segment, Step, TokenSequence

__all__ = ["Reserve", "SchedulerStatistics", "TokenScheduler"]

Reserve: TypeAlias = Literal["declared", "estimate", "none"]
"""How much of an answer's memory is promised to it at admission."""

# Answers that run are half done on average, so what all of them are promised is more than
# they hold at a time even with the median; a higher quantile lets memory lie idle.
_MEDIAN: Final = 0.5


@final
@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """`TokenScheduler.statistics()`: what there is now, then totals.

    `held_tokens` and `promised_tokens` are of memory, in whole blocks, shared ones
    once; what is promised includes what is held. `cached_tokens` were not computed
    because another sequence had them; `recomputed_tokens` were, and were given up.
    """

    waiting: int
    waiting_tokens: int
    prefilling: int
    decoding: int
    kv_cache_tokens: int
    held_tokens: int
    promised_tokens: int
    steps: int
    prefilled_tokens: int
    decoded_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    preemptions: int
    finished: int
    cancelled: int

    @property
    def kv_cache_usage(self) -> float:
        """Share of the memory that is held, as engines report it."""
        return self.held_tokens / self.kv_cache_tokens


@final
class TokenScheduler:
    """Plans an engine's steps so that each is within a token budget and within memory.

    >>> from tokenflow import Request
    >>> scheduler = TokenScheduler(256, 2_048, 400_000)
    >>> sequence = scheduler.add(Request(input_tokens=5_000, max_output_tokens=3), now=0.0)
    >>> steps = [scheduler.step() for _ in range(5)]
    >>> [part.tokens for step in steps for part in step.prefills]
    [2048, 2048, 904]
    >>> [len(step.decodes) for step in steps], sequence.output_tokens, sequence.state
    ([0, 0, 0, 1, 1], 3, 'finished')

    A request runs only past three gates: one of `max_num_seqs` slots is free, the
    step has room under `max_num_batched_tokens`, and `kv_cache_tokens` of memory,
    in blocks of `block_size`, have room for its prompt and what is reserved for its
    answer. Running answers get one token each, in every step; prompts are cut to fit
    the rest. `context_window` bounds what one request may come to, which is another
    limit than what all of them may hold together.

    `reserve` says what an answer is promised at admission. `"declared"`: its maximum;
    nothing is ever preempted, and much of the memory lies idle. `"estimate"`: what
    `estimator` says, or what is really held where that is more; by default the median
    of the answers that have ended. `"none"`: a single token.

    When memory runs out nevertheless, the lowest priority gives way, and among equals
    the youngest: it waits again where its arrival puts it, and its prompt and output
    are prefilled again. The oldest of the highest priority never gives way, and nobody
    is admitted in a step that preempts.

    `order` ranks by input + reserved output tokens; a `Fifo`'s backfill is for windows
    and does nothing here. Nobody overtakes a head that waits for a slot or for memory.
    Prompts longer than half of a step's budget take at most half of its room while
    others want it.

    An engine, or a simulation of one, drives it: `step()`, compute it, `finish()`
    whoever has produced a last token before the maximum, and again. There is no clock
    in it: `now` is for orders that weigh how long somebody waits.

    Raises:
        ValueError: limits that contradict each other.
    """

    __slots__ = (
        "_added",
        "_blocks",
        "_cancelled",
        "_decoded",
        "_decoding",
        "_estimator",
        "_finished",
        "_order",
        "_preemptions",
        "_prefilled",
        "_prompts",
        "_recomputed",
        "_reserve",
        "context_window",
        "max_num_batched_tokens",
        "max_num_seqs",
    )

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        kv_cache_tokens: int,
        *,
        order: Order = Fifo(),  # noqa: B008 (stateless)
        block_size: int = 16,
        reserve: Reserve = "estimate",
        estimator: OutputEstimator | None = None,
        context_window: int | None = None,
    ) -> None:
        budget = positive_int(max_num_batched_tokens, "max_num_batched_tokens")
        if positive_int(max_num_seqs, "max_num_seqs") > budget:
            raise ValueError(
                f"max_num_seqs = {max_num_seqs} exceeds max_num_batched_tokens = {budget}: each "
                "running sequence takes a token of every step, so some would have to miss theirs; "
                "lower the one or raise the other"
            )
        if not isinstance(order, Order):
            raise TypeError(f"order must be Fifo(), SmallestFirst() or FairShare(), not {order!r}")
        if reserve not in ("declared", "estimate", "none"):
            raise ValueError(f'reserve must be "declared", "estimate" or "none", not {reserve!r}')
        if context_window is not None:
            positive_int(context_window, "context_window")
        self.max_num_seqs: int = max_num_seqs
        self.max_num_batched_tokens: int = budget
        self.context_window: int | None = context_window
        self._reserve: Reserve = reserve
        self._estimator = estimator or HistoricalEstimator(_MEDIAN)
        self._order = order.fresh()
        self._blocks = _memory(kv_cache_tokens, block_size)
        self._prompts = Prompts(self._blocks, self._order, budget // 2)
        self._decoding = Decoding(self._blocks)
        self._added = self._finished = self._cancelled = self._preemptions = 0
        self._prefilled = self._decoded = self._recomputed = 0

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens of context that fit into memory, in whole blocks."""
        return self._blocks.total * self._blocks.block_size

    @property
    def unfinished(self) -> int:
        """Sequences that wait or run. While there are any, a step has something to do."""
        return self._prompts.waiting + len(self._prompts.under_way) + len(self._decoding.sequences)

    def add(
        self,
        request: Request,
        *,
        now: float,
        priority: int = 0,
        tenant: Hashable = None,
        prefix: Sequence[tuple[Hashable, int]] = (),
    ) -> TokenSequence:
        """Let a request wait for its turn, and return what it is in steps.

        `now` is in seconds, by any clock; lower `priority` goes first. Without a
        `max_output_tokens` the answer may go on until the context window or the
        memory is full. Several `choices` are as many requests with a common prefix.

        `prefix` is what the prompt has in common with others, from its beginning on,
        in parts of (what it is, tokens): `[("system", 900), ("manual", 7_000)]`. Whole
        blocks of it are kept once as long as somebody holds them, and not computed
        again once somebody has.

        Raises:
            RequestTooLarge: prompt and maximum exceed the context window or the memory.
            TypeError, ValueError: an argument that makes no sense. Nothing has changed.
        """
        _check(request, now, priority)
        segments = self._segments(request.input_tokens, prefix)
        limit = self._limit(request)
        reserve = self._reserved(request, limit)
        sequence = TokenSequence(
            self._decoding.clock,
            request,
            arrived=now,
            priority=priority,
            tenant=tenant,
            limit=limit,
            reserve=reserve,
            segments=segments,
        )
        sequence._key = self._order.key(
            priority,
            request.input_tokens + reserve,
            tenant,
            now,
            self._added,
            backlogged=self._prompts.waiting > 0,
        )
        self._added += 1
        self._prompts.push(sequence)
        return sequence

    def finish(self, sequence: TokenSequence) -> None:
        """It has produced its last token: free its slot and its memory.

        Not needed for those in `Step.finished`. What has ended already stays as it is.

        Raises:
            ValueError: the sequence is another scheduler's.
        """
        self._end(sequence, "finished")

    def cancel(self, sequence: TokenSequence) -> None:
        """Nobody wants it any more, in whatever state it is. Like `finish`, but for the counts.

        Raises:
            ValueError: the sequence is another scheduler's.
        """
        self._end(sequence, "cancelled")

    def step(self) -> Step:
        """Plan the next step, taking the one before as computed."""
        preempted = self._make_room()
        decodes = self._decoding.advance()
        context = self._decoding.context
        prefills = self._prompts.spend(
            self.max_num_batched_tokens - len(decodes),
            0 if preempted else self.max_num_seqs - len(decodes) - len(self._prompts.under_way),
        )
        tokens = sum(part.tokens for part in prefills)
        context += sum(part.sequence.context_tokens for part in prefills)
        self._prefilled += tokens
        self._decoded += len(decodes)
        finished = self._move_on(prefills)
        return Step(
            decodes, prefills, tuple(preempted), tuple(finished), len(decodes) + tokens, context
        )

    def statistics(self) -> SchedulerStatistics:
        """Live numbers and totals, at a constant cost."""
        return SchedulerStatistics(
            waiting=self._prompts.waiting,
            waiting_tokens=self._prompts.tokens,
            prefilling=len(self._prompts.under_way),
            decoding=len(self._decoding.sequences),
            kv_cache_tokens=self.kv_cache_tokens,
            held_tokens=self._blocks.held * self._blocks.block_size,
            promised_tokens=self._blocks.promised * self._blocks.block_size,
            steps=self._decoding.clock.steps,
            prefilled_tokens=self._prefilled,
            decoded_tokens=self._decoded,
            cached_tokens=self._prompts.cached,
            recomputed_tokens=self._recomputed,
            preemptions=self._preemptions,
            finished=self._finished,
            cancelled=self._cancelled,
        )

    def __repr__(self) -> str:
        return (
            f"<TokenScheduler: {len(self._decoding.sequences)} decoding, "
            f"{len(self._prompts.under_way)} prefilling, {self._prompts.waiting} waiting, "
            f"{self._blocks.held * self._blocks.block_size:,} of {self.kv_cache_tokens:,} "
            "tokens held>"
        )

    # -- a request, checked --------------------------------------------------------------------

    def _limit(self, request: Request) -> int:
        """Output tokens at most, or RequestTooLarge."""
        prompt, declared = request.input_tokens, request.max_output_tokens
        wanted = prompt + (1 if declared is None else declared)
        window = self.kv_cache_tokens if self.context_window is None else self.context_window
        if wanted > window and self.context_window is not None:
            raise RequestTooLarge(
                f"{prompt} input tokens and up to {wanted - prompt} of output exceed the context "
                f"window of {window} tokens: shorten the prompt or lower max_output_tokens",
                cost=wanted,
                limit=window,
            )
        if wanted > self.kv_cache_tokens:
            raise RequestTooLarge(
                f"{prompt} input tokens and up to {wanted - prompt} of output exceed the "
                f"{self.kv_cache_tokens} tokens of the whole kv cache: shorten the prompt, lower "
                "max_output_tokens, or give the engine more memory",
                cost=wanted,
                limit=self.kv_cache_tokens,
            )
        return min(window, self.kv_cache_tokens) - prompt if declared is None else declared

    def _reserved(self, request: Request, limit: int) -> int:
        """Output tokens to promise memory for."""
        if self._reserve == "declared":
            return limit
        if self._reserve == "none":
            return min(limit, 1)
        return min(limit, max(1, self._estimator.estimate(request).tokens))

    def _segments(self, prompt: int, prefix: Sequence[tuple[Hashable, int]]) -> tuple[Segment, ...]:
        """The parts of a prefix, as whole blocks."""
        segments = []
        chain: Hashable = ()
        end = blocks = 0
        for what, tokens in prefix:
            end += positive_int(tokens, f"prefix tokens of {what!r}")
            chain = (chain, what, tokens)
            hash(chain)  # or it would fail in the middle of a step
            before, blocks = blocks, end // self._blocks.block_size
            segments.append(Segment(chain, blocks - before, blocks * self._blocks.block_size))
        if end > prompt:
            raise ValueError(
                f"a prefix of {end} tokens is longer than the prompt of {prompt} that has it"
            )
        return tuple(segments)

    # -- state changes -------------------------------------------------------------------------

    def _make_room(self) -> list[TokenSequence]:
        """A block for each that needs one in the coming step. Returns who gave way for it."""
        decoding, blocks = self._decoding, self._blocks
        preempted = []
        for sequence in decoding.coming_up():
            while blocks.held == blocks.total and decoding.outgrows(sequence):
                preempted.append(self._preempt())
            if decoding.outgrows(sequence):
                decoding.grow(sequence)
        return preempted

    def _preempt(self) -> TokenSequence:
        """Send back the lowest priority, and of those the youngest."""
        running = (*self._decoding.sequences, *self._prompts.under_way)
        sequence = max(running, key=lambda each: (each.priority, each._key[-1]))
        self._recomputed += sequence.context_tokens
        self._preemptions += 1
        sequence.preemptions += 1
        self._leave(sequence)
        self._prompts.push(sequence)
        return sequence

    def _move_on(self, prefills: tuple[Prefill, ...]) -> list[TokenSequence]:
        """Those whose prompt is complete decode from now on. Returns who has ended."""
        finished = self._decoding.ended()
        for sequence in (part.sequence for part in prefills if part.last):
            sequence._produced = min(sequence._produced + 1, sequence._limit)
            if sequence._produced == sequence._limit:
                finished.append(sequence)
            else:
                self._prompts.stop(sequence)
                self._decoding.join(sequence)
        for sequence in finished:
            self._end(sequence, "finished")
        return finished

    def _leave(self, sequence: TokenSequence) -> None:
        """Free the slot and the memory of one that runs."""
        if sequence.state == "decoding":
            self._decoding.leave(sequence)
        else:
            self._prompts.stop(sequence)
        self._blocks.give_back(sequence)
        sequence._prefilled = 0

    def _end(self, sequence: TokenSequence, state: Literal["finished", "cancelled"]) -> None:
        """Take it out, wherever it is, then tell the order and the estimator how it went."""
        if sequence._clock is not self._decoding.clock:
            raise ValueError(f"{sequence!r} is not of this scheduler")
        if sequence.state in ("finished", "cancelled"):
            return
        waits = sequence.state == "waiting"
        if not waits:
            self._leave(sequence)
        sequence.state = state
        if waits:
            self._prompts.withdraw(sequence)
        self._finished += state == "finished"
        self._cancelled += state == "cancelled"
        self._settle(sequence, began=not waits or sequence.preemptions > 0)

    def _settle(self, sequence: TokenSequence, *, began: bool) -> None:
        request, output = sequence.request, sequence._produced
        if self._order.shares:
            used = request.input_tokens + output if began else 0
            self._order.settle(sequence.tenant, used - request.input_tokens - sequence._reserve)
        if self._reserve == "estimate" and output:
            cut_off = sequence.state == "cancelled" or output == sequence._limit
            self._estimator.observe(request, output, truncated=cut_off)


def _memory(kv_cache_tokens: int, block_size: int) -> KvBlocks:
    size = positive_int(block_size, "block_size")
    blocks = positive_int(kv_cache_tokens, "kv_cache_tokens") // size
    if not blocks:
        raise ValueError(
            f"kv_cache_tokens = {kv_cache_tokens} is less than a block of {size}: "
            "lower block_size or give it more memory"
        )
    return KvBlocks(blocks, size)


def _check(request: Request, now: float, priority: int) -> None:
    if not isinstance(request, Request):
        raise TypeError(f"a request must be a Request(input_tokens=...), not {request!r}")
    if request.input_tokens == 0:
        raise ValueError(
            "input_tokens must be at least 1, not 0: without a prompt there is no step"
        )
    if request.choices != 1:
        raise ValueError(
            f"choices must be 1, not {request.choices}: add as many requests, with the prompt as "
            "their common prefix"
        )
    if isinstance(now, bool) or not isinstance(now, (int, float)):
        raise TypeError(f"now must be a number of seconds, not {now!r}")
    if not math.isfinite(now):
        raise ValueError(f"now must be a finite number of seconds, not {now!r}")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"priority must be an int (lower goes first), not {priority!r}")
