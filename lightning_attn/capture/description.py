"""A call in a few words: its heads, which keys are seen, and how it was computed.

Shape suffixes as in `lightning_attn.capture.call`.
"""

from __future__ import annotations

import torch

from lightning_attn.capture.call import AttentionCall, unhidden_by
from lightning_attn.capture.refusals import UnreadableError


def seen_keys(call: AttentionCall) -> str:
    """Which keys the queries of a call see. The mask is written down for it: for short sequences."""
    rows = call.visibility.rows(0, call.queries, call.keys, call.query.device)
    if rows is None:
        return "all keys"
    first, rest = rows
    visible_BHNM = torch.ones(*rest.shape[:2], call.queries, call.keys, dtype=torch.bool, device=call.query.device)
    visible_BHNM[..., first:] = rest
    seen_BH1M = visible_BHNM.any(2, keepdim=True)
    padding = "" if bool(seen_BH1M.all()) else ", padding hidden"
    if bool((visible_BHNM == seen_BH1M).all()):
        return f"all keys{padding}"
    # How far back a key is, where the last query is the last key.
    back_NM = torch.arange(call.keys - call.queries, call.keys, device=rest.device)[:, None] - torch.arange(
        call.keys, device=rest.device
    )
    if bool((visible_BHNM & (back_NM < 0)).any()):
        return f"{visible_BHNM.float().mean():.0%} of keys{padding}"
    furthest = int(torch.where(visible_BHNM, back_NM, 0).max())
    return f"earlier keys{padding}" if furthest + 1 >= call.keys else f"the last {furthest + 1} keys{padding}"


def heads(call: AttentionCall) -> str:
    """How many heads a call has, and which where ranks divide them."""
    parts = [f"{call.heads}"]
    if call.group > 1:
        parts.append(f"in groups of {call.group}")
    if call.share is not None:
        try:
            first, in_all = call.share.of_heads(call.heads)
            parts.append(f"from #{first} of {in_all}")
        except UnreadableError:
            parts.append("of several ranks")  # one of a loop over heads that ranks divide unevenly
    return " ".join(parts)


def source(call: AttentionCall) -> str:
    """What a call was read from."""
    parts = [
        "written-out logits" if call.logit_matrix is not None else f"queries and keys of width {call.query.shape[-1]}"
    ]
    bias = call.visibility.bias
    if bias is not None and bool((unhidden_by(bias) & (bias != 0)).any()):
        parts.append("a bias")
    if call.soft_cap is not None:
        parts.append(f"a soft cap of {call.soft_cap:g}")
    if call.sink_logits is not None:
        parts.append("learned sinks")
    if call.score_rule is not None:
        parts.append("a score function")
    if call.value is None:
        parts.append("no values")
    return ", ".join(parts)
