"""Heads that an attention function folded into its queries.

Decoding one token, a function may hand the query heads that share a key head to a kernel as so many queries of that
head, (B, H, 1, D) as (B, K, H / K, D): nothing is repeated then, and the numbers are the same. What is seen of the
kernel has as many heads as there are keys' heads, and queries that are none.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_attn.capture.call import AttentionCall, Visibility
from lightning_attn.capture.refusals import UnreadableError


def unfolded(call: AttentionCall, query_BHND: Tensor) -> AttentionCall:
    """The call with the heads and queries that the model has.

    Args:
        call: the call as the kernel got it.
        query_BHND: the query as the model gave it to the function that called the kernel.

    Raises:
        UnreadableError: if heads were folded into queries, and which is which cannot be told.
    """
    if query_BHND.dim() != 4:
        return call
    heads, queries = query_BHND.shape[1:3]
    rows = call.heads * call.queries
    if heads == call.heads or heads * queries != rows or heads % max(1, call.heads):
        return call
    visibility, shape = call.visibility, (call.sequences, heads, queries)
    # In the written-out case queries are not known, but heads that stand beside one query each have only one order.
    is_plain = queries == 1 if call.logit_matrix is not None else _is_folded_from(query_BHND, call)
    if not is_plain or visibility.causal_offset is not None or visibility.rule or call.score_rule:
        raise UnreadableError(
            f"its function folds {heads} heads of {queries} queries into {call.heads} of {call.queries}, in a way in "
            "which they cannot be told apart again; watch it with `attn_implementation='eager'`, or have the function "
            "repeat the keys instead"
        )
    return replace(
        call,
        query=call.query.reshape(*shape, -1),
        visibility=Visibility(
            mask=_unfolded_mask(visibility.mask, call, heads), bias=_unfolded_mask(visibility.bias, call, heads)
        ),
        self_attention=queries == call.keys,
        logit_matrix=None if call.logit_matrix is None else call.logit_matrix.reshape(*shape, call.keys),
    )


def _is_folded_from(query_BHND: Tensor, call: AttentionCall) -> bool:
    """Whether the kernel's queries are the model's, in the order of the model's heads."""
    plain = query_BHND[: call.sequences]
    if len(plain) not in (1, call.sequences):
        return False
    plain = plain.expand(call.sequences, -1, -1, -1).reshape(call.query.shape).to(call.query.dtype)
    return torch.allclose(plain, call.query, rtol=0, atol=0, equal_nan=True)


def _unfolded_mask(mask: Tensor | None, call: AttentionCall, heads: int) -> Tensor | None:
    if mask is None or mask.shape[1:3] == (1, 1):
        return mask
    mask = mask.expand(-1, call.heads, call.queries, -1)
    return mask.reshape(mask.shape[0], heads, -1, mask.shape[3])
