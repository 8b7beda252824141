"""Holding a model with temperatures against one that has them written into it by hand, or folded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_attn.temperature.attention_temperature import AttentionTemperature

Run = Callable[[nn.Module], Any]


def found(model: nn.Module, run: Run) -> AttentionTemperature:
    """Temperatures of a model that has run once."""
    temperature = AttentionTemperature(model)
    temperature.find(lambda: run(model))
    return temperature


def tensors(value: Any) -> list[Tensor]:
    """Every floating-point tensor of a model's output, whatever it is packed into."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value for tensor in tensors(part)] if isinstance(value, (tuple, list)) else []


def outputs_and_gradients(model: nn.Module, run: Run) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What a model gives, and the gradients of all its parameters."""
    model.zero_grad()
    torch.manual_seed(3)
    output = tensors(run(model))
    if torch.is_grad_enabled():
        sum((tensor.square().mean() for tensor in output if tensor.requires_grad), torch.zeros(())).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [tensor.detach().clone() for tensor in output], gradients


def assert_same(ours: Any, theirs: Any, tolerance: float) -> None:
    """The same outputs and gradients; a tolerance of zero means every bit."""
    for one, other in zip(ours[0], theirs[0], strict=True):
        _assert_near(one, other, tolerance, "an output")
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        _assert_near(ours[1][name], gradient, tolerance, f"the gradient of {name}")


def _assert_near(ours: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    ours, theirs = ours.nan_to_num(), theirs.nan_to_num()
    size = theirs.abs().max().clamp(min=1.0)
    assert (ours - theirs).abs().max() <= tolerance * size, f"{what} is off by {(ours - theirs).abs().max():.2g}"


def assert_different(ours: Any, theirs: Any) -> None:
    """A test that could not fail otherwise."""
    assert any((one - other).abs().max() > 1e-4 for one, other in zip(ours[0], theirs[0], strict=True))


def on_modules(model: nn.Module) -> dict[str, Any]:
    """Classes, attributes and hooks of all modules."""
    state = {}
    for name, module in model.named_modules():
        held = vars(module)
        hooks = {key: len(value) for key, value in held.items() if key.endswith("hooks") and value}
        state[name] = (type(module), set(held) - {"_is_hf_initialized"}, hooks)
    return state


@contextmanager
def nothing_left(model: nn.Module) -> Iterator[None]:
    """The block leaves nothing behind on a model."""
    before = on_modules(model)
    yield
    assert on_modules(model) == before


def check(
    model: nn.Module,
    run: Run,
    hot: Callable[[dict[str, list[float]]], tuple[nn.Module, Any]],
    tolerance: float,
    temperatures: Callable[[int], list[float]] = lambda heads: [0.5 + 0.75 * head for head in range(heads)],
    refused: tuple[str, ...] = (),
    renamed: Callable[[Any], Any] = lambda result: result,
) -> None:
    """Hold a model with temperatures against one that has them written into it, with gradients, before and after.

    Args:
        model: the model.
        run: runs it.
        hot: of temperatures by site, a model that has them written into it and a context to run it in.
        tolerance: as a share of the largest.
        temperatures: for so many of them.
        refused: the sites that have none.
        renamed: gives the gradients of the other model the names of this one's.
    """
    plain = copy.deepcopy(model)
    without = outputs_and_gradients(model, run)
    with nothing_left(model):
        temperature = found(model, run)
        assert tuple(temperature.refused) == refused, temperature.refused
        assert temperature.sites
        assert_same(outputs_and_gradients(model, run), without, 0.0)
        for site, held in temperature.sites.items():
            temperature.set_temperatures(site, temperatures(len(held.log_temperatures)))
        mine = outputs_and_gradients(model, run)
        expected, context = hot({site: temperature[site] for site in temperature.sites})
        with context:
            theirs = renamed(outputs_and_gradients(expected, run))
        assert_same(mine, theirs, tolerance)
        assert_different(mine, without)
        is_foldable = all(held.is_foldable for held in temperature.sites.values())
        assert plain.load_state_dict(model.state_dict()).missing_keys == []
        temperature.detach()
    if not is_foldable:
        return
    folded = outputs_and_gradients(model, run)
    assert_same((folded[0], {}), (mine[0], {}), tolerance)
    assert_same(folded, outputs_and_gradients(plain, run), 0.0)


def written_in(model: nn.Module, temperature: dict[str, list[float]]) -> tuple[nn.Module, Any]:
    """A copy of a model of `own_attention` with temperatures written in."""
    hot = copy.deepcopy(model)
    for site, heads in temperature.items():
        hot.get_submodule(site).temperature_H = torch.tensor(heads, dtype=torch.float64)
    return hot, nullcontext()
