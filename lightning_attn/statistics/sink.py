"""Weight parked on the first key, where healthy decoders put what they have no use for."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowMean, RowStatistic, mean_over_sequences

#: The length from which a sink means anything: uniform causal attention over nine keys gives the first more than 0.3.
MIN_KEYS = 10


@register
class SinkStrength(RowMean):
    """Mean weight on the first visible key, by the queries that can see it and are not it."""

    name = "sink_strength"
    lens = "Sinks"
    range = Range(0, 1)
    uniform = "causal: (H_n − 1) / (n − 1)"
    example = 0.0594268
    reading = "Near 1: the head does nothing most of the time, which is common and harmless in trained decoders."
    source = "Gu et al. 2025, arXiv:2410.10781"

    def values(self, rows: RowBlock) -> Tensor:
        """Weight on the first visible key."""
        return rows.first_key_weight_BHR

    def counted(self, rows: RowBlock) -> Tensor:
        """Queries that see the key and are another token."""
        counted_BHR = rows.present_BHR & rows.sees_first_key_BHR
        if self.row_pass.call.self_attention:
            counted_BHR = counted_BHR & (rows.number_R != rows.first_key)
        return counted_BHR


@register
class SinkRate(RowStatistic):
    """Share of sequences in which the first visible key receives more than 0.3 from the queries that see it.

    It is the mean over these queries; the key's own is among them. Sequences of fewer than ten visible keys are left
    out.
    """

    name = "sink_rate"
    lens = "Sinks"
    range = Range(0, 1)
    uniform = "0; in windows of fewer than ten keys 1"
    example = 0.0
    reading = "How often the head has a sink. Compare at one sequence length only."
    source = "Gu et al. 2025, arXiv:2410.10781"
    parameters = ("threshold",)

    #: Mean weight above which the key is a sink.
    threshold: ClassVar[float] = 0.3

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._weight: Tensor | float = 0.0
        self._queries: Tensor | float = 0.0

    def add(self, rows: RowBlock) -> None:
        """Add up what the first visible key receives."""
        counted_BHR = rows.present_BHR & rows.sees_first_key_BHR
        self._weight = self._weight + torch.where(counted_BHR, rows.first_key_weight_BHR, 0.0).sum(-1)
        self._queries = self._queries + counted_BHR.sum(-1)

    def result(self) -> Ratio:
        """1 for each sequence that has a sink."""
        assert isinstance(self._weight, Tensor) and isinstance(self._queries, Tensor)
        importance_BH = self._weight / self._queries.clamp(min=1)
        long_enough_BH = (self.row_pass.seen_BHM.sum(-1) >= MIN_KEYS).expand_as(importance_BH)
        return mean_over_sequences((importance_BH > self.threshold).float(), long_enough_BH & (self._queries > 0))
