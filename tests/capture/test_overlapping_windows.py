"""Keys in windows that overlap are refused by name, and windows that do not overlap are seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_attn import AttentionWarning, record

SEQUENCES, HEADS, WIDTH, TOKENS = 2, 3, 4, 8
CHANNELS = HEADS * WIDTH

Parts = tuple[Tensor, Tensor, Tensor]


class Layers(nn.Module):
    """Has a layer for tokens and one for images, and a function make windows of what they give."""

    def __init__(self, windows: Callable[[Layers, Tensor], Parts], attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.windows, self.attention = windows, attention
        self.linear = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.conv = nn.Conv2d(CHANNELS, 3 * CHANNELS, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attention(*self.windows(self, tokens))

    def heads(self, tokens: Tensor) -> list[Tensor]:
        return [
            part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
            for part in self.linear(tokens.flatten(1, 2)).chunk(3, -1)
        ]


def written(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ value


def with_einsum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("...id,...jd->...ij", query, key).softmax(-1)
    return torch.einsum("...ij,...jd->...id", weights, value)


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value)


def views(layers: Layers, tokens: Tensor) -> Parts:
    query, key, value = layers.heads(tokens)
    key, value = (part.unfold(2, 6, 2).mT for part in (key, value))
    return query[:, :, :8].reshape(SEQUENCES, HEADS, 2, 4, WIDTH), key, value


def padded_views(layers: Layers, tokens: Tensor) -> Parts:
    query, key, value = layers.heads(tokens)
    key, value = (functional.pad(part, (0, 0, 2, 2)).unfold(2, 8, 4).mT for part in (key, value))
    return query.reshape(SEQUENCES, HEADS, 2, 4, WIDTH), key, value


def halos(layers: Layers, tokens: Tensor) -> Parts:
    """As HaloNet has them: windows of an image are sequences beside each other."""
    image = layers.conv(tokens.permute(0, 3, 1, 2))
    query, key, value = image.chunk(3, 1)
    query = functional.unfold(query, 2, stride=2)
    key, value = (functional.unfold(part.contiguous(), 4, stride=2, padding=1) for part in (key, value))
    query, key, value = (
        part.unflatten(1, (CHANNELS, -1)).permute(0, 3, 2, 1).flatten(0, 1).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for part in (query, key, value)
    )
    return query, key, value


@pytest.mark.parametrize("attention", [written, with_einsum, fused], ids=lambda attention: attention.__name__)
@pytest.mark.parametrize("windows", [views, padded_views, halos], ids=lambda windows: windows.__name__)
def test_keys_in_overlapping_windows_are_refused(
    windows: Callable[..., Parts], attention: Callable[..., Tensor]
) -> None:
    model = Layers(windows, attention)
    with (
        pytest.warns(AttentionWarning, match=r"its keys are in windows that overlap|keys of its own that were put"),
        record(model) as recording,
    ):
        model(torch.randn(SEQUENCES, 2, 4, CHANNELS))
    assert not recording.calls


def blocks(layers: Layers, tokens: Tensor) -> Parts:
    query, key, value = (part.unfold(2, 4, 4).mT for part in layers.heads(tokens))
    return query, key, value


def pooled_queries(layers: Layers, tokens: Tensor) -> Parts:
    """As Hiera has them: fewer queries than keys in each window, all of them once."""
    query, key, value = (part.unflatten(2, (2, 4)) for part in layers.heads(tokens))
    return query.unflatten(3, (2, 2)).amax(4), key, value


@pytest.mark.parametrize("attention", [written, with_einsum, fused], ids=lambda attention: attention.__name__)
@pytest.mark.parametrize(("windows", "queries"), [(blocks, 4), (pooled_queries, 2)])
def test_windows_that_do_not_overlap_are_seen(
    windows: Callable[..., Parts], queries: int, attention: Callable[..., Tensor]
) -> None:
    model = Layers(windows, attention)
    with record(model) as recording:
        model(torch.randn(SEQUENCES, 2, 4, CHANNELS))
    (call,) = recording.calls
    assert call.weights().shape == (2 * SEQUENCES, HEADS, queries, 4)
