"""Ranks that divide the heads of an attention among each other see together what one rank sees of the whole model.

The models are in double precision, so that a rank's products do not round otherwise than those of the whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_attn import AttentionObserver, AttentionWarning, observe, record
from lightning_attn.statistics import known_statistics
from lightning_attn.statistics.state_statistic import StateStatistic

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


def tensor_parallel(attention: type[Attention]) -> Values:
    return observed(divide(made(attention), mesh_of_all()), batch())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_two_ranks_with_half_of_the_heads_each_see_all_of_them(ranks: RankPool, attention: type[Attention]) -> None:
    expected = observed(made(attention), batch())
    assert list(expected) == ["blocks.0.attention", "blocks.1.attention"]
    assert all(len(of_site["entropy"]) == HEADS for of_site in expected.values())
    assert_equal(ranks(tensor_parallel, attention), expected)


@pytest.mark.parametrize("attention", [Attention, OneKeyHead, Fused, Written, HeadByHead])
def test_four_ranks_with_a_head_each_see_all_of_them(ranks: RankPool, attention: type[Attention]) -> None:
    assert_equal(ranks(tensor_parallel, attention, ranks=4), observed(made(attention), batch()))


def recorded() -> str:
    model = divide(made(FewerKeyHeads), mesh_of_all())
    with record(model, sites="blocks.0.*") as recording:
        model(batch())
    return str(recording).splitlines()[1]


def test_a_recording_tells_which_heads_a_rank_has(ranks: RankPool) -> None:
    first, second = ranks(recorded)
    assert "2 in groups of 2 from #0 of 4" in first
    assert "2 in groups of 2 from #2 of 4" in second


def without_gradients(attention: type[Attention]) -> Values:
    model = divide(made(attention), mesh_of_all()).eval()
    with torch.no_grad():
        return observed(model, batch(), backward=False)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_heads_are_told_without_gradients_as_well(ranks: RankPool, attention: type[Attention]) -> None:
    assert_equal(ranks(without_gradients, attention), observed(made(attention), batch(), backward=False))


def checkpointed(use_reentrant: bool) -> Values:
    return observed(divide(made(Attention, checkpointing=use_reentrant), mesh_of_all()), batch())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_heads_are_told_under_checkpointing(ranks: RankPool, use_reentrant: bool) -> None:
    assert_equal(ranks(checkpointed, use_reentrant), observed(made(Attention), batch()))


def with_gathered_projections() -> Values:
    """Each rank gathers the channels of all and computes all heads."""
    mesh, model = mesh_of_all(), made(Attention)
    gathering = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("query", "key", "value")}
    for block in model.blocks:
        parallelize_module(block.attention, mesh, gathering)
    return observed(model, batch())


def with_whole_attention() -> Values:
    """Only the feed-forward is divided."""
    mesh, model = mesh_of_all(), made(Attention)
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return observed(model, batch())


@pytest.mark.parametrize("divided", [with_gathered_projections, with_whole_attention])
def test_ranks_that_compute_all_heads_each_are_not_taken_for_parts(
    ranks: RankPool, divided: Callable[[], Values]
) -> None:
    assert_equal(ranks(divided), observed(made(Attention), batch()))


class GathersHeads(Attention):
    """With a collective of its own, of which nobody can tell what it puts where."""

    def projected(self, tokens: Tensor) -> list[Tensor]:
        return [torch.cat(all_gather(tensor), dim=1) for tensor in super().projected(tokens)]


def with_heads_gathered_by_hand() -> tuple[Values, list[str]]:
    mesh, model = mesh_of_all(), made(GathersHeads)
    for block in model.blocks:
        parallelize_module(block.attention, mesh, {name: ColwiseParallel() for name in ("query", "key", "value")})
    observer = AttentionObserver(model, statistics="entropy")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with observer:
            model(batch())
        values = observer.snapshot().to_dict()
    return values, [str(warning.message) for warning in said if issubclass(warning.category, AttentionWarning)]


def test_heads_that_the_model_gathers_itself_are_refused(ranks: RankPool) -> None:
    first, second = ranks(with_heads_gathered_by_hand)
    assert first[0] == second[0] == {}
    assert second[1] == []  # since the first rank has said it
    assert len(first[1]) == 2
    assert all("divided among ranks, and which of them are computed here cannot be told" in line for line in first[1])


class Core(nn.Module):
    """The attention as a module of its own, without weights."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class WithCore(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.core = Core()

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.core(query, key, value)


