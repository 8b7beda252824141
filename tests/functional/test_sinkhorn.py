"""Balanced plans: known ones, their symmetries, and scores that have none."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from torch import Tensor

from lightning_attn.functional.balanced_transport import sinkhorn
from lightning_attn.functional.transport import transport_plan
from lightning_attn.statistics.algebra.sinkhorn_potentials import LOG_ZERO, KernelRows, sinkhorn_scaling

TWO = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)


def by_division(kernel: np.ndarray, rows: np.ndarray, columns: np.ndarray, sweeps: int) -> np.ndarray:
    """The plan by dividing columns and rows of the kernel itself, rows last."""
    plan = kernel * (rows / kernel.sum(axis=1))[:, None]
    for _ in range(sweeps):
        plan = plan * (columns / np.maximum(plan.sum(axis=0), 1e-300))
        plan = plan * (rows / plan.sum(axis=1))[:, None]
    return plan


def after(sweeps: int, kernel: Tensor) -> Tensor:
    """What the iteration has come to after some sweeps, also where the front door refuses."""
    log_kernel = kernel.double().log().nan_to_num(neginf=LOG_ZERO)
    rows, mass = KernelRows(0, log_kernel), torch.ones(len(kernel), dtype=torch.float64)
    return rows.plan(mass, sinkhorn_scaling(lambda: [rows], mass, mass, sweeps, 0.0).potential_BM)


def test_two_tokens() -> None:
    plan = sinkhorn(TWO.log())
    p = math.sqrt(2 / 3) / (1 + math.sqrt(2 / 3))
    assert p == pytest.approx(0.4494897428, abs=1e-10)
    torch.testing.assert_close(plan, torch.tensor([[p, 1 - p], [1 - p, p]], dtype=torch.float64), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("sweeps", "gap"), [(0, 10 / 21), (1, 4.9e-3), (2, 5.0e-5), (3, 5.1e-7)])
def test_each_sweep_takes_two_tokens_two_digits_closer(sweeps: int, gap: float) -> None:
    plan = after(sweeps, TWO)
    assert float((plan.sum(0) - 1).abs().sum()) == pytest.approx(gap, rel=0.011)
    assert plan.sum(1).tolist() == pytest.approx([1, 1], abs=1e-15)


def test_it_starts_from_the_softmax() -> None:
    torch.testing.assert_close(after(0, TWO), transport_plan(TWO.log()))


@pytest.mark.parametrize(("sweeps", "on_diagonal"), [(10, 0.846), (100, 0.975), (1000, 0.997)])
def test_causal_attention_drifts_to_the_identity(sweeps: int, on_diagonal: float) -> None:
    plan = after(sweeps, torch.ones(6, 6).tril())
    assert float(plan.diagonal().mean()) == pytest.approx(on_diagonal, abs=6e-4)


@pytest.mark.parametrize("shape", [(6, 6), (3, 8), (8, 3)])
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
def test_it_is_what_division_gives(shape: tuple[int, int], epsilon: float) -> None:
    scores = torch.randn(2, 3, *shape, dtype=torch.float64)
    plan = sinkhorn(scores, epsilon, tolerance=1e-12)
    ones, columns = np.ones(shape[0]), np.full(shape[1], shape[0] / shape[1])
    for b, h in np.ndindex(2, 3):
        expected = by_division(np.exp(scores[b, h].numpy() / epsilon), ones, columns, 1000)
        np.testing.assert_allclose(plan[b, h].numpy(), expected, rtol=1e-9)


def test_given_marginals() -> None:
    scores = torch.randn(2, 4, 5, dtype=torch.float64)
    rows = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    columns = torch.tensor([[0.2, 0.2, 0.2, 0.2, 0.2], [0.5, 0.0, 0.1, 0.1, 0.3]], dtype=torch.float64)
    plan = sinkhorn(scores, row_marginal=rows, column_marginal=columns, tolerance=1e-12)
    for b in range(2):
        expected = by_division(scores[b].exp().numpy(), rows.numpy(), columns[b].numpy(), 1000)
        np.testing.assert_allclose(plan[b].numpy(), expected, rtol=1e-9, atol=1e-12)


def test_one_marginal_is_shared_alike_by_the_other_side() -> None:
    scores, columns = torch.randn(4, 5), torch.tensor([1.0, 2.0, 0.0, 3.0, 2.0])
    plan = sinkhorn(scores, column_marginal=columns)
    torch.testing.assert_close(plan.sum(-1), torch.full((4,), 2.0))
    torch.testing.assert_close(plan.sum(-2), columns, rtol=1e-5, atol=1e-5)
    plan = sinkhorn(scores, row_marginal=columns[:4])
    torch.testing.assert_close(plan.sum(-1), columns[:4])
    torch.testing.assert_close(plan.sum(-2), torch.full((5,), 6 / 5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.0])
def test_it_is_the_cheapest_of_all_balanced_plans(epsilon: float) -> None:
    scores = torch.randn(6, 6, dtype=torch.float64)
    plan = sinkhorn(scores, epsilon, tolerance=1e-10)

    def price(other: Tensor) -> float:
        return float((-other * scores + epsilon * other * other.log()).sum())

    for _ in range(10):
        change = torch.randn(6, 6, dtype=torch.float64)
        change -= change.mean(0) + change.mean(1, keepdim=True) - change.mean()  # leaves all sums as they are
        assert price(plan + change * float(plan.min() / change.abs().max()) / 2) > price(plan)


def test_keys_and_queries_may_be_shifted() -> None:
    """A vector added to all keys leaves the softmax, one added to all queries does not, and neither moves the plan."""
    query, key, shift = torch.randn(7, 4).double(), torch.randn(7, 4).double(), torch.randn(4).double()
    scores = query @ key.T
    shifted_keys, shifted_queries = query @ (key + shift).T, (query + shift) @ key.T
    torch.testing.assert_close(transport_plan(shifted_keys), transport_plan(scores))
    assert float((transport_plan(shifted_queries) - transport_plan(scores)).abs().max()) > 0.1
    plan = sinkhorn(scores, tolerance=1e-12, max_iterations=100_000)
    for shifted in (shifted_keys, shifted_queries):
        balanced = sinkhorn(shifted, tolerance=1e-12, max_iterations=100_000)
        torch.testing.assert_close(balanced, plan, rtol=1e-6, atol=1e-9)


def test_potentials_are_those_of_the_dual() -> None:
    """log P − Z is a number of the row plus a number of the key."""
    scores = torch.randn(5, 5, dtype=torch.float64)
    potentials = (sinkhorn(scores).log() - scores).numpy()
    np.testing.assert_allclose(potentials - potentials[:1] - potentials[:, :1] + potentials[0, 0], 0, atol=1e-12)


def test_scores_far_apart_and_far_from_zero() -> None:
    scores = 1e4 + 30 * torch.randn(5, 5, dtype=torch.float64).cumsum(0)
    f, g = np.zeros(5), np.zeros(5)
    z = scores.numpy() / 10
    for _ in range(5000):
        f = -logsumexp(z + g, axis=1)
        g = -logsumexp(z + f[:, None], axis=0)
    f = -logsumexp(z + g, axis=1)
    plan = sinkhorn(scores, epsilon=10.0, max_iterations=5000)
    np.testing.assert_allclose(plan.numpy(), np.exp(z + f[:, None] + g), atol=1e-5)


# Masks


def test_hidden_keys_and_queries_have_no_part() -> None:
    scores = torch.randn(2, 5, 6)
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[3], mask[:, [0, 4]] = False, False
    spoilt = torch.where(mask, scores, torch.nan)
    plan = sinkhorn(spoilt, mask=mask)
    rows, keys = [0, 1, 2, 4], [1, 2, 3, 5]
    torch.testing.assert_close(plan[:, rows][:, :, keys], sinkhorn(scores[:, rows][:, :, keys]))
    assert bool((plan[:, ~mask] == 0).all())
    torch.testing.assert_close(sinkhorn(scores.masked_fill(~mask, -math.inf)), plan)


def test_a_window_has_a_plan_that_is_symmetric() -> None:
    distance = (torch.arange(9)[:, None] - torch.arange(9)).abs()
    plan = sinkhorn(torch.zeros(9, 9), mask=distance < 3)
    torch.testing.assert_close(plan, plan.T, rtol=0, atol=2e-5)
    torch.testing.assert_close(plan.sum(0), torch.ones(9), rtol=0, atol=1e-5)


@pytest.mark.parametrize("by_scores", [False, True], ids=["mask", "minus infinity"])
@pytest.mark.parametrize("padded", [False, True])
def test_causal_attention_is_refused_and_told_where_to_go(by_scores: bool, padded: bool) -> None:
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    if padded:
        causal[:, :2] = False
    scores = torch.randn(2, 6, 6)
    arguments = {"scores": scores.masked_fill(~causal, -math.inf)} if by_scores else {"scores": scores, "mask": causal}
    with pytest.raises(ValueError, match=r"the identity is the only plan.*`attention_marginal_gap`"):
        sinkhorn(**arguments)


def test_causal_attention_may_have_a_plan_with_other_marginals() -> None:
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    columns = torch.tensor([25 / 12, 13 / 12, 7 / 12, 1 / 4])  # what uniform causal attention gives
    plan = sinkhorn(torch.zeros(4, 4), mask=mask, column_marginal=columns)
    torch.testing.assert_close(plan, mask / mask.sum(-1, keepdim=True))


def test_masks_without_a_plan_are_told_by_not_converging() -> None:
    mask = torch.ones(6, 6, dtype=torch.bool).triu()
    with pytest.warns(RuntimeWarning, match=r"after 1000 iterations, not within 1e-06, for 1 of 1 matrices"):
        plan = sinkhorn(torch.zeros(6, 6), mask=mask)
    torch.testing.assert_close(plan.sum(-1), torch.ones(6))


def test_a_plan_that_is_found_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sinkhorn(3 * torch.randn(4, 20, 20), max_iterations=5000)
        sinkhorn(torch.randn(1, 1))


def test_marginals_whose_sums_are_alike_to_their_last_digits() -> None:
    scores = torch.randn(7, 5, dtype=torch.float64)
    rows, columns = torch.full((7,), 1 / 7), torch.full((5,), 0.2000002)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sinkhorn(scores, row_marginal=rows, column_marginal=columns, tolerance=1e-12)


# What goes in


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_precision(dtype: torch.dtype) -> None:
    scores = torch.randn(3, 8, 8).to(dtype)
    plan = sinkhorn(scores)
    assert plan.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(plan.double(), sinkhorn(scores.double()), rtol=1e-6, atol=1e-7)


def test_any_dimensions_may_lead() -> None:
    scores = torch.randn(2, 3, 4, 5, 6)
    plan = sinkhorn(scores)
    torch.testing.assert_close(plan[1, 2, 3], sinkhorn(scores[1, 2, 3]))
    assert sinkhorn(scores[:0]).shape == (0, 3, 4, 5, 6)


SQUARE = torch.randn(3, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sinkhorn(torch.ones(3, 3, dtype=torch.long)), r"`scores` must be floating.*int64 of shape \(3, 3\)"),
        (lambda: sinkhorn(torch.ones(3)), r"`scores` must be floating-point, of shape \(…, N, M\), got .* \(3,\)"),
        (lambda: sinkhorn(torch.ones(0, 3)), r"`scores` must have a row and a column at least, got .* \(0, 3\)"),
        (lambda: sinkhorn(SQUARE, 0.0), r"`epsilon` must be finite and above zero, got 0.0"),
        (lambda: sinkhorn(SQUARE, -1.0), r"`epsilon` must be .* got -1.0"),
        (lambda: sinkhorn(SQUARE, math.nan), r"`epsilon` must be .* got nan"),
        (lambda: sinkhorn(SQUARE, mask=torch.ones(3, 3)), r"`mask` must be boolean .* got torch.float32"),
        (lambda: sinkhorn(SQUARE, mask=torch.ones(2, 3) > 0), r"`mask` must .* broadcast to \(3, 3\), got .* \(2, 3\)"),
        (lambda: sinkhorn(SQUARE, max_iterations=-1), r"`max_iterations` must be zero or more, got -1"),
        (lambda: sinkhorn(SQUARE, tolerance=-1e-3), r"`tolerance` must be zero or more, got -0.001"),
        (lambda: sinkhorn(SQUARE * torch.nan), r"`scores` must be finite where a key is visible"),
        (lambda: sinkhorn(SQUARE + torch.inf), r"`scores` must be finite where a key is visible"),
        (
            lambda: sinkhorn(SQUARE, row_marginal=torch.ones(2)),
            r"`row_marginal` must .* broadcast to \(3,\), got .* \(2,\)",
        ),
        (lambda: sinkhorn(SQUARE, row_marginal=torch.ones(3).long()), r"`row_marginal` must be floating"),
        (
            lambda: sinkhorn(SQUARE, column_marginal=-torch.ones(3)),
            r"`column_marginal` must be finite and not negative",
        ),
        (
            lambda: sinkhorn(SQUARE, row_marginal=torch.ones(3), column_marginal=2 * torch.ones(3)),
            r"must have the same sum, got 3.0 and 6.0",
        ),
        (
            lambda: sinkhorn(SQUARE, mask=torch.eye(3)[[0, 1, 1]] > 0, column_marginal=torch.ones(3)),
            r"`column_marginal` must be zero where a key is seen by no query",
        ),
        (
            lambda: sinkhorn(SQUARE, mask=torch.tensor([[True], [True], [False]]), row_marginal=torch.ones(3)),
            r"`row_marginal` must be zero where a query sees no key",
        ),
    ],
)
def test_bad_input_is_named(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
