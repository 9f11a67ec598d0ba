"""Which output estimator suits your traffic? Replay a trace and see.

    python examples/calibrate.py [--trace FILE.csv] [--quantile 0.9] [--plot coverage.png]

Without a trace it makes one up: chat, whose answers become three times as long halfway
through. A trace is a CSV file with the columns ContextTokens and GeneratedTokens, one
line per request in order of arrival, as in the public Azure LLM traces.

Read the table so: *under* is the share of calls that needed more than was reserved (they
go into debt, or overflow), *ratio* is what is reserved over what is used (1.5 means that
a limiter lets two thirds of the possible traffic through).
"""

from __future__ import annotations

import argparse
import csv
import math
import random
from pathlib import Path

from tokenflow import (
    HistoricalEstimator,
    MaxTokensEstimator,
    OutputEstimator,
    Request,
    TaskEstimator,
)

ROLLING = 1000


def read(path: Path) -> list[tuple[Request, int]]:
    with path.open(newline="") as file:
        return [
            (Request(input_tokens=int(row["ContextTokens"])), int(row["GeneratedTokens"]))
            for row in csv.DictReader(file)
        ]


def invented(calls: int = 12_000) -> list[tuple[Request, int]]:
    rng = random.Random(1)
    return [
        (
            Request(input_tokens=int(rng.lognormvariate(math.log(1000), 0.8)), task="chat"),
            int(rng.lognormvariate(math.log(130 if at < calls // 2 else 390), 0.9)),
        )
        for at in range(calls)
    ]


def replay(estimator: OutputEstimator, trace: list[tuple[Request, int]]) -> list[bool]:
    """For each call, whether what was reserved covered it: `estimate` before, `observe` after."""
    covered = []
    for request, output in trace:
        covered.append(output <= estimator.estimate(request).tokens)
        estimator.observe(request, output)
    return covered


def rolling(covered: list[bool]) -> list[float]:
    """Share covered in the last 1,000 calls, from the first full thousand on."""
    return [sum(covered[at - ROLLING : at]) / ROLLING for at in range(ROLLING, len(covered), 50)]


def plot(path: Path, shares: dict[str, list[float]], quantile: float) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        print("matplotlib is not installed: no plot")
        return
    figure, axes = pyplot.subplots(figsize=(9, 4))
    for name, share in shares.items():
        axes.plot([ROLLING + 50 * at for at in range(len(share))], share, label=name)
    axes.axhline(quantile, color="grey", linestyle=":")
    axes.set(xlabel="calls", ylabel=f"covered, of the last {ROLLING:,}", ylim=(0.6, 1.01))
    axes.legend()
    figure.savefig(path)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare output estimators on a trace.")
    parser.add_argument("--trace", type=Path, help="a CSV file")
    parser.add_argument("--quantile", type=float, default=0.9)
    parser.add_argument("--plot", type=Path, help="write coverage over time to this image")
    asked = parser.parse_args()
    trace = read(asked.trace) if asked.trace else invented()
    estimators = {
        "declared 4,096": MaxTokensEstimator(4096),
        "table": TaskEstimator(),
        f"historical {asked.quantile:g}": HistoricalEstimator(asked.quantile),
        f"historical {asked.quantile:g}, margin 1.1": HistoricalEstimator(
            asked.quantile, margin=1.1
        ),
    }
    print(f"{len(trace):,} calls\n{'':30}  under   ratio  error p50     p99  worst 1,000 calls")
    shares = {}
    for name, estimator in estimators.items():
        shares[name] = rolling(replay(estimator, trace))
        seen = estimator.statistics()
        worst = 1 - min(shares[name], default=1.0)
        print(
            f"{name:30} {1 - seen.coverage:6.1%} {seen.ratio:7.3f} {seen.error_p50:10.2f}"
            f" {seen.error_p99:7.1f} {worst:12.1%} under"
        )
    if asked.plot:
        plot(asked.plot, shares, asked.quantile)


if __name__ == "__main__":
    main()
