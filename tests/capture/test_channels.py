"""Attention over channels is refused by name, and attention over tokens is none of it, however it is laid out."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn import AttentionWarning, record
from lightning_attn.capture.axes import Contraction
from lightning_attn.capture.channels import ChannelTrail

SEQUENCES, HEADS, WIDTH = 2, 2, 4
CHANNELS = HEADS * WIDTH
#: The first is as many tokens as a head has channels, so that no size tells them apart.
SIDES = {"square": (2, 2), "other": (2, 3)}

Attend = Callable[["Layers", Tensor], Tensor]


class Layers(nn.Module):
    """Has the layers that attention needs, and a function use them on an image."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.linear = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.weight = nn.Parameter(torch.randn(CHANNELS, 3 * CHANNELS))
        self.conv = nn.Conv2d(CHANNELS, 3 * CHANNELS, 1)
        self.depthwise = nn.Conv2d(3 * CHANNELS, 3 * CHANNELS, 3, padding=1, groups=3 * CHANNELS)
        self.stem = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.BatchNorm2d(CHANNELS), nn.ReLU())
        self.norm = nn.LayerNorm(CHANNELS)
        self.group_norm = nn.GroupNorm(2, CHANNELS)
        self.head_norm = nn.LayerNorm(WIDTH)
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))
        self.register_buffer("pooling", torch.rand(3, 4).softmax(-1))

    def forward(self, image: Tensor) -> Tensor:
        return self.attend(self, image)


def tokens_of(image: Tensor) -> Tensor:
    return image.flatten(2).transpose(1, 2)


def written(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1)).softmax(-1) @ value


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, scale=1.0)


# Over channels.


def cross_covariance(layers: Layers, image: Tensor, attention: Callable[..., Tensor] = written) -> Tensor:
    """As XCiT does, and EdgeNeXt."""
    projected = layers.linear(layers.norm(tokens_of(image)))
    query, key, value = projected.unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 4, 1)
    query, key = functional.normalize(query, dim=-1) * layers.temperature, functional.normalize(key, dim=-1)
    return attention(query, key, value)


def fused_cross_covariance(layers: Layers, image: Tensor) -> Tensor:
    return cross_covariance(layers, image, fused)


def copied_cross_covariance(layers: Layers, image: Tensor) -> Tensor:
    """Copies whose memory no longer tells that channels were last."""
    return cross_covariance(layers, image, lambda *qkv: written(*(part.contiguous() * 1.0 for part in qkv)))


def channel_groups(layers: Layers, image: Tensor, attention: Callable[..., Tensor] = written) -> Tensor:
    """As DaViT does: heads as in attention over tokens, transposed."""
    qkv = layers.linear(tokens_of(image)).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
    return attention(*(part.transpose(-1, -2) for part in qkv)).transpose(-1, -2)


def fused_channel_groups(layers: Layers, image: Tensor) -> Tensor:
    return channel_groups(layers, image, fused)


def left_transposed(layers: Layers, image: Tensor) -> Tensor:
    query, key, value = layers.linear(tokens_of(image)).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
    weights = (query.transpose(-1, -2) @ key).softmax(-1)
    return torch.einsum("bhcd,bhnd->bhnc", weights, value)


def transposed_attention(layers: Layers, image: Tensor) -> Tensor:
    """As Restormer does: `b (h c) x y -> b h c (x y)`, of convolutions."""
    parts = layers.depthwise(layers.conv(image)).chunk(3, dim=1)
    query, key, value = (part.reshape(SEQUENCES, HEADS, WIDTH, -1) for part in parts)
    return written(functional.normalize(query, dim=-1), functional.normalize(key, dim=-1), value)


def transposed_attention_channels_last(layers: Layers, image: Tensor) -> Tensor:
    """The same with the memory of images that hold their channels last, where reshaping copies."""
    return transposed_attention(layers, image.to(memory_format=torch.channels_last))


def without_projections(layers: Layers, image: Tensor) -> Tensor:
    """As the channel attention of a dual attention network does: what a block gave, compared with itself."""
    flat = layers.stem(image).view(SEQUENCES, CHANNELS, -1)
    return torch.bmm(torch.bmm(flat, flat.transpose(1, 2)).softmax(-1), flat)


def by_letters(layers: Layers, image: Tensor) -> Tensor:
    query, key, value = layers.conv(image).flatten(2).chunk(3, dim=1)
    weights = torch.einsum("bcn,bdn->bcd", query, key).softmax(-1)
    return torch.einsum("bcd,bdn->bcn", weights, value)


