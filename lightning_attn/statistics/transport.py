r"""What a row costs as a transport plan: weights are the cheapest way to look, where being certain has a price too.

A row of softmax attention solves a problem of entropic optimal transport of which one side alone is fixed:
:math:`p_i = \arg\min_p \langle p, -z_i \rangle - H(p)` over all distributions on the keys that query :math:`i` sees.
"""

from __future__ import annotations

from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.statistic import Range, RowMean


@register
class TransportCost(RowMean):
    r"""Mean over rows of :math:`\langle p_i, -z_i \rangle`, what the weights pay for the keys that they go to.

    The cost of a key is minus its logit. Beside a learned sink :math:`p_i` is the row renormalised. Rows with fewer
    than two visible keys have no plan to choose and are in no mean, so that it is the free energy plus the entropy of
    the same rows.
    """

    name = "transport_cost"
    lens = "Transport"
    unit = "nats"
    range = Range(None, None)
    uniform = "minus the mean logit"
    example = 0.0
    reading = (
        "What rows pay for where they look: falls as logits grow. A constant added to the logits of a row, "
        "which leaves its weights as they are, moves it too."
    )
    source = "Cuturi 2013, arXiv:1306.0895; Sander et al. 2022, arXiv:2110.11773"
    by_default = False
    needs_logits = True

    def values(self, rows: RowBlock) -> Tensor:
        """Cost of each row: what it would be on the best key alone, and what is lost beside that."""
        return -rows.row_max_BHR - rows.gap_mean_BHR


@register
class FreeEnergy(RowMean):
    r"""Mean over rows of :math:`-\log \sum_j e^{z_{ij}}`, the least that cost minus entropy can be.

    It is :math:`\langle p_i, -z_i \rangle - H(p_i)` at the softmax, where the minimum is attained. A learned sink is
    left out of the sum, and so are rows with fewer than two visible keys.
    """

    name = "free_energy"
    lens = "Transport"
    unit = "nats"
    range = Range(None, None)
    uniform = "transport_cost − mean of log m_i"
    example = -3.25664
    reading = (
        "transport_cost minus the entropy: close to it where rows are certain. "
        "A constant added to the logits of a row moves it too."
    )
    source = "Cuturi 2013, arXiv:1306.0895; Sander et al. 2022, arXiv:2110.11773"
    by_default = False
    needs_logits = True

    def values(self, rows: RowBlock) -> Tensor:
        """Minus the logarithm of each row's sum of exponentials."""
        return -rows.row_max_BHR - rows.log_sum_BHR
