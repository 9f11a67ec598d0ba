"""Which output estimator suits your traffic? Replay a trace and see.

    python examples/calibrate.py [--trace FILE.csv] [--quantile 0.9] [--plot coverage.png]

Without a trace it makes one up: chat, whose answers become three times as long halfway
through. A trace is a CSV file with the columns ContextTokens and GeneratedTokens, one
line per request in order of arrival, as in the public Azure LLM traces.

Look at two columns: *under* is the share of calls that needed more than was reserved (they
go into debt, or overflow), *ratio* is what is reserved over what is used (1.5 means that
a limiter lets two thirds of the possible traffic through). The best has the lowest ratio of
those that are under as seldom as you wish.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import sys
from pathlib import Path

from tokenflow import (
    HistoricalEstimator,
    MaxTokensEstimator,
    OutputEstimator,
    Request,
    TaskEstimator,
    Usage,
)

ROLLING = 1000


def read(path: str) -> list[tuple[Request, int]]:
    """For argparse: a trace of one call at least."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            trace = [called(row) for row in rows]
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, csv.Error):
        raise argparse.ArgumentTypeError(
            f"{path}, line {rows.line_num}: expected whole numbers in columns that the first line "
            "calls ContextTokens and GeneratedTokens"
        ) from None
    if not trace:
        raise argparse.ArgumentTypeError(f"{path} has no calls: a line each, after the first")
    return trace


def called(row: dict[str, str]) -> tuple[Request, int]:
    used = Usage(input_tokens=int(row["ContextTokens"]), output_tokens=int(row["GeneratedTokens"]))
    return Request(input_tokens=used.input_tokens), used.output_tokens


def fraction(text: str) -> float:
    """For argparse."""
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, such as 0.9, not {text}")
    return float(text)


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
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # no such folder, no such kind of image
        sys.exit(f"calibrate: no plot: {error}")
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--trace", type=read, metavar="FILE", help="a .csv file; by default one is made up"
    )
    parser.add_argument(
        "--quantile",
        type=fraction,
        default=0.9,
        metavar="Q",
        help="the share of calls that what is reserved should cover: %(default)s",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write coverage over time to this image"
    )
    asked = parser.parse_args()
    trace = asked.trace or invented()
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
        worst = f"{1 - min(shares[name]):.1%} under" if shares[name] else "too few"
        print(
            f"{name:30} {1 - seen.coverage:6.1%} {seen.ratio:7.3f} {seen.error_p50:10.2f}"
            f" {seen.error_p99:7.1f} {worst:>18}"
        )
    if asked.plot:
        plot(asked.plot, shares, asked.quantile)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
