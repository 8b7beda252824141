"""How close rows are to looking at one key only."""

from __future__ import annotations

from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.row_block import RowBlock
from lightning_attn.statistics.statistic import Range, RowMean


@register
class MaxWeight(RowMean):
    r"""Mean over rows of :math:`\max_j p_{ij}`."""

    name = "max_weight"
    lens = "Entropy and logits"
    range = Range(0, 1)
    uniform = "mean of 1 / m_i"
    example = 0.059427
    reading = "1: every query looks at a single key, through which alone gradients flow."
    source = "the confidence of Voita et al. 2019, arXiv:1905.09418"

    def values(self, rows: RowBlock) -> Tensor:
        """Largest weight of each row."""
        return rows.weight_max_BHR
