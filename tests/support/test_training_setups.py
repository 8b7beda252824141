"""The ways in which people train: what must be seen where parts are frozen, shared, skipped, adapted or computed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support.cell import Arguments, Cell, Refused, Seen, cells_of, check
from support.truth import Attention, Tape, causal, products, rotated, split_heads, tokens
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from lightning_attn import record

FAMILY = "Ways to train"
WIDTH, HEADS, LENGTH = 16, 2, 6


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


def hidden_states(model: nn.Module) -> Arguments:
    return {"hidden": torch.randn(2, LENGTH, WIDTH)}


def of_own(tape: Tape, site: str, call: int = 0) -> Attention:
    """What a call of `OwnAttention` computes."""
    query, key = (split_heads(tape.gave_at(f"{site}.{name}", call), HEADS) for name in ("query", "key"))
    length = query.shape[2]
    return Attention(site, products(query, key), causal(length, length), tape.given_at(f"{site}.out", call))


def in_order(*sites: str) -> Callable[[nn.Module, Tape, Arguments], list[Attention]]:
    """The truth where each of these sites makes a call, in this order; a site may be there several times."""

    def truth(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
        return [of_own(tape, site, call=sites[:place].count(site)) for place, site in enumerate(sites)]

    return truth


def of_blocks_that_ran(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    """The truth where some blocks of a model are left out."""
    sites = [f"blocks.{number}.attention" for number in range(4)]
    ran = [site for site in sites if tape.calls(site)]
    assert 0 < len(ran) < len(sites), "a test that shows nothing"
    return [of_own(tape, site) for site in ran]


BOTH = ("blocks.0.attention", "blocks.1.attention")


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


def of_torch_attention(model: Any, tape: Tape, arguments: Arguments) -> list[Attention]:
    attention = model.eval().attention  # a norm that is estimated would go on with its estimate in training
    weight, bias = attention.in_proj_weight.double(), attention.in_proj_bias.double()
    hidden = arguments["hidden"].double()
    query, key, value = (split_heads(part, HEADS) for part in (hidden @ weight.T + bias).chunk(3, dim=-1))
    logits = products(query, key)
    mixed = (logits.softmax(-1) @ value).transpose(1, 2).flatten(2)
    given = mixed @ attention.out_proj.weight.double().T + attention.out_proj.bias.double()
    assert (given - tape.gave_at("attention", 0)).abs().max() < 1e-5
    everything = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    return [Attention("attention", logits, everything, mixed)]


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


def of_weights_by_sequence(model: nn.Module, tape: Tape, arguments: Arguments) -> list[Attention]:
    weights = tape.gave_at("weights", 0).double().view(-1, 3, WIDTH, WIDTH)
    query, key = (split_heads(arguments["hidden"].double() @ weights[:, place], HEADS) for place in (0, 1))
    everything = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    return [Attention("(root)", products(query, key), everything, tape.given_at("out", 0))]


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


def own_cells(
    case: str,
    make: Callable[[str], nn.Module],
    calls: Sequence[str] = BOTH,
    ways: Sequence[str] = ("written out", "sdpa"),
    modes: Sequence[str] = ("train", "eval"),
    note: str = "",
    truth: Callable[[nn.Module, Tape, Arguments], list[Attention]] | None = None,
) -> list[Cell]:
    """The cells of a setup in which these sites make calls in this order, or those that a truth of its own tells."""
    return [
        Cell(
            FAMILY,
            case,
            way,
            mode,
            partial(make, way),
            hidden_states,
            truth or in_order(*calls),
            tuple(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", site) for site in calls)),
            Seen(note),
            training=mode == "train",
        )
        for way in ways
        for mode in modes
    ]


INSIDE = tuple(f"model.{site}" for site in BOTH)

OWN = [
    *own_cells("frozen layers under no_grad", lambda way: Frozen(way, torch.no_grad)),
    *own_cells("frozen layers under inference_mode", lambda way: Frozen(way, torch.inference_mode)),
    *own_cells(
        "teacher and student",
        Distilled,
        ("teacher.blocks.0.attention", "teacher.blocks.1.attention", "student.blocks.0.attention"),
        note="choose by `sites`",
    ),
    *own_cells("one layer at all depths", Tied, ("first.attention",) * 3, note="its calls add up"),
    *own_cells("layers that share weights", SharesWeights),
    *own_cells("layers skipped at random", partial(Skips, blocks=4), truth=of_blocks_that_ran, modes=["train"]),
    *own_cells("ensemble", Ensemble, tuple(f"members.{number}.blocks.0.attention" for number in range(3))),
    *own_cells(
        "heads for several tasks",
        ManyTasks,
        ("blocks.0.attention", "tasks.translate.attention", "tasks.tag.attention"),
        note="those that ran",
    ),
    *own_cells("average of the weights", Averaged, tuple(f"online.{site}" for site in BOTH), note="those that ran"),
    *own_cells("checkpoint, reentrant", lambda way: Checkpointed(way, use_reentrant=True), modes=["train"]),
    *own_cells("checkpoint, not reentrant", lambda way: Checkpointed(way, use_reentrant=False), modes=["train"]),
    *own_cells("weight norm", lambda way: every_layer(parametrizations.weight_norm, way)),
    *own_cells("spectral norm", lambda way: every_layer(parametrizations.spectral_norm, way)),
    *own_cells("orthogonal weights", lambda way: every_layer(parametrizations.orthogonal, way)),
    *own_cells("weights of low rank, parametrized", lambda way: every_layer(parametrized(LowRank), way)),
    *own_cells("weights of low rank, by matrix products", by_matrix_products),
    *own_cells("training in low precision (quantised weights)", lambda way: every_layer(parametrized(Quantised), way)),
    *own_cells("weights in eight bits", in_eight_bits),
    *own_cells("quantisation-aware training (torch.ao)", quantisation_aware),
    *(
        Cell(
            FAMILY,
            f"nn.MultiheadAttention, {case}",
            "fused",
            "train",  # in evaluation torch has another way of its own, and rounds otherwise
            partial(TorchAttention, change),
            hidden_states,
            of_torch_attention,
            ("attention",),
            training=True,
        )
        for case, change in (
            ("weights of low rank", parametrized(LowRank, "in_proj_weight")),
            ("spectral norm", partial(parametrizations.spectral_norm, name="in_proj_weight")),
        )
    ),
    *own_cells("functional_call", lambda way: Functional(way, lambda parameter: 0.9 * parameter), INSIDE),
    *own_cells("functional_call, tensors from before", CopiesFromBefore, INSIDE, modes=["eval"]),
    *own_cells("hypernetwork", Hypernetwork, INSIDE),
    Cell(
        FAMILY,
        "weights of each sequence from its data",
        "written out",
        "train",
        WeightsBySequence,
        hidden_states,
        of_weights_by_sequence,
        ("(root)",),
        training=True,
    ),
    *(
        Cell(
            FAMILY,
            "ensemble, by torch.vmap",
            way,
            "eval",
            partial(Vectorised, way),
            hidden_states,
            in_order(),
            outcome=Refused("inside a torch.func transform", "run the members one by one on the steps to be watched"),
        )
        for way in ("written out", "sdpa")
    ),
    *own_cells(
        "meta-learning",
        LearnsInside,
        ("model.blocks.0.attention",) * 2,
        ways=["written out"],  # torch differentiates its fused function once
        note="the calls of all passes add up",
    ),
]  # fmt: skip


# Models of Hugging Face

IDS = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(12) < torch.tensor([[12], [9]])


def bert(way: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        attention_probs_dropout_prob=0.0,
        attn_implementation=way,
    )
    return _hotter(transformers.BertModel(config, add_pooling_layer=False), "query", "key")


def llama(way: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=way,
        use_cache=False,
    )
    return _hotter(transformers.LlamaForCausalLM(config), "q_proj", "k_proj")


def _hotter(model: nn.Module, *layers: str) -> nn.Module:
    """The model with larger logits, so that its attention is not uniform."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in layers:
            assert isinstance(module, nn.Linear)
            nn.init.normal_(module.weight, std=0.3)
    return model


