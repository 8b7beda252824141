"""Reading `torch.nn.functional.scaled_dot_product_attention`.

Shape suffixes as in `lightning_attn.capture.call`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

from lightning_attn.capture.autocast import as_autocast
from lightning_attn.capture.axes import steps_over_tokens
from lightning_attn.capture.call import AttentionCall, Visibility
from lightning_attn.capture.composition import Division, divided
from lightning_attn.capture.nested import first_of, is_dense_inside, padded
from lightning_attn.capture.reader import Sampling, reads
from lightning_attn.capture.refusals import HEADS_AS_QUERIES, OVERLAPPING_WINDOWS, TOKENS_AS_HEADS, UnreadableError


@reads(functional.scaled_dot_product_attention)
@reads(torch.ops.aten.scaled_dot_product_attention)
@reads(torch.ops.aten.scaled_dot_product_attention.default)
def read(args: tuple[Any, ...], kwargs: dict[str, Any], sampling: Sampling) -> AttentionCall:
    """Read one call: all masks, grouped heads, nested tensors, and inputs of any number of leading dimensions.

    Three dimensions are sequences of one head each, unless the module has put its heads into the batch. Of more than
    four, those that are known to be channels are heads, or else the last; the others are flattened into sequences.
    Nested tensors are padded to the longest of the wanted sequences. Under autocast the function rounds what it is
    given, and so does this.

    Raises:
        UnreadableError: for nested tensors with a mask, or that differ in more than their numbers of tokens.
    """
    return as_autocast(_read(sampling, *args, **kwargs), sampling.autocast_dtype)


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
    if query.is_nested or key.is_nested or value.is_nested:
        return _read_nested(sampling, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    sampling.check_tokens(query, key)
    _refuse_what_is_no_matrix(sampling, query, key)
    is_reordered = sampling.channels.are_reordered(query, key)
    dimensions = max(query.dim(), key.dim(), value.dim())
    known = sampling.channels.heads_among((query, key), range(-dimensions, -2)) if dimensions > 2 else None
    if enable_gqa and query.dim() == 3:  # one sequence of many heads, not many sequences of one head
        query, key, value = query[None], key[None], value[None]
    elif known is not None:
        query, key, value, attn_mask = _with_heads_third(known, query, key, value, attn_mask)
    elif query.dim() == key.dim() == value.dim() == 3:
        heads = sampling.heads_in_batch(query.shape[0], query.shape[1], key.shape[1])
        query, key, value = (_beside_each_other(tensor, heads) for tensor in (query, key, value))
        if isinstance(attn_mask, Tensor) and attn_mask.dim() == 3:
            attn_mask = _beside_each_other(attn_mask, heads)
    if any(tensor.dim() > 3 and steps_over_tokens(tensor, -3, -1) for tensor in (query, key, value)):
        raise UnreadableError(TOKENS_AS_HEADS.reason)
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
        self_attention=queries == keys and not is_reordered,
    )


def _read_nested(
    sampling: Sampling,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> AttentionCall:
    """Read a call of sequences of different lengths; a query that is padding is none, and sees nothing."""
    if attn_mask is not None:
        raise UnreadableError(
            "its nested tensors come with a mask of their own; pad them, with one mask, on the steps to be watched"
        )
    parts = [first_of(tensor, sampling.max_sequences) for tensor in (query, key, value)]
    if all(is_dense_inside(tensor) for tensor in (query, key, value)):
        query, key, value = (torch.cat(part) for part in parts)
        everything = replace(sampling, max_sequences=None)
        return _read(everything, query, key, value, None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    queries, keys, values = (padded(part) for part in parts)
    call = _read(
        sampling,
        queries.tensor,
        keys.tensor,
        values.tensor,
        keys.is_token_BN[:, None, None],
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    padding_BN = ~queries.is_token_BN.expand(call.sequences, -1)
    return replace(
        call,
        visibility=replace(call.visibility, padding=padding_BN),
        self_attention=queries.lengths == keys.lengths,
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
    tensor = _filled(tensor, dimensions)
    if dimensions == 2:
        return tensor[None, None]
    if dimensions == 3:
        return tensor[:, None]
    if dimensions == 4:
        return tensor
    if any(size != 1 for size in tensor.shape[:-3]):
        tensor = tensor.expand(*leading, -1, -1, -1)
    return tensor.flatten(0, -4)


def _filled(tensor: Tensor, dimensions: int) -> Tensor:
    """A tensor with axes of one element in front, so that it has as many as the others."""
    return tensor[(None,) * (dimensions - tensor.dim())]


def _refuse_what_is_no_matrix(sampling: Sampling, query: Tensor, key: Tensor) -> None:
    """Refuse queries that are known to hold heads beside the tokens, and keys in windows that overlap."""
    holds_heads = sampling.channels.heads_among_rows
    if holds_heads(query, -2) and not holds_heads(key, -2):
        raise UnreadableError(HEADS_AS_QUERIES.reason)
    if query.shape[-2] != key.shape[-2] and sampling.channels.overlap(key):
        raise OVERLAPPING_WINDOWS.error()


def _with_heads_third(
    known: Division, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The tensors of a call with all heads in the third axis from the last, where they are known to be elsewhere."""
    dimensions = max(query.dim(), key.dim(), value.dim())
    if known.parts == dimensions - 2 > 1 and known.heads == (known.parts - 1,):
        return query, key, value, mask
    heads = [part - known.parts - 2 for part in known.heads]

    def in_parts(tensor: Tensor) -> Tensor:
        tensor = _filled(tensor, dimensions)
        for axis, sizes in reversed(list(enumerate(known.sizes))):
            tensor = divided(tensor, axis, sizes)
        return tensor

    query, key, value = (in_parts(tensor) for tensor in (query, key, value))
    leading = _broadcast(*(tensor.shape[:-2] for tensor in (query, key, value)))

    def moved(tensor: Tensor) -> Tensor:
        if not heads:
            return tensor.unsqueeze(-3)
        if len(heads) > 1:
            tensor = tensor.expand([leading[axis + 2] if axis in heads else -1 for axis in range(-tensor.dim(), 0)])
        tensor = tensor.movedim(heads, tuple(range(-2 - len(heads), -2))).flatten(-2 - len(heads), -3)
        return tensor[None] if tensor.dim() == 3 else tensor

    if mask is not None and not isinstance(mask, CausalBias):
        mask = moved(in_parts(mask))
    return moved(query), moved(key), moved(value), mask


def _beside_each_other(tensor: Tensor, heads: int) -> Tensor:
    """Heads that are in the batch (B H, rows, columns), as (B, H, rows, columns)."""
    return tensor if heads == 1 or tensor.shape[0] == 1 else tensor.unflatten(0, (-1, heads))


def _first_sequences(tensor: Tensor, max_sequences: int | None) -> Tensor:
    return tensor if max_sequences is None or tensor.shape[0] == 1 else tensor[:max_sequences]