def of_a_weight(layers: Layers, image: Tensor) -> Tensor:
    """The layer is written out as a product with a parameter."""
    query, key, value = (tokens_of(image) @ layers.weight).chunk(3, dim=-1)
    return written(query.mT, key.mT, value.mT)


def of_a_weight_on_the_left(layers: Layers, image: Tensor) -> Tensor:
    query, key, value = torch.matmul(layers.weight.T, image.flatten(2)).chunk(3, dim=1)
    return written(query, key, value)


def after_a_residual(layers: Layers, image: Tensor) -> Tensor:
    states = layers.stem(image)
    for _ in range(40):  # more than is remembered one by one
        states = image + functional.dropout(states, 0.1, layers.training)
    flat = layers.group_norm(states).flatten(2)
    return written(flat, flat, flat)


OVER_CHANNELS: list[Attend] = [
    cross_covariance,
    fused_cross_covariance,
    copied_cross_covariance,
    channel_groups,
    fused_channel_groups,
    left_transposed,
    transposed_attention,
    transposed_attention_channels_last,
    without_projections,
    by_letters,
    of_a_weight,
    of_a_weight_on_the_left,
    after_a_residual,
]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES.keys())
@pytest.mark.parametrize("attend", OVER_CHANNELS, ids=lambda attend: attend.__name__)
def test_attention_over_channels_is_refused_by_name(attend: Attend, sides: tuple[int, int], training: bool) -> None:
    layers = Layers(attend).train(training)
    image = torch.randn(SEQUENCES, CHANNELS, *sides)
    with (
        pytest.warns(AttentionWarning, match="is not watched: it attends over channels"),
        torch.set_grad_enabled(training),
        record(layers) as recording,
    ):
        layers(image)
    assert not recording.calls


def test_other_sites_can_be_chosen_to_hear_nothing_of_it() -> None:
    model = nn.ModuleDict({"channels": Layers(cross_covariance), "tokens": Layers(over_tokens)})
    image = torch.randn(SEQUENCES, CHANNELS, 2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttentionWarning)
        with record(model, sites="tokens") as recording:
            model["channels"](image)
            model["tokens"](image)
    assert recording.sites == ("tokens",)


# Over tokens.


def over_tokens(layers: Layers, image: Tensor, attention: Callable[..., Tensor] = written) -> Tensor:
    qkv = layers.linear(layers.norm(tokens_of(image))).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
    query, key, value = qkv
    return attention(layers.head_norm(query), layers.head_norm(key), value)


def fused_over_tokens(layers: Layers, image: Tensor) -> Tensor:
    return over_tokens(layers, image, fused)


def of_convolutions(layers: Layers, image: Tensor) -> Tensor:
    """As the attention of a diffusion network does."""
    flat = layers.conv(layers.group_norm(image)).flatten(2)
    query, key, value = flat.view(SEQUENCES, 3, HEADS, WIDTH, -1).unbind(1)
    weights = torch.einsum("bhdn,bhdm->bhnm", query, key).softmax(-1)
    return torch.einsum("bhnm,bhdm->bhdn", weights, value)


def of_convolutions_fused(layers: Layers, image: Tensor) -> Tensor:
    query, key, value = (part.flatten(2).unflatten(1, (HEADS, WIDTH)).mT for part in layers.conv(image).chunk(3, 1))
    return fused(query, key, value)


def of_convolutions_copied(layers: Layers, image: Tensor) -> Tensor:
    parts = (part.flatten(2).unflatten(1, (HEADS, WIDTH)).mT.contiguous() for part in layers.conv(image).chunk(3, 1))
    return fused(*parts)


def without_projections_over_tokens(layers: Layers, image: Tensor) -> Tensor:
    flat = tokens_of(layers.stem(image))
    return written(flat, flat, flat)


def along_rows(layers: Layers, image: Tensor) -> Tensor:
    """Axial: each column is a sequence of its own."""
    query, key, value = (
        part.permute(0, 3, 2, 1).reshape(-1, image.shape[2], CHANNELS) for part in layers.conv(image).chunk(3, 1)
    )
    return written(query, key, value)


def in_windows(layers: Layers, image: Tensor) -> Tensor:
    """Windows of two rows, put into the sequences by a copy."""
    states = layers.stem(image).permute(0, 2, 3, 1)
    windows = states.view(SEQUENCES, -1, 2, image.shape[3], CHANNELS).transpose(1, 2)
    windows = layers.norm(windows.contiguous()).reshape(-1, 2 * image.shape[3], CHANNELS)
    query, key, value = layers.linear(windows).chunk(3, dim=-1)
    return written(query, key, value)


