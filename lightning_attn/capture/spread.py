"""Tensors that are spread over ranks, and what of them this rank holds.

torch's tensor parallelism computes with `DTensor`, which stands for a whole tensor and holds a part of it. What is
computed with one may communicate, so that nothing here is: only what the rank holds is looked at.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_attn.capture.isolation import without_function_modes


@dataclass(frozen=True)
class Part:
    """A part of an axis: of ``whole`` elements the ``held`` ones from ``start`` on."""

    start: int
    held: int
    whole: int


def ranks_may_share() -> bool:
    """Whether there may be tensors that are spread over ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_spread(value: object) -> bool:
    """Whether a tensor stands for one that is spread over ranks."""
    # Asked for by name, since who has none need not import them.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def held(tensor: Any) -> Tensor:
    """What this rank holds of such a tensor, the same object each time."""
    with without_function_modes(), torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


def arrived(tensor: Tensor) -> Tensor:
    """A tensor that other ranks may be sending still, once it is there.

    What they send stands in a class of torch's own until somebody computes with it. It is private; another torch may
    have none, and tensors are what they are then.
    """
    kind = getattr(sys.modules.get("torch.distributed._functional_collectives"), "AsyncCollectiveTensor", None)
    if kind is None or not isinstance(tensor, kind):
        return tensor
    with without_function_modes():
        waited: Tensor = tensor.trigger_wait()
    return waited


def held_by_rank(*arguments: Any) -> Any:
    """Some arguments with what this rank holds in the place of tensors that are spread over ranks.

    Returns:
        A tuple of them, in which lists, tuples and dictionaries are looked into one level down.
    """
    return tuple(_held_of(argument, deeper=True) for argument in arguments)


def _held_of(value: Any, deeper: bool) -> Any:
    if is_spread(value):
        return held(value)
    if deeper and isinstance(value, dict):
        return {name: _held_of(item, deeper=True) for name, item in value.items()}
    if deeper and type(value) in (tuple, list):
        return type(value)(_held_of(item, deeper=False) for item in value)
    return value


def part_of(tensor: Any, axis: int) -> Part:
    """Which part of an axis this rank holds of a tensor that is spread over ranks.

    Args:
        tensor: the tensor.
        axis: the axis, from the first or from the last.
    """
    whole, start, size = int(tensor.shape[axis]), 0, int(tensor.shape[axis])
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # the rank holds nothing of it
        return Part(0, 0, whole)
    for dimension in sharding(tensor, axis):
        chunk = -(-size // tensor.device_mesh.size(dimension))
        before = min(coordinate[dimension] * chunk, size)
        start, size = start + before, min(chunk, size - before)
    return Part(start, size, whole)


def sharding(tensor: Any, axis: int) -> list[int]:
    """The dimensions of its mesh of ranks that divide an axis of a tensor."""
    axis %= tensor.dim()
    # Asked for by name: shards that two strategies make of one axis have a class of their own.
    axes = (getattr(placement, "dim", None) for placement in tensor.placements)
    return [dimension for dimension, sharded in enumerate(axes) if sharded in (axis, axis - tensor.dim())]


def sharded_axes(tensor: Any) -> set[int]:
    """The axes of such a tensor that are divided among ranks."""
    return {axis for axis in range(tensor.dim()) if sharding(tensor, axis)}


def is_whole_but_for_sequences(tensor: Any) -> bool:
    """Whether this rank holds all of a tensor (B, …) that is spread over ranks, or all of some sequences."""
    return not is_sum(tensor) and sharded_axes(tensor) <= {0}


def is_sum(tensor: Any) -> bool:
    """Whether a tensor stands for the sum of what ranks hold, which was not taken yet."""
    return any(placement.is_partial() for placement in tensor.placements)
