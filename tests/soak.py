"""`make soak`: a million random operations with random cancellations, and nothing leaks.

python -m tests.soak [OPERATIONS] [SEED]
"""

import random
import sys
import time

from tests.conftest import BACKENDS, run_virtual
from tests.model import OPS, drive

ROUND = 5_000


def main() -> None:
    operations = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns()
    print(f"{operations:,} operations, seed {seed}")
    rng = random.Random(seed)
    done = grants = waits = 0
    while done < operations:
        ops = [(rng.choice(OPS), rng.randrange(30), rng.randrange(120)) for _ in range(ROUND)]
        world = run_virtual(BACKENDS[done // ROUND % 2], drive, ops)
        done += ROUND
        grants += world.grants
        waits += world.waits
        if sys.stderr.isatty():
            print(f"\r{done:,} done", end="", file=sys.stderr)
    print(f"{done:,} operations, {grants:,} grants, {waits:,} of them after a wait: 0 leaked")


if __name__ == "__main__":
    main()
