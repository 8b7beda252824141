"""The two rows of an attention matrix that are farthest apart, without comparing all pairs of a long one.

Shape suffixes as in `lightning_attn.statistics.rows.row_block`, and A: anchors, rows that all others are compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.statistics.rows.row_pass import RowPass

#: So many rows are compared with all rows: of shorter matrices all pairs are.
ANCHORS = 128
#: So often, at most, the search goes on from the farthest row that was found.
_WALKS = 4


def largest_row_distance(row_pass: RowPass, present_BHN: Tensor) -> Tensor:
    r"""The largest distance :math:`\|A_i - A_k\|_1` of two present rows, (B, H); zero where there are none.

    Exact for up to 128 present rows, and for causal heads, whose first row has a single key: what two rows give to it
    they share, so that one of them is at least as far from the first. Of others it is a lower bound: the largest
    distance of any row to 128 evenly spaced ones, and then, while that grows, of any row to the farthest one that was
    found. It is never below half of the true one, since distances obey the triangle inequality.

    Args:
        row_pass: the matrices.
        present_BHN: which rows count, boolean.
    """
    is_long = row_pass.call.queries > ANCHORS
    anchors = 1 if is_long and _begins_with_one_key(row_pass) else min(ANCHORS, row_pass.call.queries)
    largest_BH, farthest_BH = _farthest(row_pass, present_BHN, _evenly_spaced(present_BHN, anchors))
    for _ in range(_WALKS if is_long else 0):
        distance_BH, next_BH = _farthest(row_pass, present_BHN, farthest_BH[..., None])
        grows_BH = distance_BH > largest_BH
        if not bool(grows_BH.any()):
            break
        largest_BH = torch.where(grows_BH, distance_BH, largest_BH)
        farthest_BH = torch.where(grows_BH, next_BH, farthest_BH)
    return largest_BH


def _begins_with_one_key(row_pass: RowPass) -> bool:
    """Whether the first row that sees a key surely sees no other, and rows sum to one."""
    is_triangle = row_pass.is_surely_causal and row_pass.call.visibility.is_alike_for_queries
    return is_triangle and not row_pass.is_without_unit_rows


def _evenly_spaced(present_BHN: Tensor, anchors: int) -> Tensor:
    """The numbers of some present rows, (B, H, A), from the first to the last; all of them where they are few."""
    present_first_BHN = (~present_BHN).byte().argsort(dim=-1, stable=True)
    last_BH1 = (present_BHN.sum(-1, keepdim=True) - 1).clamp(min=0)
    number_A = torch.arange(anchors, device=present_BHN.device)
    steps = max(1, anchors - 1)
    place_BHA = (2 * number_A * last_BH1 + steps) // (2 * steps)  # rounded, so that no row is left out of few
    return present_first_BHN.gather(-1, place_BHA)


def _farthest(row_pass: RowPass, present_BHN: Tensor, anchor_BHA: Tensor) -> tuple[Tensor, Tensor]:
    """The largest distance of a present row to an anchor, (B, H), and the number of that row."""
    anchors_BHAM = _rows(row_pass, anchor_BHA)
    batch, heads, anchors, _ = anchors_BHAM.shape
    largest_BH = anchors_BHAM.new_zeros(batch, heads)
    farthest_BH = anchor_BHA[..., 0]
    start = 0
    for weights_BHRM in row_pass.weights():
        stop, seen = start + weights_BHRM.shape[2], weights_BHRM.shape[3]
        distance = torch.cdist(weights_BHRM.flatten(0, 1), anchors_BHAM[..., :seen].flatten(0, 1), p=1)
        # What an anchor gives to keys that no row of the block sees.
        distance_BHRA = distance.view(batch, heads, -1, anchors) + anchors_BHAM[..., seen:].sum(-1)[:, :, None]
        to_anchors_BHR = torch.where(present_BHN[..., start:stop], distance_BHRA.amax(-1), 0.0)
        of_block_BH, row_BH = to_anchors_BHR.max(-1)
        grows_BH = of_block_BH > largest_BH
        largest_BH = torch.where(grows_BH, of_block_BH, largest_BH)
        farthest_BH = torch.where(grows_BH, row_BH + start, farthest_BH)
        start = stop
    return largest_BH, farthest_BH


def _rows(row_pass: RowPass, number_BHA: Tensor) -> Tensor:
    """Some rows of the matrices, (B, H, A, M)."""
    call = row_pass.call
    rows_BHAM = torch.zeros(*number_BHA.shape, call.keys, device=number_BHA.device)
    start = 0
    for weights_BHRM in row_pass.weights():
        rows, seen = weights_BHRM.shape[2:]
        within_BHA1 = ((number_BHA >= start) & (number_BHA < start + rows))[..., None]
        index_BHA1 = (number_BHA - start).clamp(0, rows - 1)[..., None]
        of_block_BHAM = weights_BHRM.gather(2, index_BHA1.expand(*number_BHA.shape, seen))
        rows_BHAM[..., :seen] += of_block_BHAM.mul_(within_BHA1)
        start += rows
    return rows_BHAM
