"""How much of what a model computed is in the other statistics."""

from __future__ import annotations

from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.statistic import Range, RowMean


@register
class HiddenRowShare(RowMean):
    """Share of rows without a visible key. Such rows are in no other statistic.

    Padding is not among them where it can be told: in self-attention, a token that nobody may see.
    """

    name = "hidden_row_share"
    lens = "Coverage"
    range = Range(0, 1)
    uniform = "0"
    example = 0.0
    reading = "Queries that may look at nothing; what they return depends on the kernel."
    source = "a definition of this package"
    over_heads = "max"
    is_fault = True

    def values(self, rows: RowBlock) -> Tensor:
        """1 for a row that sees nothing."""
        return (rows.visible_count_BHR == 0).float()

    def counted(self, rows: RowBlock) -> Tensor:
        """Every row but padding."""
        return rows.queries_BHR
