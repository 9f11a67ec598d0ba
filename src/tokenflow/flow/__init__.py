"""One call through everything."""

from ._call import Call, CallEvent
from ._family import Limits, ProviderRules
from ._flow import FlowStatistics, TokenFlow
from ._map import MapResult, MapResults, Progress
from ._options import CallOptions, call_options
from ._stream import Meter, TrackedStream

__all__ = [
    "Call",
    "CallEvent",
    "CallOptions",
    "FlowStatistics",
    "Limits",
    "MapResult",
    "MapResults",
    "Meter",
    "Progress",
    "ProviderRules",
    "TokenFlow",
    "TrackedStream",
    "call_options",
]
