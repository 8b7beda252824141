"""How evenly keys are attended to."""

from __future__ import annotations

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.received import EvenReceivedWeight, ReceivedWeight, UniformReceivedWeight
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, mean_over_sequences

#: What all keys receive, at least: weights beside a learned sink that takes nearly everything were cut off.
_SMALLEST_TOTAL = 1e-30


@register
class MarginalGap(RowStatistic):
    r"""Total variation distance of what keys receive from what the mask alone would give them.

    With :math:`c_j = \sum_i A_{ij}` over :math:`n` present rows, it is :math:`\frac12 \sum_j |c_j / n - r_j|`, where
    :math:`r_j = \frac1n \sum_i 1 / m_i` over the rows that see key :math:`j`. Averaged over sequences. Where rows
    sum to less than one, beside a learned sink, so do those of the uniform weights, and :math:`n` is what all sum to.
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
        self._even = row_pass.shared(EvenReceivedWeight if row_pass.is_without_unit_rows else UniformReceivedWeight)

    def add(self, rows: RowBlock) -> None:
        """Add up what each key receives, and would receive."""
        self._received.add(rows)
        self._even.add(rows)

    def result(self) -> Ratio:
        """The distance of each sequence with a present row."""
        even_BHM = self._even.sum_BHM
        total_BH = even_BHM.sum(-1)
        distance_BH = (self._received.sum_BHM - even_BHM).abs().sum(-1) / (2 * total_BH)
        return mean_over_sequences(distance_BH, total_BH > _SMALLEST_TOTAL)
