"""A run that goes on from a checkpoint is the run that was not interrupted, and what is saved is an ordinary model."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from listening import hearing
from models import batches
from temperature_runs import FILE, Decoder, Fused, Hot, Separate, adaptive, awake, lines, run, tokens
from torch import Tensor

from lightning_attn import AdaptiveTemperature
from lightning_attn.temperature import CosineTemperature

STEPS, EPOCHS = 5, 3
CONTROLS: dict[str, Any] = {
    "closed loop": awake(upper=1.0),
    "schedule": CosineTemperature(4.0, 0.5, 11),
    "both": {"blocks.0": awake(upper=1.0), "*": CosineTemperature(4.0, 0.5, 11)},
}


@pytest.fixture(autouse=True)
def _runs_write_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class SeesAll(pl.Callback):
    """What a run was at the end of each step, and what a saved model has to compute then."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, model: Any, *_: Any) -> None:
        adaptive = next(one for one in trainer.callbacks if isinstance(one, AdaptiveTemperature))
        training, trainer_of_model = model.training, model._trainer
        model.eval()
        model._trainer = None
        with torch.no_grad():
            given = model(tokens())
        model.train(training)
        model._trainer = trainer_of_model
        self.steps[trainer.global_step] = {
            "loss": model.losses[-1],
            "temperatures": adaptive.temperatures,
            "parameters": [parameter.detach().clone() for parameter in model.parameters()],
            "optimizer": copy.deepcopy(trainer.optimizers[0].state_dict()["state"]),
            "given": given,
        }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["loss"] == expected["loss"] and found["temperatures"] == expected["temperatures"]
    assert all(map(torch.equal, found["parameters"], expected["parameters"]))
    for mine, theirs in zip(found["optimizer"].values(), expected["optimizer"].values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert torch.equal(found["given"], expected["given"])


def plain(state: dict[str, Any], kind: Any = Separate) -> Tensor:
    """What a model that knows of no temperature computes from a checkpoint."""
    model = Decoder(kind)
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        return model.eval()(tokens())


class FusedAlone(Fused):
    dropout = 0.0


class Shuffles(Hot):
    """Draws nothing, and takes the batch that the step tells."""

    def loss(self, _: list[Tensor]) -> Tensor:
        number = self.trainer.global_step
        made = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(number))
        return super().loss([made])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append(Decoder.loss(self, batch).item())


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize(
    "order", ["saved last", pytest.param("saved before it hears of the end", marks=pytest.mark.slow)]
)
def test_from_every_step_bit_identical(control: str, order: str, tmp_path: Path) -> None:
    sees, checkpoints = SeesAll(), ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    first = Saves(tmp_path / "saved") if order != "saved last" else checkpoints
    arguments: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "steps": STEPS,
        "default_root_dir": tmp_path / "whole",
        "enable_checkpointing": order == "saved last",
        "validation": True,
    }
    whole = adaptive(CONTROLS[control])
    run(Shuffles(), first, whole, sees, **arguments)
    told = lines(tmp_path / "whole" / FILE)
    assert len(told) > 6 and set(sees.steps) == set(range(1, STEPS * EPOCHS + 1))
    paths = {int(path.stem.split("step=")[1]): path for path in (tmp_path / "saved").glob("*.ckpt")}
    for step in [1, 2, 5, 6, 9] if order == "saved last" else [1, 3]:
        saved = torch.load(paths[step], weights_only=True)
        if order == "saved last":
            torch.testing.assert_close(plain(saved["state_dict"]), sees.steps[step]["given"], rtol=1e-5, atol=1e-5)
        again, after = SeesAll(), adaptive(CONTROLS[control])
        folder = tmp_path / f"again {step}"
        shutil.copytree(tmp_path / "whole", folder)
        with hearing() as said:
            run(Shuffles(), after, again, path=paths[step], **{**arguments, "default_root_dir": folder})
        assert said == [] and set(again.steps) == set(range(step + 1, STEPS * EPOCHS + 1))
        if order != "saved last" and control != "schedule":
            continue  # a capture may be lost in such a checkpoint, and with it a move
        for number, found in again.steps.items():
            assert_same(found, sees.steps[number])
        assert after.temperatures == whole.temperatures
        assert lines(folder / FILE) == told, step


