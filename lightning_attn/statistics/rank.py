"""How many directions an attention matrix really uses."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.algebra.spectrum import leading_singular_values
from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, mean_over_sequences, wide

#: Squares of weights that single precision holds: those beside a learned sink may be smaller.
_SMALLEST_SQUARE = 1e-36


@register
class StableRank(RowStatistic):
    r"""Stable rank :math:`\|A\|_F^2 / \|A\|_2^2`, averaged over sequences."""

    name = "stable_rank"
    lens = "Rank"
    range = Range(1, "n")
    uniform = "1; causal: H_n / σ₁², 1.858 at n = 64"
    example = 1.85806
    reading = "1 for a sink and for uniform attention alike, n for the identity: read it beside the entropy."
    source = "Nait Saada et al. 2025, arXiv:2410.07799"
    is_spectral = True

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._square_sum: Tensor | float = 0.0

    def add(self, rows: RowBlock) -> None:
        """Add up the squared weights."""
        square_sum_BHR = torch.where(rows.present_BHR, rows.square_sum_BHR, 0.0)
        self._square_sum = self._square_sum + square_sum_BHR.sum(-1, dtype=wide(square_sum_BHR.device))

    def result(self) -> Ratio:
        """The stable rank of each sequence with a present row."""
        assert isinstance(self._square_sum, Tensor)
        largest_BH = self.row_pass.shared(leading_singular_values)[..., 0].square()
        stable_rank_BH = (self._square_sum / largest_BH).clamp(min=1)  # rounding falls short of it at rank one
        return mean_over_sequences(stable_rank_BH, largest_BH > _SMALLEST_SQUARE)


@register
class SpectralGap(RowStatistic):
    r"""Spectral gap :math:`1 - \sigma_2 / \sigma_1` of the singular values, averaged over sequences.

    Absent where the matrix has a single row or column.
    """

    name = "spectral_gap"
    lens = "Rank"
    range = Range(0, 1)
    uniform = "1; causal: 0.366 at n = 64"
    example = 0.365575
    reading = "1: the head has one direction only, as a sink and uniform attention do; 0: there is a second as strong."
    source = "Nait Saada et al. 2025, arXiv:2410.07799"
    is_spectral = True

    def result(self) -> Ratio:
        """The gap of each sequence with a present row."""
        call = self.row_pass.call
        largest_BH, second_BH = self.row_pass.shared(leading_singular_values).unbind(-1)
        is_defined_BH = (largest_BH.square() > _SMALLEST_SQUARE) & (min(call.queries, call.keys) > 1)
        return mean_over_sequences((1 - second_BH / largest_BH).clamp(0, 1), is_defined_BH)
