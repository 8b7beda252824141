"""Ranks of attention matrices: closed forms, published values, and matrices that break what computes them."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import reference
import torch
from torch import Tensor

from lightning_attn import AttentionCall
from lightning_attn.capture import Visibility
from lightning_attn.statistics import effective_rank, measure, resolve
from lightning_attn.statistics.rows import row_pass

NAMES = ["stable_rank", "participation_ratio", "effective_rank", "centred_stable_rank"]
OF_WEIGHTS = NAMES[:3]
NAN = math.nan
N = 64


def of_logits(logits: Tensor, causal: bool = False, mask: Tensor | None = None, **fields: object) -> AttentionCall:
    """A call with these logits, (N, M). Not self-attention, so that no row is padding."""
    visibility = Visibility(0 if causal else None, None if mask is None else mask[None, None], logits[None, None])
    query, key = (torch.zeros(1, 1, tokens, 1) for tokens in logits.shape)
    return AttentionCall("site", query, key, None, 1.0, visibility, self_attention=False, **fields)


def given(weights: Tensor) -> AttentionCall:
    """A call with these weights, (N, M), whatever they sum to."""
    query, key = (torch.zeros(1, 1, tokens, 1) for tokens in weights.shape)
    return AttentionCall("site", query, key, None, 1.0, Visibility(), False, weight_matrix=weights[None, None])


def ranks(call: AttentionCall, **options: int | None) -> dict[str, float]:
    found = measure(call, resolve(NAMES), **options)
    return {name: float(found[name].or_nan.flatten()[0]) for name in NAMES}


def previous_token(n: int) -> Tensor:
    return torch.eye(n)[(torch.arange(n) - 1).clamp(min=0)]


# What is known.


@pytest.mark.parametrize(
    ("n", "effective", "stable"),
    [(16, 8.5837, 1.56939), (64, 21.0641, 1.85806), (128, 31.9968, 2.00494), (1024, 102.709, 2.45475)],
)
def test_uniform_causal_attention(n: int, effective: float, stable: float) -> None:
    """The products of rows i and j are 1 / max(i, j), whose squares add up to 2 H_n minus the sum of 1 / i²."""
    found = ranks(of_logits(torch.zeros(n, n), causal=True))
    assert found["effective_rank"] == pytest.approx(effective, rel=1e-5)
    assert found["stable_rank"] == pytest.approx(stable, rel=1e-4)
    harmonic = math.fsum(1 / i for i in range(1, n + 1))
    products = 2 * harmonic - math.fsum(1 / i**2 for i in range(1, n + 1))
    assert found["participation_ratio"] == pytest.approx(harmonic**2 / products, rel=1e-6)
    assert math.isnan(found["centred_stable_rank"])


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (torch.eye(N), [64, 64, 64, 63]),
        (torch.full((N, N), 1 / N), [1, 1, 1, NAN]),
        (torch.eye(N)[torch.zeros(N).long()], [1, 1, 1, 1]),
        # The first key is looked at twice: one singular value is √2, 62 are one.
        (previous_token(N), [32, 64**2 / 66, 62.926, None]),
        # Half of the queries look at one key, and half at another: U takes away the mean of the two.
        (torch.eye(N)[torch.arange(N) % 2], [2, 2, 2, None]),
        (torch.diag(torch.tensor([3.0, 1.0])), [10 / 9, 100 / 82, 1.7547653506, 1]),
    ],
    ids=["identity", "uniform", "all to the first", "previous token", "two keys", "three and one"],
)
def test_known_matrices(weights: Tensor, expected: list[float | None]) -> None:
    found = ranks(given(weights))
    for name, value in zip(NAMES, expected, strict=True):
        assert value is None or found[name] == pytest.approx(value, rel=1e-5, nan_ok=True), name


@pytest.mark.parametrize(("variance", "centred"), [(0.01, 256), (0.25, 255)])
def test_random_logits(variance: float, centred: float) -> None:
    """Nait Saada et al. 2025: one outlier above a bulk of radius 2 √((e^τ² − 1) / T); beside it T / 4 is left."""
    n = 1024
    call = of_logits(math.sqrt(variance) * torch.randn(n, n))
    found = ranks(call)
    assert found["stable_rank"] == pytest.approx(math.exp(variance), rel=2e-3)
    assert found["centred_stable_rank"] == pytest.approx(centred, rel=0.02)
    second = 1 - float(measure(call, resolve("spectral_gap"))["spectral_gap"].or_nan)
    assert second * math.sqrt(n) == pytest.approx(2 * math.sqrt(math.exp(variance) - 1), rel=0.02)


def test_each_rank_counts_more_directions_than_the_one_before() -> None:
    for size in (0.0, 0.1, 1.0, 5.0, 50.0):
        for causal in (False, True):
            found = ranks(of_logits(size * torch.randn(40, 40), causal))
            in_order = [1.0, *(found[name] for name in OF_WEIGHTS), 40.0]
            assert all(a <= b * (1 + 1e-6) for a, b in pairwise(in_order)), in_order
            assert not found["centred_stable_rank"] < 1


# Against the singular values of every kind of matrix.


def of_numpy(weights: Tensor, uniform: Tensor) -> dict[str, float]:
    values = np.linalg.svd(weights.double().numpy(), compute_uv=False)
    squares = values**2
    share = values[values > 0] / values.sum()
    centred = np.linalg.svd((weights.double() - uniform.double()).numpy(), compute_uv=False) ** 2
    return {
        "stable_rank": squares.sum() / squares[0],
        "participation_ratio": squares.sum() ** 2 / (squares**2).sum(),
        "effective_rank": float(np.exp(-(share * np.log(share)).sum())),
        "centred_stable_rank": centred.sum() / centred[0],
    }


def logits_of(kind: str, queries: int, keys: int) -> Tensor:
    noise = torch.randn(queries, keys)
    if kind == "low rank":
        return torch.randn(queries, 4) @ torch.randn(4, keys)
    name, size = kind.split()
    if name == "random":
        return float(size) * noise
    if name == "sink":
        return noise + float(size) * (torch.arange(keys) == 0)
    return noise / 2 + float(size) * torch.eye(queries, keys)


KINDS = ["random 0.01", "random 1", "random 5", "random 30", "low rank", "sink 3", "sink 12", "itself 4", "itself 12"]


@pytest.mark.parametrize("causal", [False, True], ids=["everything", "causal"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(100, 100), (300, 300), (40, 400), (400, 40), (150, 260)])
def test_every_kind_of_matrix(queries: int, keys: int, kind: str, causal: bool) -> None:
    logits = logits_of(kind, queries, keys)
    seen = torch.ones(queries, keys).tril().bool() if causal else torch.ones(queries, keys).bool()
    weights = torch.softmax(logits.double().masked_fill(~seen, -torch.inf), dim=-1)
    expected = of_numpy(weights, seen / seen.sum(-1, keepdim=True))
    found = ranks(of_logits(logits, causal))
    for name, relative in zip(NAMES, [1e-3, 1e-6, 1e-6, 1e-3], strict=True):
        assert found[name] == pytest.approx(expected[name], rel=relative), name


@pytest.mark.parametrize("scale", [8.0, 25.0, 75.0])
def test_collapsed_heads(scale: float) -> None:
    """Heads that look at one key each, mostly the same: single precision LAPACK gives up on one in thirty."""
    query = torch.randn(1, 32, 64, 16)
    key = torch.randn(1, 32, 1, 16) + 0.05 * torch.randn(1, 32, 64, 16)
    call = AttentionCall("site", query, key, None, scale, Visibility(0), self_attention=True)
    weights, uniform = call.weights()[0], torch.ones(64, 64).tril() / torch.arange(1, 65)[:, None]
    found = {name: sums.or_nan.tolist() for name, sums in measure(call, resolve(NAMES)).items()}
    for head in range(32):
        expected = of_numpy(weights[head], uniform)
        for name in NAMES:
            assert found[name][head] == pytest.approx(expected[name], rel=1e-3), name


def test_the_way_round_lapack(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(matrix: Tensor) -> Tensor:
        raise torch.linalg.LinAlgError("did not converge")

    for logits in (torch.randn(60, 60), 5 * torch.randn(60, 20)):
        expected = ranks(of_logits(logits))["effective_rank"]
        with monkeypatch.context() as patched:
            patched.setattr(torch.linalg, "svdvals", fail)
            assert ranks(of_logits(logits))["effective_rank"] == pytest.approx(expected, rel=1e-5)


# How large.


def test_the_effective_rank_is_absent_where_a_decomposition_would_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert effective_rank._DECOMPOSED_ENTRIES == 1024**2
    monkeypatch.setattr(effective_rank, "_DECOMPOSED_ENTRIES", 20 * 30)
    for queries, keys, is_known in ((20, 30, True), (30, 20, True), (21, 30, False), (601, 1, False)):
        found = ranks(of_logits(torch.randn(queries, keys)))
        assert math.isnan(found.pop("effective_rank")) is not is_known
        found.pop("centred_stable_rank")
        assert not any(map(math.isnan, found.values()))


@pytest.mark.parametrize("causal", [False, True], ids=["everything", "causal"])
def test_weights_that_are_too_large_to_be_written_down_give_the_same(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key = torch.randn(1, 6, 200, 8), torch.randn(1, 2, 200, 8)
    call = AttentionCall("site", query, key, None, 0.5, Visibility(0 if causal else None), self_attention=True)
    written = {name: sums.or_nan for name, sums in measure(call, resolve(NAMES)).items()}
    for limit in (4 * 200 * 200, 0):  # a single head of a group, and none
        monkeypatch.setattr(row_pass, "WRITTEN_BYTES", limit)
        for name, sums in measure(call, resolve(NAMES), block_bytes=2**15).items():
            torch.testing.assert_close(sums.or_nan, written[name], rtol=1e-4, atol=0)


# Rows that do not sum to one, and heads that are next to uniform.


@pytest.mark.parametrize("sink", [-5.0, 0.0, 5.0])
@pytest.mark.parametrize("causal", [False, True], ids=["everything", "causal"])
def test_uniform_weights_beside_a_learned_sink_are_uniform(causal: bool, sink: float) -> None:
    logits = torch.zeros(20, 20)
    found = ranks(of_logits(logits, causal, sink_logits=torch.tensor([sink])))
    assert math.isnan(found.pop("centred_stable_rank"))
    assert not any(map(math.isnan, found.values()))


@pytest.mark.parametrize("scale", [1e-3, 0.5, 1.0, 7.0])
def test_the_scale_of_given_weights_has_no_effect(scale: float) -> None:
    weights = torch.softmax(torch.randn(30, 30), dim=-1)
    weights[torch.rand(30, 30) < 0.3] = 0
    expected = of_numpy(weights, weights.sum(-1, keepdim=True).expand(30, 30) / 30)
    assert ranks(given(scale * weights)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("sink", [-10, 0, 10, 40, 60, 100, 200])
def test_a_learned_sink_may_take_nearly_everything(sink: float) -> None:
    """Weights that float32 does not square, or not even hold: a rank is right or absent."""
    call = of_logits(torch.randn(12, 12), sink_logits=torch.tensor([float(sink)]))
    found = ranks(call)
    for name in NAMES:
        (expected,) = reference.head_values(name, reference.heads(call))
        assert math.isnan(found[name]) or found[name] == pytest.approx(expected, rel=1e-3), name
    if sink <= 60:
        assert not math.isnan(found["effective_rank"]) and not math.isnan(found["participation_ratio"])
    if sink <= 10:
        assert not math.isnan(found["centred_stable_rank"])


@pytest.mark.parametrize(("size", "is_uniform"), [(0, True), (1e-7, True), (1e-6, True), (1e-3, False), (0.1, False)])
def test_what_rounding_leaves_of_uniform_attention_is_no_direction(size: float, is_uniform: bool) -> None:
    logits = size * torch.randn(200, 200)
    found = ranks(of_logits(logits))["centred_stable_rank"]
    if is_uniform:
        assert math.isnan(found)
    else:
        weights = torch.softmax(logits.double(), dim=-1)
        expected = of_numpy(weights, torch.full((200, 200), 1 / 200))["centred_stable_rank"]
        assert found == pytest.approx(expected, rel=1e-3)


def test_a_window_of_uniform_weights_has_no_other_direction() -> None:
    window = torch.ones(N, N).tril().triu(-3).bool()
    assert math.isnan(ranks(of_logits(torch.zeros(N, N), mask=window))["centred_stable_rank"])


def test_rows_that_are_absent_are_in_no_rank() -> None:
    """Their logits are not finite, or they see nothing."""
    logits, mask = torch.randn(30, 30), torch.ones(30, 30).bool()
    logits[3, 5], logits[7, 7] = NAN, torch.inf
    mask[11] = False
    present = [row for row in range(30) if row not in (3, 7, 11)]
    expected = ranks(of_logits(logits[present]))
    assert ranks(of_logits(logits, mask=mask)) == pytest.approx(expected, rel=1e-5)


def test_sequences_are_averaged_as_ranks() -> None:
    query, key = torch.randn(3, 4, 25, 8), torch.randn(3, 2, 25, 8)
    call = AttentionCall("site", query, key, None, 0.7, Visibility(0), self_attention=True)
    together = measure(call, resolve(NAMES))
    alone = [measure(call.select(slice(b, b + 1)), resolve(NAMES)) for b in range(3)]
    for name in NAMES:
        mean = torch.stack([found[name].or_nan for found in alone]).mean(0)
        torch.testing.assert_close(together[name].or_nan, mean, rtol=1e-5, atol=0)