def with_core_divided(given: Any, desired: Any, returned: Any, tokens: Tensor) -> tuple[Values, list[str]]:
    """Only the attention itself is divided, by a layout of its queries, keys and values."""
    mesh, model = mesh_of_all(), made(WithCore)
    for block in model.blocks:
        plan = {
            "core": PrepareModuleInputOutput(
                input_layouts=(given,) * 3,
                desired_input_layouts=(desired,) * 3,
                use_local_input=True,
                output_layouts=desired,
                desired_output_layouts=returned,
            )
        }
        parallelize_module(block.attention, mesh, plan)
    observer = AttentionObserver(model, statistics=["entropy", "max_logit"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with observer:
            model(tokens)
        values = observer.snapshot().to_dict()
    return values, [str(warning.message) for warning in said if issubclass(warning.category, AttentionWarning)]


def by_layout_of_heads() -> Any:
    return with_core_divided(Replicate(), Shard(1), Replicate(), batch())


def by_exchange_of_tokens_for_heads() -> Any:
    """As DeepSpeed-Ulysses does, by layouts of torch."""
    tokens = batch().detach().chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()
    return with_core_divided(Shard(2), Shard(1), Shard(2), tokens.requires_grad_())


def by_layout_of_tokens() -> Any:
    return with_core_divided(Replicate(), Shard(2), Replicate(), batch())


@pytest.mark.parametrize("divided", [by_layout_of_heads, by_exchange_of_tokens_for_heads])
def test_a_layout_of_heads_is_followed_to_plain_tensors(ranks: RankPool, divided: Callable[[], Any]) -> None:
    found = ranks(divided)
    assert all(said == [] for _, said in found)
    assert_equal([values for values, _ in found], observed(made(WithCore), batch(), ["entropy", "max_logit"]))


def test_a_layout_of_tokens_is_refused_where_tensors_are_plain(ranks: RankPool) -> None:
    first, second = ranks(by_layout_of_tokens)
    assert first[0] == second[0] == {}
    assert all("context parallelism, ring attention" in message for message in first[1])


class ThreeHeads(Attention):
    """Weights with an axis of heads, of which there may be fewer than ranks."""

    def __init__(self) -> None:
        super().__init__()
        shape = (3, HEAD, WIDTH)
        self.weights = nn.ParameterList(torch.randn(shape) / WIDTH**0.5 for _ in range(3))
        self.out = nn.Linear(3 * HEAD, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        weights = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in self.weights]
        query, key, value = (torch.einsum("bnl,hdl->bhnd", tokens, weight) for weight in weights)
        functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return tokens


def with_heads_divided_unevenly() -> Values:
    mesh, model = mesh_of_all(), made(ThreeHeads)
    for block in model.blocks:
        for place, weight in enumerate(block.attention.weights):
            block.attention.weights[place] = nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(0)]))
    return observed(model, batch(), backward=False)


@pytest.mark.parametrize("size", [2, 4])
def test_heads_that_ranks_divide_unevenly(ranks: RankPool, size: int) -> None:
    """Two of three and one, or one each and none."""
    expected = observed(made(ThreeHeads), batch(), backward=False)
    assert_equal(ranks(with_heads_divided_unevenly, ranks=size), expected)


def with_divided_sequences(attention: type[Attention]) -> Values:
    """Sequence parallelism: the norms work on a part of the tokens each, and the attention on all."""
    mesh, model = mesh_of_all(), made(attention)
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    tokens = batch().detach().chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous().requires_grad_()
    return observed(model, tokens)


@pytest.mark.parametrize("attention", [Attention, HeadByHead])
def test_sequence_parallelism_around_the_attention(ranks: RankPool, attention: type[Attention]) -> None:
    """What leaves the attention is divided among ranks, so that what compares it with what entered is absent."""
    found, expected = ranks(with_divided_sequences, attention), observed(made(attention), batch())
    known = known_statistics().values()
    leaving = {s.name for s in known if issubclass(s, StateStatistic) and s.needs_leaving}
    assert leaving
    assert all(found[0][site][name] == [None] for site in expected for name in leaving)
    assert_equal(found, expected, but=leaving)


