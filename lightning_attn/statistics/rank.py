"""How many directions an attention matrix really uses."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.row_block import RowBlock
from lightning_attn.statistics.row_pass import RowPass
from lightning_attn.statistics.spectrum import largest_singular_value_squared
from lightning_attn.statistics.statistic import Ratio, RowStatistic, mean_over_sequences, wide


@register
class StableRank(RowStatistic):
    r"""Stable rank :math:`\|A\|_F^2 / \|A\|_2^2`, averaged over sequences."""

    name = "stable_rank"
    range = "1 … n"
    uniform = "1; causal: H_n / σ₁², 1.858 at n = 64"
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
        largest_BH = largest_singular_value_squared(self.row_pass)
        stable_rank_BH = (self._square_sum / largest_BH).clamp(min=1)  # rounding falls short of it at rank one
        return mean_over_sequences(stable_rank_BH, largest_BH > 0)
