"""The spectrum of a fixed number of hidden states, so that ranks of sequences of any length can be compared.

Shape suffixes: B sequences, T tokens that are looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.states.tokens import Tokens
from lightning_attn.statistics.statistic import wide


def centred_energies(tokens: Tokens, number: int) -> Tensor:
    r"""Energies :math:`\sigma_k^2 / \sigma_1^2` of evenly spaced tokens less their mean, (B, number), smallest first.

    :math:`\sigma_k` are the singular values of :math:`X - 1 \bar x^\top`: roots of the eigenvalues of the Gram matrix
    of the tokens, in double precision. What is below its resolution is zero. All of them are zero where the tokens are
    equal, where there are fewer, and where a state is not finite. Statistics get it from `Tokens.shared`.

    Args:
        tokens: the states.
        number: how many tokens of each sequence to look at; see `Tokens.evenly_spaced`.
    """
    place_BT = tokens.evenly_spaced(number)
    at_once = max(1, tokens.block_elements // number**2)
    slices = [slice(start, start + at_once) for start in range(0, tokens.sequences, at_once)]
    return torch.cat([_energies(_gram(tokens, place_BT, sequences)) for sequences in slices]).to(place_BT.device)


def _gram(tokens: Tokens, place_BT: Tensor, sequences: slice) -> Tensor:
    """The products of all pairs of centred tokens, (B, T, T); zero where they mean nothing."""
    batch, number = place_BT[sequences].shape
    gram_BTT = torch.zeros(batch, number, number, dtype=wide(place_BT.device), device=place_BT.device)
    entries = max(1, tokens.block_elements // (batch * number))
    for start in range(0, tokens.width, entries):
        states_BTL = tokens.states_at(place_BT, sequences, slice(start, start + entries))
        # Less the first one to begin with: of equal tokens, and of nearly equal ones, that leaves what is exact.
        states_BTL = states_BTL - states_BTL[:, :1]
        states_BTL -= states_BTL.mean(1, keepdim=True)
        gram_BTT += states_BTL @ states_BTL.mT
    is_defined_B = (tokens.finite_B & (tokens.count_B >= number))[sequences] & gram_BTT.isfinite().all(-1).all(-1)
    return torch.where(is_defined_B[:, None, None], gram_BTT, 0.0)


def _energies(gram_BTT: Tensor) -> Tensor:
    if gram_BTT.device.type == "mps":  # which decomposes nothing
        gram_BTT = gram_BTT.cpu()
    resolution = gram_BTT.shape[-1] * torch.finfo(gram_BTT.dtype).eps
    try:
        energies_BT = torch.linalg.eigvalsh(gram_BTT.double())
    except RuntimeError:  # LAPACK does not converge: another algorithm, whose values are the same
        energies_BT = torch.linalg.svdvals(gram_BTT.double()).flip(-1)
    largest_B1 = energies_BT[:, -1:]
    is_told_BT = energies_BT > resolution * largest_B1
    return torch.where(is_told_BT, energies_BT / largest_B1, 0.0)
