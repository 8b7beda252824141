"""Matrices that break eigenvalue routines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_attn.capture import AttentionCall, Visibility
from lightning_attn.statistics import measure, resolve, spectrum


def collapsed_heads(count: int, scale: float) -> tuple[AttentionCall, Tensor]:
    """Causal heads that look at one key each, mostly the same: single precision LAPACK gives up on one in thirty."""
    query = torch.randn(1, count, 64, 16)
    key = torch.randn(1, count, 1, 16) + 0.05 * torch.randn(1, count, 64, 16)
    call = AttentionCall("site", query, key, None, scale, Visibility(0), self_attention=True)
    return call, call.weights()[0]


@pytest.mark.parametrize("scale", [8.0, 25.0, 75.0])
def test_stable_rank_of_collapsed_heads(scale: float) -> None:
    call, weights = collapsed_heads(64, scale)
    singular = np.linalg.svd(weights.double().numpy(), compute_uv=False)
    expected = (singular**2).sum(-1) / singular[:, 0] ** 2
    found = measure(call, resolve("stable_rank"))["stable_rank"].or_nan.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize("scale", [0.1, 8.0, 75.0])
def test_the_way_round_lapack(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(matrix: Tensor) -> Tensor:
        raise torch.linalg.LinAlgError("did not converge")

    call, _ = collapsed_heads(16, scale)
    expected = measure(call, resolve("stable_rank"))["stable_rank"].or_nan
    monkeypatch.setattr(torch.linalg, "eigvalsh", fail)
    found = measure(call, resolve("stable_rank"))["stable_rank"].or_nan
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


def test_powers_of_matrices_without_a_leading_direction() -> None:
    matrices = torch.stack([torch.eye(5), torch.zeros(5, 5), 1e-12 * torch.eye(5), torch.ones(5, 5)])
    found = spectrum._leading_by_squaring(matrices)
    torch.testing.assert_close(found, torch.tensor([[1.0, 1.0], [0.0, 0.0], [1e-12, 1e-12], [5.0, 0.0]]))
