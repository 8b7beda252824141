"""How far one step of attention brings the values of tokens together."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, mean_over_sequences, wide

#: What the largest value of a head is scaled to: their ratio does not depend on it.
_LARGE = 2.0**24

#: By so much given weights of single precision may miss one in their sum: far from zero, values would show it.
_ROUNDING = 1e-6


@register
class ValueContraction(RowStatistic):
    r"""Spread of the head's output over the spread of its values, :math:`\|A V - \mu\|_F / \|V - \nu\|_F`.

    :math:`\mu` is the mean of the output over present rows, :math:`\nu` that of the values over keys that are seen.
    Averaged over sequences; absent where the values are unknown, all alike or not finite.
    """

    name = "value_contraction"
    lens = "Consensus"
    range = Range(0, None)
    uniform = "0; causal: 0.21 at n = 64, of random values"
    example = 0.211496
    reading = "0: the head makes all tokens alike in one step; 1: it keeps them as far apart as they were."
    source = "Rodríguez Abella et al. 2025 (ICML)"
    needs_values = True

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        call = row_pass.call
        if call.value is None:
            return
        seen_BKM1 = row_pass.seen_BHM[..., None]
        value_BKME = call.value.float()
        if seen_BKM1.shape[1] > 1:  # heads do not see the same keys, so that each has values of its own
            value_BKME = value_BKME.repeat_interleave(call.heads // value_BKME.shape[1], dim=1)
        value_BKME = torch.where(seen_BKM1, value_BKME, 0.0)
        number_BK11 = seen_BKM1.sum(-2, keepdim=True).clamp(min=1)
        mean_BK1E = value_BKME.sum(-2, keepdim=True, dtype=wide(value_BKME.device)) / number_BK11
        # Centred first, so that what all values have in common cannot drown what sets outputs apart: in two steps, of
        # which each rounds by a part of the difference only.
        value_BKME -= mean_BK1E.float()
        value_BKME -= (mean_BK1E - mean_BK1E.float()).float()
        value_BKME *= seen_BKM1
        # Weights are as small as numbers can be. Of large values the products are no smaller than that; numbers below
        # the normal range would make them take several times as long.
        largest_BK11 = torch.linalg.vector_norm(value_BKME, ord=torch.inf, dim=(-2, -1), keepdim=True)
        is_scalable_BK11 = largest_BK11.isfinite() & (largest_BK11 > 0)
        scale_BK11 = torch.where(is_scalable_BK11, _LARGE / largest_BK11, 1.0)
        value_BKME *= scale_BK11
        self._spread_BH = self._of_heads(torch.linalg.vector_norm(value_BKME, dim=(-2, -1), dtype=mean_BK1E.dtype))
        self._mean_BH1E = self._of_heads(mean_BK1E * scale_BK11)
        # A head whose values are not finite has no value; its numbers must not spoil products.
        self._value_BKME = value_BKME.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self._sum_BHE = torch.zeros_like(self._mean_BH1E[:, :, 0])
        self._square_sum_BH = torch.zeros_like(self._spread_BH)
        self._rows_BH = torch.zeros_like(self._spread_BH)

    def _of_heads(self, tensor_BK: Tensor) -> Tensor:
        return tensor_BK.repeat_interleave(self.row_pass.call.heads // tensor_BK.shape[1], dim=1)

    def add(self, rows: RowBlock) -> None:
        """Add up the outputs and their squares, in double precision: those of a collapsed head hardly differ."""
        if self.row_pass.call.value is None:
            return
        output_BHRE = rows.applied_to(self._value_BKME).to(self._sum_BHE.dtype)
        if self.row_pass.is_without_unit_rows:  # what rows lack to one, they lack of the mean
            lack_BHR = (1 - rows.mass_BHR) * rows.present_BHR
            lack_BHR = torch.where(lack_BHR.abs() > _ROUNDING, lack_BHR, 0.0)
            output_BHRE -= lack_BHR[..., None] * self._mean_BH1E
        self._sum_BHE += output_BHRE.sum(-2)
        self._square_sum_BH += output_BHRE.square().sum((-2, -1))
        self._rows_BH += rows.present_BHR.sum(-1)

    def result(self) -> Ratio:
        """The ratio of each sequence whose values differ."""
        call = self.row_pass.call
        if call.value is None:
            nothing_BH = torch.zeros(call.sequences, call.heads, device=call.query.device)
            return mean_over_sequences(nothing_BH, nothing_BH > 0)
        of_mean_BH = self._sum_BHE.square().sum(-1) / self._rows_BH.clamp(min=1)
        spread_BH = (self._square_sum_BH - of_mean_BH).clamp(min=0).sqrt()
        is_defined_BH = (self._rows_BH > 0) & (self._spread_BH > 0) & self._spread_BH.isfinite()
        return mean_over_sequences(spread_BH / self._spread_BH, is_defined_BH)
