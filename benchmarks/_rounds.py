"""Interleaved rounds, and lengths to pack: from traces, or made up."""

from __future__ import annotations

import csv
import random
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path


def medians(rounds: int, subjects: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Measure all subjects in turn, `rounds` times, so that a slow minute hits them all."""
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, measure in subjects.items():
            seconds[name].append(measure())
    return {name: statistics.median(each) for name, each in seconds.items()}


def traces(path: Path | None) -> dict[str, list[int]]:
    """Input tokens per request, by trace: of one CSV file, or of all in a folder."""
    if path is None or not path.exists():
        print("no trace (--trace PATH): its rows are skipped")
        return {}
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    found: dict[str, list[int]] = {}
    for file in files:
        with file.open(newline="") as lines:
            found[file.stem] = [int(row["ContextTokens"]) for row in csv.DictReader(lines)]
    return found


def synthetic(count: int, seed: int = 1) -> list[int]:
    """Log-normal lengths with a lump: a few per cent of all requests share one length."""
    rng = random.Random(seed)
    lengths = [min(8_000, max(1, int(rng.lognormvariate(6.75, 0.8)))) for _ in range(count)]
    return [91 if rng.random() < 0.04 else length for length in lengths]
