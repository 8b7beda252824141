"""How evenly keys are attended to."""

from __future__ import annotations

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.received import ReceivedWeight, UniformReceivedWeight
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, mean_over_sequences


@register
class MarginalGap(RowStatistic):
    r"""Total variation distance of what keys receive from what the mask alone would give them.

    With :math:`c_j = \sum_i A_{ij}` over :math:`n` present rows, it is :math:`\frac12 \sum_j |c_j / n - r_j|`, where
    :math:`r_j = \frac1n \sum_i 1 / m_i` over the rows that see key :math:`j`. Averaged over sequences.
    """

    name = "marginal_gap"
    lens = "Transport"
    range = Range(0, 1)
    uniform = "0"
    example = 0.0
    reading = "0: keys receive as much as under uniform attention; near 1: few keys receive all. Distance from balance."
    source = "Sander et al. 2022, arXiv:2110.11773"

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._received = row_pass.shared(ReceivedWeight)
        self._uniform = row_pass.shared(UniformReceivedWeight)

    def add(self, rows: RowBlock) -> None:
        """Add up what each key receives, and would receive."""
        self._received.add(rows)
        self._uniform.add(rows)

    def result(self) -> Ratio:
        """The distance of each sequence with a present row."""
        uniform_BHM = self._uniform.sum_BHM
        rows_BH = uniform_BHM.sum(-1)
        distance_BH = (self._received.sum_BHM - uniform_BHM).abs().sum(-1) / (2 * rows_BH)
        return mean_over_sequences(distance_BH, rows_BH > 0)
