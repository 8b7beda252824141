"""Rescue runs that go wrong, and score it: ``python benchmarks/rescue train``, then ``… score``."""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import torch
from report import by_seed, by_treatment, draw
from rescued_runs import Runs
from scoring import Losses
from treatments import CASES, TREATMENTS

#: The defaults of the loop were chosen on the tuning seeds, and are judged on the others.
SEEDS = {"tuning": [*range(1, 6), *range(101, 106)], "scoring": [*range(201, 206), *range(301, 306)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["train", "score"], help="train what is missing, or score what is there")
    parser.add_argument("--seeds", choices=SEEDS, default="scoring")
    parser.add_argument("--only", default="main", help="main, all, or names of treatments, joined by commas")
    parser.add_argument("--share", default="0/1", help="of several processes that train at once: number/count")
    parser.add_argument("--folder", type=Path, default=Path("runs/rescue"), help="where runs are kept")
    parser.add_argument("--picture", type=Path, help="also draw every run")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    torch.set_num_threads(1)  # the models are too small for more
    names = _names(arguments.only)
    unknown = [name for name in names if name not in TREATMENTS]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {list(TREATMENTS)}")
    runs = Runs(arguments.folder)
    if arguments.what == "train":
        number, count = map(int, arguments.share.split("/"))
        runs.train(SEEDS[arguments.seeds], names, (number, count))
        return
    found = list(runs.of(SEEDS[arguments.seeds]))
    if not found:
        parser.error(f"no runs in {arguments.folder}; train them first")
    losses = [Losses(case, found) for case in CASES]
    main_names = _names("main")
    others = [name for name in TREATMENTS if name not in main_names and any(run.treatment == name for run in found)]
    print(f"{len(found)} runs, {arguments.seeds} seeds\n\n{by_treatment(losses)}\n\n{by_seed(losses, main_names)}")
    if others:
        print(f"\n{by_seed(losses, others)}")
    if arguments.picture:
        draw(losses, arguments.picture)


def _names(only: str) -> list[str]:
    if only == "all":
        return list(TREATMENTS)
    if only == "main":
        return [name for name, treatment in TREATMENTS.items() if treatment.is_main]
    return only.split(",")


if __name__ == "__main__":
    main()
