"""By how much one step of attention brings tokens together at least.

Shape suffixes as in `lightning_attn.statistics.rows.row_block`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.algebra.row_distance import largest_row_distance
from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, mean_over_sequences, wide


@register
class Dobrushin(RowStatistic):
    r"""Mean over sequences of Dobrushin's coefficient :math:`\tau(A) = \frac12 \max_{i,k} \|A_i - A_k\|_1`.

    No coordinate of the outputs is spread wider than :math:`\tau` times that of the values:
    :math:`\mathrm{range}(A X) \le \tau\, \mathrm{range}(X)`, where rows sum to one. Of causal heads it is then
    :math:`1 - \min_i A_{i1}`, for no two rows are farther apart than one of them is from the first. Exact for these and
    up to 128 present rows, and a lower bound beyond; see `lightning_attn.statistics.algebra.row_distance`. Absent where
    fewer than two rows are present. Weights are as the model uses them: beside a learned sink, rows sum to less than
    one and are not renormalised.
    """

    name = "dobrushin"
    lens = "Consensus"
    range = Range(0, 1)
    uniform = "0; causal: 1 − 1/n"
    example = 0.984375
    reading = (
        "0: one step makes all tokens equal; 1: two tokens share no key. Causal heads stay near 1, for the first token "
        "sees itself only. A lower bound where heads look ahead at more than 128 tokens: `dobrushin_bound` is above it."
    )
    source = "Dobrushin 1956; Seneta 1981, Non-negative Matrices and Markov Chains; Wu et al. 2025, arXiv:2502.01951"
    by_default = False
    is_spectral = True

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._present: list[Tensor] = []
        self._mass: list[Tensor] = []

    def add(self, rows: RowBlock) -> None:
        """Note which rows are present, and their sums."""
        self._present.append(rows.present_BHR)
        self._mass.append(rows.mass_BHR)

    def result(self) -> Ratio:
        """The coefficient of each sequence with two present rows."""
        present_BHN = torch.cat(self._present, dim=-1)
        coefficient_BH = largest_row_distance(self.row_pass, present_BHN) / 2
        # Rounding exceeds it where rows share nothing; given rows may really sum to more than one.
        largest_BH = torch.cat(self._mass, dim=-1).amax(-1).clamp(min=1)
        return mean_over_sequences(torch.minimum(coefficient_BH, largest_BH), present_BHN.sum(-1) >= 2)


@register
class DobrushinBound(RowStatistic):
    r"""Mean over sequences of :math:`\max_i \sum_j A_{ij} - \sum_j \min_i A_{ij}`.

    It is never below `Dobrushin`, but for rounding. Where rows sum to one it is :math:`1 - \sum_j \min_i A_{ij}`: what
    all rows have in common is averaged away. Exact at any length, in one walk. Absent where fewer than two rows are
    present.
    """

    name = "dobrushin_bound"
    lens = "Consensus"
    range = Range(0, 1)
    uniform = "0; causal: 1 − 1/n"
    example = 0.984375
    reading = "Below 1: every row gives something to the same keys. It is above `dobrushin`, or equal to it."
    source = "Seneta 1981, Non-negative Matrices and Markov Chains"
    by_default = False

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        call = row_pass.call
        self._smallest_BHM = torch.full((call.sequences, call.heads, call.keys), torch.inf, device=call.query.device)
        self._mass_BH = torch.zeros_like(self._smallest_BHM[..., 0])
        self._rows_BH = torch.zeros_like(self._mass_BH)

    def add(self, rows: RowBlock) -> None:
        """Take the smallest weight of each key; keys that the block leaves out have none of its rows."""
        self._rows_BH += rows.present_BHR.sum(-1)
        torch.maximum(self._mass_BH, rows.mass_BHR.amax(-1), out=self._mass_BH)
        weights_BHRM = rows.weights_BHRM
        weights_BHRM.add_(torch.where(rows.present_BHR, 0.0, torch.inf)[..., None])
        seen_BHM, unseen_BHM = self._smallest_BHM[..., : rows.keys], self._smallest_BHM[..., rows.keys :]
        torch.minimum(seen_BHM, weights_BHRM.amin(-2), out=seen_BHM)
        unseen_BHM.clamp_(max=torch.where(rows.present_BHR.any(-1, keepdim=True), 0.0, torch.inf))

    def result(self) -> Ratio:
        """The bound of each sequence with two present rows."""
        in_common_BH = self._smallest_BHM.sum(-1, dtype=wide(self._smallest_BHM.device))
        return mean_over_sequences((self._mass_BH - in_common_BH).clamp(min=0), self._rows_BH >= 2)
