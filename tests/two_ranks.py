"""Two gloo processes that run functions of a test together, within a time limit."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing

SECONDS = 100


def on_two_ranks(cases: Mapping[str, Callable[[int], Any]], folder: Path) -> dict[str, tuple[Any, Any]]:
    """Run some functions of a module on two ranks, which are started once for all of them.

    Args:
        cases: the functions by name; each gets its rank.
        folder: where the ranks may write.

    Returns:
        For each name what the function returned on the first rank and on the second.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    ranks = multiprocessing.spawn(_run, args=(dict(cases), address, str(folder)), nprocs=2, join=False)
    end = time.monotonic() + SECONDS
    while not ranks.join(timeout=1):  # raises what a rank raised
        if time.monotonic() > end:
            for process in ranks.processes:
                process.kill()
            pytest.fail(f"The ranks did not finish in {SECONDS} s: they wait for each other.")
    first, second = (torch.load(folder / f"{rank}.pt") for rank in (0, 1))
    return {name: (first[name], second[name]) for name in cases}


def _run(rank: int, cases: Mapping[str, Callable[[int], Any]], address: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS / 2)
    )
    torch.save({name: function(rank) for name, function in cases.items()}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
