"""How close rows are to looking at one key only."""

from __future__ import annotations

from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.statistic import Range, RowMean


@register
class MaxWeight(RowMean):
    r"""Mean over rows of :math:`\max_j p_{ij}`."""

    name = "max_weight"
    lens = "Entropy and logits"
    range = Range(0, 1)
    uniform = "mean of 1 / m_i"
    example = 0.0594268
    reading = "1: every query looks at a single key, through which alone gradients flow."
    source = "the confidence of Voita et al. 2019, arXiv:1905.09418"

    def values(self, rows: RowBlock) -> Tensor:
        """Largest weight of each row."""
        return rows.weight_max_BHR


@register
class SoftmaxSensitivity(RowMean):
    r"""Mean over rows of :math:`1 - \sum_j p_{ij}^2`, the trace of the Jacobian of the row's softmax.

    :math:`J = \operatorname{diag}(p) - p p^T` is what gradients pass on their way from weights to logits. With
    exponentials :math:`e_j` relative to the largest, :math:`R` the sum and :math:`Q` the sum of squares of those of all
    other keys, the trace is :math:`(R + R (1 + R) - Q) / (1 + R)^2`: nothing is subtracted from one, so that it is
    exact where a row is all but locked. Beside a learned sink it is that of the weights renormalised over real keys.
    """

    name = "softmax_sensitivity"
    lens = "Entropy and logits"
    range = Range(0, 1)
    uniform = "mean of 1 − 1 / m_i"
    example = 0.940573
    reading = "Saturation: near 0 the rows are locked onto one key each, and no gradient reaches their logits."
    source = "an identity: the trace of diag(p) − p pᵀ, the Jacobian of the softmax"
    by_default = False

    def values(self, rows: RowBlock) -> Tensor:
        """Trace of the Jacobian of each row."""
        rest_BHR, sum_BHR = rows.rest_BHR, rows.exponential_sum_BHR
        return (rest_BHR + (rest_BHR * sum_BHR - rows.rest_square_sum_BHR)) / sum_BHR.square()
