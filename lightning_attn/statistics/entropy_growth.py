"""Whether a head looks at more keys where there are more."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, wide


class _Moments(NamedTuple):
    """Rows, means of log-count and entropy, and sums of products of their deviations; each (B, H)."""

    rows: Tensor
    log_count: Tensor
    entropy: Tensor
    square: Tensor
    product: Tensor

    @classmethod
    def of(cls, log_count_BHR: Tensor, entropy_BHR: Tensor, counted_BHR: Tensor) -> _Moments:
        """The moments of the rows that count."""
        rows_BH = counted_BHR.sum(-1).to(log_count_BHR.dtype)
        divisor_BH = rows_BH.clamp(min=1)
        mean_log_count_BH = torch.where(counted_BHR, log_count_BHR, 0.0).sum(-1) / divisor_BH
        mean_entropy_BH = torch.where(counted_BHR, entropy_BHR, 0.0).sum(-1) / divisor_BH
        log_count_BHR = torch.where(counted_BHR, log_count_BHR - mean_log_count_BH[..., None], 0.0)
        entropy_BHR = torch.where(counted_BHR, entropy_BHR - mean_entropy_BH[..., None], 0.0)
        square_BH, product_BH = log_count_BHR.square().sum(-1), (log_count_BHR * entropy_BHR).sum(-1)
        return cls(rows_BH, mean_log_count_BH, mean_entropy_BH, square_BH, product_BH)

    def joined(self, other: _Moments) -> _Moments:
        """The moments of the rows of both (Chan, Golub and LeVeque): sums of products would cancel."""
        rows_BH = self.rows + other.rows
        share_BH = other.rows / rows_BH.clamp(min=1)
        log_count_BH, entropy_BH = other.log_count - self.log_count, other.entropy - self.entropy
        weight_BH = self.rows * share_BH
        return _Moments(
            rows_BH,
            self.log_count + share_BH * log_count_BH,
            self.entropy + share_BH * entropy_BH,
            self.square + other.square + weight_BH * log_count_BH.square(),
            self.product + other.product + weight_BH * log_count_BH * entropy_BH,
        )


@register
class EntropyGrowth(RowStatistic):
    r"""By how much entropy grows with the number of visible keys, :math:`d H / d \log m`.

    The slope of the least-squares line through :math:`(\log m_i, H_i)` over rows with at least two keys, within each
    sequence; sequences are pooled as :math:`\sum (l - \bar l)(H - \bar H) / \sum (l - \bar l)^2`. Absent where all rows
    of every sequence see as many keys, as without causality.
    """

    name = "entropy_growth"
    lens = "Critical scaling"
    range = Range(None, None)
    uniform = "1"
    example = 1.0
    reading = (
        "1: rows spread over all that they see, however much that is; 0: over as many keys at any length. "
        "Near 1, weights dilute as the context grows."
    )
    source = "Chen et al. 2026, arXiv:2510.05554; Nakanishi 2025, arXiv:2501.19399"
    by_default = False

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._moments: _Moments | None = None
        self._least: Tensor | None = None
        self._most: Tensor | None = None

    def add(self, rows: RowBlock) -> None:
        """Add the block's moments."""
        counted_BHR, count_BHR = rows.spread_out_BHR, rows.visible_count_BHR
        kind = wide(count_BHR.device)
        moments = _Moments.of(count_BHR.clamp(min=2).to(kind).log(), rows.entropy_BHR.to(kind), counted_BHR)
        self._moments = moments if self._moments is None else self._moments.joined(moments)
        # Rounding leaves a spread where there is none, so that whether there is one is told from the counts.
        least_BH = torch.where(counted_BHR, count_BHR, torch.inf).amin(-1)
        most_BH = torch.where(counted_BHR, count_BHR, 0.0).amax(-1)
        self._least = least_BH if self._least is None else torch.minimum(self._least, least_BH)
        self._most = most_BH if self._most is None else torch.maximum(self._most, most_BH)

    def result(self) -> Ratio:
        """The two sums of each sequence whose rows do not all see as many keys."""
        assert self._moments is not None and self._least is not None and self._most is not None
        varies_BH = self._most > self._least
        return Ratio(
            *(torch.where(varies_BH, of_rows, 0.0) for of_rows in (self._moments.product, self._moments.square))
        )
