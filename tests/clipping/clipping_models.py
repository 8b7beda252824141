"""Attention in the ways that people write it, all with two or four heads of one site, and with large weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, LENGTH = 32, 4, 8
HEAD = WIDTH // HEADS


class Fused(nn.Module):
    """One layer for queries, keys and values, whose channels are laid out in one of several ways."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        channels = self.qkv(hidden)
        if self.layout == "qkv h d":
            query, key, value = channels.unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        elif self.layout == "h qkv d":
            query, key, value = channels.unflatten(-1, (HEADS, 3, HEAD)).permute(3, 0, 2, 1, 4)
        elif self.layout == "h d qkv":
            query, key, value = channels.unflatten(-1, (HEADS, HEAD, 3)).permute(4, 0, 2, 1, 3)
        else:  # "vkq h d"
            value, key, query = channels.unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Separate(nn.Module):
    """Layers of their own; fewer key heads, which serve neighbours or heads in turns; attention of several makings."""

    def __init__(self, key_heads: int = HEADS, takes_turns: bool = False, makes: str = "sdpa") -> None:
        super().__init__()
        self.takes_turns, self.makes = takes_turns, makes
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, key_heads * HEAD)
        self.value = nn.Linear(WIDTH, key_heads * HEAD)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            layer(hidden).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        times = HEADS // key.shape[1]
        if self.takes_turns:
            key, value = key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1)
        else:
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        if self.makes == "sdpa":
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            logits = query @ key.transpose(-1, -2) / HEAD**0.5
            hidden_keys = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            mixed = logits.masked_fill(hidden_keys, -torch.inf).softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))


class GroupedFused(nn.Module):
    """Group by group, queries of each before their key and value."""

    def __init__(self, key_heads: int = 2) -> None:
        super().__init__()
        self.key_heads = key_heads
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * key_heads) * HEAD)

    def forward(self, hidden: Tensor) -> Tensor:
        grouped = self.qkv(hidden).unflatten(-1, (self.key_heads, -1, HEAD))
        query, key, value = grouped[..., :-2, :], grouped[..., -2, :], grouped[..., -1, :]
        query = query.flatten(2, 3).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            query, key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(2)


class Biased(nn.Module):
    """A bias is added to the logits."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("bias", bias)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            layer(hidden).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=self.bias)
        return mixed.transpose(1, 2).flatten(2)


class Normalised(nn.Module):
    """Queries and keys are normalised after their projection."""

    def __init__(self, kind: Callable[..., nn.Module], *shape: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.query_norm, self.key_norm = kind(*shape), kind(*shape)
        self.is_flat = shape[0] == WIDTH

    def forward(self, hidden: Tensor) -> Tensor:
        query, key = self.query(hidden), self.key(hidden)
        if self.is_flat:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (
            part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (query, key, self.value(hidden))
        )
        if not self.is_flat:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return mixed.transpose(1, 2).flatten(2)


class OfTorch(nn.Module):
    """`torch.nn.MultiheadAttention`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **arguments)
        nn.init.normal_(self.attention.in_proj_bias) if self.attention.in_proj_bias is not None else None

    def forward(self, hidden: Tensor) -> Tensor:
        width = self.attention.kdim
        other = hidden[..., :width] if width < WIDTH else hidden
        return self.attention(hidden, other, other, need_weights=False)[0]


def grown(model: nn.Module, factor: float = 6.0) -> nn.Module:
    """A model with larger weights, and biases that are not zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and not parameter.any():
                parameter.normal_()
            elif parameter.dim() == 2:
                parameter.mul_(factor)
    return model


def hidden_states() -> Tensor:
    return torch.randn(3, LENGTH, WIDTH)
