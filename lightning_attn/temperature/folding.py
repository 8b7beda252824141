"""Writing temperatures into parameters, so that what leaves training is an ordinary model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_attn.temperature.projection import QueryProjection, ScaledParameter
from lightning_attn.temperature.scaling import Attachment, ChannelScale


def fold(projection: QueryProjection, multiplier_O: Tensor) -> None:
    """Multiply the parameters of a projection, in place."""
    with torch.no_grad():
        for part in projection.parameters:
            parameter = projection.tensor(part)
            parameter.copy_(part.scaled(parameter, multiplier_O))


class FoldedStateDict(Attachment):
    """A hook that has every state dict of a module hold its temperatures, written into its parameters.

    Args:
        scale: by what its channels are multiplied.
    """

    def __init__(self, scale: ChannelScale) -> None:
        self._scale = scale

    def __call__(self, module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Multiply what a state dict holds of the module."""
        if self._scale.is_neutral:
            return
        for part in self._scale.parameters:
            key = f"{prefix}{part.name}"
            if isinstance(state_dict.get(key), Tensor):
                with torch.no_grad():
                    state_dict[key] = part.scaled(state_dict[key].detach(), self._scale.multiplier_O)


class LoadedWeights(Attachment):
    """A hook that takes weights which are loaded for such as hold their temperatures: these become one.

    Args:
        scale: by what the module's channels are multiplied.
    """

    def __init__(self, scale: ChannelScale) -> None:
        self._scale = scale

    def __call__(self, module: Any, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        """Look whether there are weights of the module among what is loaded."""
        if any(f"{prefix}{part.name}" in state_dict for part in self._scale.parameters):
            self._scale.reset()


def unfolded_rows(projection: QueryProjection, heads: Tensor) -> dict[str, Tensor]:
    """The rows of some heads as they are, on the CPU: dividing what was multiplied does not bring every digit back.

    Args:
        projection: the projection.
        heads: numbers of heads.
    """
    rows = projection.rows_of(heads)
    return {part.name: _rows(part, _whole(projection.tensor(part)), rows).cpu() for part in projection.parameters}


def unfold(projection: QueryProjection, heads: Tensor, unfolded: dict[str, Tensor], multiplier_O: Tensor) -> bool:
    """Put the rows of some heads back as they were before they were multiplied.

    Args:
        projection: the projection.
        heads: numbers of heads.
        unfolded: what `unfolded_rows` gave.
        multiplier_O: by what they were multiplied.

    Returns:
        Whether it was done: it is not where the rows are others than these would have become.
    """
    rows = projection.rows_of(heads)
    wholes = {}
    for part in projection.parameters:
        parameter = projection.tensor(part)
        whole = _whole(parameter).clone()
        kept = unfolded[part.name].to(whole.device, whole.dtype)
        now, before = _rows(part, whole, rows), kept
        if now.shape != before.shape:
            return False
        _put(part, whole, rows, before)
        if not torch.equal(_rows(part, part.scaled(whole, multiplier_O.to(whole.device)), rows), now):
            return False
        wholes[part] = whole
    with torch.no_grad():
        for part, whole in wholes.items():
            parameter = projection.tensor(part)
            parameter.copy_(_spread_as(whole, parameter))
    return True


def _rows(part: ScaledParameter, tensor: Tensor, rows: Tensor | None) -> Tensor:
    if rows is None:
        return tensor.detach().clone()
    return tensor.detach().index_select(part.axis, rows.to(tensor.device))


def _put(part: ScaledParameter, tensor: Tensor, rows: Tensor | None, values: Tensor) -> None:
    if rows is None:
        tensor.copy_(values)
    else:
        tensor.index_copy_(part.axis, rows.to(tensor.device), values)


def _whole(parameter: Any) -> Tensor:
    """A parameter that is spread over ranks as one tensor; every rank must ask."""
    tensor: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return tensor.detach()


def _spread_as(whole: Tensor, parameter: Any) -> Tensor:
    """A whole tensor, spread over ranks as a parameter is."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, parameter.placements)
