"""Beside Lightning's weight averaging, which puts other weights into the model while it is validated."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from models import LanguageModel, batches, fit
from torch import Tensor

from lightning_attn import AttentionMonitor, AttentionObserver

if not hasattr(callbacks, "EMAWeightAveraging"):
    pytest.skip("this version of Lightning has no weight averaging", allow_module_level=True)

SITES = ("blocks.0.attention", "blocks.1.attention")
AVERAGES = {
    "mean": lambda: callbacks.WeightAveraging(),
    "exponential": lambda: callbacks.EMAWeightAveraging(decay=0.8, update_every_n_steps=2),
}


def average_weights(averaging: Any) -> dict[str, Tensor]:
    """The averaged weights, and how many models went into them."""
    state: dict[str, Tensor] = averaging._average_model.state_dict()
    return state


class SeesValidation(pl.Callback):
    """Copies the model of each validation run's first batch, and the weights that were being trained then."""

    def __init__(self, averaging: Any) -> None:
        self.averaging = averaging
        self.validated: list[dict[str, Tensor]] = []
        self.trained: list[dict[str, Tensor]] = []

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if batch_idx == 0 and not trainer.sanity_checking:
            self.validated.append(copy.deepcopy(pl_module.state_dict()))
            swapped_out = average_weights(self.averaging)
            self.trained.append({name: copy.deepcopy(swapped_out[f"module.{name}"]) for name in self.validated[-1]})


def train(*watching: pl.Callback) -> tuple[LanguageModel, Tensor, pl.Trainer]:
    pl.seed_everything(7, verbose=False)
    model = LanguageModel()
    running = fit(model, *watching, steps=12, validation=2, val_check_interval=4)
    return model, torch.get_rng_state(), running


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("monitors_first", [True, False])
def test_training_and_averaging_are_bit_identical(average: str, monitors_first: bool) -> None:
    plain_averaging, averaging = AVERAGES[average](), AVERAGES[average]()
    plain, plain_random, _ = train(plain_averaging)

    training = AttentionMonitor(every_n_steps=1, print_summary=False, max_overhead=0.5)
    validation = AttentionMonitor(stage="validate", print_summary=False)
    watching = [training, validation, averaging] if monitors_first else [averaging, training, validation]
    watched, watched_random, running = train(*watching)

    assert watched.losses == plain.losses
    for watched_step, plain_step in zip(watched.gradients, plain.gradients, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(watched_step, plain_step, strict=True))
    for name, weight in plain.state_dict().items():
        assert torch.equal(watched.state_dict()[name], weight), name
    expected, found = average_weights(plain_averaging), average_weights(averaging)
    assert found.keys() == expected.keys()
    assert int(found["n_averaged"]) > 1
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    assert torch.equal(watched_random, plain_random)

    # The copy that is averaged is a model of its own: it is not watched, and its names are not those of sites.
    assert {site for snapshot in (*training.history, *validation.history) for site in snapshot.sites} == set(SITES)
    assert training.history.steps[0] == 0
    assert len(validation.history) == 3
    assert torch._C._len_torch_function_stack() == 0
    for model in (watched, averaging._average_model.module):
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not {"training_step", "validation_step"} & vars(running.strategy).keys()


@pytest.mark.parametrize("monitors_first", [True, False])
def test_validation_sees_the_averaged_weights(monitors_first: bool) -> None:
    averaging = callbacks.WeightAveraging()
    validation = AttentionMonitor(stage="validate", print_summary=False, max_sequences=None)
    sees = SeesValidation(averaging)
    watching = [validation, sees, averaging] if monitors_first else [averaging, sees, validation]
    train(*watching)

    def measured(weights: dict[str, Tensor]) -> dict[str, Any]:
        model = LanguageModel().eval()
        model.load_state_dict(weights)
        observer = AttentionObserver(model)
        with torch.no_grad(), observer:
            model.loss(next(iter(batches(2))))
        return observer.snapshot().to_dict()

    assert len(validation.history) == len(sees.validated) == 3
    for snapshot, averaged, trained in zip(validation.history, sees.validated, sees.trained, strict=True):
        assert snapshot.to_dict() == measured(averaged)
        assert snapshot.to_dict() != measured(trained)
