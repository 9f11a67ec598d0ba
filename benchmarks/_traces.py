"""Requests to replay: real ones where there are any, and a generator that looks like them."""

import csv
import math
import random
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from tokenflow import Request

Trace: TypeAlias = list[tuple[Request, int]]
"""Requests in order of arrival, each with the output tokens it came to."""


def load(path: Path | None) -> dict[str, Trace]:
    """The CSV file `path`, or all in a directory, by name; with the columns of Azure's traces."""
    if path is None:
        return {}
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    return {file.stem: _read(file) for file in files if file.is_file()}


def _read(file: Path) -> Trace:
    with file.open(newline="") as rows:
        return [
            (Request(input_tokens=int(row["ContextTokens"])), int(row["GeneratedTokens"]))
            for row in csv.DictReader(rows)
        ]


def arrivals(file: Path) -> list[float]:
    """When the requests of a CSV file came, in seconds since the first of them."""
    with file.open(newline="") as rows:
        # Azure's have a seventh digit, which is one more than a datetime can read.
        times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in csv.DictReader(rows)]
    return [(time - times[0]).total_seconds() for time in times]


def synthetic(calls: int, *, input_median: float, output_median: float, seed: int) -> Trace:
    """Log-normal lengths, with the lump real traces have: 3 % share one exact input length."""
    rng = random.Random(seed)

    def length(median: float, sigma: float) -> int:
        return max(1, int(rng.lognormvariate(math.log(median), sigma)))

    return [
        (
            Request(input_tokens=1500 if rng.random() < 0.03 else length(input_median, 0.8)),
            length(output_median, 1.0),
        )
        for _ in range(calls)
    ]
