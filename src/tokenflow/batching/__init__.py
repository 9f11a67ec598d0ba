"""What goes together: packing under a token budget, offline, as a stream and for live callers."""

from ._batcher import TokenBatcher
from ._counts import BatcherStatistics
from ._packing import Batch, Oversize, lower_bound, pack, restore
from ._streaming import pack_stream, pack_stream_async

__all__ = [
    "Batch",
    "BatcherStatistics",
    "Oversize",
    "TokenBatcher",
    "lower_bound",
    "pack",
    "pack_stream",
    "pack_stream_async",
    "restore",
]