# Together with sharded weights.


def with_sharded_weights(attention: type[Attention], each_layer: bool, needs_gradients: bool) -> Values:
    """Two ranks divide the heads, and two such pairs divide the batch and shard the weights (FSDP2)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    model = divide(made(attention), mesh["tensor_parallel"])
    for module in list(model.modules()):
        if isinstance(module, nn.Linear if each_layer else Block):
            fully_shard(module, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    tokens = batch().chunk(2)[mesh["data_parallel"].get_local_rank()].detach().requires_grad_()
    with torch.set_grad_enabled(needs_gradients):
        return observed(model, tokens, backward=needs_gradients)


@pytest.mark.parametrize("needs_gradients", [True, False])
@pytest.mark.parametrize("each_layer", [False, True])
@pytest.mark.parametrize("attention", [Attention, OneKeyHead, Fused, Written])
def test_divided_heads_and_sharded_weights(
    ranks: RankPool, attention: type[Attention], each_layer: bool, needs_gradients: bool
) -> None:
    expected = observed(made(attention), batch(), backward=False)
    # Sequences of different ranks are not paired.
    paired = {name for name, statistic in known_statistics().items() if statistic.compares_sequences}
    assert_equal(ranks(with_sharded_weights, attention, each_layer, needs_gradients, ranks=4), expected, but=paired)


def with_weights_sharded_alone(attention: type[Attention]) -> Values:
    """Weights that are spread over ranks, and heads that are not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = made(attention)
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return observed(model, batch())


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("ranks_of_it", [2, 3])
def test_sharded_weights_do_not_divide_heads(ranks: RankPool, attention: type[Attention], ranks_of_it: int) -> None:
    """A fused projection that three ranks share has the queries' width on each of them."""
    expected = observed(made(attention), batch())
    assert_equal(ranks(with_weights_sharded_alone, attention, ranks=ranks_of_it), expected)


# Tensors that are spread over ranks at the attention itself.


def all_spread(attention: type[Attention]) -> Values:
    mesh, model = mesh_of_all(), made(attention)
    for block in model.blocks:
        plan = {name: ColwiseParallel(use_local_output=False) for name in ("query", "key", "value")}
        parallelize_module(block.attention, mesh, {**plan, "out": RowwiseParallel()})
    with sdpa_kernel(SDPBackend.MATH):
        return observed(model, batch())


class WrittenWithoutMask(Attention):
    """Since what a model of tensors that are spread over ranks adds must be spread over them as well."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.transpose(-1, -2) / HEAD**0.5).softmax(-1) @ value


class ToldWithoutMask(WrittenWithoutMask):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        observe(query, key, value)
        return super().attend(query, key, value)


class FusedWithoutMask(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize("attention", [WrittenWithoutMask, ToldWithoutMask, FusedWithoutMask])
def test_heads_of_tensors_that_are_spread_over_ranks(ranks: RankPool, attention: type[Attention]) -> None:
    assert_equal(ranks(all_spread, attention), observed(made(attention), batch()))


# The model notices nothing.


class Communication(TorchDispatchMode):
    """The collectives that are called, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace.startswith(("c10d", "_c10d")):
            self.called.append(str(function))
        return function(*args, **kwargs or {})


def trained(watched: bool) -> tuple[Tensor, list[Tensor], list[str]]:
    """Output, gradients and the collectives of a step."""
    model, tokens = divide(made(NormedAndRotated), mesh_of_all()), batch()
    observer = AttentionObserver(model, statistics="all")
    with Communication() as communication:
        with observer if watched else nullcontext():
            output = model(tokens)
        output.sum().backward()
    gradients = [tokens.grad, *(weight.grad.to_local() for weight in model.parameters() if isinstance(weight, DTensor))]
    return output.detach(), gradients, communication.called


def watched_and_not() -> tuple[Any, Any]:
    return trained(watched=True), trained(watched=False)


def test_a_divided_model_computes_and_communicates_as_if_unwatched(ranks: RankPool) -> None:
    for watched, unwatched in ranks(watched_and_not):
        assert torch.equal(watched[0], unwatched[0])
        assert len(watched[1]) == len(unwatched[1]) > 10
        assert all(map(torch.equal, watched[1], unwatched[1]))
        assert watched[2] == unwatched[2]
        assert len(watched[2]) > 8
