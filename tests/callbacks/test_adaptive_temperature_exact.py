"""A temperature by the callback is the temperature that somebody would have written into the model."""

from __future__ import annotations

import random as python_random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from models import Encoder, LanguageModel, Trained, VisionTransformer, batches, trainer
from temperature_runs import (
    Decoder,
    DropConnect,
    Explicit,
    Fused,
    Grouped,
    HandWritten,
    Restless,
    Separate,
    adaptive,
    awake,
    run,
    tokens,
)
from torch import Tensor, nn

from lightning_attn import AdaptiveTemperature, AttentionWarning, QKClip
from lightning_attn.temperature import CosineTemperature, HoldLogitScale

SCHEDULES: dict[str, Any] = {
    "constant": 3.0,
    "cosine": CosineTemperature(4.0, 0.5, 5),
    "function": lambda step: 1.0 + step % 3,
}


@pytest.fixture(autouse=True)
def _runs_write_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_near(found: Trained, expected: Trained) -> None:
    assert len(found.losses) == len(expected.losses) > 3
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=1e-6, atol=2e-6)
    for one, other in zip(found.gradients, expected.gradients, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [Fused, Separate, Grouped, Explicit])
def test_from_the_first_step_on_in_training_and_validation(kind: type[HandWritten], schedule: str) -> None:
    control = SCHEDULES[schedule]
    by_hand = control if callable(control) else lambda step: control
    arguments: dict[str, Any] = {"validation": True, "val_check_interval": 3, "steps": 6}
    expected = Decoder(kind, by_hand, scale=5.0).double()
    run(expected, **arguments)
    found = Decoder(kind, scale=5.0).double()
    callback = adaptive(control)
    run(found, callback, **arguments)
    assert_near(found, expected)
    # The sanity check comes first. Between two steps the last temperatures are those of the step before.
    assert found.validated[:2] == pytest.approx(expected.validated[:2], rel=1e-9)
    if schedule == "constant":
        assert found.validated == pytest.approx(expected.validated, rel=1e-6)
    for block in expected.blocks:
        block.by_hand = by_hand(5)
    found.eval(), expected.eval()
    with torch.no_grad():
        alone = _copied(expected)
        torch.testing.assert_close(found(tokens()), alone(tokens()), rtol=1e-6, atol=1e-6)


def _copied(model: Decoder) -> Callable[[Tensor], Tensor]:
    """A model as it is, away from its Trainer."""
    model._trainer = None
    return model


