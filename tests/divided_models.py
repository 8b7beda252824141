"""Models whose heads ranks divide among each other, by a plan for each, and what an observer sees of them.

They are in double precision, so that a rank's products do not round otherwise than those of the whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_attn import AttentionObserver, AttentionWarning, observe

WIDTH, HEADS, LENGTH = 32, 4, 12
HEAD = WIDTH // HEADS

Values = dict[str, dict[str, list[float | None]]]


# Models.


class Attention(nn.Module):
    """Attention with projections of its own for queries, keys and values, and fewer key heads than heads."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, key_heads * HEAD)
        self.value = nn.Linear(WIDTH, key_heads * HEAD)
        self.out = nn.Linear(WIDTH, WIDTH)

    def projected(self, tokens: Tensor) -> list[Tensor]:
        return [layer(tokens).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.attend(*self.projected(tokens)).transpose(1, 2).flatten(2))


class FewerKeyHeads(Attention):
    def __init__(self) -> None:
        super().__init__(key_heads=2)


class OneKeyHead(Attention):
    """Fewer key heads than ranks: each rank has all of them."""

    def __init__(self) -> None:
        super().__init__(key_heads=1)


class RepeatedKeyHeads(FewerKeyHeads):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
        return functional.scaled_dot_product_attention(query, key, value)


class Fused(Attention):
    """One projection for all, head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def projected(self, tokens: Tensor) -> list[Tensor]:
        return list(self.qkv(tokens).unflatten(-1, (-1, 3, HEAD)).permute(3, 0, 2, 1, 4))


class Written(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        logits = query @ key.transpose(-1, -2) / HEAD**0.5
        future = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
        return logits.masked_fill(future, -torch.inf).softmax(-1) @ value


class HeadByHead(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = zip(*(tensor.split(1, dim=1) for tensor in (query, key, value)), strict=True)
        return torch.cat([functional.scaled_dot_product_attention(*head) for head in heads], dim=1)


class Rotation(torch.autograd.Function):
    """Into which nothing can see."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.cat([-tensor[..., 1::2], tensor[..., ::2]], dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        first, second = gradient.chunk(2, dim=-1)
        return torch.stack([second, -first], dim=-1).flatten(-2)


class NormedAndRotated(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HEAD)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = (Rotation.apply(self.norm(tensor)) for tensor in (query, key))
        return super().attend(query, key, value)


