"""Sinks wherever they are: on the first key, on a separator, or on a token in the middle."""

from __future__ import annotations

from typing import ClassVar

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.importance import SeeingQueries, importance
from lightning_attn.statistics.rows.received import ReceivedWeight, UniformReceivedWeight
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.sink import MIN_KEYS
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, mean_over_sequences


@register
class AnySinkRate(RowStatistic):
    r"""Share of sequences in which any key receives more than 0.3 from the queries that see it.

    The importance of key :math:`k` is :math:`\alpha_k`, the mean of :math:`A_{ik}` over the rows that see it, its own
    among them. Only keys that at least half as many queries see as see the most visible one are looked at. Sequences of
    fewer than ten visible keys are left out, as in `sink_rate`, and those in which uniform attention would have such a
    key, as it has in windows and documents of fewer than ten tokens.
    """

    name = "any_sink_rate"
    lens = "Sinks"
    range = Range(0, 1)
    uniform = "0"
    example = 0.0
    reading = "How often some key is a sink; more than `sink_rate`: sinks are elsewhere than on the first key."
    source = "Gu et al. 2025, arXiv:2410.10781"
    by_default = False
    parameters = ("threshold",)

    #: Mean weight above which a key is a sink.
    threshold: ClassVar[float] = 0.3

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._received = row_pass.shared(ReceivedWeight)
        self._uniform = row_pass.shared(UniformReceivedWeight)
        self._queries = row_pass.shared(SeeingQueries)

    def add(self, rows: RowBlock) -> None:
        """Add up what each key receives and would receive, and how many queries see it."""
        for gathered in (self._received, self._uniform, self._queries):
            gathered.add(rows)

    def result(self) -> Ratio:
        """1 for each sequence that has a sink."""
        queries_BHM = self._queries.sum_BHM
        largest_BH, of_uniform_BH = (
            importance(received.sum_BHM, queries_BHM).amax(-1) for received in (self._received, self._uniform)
        )
        tells_BH = (of_uniform_BH > 0) & (of_uniform_BH <= self.threshold)
        long_enough_BH = self.row_pass.seen_BHM.sum(-1) >= MIN_KEYS
        return mean_over_sequences((largest_BH > self.threshold).float(), tells_BH & long_enough_BH)
