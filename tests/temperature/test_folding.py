"""What leaves training is an ordinary model; what goes on with it is the same to the last bit."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from temperature.exactness import found, nothing_left
from temperature.own_attention import FOUND, WIDTH, Separate, WithNorm, batch, made
from torch import Tensor, nn

from lightning_attn.temperature.attention_temperature import AttentionTemperature

KINDS = ("qkv h d", "h d qkv", "separate", "a norm of all channels", "a shared norm", "multihead", "offset", "turned")


class OffsetNorm(nn.Module):
    """A norm whose gain is one more than its weight (Gemma)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * (tokens.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.weight)


class WithOffsetNorm(WithNorm):
    def __init__(self) -> None:
        super().__init__("shared")
        self.q_norm, self.k_norm = (OffsetNorm(WIDTH // 4) for _ in range(2))


class Conv1D(nn.Module):
    """A layer whose weight is turned round (GPT-2)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens @ self.weight + self.bias


class Turned(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.query = Conv1D()


def of(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    if kind == "multihead":
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(dtype)
    if kind in ("offset", "turned"):
        return made(WithOffsetNorm if kind == "offset" else Turned, dtype)
    return made(FOUND[kind], dtype)


def hot(model: nn.Module, dtype: torch.dtype = torch.float32) -> AttentionTemperature:
    """Temperatures of a model, in which one site and one head are left alone."""
    temperature = found(model, lambda model: model(batch(dtype)))
    assert len(temperature.sites) == 2, temperature.refused
    first = next(iter(temperature.sites))
    count = len(temperature.sites[first].log_temperatures)
    temperature.set_temperatures(first, [1.7, 1.0, 0.3, 2.9][:count])
    return temperature


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)] == []


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in KINDS),
        *((kind, dtype) for kind in ("qkv h d", "offset", "multihead") for dtype in (torch.float64, torch.bfloat16)),
    ],
    ids=str,
)
def test_a_run_goes_on_as_if_it_had_not_been_interrupted(kind: str, dtype: torch.dtype) -> None:
    model = of(kind, dtype)
    temperature = hot(model, dtype)
    file = io.BytesIO()
    torch.save({"weights": model.state_dict(), "temperature": temperature.state_dict()}, file)
    before, output = parameters(model), model.eval()(batch(dtype))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = of(kind, dtype).eval()
    for parameter in resumed.parameters():
        parameter.data.zero_()
    resumed.load_state_dict(saved["weights"])
    assert any(not torch.equal(parameter, before[name]) for name, parameter in resumed.named_parameters())
    again = AttentionTemperature(resumed)
    assert again.load_state_dict(saved["temperature"]) == []
    assert_equal(parameters(resumed), before)
    assert torch.equal(resumed(batch(dtype)), output)
    assert {site: again[site] for site in again.sites} == {site: temperature[site] for site in temperature.sites}


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_where_sites_were_found_before_the_state_is_loaded(kind: str) -> None:
    model = of(kind)
    temperature = hot(model)
    weights, state, before = copy.deepcopy(model.state_dict()), temperature.state_dict(), parameters(model)
    resumed = of(kind)
    resumed.load_state_dict(weights)
    again = found(resumed, lambda model: model(batch(torch.float32)))
    assert again.load_state_dict(state) == []
    assert_equal(parameters(resumed), before)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_belong_to_other_temperatures_are_left_alone(kind: str) -> None:
    model = of(kind)
    state = hot(model).state_dict()
    other = of(kind)
    before = parameters(other)
    again = AttentionTemperature(other)
    assert again.load_state_dict(state) == [next(iter(state))]
    assert_equal(parameters(other), before)
    assert all(again[site] == [1.0] * 4 for site in again.sites)


def test_a_state_of_another_model_is_said_to_be_one() -> None:
    state = hot(of("qkv h d")).state_dict()
    other = of("multihead")
    before = parameters(other)
    with nothing_left(other):
        assert AttentionTemperature(other).load_state_dict(state) == list(state)
    assert_equal(parameters(other), before)
    narrower = nn.Sequential()
    narrower.blocks = nn.ModuleList(nn.Sequential() for _ in range(2))
    for block in narrower.blocks:
        block.attention = nn.Sequential()
        block.attention.qkv = nn.Linear(4, 12)
    before = parameters(narrower)
    assert AttentionTemperature(narrower).load_state_dict(state) == list(state)
    assert_equal(parameters(narrower), before)


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_weights_are_taken_for_such_as_hold_their_temperatures(kind: str) -> None:
    model = of(kind).eval()
    temperature = hot(model)
    output, weights = model(batch(torch.float32)), model.state_dict()
    model.load_state_dict(weights)
    assert all(temperature[site] == [1.0] * 4 for site in temperature.sites)
    assert torch.allclose(model(batch(torch.float32)), output, atol=1e-5)
    assert_equal(parameters(model), {name: weights[name] for name in parameters(model)})


def test_loading_something_else_leaves_temperatures_as_they_are() -> None:
    model = of("separate")
    temperature = hot(model)
    before = temperature["blocks.0.attention"]
    model.load_state_dict({"blocks.0.attention.out.bias": torch.ones(WIDTH)}, strict=False)
    model.load_state_dict({"blocks.1.attention.query.bias": torch.ones(WIDTH)}, strict=False)
    assert temperature["blocks.0.attention"] == before


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_are_folded_and_leave_the_model_alone(kind: str) -> None:
    model = of(kind)
    temperature = hot(model)
    before = parameters(model)
    folded = copy.deepcopy(model.state_dict())
    assert folded.keys() == of(kind).state_dict().keys()
    assert_equal(parameters(model), before)
    for prefix, part in (("", model), ("blocks.0.", None)):
        if part is None and kind != "multihead":
            part = model.get_submodule("blocks.0")
        if part is not None:
            assert_equal(
                dict(part.state_dict()), {k.removeprefix(prefix): v for k, v in folded.items() if k.startswith(prefix)}
            )
    wrapped = nn.Sequential()
    wrapped.inner = model
    assert_equal(dict(wrapped.state_dict()), {f"inner.{name}": tensor for name, tensor in folded.items()})
    temperature.detach()
    assert_equal(dict(model.state_dict()), dict(folded))


def test_a_state_dict_is_the_models_own_memory_where_temperatures_are_one() -> None:
    model = of("separate")
    hot(model)
    state = model.state_dict(keep_vars=True)
    assert state["blocks.1.attention.query.weight"] is model.get_parameter("blocks.1.attention.query.weight")
    assert state["blocks.0.attention.key.weight"] is model.get_parameter("blocks.0.attention.key.weight")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_behind_by_a_model_that_fails(kind: str) -> None:
    model = of(kind)

    def fail() -> None:
        model(batch(torch.float32))
        raise RuntimeError("enough")

    with nothing_left(model):
        temperature = AttentionTemperature(model)
        with pytest.raises(RuntimeError, match="enough"):
            temperature.find(fail)
        temperature.detach()
        temperature = hot(model)
        with pytest.raises((RuntimeError, AssertionError)):
            model(torch.zeros(3, 5, WIDTH + 1))
        temperature.detach()
        temperature.detach()
    assert temperature.sites == {}


# Copies.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_computes_the_same_and_has_temperatures_of_its_own(kind: str, way: str) -> None:
    model = of(kind).eval()
    temperature = hot(model)
    if way == "deepcopy":
        duplicate = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        duplicate = torch.load(file, weights_only=False)
    output, weights = model(batch(torch.float32)), copy.deepcopy(model.state_dict())
    assert torch.equal(duplicate(batch(torch.float32)), output)
    assert_equal(dict(duplicate.state_dict()), dict(weights))
    temperature.set_temperatures(next(iter(temperature.sites)), 7.0)
    assert torch.equal(duplicate(batch(torch.float32)), output)
    assert_equal(dict(duplicate.state_dict()), dict(weights))
    temperature.detach()
    assert torch.equal(duplicate(batch(torch.float32)), output)
    duplicate.load_state_dict(weights)
    assert torch.allclose(duplicate(batch(torch.float32)), output, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "is_copied_first"),
    [*((kind, False) for kind in KINDS), ("separate", True), ("multihead", True), ("a shared norm", True)],
)
def test_an_average_that_follows_has_the_same_temperatures(kind: str, is_copied_first: bool) -> None:
    model, plain = of(kind), of(kind)
    averaged = torch.optim.swa_utils.AveragedModel(model) if is_copied_first else None
    temperature = hot(model)
    if averaged is None:
        averaged = torch.optim.swa_utils.AveragedModel(model)
    temperature.follow([averaged.module])
    untouched = torch.optim.swa_utils.AveragedModel(of(kind)).module
    with torch.no_grad():
        for step in range(3):
            for name, parameter in model.named_parameters():
                parameter += 0.01 * (step + 1) * torch.ones_like(parameter) * (len(name) % 3)
            averaged.update_parameters(model)
    temperature.set_temperatures(next(iter(temperature.sites)), 2.5)
    unfolded = parameters(averaged.module)
    output = averaged.module.eval()(batch(torch.float32))
    weights = copy.deepcopy(averaged.module.state_dict())
    plain.eval().load_state_dict(weights)
    assert torch.allclose(plain(batch(torch.float32)), output, atol=1e-5)
    state = temperature.state_dict()

    temperature.detach()
    assert_equal(dict(averaged.module.state_dict()), dict(weights))
    assert [vars(module).keys() for module in averaged.module.modules()] == [
        vars(module).keys() for module in untouched.modules()
    ]
    assert all(
        not hooks for module in averaged.modules() for name, hooks in vars(module).items() if name.endswith("_hooks")
    )

    resumed, average = of(kind), torch.optim.swa_utils.AveragedModel(of(kind))
    resumed.load_state_dict(model.state_dict())
    average.module.load_state_dict(weights)
    again = AttentionTemperature(resumed)
    again.follow([average.module])
    assert again.load_state_dict(state) == []
    assert_equal(parameters(average.module), unfolded)


@pytest.mark.slow
def test_another_process_goes_on(tmp_path: Path) -> None:
    model = of("multihead").eval()
    temperature = hot(model)
    tokens = batch(torch.float32)
    torch.save(
        (model.state_dict(), temperature.state_dict(), tokens, model(tokens), parameters(model)), tmp_path / "saved"
    )
    script = f"""
import sys, torch
sys.path[:0] = {sys.path!r}
torch.set_num_threads(1)
from temperature.test_folding import of, parameters, assert_equal
from lightning_attn.temperature.attention_temperature import AttentionTemperature
weights, state, tokens, output, before = torch.load({str(tmp_path / "saved")!r})
model = of("multihead").eval()
model.load_state_dict(weights)
assert torch.allclose(model(tokens), output, atol=1e-5)
assert AttentionTemperature(model).load_state_dict(state) == []
assert_equal(parameters(model), before)
assert torch.equal(model(tokens), output)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