class Saves(pl.Callback):
    """Saves at the end of a batch, before callbacks behind it hear of that end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")


def test_scalars_go_on(tmp_path: Path) -> None:
    def logged(version: str, **arguments: Any) -> list[str]:
        logger = CSVLogger(tmp_path, name="", version=version, flush_logs_every_n_steps=1)
        run(Shuffles(), adaptive(), ModelCheckpoint(tmp_path / "saved", every_n_train_steps=5, save_top_k=-1),
            logger=logger, enable_checkpointing=True, max_epochs=2, steps=5, **arguments)  # fmt: skip
        return (tmp_path / version / "metrics.csv").read_text().splitlines()

    whole = logged("whole")
    path = next((tmp_path / "saved").glob("*step=5.ckpt"))
    after = logged("after", path=path)
    assert after[0] == whole[0] and set(after[1:]) < set(whole[1:]) and len(after) > 2


@pytest.mark.parametrize("control", CONTROLS)
def test_fit_ends_folded_and_nothing_is_left(control: str, tmp_path: Path) -> None:
    sees, model = SeesAll(), Shuffles()
    plain_kinds = [type(module) for module in model.modules()]
    running = run(model, adaptive(CONTROLS[control]), sees, steps=6)
    torch.testing.assert_close(plain(model.state_dict()), sees.steps[6]["given"], rtol=1e-5, atol=1e-5)
    assert [type(module) for module in model.modules()] == plain_kinds
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks",
             "_load_state_dict_post_hooks", "_state_dict_pre_hooks")  # fmt: skip
    assert not any(getattr(module, name) for module in model.modules() for name in hooks)
    # What is saved afterwards goes on to the last digit as well.
    running.save_checkpoint(tmp_path / "after.ckpt")
    whole, again = SeesAll(), SeesAll()
    run(Shuffles(), adaptive(CONTROLS[control]), whole, steps=6, max_epochs=2)
    run(Shuffles(), adaptive(CONTROLS[control]), again, steps=6, max_epochs=2, path=tmp_path / "after.ckpt")
    assert set(again.steps) == set(range(7, 13))
    for step, found in again.steps.items():
        assert_same(found, whole.steps[step])


def test_weights_alone_are_folded_too(tmp_path: Path) -> None:
    sees = SeesAll()
    checkpoints = ModelCheckpoint(tmp_path, save_weights_only=True, every_n_train_steps=3, save_last=True)
    run(Shuffles(), adaptive(), sees, checkpoints, enable_checkpointing=True)
    for path in tmp_path.glob("*.ckpt"):
        saved = torch.load(path, weights_only=True)
        assert "callbacks" not in saved
        step = saved["global_step"]
        torch.testing.assert_close(plain(saved["state_dict"]), sees.steps[step]["given"], rtol=1e-5, atol=1e-5)
    # They are a model to begin with: from their end on temperatures are one.
    after = adaptive()
    with hearing() as said:
        model = Hot()
        model.load_state_dict(saved["state_dict"])
        run(model, after)
    assert said == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_from_what_an_exception_leaves(error: type[BaseException], tmp_path: Path) -> None:
    class Fails(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                raise error("stop")

    whole, again, sees = SeesAll(), SeesAll(), SeesAll()
    run(Shuffles(), adaptive(), whole)
    model = Shuffles()
    with pytest.raises((error, SystemExit)):
        run(model, Fails(), adaptive(), sees, OnExceptionCheckpoint(tmp_path), enable_checkpointing=True)
    torch.testing.assert_close(plain(model.state_dict()), whole.steps[4]["given"], rtol=1e-5, atol=1e-5)
    (path,) = tmp_path.glob("*.ckpt")
    saved = torch.load(path, weights_only=True)["state_dict"]
    torch.testing.assert_close(plain(saved), whole.steps[4]["given"], rtol=1e-5, atol=1e-5)
    run(Shuffles(), adaptive(), again, path=path)
    assert set(again.steps) >= {5, 6}
    for step, found in again.steps.items():
        assert found["temperatures"] == whole.steps[step]["temperatures"]
        assert all(map(torch.equal, found["parameters"], whole.steps[step]["parameters"])), step


def test_the_next_fit_of_a_trainer_goes_on(tmp_path: Path) -> None:
    class Remembers(Shuffles):
        """Without moments, which every fit makes anew."""

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    whole, halves = SeesAll(), SeesAll()
    run(Remembers(), adaptive(), whole, max_epochs=2, default_root_dir=tmp_path / "whole")
    model, callback = Remembers(), adaptive()
    running = run(model, callback, halves, max_epochs=1, default_root_dir=tmp_path / "halves")
    assert set(halves.steps) == set(range(1, 7))
    running.validate(model, batches(1), verbose=False)
    running.fit_loop.max_epochs = 2
    running.fit(model, batches(6))
    for step, expected in whole.steps.items():
        assert_same(halves.steps[step], expected)
    assert lines(tmp_path / "halves" / FILE) == lines(tmp_path / "whole" / FILE)


def test_a_new_trainer_begins_anew() -> None:
    callback, other = adaptive(), adaptive()
    run(Shuffles(), callback)
    hot = callback.temperatures
    model, expected = Decoder(), Decoder()
    run(model, callback)
    run(expected, other)
    assert callback.temperatures == other.temperatures != hot
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_checkpoint_that_is_evaluated_is_not_unfolded(stage: str, tmp_path: Path) -> None:
    callback, sees = adaptive(), SeesAll()
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    model = Shuffles()
    running = run(model, callback, sees, checkpoints, enable_checkpointing=True)
    before = callback.temperatures
    path = next(tmp_path.glob("*step=3.ckpt"))
    arguments = {} if stage == "predict" else {"verbose": False}
    with hearing() as said:
        getattr(running, stage)(model, batches(1), ckpt_path=path, weights_only=True, **arguments)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert said == [] and callback.temperatures == before


def test_in_the_midst_of_accumulation_it_goes_on_as_it_was(tmp_path: Path) -> None:
    """Lightning does not keep the gradients of half a step; temperatures go on from where they were."""

    class SavesMidway(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            number = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            trainer.save_checkpoint(tmp_path / f"{number}.ckpt")

    whole = adaptive(awake(1.0), every_n_steps=1)
    run(Shuffles(), whole, SavesMidway(), accumulate_grad_batches=3, steps=9)
    for number in (1, 2, 4, 5):
        after = adaptive(awake(1.0), every_n_steps=1)
        with hearing() as said:
            run(Shuffles(), after, accumulate_grad_batches=3, steps=9, path=tmp_path / f"{number}.ckpt")
        assert said == []
        of_after = lines(Path(FILE))
        assert {line["step"] for line in of_after} >= {1, 2, 3}
        for mine, theirs in zip(after.temperatures.values(), whole.temperatures.values(), strict=True):
            assert mine == pytest.approx(theirs, rel=0.3)


def test_with_other_settings_a_run_goes_on_from_its_temperatures(tmp_path: Path) -> None:
    callback = adaptive()
    running = run(Shuffles(), callback)
    running.save_checkpoint(tmp_path / "last.ckpt")
    after = adaptive(awake(2.0), every_n_steps=100, file=None)
    run(Shuffles(), after, path=tmp_path / "last.ckpt", max_epochs=2)
    assert after.temperatures == callback.temperatures
    # A run that has nothing left to do keeps what it was given.
    after = adaptive()
    running = run(Shuffles(), after, path=tmp_path / "last.ckpt")
    running.save_checkpoint(tmp_path / "again.ckpt")
    run(Shuffles(), after := adaptive(every_n_steps=100), path=tmp_path / "again.ckpt", max_epochs=2)
    assert after.temperatures == callback.temperatures


def test_a_function_is_told_by_its_name_when_a_run_goes_on(tmp_path: Path) -> None:
    running = run(Shuffles(), adaptive(lambda step: 2.0))
    running.save_checkpoint(tmp_path / "last.ckpt")
    with hearing() as said:
        run(Shuffles(), after := adaptive(lambda step: 2.0), path=tmp_path / "last.ckpt", max_epochs=2)
    assert said == [] and after.started_at == 0


# Averages of weights, which are saved in the place of the model's.


AVERAGES = {
    "mean": lambda: of_lightning.WeightAveraging(),
    "exponential": lambda: of_lightning.EMAWeightAveraging(decay=0.8, update_every_n_steps=2),
    "stochastic": lambda: of_lightning.StochasticWeightAveraging(1e-2, swa_epoch_start=1),
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("comes", [pytest.param("before", marks=pytest.mark.slow), "behind"])
def test_averages_of_weights(average: str, comes: str, tmp_path: Path) -> None:
    if not hasattr(of_lightning, "EMAWeightAveraging") and average != "stochastic":
        pytest.skip("this version of Lightning has no weight averaging")

    def together() -> tuple[SeesAll, AdaptiveTemperature, list[pl.Callback]]:
        sees, ours, theirs = SeesAll(), adaptive(awake(1.0)), AVERAGES[average]()
        return sees, ours, [ours, theirs, sees] if comes == "before" else [theirs, ours, sees]

    arguments: dict[str, Any] = {"max_epochs": 3, "steps": 4, "enable_checkpointing": True, "validation": True}
    sees, _whole, watching = together()
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    model = Shuffles()
    run(model, *watching, checkpoints, **arguments)
    with torch.no_grad():
        model._trainer = None
        ended = model.eval()(tokens())
    # At the end of the epoch before its averaging begins, Lightning's own does not go on to the last digit.
    for step in (3, 6, 9) if average == "stochastic" else (3, 4, 6, 9):
        path = next(tmp_path.glob(f"*step={step}.ckpt"))
        saved = torch.load(path, weights_only=True)
        trained = saved.get("current_model_state", saved["state_dict"])
        torch.testing.assert_close(plain(trained), sees.steps[step]["given"], rtol=1e-5, atol=1e-5)
        again, _after, watching = together()
        on = Shuffles()
        run(on, *watching, ModelCheckpoint(tmp_path / "more"), path=path, **arguments)
        for number, found in again.steps.items():
            assert_same(found, sees.steps[number])
        with torch.no_grad():
            on._trainer = None
            assert torch.equal(on.eval()(tokens()), ended)
    assert torch.equal(plain(model.state_dict()), ended)


def test_the_averaged_model_that_is_saved_computes_what_is_validated(tmp_path: Path) -> None:
    class Validated(pl.Callback):
        given: Tensor

        def on_validation_batch_end(self, trainer: pl.Trainer, model: Any, *_: Any) -> None:
            of_model, model._trainer = model._trainer, None
            self.given = model(tokens())
            model._trainer = of_model

    sees, averaging = Validated(), of_lightning.EMAWeightAveraging(decay=0.5)
    checkpoints = ModelCheckpoint(tmp_path, every_n_epochs=1, save_on_train_epoch_end=False)
    run(Shuffles(), adaptive(4.0), averaging, sees, checkpoints, enable_checkpointing=True, validation=True)
    (path,) = tmp_path.glob("*.ckpt")
    given = plain(torch.load(path, weights_only=True)["state_dict"])
    torch.testing.assert_close(given, sees.given, rtol=1e-5, atol=1e-5)


def test_fused_and_half(tmp_path: Path) -> None:
    """Rows of one matrix, and numbers of few digits."""
    for precision in ("32-true", "bf16-true", "bf16-mixed", "64-true"):
        arguments: dict[str, Any] = {"precision": precision, "max_epochs": 2, "steps": 4, "default_root_dir": tmp_path}

        class Fine(Shuffles):
            def __init__(self) -> None:
                super().__init__(FusedAlone, 30.0)

        whole, again = SeesAll(), SeesAll()
        checkpoints = ModelCheckpoint(tmp_path / precision, every_n_train_steps=3, save_top_k=-1)
        run(Fine(), adaptive(), whole, checkpoints, enable_checkpointing=True, **arguments)
        path = next((tmp_path / precision).glob("*step=3.ckpt"))
        with hearing() as said:
            run(Fine(), adaptive(), again, path=path, **arguments)
        assert said == []
        for step, found in again.steps.items():
            if precision == "64-true":  # Lightning loads weights into single precision before it makes them double
                assert found["loss"] == pytest.approx(whole.steps[step]["loss"], rel=1e-6)
            else:
                assert_same(found, whole.steps[step])
