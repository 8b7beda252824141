"""What the patterns of different sequences have in common."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_attn import AttentionCall
from lightning_attn.capture import Visibility
from lightning_attn.statistics import measure, resolve
from lightning_attn.statistics.template import Diagonals

B, H, N = 8, 128, 16


def of_logits(logits_BHNN: Tensor, causal: bool = False, mask: Tensor | None = None) -> AttentionCall:
    sequences, heads, queries, keys = logits_BHNN.shape
    query, key = (torch.zeros(sequences, heads, n, 1) for n in (queries, keys))
    return AttentionCall("site", query, key, None, 1.0, Visibility(0 if causal else None, mask, logits_BHNN), True)


def share(name: str, call: AttentionCall) -> float:
    """Over all heads, which are so many draws of the same."""
    numerator, denominator = measure(call, resolve(name))[name]
    return float(numerator.sum() / denominator.sum())


def position(sequences: int = B) -> Tensor:
    return torch.randn(1, H, N, N).expand(sequences, -1, -1, -1)


def content(sequences: int = B) -> Tensor:
    return torch.randn(sequences, H, N, N)


def distance(sequences: int = B) -> Tensor:
    """Logits that depend on i - j alone."""
    tokens = torch.arange(N)
    return torch.randn(1, H, 2 * N)[..., tokens[:, None] - tokens + N].expand(sequences, -1, -1, -1)


everything_or_causal = pytest.mark.parametrize("causal", [False, True], ids=["everything", "causal"])


@everything_or_causal
@pytest.mark.parametrize("sequences", [2, 3, 8])
def test_position_alone(sequences: int, causal: bool) -> None:
    call = of_logits(position(sequences), causal)
    assert share("positional_share", call) == pytest.approx(1, abs=1e-6)


@everything_or_causal
@pytest.mark.parametrize("sequences", [2, 3, 8])
@pytest.mark.parametrize("name", ["positional_share", "toeplitz_share"])
def test_content_alone_has_no_share_however_few_the_sequences(name: str, sequences: int, causal: bool) -> None:
    """The share of the mean pattern, uncorrected, would be 1 over the number of sequences."""
    assert share(name, of_logits(content(sequences), causal)) == pytest.approx(0, abs=0.02)


def test_half_of_each() -> None:
    """Weights that are the mean of two patterns of the same strength have half of their squares in common; logits that
    are the sum of two have less, since the exponential mixes them."""
    weights = (position().softmax(-1) + content().softmax(-1)) / 2
    assert share("positional_share", of_logits(weights.log())) == pytest.approx(0.5, abs=0.02)
    logits = (position() + content()) / math.sqrt(2)
    assert share("positional_share", of_logits(logits)) == pytest.approx(0.4, abs=0.03)


@everything_or_causal
@pytest.mark.parametrize("lengths", [(16, 4), (16, 16, 9, 4, 3)])
def test_content_alone_has_no_share_whatever_the_lengths(lengths: tuple[int, ...], causal: bool) -> None:
    mask = torch.arange(N) < torch.tensor(lengths)[:, None, None, None]
    call = of_logits(content(len(lengths)), causal, mask)
    assert share("toeplitz_share", call) == pytest.approx(0, abs=0.03)


@everything_or_causal
@pytest.mark.parametrize("lengths", [(16, 16), (16, 4), (16, 9, 4, 3)])
@pytest.mark.parametrize("strength", [0.1, 1.0, 10.0])
def test_no_share_exceeds_one(lengths: tuple[int, ...], strength: float, causal: bool) -> None:
    """Also where the short sequences have the stronger pattern, which is where estimates without bias exceed it."""
    length = torch.tensor(lengths)[:, None, None, None]
    call = of_logits(distance(len(lengths)) * strength * 16 / length, causal, torch.arange(N) < length)
    numerator, denominator = measure(call, resolve("toeplitz_share"))["toeplitz_share"]
    assert (numerator <= denominator * (1 + 1e-6)).all()
    assert (denominator > 0).all()


@everything_or_causal
@pytest.mark.parametrize("block_bytes", [1, 30_000, 300_000])
def test_the_share_of_distance_in_blocks(block_bytes: int, causal: bool) -> None:
    mask = torch.arange(N) < torch.tensor([16, 12, 5])[:, None, None, None]
    call = of_logits(distance(3) + content(3), causal, mask)
    of_name = resolve("toeplitz_share")
    expected = measure(call, of_name)["toeplitz_share"].or_nan
    in_blocks = measure(call, of_name, block_bytes=block_bytes)["toeplitz_share"].or_nan
    torch.testing.assert_close(in_blocks, expected, rtol=1e-5, atol=1e-6)


@everything_or_causal
def test_distance_alone(causal: bool) -> None:
    """Rows are normalised, and causal rows over fewer keys, so that weights depend on a little more than distance."""
    tokens = torch.arange(N)
    sharp = 30.0 * (tokens == (tokens[:, None] - 1).clamp(min=0)).expand(B, H, -1, -1)
    assert share("toeplitz_share", of_logits(sharp, causal)) > 0.9
    assert share("toeplitz_share", of_logits(distance(), causal)) > 0.4
    assert share("toeplitz_share", of_logits(position(), causal)) < 0.15


def test_a_circulant_pattern_is_a_matter_of_distance() -> None:
    """Each row is the one before, moved by one, so that only the removal of the first key makes diagonals uneven."""
    tokens = torch.arange(N)
    logits = torch.randn(1, H, N)[..., (tokens[:, None] - tokens) % N].expand(B, -1, -1, -1)
    assert share("toeplitz_share", of_logits(logits)) > 0.95
    shuffled = logits[..., torch.randperm(N), :]
    assert share("toeplitz_share", of_logits(shuffled)) < 0.15


@pytest.mark.parametrize("sink", [3.0, 30.0, 60.0])
def test_a_sink_does_not_change_the_share_of_distance(sink: float) -> None:
    logits = distance() + content()
    with_sink = logits + sink * (torch.arange(N) == 0)
    expected = share("toeplitz_share", of_logits(logits))
    assert share("toeplitz_share", of_logits(with_sink)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["positional_share", "toeplitz_share"])
def test_absent_of_one_sequence_and_of_uniform_attention(name: str) -> None:
    for call in (of_logits(content(1)), of_logits(torch.zeros(B, H, N, N)), of_logits(torch.zeros(B, H, N, N), True)):
        assert measure(call, resolve(name))[name].denominator.tolist() == [0] * H


def test_rounding_is_no_pattern() -> None:
    """All tokens alike: products of equal numbers, which may differ in their last digit."""
    token = torch.randn(1, H, 1, 24).expand(B, -1, N, -1) * 3
    call = AttentionCall("site", token, token, None, 0.2, Visibility(0), True)
    assert measure(call, resolve("positional_share"))["positional_share"].denominator.tolist() == [0] * H


def test_only_sequences_that_have_the_row_are_compared() -> None:
    """The third sequence is padding, so that there are pairs of the first two alone."""
    call = of_logits(position(3), mask=torch.tensor([True, True, False]).view(3, 1, 1, 1))
    assert share("positional_share", call) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (4, 3), (3, 7), (5, 5)])
def test_sums_along_diagonals(shape: tuple[int, int]) -> None:
    rows, keys = shape
    memory = Diagonals((2, 3), 5, 7, torch.device("cpu"))
    matrix = torch.randn(2, 3, rows, keys)
    memory.matrix(rows, keys).copy_(matrix)
    expected = [matrix.diagonal(k, dim1=-2, dim2=-1).sum(-1) for k in range(-rows + 1, keys)]
    torch.testing.assert_close(memory.sums(rows, keys), torch.stack(expected, dim=-1))


@everything_or_causal
@pytest.mark.parametrize("name", ["positional_share", "positional_share_without_sink", "toeplitz_share"])
@pytest.mark.parametrize("spread", [1e-7, 3e-7, 1e-6, 3e-6, 1e-5])
def test_rounding_of_heads_that_are_almost_uniform_is_no_pattern(name: str, spread: float, causal: bool) -> None:
    query, key = math.sqrt(spread) * torch.randn(2, 3, H, N, 8)
    call = AttentionCall("site", query, key, None, 8**-0.5, Visibility(0 if causal else None), True)
    numerator_H, denominator_H = measure(call, resolve(name))[name]
    assert len(numerator_H) == H
    assert (numerator_H <= denominator_H).all()
    assert (numerator_H[denominator_H == 0] == 0).all()
    if spread < 1e-6:
        assert (denominator_H == 0).all()
    if spread > 3e-6:
        assert abs(numerator_H.sum() / denominator_H.sum()) < 0.05


@pytest.mark.parametrize(("sink_logit", "is_held"), [(0.0, True), (40.0, True), (52.0, False), (60.0, False)])
def test_a_sink_that_leaves_too_little_to_be_squared_leaves_nothing_to_compare(
    sink_logit: float, is_held: bool
) -> None:
    torch.manual_seed(0)
    call = replace(of_logits(torch.randn(4, 2, 32, 32)), sink_logits=torch.full((2,), sink_logit))
    weights_BHNN = call.weights().double()
    deviation_BHNN = weights_BHNN - weights_BHNN.mean(-1, keepdim=True)
    total_H = deviation_BHNN.square().sum((0, 2, 3))
    expected_H = (deviation_BHNN.sum(0).square().sum((1, 2)) - total_H) / 3 / total_H
    numerator_H, denominator_H = measure(call, resolve("positional_share"))["positional_share"]
    expected_H = expected_H if is_held else torch.full_like(expected_H, math.nan)
    torch.testing.assert_close(numerator_H / denominator_H, expected_H, rtol=1e-4, atol=1e-5, equal_nan=True)
