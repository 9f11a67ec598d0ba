"""What a provider counts, says and refuses, in one value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from ._headers import MINUTE, Headers
from ._refusal import LONGEST_WAIT, Refusal, classify, status_of
from ._usage import (
    RateLimitStatus,
    Request,
    Usage,
    positive_int,
    positive_seconds,
    token_count,
)
from .batching._request_limits import RequestLimits
from .limits import Fifo, InFlightGate, Order, Oversize, Quota, TokenLimits, TokenRateLimiter
from .limits._rate import PAUSES

__all__ = ["Provider", "TokenWeights"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """How much each token of a call counts in a quota: `Quota(limit, of=TokenWeights(...))`.

    `cached` and `cache_write` are for those parts of the input. With `reserve_declared`, a
    usage that declares a maximum is a reservation: that maximum counts in place of the output,
    unweighted. With `larger`, only the larger of input and output counts, not their sum; an int
    counts as it is then. Fractions are rounded up. `unit` is what servers call what is counted.

    >>> burn_down = TokenWeights(cached=0, output=5, reserve_declared=True)
    >>> burn_down(Usage(input_tokens=900, output_tokens=80, max_output_tokens=1_000))
    1900
    >>> burn_down(Usage(input_tokens=900, output_tokens=80, cached_tokens=600))
    700

    Raises:
        ValueError: a weight that is no finite number >= 0.
    """

    input: float = 1
    cached: float = 1
    cache_write: float = 1
    output: float = 1
    reserve_declared: bool = False
    larger: bool = False
    unit: str = "tokens"

    @property
    def counts_int(self) -> bool:
        """Does a total say enough?"""
        return self.larger

    @property
    def __name__(self) -> str:
        """The default name of a quota, as that of a function is."""
        return self.unit

    def __post_init__(self) -> None:
        for name in ("input", "cached", "cache_write", "output"):
            weight: Any = getattr(self, name)
            if type(weight) not in (int, float) or not 0 <= weight < math.inf:
                raise ValueError(f"{name} must be a finite weight >= 0, not {weight!r}")

    def __call__(self, usage: Usage) -> int:
        fresh = usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens
        output = self.output * usage.output_tokens
        if self.reserve_declared and usage.max_output_tokens is not None:
            output = usage.max_output_tokens
        of_input = (
            self.input * fresh
            + self.cached * usage.cached_tokens
            + self.cache_write * usage.cache_write_tokens
        )
        return math.ceil(max(of_input, output) if self.larger else of_input + output)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """What one account may do at one provider, and how to understand what that says.

    It is for one model, or for models that share their quotas. `tokenflow.providers` has
    presets. `TokenLimits` takes one where it takes a limiter. It is a value without state: to
    share a quota, share what one `limiter()` returned, not the provider.

    Args:
        name: For messages.
        quotas: What it counts, and when.
        max_requests: How many calls may be open at a time; None: any number.
        assumed_output_tokens: What it reserves for a call that declares no maximum; None:
            nothing is reserved for that.
        repeats_input: Each of a call's choices counts at least its input.
        longest_wait: A `retry_after` beyond so many seconds is a refusal for good.
        refills_steadily: Is a quota a bucket, or does all of it come back at its reset?
        header_periods: The period of "requests", "tokens" and so on, in seconds, where its
            headers name none; for others it is what the numbers imply, or a minute.
        request_limits: What one request may hold, by endpoint.

    >>> provider = Provider(name="ours", quotas=(Quota(60_000), Quota(500, of="requests")))
    >>> provider.limiter()
    <TokenRateLimiter: 0 of 60,000 tokens per 60 s, 0 of 500 requests per 60 s, 0 waiting>

    Raises:
        TypeError, ValueError: a setting that makes no sense.
    """

    name: str
    quotas: tuple[Quota, ...] = ()
    max_requests: int | None = None
    assumed_output_tokens: int | None = None
    repeats_input: bool = False
    longest_wait: float = LONGEST_WAIT
    refills_steadily: bool = False
    header_periods: Mapping[str, float] = field(default_factory=dict, hash=False)
    request_limits: Mapping[str, RequestLimits] = field(
        default_factory=dict, hash=False, repr=False
    )

    def __post_init__(self) -> None:
        for quota in self.quotas:
            if not isinstance(quota, Quota):
                raise TypeError(f"quotas must be Quota(...) objects, not {quota!r}")
        object.__setattr__(self, "quotas", tuple(self.quotas))
        if self.max_requests is not None:
            positive_int(self.max_requests, "max_requests")
        if self.assumed_output_tokens is not None:
            token_count(self.assumed_output_tokens, "assumed_output_tokens")
        positive_seconds(self.longest_wait, "longest_wait")

    def limiter(
        self,
        *,
        order: Order = Fifo(),  # noqa: B008 (stateless)
        max_waiting: int | None = None,
        oversize: Oversize = "raise",
    ) -> TokenRateLimiter | TokenLimits:
        """A new limiter over its quotas, with windows of its own.

        It can always be paused, also where nothing is limited: for a server that says
        "retry after".
        """
        quotas = self.quotas or (PAUSES,)
        if self.max_requests is None:
            return TokenRateLimiter(
                *quotas, order=order, max_waiting=max_waiting, oversize=oversize
            )
        return TokenLimits(
            InFlightGate(self.max_requests, of="requests"),
            TokenRateLimiter(*quotas),
            order=order,
            max_waiting=max_waiting,
            oversize=oversize,
        )

    def charge(self, request: Request, output_tokens: int) -> Usage:
        """What to reserve for a call that is estimated to generate `output_tokens` in all.

        The maximum that it declares is for each choice.

        >>> from tokenflow import providers
        >>> request = Request(input_tokens=80, max_output_tokens=256, choices=2)
        >>> providers.openai(tpm=30_000).charge(request, 300)
        Usage(input_tokens=80, output_tokens=300, max_output_tokens=512)
        """
        declared = request.max_output_tokens
        if declared is None:
            declared = self.assumed_output_tokens
        if self.repeats_input and (declared or request.choices > 1):
            declared = max(declared or 0, request.input_tokens)
        return Usage(
            input_tokens=request.input_tokens,
            output_tokens=output_tokens,
            max_output_tokens=None if declared is None else declared * request.choices,
        )

    def status(
        self,
        headers: object,
        body: object = None,
        *,
        age: float = 0.0,
        unix_now: float | None = None,
    ) -> RateLimitStatus:
        """What a response says about the quotas, for `limiter.observe`. Raises for nothing.

        `age`: how many seconds ago the call was sent; not since when it waited here. Give it:
        what was left when a long call began has come back since. `body` matters for refusals.
        A `retry_after` beyond `longest_wait` is left out, for nobody should pause for it.
        """
        return status_of(
            Headers(headers, unix_now),
            body,
            age,
            self.header_periods,
            otherwise=MINUTE,
            refills_steadily=self.refills_steadily,
            longest_wait=self.longest_wait,
        )

    def classify(self, outcome: object) -> Refusal | None:
        """What kind of refusal a response, or what an SDK raised, is; None: it is none.

        >>> from tokenflow import providers
        >>> class Response:
        ...     status_code, headers = 429, {"retry-after": "86400"}
        >>> refusal = providers.openai(tpm=30_000).classify(Response())
        >>> refusal.kind, refusal.retry_after, refusal.is_permanent
        ('exhausted', 86400.0, True)
        """
        return classify(outcome, longest_wait=self.longest_wait)
