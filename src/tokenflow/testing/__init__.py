"""A provider to test against: real quota rules, real headers, real streams, no network."""

from ._answer import Answer
from ._calls import FakeCall, FakeStatistics, Outcome
from ._faults import ConnectionDropped, Fault, Faults, first_calls, some_calls
from ._provider import FakeProvider, FakeSettings, Sample, lognormal
from ._quota import FakeQuota
from ._request import FakeRequest, approximate_tokens

__all__ = [
    "Answer",
    "ConnectionDropped",
    "FakeCall",
    "FakeProvider",
    "FakeQuota",
    "FakeRequest",
    "FakeSettings",
    "FakeStatistics",
    "Fault",
    "Faults",
    "Outcome",
    "Sample",
    "approximate_tokens",
    "first_calls",
    "lognormal",
    "some_calls",
]
