"""Temperatures in the runs that people have."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.tuner import Tuner
from listening import hearing
from models import HEADS, WIDTH, batches, trainer
from temperature_runs import FILE, Decoder, Fused, Grouped, Hot, Separate, adaptive, awake, lines, run, tokens
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_attn import AdaptiveTemperature
from lightning_attn.callbacks.refused_strategies import REFUSED_STRATEGIES
from lightning_attn.temperature import CosineTemperature, HoldEntropy


@pytest.fixture(autouse=True)
def _runs_write_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_near(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=tolerance, atol=0)
    assert len(found.losses) > 4


# Steps of all kinds.


class Watches(pl.Callback):
    """What temperatures were during each batch."""

    def __init__(self, callback: AdaptiveTemperature) -> None:
        self.callback = callback
        self.seen: list[tuple[int, dict[str, list[float]]]] = []

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append((trainer.global_step, self.callback.temperatures))


@pytest.mark.parametrize("control", [awake(1.0), CosineTemperature(5.0, 1.0, 4)])
def test_all_batches_of_a_step_have_the_same_temperatures(control: Any) -> None:
    callback = adaptive(control, every_n_steps=1)
    watches = Watches(callback)
    run(Hot(Fused), watches, callback, accumulate_grad_batches=3, steps=12)
    of_steps: dict[int, list[Any]] = {}
    for step, values in watches.seen:
        if any(len(heads) == HEADS for heads in values.values()):  # what is found in the first batch has all heads
            of_steps.setdefault(step, []).append([set(heads) if step == 0 else heads for heads in values.values()])
    assert len(of_steps) == 4
    for step, seen in of_steps.items():
        assert all(values == seen[0] for values in seen) and len(seen) == (2 if step == 0 else 3)
    assert of_steps[1][0] != of_steps[2][0]


class ByHand(Decoder):
    """Two optimisers, each with a part of the model, by hand."""

    def __init__(self, by_hand: Any = 1.0) -> None:
        super().__init__(Separate, by_hand, scale=10.0)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        blocks = list(self.blocks.parameters())
        others = [*self.embedding.parameters(), *self.head.parameters()]
        return [torch.optim.Adam(blocks, lr=1e-2), torch.optim.SGD(others, lr=1e-1)]


def test_two_optimisers_by_hand() -> None:
    course = CosineTemperature(4.0, 1.0, 5)
    run(expected := ByHand(course), steps=8)
    run(found := ByHand(), adaptive(course), steps=8)
    assert_near(found, expected)
    run(model := ByHand(), callback := adaptive(awake(0.5)), steps=8)
    assert max(map(max, callback.temperatures.values())) > 1.5 and model.losses
    assert {line["step"] for line in lines(Path(FILE))} >= {1, 3, 5, 7}


class Recomputes(Decoder):
    reentrant = True

    def forward(self, tokens: Tensor) -> Tensor:
        step = self.trainer.global_step
        hidden = self.embedding(tokens)
        for block in self.blocks:
            block.by_hand = self.by_hand(step) if callable(self.by_hand) else self.by_hand
            hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.head(hidden)


class RecomputesAnew(Recomputes):
    reentrant = False


@pytest.mark.parametrize("model_class", [Recomputes, RecomputesAnew])
def test_activation_checkpointing(model_class: type[Decoder]) -> None:
    run(expected := model_class(Grouped, 3.0, 10.0))
    run(found := model_class(Grouped, scale=10.0), adaptive(3.0))
    assert_near(found, expected)
    for one, other in zip(found.gradients, expected.gradients, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 2e-2), ("64-true", 1e-12), ("bf16-true", 5e-2)])
def test_precisions(precision: Any, tolerance: float) -> None:
    run(expected := Decoder(Grouped, 3.0, 10.0), precision=precision)
    run(found := Decoder(Grouped, scale=10.0), callback := adaptive(3.0), precision=precision)
    assert set(callback.temperatures) == {"blocks.0", "blocks.1"}
    assert_near(found, expected, tolerance)


def test_clipping() -> None:
    run(expected := Decoder(Grouped, 3.0, 10.0), gradient_clip_val=0.1)
    run(found := Decoder(Grouped, scale=10.0), adaptive(3.0), gradient_clip_val=0.1)
    assert_near(found, expected)


# Compiled.


class Compiled(Decoder):
    """Attention is compiled as a whole; what it is compiled to counts how often."""

    compilations = 0

    def configure_model(self) -> None:
        def counted(graph: Any, inputs: Any) -> Any:
            type(self).compilations += 1
            return graph.forward

        for block in self.blocks:
            block.compile(backend=counted, fullgraph=True)

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("kind", [Separate, Grouped])
def test_compiled_without_a_graph_break_or_another_compilation(kind: Any) -> None:
    def trained(control: Any, steps: int) -> tuple[int, AdaptiveTemperature, Compiled]:
        torch._dynamo.reset()
        Compiled.compilations = 0
        callback, model = adaptive(control, every_n_steps=5), Compiled(kind, scale=30.0)
        run(model, callback, steps=steps)
        return Compiled.compilations, callback, model

    few, _, _ = trained(awake(0.5), 3)
    many, callback, _ = trained(awake(0.5), 24)
    assert few == many >= 1
    assert max(map(max, callback.temperatures.values())) > 1.5
    moving, _, found = trained(CosineTemperature(6.0, 1.0, 20), 24)
    assert moving <= 2 * few  # once more where queries were a guess in the sanity check
    course = CosineTemperature(6.0, 1.0, 20)
    run(expected := Decoder(kind, course, 30.0), steps=24)
    assert_near(found, expected, 1e-4)


# The Trainer's own ways.


class Rated(Hot):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("control", [3.0, awake(1.0)])
@pytest.mark.parametrize("order", [1, -1])
def test_finding_a_learning_rate_before_it(control: Any, order: int) -> None:
    found = []
    for callbacks in ([adaptive(control)], [adaptive(control), LearningRateFinder(num_training_steps=5)]):
        model = Rated()
        if len(callbacks) == 2:
            model.lr = 0.5
        with hearing() as said:
            run(model, *callbacks[::order], steps=8)
        assert said == []
        found.append((model, callbacks[0].temperatures))
    (_alone, _), (after, temperatures) = found
    # The weights are those before the search: a run at the rate that was found is a run from the beginning.
    again = Rated()
    again.lr = after.lr
    run(again, callback := adaptive(control), steps=8)
    assert after.losses[-8:] == pytest.approx(again.losses, rel=1e-5) and temperatures == pytest.approx(
        callback.temperatures, rel=1e-3
    )


def test_the_tuner() -> None:
    model, callback = Rated(), adaptive(3.0)
    running = trainer(callback, max_epochs=1)
    before = copy.deepcopy(model.state_dict())
    Tuner(running).lr_find(model, batches(8), num_training=5, update_attr=False)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    running = run(model, callback)
    assert callback.temperatures["blocks.0"] == pytest.approx([3.0] * 4)


def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    run(Hot(), callback := adaptive(), fast_dev_run=3, max_epochs=None)
    assert callback.temperatures and list(tmp_path.iterdir()) == []


def test_as_bare_as_a_trainer_can_be() -> None:
    callback = adaptive(awake(1.0))
    pl.Trainer(barebones=True, max_steps=5, accelerator="cpu", callbacks=[callback]).fit(Hot(), batches(5))
    assert max(map(max, callback.temperatures.values())) > 1.5


def test_several_of_them_for_different_sites(tmp_path: Path) -> None:
    def both() -> list[AdaptiveTemperature]:
        return [
            adaptive(awake(1.0), sites="blocks.0", file="first.jsonl"),
            adaptive(2.0, sites=["blocks.1"], file="second.jsonl"),
        ]

    first, second = both()
    running = run(model := Hot(), first, second)
    assert set(first.temperatures) == {"blocks.0"} and set(second.temperatures) == {"blocks.1"}
    run(Hot(), alone := adaptive({"blocks.0": awake(1.0), "blocks.1": 2.0}))
    assert alone.temperatures == first.temperatures | second.temperatures
    running.save_checkpoint(tmp_path / "last.ckpt")
    after = both()
    with hearing() as said:
        run(again := Hot(), *after, path=tmp_path / "last.ckpt", max_epochs=2)
    assert said == [] and after[1].temperatures["blocks.1"] == pytest.approx([2.0] * 4)
    assert again.losses and model.losses


def test_two_for_the_same_sites_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"Two AdaptiveTemperature.*'blocks.0'"):
        run(Hot(), adaptive(sites="blocks.*"), adaptive(2.0, sites="*.0"))
    with pytest.raises(RuntimeError, match="state_key"):
        trainer(adaptive(), adaptive(2.0))


@pytest.mark.parametrize("kind", REFUSED_STRATEGIES)
def test_strategies_whose_parameters_cannot_be_changed(kind: str) -> None:
    running = trainer(callback := adaptive())
    running.strategy.__class__ = type(kind, (type(running.strategy),), {})
    with pytest.raises(MisconfigurationException, match=f"{kind}.*ModelParallelStrategy"):
        callback.on_fit_start(running, Hot())


# Copies and configurations.


def named(step: int) -> float:
    return 2.0


@pytest.mark.parametrize("control", [None, HoldEntropy(), 2.0, CosineTemperature(2.0, 1.0, 9), named])
def test_copies_before_a_fit_are_the_same(control: Any) -> None:
    callback = adaptive(control)
    for duplicate in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert duplicate.state_key == callback.state_key and duplicate.temperatures == {}
        run(Hot(), duplicate, steps=3)
        assert set(duplicate.temperatures) == {"blocks.0", "blocks.1"}
        assert pickle.loads(pickle.dumps(duplicate)).temperatures == duplicate.temperatures


YAML = """
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning_attn.AdaptiveTemperature
      init_args:
        start: 1
        every_n_steps: {0: 1, 4: 2}
        print_summary: false
        control:
          blocks.0:
            class_path: lightning_attn.temperature.HoldLogitScale
            init_args: {upper: 1.0, wakes_at: null}
          "*":
            class_path: lightning_attn.temperature.CosineTemperature
            init_args: {start: 4.0, end: 1.0, steps: 9}
