"""The stationary distribution of attention, gathered once for the statistics that need it.

Shape suffixes as in `lightning_attn.statistics.rows.row_block`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lightning_attn.statistics.algebra.markov_chain import (
    NOTHING,
    SOLVED_SIZE,
    iterated,
    of_triangular,
    solved,
    steps_for,
    where_within,
)
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass


class StationaryDistribution:
    r"""The distribution :math:`\pi = \pi P` of square matrices, with :math:`P` their present rows, each over its sum.

    Statistics share it by `RowPass.shared`. Up to 256 tokens it is solved for; of causal matrices it is the one token
    that looks at no other, at any length; others are iterated.

    Args:
        row_pass: the sequences and heads.
    """

    def __init__(self, row_pass: RowPass) -> None:
        call = row_pass.call
        self._is_square = call.is_square
        self._is_surely_causal = row_pass.is_surely_causal
        self._are_weights = call.weight_matrix is not None
        self._tokens = call.queries
        self._present: list[Tensor] = []
        self._chain: list[Tensor] = []
        self._closed: list[Tensor] = []
        self._received_BHM = torch.zeros(call.sequences, call.heads, call.keys, device=call.query.device)
        self._looks_ahead_BH = torch.zeros(call.sequences, call.heads, dtype=torch.bool, device=call.query.device)
        self._distribution_BHN: Tensor | None = None

    def add(self, rows: RowBlock) -> None:
        """Look at the rows of a block, unless another statistic has shown it."""
        if not self._is_square or rows.start < sum(part.shape[-1] for part in self._present):
            return
        sum_BHR = rows.exponential_sum_BHR
        present_BHR = rows.present_BHR
        if self._are_weights:  # a given row of zeros is none
            present_BHR = present_BHR & (rows.mass_BHR >= NOTHING)
        self._present.append(present_BHR)
        # Over their own sum, rather than what they are divided by: a learned sink may take nearly everything.
        share_BHR1 = torch.where(present_BHR, 1 / sum_BHR, 0.0)[..., None]
        if self._tokens <= SOLVED_SIZE:
            chain_BHRM = rows.clean_exponentials_BHRM * share_BHR1
            self._chain.append(functional.pad(chain_BHRM, (0, self._tokens - rows.keys)).cpu().double())
            return
        self._received_BHM[..., : rows.keys] += (share_BHR1.mT @ rows.clean_exponentials_BHRM)[..., 0, :]
        if not self._is_surely_causal:
            self._looks_ahead_BH |= rows.looks_ahead_BH
        has_transition_BHRM = rows.exponentials_BHRM >= NOTHING * sum_BHR[..., None]
        own_BHR = rows.self_weight_BHR * rows.total_BHR >= NOTHING * sum_BHR
        self._closed.append(present_BHR & (has_transition_BHRM.sum(-1) <= own_BHR))

    def of(self, row_pass: RowPass) -> tuple[Tensor, Tensor]:
        """The distribution, (B, H, N), NaN where it is not known; and which rows are present, boolean.

        Args:
            row_pass: what it was made for; it is not held, since it holds this.
        """
        present_BHN = torch.cat(self._present, dim=-1)
        if self._distribution_BHN is None:
            self._distribution_BHN = self._compute(row_pass, present_BHN)
        return self._distribution_BHN, present_BHN

    def _compute(self, row_pass: RowPass, present_BHN: Tensor) -> Tensor:
        if self._tokens <= SOLVED_SIZE:
            return solved(torch.cat(self._chain, dim=-2), present_BHN.cpu()).to(present_BHN.device, torch.float32)
        distribution_BHN = of_triangular(torch.cat(self._closed, dim=-1))
        if bool(self._looks_ahead_BH.any()):
            iterated_BHN = iterated(row_pass.weights, steps_for(row_pass.writes_down))
            distribution_BHN = torch.where(self._looks_ahead_BH[..., None], iterated_BHN, distribution_BHN)
        return where_within(distribution_BHN, present_BHN, self._received_BHM)
