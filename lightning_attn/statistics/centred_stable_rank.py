"""How many directions an attention matrix uses beside those of uniform attention."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.algebra.centred_weights import CentredWeights
from lightning_attn.statistics.algebra.spectrum import leading_singular_values
from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, mean_over_sequences, wide

#: A matrix that differs from uniform attention by less than this part of it differs by its rounding.
_RESOLUTION = 1e-5
#: The squares of weights that single precision can tell apart from those beside them, of a whole matrix: less is left
#: where a learned sink takes nearly everything.
_SMALLEST_SQUARE = 1e-24


@register
class CentredStableRank(RowStatistic):
    r"""Stable rank of what sets the head apart from uniform attention, :math:`\|A - U\|_F^2 / \|A - U\|_2^2`.

    :math:`U` spreads the weight of each present row evenly over its visible keys, :math:`U_{ij} = \sum_k A_{ik} / m_i`,
    so that :math:`(A - U) 1 = 0`: without a mask it removes the outlier of the spectrum, :math:`\frac1n 1 1^\top`,
    exactly. Where rows sum to less than one, beside a learned sink, so do those of :math:`U`: what they lack is no
    direction. Averaged over sequences; absent where :math:`A = U` up to rounding, a part of :math:`10^{-5}`.
    """

    name = "centred_stable_rank"
    lens = "Rank"
    range = Range(1, "n − 1")
    uniform = "absent; random logits near 0: n / 4"
    reading = (
        "The stable rank without the direction that all softmax attention shares, which hides the others at the start "
        "of training. 1: one direction, as a sink has; absent in uniform heads."
    )
    source = "Nait Saada et al. 2025, arXiv:2410.07799"
    by_default = False
    is_spectral = True

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._square_sum: Tensor | float = 0.0
        self._uniform_square_sum: Tensor | float = 0.0
        self._written: list[Tensor] = []

    def add(self, rows: RowBlock) -> None:
        """Add up the squared differences, and write these down where the weights are."""
        uniform_BHR = (rows.uniform_share_BHR * rows.mass_BHR).to(wide(rows.mass_BHR.device))
        square_sum_BHR = uniform_BHR.square() * rows.visible_count_BHR
        self._uniform_square_sum = self._uniform_square_sum + square_sum_BHR.sum(-1)
        deviation_BHRM = rows.deviation_at_equal_mass_BHRM
        norm_BHR = torch.linalg.vector_norm(deviation_BHRM, dim=-1).to(uniform_BHR.dtype)
        self._square_sum = self._square_sum + norm_BHR.square().sum(-1)
        if self.row_pass.writes_down:
            self._written.append(deviation_BHRM.clone())

    def result(self) -> Ratio:
        """The rank for each sequence whose weights are not uniform."""
        assert isinstance(self._square_sum, Tensor) and isinstance(self._uniform_square_sum, Tensor)
        smallest_BH = (_RESOLUTION**2 * self._uniform_square_sum).clamp(min=_RESOLUTION**2 * _SMALLEST_SQUARE)
        is_defined_BH = self._square_sum > smallest_BH
        # Rounding alone would keep an iteration busy: there it is multiplied by zero.
        norm_BH = torch.where(is_defined_BH, self._square_sum, torch.inf).sqrt()
        centred = CentredWeights(self.row_pass, self._written, (1 / norm_BH).float()[..., None, None])
        largest_BH = leading_singular_values(centred)[..., 0].square().to(norm_BH)
        # Rounding falls short of it at rank one.
        return mean_over_sequences((1 / largest_BH).clamp(min=1), is_defined_BH & (largest_BH > 0))
