"""How many GPUs does a workload need, and of which kind?

    python examples/plan_capacity.py [--model Llama-3.1-8B] [--gpu H100] [--gap 40]
        [--workload rag:7800:200 --workload chat:200:800] [--tokens-per-second 160000]

A workload is name:input:output, in tokens of a request on average. All get the same
tokens per second, so that they can be compared, and need different hardware all the
same: prompts are arithmetic, answers are read from memory, and both take space while
they last. `--help` lists the models and the GPUs; `tokenflow.serving.capacity` takes
any other as an `Accelerator(...)` or a `ModelShape(...)`.

Look at the bottleneck: it says which hardware would help, and what follows shows by how much.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from tokenflow.serving.capacity import (
    ACCELERATORS,
    MODELS,
    Accelerator,
    Deployment,
    Plan,
    Workload,
    plan,
)

ROW = "{:30}"
CELL = "{:>16}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", choices=MODELS, default="Llama-3.1-8B", metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument(
        "--gpu", choices=ACCELERATORS, default="H100", metavar="NAME", help=", ".join(ACCELERATORS)
    )
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="GPUS", help="for one replica"
    )
    parser.add_argument(
        "--gap", type=float, default=40, metavar="MS", help="milliseconds between two tokens"
    )
    parser.add_argument(
        "--tokens-per-second",
        type=float,
        default=160_000,
        metavar="N",
        help="of each workload, read and written: %(default)s",
    )
    parser.add_argument(
        "--workload",
        action="append",
        metavar="NAME:INPUT:OUTPUT",
        help="tokens of a request, on average; as many workloads as you like",
    )
    asked = parser.parse_args()
    try:
        texts = asked.workload or ["rag:7800:200", "chat:200:800"]
        asked.workloads = dict(workload(each, asked.tokens_per_second) for each in texts)
        machine = Deployment(MODELS[asked.model], ACCELERATORS[asked.gpu], asked.tensor_parallel)
        for each in asked.workloads.values():
            plan(each, machine, max_step_seconds=asked.gap / 1e3)
    except ValueError as error:
        parser.error(str(error))
    return asked


def workload(text: str, tokens_per_second: float) -> tuple[str, Workload]:
    if text.count(":") != 2:
        raise ValueError(f"a workload is NAME:INPUT:OUTPUT, not {text!r}")
    name, input_tokens, output_tokens = text.split(":")
    tokens = float(input_tokens) + float(output_tokens)
    if tokens == 0:
        raise ValueError(f"a workload needs tokens, and {text!r} has none")
    return name, Workload(
        requests_per_second=tokens_per_second / tokens,
        input_tokens=float(input_tokens),
        output_tokens=float(output_tokens),
    )


def row(name: str, *cells: object) -> None:
    print(ROW.format(name) + "".join(CELL.format(str(cell)) for cell in cells))


def show(workloads: list[Workload], plans: list[Plan]) -> None:
    row("requests per second", *(f"{each.requests_per_second:,.1f}" for each in workloads))
    row(
        "input + output tokens",
        *(f"{each.input_tokens:,.0f} + {each.output_tokens:,.0f}" for each in workloads),
    )
    row("max_num_batched_tokens", *(f"{each.max_num_batched_tokens:,}" for each in plans))
    row("max_num_seqs", *(f"{each.max_num_seqs:,}" for each in plans))
    row("tokens of KV cache", *(f"{each.kv_cache_tokens:,}" for each in plans))
    for what in ("prefill", "decode", "memory"):
        needs = (getattr(each, f"{what}_replicas") for each in plans)
        row(f"replicas for {what} alone", *(f"{each:.2f}" for each in needs))
    row("REPLICAS", *(each.replicas for each in plans))
    row("bottleneck", *(each.bottleneck for each in plans))


def main() -> None:
    asked = arguments()
    workloads = list(asked.workloads.values())

    def planned(gpu: Accelerator) -> list[Plan] | None:
        machine = Deployment(MODELS[asked.model], gpu, asked.tensor_parallel)
        try:
            return [plan(each, machine, max_step_seconds=asked.gap / 1e3) for each in workloads]
        except ValueError:
            return None

    def compare(name: str, gpu: Accelerator) -> None:
        plans = planned(gpu)
        row(f"  {name}", *([f"{p.replicas}, {p.bottleneck}" for p in plans] if plans else ["no"]))

    gpu = ACCELERATORS[asked.gpu]
    print(
        f"{asked.model} on {asked.tensor_parallel} x {gpu.name}, {asked.gap:g} ms between two "
        f"tokens at most, {asked.tokens_per_second:,.0f} tokens per second\n"
    )
    row("", *asked.workloads)
    show(workloads, planned(gpu) or [])
    print("\nWhat would help: replicas with twice its")
    compare("arithmetic", replace(gpu, flops_per_second=2 * gpu.flops_per_second))
    bandwidth = 2 * gpu.bandwidth_bytes_per_second
    compare("bandwidth", replace(gpu, bandwidth_bytes_per_second=bandwidth))
    compare("memory", replace(gpu, memory_bytes=2 * gpu.memory_bytes))
    print('\nOn other GPUs ("no": too small or too slow for this model)')
    for name, other in ACCELERATORS.items():
        compare(name, other)


if __name__ == "__main__":
    main()
