"""Packing: batches above the lower bound, and time against a next-fit loop and the peers.

    python benchmarks/bench_packing.py [--quick] [--trace FILE_OR_FOLDER]

Times are medians of interleaved rounds, as multiples of a plain next-fit loop
over the same list in the same round.

TRL takes part where it is installed. It is no part of the `bench` group, since
pip brings torch along with it, by way of accelerate; its packing works without:
`pip install datasets transformers`, then `pip install --no-deps trl`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import binpacking
import more_itertools
import prtpy
from _report import environment, publish, table
from _rounds import medians, synthetic, traces

from tokenflow import lower_bound, pack, pack_stream

NOTE = (
    "CPU times are medians of at least 7 rounds in which all take turns, as multiples of a plain "
    "next-fit loop over the same list. TRL, which also moves the tokens themselves, takes part "
    "where it is installed; pip brings torch along with it, which its packing does not need."
)
BUDGET = 8_192
PADDED_BUDGET = 32_768


def tokens(item: int) -> int:
    return item


def next_fit_loop(items: list[int]) -> list[list[int]]:
    """What anyone would write."""
    batches: list[list[int]] = []
    batch: list[int] = []
    total = 0
    for item in items:
        size = tokens(item)
        if batch and total + size > BUDGET:
            batches.append(batch)
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        batches.append(batch)
    return batches


PACKERS: dict[str, Callable[[list[int]], Any]] = {
    "a next-fit loop": next_fit_loop,
    "pack in_order": lambda items: pack(items, BUDGET, tokens=tokens),
    "pack best_fit": lambda items: pack(items, BUDGET, tokens=tokens, strategy="best_fit"),
    "pack best_fit, 7 items": lambda items: pack(
        items, BUDGET, tokens=tokens, strategy="best_fit", max_items=7
    ),
    "pack_stream, 4 open": lambda items: list(pack_stream(items, BUDGET, tokens=tokens)),
    "pack_stream, 16 open": lambda items: list(
        pack_stream(items, BUDGET, tokens=tokens, open_batches=16)
    ),
    "more-itertools": lambda items: list(
        more_itertools.constrained_batches(items, BUDGET, get_len=tokens)
    ),
}
QUADRATIC: dict[str, Callable[[list[int]], Any]] = {
    "binpacking": lambda items: binpacking.to_constant_volume(items, BUDGET),
    "prtpy first-fit decreasing": lambda items: prtpy.pack(
        prtpy.packing.first_fit_decreasing, BUDGET, items
    ),
}


def trl() -> dict[str, Callable[[list[int]], Any]]:
    """TRL's best fit decreasing, over sequences of zeros."""
    try:
        import datasets
        import pyarrow
        from trl import pack_dataset
    except ImportError as error:
        print(f"TRL's packing is left out ({error})")
        return {}
    datasets.disable_progress_bars()
    whole = {"batch_size": None, "keep_in_memory": True, "load_from_cache_file": False}

    def packed(items: list[int]) -> Any:
        ends = pyarrow.array([0, *accumulate(items)], pyarrow.int32())
        count = sum(items)
        zeros = pyarrow.Array.from_buffers(
            pyarrow.int8(), count, [None, pyarrow.py_buffer(bytes(count))]
        )
        rows = pyarrow.table({"input_ids": pyarrow.ListArray.from_arrays(ends, zeros)})
        return pack_dataset(datasets.Dataset(rows), BUDGET, map_kwargs=whole)

    return {"TRL, bfd": packed}


def timed(packer: Callable[[list[int]], Any], items: list[int]) -> Callable[[], float]:
    def measure() -> float:
        started = time.process_time()
        packer(items)
        return time.process_time() - started

    return measure


FEW = ("a next-fit loop", "pack in_order", "pack best_fit")


def compare(
    name: str,
    items: list[int],
    rounds: int,
    packers: dict[str, Callable[[list[int]], Any]],
) -> str:
    seconds = medians(rounds, {each: timed(packers[each], items) for each in packers})
    loop = seconds["a next-fit loop"]
    bound = lower_bound(items, BUDGET, tokens=tokens)
    capped = lower_bound(items, BUDGET, tokens=tokens, max_items=7)
    rows = [
        (
            each,
            f"{len(packer(items)) / (capped if '7 items' in each else bound):.4f}",
            f"{seconds[each] / loop:.1f}",
        )
        for each, packer in packers.items()
    ]
    header = (f"{name}, {len(items):,} items, budget {BUDGET:,}", "batches / bound", "time / loop")
    return table(header, rows)


def caps(sets: dict[str, list[int]]) -> str:
    """Batches above the bound under an item cap."""
    numbers = (4, 5, 6, 7, 8, 9, 10, 12)
    rows = []
    for name, items in sets.items():
        cells = []
        for cap in numbers:
            bound = lower_bound(items, BUDGET, tokens=tokens, max_items=cap)
            packed = pack(items, BUDGET, tokens=tokens, strategy="best_fit", max_items=cap)
            cells.append(f"{len(packed) / bound:.4f}")
        rows.append((name, *cells))
    return table(("best_fit with at most n items: batches / bound", *map(str, numbers)), rows)


def padded(sets: dict[str, list[int]]) -> str:
    """Tokens computed over tokens that are real."""
    rows = []
    for name, items in sets.items():
        costs = []
        strategies: tuple[Literal["in_order", "best_fit"], ...] = ("in_order", "best_fit")
        for strategy in strategies:
            batches = pack(
                items,
                PADDED_BUDGET,
                tokens=tokens,
                padded=True,
                strategy=strategy,
            )
            costs.append(f"{sum(batch.tokens for batch in batches) / sum(items):.4f}")
        rows.append((name, *costs))
    header = (f"padded, budget {PADDED_BUDGET:,}: padded / real tokens", "in_order", "best_fit")
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a CSV with ContextTokens, or a folder of them")
    parser.add_argument("--quick", action="store_true", help="small inputs, few rounds")
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else 7
    found = traces(arguments.trace)
    fitting = {name: [x for x in items if x <= BUDGET] for name, items in found.items()}
    sets = fitting | {"synthetic": synthetic(20_000)}
    rng = random.Random(1)
    sections = [compare(name, items, rounds, PACKERS) for name, items in fitting.items()]
    peers = synthetic(2_000)
    sections.append(compare("synthetic", peers, rounds, PACKERS | QUADRATIC | trl()))
    count = 20_000 if arguments.quick else 100_000
    large = {"synthetic": synthetic(count)}
    for name, items in fitting.items():
        large[f"{name}, repeated"] = (items * (count // len(items) + 1))[:count]
    large["uniform to the budget"] = [rng.randint(1, BUDGET) for _ in range(count)]
    sections += [compare(name, items, rounds, PACKERS) for name, items in large.items()]
    if not arguments.quick:
        few = {name: PACKERS[name] for name in FEW}
        sections.append(compare("synthetic", synthetic(1_000_000), rounds, few))
    sections += [caps(sets), padded(sets)]
    text = "\n\n".join([f"## Packing\n\n{environment()} {NOTE}", *sections])
    publish("packing", text, quick=arguments.quick)


if __name__ == "__main__":
    main()
