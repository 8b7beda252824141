"""Where heads look, by position."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.row_block import RowBlock
from lightning_attn.statistics.statistic import RowMean


@register
class SelfWeight(RowMean):
    """Mean weight that a token gives to itself; absent where queries and keys are not the same tokens."""

    name = "self_weight"
    range = "0 … 1"
    uniform = "mean of 1 / m_i"
    reading = "1: the head copies each token to itself and mixes nothing."

    def values(self, rows: RowBlock) -> Tensor:
        """Weight on the diagonal."""
        return rows.self_weight_BHR

    def counted(self, rows: RowBlock) -> Tensor:
        """Every present row of a square matrix."""
        return rows.present_BHR if self.row_pass.call.is_square else torch.zeros_like(rows.present_BHR)
