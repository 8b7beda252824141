"""Where the sink is."""

from __future__ import annotations

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.importance import OtherSeeingQueries, ReceivedFromOthers, importance
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.sink import MIN_KEYS
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, mean_over_sequences

#: A key that receives less than the most important one by this part only receives as much: the rest is rounding.
_ROUNDING = 1e-5
#: Less than that is what exponentials that were cut off leave, and tells nothing.
_SMALLEST_IMPORTANCE = 1e-30


@register
class SinkPosition(RowStatistic):
    r"""Position of the most important key, :math:`\arg\max_k \alpha_k`; 0 is the first key that is seen at all.

    :math:`\alpha_k` is the mean of :math:`A_{ik}` over the rows that see key :math:`k`, in self-attention without row
    :math:`k` itself. Positions are counted over the keys that any query sees. Only keys that at least half as many
    queries see as see the most visible one are looked at; of keys that receive as much, but for a part of 1e-5, it is
    the first. Averaged over sequences. Absent of sequences with fewer than ten visible keys, as `sink_rate` is, and
    where no key receives anything from another token.
    """

    name = "sink_position"
    lens = "Sinks"
    unit = "tokens"
    range = Range(0, "n − 1")
    uniform = "0 without a mask and in causal heads"
    example = 0.0
    reading = "0: the key that receives most is the first one, as sinks of decoders are. The mean of all sequences."
    source = "Gu et al. 2025, arXiv:2410.10781"
    by_default = False

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._received = row_pass.shared(ReceivedFromOthers)
        self._queries = row_pass.shared(OtherSeeingQueries)

    def add(self, rows: RowBlock) -> None:
        """Add up what each key receives, and how many queries see it."""
        self._received.add(rows)
        self._queries.add(rows)

    def result(self) -> Ratio:
        """The position in each sequence that has a most important key."""
        importance_BHM = importance(self._received.sum_BHM, self._queries.sum_BHM)
        largest_BH1 = importance_BHM.amax(-1, keepdim=True)
        key_BH1 = (importance_BHM >= (1 - _ROUNDING) * largest_BH1).int().argmax(-1, keepdim=True)
        number_BHM = self.row_pass.seen_BHM.cumsum(-1)
        position_BH1 = number_BHM.expand_as(importance_BHM).gather(-1, key_BH1) - 1
        long_enough_BH = number_BHM[..., -1] >= MIN_KEYS
        return mean_over_sequences(position_BH1[..., 0], long_enough_BH & (largest_BH1[..., 0] > _SMALLEST_IMPORTANCE))
