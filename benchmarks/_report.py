"""What all benchmarks share: arguments, tables, and the sections of the pages they write."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
INTRODUCTION = """\
# Performance

`make bench` measures again and writes this page anew, each script in `benchmarks/` its own
section; no number here was written by hand. Times depend on the machine, so compare ratios:
peers ran in the same run, in turns. Where a target was not met, the table says so.
"""


def arguments(description: str | None) -> argparse.Namespace:
    """`--quick` is for trying a benchmark out: its numbers are printed, and published nowhere.

    All take `--trace`, so that `make bench` can pass it on to those that have a use for it.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="less exact; leaves the docs alone")
    parser.add_argument("--trace", type=Path, help="a CSV trace, or a directory of them")
    return parser.parse_args()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An aligned Markdown table: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rule = [f"{'-' * width}-" if i == 0 else f"{'-' * width}:" for i, width in enumerate(widths)]
    lines = ["|-" + "|-".join(rule) + "|"]
    for cells in (header, *rows):
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("| " + " | ".join(padded) + " |")
    lines[0], lines[1] = lines[1], lines[0]
    return "\n".join(lines)


def environment() -> str:
    """Where these numbers come from, in one sentence."""
    return (
        f"Measured with {platform.python_implementation()} {platform.python_version()} on "
        f"{platform.system()} ({platform.machine()}, {os.cpu_count()} cores)."
    )


def publish(
    section: str, text: str, *, quick: bool, path: Path = PAGE, introduction: str = INTRODUCTION
) -> None:
    """Print a section and, but for a quick run, put it into the page between its markers.

    A page that does not exist yet begins with the introduction.
    """
    print(text)
    name = path.relative_to(PAGE.parent.parent)
    if quick:
        print(f"\n(quick: {name} was left alone)")
        return
    page = path.read_text(encoding="utf-8") if path.exists() else introduction
    path.parent.mkdir(exist_ok=True)
    path.write_text(replace_section(page, section, text), encoding="utf-8")
    print(f"\nwrote the section {section!r} of {name}")


def replace_section(page: str, section: str, text: str) -> str:
    """The page with this section's text changed, or added at the end where it has none yet."""
    begin, end = f"<!-- {section}:begin -->", f"<!-- {section}:end -->"
    body = f"{begin}\n{text.strip()}\n{end}"
    if begin not in page:
        return f"{page.rstrip()}\n\n{body}\n"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{begin} has no {end} after it: put it back, or remove both")
    return before + body + after
