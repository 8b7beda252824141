"""Processes that run functions of a test together, as ranks of one process group, within a time limit.

They are started once for all tests: what costs time is importing Lightning, which a server does that the processes are
forked from. Each task has a process group of its own, so that what one leaves undone is not in the way of the next.
"""

from __future__ import annotations

import faulthandler
import logging
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed as dist

#: As many as the tests ask for.
_MOST_RANKS = 4


class Raised(NamedTuple):
    """An error that a rank ended with."""

    error: str
    trace: str


class RankPool:
    """Starts ranks when they are first needed, and again after a task that had to be killed.

    Args:
        folder: where ranks meet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: list[tuple[Any, Connection]] = []
        self._tasks = 0

    def __call__(self, function: Callable[..., Any], *arguments: Any, ranks: int = 2, seconds: float = 60) -> list[Any]:
        """What a function of a test module returns on each rank.

        Args:
            function: called on every rank, which `torch.distributed` tells.
            arguments: what it is called with.
            ranks: how many ranks there are.
            seconds: how long they may take together; the test fails if they take longer.
        """
        results = self.try_on(function, *arguments, ranks=ranks, seconds=seconds)
        for rank, result in enumerate(results):
            if isinstance(result, Raised):
                pytest.fail(f"Rank {rank} of {ranks} raised:\n{result.trace}", pytrace=False)
        return results

    def try_on(self, function: Callable[..., Any], *arguments: Any, ranks: int = 2, seconds: float = 60) -> list[Any]:
        """The same for functions that may raise on some ranks: what each returned, or a `Raised`."""
        self._tasks += 1
        self._start()
        task = pickle.dumps((function, arguments, ranks, str(self._folder / f"meeting-{self._tasks}"), seconds))
        waiting = {inbox: rank for rank, (_, inbox) in enumerate(self._ranks[:ranks])}
        for inbox in waiting:
            inbox.send_bytes(task)
        results: dict[int, Any] = {}
        end = time.monotonic() + seconds
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                self.close()
                pytest.fail(f"The ranks {late} did not finish in {seconds} s; where they wait is in stderr.")
            for inbox in ready:
                assert isinstance(inbox, Connection)
                rank = waiting.pop(inbox)
                try:
                    results[rank] = pickle.loads(inbox.recv_bytes())
                except EOFError:
                    results[rank] = Raised("the process died", "The process died; what it said is in stderr.")
        return [results[rank] for rank in range(ranks)]

    def close(self) -> None:
        """End the processes."""
        for process, inbox in self._ranks:
            process.kill()
            process.join()
            inbox.close()
        self._ranks = []

    def _start(self) -> None:
        if self._ranks and all(process.is_alive() for process, _ in self._ranks):
            return
        self.close()  # a rank that died after its answer takes all with it
        context = get_context("forkserver")
        context.set_forkserver_preload(["lightning.pytorch", "lightning_attn", "torchmetrics"])
        for rank in range(_MOST_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, list(sys.path)), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def _serve(rank: int, inbox: Connection, path: list[str]) -> None:
    """Run one task after another, until the test ends."""
    sys.path[:] = path
    torch.set_num_threads(1)
    for package in ("lightning", "lightning.pytorch"):
        logging.getLogger(package).setLevel(logging.ERROR)
    with suppress(EOFError):
        while True:
            inbox.send_bytes(_answer(rank, inbox.recv_bytes()))


def _answer(rank: int, task: bytes) -> bytes:
    try:
        function, arguments, ranks, meeting, seconds = pickle.loads(task)
        faulthandler.dump_traceback_later(max(1.0, seconds - 2), exit=False)
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds)
        )
        dist.barrier()  # a rank that is done at once would else be gone before others have found it
        torch.manual_seed(0)
        return pickle.dumps(function(*arguments))
    except BaseException as error:
        return pickle.dumps(Raised(f"{type(error).__name__}: {error}", traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()
        if dist.is_initialized():
            dist.destroy_process_group()
