"""The least entropy that logits of a given spread can have."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.statistic import Range, RowMean


def least_entropy(spread: Tensor, keys: Tensor) -> Tensor:
    r"""Least entropy in nats of a softmax whose logits have a given distance from their mean.

    It is that of a single key with a logit ahead of all others, which are alike, by
    :math:`g = \sigma \sqrt{m / (m - 1)}`. With :math:`a = \log(m - 1) - g` it is
    :math:`\log(1 + e^a) + g / (1 + e^{-a})`: two terms that are not negative, so that nothing cancels.

    Args:
        spread: :math:`\sigma = \|z - \bar z\|_2`, not negative.
        keys: number of logits :math:`m`, at least two; broadcasts.
    """
    lead = (spread * (keys / (keys - 1)).sqrt()).clamp(max=torch.finfo(spread.dtype).max)
    log_odds = (keys - 1).log() - lead
    return torch.logaddexp(log_odds, torch.zeros_like(log_odds)) + lead * log_odds.sigmoid()


@register
class EntropyFloor(RowMean):
    r"""Mean over rows of the least entropy that their logits allow, over :math:`\log m_i`.

    With :math:`\sigma_i = \|z_i - \bar z_i\|_2` over the visible keys and
    :math:`\beta = e^{-\sigma_i \sqrt{m_i / (m_i - 1)}}`,

    .. math:: H_i \ge \log(1 + (m_i - 1) \beta) + \sigma_i \sqrt{m_i (m_i - 1)} \frac{\beta}{1 + (m_i - 1) \beta}.

    This is the bound of Zhai et al. with the row's own spread in the place of the spectral norm that bounds it for all
    rows, which makes it tight: a row with one key ahead of others that are alike attains it, and so does every row of
    two keys. It is never above `entropy`.
    """

    name = "entropy_floor"
    lens = "Entropy and logits"
    range = Range(0, 1)
    uniform = "1"
    example = 1.0
    reading = (
        "How far `entropy` could fall with logits as spread out as these; a bound. "
        "Falling to 0: nothing but their arrangement still keeps rows from collapse."
    )
    source = "Zhai et al. 2023, arXiv:2303.06296, theorem 3.1, row by row"
    by_default = False

    def values(self, rows: RowBlock) -> Tensor:
        """Normalised floor of each row."""
        count_BHR = rows.visible_count_BHR.clamp(min=2)
        floor_BHR = least_entropy(rows.logit_std_BHR * count_BHR.sqrt(), count_BHR)
        # Rounding alone can put it above the entropy, where it is attained.
        return torch.minimum(floor_BHR, rows.entropy_BHR) / rows.log_count_BHR
