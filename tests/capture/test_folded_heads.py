"""Heads are told from sequences in whatever order both were put into one axis, or stacked in front."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn import AttentionWarning, record

HEADS, WIDTH, TOKENS = 4, 3, 7
CHANNELS = HEADS * WIDTH
#: As many sequences as heads, or as tokens, and a single one, so that no size tells them apart.
SEQUENCES = (1, 3, HEADS, TOKENS)

Parts = tuple[Tensor, Tensor, Tensor]


class Layers(nn.Module):
    """Has the layers that attention needs, sharp ones, so that heads differ."""

    def __init__(self, fold: Callable[[Layers, Tensor], Parts], attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.fold, self.attention = fold, attention
        self.projection = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.of_heads = nn.ModuleList(nn.Linear(CHANNELS, 3 * WIDTH) for _ in range(HEADS))
        self.seeds = nn.Parameter(torch.randn(1, 2, CHANNELS))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter *= 3

    def forward(self, tokens: Tensor | dict[str, Tensor]) -> Tensor:
        return self.attention(*self.fold(self, tokens["tokens"] if isinstance(tokens, dict) else tokens))


def written(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1)).softmax(-1) @ value


def written_with_bmm(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.baddbmm(query.new_zeros(()), query, key.mT, beta=0) if query.dim() == 3 else query @ key.mT
    return torch.matmul(functional.softmax(scores, dim=-1), value)


def written_with_einsum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("...id,...jd->...ij", query, key).softmax(-1)
    return torch.einsum("...ij,...jd->...id", weights, value)


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, scale=1.0)


ATTENTIONS = (written, written_with_bmm, written_with_einsum, fused)


def of_layer(layers: Layers, tokens: Tensor) -> list[Tensor]:
    return list(layers.projection(tokens).chunk(3, -1))


def truth(layers: Layers, tokens: Tensor, heads_of: str = "channels") -> Tensor:
    """The weights (B, H, N, N), in float64."""
    tokens = tokens.double()
    if heads_of == "channels":
        weight, bias = layers.projection.weight.double(), layers.projection.bias.double()
        query, key, _ = (tokens @ weight.T + bias).chunk(3, -1)
        query, key = (part.unflatten(-1, (HEADS, WIDTH)) for part in (query, key))
    else:
        parts = [tokens @ layer.weight.double().T + layer.bias.double() for layer in layers.of_heads]
        query, key = (torch.stack([part.chunk(3, -1)[i] for part in parts], -2) for i in (0, 1))
    return torch.einsum("bihd,bjhd->bhij", query, key).softmax(-1)


def split(part: Tensor) -> Tensor:
    return part.unflatten(-1, (HEADS, WIDTH))


# (H B, N, D)


def cat_of_split(layers: Layers, tokens: Tensor) -> Parts:
    """As the Set Transformer does."""
    query, key, value = (torch.cat(part.split(WIDTH, 2), 0) for part in of_layer(layers, tokens))
    return query, key, value


def cat_of_chunks(layers: Layers, tokens: Tensor) -> Parts:
    query, key, value = (torch.cat(part.chunk(HEADS, -1), dim=0) for part in of_layer(layers, tokens))
    return query, key, value


def permuted_and_copied(layers: Layers, tokens: Tensor) -> Parts:
    query, key, value = (
        split(part).permute(2, 0, 1, 3).reshape(-1, tokens.shape[1], WIDTH) for part in of_layer(layers, tokens)
    )
    return query, key, value


def stacked_and_flattened(layers: Layers, tokens: Tensor) -> Parts:
    query, key, value = (torch.stack(part.split(WIDTH, -1)).flatten(0, 1) for part in of_layer(layers, tokens))
    return query, key, value


def scaled_after(layers: Layers, tokens: Tensor) -> Parts:
    query, key, value = cat_of_split(layers, tokens)
    return (query * 2 * 0.5).contiguous(), key + 0, functional.dropout(value, 0.0)


# (B H, N, D)


def sequences_outside(layers: Layers, tokens: Tensor) -> Parts:
    query, key, value = (split(part).transpose(1, 2).flatten(0, 1) for part in of_layer(layers, tokens))
    return query, key, value


def tokens_first(layers: Layers, tokens: Tensor) -> Parts:
    """As fairseq does: (N, B, L) to (B H, N, D)."""
    query, key, value = (
        part.contiguous().view(tokens.shape[1], -1, WIDTH).transpose(0, 1)
        for part in of_layer(layers, tokens.transpose(0, 1))
    )
    return query, key, value


# (H, B, N, D)


def stacked(layers: Layers, tokens: Tensor) -> Parts:
    query, key, value = (torch.stack(part.split(WIDTH, -1), 0) for part in of_layer(layers, tokens))
    return query, key, value


def permuted(layers: Layers, tokens: Tensor) -> Parts:
    query, key, value = (split(part).permute(2, 0, 1, 3) for part in of_layer(layers, tokens))
    return query, key, value


def a_layer_for_each(layers: Layers, tokens: Tensor) -> Parts:
    query, key, value = torch.stack([layer(tokens) for layer in layers.of_heads]).chunk(3, -1)
    return query, key, value


FOLDS = (
    *(cat_of_split, cat_of_chunks, permuted_and_copied, stacked_and_flattened, scaled_after),
    *(sequences_outside, tokens_first, stacked, permuted, a_layer_for_each),
)


def seen_of(model: nn.Module, tokens: Tensor | dict[str, Tensor]) -> Tensor:
    with record(model) as recording:
        model(tokens)
    (call,) = recording.calls
    return call.weights().double()


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("attention", ATTENTIONS, ids=lambda attention: attention.__name__)
@pytest.mark.parametrize("fold", FOLDS, ids=lambda fold: fold.__name__)
def test_heads_are_told_from_sequences(
    fold: Callable[..., Parts], attention: Callable[..., Tensor], sequences: int
) -> None:
    torch.manual_seed(0)
    model, tokens = Layers(fold, attention), torch.randn(sequences, TOKENS, CHANNELS)
    expected = truth(model, tokens, "layers" if fold is a_layer_for_each else "channels")
    torch.testing.assert_close(seen_of(model, tokens), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen_of(model, {"tokens": tokens}), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", [written, fused], ids=lambda attention: attention.__name__)
@pytest.mark.parametrize("fold", [cat_of_split, stacked, tokens_first], ids=lambda fold: fold.__name__)
def test_values_and_the_first_sequences_are_those_of_the_heads(
    fold: Callable[..., Parts], attention: Callable[..., Tensor]
) -> None:
    torch.manual_seed(0)
    model, tokens = Layers(fold, attention), torch.randn(3, TOKENS, CHANNELS)
    with record(model, max_sequences=2) as recording:
        model(tokens)
    (call,) = recording.calls
    torch.testing.assert_close(call.weights().double(), truth(model, tokens)[:2], rtol=1e-4, atol=1e-5)
    value_BHND = split(of_layer(model, tokens)[2]).transpose(1, 2)[:2]
    torch.testing.assert_close(call.value, value_BHND)


@pytest.mark.parametrize("attention", [written, fused], ids=lambda attention: attention.__name__)
def test_windows_frames_and_heads_in_one_axis(attention: Callable[..., Tensor]) -> None:
    """(b h t) n d and (b t h) n d of videos, and (h b) t n d, as GMAN has them."""
    frames, sequences = 5, 2
    folds: list[Callable[[Tensor], Tensor]] = [
        lambda part: split(part).permute(0, 3, 1, 2, 4).reshape(-1, TOKENS, WIDTH),
        lambda part: split(part).permute(0, 1, 3, 2, 4).reshape(-1, TOKENS, WIDTH),
        lambda part: torch.cat(part.split(WIDTH, -1), 0),
    ]
    video = torch.randn(sequences, frames, TOKENS, CHANNELS)
    for fold in folds:
        torch.manual_seed(0)
        model = Layers(lambda layers, tokens, fold=fold: tuple(map(fold, of_layer(layers, tokens))), attention)
        expected = truth(model, video.flatten(0, 1))
        torch.testing.assert_close(seen_of(model, video), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", [written, fused], ids=lambda attention: attention.__name__)
def test_tokens_of_one_sequence_have_heads(attention: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = Layers(lambda layers, tokens: tuple(split(p).transpose(0, 1) for p in of_layer(layers, tokens)), attention)
    tokens = torch.randn(TOKENS, CHANNELS)
    torch.testing.assert_close(seen_of(model, tokens), truth(model, tokens[None]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", [written, fused], ids=lambda attention: attention.__name__)
def test_learned_queries_for_every_sequence(attention: Callable[..., Tensor]) -> None:
    """As the pooling of the Set Transformer has them."""

    def pool(layers: Layers, tokens: Tensor) -> Parts:
        query = of_layer(layers, layers.seeds.repeat(tokens.shape[0], 1, 1))[0]
        _, key, value = of_layer(layers, tokens)
        query, key, value = (torch.cat(part.split(WIDTH, 2), 0) for part in (query, key, value))
        return query, key, value

    torch.manual_seed(0)
    model, tokens = Layers(pool, attention), torch.randn(3, TOKENS, CHANNELS)
    everything = torch.cat((model.seeds.expand(3, -1, -1), tokens), 1).double()
    projected = everything @ model.projection.weight.double().T + model.projection.bias.double()
    query, key, _ = (split(part) for part in projected.chunk(3, -1))
    expected = torch.einsum("bihd,bjhd->bhij", query[:, :2], key[:, 2:]).softmax(-1)
    torch.testing.assert_close(seen_of(model, tokens), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", [written, fused], ids=lambda attention: attention.__name__)
def test_layers_that_are_the_same_for_several_tokens_make_no_heads(attention: Callable[..., Tensor]) -> None:
    """What one layer makes of several inputs are sequences beside each other, stacked or not."""

    def of_inputs(layers: Layers, tokens: Tensor) -> Parts:
        parts = torch.stack([layers.of_heads[0](part) for part in tokens.unbind(0)])
        query, key, value = parts.chunk(3, -1)
        return query, key, value

    torch.manual_seed(0)
    model, tokens = Layers(of_inputs, attention), torch.randn(3, TOKENS, CHANNELS)
    expected = truth(model, tokens, "layers")[:, :1]
    torch.testing.assert_close(seen_of(model, tokens), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", [written, fused], ids=lambda attention: attention.__name__)
def test_layers_with_inputs_of_their_own_make_heads(attention: Callable[..., Tensor]) -> None:
    """As where each head has a norm, or a whole network, of its own."""
    factors = range(1, HEADS + 1)

    def each_its_own(layers: Layers, tokens: Tensor) -> Parts:
        parts = [layer(tokens * factor) for layer, factor in zip(layers.of_heads, factors, strict=True)]
        query, key, value = torch.stack(parts).chunk(3, -1)
        return query, key, value

    torch.manual_seed(0)
    model, tokens = Layers(each_its_own, attention), torch.randn(3, TOKENS, CHANNELS)
    each = [truth(model, tokens * factor, "layers")[:, head] for head, factor in enumerate(factors)]
    torch.testing.assert_close(seen_of(model, tokens), torch.stack(each, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", [written, fused], ids=lambda attention: attention.__name__)
@pytest.mark.parametrize("heads_inside", [False, True])
def test_heads_among_the_queries_are_refused(attention: Callable[..., Tensor], heads_inside: bool) -> None:
    """As with one key head for all: (B, H N, D) queries and (B, N, D) keys."""

    def one_key_head(layers: Layers, tokens: Tensor) -> Parts:
        query, key, value = of_layer(layers, tokens)
        query = split(query) * 1.0 if heads_inside else split(query).transpose(1, 2)
        return query.reshape(tokens.shape[0], -1, WIDTH), key[..., :WIDTH], value[..., :WIDTH]

    model = Layers(one_key_head, attention)
    with (
        pytest.warns(AttentionWarning, match="lie beside each other within one token, as heads do"),
        record(model) as recording,
    ):
        model(torch.randn(3, TOKENS, CHANNELS))
    assert not recording.calls
