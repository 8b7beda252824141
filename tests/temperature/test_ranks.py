"""Temperatures of models that ranks divide among each other are those of the whole model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from divided_models import (
    HEAD,
    HEADS,
    WIDTH,
    Attention,
    FewerKeyHeads,
    Fused,
    Gated,
    HeadByHead,
    NormedAndRotated,
    OneKeyHead,
    RawWeights,
    Written,
    batch,
    divide,
    made,
    mesh_of_all,
    plan_of,
)
from rank_pool import RankPool
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from lightning_attn.temperature.attention_temperature import AttentionTemperature

TEMPERATURES = [0.5, 1.0, 2.5, 4.0]
FIRST = "blocks.0.attention"


class OfLocalWeights(nn.Linear):
    """Computes with what its rank holds, and gives a plain tensor."""

    def forward(self, tokens: Tensor) -> Tensor:
        held = (
            tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (tokens, self.weight, self.bias)
        )
        return functional.linear(*held)


class LocalQueries(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.query = OfLocalWeights(WIDTH, WIDTH)


class Normed(Attention):
    """One gain for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HEAD)

    def projected(self, tokens: Tensor) -> list[Tensor]:
        query, key, value = super().projected(tokens)
        return [self.norm(query), key, value]


class NormOfAllChannels(Attention):
    """A gain of its own for each channel, in a norm that every rank computes whole (OLMo 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)

    def projected(self, tokens: Tensor) -> list[Tensor]:
        query, key, value = self.query(tokens), self.key(tokens), self.value(tokens)
        return [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.norm(query), key, value)]


Result = dict[str, Any]


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(model: nn.Module, plain: nn.Module, tokens: Tensor) -> Result:
    """What a model with temperatures computes, saves, and becomes.

    Args:
        model: the model.
        plain: the same without anything, to load what is saved into.
        tokens: what the model is given.
    """
    before = {name: whole(parameter) for name, parameter in model.named_parameters()}
    temperature = AttentionTemperature(model)
    temperature.find(lambda: model(tokens))
    result: Result = {"refused": dict(temperature.refused), "sites": list(temperature.sites)}
    if temperature.refused:
        return result
    result["unchanged"] = all(torch.equal(whole(p), before[name]) for name, p in model.named_parameters())
    result["counts"] = [len(held.log_temperatures) for held in temperature.sites.values()]
    for site, held in temperature.sites.items():
        temperature.set_temperatures(site, TEMPERATURES[: len(held.log_temperatures)])
    output = model(tokens)
    output.square().sum().backward()
    result["gradients"] = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    result["output"] = whole(output)
    result["weights"] = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    state = copy.deepcopy(temperature.state_dict())
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    temperature.detach()
    result["folded"] = all(torch.equal(whole(p), result["weights"][name]) for name, p in model.named_parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(weights)
    result["folded output"] = whole(model(tokens))
    again = AttentionTemperature(model)
    result["others"] = again.load_state_dict(state)
    result["resumed"] = all(torch.equal(whole(p), before[name]) for name, p in model.named_parameters())
    result["resumed output"] = whole(model(tokens))
    plain.load_state_dict(result["weights"])
    result["plain output"] = plain(tokens).detach()
    again.detach()
    return result


def check(
    results: list[Result], expected: Result, sequences: int | None = None, without_gradients: tuple[str, ...] = ()
) -> None:
    """The same on every rank as in one process; each may have a part of the sequences."""
    for rank, result in enumerate(results):
        assert result["refused"] == {} and result["sites"] == expected["sites"]
        assert result["counts"] == expected["counts"]
        assert result["unchanged"] and result["folded"] and result["others"] == [] and result["resumed"]
        mine = slice(None) if sequences is None else slice(rank * sequences, (rank + 1) * sequences)
        for name in ("output", "folded output", "resumed output", "plain output"):
            torch.testing.assert_close(
                result[name], expected["output"][mine], rtol=1e-10, atol=1e-10, msg=f"{name} of {rank}"
            )
        for name, gradient in expected["gradients"].items():
            if any(part in name for part in without_gradients):
                continue
            factor = 1.0 if sequences is None else float(len(results))  # strategies take means over ranks
            theirs = result["gradients"][name] * (factor if sequences else 1.0)
            torch.testing.assert_close(theirs, gradient, rtol=1e-9, atol=1e-9, msg=f"gradient of {name} on {rank}")
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=1e-14, atol=1e-14)


def alone(attention: type[Attention], tokens: Tensor | None = None) -> Result:
    return trained(made(attention), made(attention), batch() if tokens is None else tokens)


def tensor_parallel(attention: type[Attention]) -> Result:
    model, mesh = made(attention), mesh_of_all()
    if attention is LocalQueries:  # it takes its part itself
        for block in model.blocks:
            plan = plan_of(block.attention)
            del plan["query"]
            parallelize_module(block.attention, mesh, plan)
            for name, parameter in list(block.attention.query.named_parameters()):
                part = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
                block.attention.query.register_parameter(name, part)
    else:
        divide(model, mesh)
    return trained(model, made(attention), batch())


TENSOR_PARALLEL = [
    *(Attention, FewerKeyHeads, Written),
    *(pytest.param(one, marks=pytest.mark.slow) for one in (OneKeyHead, Fused, Normed, LocalQueries, Gated)),
]


@pytest.mark.parametrize("attention", TENSOR_PARALLEL)
def test_ranks_that_divide_heads(ranks: RankPool, attention: type[Attention]) -> None:
    # What every rank computes for its own heads has gradients of these alone.
    partial = {OneKeyHead: "", Gated: "", LocalQueries: "", Normed: ".norm."}
    without = (partial[attention],) if attention in partial else ()
    check(ranks(tensor_parallel, attention), alone(attention), without_gradients=without)


@pytest.mark.slow
def test_four_ranks_with_a_head_each(ranks: RankPool) -> None:
    check(ranks(tensor_parallel, Attention, ranks=4), alone(Attention))


def tensor_parallel_and_refused(attention: type[Attention]) -> dict[str, str]:
    model = divide(made(attention), mesh_of_all())
    temperature = AttentionTemperature(model)
    temperature.find(lambda: model(batch()))
    assert temperature.sites == {}
    return temperature.refused


@pytest.mark.parametrize("attention", [RawWeights, NormedAndRotated])
def test_ranks_refuse_together_what_none_can_do(ranks: RankPool, attention: type[Attention]) -> None:
    first, second = ranks(tensor_parallel_and_refused, attention)
    assert first == second and set(first) == {"blocks.0.attention", "blocks.1.attention"}


def part_of_rank(tokens: Tensor, rank: int | None = None, ranks: int | None = None) -> Tensor:
    return tokens.chunk(ranks or dist.get_world_size())[dist.get_rank() if rank is None else rank]


def sharded(attention: type[Attention], parts: str) -> Result:
    """FSDP2 of blocks, of the model alone, or of attentions and their layers."""
    model = made(attention)
    for block in model.blocks:
        if parts == "layers":
            fully_shard(block.attention.query)
        if parts in ("attentions", "layers"):
            fully_shard(block.attention)
        if parts != "model":
            fully_shard(block)
    fully_shard(model)
    return trained(model, made(attention), part_of_rank(batch()))


@pytest.mark.parametrize(
    "parts", ["blocks", *(pytest.param(parts, marks=pytest.mark.slow) for parts in ("model", "attentions", "layers"))]
)
@pytest.mark.parametrize("attention", [FewerKeyHeads, Fused])
def test_ranks_that_divide_weights(ranks: RankPool, attention: type[Attention], parts: str) -> None:
    check(ranks(sharded, attention, parts), alone(attention), sequences=2)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [Normed, NormOfAllChannels, HeadByHead])
def test_ranks_that_divide_weights_of_other_attentions(ranks: RankPool, attention: type[Attention]) -> None:
    check(ranks(sharded, attention, "blocks"), alone(attention), sequences=2)


def both(attention: type[Attention]) -> Result:
    """Two ranks with half of the heads, twice, with half of the sequences."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    model = divide(made(attention), mesh["tensor_parallel"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return trained(model, made(attention), part_of_rank(batch(), mesh.get_coordinate()[0], 2))


