"""Ranks that divide the heads of an attention among each other see together what one rank sees of the whole model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from divided_models import (
    ATTENTIONS,
    HEAD,
    HEADS,
    WIDTH,
    Attention,
    Block,
    FewerKeyHeads,
    Fused,
    HeadByHead,
    NormedAndRotated,
    OneKeyHead,
    Values,
    Written,
    assert_equal,
    batch,
    divide,
    made,
    mesh_of_all,
    observed,
)
from rank_pool import RankPool
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
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

from lightning_attn import AttentionObserver, AttentionWarning, observe, record
from lightning_attn.statistics import known_statistics
from lightning_attn.statistics.state_statistic import StateStatistic


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
