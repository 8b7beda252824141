"""Leading singular values: accuracy, what they share, and matrices that break eigenvalue routines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_attn.capture import AttentionCall, Visibility
from lightning_attn.statistics import measure, resolve
from lightning_attn.statistics.algebra import spectrum
from lightning_attn.statistics.rows import row_pass


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


def of_weights(weights: Tensor) -> AttentionCall:
    n, m = weights.shape
    query, key = torch.zeros(1, 1, n, 1), torch.zeros(1, 1, m, 1)
    visibility = Visibility(mask=(weights > 0)[None, None], bias=weights.clamp(min=1e-37).log()[None, None])
    return AttentionCall("site", query, key, None, 1.0, visibility, self_attention=False)


def logits_of(kind: str, n: int) -> Tensor:
    tokens = torch.arange(n)
    noise = torch.randn(n, n)
    if kind.startswith("random"):
        return float(kind.split()[1]) * noise
    if kind.startswith("low rank"):
        return 3 * torch.randn(n, 4) @ torch.randn(4, n) / 2
    if kind.startswith("previous"):
        return noise / 2 + float(kind.split()[1]) * (tokens == (tokens[:, None] - 1).clamp(min=0))
    if kind.startswith("itself"):
        return noise / 2 + float(kind.split()[1]) * torch.eye(n)
    if kind.startswith("sink"):
        return noise + float(kind.split()[1]) * (tokens == 0)
    distance = (tokens[:, None] - tokens).abs()
    if kind.startswith("window"):
        return torch.where(distance < int(kind.split()[1]), 0.0, -torch.inf)
    document = torch.randint(int(kind.split()[1]), (n,)).sort().values
    return torch.where(document[:, None] == document, noise, -torch.inf)


GAPS = ["random 0", "random 0.01", "random 1", "random 5", "random 30", "low rank", "previous 6", "previous 14"]
GAPS += ["itself 8", "itself 14", "sink 3", "sink 10", "window 2", "window 3", "window 16", "documents 40"]


@pytest.mark.parametrize("causal", [False, True], ids=["everything", "causal"])
@pytest.mark.parametrize("kind", GAPS)
@pytest.mark.parametrize("n", [300, 700])
def test_gap_and_stable_rank_of_every_kind(n: int, kind: str, causal: bool) -> None:
    logits = logits_of(kind, n)
    weights = torch.softmax(logits.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf) if causal else logits, -1)
    singular = np.linalg.svd(weights.double().numpy(), compute_uv=False)
    found = measure(of_weights(weights), resolve(["stable_rank", "spectral_gap"]))
    assert found["spectral_gap"].or_nan.tolist() == [pytest.approx(1 - singular[1] / singular[0], abs=1e-3)]
    assert found["stable_rank"].or_nan.tolist() == [pytest.approx((singular**2).sum() / singular[0] ** 2, rel=1e-3)]


def test_both_statistics_share_one_iteration_and_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    iterations, blocks = [], []
    krylov, block = spectrum._krylov, row_pass.RowPass._block
    monkeypatch.setattr(spectrum, "_krylov", lambda of: iterations.append(of) or krylov(of))
    monkeypatch.setattr(
        row_pass.RowPass, "_block", lambda self, start, *rest: blocks.append(start) or block(self, start, *rest)
    )
    call = AttentionCall("site", *torch.randn(2, 1, 1, 256, 8), None, 1.0, Visibility(), self_attention=True)
    measure(call, resolve(["stable_rank", "spectral_gap", "consensus_rate"]))
    assert len(iterations) == 1
    assert blocks == [0, 128]


@pytest.mark.parametrize("causal", [False, True], ids=["everything", "causal"])
def test_weights_that_are_too_large_to_be_written_down_give_the_same(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key = torch.randn(1, 6, 200, 8), torch.randn(1, 2, 200, 8)
    call = AttentionCall("site", query, key, None, 0.5, Visibility(0 if causal else None), self_attention=True)
    names = resolve(["stable_rank", "spectral_gap", "consensus_rate"])
    written = {name: sums.or_nan for name, sums in measure(call, names).items()}
    for limit in (4 * 200 * 200, 0):  # a single head of a group, and none
        monkeypatch.setattr(row_pass, "WRITTEN_BYTES", limit)
        for name, sums in measure(call, names, block_bytes=2**15).items():
            torch.testing.assert_close(
                sums.or_nan, written[name], rtol=1e-3, atol=1e-3 if name == "consensus_rate" else 1e-4
            )