def gpt2(way: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=60, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0, use_cache=False, attn_implementation=way
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    for name, parameter in model.named_parameters():
        if "c_attn.weight" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def with_padding(model: nn.Module) -> Arguments:
    return {"input_ids": IDS, "attention_mask": MASK.long()}


def truth_of_bert(model: nn.Module, tape: Tape, arguments: Arguments, prefix: str = "") -> list[Attention]:
    found = []
    for layer in range(2):
        site = f"encoder.layer.{layer}.attention.self"
        query, key = (split_heads(tape.gave_at(f"{prefix}{site}.{name}", 0), 4) for name in ("query", "key"))
        output = tape.gave_at(f"{prefix}{site}", 0)
        found.append(Attention(site, products(query, key), tokens(MASK), output))
    return found


def truth_of_llama(model: nn.Module, tape: Tape, arguments: Arguments, prefix: str = "") -> list[Attention]:
    found = []
    for layer in range(2):
        site = f"model.layers.{layer}.self_attn"
        query, key = (
            rotated(split_heads(tape.gave_at(f"{prefix}{site}.{name}_proj", 0), heads), torch.arange(12)[None], 1e4)
            for name, heads in (("q", 4), ("k", 2))
        )
        output = tape.given_at(f"{prefix}{site}.o_proj", 0)
        found.append(Attention(site, products(query, key), causal(12, 12) & tokens(MASK), output))
    return found


def truth_of_gpt2(model: nn.Module, tape: Tape, arguments: Arguments, prefix: str = "") -> list[Attention]:
    found = []
    for layer in range(2):
        site = f"transformer.h.{layer}.attn"
        query, key, _ = (split_heads(part, 4) for part in tape.gave_at(f"{prefix}{site}.c_attn", 0).chunk(3, dim=-1))
        output = tape.given_at(f"{prefix}{site}.c_proj", 0)
        found.append(Attention(site, products(query, key), causal(12, 12) & tokens(MASK), output))
    return found


def _with_lora(make: Callable[[str], nn.Module], way: str) -> nn.Module:
    """The model with adapters that have learned something."""
    peft = pytest.importorskip("peft")
    targets = {llama: ["q_proj", "v_proj"], bert: ["query", "value"], gpt2: ["c_attn"]}[make]
    adapted: nn.Module = peft.get_peft_model(
        make(way), peft.LoraConfig(target_modules=targets, lora_dropout=0.1, fan_in_fan_out=make is gpt2)
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return adapted


def _checkpointing(use_reentrant: bool, make: Callable[[str], nn.Module], way: str) -> nn.Module:
    model: Any = make(way)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    return model  # type: ignore[no-any-return]


def _checkpointed_lora(make: Callable[[str], nn.Module], way: str) -> nn.Module:
    return _checkpointing(False, partial(_with_lora, make), way)


def hugging_face_cells(
    case: str, make: Callable[[Callable[[str], nn.Module], str], nn.Module], prefix: str, modes: Sequence[str]
) -> list[Cell]:
    """The cells of a setup of decoders and an encoder, with padding."""
    models = (
        ("Llama", llama, truth_of_llama, "model.layers.*.self_attn"),
        ("BERT", bert, truth_of_bert, "encoder.layer.*.attention.self"),
        ("GPT-2", gpt2, truth_of_gpt2, "transformer.h.*.attn"),
    )
    return [
        Cell(
            FAMILY,
            f"{name}, {case}",
            way,
            mode,
            partial(make, bare, way),
            with_padding,
            partial(truth, prefix=prefix),
            (sites,),
            training=mode == "train",
        )
        for name, bare, truth, sites in models
        for way in ("eager", "sdpa")
        for mode in modes
    ]


HUGGING_FACE = [
    *hugging_face_cells("LoRA by peft", _with_lora, "base_model.model.", ["train", "eval"]),
    *(
        cell
        for kind, use_reentrant in (("reentrant", True), ("not reentrant", False))
        for cell in hugging_face_cells(
            f"gradient_checkpointing_enable, {kind}",
            partial(_checkpointing, use_reentrant),
            "",
            ["train"],
        )
    ),
    *hugging_face_cells("LoRA and gradient checkpointing", _checkpointed_lora, "base_model.model.", ["train"]),
]

CELLS = [*OWN, *HUGGING_FACE]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing", "ignore:Please use quant_min and quant_max")
@cells_of(CELLS)
def test_cell(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize("way", ["written out", "sdpa"])
def test_weights_that_were_computed_before_anybody_watched(way: str) -> None:
    model, hidden = every_layer(parametrized(LowRank), way), torch.randn(2, LENGTH, WIDTH)
    with parametrize.cached():
        model(hidden)
        with record(model) as recording:
            model(hidden)
    assert recording.sites == BOTH


#: Weights that a hook computes before each call and leaves on the layer, as no parameter.
HOOKED: dict[str, Callable[[nn.Module], object]] = {
    "pruned": partial(prune.l1_unstructured, name="weight", amount=0.3),
    "weight norm of old": torch.nn.utils.weight_norm,
    "spectral norm of old": torch.nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("way", ["written out", "sdpa"])
@pytest.mark.parametrize("kind", HOOKED)
def test_weights_that_a_hook_leaves_on_a_layer(kind: str, way: str) -> None:
    model, hidden = every_layer(HOOKED[kind], way), torch.randn(2, LENGTH, WIDTH)
    tape = Tape()
    with record(model) as recording, tape.running(model):
        model(hidden).sum().backward()
    assert recording.sites == BOTH
    for call, site in zip(recording.calls, BOTH, strict=True):
        truth = of_own(tape, site)
        difference = (call.logits()[0].double() - truth.logits_BHNM).masked_fill(~truth.visible_BHNM, 0.0)
        assert difference.abs().max() < 1e-5
        assert truth.output_BNX is not None
        assert (call.output().transpose(1, 2).flatten(2) - truth.output_BNX).abs().max() < 1e-5
