"""The token that all others would follow if attention were repeated.

Shape suffixes as in `lightning_attn.statistics.rows.row_block`.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from lightning_attn.statistics.algebra.stationary import StationaryDistribution
from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, mean_over_sequences

#: Tokens whose masses differ by less than this part are alike, and the first of them leads: iterations tell no more.
_ALIKE = 1e-3


class _OfStationaryDistribution(RowStatistic):
    """A number of the stationary distribution of a square matrix."""

    by_default = False
    is_spectral = True

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._stationary = row_pass.shared(StationaryDistribution)

    def add(self, rows: RowBlock) -> None:
        """Show the rows to what computes the distribution."""
        self._stationary.add(rows)

    def result(self) -> Ratio:
        """The number of each sequence of two tokens whose distribution is known."""
        call = self.row_pass.call
        if not call.is_square:
            nothing_BH = torch.zeros(call.sequences, call.heads, device=call.query.device)
            return mean_over_sequences(nothing_BH, nothing_BH > 0)
        distribution_BHN, present_BHN = self._stationary.of(self.row_pass)
        is_known_BH = (present_BHN.sum(-1) >= 2) & ~distribution_BHN.isnan().any(-1)
        return mean_over_sequences(self.value(distribution_BHN.nan_to_num(), present_BHN), is_known_BH)

    @abstractmethod
    def value(self, distribution_BHN: Tensor, present_BHN: Tensor) -> Tensor:
        """The number of each distribution, (B, H)."""


@register
class LeaderMass(_OfStationaryDistribution):
    r"""Mean over sequences of :math:`\max_j \pi_j`, with the stationary distribution :math:`\pi = \pi A` of the tokens.

    Repeated attention brings every token to :math:`\sum_j \pi_j x_j`; a causal head's :math:`\pi` is its first token.
    Rows are divided by their sums first, and a weight below 1e-30 of its row is none. Absent where :math:`\pi` is not
    unique (some tokens never reach some others, nor the other way round), where a token sees one that has no weights
    itself, where queries and keys are not the same tokens or there is only one, and, in heads of more than 256 tokens
    that look ahead, where powers of the matrix do not settle.
    """

    name = "leader_mass"
    lens = "Consensus"
    range = Range("1 / n", 1)
    uniform = "1 / n; causal: 1"
    example = 1.0
    reading = (
        "1: repeated attention makes every token a copy of one; 1/n: their mean. Always 1 in causal heads. Absent "
        "where the head mixes too slowly to tell."
    )
    source = "Wu et al. 2025, arXiv:2502.01951; Grassmann, Taksar and Heyman 1985"

    def value(self, distribution_BHN: Tensor, present_BHN: Tensor) -> Tensor:
        """The largest mass."""
        return distribution_BHN.amax(-1)


@register
class LeaderPosition(_OfStationaryDistribution):
    """Mean over sequences of how many tokens come before the one with the largest stationary mass.

    Padding is not counted. Where several have the largest mass, up to a thousandth of it, it is the first of them.
    Absent where `LeaderMass` is.
    """

    name = "leader_position"
    lens = "Consensus"
    unit = "tokens"
    range = Range(0, "n − 1")
    uniform = "0 without a mask and in causal heads"
    example = 0.0
    reading = (
        "0: the first token is the one that others follow, as in causal heads. Only of use where `leader_mass` is high."
    )
    source = "Wu et al. 2025, arXiv:2502.01951"

    def value(self, distribution_BHN: Tensor, present_BHN: Tensor) -> Tensor:
        """The number of tokens before the leader."""
        largest_BH1 = distribution_BHN.amax(-1, keepdim=True)
        leader_BH1 = (present_BHN & (distribution_BHN >= (1 - _ALIKE) * largest_BH1)).int().argmax(-1, keepdim=True)
        return present_BHN.cumsum(-1).gather(-1, leader_BH1)[..., 0] - 1
