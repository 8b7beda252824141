"""Deciding together, where ranks run a module together."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from lightning_attn.capture.module_tree import parameters_of
from lightning_attn.capture.spread import is_spread


class Lockstep:
    """The ranks that hold parts of the weights of a module.

    When it runs they talk to each other, so that each has to run it as often as the others, with as much changed.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        spread: list[Any] = [tensor for tensor in parameters_of(module) if is_spread(tensor)]
        self._meshes = list(dict.fromkeys(tensor.device_mesh for tensor in spread))

    def all(self, mine: bool) -> bool:
        """Whether something holds on every rank."""
        for mesh in self._meshes:
            holds = torch.tensor([int(mine)], device=mesh.device_type)
            for dimension in range(mesh.ndim):
                dist.all_reduce(holds, dist.ReduceOp.MIN, group=mesh.get_group(dimension))
            mine = bool(holds.item())
        return mine
