"""What the benchmarks share: interleaved rounds, tables, and a section of docs/performance.md."""

from __future__ import annotations

import csv
import random
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PERFORMANCE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"


def medians(rounds: int, subjects: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Measure all subjects in turn, `rounds` times, so that a slow minute hits them all."""
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, measure in subjects.items():
            seconds[name].append(measure())
    return {name: statistics.median(each) for name, each in seconds.items()}


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others are figures."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    marks = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines.insert(1, marks)
    return "\n".join(
        "| "
        + " | ".join(
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    )


def write_section(name: str, text: str) -> None:
    """Print a section, and put it between its markers in docs/performance.md."""
    print(text)
    block = f"<!-- {name}:begin -->\n{text.strip()}\n<!-- {name}:end -->"
    PERFORMANCE.parent.mkdir(exist_ok=True)
    page = PERFORMANCE.read_text() if PERFORMANCE.exists() else "# Performance\n"
    pattern = re.compile(rf"<!-- {name}:begin -->.*?<!-- {name}:end -->", re.DOTALL)
    if pattern.search(page):
        page = pattern.sub(lambda _: block, page)
    else:
        page = f"{page.rstrip()}\n\n{block}\n"
    PERFORMANCE.write_text(page)


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