class EncoderByHand(Encoder):
    """With the rows of queries divided, which is a temperature by hand for a module of torch."""

    def __init__(self, by_hand: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(2)
        for layer in self.encoder.layers:
            nn.init.normal_(layer.self_attn.in_proj_weight, std=0.3)
            nn.init.normal_(layer.self_attn.in_proj_bias, std=0.3)
        self.validated: list[float] = []
        if by_hand is not None:
            for layer in self.encoder.layers:
                for name in ("in_proj_weight", "in_proj_bias"):
                    torch.nn.utils.parametrize.register_parametrization(layer.self_attn, name, DividedRows(by_hand))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append(self.loss(batch).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class DividedRows(nn.Module):
    def __init__(self, by_hand: float) -> None:
        super().__init__()
        self.by_hand = by_hand

    def forward(self, parameter: Tensor) -> Tensor:
        rows = len(parameter) // 3
        return torch.cat([parameter[:rows] / self.by_hand, parameter[rows:]])


def test_torch_encoder_with_padding_and_its_fast_path_in_validation() -> None:
    expected, found = EncoderByHand(4.0), EncoderByHand()
    found.load_state_dict({name.replace("parametrizations.", "").replace(".original", ""): value
                           for name, value in expected.state_dict().items()})  # fmt: skip
    arguments: dict[str, Any] = {"validation": True, "val_check_interval": 3}
    run(expected, **arguments)
    run(found, adaptive(4.0), **arguments)
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=1e-6, atol=2e-6)
    assert found.validated == pytest.approx(expected.validated, rel=2e-6) and len(found.validated) == 6


# What is healthy is left alone.


@pytest.mark.parametrize("model_class", [LanguageModel, VisionTransformer, Encoder])
def test_a_healthy_run_is_bit_identical(model_class: type[Trained]) -> None:
    runs = []
    for callbacks in ([], [adaptive(every_n_steps=1)], [adaptive(8.0, dry_run=True)]):
        torch.manual_seed(0)
        model = model_class()
        run(model, *callbacks, validation=True)
        runs.append(model)
        for callback in callbacks:
            heads = callback.temperatures
            assert len(heads) == 2 and all(len(values) == 4 for values in heads.values())
            is_dry = callback is not callbacks[0] or callback._is_dry
            assert is_dry or {value for values in heads.values() for value in values} == {1.0}
    plain, *others = runs
    for watched in others:
        assert watched.losses == plain.losses and watched.losses
        for one, other in zip(watched.gradients, plain.gradients, strict=True):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
        assert all(
            torch.equal(mine, theirs)
            for mine, theirs in zip(watched.state_dict().values(), plain.state_dict().values(), strict=True)
        )


WATCHING: dict[str, Callable[[], pl.Callback]] = {
    "asleep": lambda: adaptive(HoldLogitScale(wakes_at=1e5), every_n_steps=1),
    "dry run": lambda: adaptive(8.0, dry_run=True),
    "one": lambda: adaptive(1.0),
    "never clips": lambda: QKClip(1e6, print_summary=False),
}


@pytest.mark.parametrize("watching", WATCHING)
def test_layers_that_draw_numbers_and_keep_averages_go_on_as_if_nothing_had_been(watching: str) -> None:
    runs = []
    for callbacks in ([], [WATCHING[watching]()]):
        model = Decoder(Restless)
        with warnings.catch_warnings():
            warnings.simplefilter("error", AttentionWarning)  # it is no site that is left alone
            run(model, *callbacks)
        random = (torch.get_rng_state(), python_random.getstate(), numpy.random.get_state()[1].tolist())
        calls = [layer.calls for layer in model.modules() if isinstance(layer, DropConnect)]
        runs.append((model.losses, model.gradients, dict(model.state_dict()), calls, random))
    plain, watched = runs
    torch.testing.assert_close(watched[:3], plain[:3], rtol=0, atol=0)
    assert watched[3] == plain[3]
    assert torch.equal(watched[4][0], plain[4][0]) and watched[4][1:] == plain[4][1:]


def test_folding_leaves_what_a_layer_remembers_alone() -> None:
    model = Decoder(Restless)
    seen: list[dict[str, Any]] = []

    class Last(pl.Callback):
        def on_train_end(self, *_: object) -> None:
            seen.append({name: buffer.clone() for name, buffer in model.named_buffers()})

    run(model, Last(), adaptive(2.0))
    torch.testing.assert_close(dict(model.named_buffers()), seen[0], rtol=0, atol=0)
    assert not any(block.q_proj._forward_hooks for block in model.blocks)  # so it is folded


def test_what_a_bias_adds_to_logits_drives_no_temperature() -> None:
    """Slopes of up to one per place deviate by more than is held."""
    callback = adaptive(awake(upper=2.0), every_n_steps=1)
    run(Decoder(Explicit), callback)
    assert {value for values in callback.temperatures.values() for value in values} == {1.0}


@pytest.mark.parametrize("kind", [Fused, Separate, Grouped, Explicit])
def test_the_deviation_of_logits_is_held(kind: type[HandWritten]) -> None:
    model = Decoder(kind, scale=100.0)
    callback = adaptive(awake(upper=1.0), every_n_steps=1)
    trainer(callback, max_epochs=1).fit(model, batches(12))
    assert all(value > 2 for values in callback.temperatures.values() for value in values)
    assert {len(set(values)) for values in callback.temperatures.values()} == {4}  # heads differ
    check = AdaptiveTemperature(awake(upper=1.0), every_n_steps=1, dry_run=True, print_summary=False)
    trainer(check, max_steps=1).fit(Frozen(model), batches(1))
    # What it leaves is what a dry run finds nothing to do about.
    assert all(value < 1.3 for values in check.temperatures.values() for value in values)


class Frozen(Decoder):
    """The same model again, for another Trainer."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(type(model.blocks[0]))
        self.load_state_dict(model.state_dict())


class OfHuggingFace(Trained):
    """Llama with fewer keys than queries, whose temperature by hand is its scale."""

    def __init__(self, implementation: str, by_hand: Callable[[int], float] = lambda step: 1.0) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation=implementation,
        )
        torch.manual_seed(3)
        self.model = transformers.LlamaForCausalLM(config).double()
        self.by_hand = by_hand
        self.validated: list[float] = []
        for layer in self.model.model.layers:
            nn.init.normal_(layer.self_attn.q_proj.weight, std=0.3)
            nn.init.normal_(layer.self_attn.k_proj.weight, std=0.3)

    def loss(self, batch: list[Tensor]) -> Tensor:
        for layer in self.model.model.layers:
            step = self.trainer.fit_loop.epoch_loop._batches_that_stepped
            layer.self_attn.scaling = 8**-0.5 / self.by_hand(step)
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append(self.loss(batch).item())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_hugging_face(implementation: str) -> None:
    course = CosineTemperature(4.0, 0.5, 5)
    run(expected := OfHuggingFace(implementation, course), validation=True, val_check_interval=6)
    run(found := OfHuggingFace(implementation), callback := adaptive(course), validation=True, val_check_interval=6)
    assert set(callback.temperatures) == {f"model.model.layers.{number}.self_attn" for number in range(2)}
    assert_near(found, expected)
    assert found.validated[:2] == pytest.approx(expected.validated[:2], rel=1e-9)
