"""Weights of the model in the same einsum as queries and keys, or as weights and values, hide no attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_attn import AttentionWarning, record

HEADS, WIDTH, TOKENS = 3, 4, 6
CHANNELS = HEADS * WIDTH


class Layers(nn.Module):
    """Has weights by themselves, and a function attend with them."""

    def __init__(self, attend: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.linear = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.output = nn.Parameter(torch.randn(HEADS, WIDTH, CHANNELS))
        self.both = nn.Parameter(torch.randn(CHANNELS, CHANNELS))
        self.both_of_heads = nn.Parameter(torch.randn(HEADS, CHANNELS, CHANNELS))
        self.temperature = nn.Parameter(torch.rand(HEADS) + 1)
        self.of_keys = nn.Parameter(torch.rand(TOKENS))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attend(self, tokens)

    def heads(self, tokens: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in self.linear(tokens).chunk(3, -1)]


def weights_of_heads(layers: Layers, tokens: Tensor) -> Tensor:
    query, key, _ = layers.heads(tokens)
    return (query @ key.mT).softmax(-1)


def projected_values(layers: Layers, tokens: Tensor) -> Tensor:
    value = layers.heads(tokens)[2]
    return torch.einsum("bhij,bhjd,hde->bie", weights_of_heads(layers, tokens), value, layers.output)


def tokens_as_values(layers: Layers, tokens: Tensor) -> Tensor:
    return torch.einsum("bhij,bje,hed->bid", weights_of_heads(layers, tokens), tokens, layers.both_of_heads)


def bilinear(layers: Layers, tokens: Tensor) -> Tensor:
    return torch.einsum("bid,de,bje->bij", tokens, layers.both, tokens).softmax(-1) @ tokens


def bilinear_with_heads(layers: Layers, tokens: Tensor) -> Tensor:
    weights = torch.einsum("bid,hde,bje->bhij", tokens, layers.both_of_heads, tokens).softmax(-1)
    return torch.einsum("bhij,bjd->bid", weights, tokens)


def temperature(layers: Layers, tokens: Tensor) -> Tensor:
    query, key, value = layers.heads(tokens)
    return torch.einsum("bhid,bhjd,h->bhij", query, key, layers.temperature).softmax(-1) @ value


def expected_of(layers: Layers, tokens: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    """The weights, in float64."""
    tokens = tokens.double()
    if attend is bilinear:
        return (tokens @ layers.both.double() @ tokens.mT).softmax(-1)[:, None]
    if attend is bilinear_with_heads:
        return (tokens[:, None] @ layers.both_of_heads.double() @ tokens[:, None].mT).softmax(-1)
    projected = tokens @ layers.linear.weight.double().T + layers.linear.bias.double()
    query, key, _ = (part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in projected.chunk(3, -1))
    factor = layers.temperature.double()[:, None, None] if attend is temperature else 1
    return (query @ key.mT * factor).softmax(-1)


@pytest.mark.parametrize(
    "attend",
    [projected_values, tokens_as_values, bilinear, bilinear_with_heads, temperature],
    ids=lambda attend: attend.__name__,
)
def test_weights_of_the_model_in_one_einsum(attend: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, tokens = Layers(attend), torch.randn(2, TOKENS, CHANNELS)
    with record(model) as recording:
        model(tokens)
    (call,) = recording.calls
    expected = expected_of(model, tokens, attend)
    torch.testing.assert_close(call.weights().double(), expected, rtol=1e-4, atol=1e-5)


def gated_values(layers: Layers, tokens: Tensor) -> Tensor:
    query, _, value = layers.heads(tokens)
    return torch.einsum("bhij,bhjd,bhi->bhid", weights_of_heads(layers, tokens), value, query[..., 0])


def gated_logits(layers: Layers, tokens: Tensor) -> Tensor:
    query, key, value = layers.heads(tokens)
    return torch.einsum("bhid,bhjd,bhj->bhij", query, key, query[..., 0]).softmax(-1) @ value


def weighted_keys(layers: Layers, tokens: Tensor) -> Tensor:
    value = layers.heads(tokens)[2]
    return torch.einsum("bhij,bhjd,j->bhid", weights_of_heads(layers, tokens), value, layers.of_keys)


@pytest.mark.parametrize("attend", [gated_values, gated_logits, weighted_keys], ids=lambda attend: attend.__name__)
def test_a_third_tensor_is_refused(attend: Callable[..., Tensor]) -> None:
    model = Layers(attend)
    with (
        pytest.warns(AttentionWarning, match=r"with a third tensor\. As two products it is seen"),
        record(model) as recording,
    ):
        model(torch.randn(2, TOKENS, CHANNELS))
    assert not recording.calls


def test_an_einsum_of_several_that_is_no_attention_is_none() -> None:
    def attend(layers: Layers, tokens: Tensor) -> Tensor:
        return torch.einsum("bid,de,bje->bij", tokens, layers.both, tokens) @ tokens

    model = Layers(attend)
    with pytest.warns(AttentionWarning, match="No attention was seen"), record(model) as recording:
        model(torch.randn(2, TOKENS, CHANNELS))
    assert not recording.calls
