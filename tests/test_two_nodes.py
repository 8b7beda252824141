"""Two nodes: ranks in network namespaces of their own, which see each other through one cable and share nothing else.

A namespace has its own loopback, so that whatever took ranks to be on one host would not find them.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_training import StartedRanks
from lightning.pytorch.strategies import DDPStrategy
from shared_batches import EVEN, SharesBatches
from test_rank_reduction import FIRST, STEADY, different_sites
from torch import distributed as dist
from whole_batches import alone, assert_same, trained

from lightning_attn import Snapshot

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SECONDS = 100
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 29577


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """The names of two network namespaces, each of which has an end of a cable that is called as it is."""
    if shutil.which("ip") is None:
        pytest.skip("needs `ip` for network namespaces")
    names = [f"attn{os.getpid()}n{node}" for node in (0, 1)]
    with ExitStack() as clean_up:
        try:
            for name in names:
                _ip("netns", "add", name)
                clean_up.callback(_ip, "netns", "delete", name)  # and with it the cable
            _ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
            for name, address in zip(names, ADDRESSES, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", name)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", name, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine allows no network namespaces: {error.stderr.strip()}")
        yield names


def on_nodes(
    nodes: list[str], folder: Path, function: Callable[..., Any], *arguments: Any, devices: int = 1
) -> list[Any]:
    """What a function of a test module returns on each rank, of which every node has so many.

    The test fails if one of them raises, or does not end in time.
    """
    world = devices * len(nodes)
    places = [(rank, rank // devices, rank % devices) for rank in range(world)]
    with ExitStack() as clean_up:
        processes = []
        for rank, node, local_rank in places:
            task = function, arguments, rank, world, str(folder / f"result-{rank}")
            (folder / f"task-{rank}").write_bytes(pickle.dumps(task))
            environment = {
                "GLOO_SOCKET_IFNAME": nodes[node],
                "NODE_RANK": str(node),
                "LOCAL_RANK": str(local_rank),
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            process = subprocess.Popen(
                ["ip", "netns", "exec", nodes[node], sys.executable, __file__, str(folder / f"task-{rank}")],
                env=os.environ | environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            clean_up.enter_context(process)
            clean_up.callback(process.kill)
            processes.append(process)
        end = time.monotonic() + SECONDS
        for rank, process in enumerate(processes):
            try:
                _, said = process.communicate(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"Rank {rank} of {world} did not finish in {SECONDS} s.")
            if process.returncode:
                pytest.fail(f"Rank {rank} of {world} raised:\n{said}", pytrace=False)
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world)]


def _run(task: Path) -> None:
    """A rank of a node."""
    function, arguments, rank, world, result = pickle.loads(task.read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{ADDRESSES[0]}:{PORT}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=SECONDS / 2),
    )
    found = function(*arguments)
    Path(result).write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def test_nodes_with_different_sites_agree(nodes: list[str], tmp_path: Path) -> None:
    first, second = on_nodes(nodes, tmp_path, different_sites)
    assert repr(first) == repr(second)
    assert first[0]["values"].keys() == {"expert.0", "shared", "expert.1"}
    assert [capture["collectives"] for capture in first] == [FIRST, STEADY]


class RankOfANode(StartedRanks):
    """Each node counts its own ranks from 0."""

    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    def node_rank(self) -> int:
        return int(os.environ["NODE_RANK"])


def under_ddp(sizes: tuple[int, ...], devices: int) -> list[Snapshot]:
    strategy = DDPStrategy(cluster_environment=RankOfANode(), process_group_backend="gloo")
    return trained(SharesBatches(sizes), strategy=strategy, devices=devices, num_nodes=2)


@pytest.mark.parametrize("devices", [1, 2])
def test_training_on_two_nodes_is_seen_as_on_one(nodes: list[str], tmp_path: Path, devices: int) -> None:
    sizes = EVEN[2 * devices]
    assert_same(on_nodes(nodes, tmp_path, under_ddp, sizes, devices, devices=devices), alone(sizes))


if __name__ == "__main__":
    # Under its own name, by which its functions are known to pickle.
    from test_two_nodes import _run as run

    run(Path(sys.argv[1]))
