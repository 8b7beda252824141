"""Statistics as one would write them down, on whole matrices: what the package's way is compared with."""

from __future__ import annotations

import torch
from kinds import ONE_PASS
from random_calls import is_causal, random_call, statistics_of
from torch import Tensor

from lightning_attn.capture.call import AttentionCall
from lightning_attn.snapshot import Snapshot


def dense_formulas(call: AttentionCall) -> dict[str, Tensor]:
    """Ten one-pass statistics of every head, for self-attention without padding."""
    logits_BHNM = call.query @ call.key.transpose(-1, -2) * call.scale
    visible_NM = torch.ones(call.queries, call.keys, dtype=torch.bool)
    if is_causal(call):
        visible_NM = visible_NM.tril()
    count_N = visible_NM.sum(-1)
    several_N = count_N >= 2  # rows with a choice
    masked_BHNM = logits_BHNM.masked_fill(~visible_NM, -torch.inf)
    weights_BHNM = masked_BHNM.softmax(-1)
    log_weights_BHNM = masked_BHNM.log_softmax(-1).masked_fill(~visible_NM, 0)
    entropy_BHN = -(weights_BHNM * log_weights_BHNM).sum(-1)
    visible_logits_BHNM = logits_BHNM.masked_fill(~visible_NM, 0)
    centred_BHNM = visible_logits_BHNM - visible_logits_BHNM.sum(-1, keepdim=True) / count_N[:, None]
    variance_BHN = centred_BHNM.square().masked_fill(~visible_NM, 0).sum(-1) / count_N
    diagonal_BHN = weights_BHNM.diagonal(dim1=-2, dim2=-1)

    def over_rows(values_BHN: Tensor, counted_N: Tensor = several_N) -> Tensor:
        return values_BHN[..., counted_N].mean((0, 2))

    return {
        "entropy": over_rows(entropy_BHN / count_N.log()),
        "kl_to_uniform": over_rows(count_N.log() - entropy_BHN),
        "max_logit": masked_BHNM.amax((0, 2, 3)),
        "logit_std": over_rows(variance_BHN.sqrt()),
        "max_weight": over_rows(weights_BHNM.amax(-1)),
        "sink_strength": over_rows(weights_BHNM[..., 0], torch.arange(call.queries) > 0),
        "sink_rate": (weights_BHNM.mean(-2)[..., 0] > 0.3).float().mean(0),
        "self_weight": over_rows(diagonal_BHN, count_N >= 1),
        "non_finite_share": over_rows((~logits_BHNM.isfinite().all(-1)).float(), count_N >= 1),
        "hidden_row_share": over_rows((count_N == 0).expand_as(entropy_BHN).float(), count_N >= 0),
    }


WITH_DENSE_FORMULA = sorted(dense_formulas(random_call(1, 16, is_causal=True)))


def check_dense_formulas() -> None:
    """Refuse to compare the times of different things."""
    others = set(WITH_DENSE_FORMULA) - set(ONE_PASS)
    if others:
        raise RuntimeError(f"Dense formulas are compared with one pass, in which {sorted(others)} are not found.")
    for causal in (True, False):
        call = random_call(2, 192, causal)
        expected = dense_formulas(call)
        sums = statistics_of(call, WITH_DENSE_FORMULA)
        snapshot = Snapshot.from_sums(0, {call.site: sums}, WITH_DENSE_FORMULA)
        for name, values_H in zip(WITH_DENSE_FORMULA, snapshot.values, strict=True):
            torch.testing.assert_close(values_H.float(), expected[name].float(), equal_nan=True)
