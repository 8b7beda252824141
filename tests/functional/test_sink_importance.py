"""Importance of keys: published examples, closed forms, masks of all kinds, and input that is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_attn.functional.sinks import sink_importance, uniform_sink_importance

FOUR_BY_FOUR = torch.tensor([[1, 0, 0, 0], [0.6, 0.4, 0, 0], [0.5, 0.3, 0.2, 0], [0.7, 0.1, 0.1, 0.1]])


def softmax(shape: tuple[int, ...], visible: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    logits = 2 * torch.randn(shape, dtype=torch.float64)
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    return logits.softmax(-1).to(dtype)


def test_the_example_of_the_source() -> None:
    importance = sink_importance(FOUR_BY_FOUR, is_causal=True)
    assert importance.tolist() == pytest.approx([0.7, 0.8 / 3, 0.15, 0.1], rel=1e-6)
    assert (importance > 0.3).tolist() == [True, False, False, False]
    without = sink_importance(FOUR_BY_FOUR, is_causal=True, include_self=False)
    assert without[:3].tolist() == pytest.approx([0.6, 0.2, 0.1], rel=1e-6)
    assert without[3].isnan()  # no later token sees the last one


def test_without_a_mask_keys_of_zero_weight_count_as_seen() -> None:
    assert sink_importance(FOUR_BY_FOUR).tolist() == pytest.approx([0.7, 0.2, 0.075, 0.025], rel=1e-6)


@pytest.mark.parametrize(("n", "expected"), [(8, 0.3397), (16, 0.2113), (64, 0.0741), (256, 0.0239), (1024, 0.0073)])
def test_baseline_of_causal_attention(n: int, expected: float) -> None:
    first = float(uniform_sink_importance((n, n), is_causal=True)[0])
    assert first == pytest.approx(expected, abs=5e-5)
    assert first == pytest.approx(math.fsum(1 / i for i in range(1, n + 1)) / n, rel=1e-6)
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    torch.testing.assert_close(uniform_sink_importance(mask), uniform_sink_importance((n, n), is_causal=True))


@pytest.mark.parametrize(("n", "expected"), [(8, 0.2454), (64, 0.0594)])
def test_baseline_without_self_queries(n: int, expected: float) -> None:
    first = float(uniform_sink_importance((n, n), is_causal=True, include_self=False)[0])
    assert first == pytest.approx(expected, abs=5e-5)


def test_up_to_nine_tokens_the_mask_alone_exceeds_the_threshold() -> None:
    firsts = [float(uniform_sink_importance((n, n), is_causal=True)[0]) for n in (9, 10)]
    assert firsts[0] > 0.3 > firsts[1]


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_formula_entry_by_entry(dtype: torch.dtype, include_self: bool) -> None:
    n = 11
    visible = torch.rand(2, 1, n, n) < 0.6
    visible[..., torch.arange(n), torch.arange(n)] = True
    visible[1, :, 4] = False  # a row without a key, whose own key is seen
    weights = softmax((2, 3, n, n), visible, dtype).nan_to_num()
    found = sink_importance(weights, visible, include_self=include_self)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    dense = weights.double().numpy()
    for b, h, k in np.ndindex(2, 3, n):
        seeing = [i for i in range(n) if visible[b, 0, i, k] and (include_self or i != k)]
        expected = dense[b, h, seeing, k].mean() if seeing else math.nan
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        assert float(found[b, h, k]) == pytest.approx(expected, rel=tolerance, nan_ok=True)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 3, 4)])
def test_any_leading_dimensions(leading: tuple[int, ...]) -> None:
    weights = softmax((*leading, 5, 7))
    torch.testing.assert_close(sink_importance(weights), weights.mean(-2))


def test_left_padding_is_in_no_mean() -> None:
    """The rows of padding have weights, as a softmax over the real keys gives them, but are no tokens."""
    n, first = 16, 6
    mask = (torch.arange(n) >= first).view(1, 1, 1, n)
    weights = softmax((1, 2, n, n), mask.expand(1, 2, n, n))
    padded = sink_importance(weights, mask)
    assert padded[..., :first].isnan().all()
    torch.testing.assert_close(padded[..., first:], sink_importance(weights[..., first:, first:]))


def test_a_sliding_window_averages_over_the_queries_that_see_the_key() -> None:
    n, width = 32, 10
    tokens = torch.arange(n)
    distance = tokens[:, None] - tokens
    mask = (distance >= 0) & (distance < width)
    importance = uniform_sink_importance(mask)
    assert float(importance[0]) == pytest.approx(math.fsum(1 / i for i in range(1, width + 1)) / width, rel=1e-6)
    torch.testing.assert_close(importance[width - 1 : n - width + 1], torch.full((n - 2 * width + 2,), 1 / width))


def test_packed_documents_have_a_first_token_each() -> None:
    document = torch.tensor([0] * 12 + [1] * 12)
    mask = document[:, None] == document
    importance = uniform_sink_importance(mask, is_causal=True)
    torch.testing.assert_close(importance[:12], importance[12:])
    torch.testing.assert_close(importance[:12], uniform_sink_importance((12, 12), is_causal=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_left_out(bad: float) -> None:
    weights = softmax((6, 6))
    expected = sink_importance(weights[[0, 1, 3, 4, 5]])
    weights[2, 4] = bad
    torch.testing.assert_close(sink_importance(weights), expected)


def test_what_a_hidden_key_holds_has_no_effect() -> None:
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    weights = softmax((6, 6), visible)
    spoilt = weights.masked_fill(~visible, math.nan)
    torch.testing.assert_close(sink_importance(spoilt, is_causal=True), sink_importance(weights, is_causal=True))


def test_rows_may_sum_to_less_than_one() -> None:
    """Beside a learned sink that takes two thirds."""
    weights = softmax((6, 6))
    torch.testing.assert_close(sink_importance(weights / 3), sink_importance(weights) / 3)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 5), (5, 1), (0, 3), (3, 0)])
def test_few_tokens(queries: int, keys: int) -> None:
    importance = sink_importance(torch.full((2, queries, keys), 1 / max(keys, 1)))
    assert importance.shape == (2, keys)
    assert importance.isnan().all() if queries == 0 else (importance == 1 / max(keys, 1)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": torch.ones(4, 4).long()}, r"`weights` must be floating-point, .* got torch.int64"),
        ({"weights": torch.ones(4)}, r"`weights` must be .* of shape \(…, N, M\), got .* \(4,\)"),
        ({"weights": torch.ones(4, 4), "mask": torch.zeros(4, 4)}, r"`mask` must be boolean .* got torch.float32"),
        (
            {"weights": torch.ones(4, 4), "mask": torch.ones(3, 4).bool()},
            r"`mask` must .* broadcast to \(4, 4\), got .* \(3, 4\)",
        ),
        ({"weights": torch.ones(3, 4), "include_self": False}, r"`include_self` must be True .* got 3 × 4"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sink_importance(**arguments)


def test_a_baseline_of_no_mask_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`mask` must be a boolean tensor .* got torch.float32 of shape \(4, 4\)"):
        uniform_sink_importance(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"`mask` must be .* of shape \(…, N, M\), .* got torch.bool of shape \(4,\)"):
        uniform_sink_importance(torch.ones(4).bool())
