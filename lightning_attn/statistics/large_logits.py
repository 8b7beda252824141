"""How many logits are large: what their maximum, of one pair of tokens among millions, cannot say."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, wide


@register
class LargeLogitRatio(RowStatistic):
    r"""Share of the visible logits that exceed a limit.

    :math:`\sum_i \#\{j : z_{ij} > c\} / \sum_i m_i` over the present rows of all sequences, with
    :math:`c =` `limit`.
    """

    name = "large_logit_ratio"
    lens = "Entropy and logits"
    range = Range(0, 1)
    uniform = "any"
    example = 0.0
    reading = (
        "Share of logits above 100. Unlike `max_logit` it does not grow with batch and length: "
        "1e-4 and falling was healthy in Moonlight, growth is not."
    )
    source = "Liu et al. 2025 (Moonlight), arXiv:2502.16982, appendix D"
    by_default = False
    over_heads = "max"
    needs_logits = True
    parameters = ("limit",)

    #: Logits above this one are large.
    limit: ClassVar[float] = 100.0

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        call = row_pass.call
        self._sums_2BH = torch.zeros(
            2, call.sequences, call.heads, dtype=wide(call.query.device), device=call.query.device
        )

    def add(self, rows: RowBlock) -> None:
        """Count the large logits, and all that are visible."""
        count_2BHR: Tensor = torch.stack([rows.count_above(self.limit), rows.visible_count_BHR])
        self._sums_2BH += torch.where(rows.present_BHR, count_2BHR, 0.0).sum(-1)

    def result(self) -> Ratio:
        """The two counts."""
        return Ratio(*self._sums_2BH)
