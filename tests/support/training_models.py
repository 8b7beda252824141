"""Models of one's own, trained in the ways in which people train: parts are frozen, shared, skipped, or computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS = 16, 2


# A model of one's own. What stands beside its attention compares activations with weights, and is none.


class OwnAttention(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        with torch.no_grad():
            self.query.weight.mul_(5)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            layer(hidden).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.way == "sdpa":
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(WIDTH / HEADS)
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))


class Router(nn.Module):
    """Chooses among experts, token by token: by a layer, and by the cosine with keys of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        by_layer = self.gate(flat).softmax(-1) @ self.experts.weight
        by_cosine = (flat @ functional.normalize(self.gate.weight, dim=-1).t()).softmax(-1) @ self.experts.weight
        return (by_layer + by_cosine).view_as(hidden)


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.attention = OwnAttention(way)
        self.router = Router()
        self.norm = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden))
        return hidden + self.feed_forward(hidden) + self.router(hidden)


class Own(nn.Module):
    def __init__(self, way: str, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(way) for _ in range(blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


# Parts that are frozen


class Frozen(Own):
    """The first block is not trained, and runs in a context in which nothing is."""

    def __init__(self, way: str, context: Callable[[], Any]) -> None:
        super().__init__(way)
        self.context = context
        self.blocks[0].requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.blocks[0].eval()
        return self

    def forward(self, hidden: Tensor) -> Tensor:
        with self.context():
            hidden = self.blocks[0](hidden)
        return self.blocks[1](hidden.clone())


class Distilled(nn.Module):
    """A student beside its teacher, which is in evaluation mode and has no graph."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.student = Own(way, blocks=1)
        self.teacher = Own(way, blocks=2).requires_grad_(False)

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(hidden)
        return self.student(hidden) - wanted


# Parts that run several times, or not at all


class Tied(nn.Module):
    """One block at all depths, which a second name holds as well."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = Block(way)
        self.blocks = nn.ModuleList([self.first] * 3)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class SharesWeights(Own):
    """Two modules with the same parameters are two sites."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        for name in ("query", "key", "value"):
            getattr(self.blocks[1].attention, name).weight = getattr(self.blocks[0].attention, name).weight


class Skips(Own):
    """Blocks are left out at random, as by LayerDrop."""

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.5:
                hidden = block(hidden)
        return hidden


class Ensemble(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.members = nn.ModuleList(Own(way, blocks=1) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.stack([member(hidden) for member in self.members]).mean(0)


class ManyTasks(Own):
    """A trunk with a head for each task, of which a batch asks for some."""

    def __init__(self, way: str) -> None:
        super().__init__(way, blocks=1)
        self.tasks = nn.ModuleDict({name: Block(way) for name in ("tag", "parse", "translate")})

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        return self.tasks["translate"](hidden) + self.tasks["tag"](hidden)


class Averaged(nn.Module):
    """A model and the average of its weights, which nobody runs."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.online = Own(way)
        self.average = torch.optim.swa_utils.AveragedModel(self.online)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.online(hidden)


class Checkpointed(Own):
    """Each block runs again in the backward pass."""

    def __init__(self, way: str, use_reentrant: bool) -> None:
        super().__init__(way)
        self.use_reentrant = use_reentrant

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.clone().requires_grad_()
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.use_reentrant)
        return hidden


# Weights that are computed in the forward pass


class LowRank(nn.Module):
    """Adds a product of two small matrices to a weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.left = nn.Parameter(0.3 * torch.randn(weight.shape[0], 2))
        self.right = nn.Parameter(0.3 * torch.randn(2, weight.shape[1]))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.left @ self.right


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, weight: Tensor) -> Tensor:
        return (weight * 16).round() / 16

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


class Quantised(nn.Module):
    """Rounds a weight, and lets its gradient through as if it had not."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()

    def forward(self, weight: Tensor) -> Tensor:
        return _Rounded.apply(weight)


def every_layer(change: Callable[[nn.Module], object], way: str) -> nn.Module:
    """The model with each of its layers changed."""
    model = Own(way)
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        change(layer)
    return model


def parametrized(kind: type[nn.Module], name: str = "weight") -> Callable[[nn.Module], object]:
    return lambda layer: parametrize.register_parametrization(layer, name, kind(getattr(layer, name)))


class Integers(nn.Module):
    """A layer that keeps its weight in eight bits, and makes it anew at each call."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(layer.weight.detach().abs().max() / 127)
        self.register_buffer("integers", (layer.weight / self.scale).round().to(torch.int8))
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        return self.integers.to(self.scale.dtype) * self.scale

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight, self.bias)


def in_eight_bits(way: str) -> nn.Module:
    model = Own(way)
    for module in list(model.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear):
                setattr(module, name, Integers(layer))
    return model


class MatrixProducts(nn.Module):
    """A layer that multiplies with a matrix of low rank by hand, rather than as layers of torch do."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.low_rank = LowRank(layer.weight)
        self.weight = layer.weight
        self.bias = layer.bias

    def forward(self, hidden: Tensor) -> Tensor:
        product = hidden @ self.low_rank(self.weight).t()
        return product if self.bias is None else product + self.bias


def by_matrix_products(way: str) -> nn.Module:
    model = Own(way)
    for module in list(model.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear) and name not in ("gate", "experts"):
                setattr(module, name, MatrixProducts(layer))
    return model


def quantisation_aware(way: str) -> nn.Module:
    """Layers that round their weights and what they give, and keep the ranges of both."""
    model = Own(way).train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    torch.ao.quantization.prepare_qat(model, inplace=True)
    return model


class TorchAttention(nn.Module):
    """The attention of torch, the weights of which are computed."""

    def __init__(self, change: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        change(self.attention)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return hidden + mixed


class Functional(nn.Module):
    """Runs a model with other parameters than its own."""

    def __init__(self, way: str, other: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model = Own(way)
        self.other = other

    def forward(self, hidden: Tensor) -> Tensor:
        parameters = {name: self.other(parameter) for name, parameter in self.model.named_parameters()}
        return torch.func.functional_call(self.model, parameters, (hidden,))


class CopiesFromBefore(nn.Module):
    """Runs a model with plain tensors that were there before anybody watched."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.model = Own(way)
        self.fast = {name: value.detach().clone().requires_grad_() for name, value in self.model.named_parameters()}

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.func.functional_call(self.model, self.fast, (hidden,))


class Hypernetwork(nn.Module):
    """Weights of a model come from a layer, and that from the data."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.model = Own(way)
        self.weights = nn.Linear(WIDTH, WIDTH * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.weights(hidden.mean((0, 1))).view(WIDTH, WIDTH)
        names = ("attention.key", "attention.value", "router.gate", "router.experts")
        generated = {
            f"blocks.{block}.{name}.weight": weight if "attention" in name else weight[:3]
            for block in (0, 1)
            for name in names
        }
        return torch.func.functional_call(self.model, generated, (hidden,))


class WeightsBySequence(nn.Module):
    """Each sequence has weights of its own, which come from its data."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(WIDTH, 3 * WIDTH * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        weights = self.weights(hidden.mean(1)).view(-1, 3, WIDTH, WIDTH).unbind(1)
        query, key, value = ((hidden @ weight).unflatten(-1, (HEADS, -1)).transpose(1, 2) for weight in weights)
        scores = query @ key.transpose(-2, -1) / math.sqrt(WIDTH / HEADS)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class Vectorised(nn.Module):
    """An ensemble that runs as one, by `torch.vmap` over the parameters of its members."""

    def __init__(self, way: str) -> None:
        super().__init__()
        members = [Own(way, blocks=1) for _ in range(3)]
        self.member = members[0]
        stacked, _ = torch.func.stack_module_state(members)
        self.names = list(stacked)
        self.stacked = nn.ParameterList([value.detach() for value in stacked.values()])

    def forward(self, hidden: Tensor) -> Tensor:
        def run(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.member, parameters, (hidden,))

        return torch.vmap(run, randomness="different")(dict(zip(self.names, self.stacked, strict=True)))


class LearnsInside(nn.Module):
    """A gradient step on the parameters within the forward pass, as meta-learning takes it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.model = Own(way, blocks=1)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.enable_grad():
            parameters = dict(self.model.named_parameters())
            loss = torch.func.functional_call(self.model, parameters, (hidden,)).square().mean()
            gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=self.training)
            learned = {name: parameters[name] - 0.1 * step for name, step in zip(parameters, gradients, strict=True)}
        return torch.func.functional_call(self.model, learned, (hidden,))
