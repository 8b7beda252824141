"""Attention written by hand, with a temperature of each head in it, which a model with temperatures has to equal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

HEADS, HEAD, TOKENS = 4, 6, 7
WIDTH = HEADS * HEAD
TEMPERATURES = [0.5, 1.0, 1.75, 3.0]

Parts = tuple[Tensor, Tensor, Tensor]


def _by(pattern: str) -> Callable[[Tensor], Parts]:
    """Queries, keys and values (B, H, N, D) of one projection whose channels are in some order, as einops writes it."""
    sizes = {"qkv": 3, "h": HEADS, "d": HEAD}
    axes = pattern.split()

    def split(fused_BNX: Tensor) -> Parts:
        parts = fused_BNX.unflatten(-1, [sizes[axis] for axis in axes])
        order = [2 + axes.index(axis) for axis in ("qkv", "h", "d")]
        query, key, value = parts.permute(order[0], 0, order[1], 1, order[2])
        return query, key, value

    return split


def _heads(tensor_BNX: Tensor) -> Tensor:
    return tensor_BNX.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def _grouped(fused_BNX: Tensor) -> Parts:
    """Group by group: two heads of queries, one of keys, one of values (Falcon)."""
    groups = fused_BNX.unflatten(-1, (2, 4, HEAD))
    query = groups[..., :2, :].flatten(2, 3).transpose(1, 2)
    key, value = (groups[..., i, :].transpose(1, 2).repeat_interleave(2, dim=1) for i in (2, 3))
    return query, key, value


def _one_after_the_other(fused_BNX: Tensor, query_last: bool, key_heads: int) -> Parts:
    sizes = [WIDTH, key_heads * HEAD, key_heads * HEAD]
    if query_last:
        key, value, query = fused_BNX.split([*sizes[1:], sizes[0]], dim=-1)
    else:
        query, key, value = fused_BNX.split(sizes, dim=-1)
    key, value = (_heads(tensor).repeat_interleave(HEADS // key_heads, dim=1) for tensor in (key, value))
    return _heads(query), key, value


#: Fused projections: how many channels, and which of them are what.
FUSED: dict[str, tuple[int, Callable[[Tensor], Parts]]] = {
    **{order: (3 * WIDTH, _by(order)) for order in ("qkv h d", "qkv d h", "h qkv d", "h d qkv", "d qkv h", "d h qkv")},
    "grouped": (2 * 4 * HEAD, _grouped),
    "queries last": (3 * WIDTH, lambda fused: _one_after_the_other(fused, True, HEADS)),
    "queries last, two key heads": (2 * WIDTH, lambda fused: _one_after_the_other(fused, True, 2)),
    "two key heads": (2 * WIDTH, lambda fused: _one_after_the_other(fused, False, 2)),
}


class Attention(nn.Module):
    """Causal attention with ALiBi and dropout, whose logits are divided by ``temperature_H`` before the bias is added.

    Args:
        form: ``"sdpa"``, ``"softmax"`` or ``"capped"``: written out with a soft-cap.
    """

    def __init__(self, form: str = "sdpa", dropout: float = 0.1) -> None:
        super().__init__()
        self.form, self.dropout = form, dropout
        self.out = nn.Linear(WIDTH, WIDTH)
        self.temperature_H = torch.ones(HEADS)

    def parts(self, tokens: Tensor) -> Parts:
        raise NotImplementedError

    def bias(self, tokens: Tensor) -> Tensor:
        position = torch.arange(tokens.shape[1], dtype=tokens.dtype)
        slope_H11 = 2.0 ** -torch.arange(1.0, 1 + HEADS, dtype=tokens.dtype)[:, None, None]
        bias_HNN = slope_H11 * (position - position[:, None])
        return bias_HNN.masked_fill(position > position[:, None], -torch.inf)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.parts(tokens)
        query = query / self.temperature_H[:, None, None].to(query.dtype)
        dropout = self.dropout if self.training else 0.0
        if self.form == "sdpa":
            mixed = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=self.bias(tokens).to(query.dtype), dropout_p=dropout
            )
        else:
            logits = query @ key.transpose(-1, -2) / HEAD**0.5
            if self.form == "capped":
                logits = 2 * (logits / 2).tanh()
            weights = (logits + self.bias(tokens).to(logits.dtype)).softmax(-1)
            mixed = functional.dropout(weights, dropout) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))


class Fused(Attention):
    def __init__(self, layout: str, form: str = "sdpa", bias: bool = True) -> None:
        super().__init__(form)
        self.layout = layout
        self.qkv = nn.Linear(WIDTH, FUSED[layout][0], bias=bias)

    def parts(self, tokens: Tensor) -> Parts:
        return FUSED[self.layout][1](self.qkv(tokens))


class Separate(Attention):
    """Layers of their own, fewer key heads, which may be turned round: ``(d h)``."""

    def __init__(self, form: str = "sdpa", turned: bool = False, key_heads: int = HEADS) -> None:
        super().__init__(form)
        self.turned = turned
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, key_heads * HEAD) for _ in range(2))

    def parts(self, tokens: Tensor) -> Parts:
        query, key, value = self.query(tokens), self.key(tokens), self.value(tokens)
        if self.turned:
            query, key, value = (
                tensor.unflatten(-1, (HEAD, HEADS)).permute(0, 3, 1, 2) for tensor in (query, key, value)
            )
            return query, key, value
        query, key, value = (_heads(tensor) for tensor in (query, key, value))
        group = HEADS // key.shape[1]
        return query, key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)


class Gated(Separate):
    """Queries and their gates, head by head (Qwen3-Next)."""

    def __init__(self, form: str = "sdpa") -> None:
        super().__init__(form)
        self.query = nn.Linear(WIDTH, 2 * WIDTH)

    def parts(self, tokens: Tensor) -> Parts:
        both = self.query(tokens).unflatten(-1, (HEADS, 2, HEAD)).transpose(1, 2)
        gate = both[..., 1, :].sigmoid()
        key, value = _heads(self.key(tokens)), _heads(self.value(tokens))
        return both[..., 0, :], key, value * gate


class WithNorm(Separate):
    """Norms of queries and keys: of each head, with one gain for all; or of all channels, with a gain for each.

    Args:
        gain: ``"shared"``, ``"each"`` or ``"none"``.
    """

    def __init__(self, gain: str, form: str = "sdpa") -> None:
        super().__init__(form)
        self.gain = gain
        width = WIDTH if gain == "each" else HEAD
        self.q_norm, self.k_norm = (nn.RMSNorm(width, elementwise_affine=gain != "none") for _ in range(2))

    def parts(self, tokens: Tensor) -> Parts:
        query, key, value = self.query(tokens), self.key(tokens), self.value(tokens)
        if self.gain == "each":
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (_heads(tensor) for tensor in (query, key, value))
        if self.gain != "each":
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, value


class Block(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = attention

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.attention(self.norm(tokens))


class Model(nn.Module):
    """Two blocks; the first has temperatures in it if they are given."""

    def __init__(self, attention: Callable[[], Attention]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(attention()) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return tokens


def made(attention: Callable[[], Attention], dtype: torch.dtype = torch.float64) -> Model:
    """The same model whenever it is asked for, with heads that have something to tell apart."""
    torch.manual_seed(1)
    model = Model(attention).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            elif not name.endswith("out.weight"):
                parameter *= 2
    return model


def batch(dtype: torch.dtype = torch.float64, sequences: int = 3) -> Tensor:
    return torch.randn(sequences, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)


#: Every layout that is found, and how many temperatures it has.
FOUND: dict[str, Callable[[], Attention]] = {
    **{layout: lambda layout=layout: Fused(layout) for layout in FUSED},  # type: ignore[misc]
    "qkv h d, written out": lambda: Fused("qkv h d", "softmax"),
    "h d qkv, written out": lambda: Fused("h d qkv", "softmax"),
    "without biases": lambda: Fused("qkv h d", bias=False),
    "separate": Separate,
    "separate, written out": lambda: Separate("softmax"),
    "separate, soft-capped": lambda: Separate("capped"),
    "separate, d h": lambda: Separate(turned=True),
    "separate, two key heads": lambda: Separate(key_heads=2),
    "with gates": Gated,
    "with gates, written out": lambda: Gated("softmax"),
    "a norm of all channels": lambda: WithNorm("each"),
    "a norm of all channels, written out": lambda: WithNorm("each", "softmax"),
    "a shared norm": lambda: WithNorm("shared"),
    "a shared norm, written out": lambda: WithNorm("shared", "softmax"),
    "a norm without gain": lambda: WithNorm("none"),
}  # fmt: skip
