"""Temperatures under what people run their models with: compilation, checkpointing, autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from temperature.exactness import (
    assert_different,
    assert_same,
    found,
    nothing_left,
    outputs_and_gradients,
    written_in,
)
from temperature.own_attention import FOUND, WIDTH, Attention, Model, Separate, batch, made
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

TEMPERATURES = [0.5, 1.0, 1.75, 3.0]


@pytest.fixture
def compiler() -> Iterator[Any]:
    """Counts what is compiled; nothing compiled is left."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield counters
    torch.compiler.reset()


def without_dropout(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    if kind == "multihead":
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
        model: nn.Module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return model.to(dtype)
    model = made(FOUND[kind], dtype)
    for module in model.modules():
        if isinstance(module, Attention):
            module.dropout = 0.0
    return model


def move(temperature: Any, values: list[float]) -> None:
    for held in temperature.sites.values():
        temperature.set_temperatures(held.site, values[: len(held.log_temperatures)])


KINDS = ("qkv h d", "separate, written out", "a shared norm", "multihead")


@pytest.mark.parametrize(
    ("kind", "training"), [("qkv h d", True), ("a shared norm", True), ("multihead", True), ("multihead", False)]
)
def test_one_graph_without_breaks_serves_all_temperatures(compiler: Any, kind: str, training: bool) -> None:
    model, tokens = without_dropout(kind).train(training), batch(torch.float32)
    temperature = found(model, lambda model: model(tokens))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    neutral = outputs_and_gradients(model, lambda model: compiled(tokens))
    for values in (TEMPERATURES, [2.0] * 4, [1.0] * 4, TEMPERATURES):
        move(temperature, values)
        eager = outputs_and_gradients(model, lambda model: model(tokens))
        ours = outputs_and_gradients(model, lambda model: compiled(tokens))
        assert_same(ours, eager, 1e-5)
        assert compiler["stats"]["unique_graphs"] == 1, "it was compiled again"
    assert_different(ours, neutral)
    assert not compiler["graph_break"]


@pytest.mark.parametrize("kind", ["separate, written out", "multihead"])
def test_what_was_compiled_before_sees_temperatures_and_their_end(compiler: Any, kind: str) -> None:
    model, tokens = without_dropout(kind), batch(torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    plain = compiled(tokens).detach()
    with nothing_left(model):
        temperature = found(model, lambda model: compiled(tokens))
        assert len(temperature.sites) == 2
        assert torch.equal(compiled(tokens), plain)
        move(temperature, TEMPERATURES)
        hot = compiled(tokens).detach()
        assert torch.allclose(hot, model(tokens), atol=1e-5)
        assert not torch.allclose(hot, plain, atol=1e-2)
        temperature.detach()
    assert torch.allclose(compiled(tokens), hot, atol=1e-5)
    assert torch.allclose(model(tokens), hot, atol=1e-5)


def test_a_compiled_step_around_the_model_sees_them_too(compiler: Any) -> None:
    model, tokens = without_dropout("separate"), batch(torch.float32)

    @torch.compile(backend="eager", fullgraph=True)
    def step(tokens: Tensor) -> Tensor:
        output: Tensor = model(tokens)
        return output.square().mean()

    step(tokens)
    temperature = found(model, lambda model: model(tokens))
    move(temperature, TEMPERATURES)
    assert torch.allclose(step(tokens), model(tokens).square().mean(), atol=1e-6)


def test_temperatures_that_were_guessed_are_proven_under_compilation(compiler: Any) -> None:
    model, tokens = without_dropout("separate"), batch(torch.float32)
    from lightning_attn.temperature.attention_temperature import AttentionTemperature

    temperature = AttentionTemperature(model)
    temperature.guess()
    assert set(temperature.sites) == temperature.guessed == {"blocks.0.attention", "blocks.1.attention"}
    for site in temperature.sites:
        temperature.set_temperatures(site, 2.0)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    first = compiled(tokens).detach()
    assert torch.allclose(first, model(tokens), atol=1e-5)
    temperature.find(lambda: compiled(tokens))
    assert temperature.guessed == set()
    assert temperature["blocks.0.attention"] == pytest.approx([2.0] * 4)
    assert torch.allclose(compiled(tokens), first, atol=1e-5)
    move(temperature, TEMPERATURES)
    assert torch.allclose(compiled(tokens), model(tokens), atol=1e-5)
    assert not torch.allclose(compiled(tokens), first, atol=1e-2)


@pytest.mark.slow
def test_by_inductor(compiler: Any) -> None:
    model, tokens = without_dropout("qkv h d"), batch(torch.float32)
    temperature = found(model, lambda model: model(tokens))
    compiled = torch.compile(model, fullgraph=True)
    for values in (TEMPERATURES, [2.0] * 4):
        move(temperature, values)
        eager = outputs_and_gradients(model, lambda model: model(tokens))
        assert_same(outputs_and_gradients(model, lambda model: compiled(tokens)), eager, 1e-4)
    assert compiler["stats"]["unique_graphs"] == 1


class Checkpointed(Model):
    """Computes each block again for its gradients."""

    def __init__(self, attention: Callable[[], Attention], **options: Any) -> None:
        super().__init__(attention)
        self.options = options

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = checkpoint(block, tokens, **self.options)
        return tokens


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]),
    },
}


