"""How widely a head spreads its weight."""

from __future__ import annotations

from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.received import ReceivedWeight
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowMean, RowStatistic, sum_of_rows


@register
class Entropy(RowMean):
    r"""Mean over rows of :math:`H_i / \log m_i`, with :math:`H_i = -\sum_j p_{ij} \log p_{ij}`."""

    name = "entropy"
    lens = "Entropy and logits"
    range = Range(0, 1)
    uniform = "1"
    example = 1.0
    reading = (
        "1: looks everywhere alike; 0: looks at one key. Falling towards 0 together with growing logits is collapse."
    )
    source = "Zhai et al. 2023, arXiv:2303.06296"

    def values(self, rows: RowBlock) -> Tensor:
        """Normalised entropy."""
        return rows.entropy_BHR / rows.log_count_BHR


@register
class KLToUniform(RowMean):
    r"""Mean over rows of :math:`\log m_i - H_i`, the divergence from uniform weights."""

    name = "kl_to_uniform"
    lens = "Entropy and logits"
    unit = "nats"
    range = Range(0, None)
    uniform = "0"
    example = 0.0
    reading = "How far the head is from looking everywhere alike."
    source = "log m_i without the entropy of Zhai et al. 2023, arXiv:2303.06296"

    def values(self, rows: RowBlock) -> Tensor:
        """Divergence of each row."""
        return rows.log_count_BHR - rows.entropy_BHR


@register
class EntropyWithoutSink(RowStatistic):
    """The entropy without the key that receives most weight in its sequence and head; what is left is renormalised.

    Only the whole matrix tells which key that is, so the rows are walked over a second time.
    """

    name = "entropy_without_sink"
    lens = "Entropy and logits"
    range = Range(0, 1)
    uniform = "1"
    example = 1.0
    reading = "The entropy that matters in decoders, where healthy heads park weight on a sink."
    source = "Zhai et al. 2023, arXiv:2303.06296, without the sinks of Xiao et al. 2024, arXiv:2309.17453"

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._received = row_pass.shared(ReceivedWeight)

    def add(self, rows: RowBlock) -> None:
        """Add up what each key receives."""
        self._received.add(rows)

    def result(self) -> Ratio:
        """The two sums, over rows in which two keys remain."""
        sink_BH1 = self._received.sum_BHM.argmax(-1, keepdim=True)
        return sum_of_rows(Entropy(self.row_pass), self.row_pass.blocks(without_key_BH1=sink_BH1))
