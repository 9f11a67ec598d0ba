"""The object that puts a call through everything: counting, estimating, limits, routing."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, final

from tokenflow._refusal import classify
from tokenflow._usage import Request, Usage
from tokenflow.estimation import HistoricalEstimator, OutputEstimator, TokenCounter
from tokenflow.limits import Limiter
from tokenflow.limits._lease import log

from ._call import Call, CallEvent, Ticket
from ._family import Counters, Limits, ProviderRules, families, match
from ._input import Prompt, count_messages, count_prompt
from ._map import MapResults, Show
from ._options import current_options
from ._progress import shown_by

__all__ = ["FlowStatistics", "TokenFlow"]

T = TypeVar("T")
R = TypeVar("R")
Observer = Callable[[CallEvent], object]
Count = Callable[[TokenCounter], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class FlowStatistics:
    """`TokenFlow.statistics()`: calls that are over, by outcome, and what lies below.

    `tokens` is what they were charged in the end. `limits` are the statistics of the
    limits by model pattern, `estimator` those of the estimator where it has any.
    """

    calls: int
    outcomes: Mapping[str, int]
    tokens: int
    limits: Mapping[str, Any]
    estimator: Any


@final
class TokenFlow:
    """One call through everything: counted, estimated, admitted, routed, reconciled.

    >>> import anyio, tokenflow
    >>> flow = tokenflow.TokenFlow(tokenflow.TokenRateLimiter(tokens_per_minute=60_000))
    >>> async def main():
    ...     async with flow.request(input_tokens=900, max_output_tokens=500, model="gpt-5") as call:
    ...         response = {"usage": {"prompt_tokens": 900, "completion_tokens": 20}}
    ...         call.reconcile(response)
    ...     return call.usage.total_tokens
    >>> anyio.run(main)
    920

    `flow.request` is for code that makes its calls itself; `tokenflow.integrations`
    has transports that do the same inside the OpenAI and Anthropic SDKs.

    Args:
        limits: A limiter, a `Provider`, or a mapping from patterns of model names
            ("gpt-*", "*") to these: the first that matches counts, and one object
            under two patterns is one set of limits. None limits nothing.
        router: A `TokenRouter`; a call passes it in the same step as its limits.
            The queue goes by the order and the bounds of `limits` then.
        counter: Counts input; a `TokenCounter`, or a mapping as above. By default
            tiktoken, by the model's name.
        estimator: Estimates output, and learns; by default `HistoricalEstimator()`.
        observers: Functions that are told of each call when it is over. They run in
            the event loop, and what they raise is logged and goes no further.
    """

    __slots__ = ("_counters", "_families", "_observers", "_outcomes", "_tokens", "estimator")

    def __init__(
        self,
        limits: Limits | Mapping[str, Limits] | None = None,
        *,
        router: Limiter | None = None,
        counter: TokenCounter | Mapping[str, TokenCounter] | None = None,
        estimator: OutputEstimator | None = None,
        observers: Iterable[Observer] = (),
    ) -> None:
        self._families = families(limits, router)
        self._counters = Counters(counter)
        self.estimator: OutputEstimator = HistoricalEstimator() if estimator is None else estimator
        self._observers = tuple(observers)
        self._outcomes: dict[str, int] = {}
        self._tokens = 0

    def request(
        self,
        *,
        messages: Iterable[object] | None = None,
        prompt: Prompt | None = None,
        input_tokens: int | None = None,
        tools: Iterable[object] = (),
        model: str | None = None,
        max_output_tokens: int | None = None,
        choices: int = 1,
        task: str | None = None,
        tenant: Hashable = None,
        priority: int | None = None,
        max_wait: float | None = None,
        affinity: Hashable = None,
        region: str | None = None,
        exclude: Iterable[str] = (),
        rules: ProviderRules | None = None,
    ) -> Call:
        """`async with flow.request(messages=...) as call:` waits until the call may go.

        One of `messages` (a chat), `prompt` (a text, texts, or their tokens) and
        `input_tokens` says what is sent. `max_output_tokens` is what the call declares,
        for each of its `choices`; 0 for embeddings. What is not said here is taken
        from `call_options`. `exclude` names replicas that are not to be tried again.
        `rules`, a `Provider`, says how its server counts and refuses, where the limits
        are not one themselves.

        Long inputs are counted in a thread; a vocabulary is loaded at the first use.

        Raises:
            UnknownModel: no pattern matches the model.
            RequestTooLarge, NoReplica: it can never go.
            QueueFull, WaitTimeout: not now; see `max_waiting` and `max_wait`.
            TypeError, ValueError: none or several of the three inputs, no counts, or
                what no limiter takes.
        """
        given = sum(each is not None for each in (messages, prompt, input_tokens))
        if given != 1:
            raise TypeError(f"a call has one of messages, prompt and input_tokens, not {given}")
        if isinstance(messages, (str, bytes, dict)):
            kind = type(messages).__name__
            raise TypeError(f"messages must be a list of them, not a {kind}: a text is a prompt")
        if messages is not None:
            messages = list(messages)
        said = current_options()
        described = Request(
            input_tokens=0 if input_tokens is None else input_tokens,
            max_output_tokens=max_output_tokens,
            task=said.task if task is None else task,
            model=model,
            choices=choices,
            content=prompt if messages is None else messages,
        )
        options = {
            "tenant": said.tenant if tenant is None else tenant,
            "priority": (said.priority or 0) if priority is None else priority,
            "max_wait": said.max_wait if max_wait is None else max_wait,
            "model": model,
            "affinity": said.affinity if affinity is None else affinity,
            "region": said.region if region is None else region,
        }
        if exclude := exclude if isinstance(exclude, str) else tuple(exclude):
            options["exclude"] = exclude
        count = None
        if messages is not None:
            count = partial(count_messages, messages=messages, tools=list(tools))
        elif prompt is not None:
            count = partial(count_prompt, prompt=prompt)
        prepare = partial(self._prepare, described, count, rules, options)
        return Call(self, described, options["tenant"], prepare)

    async def _prepare(
        self,
        request: Request,
        count: Count | None,
        rules: ProviderRules | None,
        options: dict[str, Any],
    ) -> Ticket:
        """Count and estimate; nothing is held yet."""
        family = match(self._families, request.model, "limits")
        counter = self._counters.of(request.model)
        if count is not None:
            request = _counted(request, await count(counter))
        rules = family.rules if rules is None else rules
        estimated = rules.charge(request, self._estimate(request))
        return Ticket(
            request=request,
            estimated=estimated,
            rate_limiters=family.rate_limiters,
            rules=rules,
            counter=counter,
            tenant=options["tenant"],
            lease=family.limiter.reserve(estimated, **options),
        )

    def _estimate(self, request: Request) -> int:
        tokens = self.estimator.estimate(request).tokens
        declared = request.max_output_tokens
        return tokens if declared is None else min(tokens, declared * request.choices)

    def map(
        self,
        worker: Callable[[T], Awaitable[R]],
        items: Iterable[T] | AsyncIterable[T],
        *,
        order: Literal["completed", "input"] = "completed",
        max_pending: int = 256,
        attempts: int = 1,
        progress: Show | bool | None = None,
    ) -> MapResults[T, R]:
        """A batch job: `worker(item)` for every item, and the results as they come.

        The worker makes its own calls, through `request` or a transport: this charges
        nothing, and bounds what is on its way. It reads at most `max_pending` items
        ahead of the results that you have taken, so memory stays bounded however long
        the input is, sync or async; all that are pending are tasks that may wait in
        the limits' queue.

        One item's error is its result (`result.error`) and stops nobody. With
        `attempts` a worker is called again where the error says that waiting helps (a
        429 with a time, an overload, no connection, a full queue), after that wait;
        what is permanent fails at once. An error of the input itself is raised after
        the results of what it gave.

        Leaving the block early cancels what is pending, and waits until it is gone.
        `progress` is called with a `Progress` after each item; True draws a bar with
        tqdm if it is installed, and else writes a line now and then, to stderr.

        >>> import anyio, tokenflow
        >>> flow = tokenflow.TokenFlow(tokenflow.TokenSemaphore(1_000))
        >>> async def shout(word):
        ...     async with flow.request(input_tokens=len(word), max_output_tokens=9):
        ...         return word.upper()
        >>> async def main():
        ...     async with flow.map(shout, ["a", "b"], order="input") as results:
        ...         return [result.value async for result in results]
        >>> anyio.run(main)
        ['A', 'B']
        """
        (_, family), *others = self._families
        return MapResults(
            worker,
            items,
            classify if others else family.rules.classify,
            order=order,
            max_pending=max_pending,
            attempts=attempts,
            show=shown_by(progress),
        )

    def _count(self, outcome: str, charged: Usage) -> None:
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1
        self._tokens += charged.total_tokens

    def _tell(self, event: CallEvent) -> None:
        for observer in self._observers:
            try:
                observer(event)
            except Exception as error:
                log(logging.ERROR, "the observer %r raised %r", observer, error)

    def statistics(self) -> FlowStatistics:
        """Live numbers; works from anywhere."""
        statistics = getattr(self.estimator, "statistics", None)
        return FlowStatistics(
            calls=sum(self._outcomes.values()),
            outcomes=dict(self._outcomes),
            tokens=self._tokens,
            limits={pattern: each.limiter.statistics() for pattern, each in self._families},
            estimator=None if statistics is None else statistics(),
        )

    def __repr__(self) -> str:
        limits = ", ".join(f"{pattern}: {each.limiter!r}" for pattern, each in self._families)
        calls = sum(self._outcomes.values())
        return f"<TokenFlow {limits}; {calls:,} calls, {self._tokens:,} tokens>"


def _counted(request: Request, input_tokens: int) -> Request:
    """`dataclasses.replace`, in half the time."""
    return Request(
        input_tokens=input_tokens,
        max_output_tokens=request.max_output_tokens,
        task=request.task,
        model=request.model,
        choices=request.choices,
        content=request.content,
    )
