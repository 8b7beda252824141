"""What the first key adds to the output, rather than what weight it has."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.received import ReceivedWeight
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, mean_over_sequences, wide

#: Less than that, beside the longest value, is what exponentials that were cut off leave, and tells nothing.
_SMALLEST_TOTAL = 1e-30


@register
class ValueWeightedSink(RowStatistic):
    r"""Share of the first visible key where weights count by the length of what they bring.

    :math:`\sum_i A_{i1} \|v_1\| / \sum_i \sum_j A_{ij} \|v_j\|` over the present rows, the key's own among them.
    Averaged over sequences, so that those with long values do not count for more. Absent where values are unknown or
    not finite, and where nothing but values of zero is looked at.
    """

    name = "value_weighted_sink"
    lens = "Sinks"
    range = Range(0, 1)
    uniform = "causal, values of one length: H_n / n"
    example = 0.0741233
    reading = "Small beside `sink_strength`: a sink that adds nothing; as large: the first key is a hub of information."
    source = "after Gu et al. 2025, arXiv:2410.10781"
    by_default = False
    needs_values = True

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._received = row_pass.shared(ReceivedWeight)

    def add(self, rows: RowBlock) -> None:
        """Add up what each key receives."""
        self._received.add(rows)

    def result(self) -> Ratio:
        """The share in each sequence whose values are known."""
        call, received_BHM = self.row_pass.call, self._received.sum_BHM
        if call.value is None:
            return mean_over_sequences(received_BHM[..., 0], torch.zeros_like(received_BHM[..., 0], dtype=torch.bool))
        seen_BHM = self.row_pass.seen_BHM
        length_BHM = torch.where(seen_BHM, self._lengths(call.value), 0.0)
        largest_BH1 = length_BHM.amax(-1, keepdim=True)
        brought_BHM = received_BHM * (length_BHM / largest_BH1)
        total_BH = brought_BHM.sum(-1)
        of_first_BH = torch.where(seen_BHM & (seen_BHM.cumsum(-1) == 1), brought_BHM, 0.0).sum(-1)
        # The largest length is infinite or NaN if any is, and so is the total if it is or if it is zero.
        return mean_over_sequences(of_first_BH / total_BH, total_BH.isfinite() & (total_BH > _SMALLEST_TOTAL))

    def _lengths(self, value_BKME: Tensor) -> Tensor:
        """The length of the value that each key has for each head, (B, H, M)."""
        # Wide, since squares of what single precision holds may be more than it holds.
        length_BKM: Tensor = torch.linalg.vector_norm(value_BKME, dim=-1, dtype=wide(value_BKME.device))
        return length_BKM.repeat_interleave(self.row_pass.call.heads // value_BKME.shape[1], dim=1)