@pytest.mark.parametrize("kind", ["qkv h d", "a norm of all channels", "separate, written out"])
@pytest.mark.parametrize("way", CHECKPOINTS)
def test_gradients_of_what_is_computed_again(way: str, kind: str) -> None:
    tokens = batch().requires_grad_()
    plain = made(FOUND[kind])
    model = Checkpointed(FOUND[kind], **CHECKPOINTS[way]).double()
    model.load_state_dict(plain.state_dict())
    temperature = found(model, lambda model: model(tokens))
    move(temperature, TEMPERATURES)
    hot, _ = written_in(plain, {site: temperature[site] for site in temperature.sites})
    assert len(temperature.sites) == 2
    ours = outputs_and_gradients(model, lambda model: model(tokens))
    assert_same(ours, outputs_and_gradients(hot, lambda model: model(tokens)), 1e-10)


@pytest.mark.parametrize("is_found_within", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind: str, is_found_within: bool) -> None:
    """To what bfloat16 tells apart; and temperatures of powers of two to the last bit."""
    model, tokens = without_dropout(kind), batch(torch.float32)
    autocast = torch.autocast("cpu", torch.bfloat16)
    exact = copy.deepcopy(model)
    with autocast if is_found_within else nullcontext():
        temperature = found(model, lambda model: model(tokens))
    assert len(temperature.sites) == 2, temperature.refused
    move(temperature, TEMPERATURES)
    exact.load_state_dict(model.state_dict())
    with autocast:
        ours = outputs_and_gradients(model, lambda model: model(tokens))
    assert_same((ours[0], {}), (outputs_and_gradients(exact, lambda model: model(tokens))[0], {}), 0.05)
    move(temperature, [0.5, 2.0, 4.0, 1.0])
    exact.load_state_dict(model.state_dict())
    with autocast:
        ours, theirs = (outputs_and_gradients(m, lambda model: model(tokens))[0] for m in (model, exact))
    assert torch.equal(ours[0], theirs[0])


def test_the_surrounding_of_a_search_is_that_of_its_precision() -> None:
    """A mask in half precision, as a precision plugin makes it, fits queries in half precision alone."""
    model, tokens = without_dropout("separate"), batch(torch.float32)
    from lightning_attn.capture.met import Met
    from lightning_attn.temperature.attention_temperature import AttentionTemperature

    met = Met.of("blocks.0.attention", model.blocks[0].attention, (tokens,), {})
    temperature = AttentionTemperature(model)
    surroundings = []

    def surrounding() -> Any:
        surroundings.append(1)
        return torch.autocast("cpu", torch.bfloat16)

    assert temperature.find_among({"blocks.0.attention": met}, surrounding) == set()
    assert list(temperature.sites) == ["blocks.0.attention"] and surroundings == [1]


def test_a_site_that_is_used_twice_in_one_pass() -> None:
    class Twice(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(super().forward(tokens))

    model = Twice(Separate).double()
    untouched = copy.deepcopy(model)
    temperature = found(model, lambda model: model(batch()))
    move(temperature, TEMPERATURES)
    hot, _ = written_in(untouched, {site: temperature[site] for site in temperature.sites})
    ours, theirs = (outputs_and_gradients(m, lambda model: model(batch())) for m in (model, hot))
    assert_same(ours, theirs, 1e-10)
