"""Into which parameters of a module a factor per channel can be written, told by trying it."""

from __future__ import annotations

from copy import copy
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_attn.capture.isolation import isolated
from lightning_attn.temperature.projection import ScaledParameter
from lightning_attn.temperature.unchanged import without_trace

#: What multiplies the channels that leave it as its parameters are; strategies make classes of their own with these.
_KNOWN = (nn.Linear.forward, nn.LayerNorm.forward, nn.RMSNorm.forward)


def writable(module: nn.Module, axis: int = 0) -> tuple[ScaledParameter, ...]:
    """The parameters of a layer or a norm whose product with a factor per channel multiplies what leaves it.

    Args:
        module: the module, of one tensor with channels last.
        axis: which axis of a layer's weight holds the channels that leave it.

    Returns:
        None, where there is no such parameter or the module does something else with it.
    """
    weight = module._parameters.get("weight")
    if weight is None:
        return ()
    if type(module).forward in _KNOWN and "forward" not in module.__dict__:
        return _parts(module, axis, is_offset=False)
    others = (1 - axis,) if weight.dim() == 2 else ()
    for place, is_offset in product((axis, *others), (False, True)):
        parts = _parts(module, place, is_offset)
        try:
            if _multiplies(module, parts, place):
                return parts
        except Exception:
            continue
    return ()


def _parts(module: nn.Module, axis: int, is_offset: bool) -> tuple[ScaledParameter, ...]:
    parts = (ScaledParameter("weight", axis, is_offset), ScaledParameter("bias", 0))
    return tuple(part for part in parts if module._parameters.get(part.name) is not None)


def _multiplies(module: nn.Module, parts: tuple[ScaledParameter, ...], axis: int) -> bool:
    random = torch.Generator().manual_seed(0)
    held = {name: _plain(parameter) for name, parameter in module._parameters.items() if parameter is not None}
    # Random ones in the place of all: what is zero now, as half of an adapter is at first, would tell nothing.
    parameters = {name: torch.randn(one.shape, generator=random).to(one) for name, one in held.items()}
    weight = parameters["weight"]
    entering = torch.randn(4, weight.shape[1 - axis if weight.dim() == 2 else 0], generator=random)
    factors = 0.5 + torch.rand(weight.shape[axis], generator=random)
    entering, factors = entering.to(weight.device, weight.dtype), factors.to(weight.device, weight.dtype)
    changed = parameters | {part.name: part.scaled(parameters[part.name], factors) for part in parts}
    plain, scaled = (_given(module, tensors, entering) for tensors in (parameters, changed))
    tolerance = 1e-4 if torch.finfo(weight.dtype).bits >= 32 else 3e-2
    return bool(torch.allclose(scaled, plain * factors, rtol=tolerance, atol=tolerance))


def _given(module: nn.Module, parameters: dict[str, Tensor], entering: Tensor) -> Any:
    """What a module gives with other parameters; it keeps nothing of that, and nobody hears of it."""
    bare = copy(module)
    bare.__dict__ |= {"_parameters": dict(module._parameters), "_forward_hooks": {}, "_forward_pre_hooks": {}}
    with without_trace(bare), isolated(entering.device):
        return _first(functional_call(bare, parameters, (entering,)))


def _first(output: Any) -> Any:
    return output[0] if type(output) is tuple else output


def _plain(parameter: Any) -> Tensor:
    whole: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach()
