"""Which limits and which counter a model's calls go by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final, Protocol, TypeVar, final

from tokenflow._errors import UnknownModel
from tokenflow._refusal import Refusal, classify, read_status
from tokenflow._usage import RateLimitStatus, Request, Usage
from tokenflow.estimation import TiktokenCounter, TokenCounter
from tokenflow.limits import Limiter, TokenLimits, TokenRateLimiter
from tokenflow.limits._rate import PAUSES

__all__ = [
    "CommonRules",
    "Counters",
    "Family",
    "Limits",
    "ProviderRules",
    "families",
    "match",
    "rate_limiters",
]

_T = TypeVar("_T")
_LOADED: Final = 64  # counters kept; the vocabularies are shared anyway


class ProviderRules(Protocol):
    """What a flow asks of a provider; `tokenflow.providers.Provider` is one."""

    def limiter(self) -> Limiter:
        """A new limiter over its quotas."""
        ...

    def charge(self, request: Request, output_tokens: int) -> Usage:
        """What to reserve for a call whose output is estimated at `output_tokens`."""
        ...

    def classify(self, outcome: object) -> Refusal | None:
        """What a response or an exception means; None where it is no refusal."""
        ...

    def status(self, headers: object, body: object = None, *, age: float = 0.0) -> RateLimitStatus:
        """What a response says about the quotas, `age` seconds after its call was sent."""
        ...


@final
class CommonRules:
    """The rules where nobody has said whose: what they have in common."""

    __slots__ = ()

    def limiter(self) -> Limiter:
        return TokenLimits()

    def charge(self, request: Request, output_tokens: int) -> Usage:
        declared = request.max_output_tokens
        return Usage(
            input_tokens=request.input_tokens,
            output_tokens=output_tokens,
            max_output_tokens=None if declared is None else declared * request.choices,
        )

    def classify(self, outcome: object) -> Refusal | None:
        return classify(outcome)

    def status(self, headers: object, body: object = None, *, age: float = 0.0) -> RateLimitStatus:
        return read_status(headers, body, age=age)


Limits = Limiter | ProviderRules
_COMMON: Final = CommonRules()


@final
class Family:
    """The calls that share limits: their limiter, and the rules of their provider."""

    __slots__ = ("limiter", "rate_limiters", "rules")

    def __init__(self, limits: Limits | None, router: Limiter | None) -> None:
        own: Limiter | None
        if limits is None or isinstance(limits, Limiter):
            own, self.rules = limits, _rules_of(limits)
        elif callable(getattr(limits, "limiter", None)):
            own, self.rules = limits.limiter(), limits
        else:
            takes = "a limiter, a Provider, or a mapping of patterns to these"
            raise TypeError(f"limits must be {takes}, not {limits!r}")
        self.rate_limiters = list(rate_limiters(own))
        if router is None and not self.rate_limiters:  # "retry after" is to hold here as well
            self.rate_limiters = [TokenRateLimiter(PAUSES)]
            router = self.rate_limiters[0]
        self.limiter: Limiter = _together(own, router)


def _rules_of(limits: Limiter | None) -> ProviderRules:
    makers = limits.makers if isinstance(limits, TokenLimits) else ()
    return next(iter(makers), _COMMON)


def rate_limiters(limits: object) -> Iterable[TokenRateLimiter]:
    """All rate limiters in it: what can be paused, and told what a server says."""
    if isinstance(limits, TokenLimits):
        return limits.rate_limiters()
    return [limits] if isinstance(limits, TokenRateLimiter) else []


def _together(limits: Limiter | None, other: Limiter | None) -> Limiter:
    if other is None:
        return TokenLimits() if limits is None else limits
    return other if limits is None else TokenLimits.joined(limits, other)


def families(
    limits: Limits | Mapping[str, Limits] | None, router: Limiter | None
) -> list[tuple[str, Family]]:
    """Patterns and what they stand for; one object under two patterns is one family."""
    if router is not None and not isinstance(router, Limiter):
        raise TypeError(f"router must be a TokenRouter or another limiter, not {router!r}")
    if not isinstance(limits, Mapping):
        return [("*", Family(limits, router))]
    known = {id(each): Family(each, router) for each in limits.values()}
    return [(pattern, known[id(each)]) for pattern, each in _patterns(limits, "limits")]


def _patterns(given: Mapping[str, _T], what: str) -> list[tuple[str, _T]]:
    if not given:
        raise ValueError(f'no pattern at all in {what}, so that no call could go: add {{"*": ...}}')
    for pattern in given:
        if not isinstance(pattern, str):
            raise TypeError(f"a pattern in {what} must be a str, not {pattern!r}")
    return list(given.items())


def match(patterns: Iterable[tuple[str, _T]], model: str | None, what: str) -> _T:
    """The first whose pattern the model matches."""
    for pattern, found in patterns:
        if pattern == "*" or fnmatchcase(model or "", pattern):
            return found
    known = ", ".join(repr(pattern) for pattern, _ in patterns)
    raise UnknownModel(
        f"no {what} for the model {model!r}: it matches none of {known}; "
        'add a pattern, or "*" for all others',
        model=model,
    )


@final
class Counters:
    """The counter for each model: those given, or tiktoken's by the model's name."""

    __slots__ = ("_given", "_loaded")

    def __init__(self, counter: TokenCounter | Mapping[str, TokenCounter] | None) -> None:
        self._given: list[tuple[str, TokenCounter]] | None = None
        if isinstance(counter, Mapping):
            self._given = _patterns(counter, "counter")
        elif counter is not None:
            self._given = [("*", counter)]
        self._loaded: OrderedDict[str, TokenCounter] = OrderedDict()

    def of(self, model: str | None) -> TokenCounter:
        if self._given is not None:
            return match(self._given, model, "counter")
        name = model or ""
        found = self._loaded.get(name)
        if found is None:
            found = self._loaded[name] = TiktokenCounter(name)
            if len(self._loaded) > _LOADED:
                self._loaded.popitem(last=False)
        else:
            self._loaded.move_to_end(name)
        return found