def summed_over_rows_too(layers: Layers, image: Tensor) -> Tensor:
    """Tied rows: logits are sums over channels and rows."""
    query, key, value = layers.linear(image.permute(0, 2, 3, 1)).chunk(3, dim=-1)
    weights = torch.einsum("bxyc,bxzc->byz", query, key).softmax(-1)
    return torch.einsum("byz,bxzc->bxyc", weights, value)


def over_variates(layers: Layers, image: Tensor) -> Tensor:
    """As iTransformer does: a linear layer embeds each variate's series; the variates are the tokens."""
    series = image.flatten(2).permute(2, 0, 1)[:CHANNELS]  # (time, sequences, variates)
    series = nn.functional.pad(series, (0, 0, 0, 0, 0, CHANNELS - len(series)))
    query, key, value = layers.linear(series.permute(1, 2, 0)).chunk(3, dim=-1)
    return written(query, key, value)


def over_embedded_channels(layers: Layers, image: Tensor) -> Tensor:
    """What a layer embeds are tokens, also where an earlier one made them as channels."""
    maps = nn.functional.pad(layers.stem(image).flatten(2), (0, CHANNELS - image[0, 0].numel()))
    query, key, value = layers.linear(maps).chunk(3, dim=-1)
    return written(query, key, value)


def keys_from_a_layer_over_tokens(layers: Layers, image: Tensor) -> Tensor:
    """As Linformer does: keys and values are mixtures of all tokens."""
    query, key, value = layers.linear(tokens_of(image)[:, :4]).chunk(3, dim=-1)
    key, value = (functional.linear(part.mT, layers.pooling).mT for part in (key, value))
    return written(query, key, value)


def pooled_by_a_buffer(layers: Layers, image: Tensor) -> Tensor:
    """What sums over tokens makes tokens."""
    query, key, value = (layers.pooling @ layers.linear(tokens_of(image)[:, :4])).chunk(3, dim=-1)
    return written(query, key, value)


def pooled_by_letters(layers: Layers, image: Tensor) -> Tensor:
    projected = torch.einsum("bnc,mn->bmc", layers.linear(tokens_of(image)[:, :4]), layers.pooling)
    query, key, value = projected.chunk(3, dim=-1)
    return written(query, key, value)


def rotary(layers: Layers, image: Tensor) -> Tensor:
    def turned(part: Tensor) -> Tensor:
        first, second = part.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((first * 0.6 - second * 0.8, second * 0.6 + first * 0.8), dim=-1).flatten(-2)

    return over_tokens(layers, image, lambda q, k, v: written(turned(q), turned(k), v))


def one_at_a_time(layers: Layers, image: Tensor) -> Tensor:
    """One query, of a single token."""
    query, key, value = layers.linear(tokens_of(image)).chunk(3, dim=-1)
    return written(query[:, -1:], key, value)


def generated_tokens(layers: Layers, image: Tensor) -> Tensor:
    """Tokens that a layer made of one state, by dividing its channels."""
    query, key, value = layers.linear(tokens_of(image)[:, 0]).unflatten(-1, (3, HEADS, WIDTH)).unbind(1)
    return written(query, key, value)


def in_a_loop_over_heads(layers: Layers, image: Tensor) -> Tensor:
    parts = layers.linear(tokens_of(image)).chunk(3, dim=-1)
    heads = zip(*(part.split(WIDTH, dim=-1) for part in parts), strict=True)
    return torch.cat([written(*head) for head in heads], dim=-1)


OVER_TOKENS: list[Attend] = [
    over_tokens,
    fused_over_tokens,
    of_convolutions,
    of_convolutions_fused,
    of_convolutions_copied,
    without_projections_over_tokens,
    along_rows,
    in_windows,
    summed_over_rows_too,
    over_variates,
    over_embedded_channels,
    keys_from_a_layer_over_tokens,
    pooled_by_a_buffer,
    pooled_by_letters,
    rotary,
    one_at_a_time,
    in_a_loop_over_heads,
]


@pytest.mark.filterwarnings("error::lightning_attn.AttentionWarning")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["", "channels_last"])
@pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES.keys())
@pytest.mark.parametrize("attend", OVER_TOKENS, ids=lambda attend: attend.__name__)
def test_attention_over_tokens_is_seen(attend: Attend, sides: tuple[int, int], layout: torch.memory_format) -> None:
    layers = Layers(attend)
    with record(layers) as recording:
        layers(torch.randn(SEQUENCES, CHANNELS, *sides).to(memory_format=layout))
    assert recording.calls


