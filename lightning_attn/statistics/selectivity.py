"""How far a head is on the way to choosing single keys."""

from __future__ import annotations

from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.statistic import Range, RowMean


@register
class Selectivity(RowMean):
    r"""Mean over rows of :math:`\operatorname{std}(z_i) / \sqrt{2 \log m_i}`, of the visible logits.

    In the random energy model, :math:`m` independent Gaussian logits of standard deviation :math:`\tau`, the softmax
    freezes at :math:`\tau_c = \sqrt{2 \log m}`: below, the number of keys that share the weight grows with :math:`m`;
    above, a few hold it however many there are. The deviation is that of the population, as in `logit_std`.
    """

    name = "selectivity"
    lens = "Entropy and logits"
    range = Range(0, None)
    uniform = "0"
    example = 0.0
    reading = (
        "Logit spread in units of what freezes as many Gaussian logits: below 1 many keys share the weight, "
        "above 1 a few have it however many there are."
    )
    source = "Derrida 1981 (random energy model), doi:10.1103/PhysRevB.24.2613"
    by_default = False

    def values(self, rows: RowBlock) -> Tensor:
        """Standard deviation of each row over the critical one."""
        return rows.logit_std_BHR / (2 * rows.log_count_BHR).sqrt()
