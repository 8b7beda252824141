"""How fast repeated attention would bring all tokens together."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.algebra.eigenvalue import second_eigenvalue
from lightning_attn.statistics.registry import register
from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass
from lightning_attn.statistics.statistic import Range, Ratio, RowStatistic, mean_over_sequences


@register
class ConsensusRate(RowStatistic):
    r"""Mean over sequences of :math:`1 - |\lambda_2|`, with the second largest eigenvalue of the attention matrix.

    The matrix of a causal head is triangular, so that its eigenvalues are its diagonal: the first token's is 1, and the
    rate is :math:`1 - \max_{j \ge 2} A_{jj}`. Where a query sees a later key, the eigenvalue is exact up to 128 tokens,
    and from an iteration beyond, within 0.01. Absent where it is ill-conditioned, so that rounding alone would move it:
    in heads that are nearly, but not quite, causal. Beside a learned sink, weights are as the model uses them: all
    eigenvalues are less than 1, and that of a causal head is the second largest of its diagonal. See
    `lightning_attn.statistics.algebra.eigenvalue`.
    """

    name = "consensus_rate"
    lens = "Consensus"
    range = Range(0, 1)
    uniform = "1; causal: 1/2"
    example = 0.5
    reading = (
        "1: one step of this head makes all tokens equal; 0: some token never listens to the others. "
        "To 0.01 where heads look ahead at more than 128 tokens; absent in heads that are nearly causal."
    )
    source = "Rodríguez Abella et al. 2025 (ICML); Wu et al. 2025, arXiv:2502.01951"
    is_spectral = True

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._diagonal: list[Tensor] = []
        self._rows: Tensor | float = 0.0
        self._looks_ahead: Tensor | bool = False

    def add(self, rows: RowBlock) -> None:
        """Look at the diagonal."""
        if not self.row_pass.call.is_square:
            return
        others_BHR = rows.present_BHR & (rows.number_R != rows.first_key)
        self._diagonal.append(torch.where(rows.present_BHR, rows.self_weight_BHR, 0.0))
        self._rows = self._rows + others_BHR.sum(-1)
        if not self.row_pass.is_surely_causal:
            self._looks_ahead = self._looks_ahead | rows.looks_ahead_BH

    def result(self) -> Ratio:
        """The rate of each sequence that has a second token."""
        call = self.row_pass.call
        if not self._diagonal:
            nothing_BH = torch.zeros(call.sequences, call.heads, device=call.query.device)
            return mean_over_sequences(nothing_BH, nothing_BH > 0)
        assert isinstance(self._rows, Tensor)
        second_BH = torch.cat(self._diagonal, dim=-1).topk(min(2, call.queries)).values[..., -1]
        if isinstance(self._looks_ahead, Tensor) and bool(self._looks_ahead.any()):
            of_matrix_BH = self.row_pass.shared(second_eigenvalue).to(second_BH)
            second_BH = torch.where(self._looks_ahead, of_matrix_BH, second_BH)
        return mean_over_sequences((1 - second_BH).clamp(0, 1), (self._rows > 0) & ~second_BH.isnan())
