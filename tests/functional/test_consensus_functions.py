"""The stationary distribution of dense weights."""

from __future__ import annotations

import pytest
import torch

from lightning_attn.functional.consensus import stationary_distribution


@pytest.mark.parametrize("n", [1, 2, 7, 256, 257, 400])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_it_is_left_as_it_is(n: int, dtype: torch.dtype) -> None:
    weights = (2 * torch.randn(2, 3, n, n, dtype=torch.float64)).softmax(-1).to(dtype)
    found = stationary_distribution(weights)
    assert found.shape == (2, 3, n)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    chain = weights.double() / weights.double().sum(-1, keepdim=True)
    image = (found.double()[..., None, :] @ chain)[..., 0, :]
    exact = 1e-14 if dtype == torch.float64 and n <= 256 else 1e-6
    assert (image - found).abs().sum(-1).max() < (exact if n <= 256 else 1e-4)
    assert found.sum(-1) == pytest.approx(torch.ones(2, 3), abs=1e-6)
    assert (found >= 0).all()


@pytest.mark.parametrize("n", [5, 300])
def test_causal_attention_ends_in_the_first_token(n: int) -> None:
    weights = torch.randn(n, n).masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf).softmax(-1)
    expected = (torch.arange(n) == 0).float()
    assert torch.equal(stationary_distribution(weights), expected)
    everything = torch.randn(2, n, n).softmax(-1)
    padded = torch.ones(n, n).tril().bool() & (torch.arange(n) >= 2)
    assert torch.equal(stationary_distribution(everything, padded), expected.roll(2).expand(2, n))


@pytest.mark.parametrize("n", [4, 300])
def test_it_is_nan_where_it_is_not_unique(n: int) -> None:
    weights = torch.stack([torch.eye(n), torch.full((n, n), 1 / n)])
    found = stationary_distribution(weights)
    assert found[0].isnan().all()
    assert found[1].tolist() == pytest.approx([1 / n] * n, rel=1e-4)


def test_padding_has_none_of_it() -> None:
    mask = torch.tensor([True, True, True, False])
    found = stationary_distribution(torch.full((4, 4), 0.25), mask)
    assert found.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    weights = torch.full((4, 4), 0.25)
    weights[3] = 0  # a token that others see, and has no row
    assert stationary_distribution(weights).isnan().all()
    assert stationary_distribution(torch.zeros(4, 4)).isnan().all()


def test_a_slow_chain_is_solved_to_the_last_digit() -> None:
    weights = torch.tensor([[1 - 1e-25, 1e-25], [3e-25, 1 - 3e-25]], dtype=torch.float64)
    assert stationary_distribution(weights).tolist() == pytest.approx([0.75, 0.25], rel=1e-12)


def test_probabilities_that_differ_by_more_than_numbers_hold() -> None:
    """A walk that steps down 1e29 times as often as up: the masses fall by that factor from token to token."""
    n = 40
    up, down = torch.full((n - 1,), 1e-29).double(), torch.ones(n - 1).double()
    found = stationary_distribution(torch.diag(up, 1) + torch.diag(down, -1) + torch.diag(torch.ones(n).double()))
    assert found[0] == pytest.approx(1)
    assert found[1] == pytest.approx(2e-29, rel=1e-6)
    assert found.isfinite().all()


@pytest.mark.parametrize(
    ("weights", "mask", "message"),
    [
        (torch.zeros(2, 3), None, r"`weights` must be .* \(…, N, N\), got torch.float32 of shape \(2, 3\)"),
        (torch.zeros(3), None, "`weights` must be"),
        (torch.zeros(3, 3).long(), None, "`weights` must be floating-point, .* got torch.int64"),
        (torch.zeros(3, 3), torch.ones(3, 3), "`mask` must be boolean .* got torch.float32"),
        (torch.zeros(3, 3), torch.ones(4, 4).bool(), r"`mask` must .* broadcast to \(3, 3\), got .* \(4, 4\)"),
    ],
)
def test_what_fits_nothing_is_refused(weights: torch.Tensor, mask: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stationary_distribution(weights, mask)


def test_nothing_gives_nothing() -> None:
    assert stationary_distribution(torch.zeros(0, 2, 3, 3)).shape == (0, 2, 3)
    assert stationary_distribution(torch.zeros(2, 0, 0)).shape == (2, 0)
