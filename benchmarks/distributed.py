"""What watching attention costs when several ranks train together: captures, bytes, and training steps.

    OMP_NUM_THREADS=1 python benchmarks/distributed.py --output tables.md
    OMP_NUM_THREADS=1 python benchmarks/distributed.py --quick --only captures,payload
    python benchmarks/distributed.py --backend nccl --ranks 1,8

Ranks are processes of this host. What is compared takes turns within one run, and results are medians.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence

import captures_on_ranks
import large_worlds
import payload
import torch
import training_on_ranks
from command_line import parser, publish
from machine import machine
from turns import Effort

PARTS: dict[str, tuple[str, Callable[[Sequence[int], str, Effort], Iterator[str]]]] = {
    "captures": (captures_on_ranks.HEADER, captures_on_ranks.capture_rows),
    "payload": (payload.HEADER, lambda worlds, backend, effort: payload.payload_rows()),
    "paper": (large_worlds.HEADER, lambda worlds, backend, effort: large_worlds.large_world_rows()),
    "training": (training_on_ranks.HEADER, training_on_ranks.training_rows),
}


def shared(worlds: Sequence[int], backend: str) -> str:
    """What has to be known to read the times."""
    places, noun = (torch.cuda.device_count(), "GPU") if backend == "nccl" else (_cores(), "core")
    said = f"{backend}; {places} {noun}{'' if places == 1 else 's'}."
    crowded = [str(ranks) for ranks in worlds if ranks > places]
    if crowded:
        said += (
            f" **The runs of {' and '.join(crowded)} ranks share these: their times say little of ranks that do not.**"
        )
    return said


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def numbers(text: str) -> list[int]:
    counts = [int(count) for count in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"numbers of ranks must be positive, got {text!r}")
    return counts


def arguments() -> argparse.Namespace:
    taking = parser("Measure what captures cost on several ranks, as Markdown tables.", PARTS)
    taking.add_argument("--ranks", type=numbers, default=[1, 2, 4], metavar="N,…", help="1,2,4 by default")
    taking.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="nccl: every rank has a GPU")
    return taking.parse_args()


def main() -> None:
    given = arguments()
    lines = [machine(), "", shared(given.ranks, given.backend)]
    for part, (header, rows_of) in PARTS.items():
        if part in given.only:
            lines += ["", header, *rows_of(given.ranks, given.backend, given.effort)]
    publish("\n".join(lines), given.output)


if __name__ == "__main__":
    main()
