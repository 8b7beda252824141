"""Walking over models: in the order of torch, and without calling what a model may have made of its methods."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_attn.capture.module_tree import buffers_of, children_of, modules_of, parameters_of


def a_model() -> nn.Module:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict(
        {
            "first": nn.Sequential(shared, nn.BatchNorm1d(2), nn.Sequential(nn.PReLU(), shared)),
            "second": nn.TransformerEncoderLayer(4, 2),
            "again": shared,
        }
    )
    model.register_module("nothing", None)
    model["second"].register_parameter("nothing", None)
    model["second"].register_buffer("none", None)
    return model


def test_the_order_is_that_of_torch_and_everything_comes_once() -> None:
    model = a_model()
    assert list(modules_of(model)) == list(model.modules())
    assert [name for name, _ in children_of(model)] == ["first", "second", "again"]
    assert list(map(id, parameters_of(model))) == list(map(id, model.parameters()))
    assert list(map(id, buffers_of(model))) == list(map(id, model.buffers()))


def test_nothing_is_asked_of_the_model() -> None:
    class Asked(nn.Linear):
        def named_modules(self, *args: object, **kwargs: object) -> object:
            pytest.fail("a method of the model was called")

        parameters = named_parameters = buffers = named_buffers = modules = children = named_children = named_modules

    model = nn.Sequential(Asked(2, 2), nn.BatchNorm1d(2))
    assert len(list(modules_of(model))) == 3
    assert len(list(parameters_of(model))) == 4
    assert len(list(buffers_of(model))) == 3


def test_a_functional_call_shows_what_stands_in_the_place_of_parameters() -> None:
    class Shows(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.shown = list(parameters_of(self))
            return super().forward(hidden)

    layer = Shows(2, 2)
    other = torch.zeros(2, 2)
    torch.func.functional_call(layer, {"weight": other}, (torch.zeros(1, 2),))
    assert layer.shown[0] is other and layer.shown[1] is layer.bias
