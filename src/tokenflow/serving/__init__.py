"""Where a call goes, and what the machine can hold: routing, step planning and capacity."""

from ._replica import Replica
from ._router import ReplicaStatistics, RouterStatistics, TokenRouter
from ._scheduler import Reserve, SchedulerStatistics, TokenScheduler
from ._sequence import Prefill, SequenceState, Step, TokenSequence

__all__ = [
    "Prefill",
    "Replica",
    "ReplicaStatistics",
    "Reserve",
    "RouterStatistics",
    "SchedulerStatistics",
    "SequenceState",
    "Step",
    "TokenRouter",
    "TokenScheduler",
    "TokenSequence",
]
