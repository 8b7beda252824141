"""The permutation test: heads by content, by position and of both, under masks that moving tokens runs into."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_attn.functional.permutation import (
    _permutation_response_compute,
    _permutation_response_update,
    permutation_response,
)

B, H, N, WIDTH = 3, 4, 12, 8


def permuted(tokens_BHND: Tensor, permutation_BN: Tensor) -> Tensor:
    """The tokens after that of position ``p`` was moved to ``permutation[p]``."""
    moved = torch.empty_like(tokens_BHND)
    for b in range(len(tokens_BHND)):
        for p in range(tokens_BHND.shape[2]):
            moved[b, :, permutation_BN[b, p]] = tokens_BHND[b, :, p]
    return moved


class Heads:
    """Heads whose logits are of content, of position, or of both."""

    def __init__(self, content: float, position: float) -> None:
        self.by_content = content * torch.randn(H, WIDTH, WIDTH, dtype=torch.float64)
        self.by_position = position * torch.randn(H, N, N, dtype=torch.float64)

    def __call__(self, tokens_BHND: Tensor, visible: Tensor, sink: float | None = None) -> Tensor:
        logits = tokens_BHND @ self.by_content @ tokens_BHND.mT / WIDTH + self.by_position
        logits = logits.masked_fill(~visible, -torch.inf)
        if sink is None:
            return logits.softmax(-1).nan_to_num()
        beside = torch.full((*logits.shape[:-1], 1), sink, dtype=torch.float64)
        return torch.cat([logits, beside], dim=-1).softmax(-1)[..., :-1]


def swap(first: int, second: int) -> Tensor:
    permutation = torch.arange(N)
    permutation[first], permutation[second] = second, first
    return permutation


def all_but_the_first() -> Tensor:
    return torch.stack([torch.cat([torch.zeros(1).long(), 1 + torch.randperm(N - 1)]) for _ in range(B)])


DISTANCE = torch.arange(N)[:, None] - torch.arange(N)
MASKS: dict[str, Callable[[], Tensor]] = {
    "everything": lambda: torch.ones(N, N).bool(),
    "causal": lambda: DISTANCE >= 0,
    "window": lambda: (DISTANCE >= 0) & (DISTANCE < 5),
    "documents": lambda: (torch.arange(N) < 7) == (torch.arange(N) < 7)[:, None],
    "left padding": lambda: (torch.arange(N) >= torch.tensor([0, 3, 5])[:, None, None, None]).expand(B, 1, N, N),
    "by sequence and head": lambda: (torch.rand(B, H, N, N) < 0.7) | (DISTANCE == 0),
}
PERMUTATIONS: dict[str, Callable[[], Tensor]] = {
    "two neighbours": lambda: swap(8, 9),
    "two apart": lambda: swap(8, 10),
    "a cycle": lambda: torch.tensor([0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 6]),
    "all but the first": all_but_the_first,
}
masks = pytest.mark.parametrize("visible", [pytest.param(make, id=name) for name, make in MASKS.items()])
permutations = pytest.mark.parametrize("permutation", [pytest.param(p, id=name) for name, p in PERMUTATIONS.items()])


def response(heads: Heads, visible: Tensor, permutation: Tensor, sink: float | None = None) -> Tensor:
    tokens = torch.randn(B, 1, N, WIDTH, dtype=torch.float64).expand(-1, H, -1, -1)
    after = heads(permuted(tokens, permutation.expand(B, N)), visible, sink)
    return permutation_response(heads(tokens, visible, sink), after, permutation, visible)


@permutations
@masks
@pytest.mark.parametrize("sink", [None, 2.0], ids=["", "learned sink"])
def test_content_gives_one_and_position_zero(
    visible: Callable[[], Tensor], permutation: Callable[[], Tensor], sink: float | None
) -> None:
    by_content, by_position = Heads(2.0, 0.0), Heads(0.0, 2.0)
    ones = response(by_content, visible(), permutation(), sink)
    zeros = response(by_position, visible(), permutation(), sink)
    torch.testing.assert_close(ones, torch.ones(H, dtype=torch.float64), rtol=1e-9, atol=0)
    torch.testing.assert_close(zeros, torch.zeros(H, dtype=torch.float64), rtol=0, atol=1e-9)


@permutations
@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_a_mixture_of_weights_gives_its_share(permutation: Callable[[], Tensor], share: float) -> None:
    """Of what stayed and what was moved along: linear where everything is seen, since rows need no new sum."""
    moves = permutation().expand(B, N)
    before = torch.randn(B, H, N, N, dtype=torch.float64).softmax(-1)
    along = torch.stack([b[:, m.argsort()][..., m.argsort()] for b, m in zip(before, moves, strict=True)])
    found = permutation_response(before, (1 - share) * before + share * along, moves)
    torch.testing.assert_close(found, torch.full((H,), share, dtype=torch.float64))


@masks
def test_logits_of_both_are_in_between_and_more_content_is_more(visible: Callable[[], Tensor]) -> None:
    heads, moves = Heads(2.0, 2.0), all_but_the_first()
    seen = visible()
    found = []
    for content in (0.05, 0.3, 1.0, 3.0, 20.0):
        torch.manual_seed(1)
        mixed = Heads(0.0, 0.0)
        mixed.by_content, mixed.by_position = content * heads.by_content, heads.by_position
        found.append(float(response(mixed, seen, moves).mean()))
    assert found == sorted(found)
    assert abs(found[0]) < 0.1 < found[2] < 0.9 < found[-1] < 1


def test_a_pattern_that_has_nothing_to_do_with_the_first_gives_a_half() -> None:
    before, after = torch.randn(2, 64, H, 24, 24).softmax(-1)
    found = permutation_response(before, after, torch.randperm(24))
    torch.testing.assert_close(found, torch.full((H,), 0.5), rtol=0, atol=0.02)


@pytest.mark.parametrize("sink", [0.0, 4.0, 9.0])
def test_a_sink_on_a_token_that_is_not_moved_changes_nothing(sink: float) -> None:
    """It stays where it is in all three, and what is beside it is in proportion."""
    by_content, by_position = Heads(2.0, 0.0), Heads(0.0, 2.0)
    moves, causal = all_but_the_first(), MASKS["causal"]()
    tokens = torch.randn(B, 1, N, WIDTH, dtype=torch.float64).expand(-1, H, -1, -1)
    for heads, expected in ((by_content, 1.0), (by_position, 0.0)):
        heads.by_position = heads.by_position + sink * (torch.arange(N) == 0)
        after = heads(permuted(tokens, moves), causal)
        found = permutation_response(heads(tokens, causal), after, moves, is_causal=True)
        torch.testing.assert_close(found, torch.full((H,), expected, dtype=torch.float64), rtol=0, atol=1e-9)


@masks
def test_equals_the_formula_row_by_row(visible: Callable[[], Tensor]) -> None:
    seen = visible().expand(B, H, N, N)
    moves = all_but_the_first()
    before, after = (
        torch.randn(B, H, N, N, dtype=torch.float64).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
        for _ in range(2)
    )
    found = permutation_response(before, after, moves, seen)
    for h in range(H):
        numerator = denominator = 0.0
        for b in range(B):
            can_see, old, new = seen[b, h].numpy(), before[b, h].numpy(), after[b, h].numpy()
            origin = {int(to): at for at, to in enumerate(moves[b])}
            for i in range(N):
                if not can_see[:, i].any() or not can_see[:, origin[i]].any():
                    continue  # padding
                keys = [j for j in range(N) if can_see[i, j] and can_see[origin[i], origin[j]]]
                place = np.array([old[i, j] for j in keys])
                along = np.array([old[origin[i], origin[j]] for j in keys])
                got = np.array([new[i, j] for j in keys])
                if not keys:
                    continue
                place, along, got = place / place.sum(), along / along.sum(), got / got.sum()
                numerator += float((got - place) @ (along - place))
                denominator += float((along - place) @ (along - place))
        assert float(found[h]) == pytest.approx(numerator / denominator, rel=1e-9)


def test_absent_where_moving_makes_no_difference() -> None:
    random = torch.rand(B, H, N, N).softmax(-1)
    uniform = torch.full((B, H, N, N), 1 / N)
    causal = torch.ones(N, N).tril() / torch.arange(1, N + 1)[:, None]
    on_the_first = (torch.arange(N) == 0).float().expand(B, H, N, N)
    assert permutation_response(random, random, torch.arange(N)).isnan().all()
    assert permutation_response(uniform, random, swap(2, 5)).isnan().all()
    assert permutation_response(causal.expand(B, H, N, N), random, swap(2, 5), is_causal=True).isnan().all()
    assert permutation_response(on_the_first, random, swap(2, 5)).isnan().all()
    assert permutation_response(on_the_first, random, swap(0, 5)).isfinite().all()
    assert permutation_response(random[:0], random[:0], swap(0, 5)).isnan().all()


def test_absent_where_tokens_are_moved_to_where_they_see_other_keys() -> None:
    """From one document to another, or out of reach of a window: nothing is seen as well before as after."""
    weights = torch.rand(2, B, H, N, N)
    for mask in (MASKS["documents"](), MASKS["window"]()):
        assert permutation_response(*weights, swap(6, 11), mask).isnan().all()


def test_swapped_first_tokens_have_no_common_key_in_a_causal_row() -> None:
    """Each of the two rows sees, before and after, nothing but itself in common."""
    weights = torch.rand(1, 1, 2, 2).tril()
    assert permutation_response(weights, weights, torch.tensor([1, 0]), is_causal=True).isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_left_out(bad: float) -> None:
    by_position = Heads(0.0, 2.0)
    tokens, everything = torch.randn(B, H, N, WIDTH, dtype=torch.float64), torch.ones(N, N).bool()
    before, after = by_position(tokens, everything), by_position(tokens, everything)
    for spoilt in (before, after):
        spoilt[1, 2, 4, 3] = bad
    torch.testing.assert_close(
        permutation_response(before, after, swap(2, 5)), torch.zeros(H, dtype=torch.float64), rtol=0, atol=1e-12
    )
    before[:, 2] = bad
    assert permutation_response(before, after, swap(2, 5)).isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 2e-3)])
def test_other_precisions(dtype: torch.dtype, tolerance: float) -> None:
    by_content = Heads(2.0, 0.0)
    tokens = torch.randn(B, H, N, WIDTH, dtype=torch.float64)
    moves, causal = all_but_the_first(), MASKS["causal"]()
    before, after = by_content(tokens, causal).to(dtype), by_content(permuted(tokens, moves), causal).to(dtype)
    found = permutation_response(before, after, moves, is_causal=True)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.ones(H), rtol=0, atol=tolerance)


def test_batches_add_up() -> None:
    before, after = torch.randn(2, B, H, N, N).softmax(-1)
    moves = all_but_the_first()
    parts = [_permutation_response_update(before[b, None], after[b, None], moves[b]) for b in range(B)]
    sums = [torch.stack(part).sum(0) for part in zip(*parts, strict=True)]
    assert [tuple(s.shape) for s in sums] == [(H,), (H,)]
    torch.testing.assert_close(_permutation_response_compute(*sums).float(), permutation_response(before, after, moves))


WEIGHTS = torch.full((2, 3, 4, 4), 0.25)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights": torch.ones(2, 3, 4, 5)}, r"`weights` must .* \(B, H, N, N\), got .* \(2, 3, 4, 5\)"),
        ({"weights": torch.ones(4, 4)}, r"`weights` must .* \(B, H, N, N\), got .* \(4, 4\)"),
        ({"weights": WEIGHTS.long()}, "`weights` must be floating-point"),
        (
            {"weights_of_permuted": WEIGHTS[:1]},
            r"`weights_of_permuted` must have .* \(2, 3, 4, 4\), got \(1, 3, 4, 4\)",
        ),
        (
            {"permutation": torch.arange(3)},
            r"`permutation` must be integers of shape \(4,\) or \(2, 4\), got .* \(3,\)",
        ),
        ({"permutation": torch.arange(4.0)}, r"`permutation` must be integers .* got torch.float32"),
        ({"permutation": torch.tensor([0, 1, 1, 3])}, r"`permutation` must hold each of 0 … 3 once, .* without 2"),
        ({"permutation": torch.tensor([1, 2, 3, 4])}, r"`permutation` must hold each of 0 … 3 once, .* without 0"),
        ({"mask": torch.ones(4, 4)}, "`mask` must be boolean"),
    ],
)
def test_bad_input_is_refused(changed: dict[str, Any], message: str) -> None:
    arguments = {"weights": WEIGHTS, "weights_of_permuted": WEIGHTS, "permutation": torch.arange(4), **changed}
    with pytest.raises(ValueError, match=message):
        permutation_response(**arguments)
