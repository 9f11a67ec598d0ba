"""The pictures of docs/simulation.md; without matplotlib there are none, and a message says so."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _fleet import Outcome, quantile

# Distinct also to those who confuse red and green (Okabe and Ito 2008); what is usual is grey.
COLOURS = ("#9a9a9a", "#c9b18f", "#56b4e9", "#009e73", "#e69f00", "#0072b2")
DASHES = ("--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), "-")
LEVELS = [1 - 10 ** (-x / 30) for x in range(91)]  # to 99.9 %, closer and closer
TICKS = (0.0, 0.5, 0.9, 0.99, 0.999)

Outcomes = Mapping[str, Sequence[Outcome]]
Panel = tuple[str, Callable[[Outcome], Sequence[float]]]
"""A title, and the seconds that are drawn."""


def draw(mixed: Outcomes, ordered: Outcomes, replicas: Sequence[str], folder: Path) -> None:
    """Draw all of them into `folder`."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("matplotlib is not installed: no pictures (`pip install --group bench`)")
        return
    style = {
        "svg.fonttype": "none",  # text stays text: small, and in the reader's font
        "svg.hashsalt": "tokenflow",  # the same picture is the same file
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e6e6e6",
        "legend.frameon": False,
    }
    folder.mkdir(exist_ok=True)
    with pyplot.rc_context(style):
        latency = [
            ("time to the first token", lambda each: [call.first_token for call in each.calls]),
            ("whole call", lambda each: [call.whole for call in each.calls]),
        ]
        _save(percentiles(pyplot, mixed, latency), folder / "simulation-latency.svg")
        _save(busy(pyplot, mixed, replicas), folder / "simulation-busy.svg")
        sizes = [
            (
                f"{kind} calls: time to the first token",
                lambda each, kind=kind: [call.first_token for call in each.of(kind).calls],
            )
            for kind in ("small", "large")
        ]
        _save(percentiles(pyplot, ordered, sizes), folder / "simulation-order.svg")
        pyplot.close("all")


def percentiles(pyplot: Any, outcomes: Outcomes, panels: Sequence[Panel]) -> Any:
    """Seconds by percentile, the upper ones at length; all samples together."""
    figure, axes = pyplot.subplots(1, len(panels), figsize=(10, 4.2), sharey=True)
    for axis, (title, seconds) in zip(axes, panels, strict=True):
        for (name, found), look in zip(outcomes.items(), _looks(outcomes), strict=True):
            values = sorted(value for each in found for value in seconds(each))
            axis.plot(
                [_stretched(level) for level in LEVELS],
                [quantile(values, max(level, 1e-9)) for level in LEVELS],
                label=name,
                **look,
            )
        axis.set(yscale="log", title=title, xlabel="percentile of calls")
        axis.minorticks_off()
        axis.set_xticks([_stretched(level) for level in TICKS], [f"{t:.4g}" for t in _percent()])
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[0].set_ylabel("seconds")
    axes[-1].legend(loc="lower right")
    return figure


def busy(pyplot: Any, outcomes: Outcomes, replicas: Sequence[str]) -> Any:
    """Each replica's busy time, as a share of all, by policy; means over the samples."""
    figure, axis = pyplot.subplots(figsize=(10, 3.6))
    width = 0.8 / len(replicas)
    for n, replica in enumerate(replicas):
        shares = [
            100 * sum(each.busy[n] for each in found) / len(found) for found in outcomes.values()
        ]
        colour = COLOURS[5] if replica == replicas[0] else COLOURS[4]
        axis.bar(
            [at + (n - (len(replicas) - 1) / 2) * width for at in range(len(outcomes))],
            shares,
            width * 0.92,
            color=colour,
            label=replica if replicas.index(replica) == n else None,
        )
    axis.set_xticks(range(len(outcomes)), [name.replace(" by ", "\nby ") for name in outcomes])
    axis.set(ylabel="% of the time computing", ylim=(0, 100), title="busy time of each replica")
    axis.grid(False, axis="x")
    axis.legend(ncols=2, loc="upper right")
    return figure


def _looks(outcomes: Outcomes) -> list[dict[str, Any]]:
    """The last one stands out, or the second of few."""
    count = len(outcomes)
    chosen = range(count) if count > 4 else (0, 5, 2, 4)
    return [
        {"color": COLOURS[n], "linestyle": DASHES[n], "linewidth": 2.6 if n == 5 else 1.7}
        for n in chosen
    ]


def _percent() -> list[float]:
    return [100 * tick for tick in TICKS]


def _stretched(level: float) -> float:
    return -math.log10(1 - level)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", facecolor="white", metadata={"Date": None})
    lines = re.sub(r"(\d\.\d\d)\d+", r"\1", drawn.getvalue()).splitlines()
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")
    print(f"wrote {path.name}", file=sys.stderr)