@pytest.mark.parametrize(
    "attention", [Fused, *(pytest.param(one, marks=pytest.mark.slow) for one in (FewerKeyHeads, Normed))]
)
def test_ranks_that_divide_heads_and_weights(ranks: RankPool, attention: type[Attention]) -> None:
    results = ranks(both, attention, ranks=4)
    expected = alone(attention)
    for rows in (results[::2], results[1::2]):
        check(rows, expected, sequences=2, without_gradients=(".norm.",) if attention is Normed else ())


def data_parallel(attention: type[Attention]) -> Result:
    model = nn.parallel.DistributedDataParallel(made(attention))
    plain = nn.Sequential()
    plain.module = made(attention)
    plain.forward = plain.module.forward
    return trained(model, plain, part_of_rank(batch()))


@pytest.mark.parametrize("attention", [FewerKeyHeads])
def test_ranks_that_divide_sequences(ranks: RankPool, attention: type[Attention]) -> None:
    results = ranks(data_parallel, attention)
    for result in results:
        for name in ("gradients", "weights"):
            result[name] = {key.removeprefix("module."): tensor for key, tensor in result[name].items()}
    check(results, alone(attention), sequences=2)


def with_other_tokens(kind: str) -> tuple[list[str], dict[str, str], list[float]]:
    """The second rank is given nothing but zeros, and its keys are zero."""
    model = made(Attention)
    if kind == "FSDP2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    tokens = batch().detach() * (1 - dist.get_rank())
    temperature = AttentionTemperature(model, sites="blocks.0.*")
    with torch.no_grad():
        for layer in ("query", "key"):
            model.blocks[0].attention.get_submodule(layer).bias.zero_()
        model.blocks[0].norm.bias.zero_()
    temperature.find(lambda: model(tokens))
    stds = [held.bias_std.tolist() for held in temperature.sites.values()]
    return list(temperature.sites), dict(temperature.refused), stds


def test_what_one_rank_has_found_is_true_for_all(ranks: RankPool) -> None:
    first, second = ranks(with_other_tokens, "DDP")
    assert first == second
    assert first[0] == [FIRST] and first[1] == {}


def test_ranks_that_run_together_wait_until_all_can_tell(ranks: RankPool) -> None:
    first, second = ranks(with_other_tokens, "FSDP2")
    assert first == second
    assert first[0] == [] and "zero" in first[1][FIRST]


def with_other_layouts() -> tuple[list[str], dict[str, str]]:
    model = made(Attention if dist.get_rank() == 0 else Fused)
    temperature = AttentionTemperature(model)
    temperature.find(lambda: model(batch()))
    return list(temperature.sites), dict(temperature.refused)


def test_ranks_that_disagree_leave_a_site_alone(ranks: RankPool) -> None:
    first, second = ranks(with_other_layouts)
    assert first == second
    assert first[0] == [] and all("different layouts" in reason for reason in first[1].values())
