"""What the layers of a model do to its tokens together, if attention were all they had.

Shape suffixes: B sequences, H heads, N queries, M keys, K and E of size one, as `RowBlock.applied_to` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_attn.capture import AttentionCall
from lightning_attn.capture.isolation import isolated
from lightning_attn.functional.dense import (
    check_floating,
    described,
    present_rows,
    refuse_negative,
    visible_keys,
    working_type,
)
from lightning_attn.statistics.rows.row_pass import passes
from lightning_attn.statistics.statistic import wide

#: Masks are looked at so many rows at a time.
_SEEN_ROWS = 128


def attention_rollout(layers: Sequence[Tensor], *, residual: bool = False) -> Tensor:
    r"""The product of the attention matrices of all layers, :math:`P = \bar A^{(L)} \cdots \bar A^{(1)}`.

    Entry :math:`P_{ij}` is how much of token :math:`j`, as it entered the first layer, is in token :math:`i` behind the
    last. Heads are averaged, and values, output projections and feed-forward layers left out.

    Args:
        layers: the weights of each layer, from the first one: (B, H, N, N), or (B, N, N) where heads are averaged.
        residual: have half of each layer's input pass by, :math:`\frac12 \bar A + \frac12 I`.

    Returns:
        (B, N, N), in float64 if a layer is, and in float32 otherwise.

    Raises:
        ValueError: if there is no layer, or one that is not of these shapes.

    Source: Abnar and Zuidema 2020, arXiv:2005.00928; without the residual, Wu et al. 2025, arXiv:2502.01951.

    Example:
        >>> uniform_causal = torch.ones(1, 2, 3, 3).tril() / torch.tensor([1, 2, 3])[:, None]
        >>> attention_rollout([uniform_causal] * 4)[0, :, 0]
        tensor([1.0000, 0.9375, 0.8873])
    """
    _check(layers, takes_calls=False)
    with isolated(layers[0].device):
        rollout_BNN = torch.eye(layers[0].shape[-1], dtype=_working_type(layers))
        for weights in layers:
            matrix_BNN = _with_heads(weights).mean(1, dtype=rollout_BNN.dtype)
            rollout_BNN = rollout_BNN.to(matrix_BNN.device)
            image_BNN = matrix_BNN @ rollout_BNN
            rollout_BNN = (image_BNN + rollout_BNN) / 2 if residual else image_BNN
        return rollout_BNN


def rollout_first_token_mass(
    layers: Sequence[Tensor | AttentionCall], *, mask: Tensor | None = None, residual: bool = False
) -> Tensor:
    r"""How much of the first token is in the tokens behind each layer, :math:`\frac1n \sum_i P^{(t)}_{i1}`.

    :math:`P^{(t)}` is the rollout of the first :math:`t` layers. Only its first column is computed,
    :math:`p \leftarrow \bar A p`, so that it takes O(N) memory for a sequence; calls are walked over in blocks of rows.
    In causal models it goes to 1 with depth, with uniform weights too: compare with
    `uniform_rollout_first_token_mass`.

    The first token is the first key that any query of the first layer sees, after left padding the first real one; the
    mean is over the queries that have weights, and padding has none: in self-attention, a token that nobody may see.
    Values of sequences are averaged.

    Args:
        layers: from the first one, either the weights of each layer, (B, H, N, N) or (B, N, N), or its call as `record`
            keeps it.
        mask: boolean, true where a key may be seen: (B, N, N), or what broadcasts to (B, H, N, N). Calls know it
            themselves.
        residual: have half of each layer's input pass by, :math:`\frac12 \bar A + \frac12 I`.

    Returns:
        (L,), one value for each depth, in [0, 1], on the device of the first layer; float64 if any weights are, float32
        otherwise. NaN where no query has weights.

    Raises:
        ValueError: if there is no layer, one that is not square, or of another size than the first; or the mask does
            not fit.

    Source: Wu et al. 2025, arXiv:2502.01951; Abnar and Zuidema 2020, arXiv:2005.00928 (the residual).

    Example:
        >>> uniform_causal = torch.ones(1, 2, 3, 3).tril() / torch.tensor([1, 2, 3])[:, None]
        >>> rollout_first_token_mass([uniform_causal] * 3)
        tensor([0.6111, 0.7870, 0.8873])
    """
    sums_L, counts_L = _rollout_first_token_mass_update(layers, mask, residual)
    return _rollout_first_token_mass_compute(sums_L, counts_L).to(_working_type(layers))


def uniform_rollout_first_token_mass(
    layers: Sequence[Tensor | AttentionCall], *, mask: Tensor | None = None, residual: bool = False
) -> Tensor:
    """What `rollout_first_token_mass` is of uniform attention under the same visibility: what the masks alone do.

    Args:
        layers: as there. Of weights only the shape matters, and whether a row has any: zeros do not hide a key.
        mask: as there; without it, all keys are visible to the queries of given weights, in causal models too.
        residual: as there.

    Returns:
        As there.

    Raises:
        ValueError: as there.

    Source: Wu et al. 2025, arXiv:2502.01951.

    Example:
        >>> weights = torch.randn(1, 2, 3, 3).softmax(-1)
        >>> uniform_rollout_first_token_mass([weights, weights], mask=torch.ones(3, 3).tril().bool())
        tensor([0.6111, 0.7870])
    """
    sums_L, counts_L = _rollout_first_token_mass_update(layers, mask, residual, uniform=True)
    return _rollout_first_token_mass_compute(sums_L, counts_L).to(_working_type(layers))


class _Step(NamedTuple):
    """What a layer makes of a number for each token."""

    #: The mean over heads of the weighted means, (B, N); zero where no head has a row.
    image_BN: Tensor
    #: Whether any head has a row of weights, (B, N).
    present_BN: Tensor


def _rollout_first_token_mass_update(
    layers: Sequence[Tensor | AttentionCall],
    mask: Tensor | None = None,
    residual: bool = False,
    *,
    uniform: bool = False,
) -> tuple[Tensor, Tensor]:
    """Behind each layer the sum over the sequences that have a value, and how many have: (L,) both.

    They add up over batches, and are in the widest type of the first layer's device, and there.
    """
    _check(layers, takes_calls=True)
    first = layers[0]
    with isolated(first.query.device if isinstance(first, AttentionCall) else first.device):
        return _sums_of_layers(layers, mask, residual, uniform)


def _sums_of_layers(
    layers: Sequence[Tensor | AttentionCall], mask: Tensor | None, residual: bool, uniform: bool
) -> tuple[Tensor, Tensor]:
    share_BN = _first_token(layers[0], mask).to(_working_type(layers))
    device = share_BN.device
    sums, counts = [], []
    for layer in layers:
        if isinstance(layer, AttentionCall):
            image_BN, present_BN = _step_of_call(layer, share_BN.to(layer.query.device, torch.float32), uniform)
        else:
            image_BN, present_BN = _step_of_weights(layer, mask, share_BN.to(layer.device), uniform)
        image_BN = image_BN.to(share_BN.dtype)
        share_BN = (image_BN + share_BN.to(image_BN.device)) / 2 if residual else image_BN
        rows_B = present_BN.sum(-1)
        of_sequences_B = torch.where(present_BN, share_BN, 0.0).sum(-1) / rows_B.clamp(min=1)
        sums.append(of_sequences_B.to(device, wide(device)).sum())
        counts.append((rows_B > 0).to(device, wide(device)).sum())
    return torch.stack(sums), torch.stack(counts)


def _rollout_first_token_mass_compute(sums_L: Tensor, counts_L: Tensor) -> Tensor:
    """The mean over sequences behind each layer, (L,); NaN where none has a value."""
    return torch.where(counts_L > 0, sums_L / counts_L, torch.nan)


def _step_of_weights(weights: Tensor, mask: Tensor | None, share_BN: Tensor, uniform: bool) -> _Step:
    weights_BHNN = _with_heads(weights).to(share_BN.dtype)
    visible_BHNN = _visible(weights_BHNN, mask)
    # Without a mask, padding is what has no weights at all.
    has_weights_BHN = torch.where(visible_BHNN, weights_BHNN, 0.0).sum(-1) > 0
    present_BHN = has_weights_BHN & present_rows(weights_BHNN, visible_BHNN, is_self_attention=True)
    if uniform:
        weights_BHNN = visible_BHNN / visible_BHNN.sum(-1, keepdim=True).clamp(min=1).to(share_BN.dtype)
    matrix_BNN = torch.where(present_BHN[..., None] & visible_BHNN, weights_BHNN, 0.0).mean(1)
    return _Step((matrix_BNN @ share_BN[..., None])[..., 0], present_BHN.any(1))


def _step_of_call(call: AttentionCall, share_BN: Tensor, uniform: bool) -> _Step:
    image_BN, present_BN = torch.zeros_like(share_BN), torch.zeros_like(share_BN, dtype=torch.bool)
    if 0 in (call.sequences, call.queries):
        return _Step(image_BN, present_BN)
    sequence = 0
    for row_pass in passes(call):
        part = slice(sequence, sequence + row_pass.call.sequences)
        share_BKME = share_BN[part, None, :, None]
        for rows in row_pass.blocks():
            if uniform:
                seen_BHR = (rows.visible_BHRM @ share_BKME[:, :, : rows.keys])[..., 0]
                of_heads_BHR = rows.uniform_share_BHR * seen_BHR
            else:
                of_heads_BHR = rows.applied_to(share_BKME)[..., 0]
            image_BN[part, rows.start : rows.stop] += of_heads_BHR.sum(1) / call.heads
            present_BN[part, rows.start : rows.stop] |= rows.present_BHR.any(1)
        if row_pass.first_head + row_pass.call.heads == call.heads:  # heads of the same sequences come first
            sequence = part.stop
    return _Step(image_BN, present_BN)


def _first_token(layer: Tensor | AttentionCall, mask: Tensor | None) -> Tensor:
    """One for the first key that any query sees, and zero for others, (B, N)."""
    if isinstance(layer, AttentionCall):
        seen_BM = layer.seen_keys(_SEEN_ROWS).any(1).expand(layer.sequences, -1)
    else:
        weights_BHNN = _with_heads(layer)
        seen_BHNN = weights_BHNN.ne(0) if mask is None else _visible(weights_BHNN, mask)
        seen_BM = seen_BHNN.any(-2).any(1)
    return (seen_BM & (seen_BM.cumsum(-1) == 1)).float()


def _working_type(layers: Sequence[Tensor | AttentionCall]) -> torch.dtype:
    """float64 if any weights are; calls are computed in float32."""
    is_double = any(isinstance(layer, Tensor) and working_type(layer) == torch.float64 for layer in layers)
    return torch.float64 if is_double else torch.float32


def _with_heads(tensor: Tensor) -> Tensor:
    return tensor[:, None] if tensor.dim() == 3 else tensor


def _visible(weights_BHNN: Tensor, mask: Tensor | None) -> Tensor:
    return visible_keys(weights_BHNN, None if mask is None else _with_heads(mask))


def _check(layers: Sequence[Tensor | AttentionCall], takes_calls: bool) -> None:
    if not isinstance(layers, Sequence) or not layers:
        raise ValueError(f"`layers` must be a sequence of at least one layer, got {described(layers)}.")
    sizes = []
    for number, layer in enumerate(layers):
        if isinstance(layer, AttentionCall):
            if not takes_calls:
                raise ValueError(
                    f"`layers[{number}]` must be weights, got {layer!r}; `rollout_first_token_mass` takes calls."
                )
            if not layer.is_square:
                raise ValueError(f"`layers[{number}]` must be self-attention, got {layer!r}.")
            sizes.append((layer.sequences, layer.queries))
        else:
            check_floating(f"layers[{number}]", layer, "(B, H, N, N) or (B, N, N)")
            refuse_negative(f"layers[{number}]", layer)
            sizes.append((layer.shape[0], layer.shape[-1]))
        if sizes[-1] != sizes[0]:
            raise ValueError(
                f"`layers` must agree on sequences and tokens, got {sizes[0]} in the first and {sizes[-1]} in "
                f"layer {number}."
            )