"""


def test_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    arguments: dict[str, Any] = {"run": False, "save_config_callback": None}
    command = LightningCLI(Plain, args=["--config", str(tmp_path / "run.yaml")], **arguments)
    (callback,) = (one for one in command.trainer.callbacks if isinstance(one, AdaptiveTemperature))
    command.trainer.fit(command.model, batches(5))
    assert callback.started_at == 1
    assert max(callback.temperatures["blocks.0"]) > 1.5
    assert callback.temperatures["blocks.1"] == pytest.approx([CosineTemperature(4.0, 1.0, 9)(3)] * 4)

    with pytest.raises(SystemExit):
        LightningCLI(Plain, args=["--config", str(tmp_path / "run.yaml"), "--print_config"], **arguments)
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    again = LightningCLI(Plain, args=["--config", str(tmp_path / "printed.yaml")], **arguments)
    (other,) = (one for one in again.trainer.callbacks if isinstance(one, AdaptiveTemperature))
    assert other.state_key == callback.state_key and str(other._plan) == str(callback._plan)


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        (
            "{class_path: lightning_attn.temperature.HoldLogitScale, init_args: {upper: 4.0, wakes_at: null}}",
            "holds the logit_std of all heads at most 4",
        ),
        ("{class_path: lightning_attn.temperature.SSMax, init_args: {length: 16}}", "SSMax(length=16, gamma=0.43)"),
        ("{class_path: lightning_attn.temperature.HoldEntropy}", "holds entropy between 0.4 and 0.6"),
        ("2.5", "ConstantTemperature(temperature=2.5)"),
        (
            "{'blocks.*': 3.0, '*': {class_path: lightning_attn.temperature.LogLength, init_args: {length: 8}}}",
            "ConstantTemperature(temperature=3.0); LogLength(length=8, gamma=1.0)",
        ),
        (f"{__name__}.twice", "FunctionTemperature(twice)"),
    ],
)
def test_one_control_in_a_configuration(control: str, expected: str) -> None:
    """Printed and read again it is the same, as LightningCLI saves it beside a run."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(AdaptiveTemperature, "callback")
    read = parser.parse_string(f"callback: {{control: {control}}}")
    again = parser.parse_string(parser.dump(read))
    for configuration in (read, again):
        callback = parser.instantiate_classes(configuration).callback
        assert str(callback._plan) == expected


