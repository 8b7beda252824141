"""The rollout of attention, and how much of the first token is in it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_attn import AttentionCall, record
from lightning_attn.capture import Visibility
from lightning_attn.functional.rollout import (
    attention_rollout,
    rollout_first_token_mass,
    uniform_rollout_first_token_mass,
)

#: The first column of powers of uniform causal attention over five tokens.
FIRST_COLUMN = {1: (1, 0.5, 1 / 3, 0.25, 0.2), 4: (1, 0.9375, 0.887346, 0.845631, 0.810049)}


def uniform_causal(n: int) -> Tensor:
    return (torch.ones(n, n).tril().double() / torch.arange(1, n + 1)[:, None])[None]


def random_layers(*shape: int, count: int = 4) -> list[Tensor]:
    return [(2 * torch.randn(*shape, dtype=torch.float64)).softmax(-1) for _ in range(count)]


def by_definition(layers: list[Tensor], residual: bool) -> list[Tensor]:
    """The rollout of the first t layers, for each t: (B, N, N) in float64."""
    found: list[Tensor] = []
    for weights in layers:
        matrix = weights.double().mean(1) if weights.dim() == 4 else weights.double()
        identity = torch.eye(matrix.shape[-1]).double()
        matrix = 0.5 * matrix + 0.5 * identity if residual else matrix
        found.append(matrix @ (found[-1] if found else identity))
    return found


@pytest.mark.parametrize("depth", FIRST_COLUMN)
def test_uniform_causal_layers(depth: int) -> None:
    layers = [uniform_causal(5)] * depth
    column = attention_rollout(layers)[0, :, 0].tolist()
    assert column == pytest.approx(FIRST_COLUMN[depth], abs=5e-7)
    assert column[1] == pytest.approx(1 - 2**-depth, rel=1e-12)
    assert rollout_first_token_mass(layers)[-1] == pytest.approx(sum(column) / 5, rel=1e-12)


def test_the_eigenvalues_of_uniform_causal_attention_and_of_its_half() -> None:
    plain, half = (attention_rollout([uniform_causal(5)], residual=residual)[0] for residual in (False, True))
    assert torch.linalg.eigvals(plain).real.sort().values.tolist() == pytest.approx([1 / 5, 1 / 4, 1 / 3, 1 / 2, 1])
    assert torch.linalg.eigvals(half).real.sort().values.tolist() == pytest.approx([0.6, 0.625, 2 / 3, 0.75, 1])


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 7, 7), (2, 7, 7)])
def test_dense_layers_equal_the_definition(shape: tuple[int, ...], residual: bool) -> None:
    layers = random_layers(*shape)
    expected = by_definition(layers, residual)
    torch.testing.assert_close(attention_rollout(layers, residual=residual), expected[-1])
    masses = torch.stack([rollout[..., 0].mean() for rollout in expected])
    torch.testing.assert_close(rollout_first_token_mass(layers, residual=residual), masses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    layers = [weights.to(dtype) for weights in random_layers(2, 3, 7, 7)]
    rollout, masses = attention_rollout(layers), rollout_first_token_mass(layers)
    assert rollout.dtype == masses.dtype == torch.float32
    expected = by_definition(layers, residual=False)
    torch.testing.assert_close(rollout.double(), expected[-1], rtol=1e-5, atol=1e-6)
    assert masses[-1] == pytest.approx(float(expected[-1][..., 0].mean()), rel=1e-5)


def calls(visibility: Visibility, count: int = 3, sequences: int = 2, n: int = 9, **fields: Any) -> list[AttentionCall]:
    """Layers of four heads in two groups."""
    return [
        AttentionCall(
            "site",
            torch.randn(sequences, 4, n, 8),
            torch.randn(sequences, 2, n, 8),
            None,
            0.7,
            visibility,
            True,
            **fields,
        )
        for _ in range(count)
    ]


def left_padding(n: int = 9) -> Tensor:
    return (torch.arange(n) >= torch.tensor([0, 3])[:, None])[:, None, None]


VISIBILITY = {
    "everything": Visibility(),
    "causal": Visibility(0),
    "left padding, causal": Visibility(0, mask=left_padding()),
    "right padding": Visibility(mask=left_padding().flip(-1)),
    "mask of heads": Visibility(mask=torch.rand(1, 4, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.7),
}


def visible(call: AttentionCall) -> Tensor:
    return call.logits()[1]


def expected_of(matrices: list[Tensor], masks: list[Tensor], residual: bool) -> list[float]:
    """Of dense weights and what is visible, (B, H, N, N), token by token."""
    found: list[list[float]] = []
    for sequence in range(len(matrices[0])):
        seen = masks[0][sequence].any(0).any(0)
        share = torch.zeros(len(seen)).double()
        share[int(seen.int().argmax())] = 1
        of_layers = []
        for weights, mask in zip(matrices, masks, strict=True):
            image = weights[sequence].double().mean(0) @ share
            share = 0.5 * image + 0.5 * share if residual else image
            tokens = [i for i in range(len(share)) if mask[sequence][:, i].any() and mask[sequence][:, :, i].any()]
            of_layers.append(float(share[tokens].mean()))
        found.append(of_layers)
    return torch.tensor(found).mean(0).tolist()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", VISIBILITY)
def test_calls_and_their_weights_give_the_same(name: str, residual: bool) -> None:
    layers = calls(VISIBILITY[name])
    matrices, masks = [call.weights() for call in layers], [visible(call) for call in layers]
    expected = expected_of(matrices, masks, residual)
    assert rollout_first_token_mass(layers, residual=residual).tolist() == pytest.approx(expected, rel=1e-5)
    of_weights = rollout_first_token_mass(matrices, mask=masks[0], residual=residual)
    assert of_weights.tolist() == pytest.approx(expected, rel=1e-5)
    mixed = rollout_first_token_mass([layers[0], *matrices[1:]], mask=masks[0], residual=residual)
    assert mixed.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", VISIBILITY)
def test_uniform_attention_under_the_same_visibility(name: str, residual: bool) -> None:
    layers = calls(VISIBILITY[name])
    masks = [visible(call) for call in layers]
    uniform = [mask / mask.sum(-1, keepdim=True).clamp(min=1) for mask in masks]
    expected = expected_of(uniform, masks, residual)
    found = uniform_rollout_first_token_mass(layers, residual=residual)
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    weights = [call.weights() for call in layers]
    of_weights = uniform_rollout_first_token_mass(weights, mask=masks[0], residual=residual)
    assert of_weights.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_uniform_model_is_its_own_baseline() -> None:
    layers = [replace(call, query=torch.zeros_like(call.query)) for call in calls(VISIBILITY["left padding, causal"])]
    assert rollout_first_token_mass(layers).tolist() == pytest.approx(uniform_rollout_first_token_mass(layers).tolist())


def test_left_padding_shifts_nothing() -> None:
    """A sequence has the value that it has without its padding."""
    n, padding = 9, 4
    layers = calls(Visibility(0), sequences=1, n=n)
    real = torch.arange(n + padding) >= padding
    padded = [
        replace(
            call,
            query=torch.cat([torch.randn(1, 4, padding, 8), call.query], dim=2),
            key=torch.cat([torch.randn(1, 2, padding, 8), call.key], dim=2),
            visibility=Visibility(0, mask=real[None, None, None]),
        )
        for call in layers
    ]
    for function in (rollout_first_token_mass, uniform_rollout_first_token_mass):
        assert function(padded).tolist() == pytest.approx(function(layers).tolist(), rel=1e-6)
    weights = [call.weights() for call in padded]
    assert rollout_first_token_mass(weights).tolist() == pytest.approx(rollout_first_token_mass(layers).tolist())


@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_window_slows_the_first_token_down(width: int) -> None:
    """It reaches the last of n tokens after (n - 1) / (w - 1) layers, and no sooner."""
    n = 15
    mask = torch.ones(n, n).tril().triu(1 - width).bool()
    weights = (mask / mask.sum(-1, keepdim=True))[None]
    needed = math.ceil((n - 1) / (width - 1))
    assert attention_rollout([weights] * (needed - 1))[0, -1, 0] == 0
    assert attention_rollout([weights] * needed)[0, -1, 0] > 0
    masses = rollout_first_token_mass([weights] * 200)
    assert (masses.diff() >= -1e-6).all()
    assert masses[-1] > 0.99 or width == 2  # of which half of every token is left by each layer


def test_the_layers_of_a_model() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    with record(model) as recording:
        model(torch.randn(2, 6, 16), mask=nn.Transformer.generate_square_subsequent_mask(6), is_causal=True)
    masses = rollout_first_token_mass(recording.calls)
    expected = by_definition([call.weights() for call in recording.calls], residual=False)
    assert masses.tolist() == pytest.approx([float(rollout[..., 0].mean()) for rollout in expected], rel=1e-5)
    assert masses.tolist() == sorted(masses.tolist())
    assert not masses.requires_grad


class _LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() // 4 for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_calls_are_streamed() -> None:
    n = 4096
    query, key = torch.randn(2, 1, 1, n, 8)
    call = AttentionCall("site", query, key, None, 0.3, Visibility(0, left_padding(n)[1:]), True)
    for function in (rollout_first_token_mass, uniform_rollout_first_token_mass):
        with _LargestTensor() as largest:
            function([call])
        assert largest.elements <= 2**20 < n * n


def test_a_row_that_is_not_finite_is_left_out() -> None:
    layers = calls(Visibility(0), count=1)
    layers[0].query[0, :, 5] = math.nan
    expected = layers[0].weights()[..., 0].mean(1)
    means = [float(expected[0, torch.arange(9) != 5].mean()), float(expected[1].mean())]
    assert rollout_first_token_mass(layers).tolist() == pytest.approx([sum(means) / 2], rel=1e-6)


def test_without_tokens_there_is_no_value() -> None:
    hidden = Visibility(mask=torch.zeros(1, 1, 9, 9).bool())
    assert rollout_first_token_mass(calls(hidden)).isnan().all()
    assert rollout_first_token_mass(calls(Visibility(), sequences=0)).isnan().all()
    assert rollout_first_token_mass([torch.zeros(2, 3, 0, 0)]).isnan().all()


@pytest.mark.parametrize("function", [attention_rollout, rollout_first_token_mass, uniform_rollout_first_token_mass])
@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "at least one layer"),
        (None, "at least one layer, got None"),
        (torch.zeros(1, 3, 3), "must be a sequence"),
        ([torch.zeros(2, 3, 4)], r"`layers\[0\]` must be .* \(B, H, N, N\) or \(B, N, N\), got .* \(2, 3, 4\)"),
        ([torch.zeros(3, 3)], r"`layers\[0\]` must be"),
        ([torch.zeros(1, 3, 3).long()], "got torch.int64"),
        ([torch.zeros(1, 3, 3), torch.zeros(1, 4, 4)], r"must agree .* got \(1, 3\) in the first and \(1, 4\)"),
    ],
)
def test_layers_that_fit_nothing_are_refused(function: Any, layers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(layers)


def test_calls_and_masks_that_fit_nothing_are_refused() -> None:
    crossed = replace(calls(Visibility())[0], self_attention=False)
    with pytest.raises(ValueError, match=r"`layers\[0\]` must be self-attention, got AttentionCall"):
        rollout_first_token_mass([crossed])
    with pytest.raises(ValueError, match=r"must be weights, got AttentionCall.*`rollout_first_token_mass` takes"):
        attention_rollout(calls(Visibility()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`mask` must be boolean"):
        rollout_first_token_mass([torch.zeros(1, 3, 3)], mask=torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"`mask` must .* broadcast to \(1, 1, 3, 3\), got .* \(4, 4\)"):
        rollout_first_token_mass([torch.zeros(1, 3, 3)], mask=torch.zeros(4, 4).bool())
