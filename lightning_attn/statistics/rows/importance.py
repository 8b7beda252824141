"""How much each key receives on average from the queries that can see it: its importance.

Shape suffixes as in `lightning_attn.statistics.rows.row_block`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.rows.received import ReceivedWeight
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass


class SeeingQueries(ReceivedWeight):
    """How many present rows see each key."""

    def of(self, rows: RowBlock) -> Tensor:
        """How many rows of a block do."""
        return rows.query_count_BHM


class ReceivedFromOthers(ReceivedWeight):
    """What each key receives; in self-attention, from other tokens than its own."""

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._self_attention = row_pass.call.self_attention

    def of(self, rows: RowBlock) -> Tensor:
        """What keys receive from the rows of a block."""
        if not self._self_attention:
            return super().of(rows)
        # Not a difference: beside a token that looks at itself, nothing would be left of what others give to it. The
        # share of each row comes first, since it is of all its exponentials.
        share_BH1R, exponentials_BHRM = rows.share_BHR[:, :, None, :], rows.clean_exponentials_BHRM
        own_BHR = exponentials_BHRM[..., rows.start : rows.stop].diagonal(dim1=-2, dim2=-1)
        kept_BHR = own_BHR.clone()
        own_BHR.zero_()
        received_BHM = torch.matmul(share_BH1R, exponentials_BHRM)[:, :, 0, :]
        own_BHR.copy_(kept_BHR)
        return received_BHM


class OtherSeeingQueries(ReceivedFromOthers):
    """How many present rows see each key; in self-attention, beside its own."""

    def of(self, rows: RowBlock) -> Tensor:
        """How many rows of a block do."""
        if not self._self_attention:
            return rows.query_count_BHM
        count_BHM = rows.query_count_BHM.clone()
        own_BHR = count_BHM[..., rows.start : rows.stop]
        own_BHR -= (rows.present_BHR & rows.sees_self_BHR).float()[..., : own_BHR.shape[-1]]
        return count_BHM


def is_widely_seen(queries_BHM: Tensor) -> Tensor:
    """Whether at least half as many queries see a key as see the key that most of them see.

    Under a causal mask few queries see late keys, and what a single one gives would make a key the most important.
    """
    return (queries_BHM > 0) & (2 * queries_BHM >= queries_BHM.amax(-1, keepdim=True))


def importance(received_BHM: Tensor, queries_BHM: Tensor) -> Tensor:
    r""":math:`\alpha_k`, the mean weight on each key of the queries that see it; zero where it is not widely seen.

    Args:
        received_BHM: the sum of what they give.
        queries_BHM: how many they are.
    """
    importance_BHM = received_BHM / queries_BHM.clamp(min=1)
    return torch.where(is_widely_seen(queries_BHM), importance_BHM, 0.0)
