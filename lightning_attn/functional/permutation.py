"""Whether attention goes with the content of tokens or with their positions, told by moving tokens.

Shape suffixes: B sequences, H heads, N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.functional.dense import checked, present_rows, refuse_negative, visible_keys, working_type
from lightning_attn.statistics.statistic import wide

#: Patterns that differ by less than this part of a uniform row do not differ: the rest is rounding.
_ROUNDING = 1e-6
#: A row that gives less than this to the keys that are compared tells nothing of how it divides it among them.
_SMALLEST_SUM = 1e-30


def permutation_response(
    weights: Tensor,
    weights_of_permuted: Tensor,
    permutation: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> Tensor:
    r"""How far each head's attention moves along when tokens are moved: 1 by content, 0 by position.

    A model is run twice, the second time with the tokens of each sequence in another order, two of them swapped at
    least. With the attention :math:`A` of the first run and :math:`A'` of the second, a head that goes by content has
    :math:`A'_{\pi(i) \pi(j)} = A_{ij}`, and one that goes by position has :math:`A' = A`. The response is the share
    :math:`r` of the first in the mixture of both that is nearest to :math:`A'`:

    .. math:: r = \frac{\sum \langle X - P, C - P \rangle}{\sum \|C - P\|^2}

    with the rows of :math:`A'` as :math:`X`, those of :math:`A` at the same place as :math:`P` (position), and those of
    :math:`A` that were moved along, :math:`A_{\pi^{-1}(i) \pi^{-1}(j)}`, as :math:`C` (content), summed over rows and
    sequences. Rows and keys that are not moved agree in both and have no part in it.

    Pairs of tokens may become visible, or hidden, when they are moved. Each row is therefore compared on the keys that
    are visible to it as well before as after the move, on which all three are renormalised: the softmax divides weight
    in the same proportion among some keys whatever others there are, so that under a causal mask, beside a learned
    sink, and beside a sink on a token that is not moved, pure cases have 1 and 0 still.

    Args:
        weights: attention weights before dropout, (B, H, N, N), of self-attention.
        weights_of_permuted: the same of the permuted sequences.
        permutation: the token at position ``p`` of the sequence was moved to ``permutation[p]``; integers, (N,) or
            (B, N). Keep what is no content where it is: the first token, separators, padding.
        mask: boolean, true where a key may be seen, in both runs; broadcasts to the weights. ``None``: every key may
            be.
        is_causal: whether, besides, query ``i`` sees the keys ``j <= i`` alone.

    Returns:
        (H,); 1: all goes by content, 0: all by position. Noise may exceed these bounds, and a pattern of the second run
        that has nothing to do with that of the first gives about 1/2, as an even mixture does. NaN where moving tokens
        makes no difference: heads that are uniform, or look only at what was not moved, tokens that see no common keys
        before and after, and the identity. float64 of float64, else float32.

    Raises:
        ValueError: if weights, permutation or mask have another type or shape, or the permutation is none.

    Source: our proposal; the order parameters it stands for are those of Cui et al. 2024, arXiv:2402.03902.

    Example:
        >>> by_position = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.7, 0.2], [0.6, 0.3, 0.1]])
        >>> swap = torch.tensor([0, 2, 1])  # the last two tokens
        >>> moved_along = by_position[swap][:, swap]
        >>> after = torch.stack([by_position, moved_along, 0.75 * by_position + 0.25 * moved_along])
        >>> permutation_response(by_position.expand(1, 3, 3, 3), after[None], swap)
        tensor([0.0000, 1.0000, 0.2500])
    """
    sums = _permutation_response_update(weights, weights_of_permuted, permutation, mask, is_causal=is_causal)
    return _permutation_response_compute(*sums).to(working_type(weights))


def _permutation_response_update(
    weights: Tensor,
    weights_of_permuted: Tensor,
    permutation: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """The two sums of `permutation_response`, (H,): they add up over batches."""
    before_BHNN = checked("weights", weights, "(B, H, N, N)")
    refuse_negative("weights", before_BHNN)
    after_BHNN = checked("weights_of_permuted", weights_of_permuted, "(B, H, N, N)")
    refuse_negative("weights_of_permuted", after_BHNN)
    if after_BHNN.shape != before_BHNN.shape:
        raise ValueError(
            f"`weights_of_permuted` must have the shape of `weights`, {tuple(before_BHNN.shape)}, "
            f"got {tuple(after_BHNN.shape)}."
        )
    origin_BN = _origins(permutation, before_BHNN)
    visible_BHNN = visible_keys(before_BHNN, mask, is_causal=is_causal)
    present_BHN = present_rows(before_BHNN, visible_BHNN, is_self_attention=True)
    compared_BHNN = visible_BHNN & _moved(visible_BHNN, origin_BN)
    counted_BHN = present_rows(after_BHNN, visible_BHNN, is_self_attention=True) & present_BHN
    counted_BHN &= present_BHN.gather(-1, origin_BN[:, None].expand_as(present_BHN))

    position_BHNN, content_BHNN, found_BHNN = (
        torch.where(compared_BHNN, matrix_BHNN, 0.0)
        for matrix_BHNN in (before_BHNN, _moved(before_BHNN, origin_BN), after_BHNN)
    )
    for matrix_BHNN in (position_BHNN, content_BHNN, found_BHNN):
        sum_BHN1 = matrix_BHNN.sum(-1, keepdim=True)
        counted_BHN = counted_BHN & (sum_BHN1[..., 0] > _SMALLEST_SUM)
        matrix_BHNN.div_(sum_BHN1)

    moved_BHNN = content_BHNN - position_BHNN
    product_BHN = ((found_BHNN - position_BHNN) * moved_BHNN).sum(-1)
    square_BHN = moved_BHNN.square().sum(-1)
    counted_BHN = counted_BHN & (square_BHN * compared_BHNN.sum(-1) > _ROUNDING**2)
    sums_2BHN = torch.where(counted_BHN, torch.stack([product_BHN, square_BHN]), 0.0)
    numerator_H, denominator_H = sums_2BHN.sum((1, 3), dtype=wide(sums_2BHN.device))
    return numerator_H, denominator_H


def _permutation_response_compute(numerator_H: Tensor, denominator_H: Tensor) -> Tensor:
    """The response from its two sums; NaN where it is absent."""
    return torch.where(denominator_H > 0, numerator_H / denominator_H, torch.nan)


def _origins(permutation: Tensor, weights_BHNN: Tensor) -> Tensor:
    """Where the token at each position came from, (B, N)."""
    sequences, _, _, tokens = weights_BHNN.shape
    is_integer = not (permutation.is_floating_point() or permutation.is_complex() or permutation.dtype == torch.bool)
    if not is_integer or tuple(permutation.shape) not in ((tokens,), (sequences, tokens)):
        raise ValueError(
            f"`permutation` must be integers of shape ({tokens},) or ({sequences}, {tokens}), got {permutation.dtype} "
            f"of {tuple(permutation.shape)}."
        )
    permutation_BN = permutation.to(weights_BHNN.device).long().expand(sequences, tokens)
    is_wrong_BN = permutation_BN.sort(-1).values != torch.arange(tokens, device=permutation_BN.device)
    if bool(is_wrong_BN.any()):
        wrong = permutation_BN[is_wrong_BN.any(-1)][0].tolist()
        missing = min({*range(tokens)} - {*wrong})
        raise ValueError(f"`permutation` must hold each of 0 … {tokens - 1} once, got one without {missing}.")
    return permutation_BN.argsort(-1)


def _moved(matrix_BHNN: Tensor, origin_BN: Tensor) -> Tensor:
    """A matrix whose rows and columns moved along with the tokens."""
    rows_BHNN = matrix_BHNN.gather(2, origin_BN[:, None, :, None].expand_as(matrix_BHNN))
    return rows_BHNN.gather(3, origin_BN[:, None, None, :].expand_as(matrix_BHNN))
