"""How many directions carry the energy of an attention matrix."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, islice

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, mean_over_sequences, wide

#: A head whose largest weight is smaller gives everything to a learned sink: single precision does not hold the rest.
_SMALLEST_WEIGHT = 1e-36
#: Where weights are not written down, so many blocks are held while all earlier ones are computed anew beside them.
_HELD_BLOCKS = 4


@register
class ParticipationRatio(RowStatistic):
    r"""Participation ratio :math:`(\sum_k \sigma_k^2)^2 / \sum_k \sigma_k^4`, averaged over sequences.

    It is :math:`\|A\|_F^4 / \|A A^\top\|_F^2`, so that nothing is decomposed: the products of all pairs of blocks of
    rows are squared and added up. Absent rows count as zero.
    """

    name = "participation_ratio"
    lens = "Rank"
    range = Range(1, "n")
    uniform = "1; causal: H_n² / (2 H_n − H_n⁽²⁾), 2.864 at n = 64"
    example = 2.86377
    reading = (
        "How many directions carry the head's energy: between `stable_rank`, which asks for the first alone, and "
        "`effective_rank`, to which small ones count too. 1 for a sink and for uniform attention alike."
    )
    source = "Gao et al. 2017, bioRxiv 214262"
    by_default = False
    is_spectral = True

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._largest_BH: Tensor | None = None

    def add(self, rows: RowBlock) -> None:
        """Look for the largest weight: fourth powers of small ones are nothing in single precision."""
        largest_BH = torch.where(rows.present_BHR, rows.weight_max_BHR, 0.0).amax(-1)
        self._largest_BH = largest_BH if self._largest_BH is None else torch.maximum(self._largest_BH, largest_BH)

    def result(self) -> Ratio:
        """The ratio of each sequence with a present row."""
        assert self._largest_BH is not None
        is_defined_BH = self._largest_BH > _SMALLEST_WEIGHT
        scale_BH11 = 1 / self._largest_BH.clamp(min=_SMALLEST_WEIGHT)[..., None, None]
        square_sum_BH = torch.zeros_like(self._largest_BH, dtype=wide(self._largest_BH.device))
        fourth_power_sum_BH = torch.zeros_like(square_sum_BH)
        for rows_BHRM, others_BHRM in _pairs(self.row_pass):
            keys = min(rows_BHRM.shape[-1], others_BHRM.shape[-1])
            products_BHRR = (rows_BHRM[..., :keys] * scale_BH11) @ others_BHRM[..., :keys].mT * scale_BH11
            # Short sums, to be added up in double precision: a long one in single precision loses the fifth digit.
            norm_BHR = torch.linalg.vector_norm(products_BHRR, dim=-1).to(square_sum_BH.dtype)
            of_pair_BH = norm_BHR.square().sum(-1)
            if others_BHRM is rows_BHRM:
                square_sum_BH += products_BHRR.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=square_sum_BH.dtype)
                fourth_power_sum_BH += of_pair_BH
            else:  # it stands in the matrix of products twice
                fourth_power_sum_BH += 2 * of_pair_BH
        return mean_over_sequences((square_sum_BH.square() / fourth_power_sum_BH).clamp(min=1), is_defined_BH)


def _pairs(row_pass: RowPass) -> Iterator[tuple[Tensor, Tensor]]:
    """Every pair of blocks of rows once, and each block with itself."""
    blocks, number = row_pass.weights(), 0
    while held := [_kept(row_pass, block_BHRM) for block_BHRM in islice(blocks, _HELD_BLOCKS)]:
        yield from combinations_with_replacement(held, 2)
        for earlier_BHRM in islice(row_pass.weights(), number):
            for rows_BHRM in held:
                yield rows_BHRM, earlier_BHRM
        number += len(held)


def _kept(row_pass: RowPass, block_BHRM: Tensor) -> Tensor:
    """A block that no other spoils."""
    return block_BHRM if row_pass.writes_down or row_pass.is_one_block else block_BHRM.clone()
