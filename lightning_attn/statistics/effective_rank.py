"""How many directions an attention matrix uses, by the entropy of its singular values."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, mean_over_sequences

#: Matrices of at most so many entries are decomposed, a third of a second for one of 1024 × 1024. Larger ones have no
#: value: the number hangs on all singular values, so that no few of them, and no few products, tell it.
_DECOMPOSED_ENTRIES = 1024**2
#: A head whose largest weight is smaller gives everything to a learned sink: single precision does not hold the rest.
_SMALLEST_WEIGHT = 1e-36


@register
class EffectiveRank(RowStatistic):
    r"""Effective rank :math:`\exp(-\sum_k p_k \log p_k)` with :math:`p_k = \sigma_k / \sum_l \sigma_l`, over sequences.

    :math:`\sigma_k` are the singular values themselves: with their squares it is another number of the same name.
    Decomposed in double precision, since in single precision many small values would add up to something. Absent rows
    count as zero. Absent where the matrix has more than :math:`1024^2` entries.
    """

    name = "effective_rank"
    lens = "Rank"
    range = Range(1, "n")
    uniform = "1; causal: 21.06 at n = 64, 102.7 at n = 1024"
    example = 21.0641
    reading = (
        "How many directions the head spreads over, small ones included: 1 for a sink and for uniform attention alike, "
        "n for the identity. Compare at one length only; absent in matrices of more than 1024² entries."
    )
    source = "Roy & Vetterli 2007 (EUSIPCO)"
    by_default = False
    is_spectral = True

    def result(self) -> Ratio:
        """The effective rank of each sequence with a present row."""
        call = self.row_pass.call
        if call.queries * call.keys > _DECOMPOSED_ENTRIES:
            nothing_BH = torch.zeros(call.sequences, call.heads, device=call.query.device)
            return mean_over_sequences(nothing_BH, nothing_BH > 0)
        matrix_BHNM = _matrix(self.row_pass)
        largest_BH = matrix_BHNM.amax((-2, -1))
        is_defined_BH = largest_BH > _SMALLEST_WEIGHT
        # Of a zero matrix nothing is asked, and the scale of the others is of no effect.
        matrix_BHNM /= largest_BH.clamp(min=_SMALLEST_WEIGHT)[..., None, None]
        try:
            singular_BHS = torch.linalg.svdvals(matrix_BHNM)
        except RuntimeError:  # LAPACK does not converge: another algorithm, to which only tiny values are lost
            singular_BHS = torch.linalg.eigvalsh(matrix_BHNM.mT @ matrix_BHNM).clamp(min=0).sqrt()
        share_BHS = singular_BHS / singular_BHS.sum(-1, keepdim=True).clamp(min=1e-30)
        rank_BH = torch.special.entr(share_BHS).sum(-1).exp().to(largest_BH.device)
        return mean_over_sequences(rank_BH, is_defined_BH)


def _matrix(row_pass: RowPass) -> Tensor:
    """The weights as a whole, in double precision: where a device has none, on the CPU."""
    call = row_pass.call
    device = torch.device("cpu") if call.query.device.type == "mps" else call.query.device
    shape = (call.sequences, call.heads, call.queries, call.keys)
    matrix_BHNM = torch.zeros(shape, dtype=torch.float64, device=device)
    start = 0
    for weights_BHRM in row_pass.weights():
        stop = start + weights_BHRM.shape[-2]
        matrix_BHNM[:, :, start:stop, : weights_BHRM.shape[-1]] = weights_BHRM
        start = stop
    return matrix_BHNM