def twice(step: int) -> float:
    return 2.0


class Plain(Hot):
    def __init__(self) -> None:
        super().__init__()


# What cannot be written into weights.


class NormedWithoutGain(Separate):
    """Queries and keys are normalised, and their deviation is what a temperature says."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.RMSNorm(WIDTH // HEADS, elementwise_affine=False)

    def projected(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().projected(normed)
        return 3 * self.q_norm(query), key, value


def test_norms_without_a_gain_keep_theirs_and_say_so(tmp_path: Path) -> None:
    from lightning_attn.temperature import load_temperatures

    callback = adaptive(awake(0.2))
    with hearing() as said:
        running = run(model := Decoder(NormedWithoutGain, scale=3.0), callback)
    assert len(said) == 3 and "load_temperatures" in said[0] and "forward hook" in said[1]
    temperatures = callback.temperatures
    assert min(map(min, temperatures.values())) > 1.5
    assert all(len(set(values)) == 1 for values in temperatures.values())  # heads share the norm
    model._trainer = None
    with torch.no_grad():
        expected = model.eval()(tokens())
    running.save_checkpoint(tmp_path / "last.ckpt")
    for source in (tmp_path / "last.ckpt", torch.load(tmp_path / "last.ckpt", weights_only=True)):
        plain = Decoder(NormedWithoutGain)
        plain.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"])
        with torch.no_grad():
            assert not torch.allclose(plain.eval()(tokens()), expected, atol=1e-3)
            attached = load_temperatures(plain, source)
            torch.testing.assert_close(plain(tokens()), expected, rtol=1e-5, atol=1e-5)
            assert {site: attached[site] for site in temperatures} == temperatures
            attached.detach()
            assert not torch.allclose(plain(tokens()), expected, atol=1e-3)
    inner = nn.Module()
    inner.add_module("0", Decoder(NormedWithoutGain).blocks[0])
    inner.add_module("1", Decoder(NormedWithoutGain).blocks[1])
    assert set(load_temperatures(inner, tmp_path / "last.ckpt", prefix="blocks.").sites) == {"0", "1"}
    with pytest.raises(ValueError, match="`prefix`"):
        load_temperatures(inner, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="no state of AdaptiveTemperature"):
        load_temperatures(plain, {"state_dict": {}})
    # It goes on from there, with one hook in the place of that which was left.
    with hearing():
        run(again := Decoder(NormedWithoutGain), after := adaptive(awake(0.2), every_n_steps=100),
            path=tmp_path / "last.ckpt", max_epochs=2)  # fmt: skip
        assert after.temperatures == temperatures and again.losses
        run(model, callback, steps=3)
    assert sum(len(module._forward_hooks) for module in model.modules()) <= 2


class ForgetsItsScale(nn.Linear):
    """Normalises its weights from some step on: then it does not matter what is written into them."""

    forgets = False

    def forward(self, entering: Tensor) -> Tensor:
        if self.forgets:
            return functional.linear(entering, 5 * functional.normalize(self.weight), self.bias)
        return super().forward(entering)


class Forgets(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = ForgetsItsScale(WIDTH, WIDTH)


def test_what_would_compute_something_else_is_not_folded_and_this_is_said() -> None:
    class Turns(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, model: Any, *_: Any) -> None:
            model.blocks[0].q_proj.forgets = True

        def on_train_end(self, trainer: pl.Trainer, model: Any) -> None:
            of_trainer, model._trainer = model._trainer, None
            with torch.no_grad():
                self.given = model.eval()(tokens())
            model._trainer = of_trainer

    turns = Turns()
    with hearing() as said:
        run(model := Decoder(Forgets, scale=10.0), adaptive(3.0), turns)
    (message,) = said
    assert "blocks.0 are not written" in message and "something else" in message
    model._trainer = None
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens()), turns.given, rtol=1e-5, atol=1e-5)
    assert len(model.blocks[0].q_proj._forward_hooks) == 1 and not model.blocks[1].q_proj._forward_hooks


def test_a_checkpoint_that_lightning_saves_last_is_of_the_end(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path, save_last=True)
    run(model := Hot(), adaptive(), checkpoints, enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert all(map(torch.equal, model.state_dict().values(), saved.values()))


def test_fused_rows_are_written_at_the_end() -> None:
    run(model := Decoder(Fused, scale=30.0), adaptive(4.0))
    assert not any(module._forward_hooks for module in model.modules())
