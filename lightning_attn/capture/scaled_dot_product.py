"""Reading `torch.nn.functional.scaled_dot_product_attention`.

Shape suffixes as in `lightning_attn.capture.call`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

from lightning_attn.capture.call import AttentionCall, Visibility
from lightning_attn.capture.reader import Sampling, UnreadableError, reads


@reads(functional.scaled_dot_product_attention)
def read(args: tuple[Any, ...], kwargs: dict[str, Any], sampling: Sampling) -> AttentionCall:
    """Read one call: all masks, grouped heads, and inputs of any number of leading dimensions.

    Three dimensions are sequences of one head each, unless the module has put its heads into the batch. More than four
    are flattened into sequences.

    Raises:
        UnreadableError: for nested tensors, whose sequences have no common shape.
    """
    return _read(sampling, *args, **kwargs)


def _read(
    sampling: Sampling,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    if query.is_nested or key.is_nested:
        raise UnreadableError(
            "nested tensors are not read yet; use padded tensors with a mask on the steps to be watched"
        )
    if enable_gqa and query.dim() == 3:  # one sequence of many heads, not many sequences of one head
        query, key, value = query[None], key[None], value[None]
    elif query.dim() == key.dim() == value.dim() == 3:
        heads = sampling.heads_in_batch(query.shape[0], query.shape[1], key.shape[1])
        query, key, value = (_beside_each_other(tensor, heads) for tensor in (query, key, value))
        if isinstance(attn_mask, Tensor) and attn_mask.dim() == 3:
            attn_mask = _beside_each_other(attn_mask, heads)
    leading = _broadcast(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    dimensions = max(query.dim(), key.dim(), value.dim())

    def in_four_dimensions(tensor: Tensor) -> Tensor:
        return _first_sequences(_in_four_dimensions(tensor, dimensions, leading), sampling.max_sequences)

    query_BHND, key_BKMD, value_BKME = (in_four_dimensions(tensor) for tensor in (query, key, value))
    (sequences,) = _broadcast(query_BHND.shape[:1], key_BKMD.shape[:1], value_BKME.shape[:1])
    # One query head may be compared with many key heads, and its weights applied to many values; one key head with many
    # query heads is a group.
    heads = max(query_BHND.shape[1], key_BKMD.shape[1], value_BKME.shape[1])
    queries, keys = query.shape[-2], key.shape[-2]
    return AttentionCall(
        site=sampling.site,
        query=query_BHND.expand(sequences, heads, -1, -1),
        key=key_BKMD.expand(sequences, -1, -1, -1),
        value=value_BKME.expand(sequences, -1, -1, -1) if sampling.with_values else None,
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
        visibility=_visibility(
            attn_mask if attn_mask is None or isinstance(attn_mask, CausalBias) else in_four_dimensions(attn_mask),
            # torch aligns causality to the first query and key, also where their numbers differ.
            causal_offset=0 if is_causal else None,
        ),
        self_attention=queries == keys,
    )


def _visibility(mask: Tensor | None, causal_offset: int | None) -> Visibility:
    if isinstance(mask, CausalBias):  # causality that is never written out, as of `causal_lower_right`
        return Visibility(mask.seq_len_kv - mask.seq_len_q if mask.variant == CausalVariant.LOWER_RIGHT else 0)
    if mask is None or mask.dtype == torch.bool:
        return Visibility(causal_offset, mask=mask)
    return Visibility(causal_offset, bias=mask)


def _broadcast(first: torch.Size, *others: torch.Size) -> torch.Size:
    """The shape that some broadcast to; torch's function takes longer than the rest of the reading."""
    if all(other == first for other in others):
        return first
    broadcast: torch.Size = torch.broadcast_shapes(first, *others)
    return broadcast


def _in_four_dimensions(tensor: Tensor, dimensions: int, leading: torch.Size) -> Tensor:
    """A tensor of (up to) ``dimensions`` dimensions as (B or 1, heads or 1, rows, columns)."""
    tensor = tensor[(None,) * (dimensions - tensor.dim())]
    if dimensions == 2:
        return tensor[None, None]
    if dimensions == 3:
        return tensor[:, None]
    if dimensions == 4:
        return tensor
    if any(size != 1 for size in tensor.shape[:-3]):
        tensor = tensor.expand(*leading, -1, -1, -1)
    return tensor.flatten(0, -4)


def _beside_each_other(tensor: Tensor, heads: int) -> Tensor:
    """Heads that are in the batch (B H, rows, columns), as (B, H, rows, columns)."""
    return tensor if heads == 1 or tensor.shape[0] == 1 else tensor.unflatten(0, (-1, heads))


def _first_sequences(tensor: Tensor, max_sequences: int | None) -> Tensor:
    return tensor if max_sequences is None or tensor.shape[0] == 1 else tensor[:max_sequences]
