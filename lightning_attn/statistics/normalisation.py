"""Whether rows of attention sum to one, and what a learned sink takes of them.

Shape suffixes as in `lightning_attn.statistics.rows.row_block`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, RowMean, wide


@register
class RowStochasticityError(RowMean):
    r"""Mean over rows of :math:`|\sum_j A_{ij} - 1|`, with the weights as the model uses them.

    Zero for a softmax by definition. Given weights are summed as they are, so that dropout, half precision and a
    softmax with one more term in its denominator show; of a learned sink logit it is what `SinkLogitMass` is.
    """

    name = "row_stochasticity_error"
    lens = "Coverage"
    range = Range(0, None)
    uniform = "0"
    example = 0.0
    reading = "0: rows are distributions. Above: a learned sink, dropout, coarse rounding (bfloat16: up to 0.004)."
    source = "rows as those of a Markov chain: Nait Saada et al. 2025, arXiv:2410.07799"
    by_default = False

    def values(self, rows: RowBlock) -> Tensor:
        """Distance of each row's sum to one."""
        return _lack_BHR(self.row_pass, rows).abs()

    def counted(self, rows: RowBlock) -> Tensor:
        """Every present row."""
        return rows.present_BHR


@register
class SinkLogitMass(RowMean):
    r"""Mean over rows of the share of the softmax that went to a learned sink logit, :math:`1 - \sum_j A_{ij}`.

    Of a sink logit :math:`s` it is :math:`e^s / (e^s + \sum_j e^{z_{ij}})`. Given weights tell only what is missing of
    a row, :math:`\max(0, 1 - \sum_j A_{ij})`. Zero where nothing is missing.
    """

    name = "sink_logit_mass"
    lens = "Sinks"
    range = Range(0, 1)
    uniform = "0"
    example = 0.0
    reading = "Near 1: the head does nothing most of the time, as `sink_strength` says where the sink is a token."
    source = "OpenAI 2025, arXiv:2508.10925; Xiao et al. 2024, arXiv:2309.17453"
    by_default = False

    def values(self, rows: RowBlock) -> Tensor:
        """Share of the sink in each row."""
        return _lack_BHR(self.row_pass, rows).clamp(min=0)

    def counted(self, rows: RowBlock) -> Tensor:
        """Every present row."""
        return rows.present_BHR


def _lack_BHR(row_pass: RowPass, rows: RowBlock) -> Tensor:
    """What each row lacks to one; below zero where it has more."""
    weights_BHNM = row_pass.call.weight_matrix
    if weights_BHNM is None:
        return rows.sink_share_BHR
    # The weights as they were given: those of a block went through a logarithm, which rounds more than a sum does.
    given_BHRM = weights_BHNM[:, :, rows.start : rows.stop, : rows.keys]
    visible_BHRM = rows.visible_BHRM
    sum_BHR = torch.where(visible_BHRM > 0, given_BHRM, 0.0).sum(-1, dtype=wide(given_BHRM.device))
    return (1 - sum_BHR).float()
