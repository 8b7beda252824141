"""What repeated attention brings all tokens to."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.capture.isolation import isolated
from lightning_attn.functional.dense import checked, refuse_negative, visible_keys
from lightning_attn.statistics.algebra.markov_chain import stationary_of


def stationary_distribution(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""The stationary distribution :math:`\pi = \pi P` of square attention matrices.

    :math:`P` are the rows of the weights, each over its sum: they need not sum to one. A weight below 1e-30 of its row
    is none. Applied again and again, :math:`P` brings every token to :math:`\sum_j \pi_j x_j`, unless it is periodic.
    For causal attention :math:`\pi` is the first token.

    Up to 256 tokens it is exact, by an elimination in double precision; of causal matrices at any length. Others are
    iterated, until the largest difference that random values of the tokens leave is below 1e-4, or 200 times.

    Args:
        weights: (…, N, N), of any floating type.
        mask: boolean, true where a key may be seen; broadcasts to the weights. A token without a row of weights, such
            as padding, has no part in it.

    Returns:
        (…, N) in the type of the weights, float32 at least: not negative, of sum one, zero for padding. NaN where
        nothing tells it: where it is not unique, as for the identity, where a token gives weight to one that has no
        row, where no token has a row, and where an iteration has not settled. NaN rather than zeros, which would
        pass for a distribution in means and maxima.

    Raises:
        ValueError: if the weights are no square matrices of floating-point numbers, or the mask does not fit them.

    Source: Grassmann, Taksar and Heyman 1985 (the elimination); Wu et al. 2025, arXiv:2502.01951 (causal attention).

    Example:
        >>> weights = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
        >>> stationary_distribution(weights)
        tensor([0.7500, 0.2500])
    """
    weights = checked("weights", weights, "(…, N, N)")
    refuse_negative("weights", weights)
    with isolated(weights.device):
        weights = torch.where(visible_keys(weights, mask), weights, 0.0)
        if weights.numel() == 0:
            return weights.new_full(weights.shape[:-1], torch.nan)
        matrix_BHNN = weights.reshape(-1, 1, *weights.shape[-2:])
        return stationary_of(matrix_BHNN).reshape(weights.shape[:-1])
