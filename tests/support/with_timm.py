"""timm, where it can be imported, and its models, made small."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from support.truth import split_heads
from torch import Tensor, nn

#: Declarations of torchvision's operators: they last as long as these do.
_DECLARED: list[Any] = []
_SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@cache
def timm() -> Any:
    """The package timm. Tests that ask for it are skipped where it cannot be imported.

    It imports torchvision, whose builds on PyPI are for CUDA: beside a build of torch for the CPU its operators cannot
    be loaded, and its import fails because it looks for them. timm uses none of them, so it is enough to declare their
    names.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass  # timm says so itself
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for signature in _SIGNATURES:
            library.define(signature)
        _DECLARED.append(library)
    try:
        import timm as package
    except (ImportError, RuntimeError) as error:
        return pytest.skip(f"timm cannot be imported: {error}")
    return package


def tiny(make: Callable[[Any], nn.Module], fused: bool) -> nn.Module:
    """A model of timm that computes its attention fused or not, with weights that make its heads differ.

    Args:
        make: makes it, given timm.
        fused: whether `scaled_dot_product_attention` is used, also where timm holds that to be experimental.
    """
    package = timm()
    before = package.layers.use_fused_attn(), package.layers.use_fused_attn(experimental=True)
    package.layers.set_fused_attn(fused, experimental=fused)
    try:
        model = make(package)
    finally:
        package.layers.set_fused_attn(before[0], experimental=before[1])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=2.0 / math.sqrt(parameter[0].numel()))
            elif not parameter.any():
                parameter.normal_(std=0.3)
    return model


def linear(tensor: Tensor, layer: Any, bias: Tensor | None = None) -> Tensor:
    """A linear layer of a model in float64, with a bias of its own or the one that the model keeps beside it."""
    bias = layer.bias if bias is None else bias
    product = torch.einsum("...c,dc->...d", tensor.double(), layer.weight.double())
    return product if bias is None else product + bias.double()


def projected(tensor: Tensor, attention: Any, heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys (B, H, N, D) in float64, of the tokens (B, N, L) that enter a module with a layer `qkv`."""
    bias = None
    if getattr(attention, "q_bias", None) is not None:
        bias = torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
    query, key, _ = linear(tensor, attention.qkv, bias).chunk(3, dim=-1)
    return split_heads(query, heads), split_heads(key, heads)


def every_key(logits_BHNM: Tensor) -> Tensor:
    """Every query sees every key."""
    return torch.ones(logits_BHNM.shape[-2:], dtype=torch.bool)[None, None]
