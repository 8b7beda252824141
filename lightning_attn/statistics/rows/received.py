"""What each key receives from all queries, gathered once for the statistics that need it.

Shape suffixes as in `lightning_attn.statistics.rows.row_block`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass


class ReceivedWeight:
    """The sum of each column of the attention matrix over present rows. Statistics share it by `RowPass.shared`.

    Args:
        row_pass: the sequences and heads.
    """

    def __init__(self, row_pass: RowPass) -> None:
        call = row_pass.call
        self.sum_BHM = torch.zeros(call.sequences, call.heads, call.keys, device=call.query.device)
        self._next_row = 0

    def add(self, rows: RowBlock) -> None:
        """Add the rows of a block, unless another statistic has added them."""
        if rows.start == self._next_row:
            self._next_row = rows.stop
            received_BHM = self.of(rows)
            self.sum_BHM[..., : received_BHM.shape[-1]] += received_BHM

    def of(self, rows: RowBlock) -> Tensor:
        """What keys receive from the rows of a block."""
        return torch.matmul(rows.share_BHR[:, :, None, :], rows.clean_exponentials_BHRM)[:, :, 0, :]


class UniformReceivedWeight(ReceivedWeight):
    """The same of uniform attention under the same visibility: what a mask alone gives to each key."""

    def of(self, rows: RowBlock) -> Tensor:
        """What keys would receive from the rows of a block."""
        return torch.einsum("bhr,bhrm->bhm", rows.uniform_share_BHR, rows.visible_BHRM)


class EvenReceivedWeight(ReceivedWeight):
    """The same of weights that are spread evenly, and of which each row has the sum that it really has.

    Rows sum to one, and it is that of uniform attention, unless there is a learned sink, or weights were given.
    """

    def of(self, rows: RowBlock) -> Tensor:
        """What keys would receive from the rows of a block."""
        return torch.einsum("bhr,bhrm->bhm", rows.uniform_share_BHR * rows.mass_BHR, rows.visible_BHRM)
