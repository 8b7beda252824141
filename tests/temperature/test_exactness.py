"""Temperatures do what a temperature does that is written into a module by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from temperature.exactness import assert_same, check, found, nothing_left, outputs_and_gradients, written_in
from temperature.own_attention import FOUND, WithNorm, batch, made

IN_EVALUATION = ("qkv h d", "separate, written out", "with gates", "a shared norm")


@pytest.mark.parametrize(
    ("layout", "training"), [*((layout, True) for layout in FOUND), *((layout, False) for layout in IN_EVALUATION)]
)
def test_outputs_and_all_gradients_are_those_of_a_temperature_by_hand(layout: str, training: bool) -> None:
    model = made(FOUND[layout]).train(training)
    untouched = copy.deepcopy(model)
    check(model, lambda model: model(batch()), lambda temperatures: written_in(untouched, temperatures), 1e-10)


@pytest.mark.parametrize("layout", [name for name in FOUND if "norm" not in name])
def test_each_head_has_a_temperature_of_its_own(layout: str) -> None:
    temperature = found(made(FOUND[layout]), lambda model: model(batch()))
    assert all(len(held.log_temperatures) == 4 and not held.is_shared for held in temperature.sites.values())


def test_heads_with_one_gain_have_one_temperature() -> None:
    temperature = found(made(lambda: WithNorm("shared")), lambda model: model(batch()))
    held = temperature.sites["blocks.0.attention"]
    assert held.is_shared and held.is_foldable and held.heads == 4
    temperature.set_temperatures("blocks.0.attention", 2.0)
    assert temperature["blocks.0.attention"] == pytest.approx([2.0] * 4)
    with pytest.raises(ValueError, match="one number or 1"):
        temperature.set_temperatures("blocks.0.attention", [1.0, 2.0, 3.0, 4.0])


def test_a_norm_without_gain_cannot_be_folded() -> None:
    model = made(lambda: WithNorm("none"))
    temperature = found(model, lambda model: model(batch()))
    assert not temperature.sites["blocks.0.attention"].is_foldable


@pytest.mark.parametrize("layout", ["qkv h d", "separate", "a norm of all channels", "a shared norm"])
def test_temperatures_of_one_change_no_bit(layout: str) -> None:
    model = made(FOUND[layout], torch.float32)
    plain = copy.deepcopy(model)
    with nothing_left(model):
        temperature = found(model, lambda model: model(batch(torch.float32)))
        for site in temperature.sites:
            temperature.set_temperatures(site, 3.0)
            temperature.set_temperatures(site, 1.0)
        ours = outputs_and_gradients(model, lambda model: model(batch(torch.float32)))
        assert_same(ours, outputs_and_gradients(plain, lambda model: model(batch(torch.float32))), 0.0)
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
        temperature.detach()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())


@pytest.mark.parametrize("given", [0.0, -1.0, float("nan"), float("inf"), [1.0, 2.0]])
def test_what_is_no_temperature_is_refused(given: float | list[float]) -> None:
    temperature = found(made(FOUND["separate"]), lambda model: model(batch()))
    with pytest.raises(ValueError, match="temperatures"):
        temperature.set_temperatures("blocks.0.attention", given)
    with pytest.raises(KeyError):
        temperature.set_temperatures("blocks.7.attention", 2.0)