class Told(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        observe(query, key, value, is_causal=True)
        return super().attend(query, key, value)


class RawWeights(Attention):
    """Weights that belong to the attention itself."""

    def __init__(self) -> None:
        super().__init__()
        self.query_weight, self.key_weight, self.value_weight = (
            nn.Parameter(layer.weight.detach()) for layer in (self.query, self.key, self.value)
        )

    def projected(self, tokens: Tensor) -> list[Tensor]:
        weights = self.query_weight, self.key_weight, self.value_weight
        if isinstance(weights[0], DTensor):
            weights = tuple(weight.to_local() for weight in weights)
        return [functional.linear(tokens, w).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in weights]


class Gated(Attention):
    """What every rank has whole comes before what it has a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)

    def projected(self, tokens: Tensor) -> list[Tensor]:
        query, key, value = super().projected(tokens)
        return [self.gate(tokens).sigmoid()[:, None] * query, key, value]


class BiasedByPosition(Attention):
    """A bias of all heads, of which a rank takes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(2, HEADS)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        position = torch.arange(LENGTH, dtype=query.dtype)
        offset = position[:, None] - position
        bias = self.bias(torch.stack([offset.sin(), offset.cos()], dim=-1)).permute(2, 0, 1)
        heads = query.shape[1]
        part = dist.get_rank() if heads < HEADS else 0
        bias = bias[heads * part : heads * (part + 1)]
        return (bias + query @ key.transpose(-1, -2) / HEAD**0.5).softmax(-1) @ value


class LayerWithinHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.within = nn.Linear(HEAD, HEAD)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(self.within(query), self.within(key), value)


class WrittenInto(Attention):
    """As DeepSeek writes the parts of its queries into new memory."""

    def projected(self, tokens: Tensor) -> list[Tensor]:
        query, key, value = super().projected(tokens)
        whole = self.norm(tokens)[:, None, :, :HEAD]
        memory = whole.new_empty(query.shape)
        memory[..., : HEAD // 2] = query[..., : HEAD // 2]
        memory[..., HEAD // 2 :] = query[..., HEAD // 2 :]
        return [memory, key, value]

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Linear(WIDTH, WIDTH)


class FewerKeyHeadsOfRawWeights(RawWeights):
    """The keys' weight, whole, is as wide as a rank's part of the queries'."""

    def __init__(self) -> None:
        super().__init__()
        self.key_weight, self.value_weight = (
            nn.Parameter(weight[: WIDTH // 2].detach()) for weight in (self.key_weight, self.value_weight)
        )


class RawProducts(RawWeights):
    """Products with weights that are turned round, and one by letters."""

    def projected(self, tokens: Tensor) -> list[Tensor]:
        weights = [
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in (self.query_weight, self.key_weight, self.value_weight)
        ]
        flat = [
            tokens @ weights[0].T,
            torch.matmul(tokens, weights[1].t()),
            torch.einsum("bnl,fl->bnf", tokens, weights[2]),
        ]
        return [tensor.unflatten(-1, (-1, HEAD)).transpose(1, 2) for tensor in flat]


class Block(nn.Module):
    def __init__(self, attention: Callable[[], Attention]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = attention()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.norm(tokens))
        return tokens + self.down(functional.gelu(self.up(tokens)))


class Model(nn.Module):
    def __init__(self, attention: Callable[[], Attention], checkpointing: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            if self.checkpointing is None:
                tokens = block(tokens)
            else:
                tokens = checkpoint(block, tokens, use_reentrant=self.checkpointing)
        return tokens


def made(attention: Callable[[], Attention], **arguments: Any) -> Model:
    """The same model, in double precision, whenever it is asked for."""
    torch.manual_seed(1)
    model = Model(attention, **arguments).double()
    for weight in model.parameters():
        weight.data.mul_(2.0)  # so that heads have something to tell apart
    return model


def batch(sequences: int = 4) -> Tensor:
    return torch.randn(
        sequences, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    ).requires_grad_()


def observed(model: nn.Module, tokens: Tensor, statistics: Any = "all", backward: bool = True) -> Values:
    """What an observer finds; it has nothing to say."""
    observer = AttentionObserver(model, statistics=statistics, spectral_sequences=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttentionWarning)
        with observer:
            output = model(tokens)
        if backward:
            output.sum().backward()
        return observer.snapshot().to_dict()


def with_absent(values: list[float | None]) -> list[float]:
    return [torch.nan if value is None else value for value in values]


def assert_equal(found: list[Values], expected: Values, but: Collection[str] = ()) -> None:
    """The same sites, heads and statistics on every rank as in one process."""
    assert all(of_rank == found[0] for of_rank in found)
    assert found[0].keys() == expected.keys()
    for site, of_site in expected.items():
        for statistic, heads in of_site.items():
            if statistic not in but:
                mine, theirs = (
                    torch.tensor(with_absent(v), dtype=torch.float64) for v in (found[0][site][statistic], heads)
                )
                where = f"{statistic} at {site}: {mine.tolist()}, in one process {theirs.tolist()}"
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9, equal_nan=True, msg=where)


# Ways to divide them.

SEPARATE = {"query": ColwiseParallel, "key": ColwiseParallel, "value": ColwiseParallel, "out": RowwiseParallel}


def plan_of(attention: Attention) -> dict[str, Any]:
    plan = {name: style() for name, style in SEPARATE.items()}
    if attention.key.out_features == HEAD:  # one key head is all that each rank needs
        del plan["key"], plan["value"]
    if isinstance(attention, Fused):
        plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel()}
    return plan


def divide(model: Model, mesh: DeviceMesh) -> Model:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        parallelize_module(block.attention, mesh, plan_of(block.attention))
        if isinstance(block.attention, RawWeights):
            for name in ("query_weight", "key_weight", "value_weight"):
                weight = distribute_tensor(getattr(block.attention, name).data, mesh, [Shard(0)])
                setattr(block.attention, name, nn.Parameter(weight))
    return model


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor_parallel",))


ATTENTIONS = [
    *(Attention, FewerKeyHeads, OneKeyHead, RepeatedKeyHeads, Fused, Written, HeadByHead, NormedAndRotated),
    *(Told, RawWeights, RawProducts, FewerKeyHeadsOfRawWeights, Gated, BiasedByPosition, LayerWithinHeads, WrittenInto),
]
