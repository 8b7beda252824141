"""From what somebody has, weights or queries and keys, to the attention call that statistics are computed of.

Shape suffixes as in `lightning_attn.capture.call`.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from lightning_attn.capture.call import AttentionCall, Visibility
from lightning_attn.functional.dense import described, is_dense, refuse_negative
from lightning_attn.functional.doubt import warn
from lightning_attn.functional.numbers import is_number

#: What the weights of a row may sum to, at most, before that is doubted: dropout of a half makes it about 2.
_LARGEST_SUM: Final = 4.0
#: What weights on hidden keys may sum to, at most: half precision leaves nothing there, and a wrong mask much.
_ROUNDING: Final = 1e-3


def attention_call(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
) -> AttentionCall:
    r"""One evaluation of softmax attention, given by its weights, or by its queries and keys.

    Weights are taken as they are: before dropout, please, and from the head itself rather than as a mean over heads. A
    row whose weights are all zero is absent. Which keys are visible is not told from zeros, for a weight may underflow:
    say it by ``mask`` or ``is_causal``.

    Args:
        weights: (B, H, N, M), or (N, M) for one head of one sequence: the attention weights of N queries on M keys, any
            floating type; or a call of `lightning_attn.record`, with nothing else.
        mask: boolean, true where a key is visible, as in `torch.nn.functional.scaled_dot_product_attention`; broadcasts
            to (B, H, N, M). With ``query`` and ``key`` it may also be of a floating type, and is then added to the
            logits; it hides keys where it is -1e4 or less.
        query: (B, H, N, D), in the place of weights.
        key: (B, K, M, D), where K divides H: query head ``h`` reads key head ``h // (H / K)``.
        value: (B, K, M, E), for statistics that need values.
        is_causal: whether query ``i`` sees the keys ``j <= i`` only, beside what the mask hides.
        scale: what products of queries and keys are multiplied with; :math:`1 / \sqrt D` by default.
        soft_cap: ``c`` of ``c * tanh(logit / c)``.
        sink_logits: (H,), one more logit per head, which takes weight and gives nothing (gpt-oss).
        self_attention: whether query ``i`` and key ``i`` are the same token; by default, where there are as many.
        validate_args: whether values are looked at, beside shapes and types: weights must not be negative, nor on keys
            that are hidden.

    Returns:
        The call, which functions and metrics take in the place of weights.

    Raises:
        ValueError: if an argument is missing, of another shape or type, or contradicts another one.

    Example:
        >>> call = attention_call(query=torch.zeros(2, 4, 5, 8), key=torch.zeros(2, 2, 5, 8), is_causal=True)
        >>> call.weights()[0, 0, 2]
        tensor([0.3333, 0.3333, 0.3333, 0.0000, 0.0000])
    """
    if isinstance(weights, AttentionCall):
        _refuse_beside_call(
            mask=mask,
            query=query,
            key=key,
            value=value,
            is_causal=is_causal or None,
            scale=scale,
            soft_cap=soft_cap,
            sink_logits=sink_logits,
            self_attention=self_attention,
        )
        return weights
    if weights is None:
        call = _of_query_and_key(query, key, scale, soft_cap, sink_logits)
    else:
        _refuse_beside_weights(query=query, key=key, scale=scale, soft_cap=soft_cap, sink_logits=sink_logits)
        call = _of_weights(weights)
    shape = (call.sequences, call.heads, call.queries, call.keys)
    if not isinstance(is_causal, bool):
        raise ValueError(f"`is_causal` must be True or False, got {described(is_causal)}.")
    if self_attention is not None and not isinstance(self_attention, bool):
        raise ValueError(f"`self_attention` must be True, False or None, got {described(self_attention)}.")
    if self_attention and call.queries != call.keys:
        raise ValueError(f"`self_attention` must be False of {call.queries} queries and {call.keys} keys, got True.")
    visibility = _visibility(mask, is_causal, shape, allows_bias=weights is None)
    is_self = call.queries == call.keys if self_attention is None else self_attention
    call = AttentionCall(
        call.site,
        call.query,
        call.key,
        None if value is None else _checked_value(value, call),
        call.scale,
        visibility,
        is_self,
        soft_cap=call.soft_cap,
        sink_logits=call.sink_logits,
        weight_matrix=call.weight_matrix,
    )
    if validate_args and call.weight_matrix is not None:
        _check_weights(call.weight_matrix, call)
    if validate_args and visibility.bias is not None:
        _check_bias(visibility.bias)
    return call


def _of_weights(weights: Tensor) -> AttentionCall:
    weights = _floating("weights", weights, "(B, H, N, M) or (N, M)")
    if weights.dim() == 2:
        weights = weights[None, None]
    if weights.dim() != 4:
        hint = (
            " For one head of each sequence give `weights[:, None]`, for the heads of one sequence `weights[None]`."
            if weights.dim() == 3
            else ""
        )
        raise ValueError(f"`weights` must be of shape (B, H, N, M) or (N, M), got {tuple(weights.shape)}.{hint}")
    sequences, heads, queries, keys = weights.shape
    if heads == 0:
        raise ValueError(f"`weights` must have a head, got shape {tuple(weights.shape)}.")
    return AttentionCall(
        "weights",
        weights.new_zeros(sequences, heads, queries, 0),
        weights.new_zeros(sequences, heads, keys, 0),
        None,
        1.0,
        Visibility(),
        False,
        weight_matrix=weights,
    )


def _of_query_and_key(
    query: Tensor | None, key: Tensor | None, scale: float | None, soft_cap: float | None, sink_logits: Tensor | None
) -> AttentionCall:
    if query is None or key is None:
        given = "neither" if query is None and key is None else "only " + ("`key`" if query is None else "`query`")
        raise ValueError(f"Give `weights`, or `query` and `key` together: got {given}.")
    query, key = _floating("query", query, "(B, H, N, D)"), _floating("key", key, "(B, K, M, D)")
    if query.dim() != 4 or key.dim() != 4 or query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            "`query` and `key` must be of shapes (B, H, N, D) and (B, K, M, D), "
            f"got {tuple(query.shape)} and {tuple(key.shape)}."
        )
    heads, key_heads, width = query.shape[1], key.shape[1], query.shape[-1]
    if heads == 0:
        raise ValueError(f"`query` must have a head, got shape {tuple(query.shape)}.")
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"`key` must have a number of heads that divides the {heads} of `query`, got {key_heads}.")
    if scale is not None and not (is_number(scale) and math.isfinite(scale)):
        raise ValueError(f"`scale` must be a finite number or None, got {described(scale)}.")
    if soft_cap is not None and not (is_number(soft_cap) and soft_cap > 0):
        raise ValueError(f"`soft_cap` must be positive or None, got {described(soft_cap)}.")
    if sink_logits is not None and (not isinstance(sink_logits, Tensor) or sink_logits.shape != (heads,)):
        raise ValueError(f"`sink_logits` must be a tensor of shape ({heads},), got {described(sink_logits)}.")
    default = 1 / math.sqrt(width) if width else 1.0
    return AttentionCall(
        "query and key",
        query,
        key,
        None,
        default if scale is None else float(scale),
        Visibility(),
        False,
        soft_cap=soft_cap,
        sink_logits=sink_logits,
    )


def _visibility(mask: Tensor | None, is_causal: bool, shape: tuple[int, ...], allows_bias: bool) -> Visibility:
    causal_offset = 0 if is_causal else None
    if mask is None:
        return Visibility(causal_offset)
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or (allows_bias and mask.is_floating_point())):
        allowed = "a boolean or floating tensor" if allows_bias else "a boolean tensor, true where a key is visible"
        raise ValueError(f"`mask` must be {allowed}, got {described(mask)}.")
    try:
        fits = torch.broadcast_shapes(mask.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits or mask.dim() > 4:
        raise ValueError(f"`mask` must broadcast to (B, H, N, M) = {shape}, got shape {tuple(mask.shape)}.")
    mask = mask[(None,) * (4 - mask.dim())]
    return Visibility(causal_offset, mask=mask) if mask.dtype == torch.bool else Visibility(causal_offset, bias=mask)


def _checked_value(value: Tensor, call: AttentionCall) -> Tensor:
    value = _floating("value", value, "(B, K, M, E)")
    fits = value.dim() == 4 and value.shape[0] == call.sequences and value.shape[2] == call.keys
    if not fits or value.shape[1] == 0 or call.heads % value.shape[1]:
        raise ValueError(
            f"`value` must be of shape (B, K, M, E) with B = {call.sequences}, M = {call.keys} and a K that divides "
            f"{call.heads}, got {tuple(value.shape)}."
        )
    return value


def _check_weights(weights_BHNM: Tensor, call: AttentionCall) -> None:
    """Look for what can be no attention weights, and for a mask that does not belong to them."""
    if weights_BHNM.numel() == 0:
        return
    refuse_negative("weights", weights_BHNM)
    largest_sum = weights_BHNM.sum(-1, dtype=torch.float32).max().item()
    if largest_sum > _LARGEST_SUM:
        warn(
            f"A row of `weights` sums to {largest_sum:.4g}. They are taken as they are: divide them by their sums if "
            "they are no attention weights yet.",
        )
    rows = call.visibility.rows(0, call.queries, call.keys, weights_BHNM.device)
    if rows is not None:
        first, visible = rows
        astray = torch.where(visible, 0, weights_BHNM[..., first:]).float().sum(-1).max().item()
        if astray > _ROUNDING:
            raise ValueError(
                f"`weights` must be zero on keys that the mask hides, got {astray:.4g} of a row there. True in `mask` "
                "means visible."
            )
    elif call.self_attention and call.queries > 2 and not bool(weights_BHNM.triu(1).any()):
        warn(
            "No query has weight on a later key. If this is causal attention, say `is_causal=True`: otherwise every "
            "key counts as visible, and entropies and baselines are those of full attention.",
        )


def _check_bias(bias: Tensor) -> None:
    """Look for the 1 and 0 of a mask, which would be added to the logits and hide nothing."""
    is_one = bias == 1
    if bool((is_one | (bias == 0)).all()) and bool(is_one.any()):
        warn(
            "`mask` is of a floating type and holds zeros and ones alone, which are added to the logits and hide "
            "nothing. If one means visible, give `mask.bool()`.",
        )


def _floating(name: str, tensor: object, shape: str) -> Tensor:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not is_dense(tensor):
        raise ValueError(f"`{name}` must be a floating tensor of shape {shape}, got {described(tensor)}.")
    return tensor.detach()


def _refuse_beside_weights(**others: object) -> None:
    for name, other in others.items():
        if other is not None:
            raise ValueError(f"`{name}` is for attention given by `query` and `key`, and `weights` was given.")


def _refuse_beside_call(**others: object) -> None:
    for name, other in others.items():
        if other is not None:
            raise ValueError(f"`{name}` must not be given beside an AttentionCall, which has it.")
