"""Lightning's strategies over the ranks that a test has started already."""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import distributed as dist


class StartedRanks(ClusterEnvironment):
    """The process group is there; Lightning takes it as it is."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


def strategy(kind: type[Strategy] = DDPStrategy, **arguments: Any) -> Strategy:
    """A strategy over the ranks that are there."""
    return kind(cluster_environment=StartedRanks(), process_group_backend="gloo", **arguments)


def sharded_strategy() -> Strategy:
    """FSDP2 over the ranks that are there, for models that shard themselves in `configure_model`."""
    sharded = ModelParallelStrategy(
        data_parallel_size=dist.get_world_size(), tensor_parallel_size=1, process_group_backend="gloo"
    )
    sharded.cluster_environment = StartedRanks()
    return sharded
