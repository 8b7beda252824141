"""What keys receive, beside what the mask alone would give them."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_attn.functional import attention_marginal_gap, key_marginal, reference_key_marginal


def harmonic(n: int) -> float:
    return math.fsum(1 / i for i in range(1, n + 1))


TWO = torch.tensor([[1 / 3, 2 / 3], [3 / 7, 4 / 7]])


def test_two_tokens() -> None:
    received = 2 * key_marginal(TWO)
    assert received.tolist() == pytest.approx([16 / 21, 26 / 21])
    assert float((received - 1).abs().sum()) == pytest.approx(10 / 21)
    assert attention_marginal_gap(TWO).item() == pytest.approx(0.1190476, abs=1e-7)


def test_uniform_causal_attention_is_balanced_as_its_mask_has_it() -> None:
    n = 64
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    weights = causal / causal.sum(-1, keepdim=True)
    received = n * key_marginal(weights, causal)
    assert received[[0, 1, 63]].tolist() == pytest.approx([4.7439, 3.7439, 1 / 64], abs=5e-5)
    assert float((received / n - 1 / n).abs().sum() / 2) == pytest.approx(0.3630, abs=5e-5)
    assert attention_marginal_gap(weights, causal).item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("n", [1, 2, 9, 64])
def test_causal_reference(n: int) -> None:
    expected = [(harmonic(n) - harmonic(j)) / n for j in range(n)]
    assert reference_key_marginal((n, n), is_causal=True).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_shape_and_mask_say_the_same(shape: tuple[int, int], is_causal: bool) -> None:
    of_mask = reference_key_marginal(torch.ones(shape, dtype=torch.bool), is_causal=is_causal)
    of_shape = reference_key_marginal(shape, is_causal=is_causal)
    torch.testing.assert_close(of_shape, of_mask)
    assert float(of_shape.sum()) == pytest.approx(1)


def test_reference_of_a_mask_row_by_row() -> None:
    mask = torch.rand(2, 6, 7) < 0.5
    mask[:, 2] = False
    for of_sequence, got in zip(mask.tolist(), reference_key_marginal(mask), strict=True):
        rows = [row for row in of_sequence if any(row)]
        expected = [sum(row[j] / sum(row) for row in rows) / len(rows) for j in range(7)]
        assert got.tolist() == pytest.approx(expected, rel=1e-6)


def test_rows_that_see_nothing_and_hidden_keys_do_not_count() -> None:
    weights = torch.rand(4, 5).softmax(-1)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[2] = False
    weights[2] = math.nan
    kept = weights[[0, 1, 3]]
    torch.testing.assert_close(key_marginal(weights, mask), key_marginal(kept))
    torch.testing.assert_close(attention_marginal_gap(weights, mask), attention_marginal_gap(kept))
    nothing = torch.zeros(4, 5, dtype=torch.bool)
    assert key_marginal(weights, nothing).isnan().all()
    assert attention_marginal_gap(weights, nothing, validate_args=False).isnan().all()
    assert reference_key_marginal(nothing).isnan().all()


@pytest.mark.parametrize("kind", ["everything", "causal", "any", "padding"])
def test_the_gap_between_both_is_that_of_the_statistic(kind: str) -> None:
    mask = torch.ones(9, 9).tril() > 0 if kind == "causal" else torch.ones(9, 9) > 0
    if kind == "any":
        mask = torch.rand(9, 9) < 0.7
    elif kind == "padding":  # the rows of padding see keys, and are left out
        mask[:, 6:] = False
    mask[:, 0] = True
    weights = (2 * torch.randn(4, 3, 9, 9)).masked_fill(~mask, -torch.inf).softmax(-1)
    gap = (key_marginal(weights, mask) - reference_key_marginal(mask)).abs().sum(-1) / 2
    found = attention_marginal_gap(weights, mask)
    assert float(found.min()) > 0.05 and float(found.max()) < 1
    torch.testing.assert_close(found, gap.mean(0), rtol=1e-5, atol=1e-7)


def test_any_dimensions_may_lead_and_types() -> None:
    weights = torch.randn(2, 3, 4, 5, 6).softmax(-1)
    torch.testing.assert_close(key_marginal(weights)[1, 2, 3], key_marginal(weights[1, 2, 3]))
    assert key_marginal(weights.bfloat16()).dtype == torch.float32
    assert key_marginal(weights.double()).dtype == torch.float64
    assert reference_key_marginal((3, 4)).dtype == reference_key_marginal(weights > 0).dtype == torch.float32


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"`weights` must be floating.*int64"):
        key_marginal(torch.ones(3, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"`weights` must be floating.*\(3,\)"):
        key_marginal(torch.ones(3))
    with pytest.raises(ValueError, match=r"`mask` must be boolean .* got torch.float32"):
        key_marginal(torch.ones(3, 3), torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"`mask` must .* broadcast to \(3, 3\), got torch.bool of shape \(2, 3\)"):
        key_marginal(torch.ones(3, 3), torch.ones(2, 3) > 0)
    with pytest.raises(
        ValueError, match=r"`visible` must be a boolean tensor of shape \(…, N, M\), .* got torch.float32"
    ):
        reference_key_marginal(torch.ones(3, 3))
    for shape in ((3,), (0, 3), (3.0, 3)):
        with pytest.raises(
            ValueError, match=r"`visible` must be .* or a tuple of the numbers of queries and keys, got"
        ):
            reference_key_marginal(shape)
