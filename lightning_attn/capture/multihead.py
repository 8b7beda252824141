"""Reading `torch.nn.functional.multi_head_attention_forward`, which `torch.nn.MultiheadAttention` is made of.

What happens inside that function cannot be seen from outside, so the queries and keys are projected anew from its
arguments, for the wanted sequences alone. Shape suffixes as in `lightning_attn.capture.call`, and L: width of a token.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_attn.capture.call import AttentionCall, Visibility
from lightning_attn.capture.reader import Sampling, reads

#: Weight and bias.
_Projection = tuple[Tensor, Tensor | None]

_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)


@reads(functional.multi_head_attention_forward)
def read(args: tuple[Any, ...], kwargs: dict[str, Any], sampling: Sampling) -> AttentionCall:
    """Read one call: packed or separate projections, learned key and value biases, an added zero key, and all masks."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    heads: int = given["num_heads"]
    is_batched = given["query"].dim() == 3
    query_projection, key_projection, value_projection = _projections(given)

    def project(name: str, projection: _Projection) -> Tensor:
        tokens_BNL = given[name].transpose(0, 1) if is_batched else given[name][None]
        projected_BNL = _project(tokens_BNL[: sampling.max_sequences], projection, sampling.autocast_dtype)
        return _split(projected_BNL, -1, heads).transpose(1, 2)

    def project_keys(name: str, projection: _Projection, static: str, extra: str) -> Tensor:
        if given[static] is None:
            projected_BHMD = project(name, projection)
        else:  # (all sequences x heads, M, D), in the place of a projection
            projected_BHMD = _split(given[static], 0, heads)[: sampling.max_sequences]
        if given[extra] is not None:  # (1, 1, L), one more key for every sequence
            extra_1H1D = given[extra].to(projected_BHMD.dtype).view(1, heads, 1, -1)
            projected_BHMD = torch.cat([projected_BHMD, extra_1H1D.expand(projected_BHMD.shape[0], -1, -1, -1)], dim=2)
        return functional.pad(projected_BHMD, (0, 0, 0, 1)) if given["add_zero_attn"] else projected_BHMD

    query_BHND = project("query", query_projection)
    key_BHMD = project_keys("key", key_projection, "static_k", "bias_k")
    own_keys = given["key"].shape[0] if given["static_k"] is None else given["static_k"].shape[1]
    return AttentionCall(
        site=sampling.site,
        query=query_BHND,
        key=key_BHMD,
        value=project_keys("value", value_projection, "static_v", "bias_v") if sampling.with_values else None,
        scale=1 / math.sqrt(query_BHND.shape[-1]),
        visibility=_visibility(given, query_BHND.shape[0], is_batched, extra_keys=key_BHMD.shape[2] - own_keys),
        self_attention=given["query"] is given["key"] and given["static_k"] is None,
    )


def _projections(given: dict[str, Any]) -> list[_Projection]:
    """Weight and bias of the projections of queries, keys and values."""
    if given["use_separate_proj_weight"]:
        weights = [given[name] for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")]
    else:
        weights = given["in_proj_weight"].chunk(3)
    biases = [None] * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    return list(zip(weights, biases, strict=True))


def _split(tensor: Tensor, dimension: int, heads: int) -> Tensor:
    """Divide a dimension in which heads were folded: ahead of it if it is the last one, else behind it."""
    rest = tensor.shape[dimension] // heads
    divided: Tensor = tensor.unflatten(dimension, (heads, rest) if dimension == -1 else (rest, heads))
    return divided


def _project(tokens_BNL: Tensor, projection: _Projection, dtype: torch.dtype | None) -> Tensor:
    weight, bias = projection
    if dtype is not None:
        tokens_BNL, weight, bias = tokens_BNL.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return functional.linear(tokens_BNL, weight, bias)


def _visibility(given: dict[str, Any], sequences: int, is_batched: bool, extra_keys: int) -> Visibility:
    """Join the two masks; in both, true or a penalty hides a key. The extra keys at the end are in neither."""
    padding, attention = given["key_padding_mask"], given["attn_mask"]
    if given["is_causal"] and padding is None and not given["need_weights"]:
        return Visibility(causal_offset=0)  # torch leaves the mask unread here, so that an extra key is seen by nobody
    if padding is not None:
        padding = (padding if is_batched else padding.unsqueeze(0))[:sequences, None, None, :]
    if attention is not None:
        if attention.dim() == 3:  # (all sequences x heads, N, M)
            attention = _split(attention, 0, given["num_heads"])[:sequences]
        else:
            attention = attention[None, None]
    hidden: Tensor | None = None
    bias: Tensor | None = None
    for mask in (padding, attention):
        if mask is None:
            continue
        mask = functional.pad(mask, (0, extra_keys))
        if mask.dtype == torch.bool:
            hidden = mask if hidden is None else hidden | mask
        else:
            bias = mask if bias is None else bias + mask
    return Visibility(mask=None if hidden is None else ~hidden, bias=bias)
