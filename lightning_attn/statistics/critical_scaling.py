"""On which side of the critical scaling with length a head is."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.statistic import Range, RowMean


@register
class CriticalScaling(RowMean):
    r"""How sharply tokens tell themselves from others, in units of what as many tokens need.

    Mean over rows of :math:`\left[\log(m_i - 1) + \log \frac{A_{ii}}{1 - A_{ii}}\right] / \log m_i`, over the rows of a
    square matrix that see themselves and another key.

    Where logits are :math:`\gamma \log n \langle y_i, y_j \rangle` of :math:`n` unit tokens with pairwise inner product
    :math:`\rho`, self-weights are :math:`A_{ii} = 1 / (1 + (n - 1) n^{-\gamma (1 - \rho)})`, of which this makes
    :math:`\gamma (1 - \rho) = \gamma / \gamma_c`. It is computed from the logits, as a row's own logit minus the log of
    the mean exponential of the others, so that it is exact where self-weights are next to 0 or 1, and where they are
    smaller than any number. Given weights have logits down to −87.3, that of a weight of zero, and so far it reaches.
    Beside a learned sink it is that of the weights renormalised over real keys.
    """

    name = "critical_scaling"
    lens = "Critical scaling"
    range = Range(None, None)
    uniform = "0"
    example = 0.0
    reading = (
        "γ/γ_c as self-weights tell it: exact where all pairs of tokens are equally alike. Below 1, a layer averages "
        "such tokens into one; above 1, it keeps them; below 0, tokens look away from themselves."
    )
    source = "Chen et al. 2026, arXiv:2510.05554"
    by_default = False

    def values(self, rows: RowBlock) -> Tensor:
        """The scaling of each row."""
        others_BHR = (rows.visible_count_BHR - 1).clamp(min=1)
        return (others_BHR.log() + rows.self_log_odds_BHR) / rows.log_count_BHR

    def counted(self, rows: RowBlock) -> Tensor:
        """Rows of a square matrix that see themselves and another key."""
        if not self.row_pass.call.is_square:
            return torch.zeros_like(rows.present_BHR)
        return rows.spread_out_BHR & rows.sees_self_BHR
