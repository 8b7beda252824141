"""What the model of critical attention scaling predicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_attn.functional.critical_scaling import (
    critical_gamma,
    estimated_gamma,
    predicted_self_weight,
    predicted_similarity,
)

RELATIVE_GAMMAS = (0.5, 0.8, 1.0, 1.2, 2.0)


@pytest.mark.parametrize(
    ("similarity", "tokens", "expected"),
    [
        (0.2, 1024, (0.99657, 0.86325, 0.50098, 0.28120, 0.20031)),
        (0.5, 1024, (0.99914, 0.96180, 0.80027, 0.60986, 0.50049)),
        (0.5, 10**6, (1.00000, 0.99649, 0.80000, 0.53055, 0.50000)),
    ],
)
def test_table_of_inner_products_after_the_layer(similarity: float, tokens: int, expected: tuple[float, ...]) -> None:
    gamma = torch.tensor(RELATIVE_GAMMAS, dtype=torch.float64) * critical_gamma(similarity)
    assert predicted_similarity(gamma, similarity, tokens).tolist() == pytest.approx(expected, abs=6e-6)


@pytest.mark.parametrize("similarity", [0.1, 0.2, 0.5, 0.9])
def test_limits_of_long_sequences(similarity: float) -> None:
    gamma = torch.tensor([0.5, 1, 2], dtype=torch.float64) * critical_gamma(similarity)
    limits = [1, 4 * similarity / (1 + 3 * similarity), similarity]
    assert predicted_similarity(gamma, similarity, 1e12).tolist() == pytest.approx(limits, abs=1e-4)
    assert predicted_self_weight(gamma, similarity, 1e12).tolist() == pytest.approx([0, 0.5, 1], abs=1e-5)


@pytest.mark.parametrize("tokens", [2, 3, 10, 1024])
@pytest.mark.parametrize("similarity", [0.0, 0.5, 0.99])
def test_self_weight_at_the_critical_scaling(similarity: float, tokens: int) -> None:
    weight = predicted_self_weight(critical_gamma(similarity), similarity, tokens)
    assert float(weight) == pytest.approx(tokens / (2 * tokens - 1), rel=1e-12)


@pytest.mark.parametrize("tokens", [2, 3, 7, 40])
@pytest.mark.parametrize("gamma", [-1.0, 0.0, 0.7, 1.9, 5.0])
@pytest.mark.parametrize("relative_similarity", [-0.9, 0.0, 0.3, 0.95])
def test_predictions_are_what_a_layer_does(gamma: float, tokens: int, relative_similarity: float) -> None:
    """Tokens with equal inner products, and a softmax over them."""
    similarity = relative_similarity if relative_similarity >= 0 else relative_similarity / (tokens - 1)
    states = np.linalg.cholesky(np.full((tokens, tokens), similarity) + (1 - similarity) * np.eye(tokens))
    weights = tokens ** (gamma * (states @ states.T))
    weights /= weights.sum(axis=1, keepdims=True)
    after = weights @ states
    after /= np.linalg.norm(after, axis=1, keepdims=True)
    self_weight = predicted_self_weight(gamma, similarity, tokens)
    assert float(self_weight) == pytest.approx(weights[0, 0], rel=1e-10)
    assert float(predicted_similarity(gamma, similarity, tokens)) == pytest.approx(after[0] @ after[1], rel=1e-8)


def test_critical_gamma() -> None:
    similarity = torch.tensor([-1.0, 0.0, 0.5, 0.8, 1.0, math.nan])
    torch.testing.assert_close(
        critical_gamma(similarity), torch.tensor([0.5, 1, 2, 5, math.inf, math.nan]), equal_nan=True
    )


def test_estimated_gamma_is_what_the_self_weight_was_made_of() -> None:
    gamma, similarity, n = torch.tensor([0.1, 1.0, 4.0], dtype=torch.float64), 0.3, 50
    weight = predicted_self_weight(gamma, similarity, n)
    scaling = (math.log(n - 1) + (weight / (1 - weight)).log()) / math.log(n)
    torch.testing.assert_close(estimated_gamma(scaling, similarity), gamma)


def test_tokens_that_are_all_one() -> None:
    assert float(predicted_self_weight(3.0, 1.0, 8)) == pytest.approx(1 / 8)
    assert float(predicted_similarity(3.0, 1.0, 8)) == 1
    assert math.isnan(estimated_gamma(0.0, 1.0))


@pytest.mark.parametrize(
    ("given", "computed"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2],
)
def test_shapes_and_precision(given: torch.dtype, computed: torch.dtype) -> None:
    gamma, similarity = torch.ones(3, 1, dtype=given), torch.full((2,), 0.5, dtype=given)
    found = predicted_similarity(gamma, similarity, 64)
    assert (found.shape, found.dtype) == ((3, 2), computed)
    assert estimated_gamma(gamma, similarity).dtype == computed


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"`similarity` must be a cosine between −1 and 1, got 1\.5\."):
        critical_gamma(1.5)
    with pytest.raises(ValueError, match=r"`similarity` must be a cosine between −1 and 1, got -2\."):
        estimated_gamma(1.0, torch.tensor([0.1, -2.0]))
    with pytest.raises(ValueError, match=r"`tokens` must be at least 2, got 1\."):
        predicted_self_weight(1.0, 0.5, 1)
    with pytest.raises(ValueError, match=r"`similarity` must be at least −1 / \(tokens − 1\), got -0\.5\."):
        predicted_similarity(1.0, -0.5, torch.tensor([3, 4]))
