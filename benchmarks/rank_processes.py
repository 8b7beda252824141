"""Processes that run a function together, as ranks of one process group.

They are forked from a server that has imported what takes seconds, and find in their environment what `torchrun` would
put there, so that Lightning takes them as they are.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed as dist

_HOST = "127.0.0.1"


def on_ranks(function: Callable[..., Any], *arguments: Any, ranks: int, backend: str) -> Any:
    """What a function of a module returns on rank zero.

    Args:
        function: called on every rank, where `torch.distributed` is initialised.
        arguments: what it is called with.
        ranks: how many ranks there are, all on this host.
        backend: of the process group; with ``"nccl"`` each rank has a GPU of its own.

    Raises:
        RuntimeError: if a rank ends without a result.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch", "lightning_attn"])
    ours, theirs = context.Pipe(duplex=False)
    port = _free_port()
    path = list(sys.path)
    processes = [
        context.Process(target=_run, args=(rank, ranks, backend, port, path, theirs, function, arguments), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    theirs.close()  # so that there is an end of what can be read when the ranks have ended
    try:
        result = ours.recv()
    except EOFError:
        raise RuntimeError(f"No result came from {ranks} ranks; what went wrong is said above.") from None
    finally:
        for process in processes:
            process.join()
    return result


def device_of_rank() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _run(
    rank: int,
    ranks: int,
    backend: str,
    port: int,
    path: list[str],
    outbox: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": _HOST, "MASTER_PORT": str(port), "NODE_RANK": "0", "LOCAL_RANK": str(rank)}
    if backend == "nccl":
        torch.cuda.set_device(rank)
    # Each of dozens of short runs would introduce itself.
    for package in ("lightning", "lightning.pytorch"):
        logging.getLogger(package).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.pytorch")
    dist.init_process_group(backend, init_method=f"tcp://{_HOST}:{port}", rank=rank, world_size=ranks)
    try:
        if rank == 0:
            outbox.send(function(*arguments))
        else:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                try:
                    function(*arguments)
                except BaseException:
                    sys.__stderr__.write(said.getvalue())
                    raise
    finally:
        outbox.close()
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((_HOST, 0))
        return int(free.getsockname()[1])