def test_tokens_that_a_layer_made_of_one_state_may_be_heads() -> None:
    layers = Layers(generated_tokens)
    with pytest.warns(AttentionWarning, match="lie beside each other within one token"), record(layers) as recording:
        layers(torch.randn(SEQUENCES, CHANNELS, 2, 3))
    assert recording.calls == []


def linear_attention(layers: Layers, image: Tensor) -> Tensor:
    query, key, value = layers.linear(tokens_of(image)).chunk(3, dim=-1)
    return query.softmax(-1) @ (key.softmax(1).mT @ value)


def test_linear_attention_is_none_at_all() -> None:
    layers = Layers(linear_attention)
    with pytest.warns(AttentionWarning) as said, record(layers):
        layers(torch.randn(SEQUENCES, CHANNELS, 2, 2))
    assert ["No attention was seen" in str(warning.message) for warning in said] == [True]


# Heads are parts of channels, and windows are not.

#: How queries (B, H, W, N, D) of heads and windows are laid out, and how their weights are then as (B W, H, N, M).
ORDERS = {"heads first": (1, 0, 2, 3, 4), "in the middle": (0, 1, 2, 3, 4), "heads last": (0, 2, 1, 3, 4)}


@pytest.mark.filterwarnings("error::lightning_attn.AttentionWarning")
@pytest.mark.parametrize(
    ("order", "heads"),
    [(order, heads) for name, order in ORDERS.items() for heads in (HEADS, 1) if heads > 1 or name != "heads first"],
)
@pytest.mark.parametrize("way", ["written", "fused"])
def test_windows_are_sequences_wherever_heads_are(order: tuple[int, ...], heads: int, way: str) -> None:
    told: list[Tensor] = []

    def attend(layers: Layers, image: Tensor) -> Tensor:
        projected = layers.linear(tokens_of(image)).view(SEQUENCES, 3, 2, 3, heads, CHANNELS // heads)
        query, key, value = (part.permute(0, 3, 1, 2, 4) for part in projected.unbind(3))
        mask = torch.ones(SEQUENCES, 1, 3, 2, 2, dtype=torch.bool)
        mask[:, :, 2, 0, 1] = False
        with torch._C.DisableTorchFunction():
            logits = torch.einsum("bhwnd,bhwmd->bhwnm", query, key).masked_fill(~mask, -torch.inf)
            told.append(logits.softmax(-1).transpose(1, 2).flatten(0, 1).detach())
        query, key, value, mask = (part.permute(order) for part in (query, key, value, mask))
        if way == "fused":
            return functional.scaled_dot_product_attention(query, key, value, mask, scale=1.0)
        return (query @ key.mT).masked_fill(~mask, -1e9).softmax(-1) @ value

    layers = Layers(attend)
    with record(layers) as recording:
        output = layers(torch.randn(SEQUENCES, CHANNELS, 2, 3))
    (call,) = recording.calls
    assert call.weights().shape == (SEQUENCES * 3, heads, 2, 2)
    torch.testing.assert_close(call.weights(), told[0])
    inverse = [order.index(axis) for axis in range(5)]
    torch.testing.assert_close(call.output(), output.permute(inverse).transpose(1, 2).flatten(0, 1))


# What is remembered.


def followed(steps: int) -> tuple[ChannelTrail, Tensor]:
    trail, tensor = ChannelTrail(), torch.randn(2, 3, 3)
    trail.follow(functional.linear, [tensor], tensor)
    for _ in range(steps):
        following = tensor * 1.5
        trail.follow(Tensor.mul, [tensor], following)
        tensor = following
    return trail, tensor


@pytest.mark.parametrize("steps", [0, 1, 1000])
def test_channels_are_still_known_after_many_operations(steps: int) -> None:
    trail, tensor = followed(steps)
    over_tokens = Contraction(tensor, tensor, ("b", "n", "c"), ("b", "m", "c"), ("b", "n", "m"))
    over_channels = Contraction(tensor, tensor, ("b", "n", "c"), ("b", "n", "d"), ("b", "c", "d"))
    assert trail.sums_over_tokens(over_channels)
    assert not trail.sums_over_tokens(over_tokens)


def test_nothing_is_remembered_of_what_is_gone() -> None:
    trail, tensor = followed(100)
    assert len(trail) == 1
    made = [thing for thing in gc.get_objects() if type(thing).__module__ == ChannelTrail.__module__]
    assert len(made) < 50
    del tensor
    assert len(trail) == 0
