"""Where heads look, by position.

Shape suffixes as in `lightning_attn.statistics.rows.row_block`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.received import ReceivedWeight, UniformReceivedWeight
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowMean, RowStatistic, wide

#: How many keys are the first ones.
FIRST_KEYS = 5


@register
class SelfWeight(RowMean):
    """Mean weight that a token gives to itself; absent where queries and keys are not the same tokens."""

    name = "self_weight"
    lens = "Position"
    range = Range(0, 1)
    uniform = "mean of 1 / m_i"
    example = 0.0741233
    reading = "1: the head copies each token to itself and mixes nothing."
    source = "Chen et al. 2026, arXiv:2510.05554"

    def values(self, rows: RowBlock) -> Tensor:
        """Weight on the diagonal."""
        return rows.self_weight_BHR

    def counted(self, rows: RowBlock) -> Tensor:
        """Every present row of a square matrix."""
        return rows.present_BHR if self.row_pass.call.is_square else torch.zeros_like(rows.present_BHR)


@register
class PositionConcentration(RowStatistic):
    """Share of all weight that goes to the first five keys that any query of the sequence can see."""

    name = "position_concentration"
    lens = "Position"
    range = Range(0, 1)
    uniform = "`uniform_position_concentration`"
    example = 0.270356
    reading = "1: the head looks at the beginning only. Short sequences consist of it: compare with the uniform one."
    source = "the initial tokens of Xiao et al. 2024, arXiv:2309.17453"

    gathered: ClassVar[type[ReceivedWeight]] = ReceivedWeight

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._received = row_pass.shared(self.gathered)

    def add(self, rows: RowBlock) -> None:
        """Add up what each key receives."""
        self._received.add(rows)

    def result(self) -> Ratio:
        """What the first keys receive, and what all do."""
        received_BHM = self._received.sum_BHM.to(wide(self._received.sum_BHM.device))
        seen_BHM = self.row_pass.seen_BHM
        first_BHM = seen_BHM & (seen_BHM.cumsum(-1) <= FIRST_KEYS)
        return Ratio((received_BHM * first_BHM).sum(-1), received_BHM.sum(-1))


@register
class UniformPositionConcentration(PositionConcentration):
    """What `PositionConcentration` would be of uniform attention under the same visibility."""

    name = "uniform_position_concentration"
    lens = "Position"
    range = Range(0, 1)
    uniform = "causal: 0.655, 0.434, 0.270 at n = 16, 32, 64"
    example = 0.270356
    reading = "What the mask and the length alone give to the first five keys: the baseline of the other."
    source = "the initial tokens of Xiao et al. 2024, arXiv:2309.17453"

    gathered = UniformReceivedWeight


@register
class AttentionDistance(RowStatistic):
    r"""Mean distance :math:`\sum A_{ij} |i - j|` over that of uniform attention, :math:`\sum U_{ij} |i - j|`.

    Both sums are over the present rows of all sequences, with :math:`U_{ij} = \sum_k A_{ik} / m_i` on visible keys: a
    learned sink, which takes weight from both, is at no distance. Absent where queries and keys are not the same
    tokens.
    """

    name = "attention_distance"
    lens = "Position"
    range = Range(0, None)
    uniform = "1"
    example = 1.0
    reading = "0: each token looks at itself; below 1: at what is near, as in heads for syntax; above 1: far away."
    source = "Vig & Belinkov 2019, arXiv:1906.04284"

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        call = row_pass.call
        self._sums_2BH = torch.zeros(
            2, call.sequences, call.heads, dtype=wide(call.query.device), device=call.query.device
        )

    def add(self, rows: RowBlock) -> None:
        """Add up the distances under the weights and under uniform ones."""
        if not self.row_pass.call.is_square:
            return
        of_weights_BHR = distances(rows.clean_exponentials_BHRM, rows.start, rows.stop) * rows.share_BHR
        of_uniform_BHR = distances(rows.visible_BHRM, rows.start, rows.stop) * rows.uniform_share_BHR * rows.mass_BHR
        self._sums_2BH += torch.stack([of_weights_BHR, of_uniform_BHR]).sum(-1, dtype=self._sums_2BH.dtype)

    def result(self) -> Ratio:
        """The two sums."""
        return Ratio(*self._sums_2BH)


def distances(matrix_BHRM: Tensor, start: int, stop: int) -> Tensor:
    r""":math:`\sum_j X_{ij} |i - j|` of the rows ``start:stop`` of a matrix, (B, H, R).

    Outside the square of the same rows and keys no key changes sides, so that the sum is a product of the matrix with
    two vectors: with :math:`|i - j| = |j - s| \pm (i - s)` for the first row :math:`s`.
    """
    device, keys = matrix_BHRM.device, matrix_BHRM.shape[-1]
    row_R = torch.arange(stop - start, dtype=torch.float32, device=device)
    key_M = torch.arange(-start, keys - start, dtype=torch.float32, device=device)
    near_BHRM = matrix_BHRM[..., start:stop]
    distance_BHR = (near_BHRM * (row_R[:, None] - key_M[start:stop]).abs()).sum(-1)
    if start > 0 or stop < keys:
        side_M = (key_M < 0).float() - (key_M >= stop - start).float()
        outside_BHR2 = matrix_BHRM @ torch.stack([-key_M * side_M, side_M], dim=-1)
        distance_BHR = distance_BHR + outside_BHR2[..., 0] + row_R * outside_BHR2[..., 1]
    return distance_BHR
