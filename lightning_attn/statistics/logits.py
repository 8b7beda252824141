"""What enters the softmax: the earliest sign of a run going wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Maximum, Range, RowMean, RowStatistic


@register
class MaxLogit(RowStatistic):
    """The largest visible logit: after scale, soft-cap and bias."""

    name = "max_logit"
    lens = "Entropy and logits"
    range = Range(None, None)
    uniform = "any"
    example = 0.0
    reading = (
        "Grows without end in runs that stall or diverge. 100 is where QK-clip acts; a healthy 3B model reached 318."
    )
    source = "Wortsman et al. 2023, arXiv:2309.14322; Kimi K2, arXiv:2507.20534"
    over_heads = "max"
    joined_by = "max"
    needs_logits = True

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._maximum: Tensor | None = None

    def add(self, rows: RowBlock) -> None:
        """Look at the maximum of each row."""
        maximum_BH = torch.where(rows.present_BHR, rows.row_max_BHR, -torch.inf).amax(-1)
        self._maximum = maximum_BH if self._maximum is None else torch.maximum(self._maximum, maximum_BH)

    def result(self) -> Maximum:
        """The largest of all rows."""
        assert self._maximum is not None
        return Maximum(self._maximum)


@register
class LogitStd(RowMean):
    r"""Mean over rows of the standard deviation of the visible logits.

    It is that of the population, :math:`\sqrt{\frac1{m_i} \sum_j (z_{ij} - \bar z_i)^2}`.
    """

    name = "logit_std"
    lens = "Entropy and logits"
    range = Range(0, None)
    uniform = "0"
    example = 0.0
    reading = "The effective inverse temperature. Its going on growing tells a ruined run before the loss does."
    source = "growth of logits: Wortsman et al. 2023, arXiv:2309.14322; their spread: a definition of this package"
    over_heads = "max"

    def values(self, rows: RowBlock) -> Tensor:
        """Standard deviation within each row."""
        return rows.logit_std_BHR


@register
class NonFiniteShare(RowMean):
    """Share of rows with a visible logit that is infinite or NaN. Such rows are in no other statistic."""

    name = "non_finite_share"
    lens = "Coverage"
    range = Range(0, 1)
    uniform = "0"
    example = 0.0
    reading = "Anything but 0 is a fault: an overflow, or a NaN that came from before."
    source = "a definition of this package"
    over_heads = "max"
    is_fault = True

    def values(self, rows: RowBlock) -> Tensor:
        """1 for a row that is not finite."""
        return (~rows.finite_BHR).float()

    def counted(self, rows: RowBlock) -> Tensor:
        """Rows of tokens that see a key."""
        return rows.queries_BHR & (rows.visible_count_BHR >= 1)
