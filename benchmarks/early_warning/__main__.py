"""Calibrate and score the early warnings: ``python benchmarks/early_warning train`` and ``… score``."""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import torch

from runs import Runs

#: The defaults of the rules were chosen on the first seeds, and are judged on the others.
SEEDS = {"tuning": range(1, 6), "scoring": range(101, 106)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["train", "score"], help="train what is missing, or score what is there")
    parser.add_argument("--seeds", choices=SEEDS, default="scoring")
    parser.add_argument("--folder", type=Path, default=Path("runs/early_warning"), help="where runs are kept")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    torch.set_num_threads(1)  # the models are too small for more
    if arguments.what == "train":
        Runs(arguments.folder).train(SEEDS[arguments.seeds])


if __name__ == "__main__":
    main()
