"""Proving that a module gives the same once its temperatures are written into its parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_attn.capture.isolation import isolated
from lightning_attn.capture.spread import is_spread
from lightning_attn.temperature.folding import fold
from lightning_attn.temperature.projection import QueryProjection
from lightning_attn.temperature.unchanged import without_trace

#: So many random rows are put in.
_ROWS = 8


def fold_proven(projection: QueryProjection, multiplier_O: Tensor) -> str:
    """Multiply the parameters of a projection in place, and put them back where it then gives something else.

    Parameters that are spread over ranks are not tried: ranks may no longer talk to each other. Neither is
    `torch.nn.MultiheadAttention`, which was reading its parameters multiplied by the same operation.

    Returns:
        Why they were put back; nothing where they were not.
    """
    parameters = [projection.tensor(part) for part in projection.parameters]
    # Where parameters are not finite nothing is to be proven, and nothing to be lost.
    if projection.kind == "packed" or any(map(is_spread, parameters)) or projection.is_broken:
        fold(projection, multiplier_O)
        return ""
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        expected = _given(projection) * multiplier_O.to(parameters[0].device)
        fold(projection, multiplier_O)
        difference = (_given(projection) - expected).abs().amax(0)
        limit = _tolerance(parameters[0].dtype) * expected.abs().amax(0)
        if bool((difference <= limit).all()):
            return ""
        reason = (
            f"its module then gives something else, off by {float((difference / expected.abs().amax(0)).max()):.3g}"
        )
    except Exception as error:
        reason = f"its module could not be run to prove it ({type(error).__name__}: {error})"
    with torch.no_grad():
        for parameter, whole in zip(parameters, before, strict=True):
            parameter.copy_(whole)
    return reason


def _given(projection: QueryProjection) -> Tensor:
    """What a projection gives for random rows, without the hooks on it."""
    part = projection.parameters[0]
    weight = projection.tensor(part)
    width = weight.shape[1 - part.axis] if weight.dim() == 2 else weight.shape[0]
    entering = torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(0))
    module: Any = projection.module
    with without_trace(module), isolated(weight.device):
        output = module.forward(entering.to(weight.device, weight.dtype))
    given: Tensor = output[0] if type(output) is tuple else output
    return given.to(torch.promote_types(given.dtype, torch.float32))


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-4 if torch.finfo(dtype).bits >= 32 else 3e-2
