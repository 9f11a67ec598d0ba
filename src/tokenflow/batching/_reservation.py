"""The batch at the limiter.

A batch asks for what would go now, and stays open while
it waits, since its items stay in the queue until it is granted. Then:

- More has arrived: the difference is reserved too, at once or not at all, with
  no further request. What is not granted waits for the next batch. The limiter
  decides about every token before it goes, and a batch that grew takes nothing
  from a call that has waited longer, since `acquire_nowait` does not overtake.
- Items were cancelled: later ones have their place; what is left over is given
  back before `process` starts. When all were cancelled, the ask is withdrawn.

What was rejected: asking for the whole budget and correcting it afterwards
waits for tokens that nobody needs, and never gets them back from quotas that do
not credit; correcting the lease upwards passes the limit; asking anew whenever
an item arrives loses the place in the queue, so that a trickle never goes. The
price of ours: after a stall the first batch may be as small as it was when it
asked. The next asks for all that piled up.
"""

from __future__ import annotations

import anyio

from tokenflow._errors import TokenflowError
from tokenflow._usage import Usage
from tokenflow.limits import Lease, Limiter

__all__ = ["charge", "give_back", "grown"]


def charge(tokens: int, requests: int = 1) -> Usage:
    """What a batch costs: input, since what it puts out cannot be known from its items."""
    return Usage(input_tokens=tokens, requests=requests)


def grown(limiter: Limiter, lease: Lease, more: int) -> list[Lease]:
    """The lease, and one for `more` tokens, at once; or for half of them, or a quarter.

    Not from another replica than the lease's: one batch goes to one place.
    """
    while more > 0:
        try:
            extra = limiter.acquire_nowait(charge(more, requests=0))
        except (anyio.WouldBlock, TokenflowError):
            more //= 2
            continue
        if extra.replica is lease.replica:
            return [lease, extra]
        extra.cancel()
        break
    return [lease]


def give_back(leases: list[Lease], cost: int) -> None:
    """Correct leases down to what goes, the last one first."""
    spare = sum(lease.tokens for lease in leases) - cost
    for number in range(len(leases) - 1, -1, -1):
        lease = leases[number]
        kept = max(0, lease.tokens - spare)
        spare -= lease.tokens - kept
        if kept < lease.tokens:
            lease.reconcile(charge(kept, requests=0 if number else 1))
