"""What the monitor adds to a training step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from kinds import NOT_SPECTRAL, OF_STATES
from lightning.pytorch import Callback, Trainer
from models import SIZES, LanguageModel, Size
from table import Row, at_most, goal, judged
from torch.utils.data import DataLoader
from turns import Effort, progress, ratios, seconds_of

from lightning_attn import AdaptiveTemperature, AttentionEarlyWarning, AttentionMonitor, AttentionObserver, QKClip
from lightning_attn.callbacks.budget import wait_for
from lightning_attn.callbacks.session import CaptureSession
from lightning_attn.temperature import HoldLogitScale
from lightning_attn.tensorboard import heat_map

DEFAULT_CADENCE, WARNING_CADENCE, LOOP_CADENCE, CLIP_CADENCE, HEAT_MAP_CADENCE = 50, 10, 10, 10, 500
WARM_UP_STEPS = 4
#: Deviations of logits that no head of a model that has learned nothing is below.
HELD = HoldLogitScale(upper=1e-4, wakes_at=None)


class Stopwatch(Callback):
    """Takes the time whenever a batch begins.

    As the first callback of its Trainer it divides a run into steps that each hold every hook of the callbacks behind
    it, at both ends of the batch.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        wait_for(trainer.strategy.root_device)
        self.times.append(time.perf_counter())


def step_seconds(
    size: Size,
    steps: int,
    every_n_steps: int | None = None,
    statistics: list[str] | None = None,
    accelerator: str = "cpu",
    is_warned: bool = False,
    is_tempered: bool = False,
    is_compiled: bool = False,
    is_clipped: bool = False,
    **trainer_arguments: Any,
) -> float:
    """Seconds of one training step in a run of its own.

    A capture happens on one step in ``every_n_steps``, where a median over steps would not see it. So it enters with
    that share: what is returned is the mean step of a whole period between captures, each of its two kinds of steps
    taken by its median.

    Args:
        size: of the model.
        steps: how many steps to measure.
        every_n_steps: the cadence of the callback; ``None`` for a run without one.
        statistics: of the monitor.
        accelerator: what the model is trained on.
        is_warned: whether the callback is `AttentionEarlyWarning` in the place of the monitor.
        is_tempered: whether it is `AdaptiveTemperature`, of which every head has a temperature other than one.
        is_compiled: whether the model is compiled.
        is_clipped: whether it is `QKClip`, which clips every head whenever it looks.
        trainer_arguments: what else the Trainer is given.
    """
    torch.manual_seed(0)
    stopwatch = Stopwatch()
    callbacks: list[Callback] = [stopwatch]
    if every_n_steps is not None and is_warned:
        callbacks.append(AttentionEarlyWarning(every_n_steps=every_n_steps, file=None, print_summary=False))
    elif every_n_steps is not None and is_tempered:
        callbacks.append(AdaptiveTemperature(HELD, every_n_steps=every_n_steps, file=None, print_summary=False))
    elif every_n_steps is not None and is_clipped:
        # Every head at every look, by next to nothing: it is the time that counts.
        callbacks.append(QKClip(1e-6, every_n_steps=every_n_steps, file=None, print_summary=False))
    elif every_n_steps is not None:
        callbacks.append(AttentionMonitor(every_n_steps, statistics=statistics, print_summary=False))
    all_steps = WARM_UP_STEPS + steps + 1  # the last one only ends the one before
    trainer = Trainer(
        accelerator=accelerator,
        max_steps=all_steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_arguments,
    )
    batches = [size.random_batch() for _ in range(all_steps)]
    model = LanguageModel(size)
    if is_compiled:
        model.compile()
    trainer.fit(model, DataLoader(batches, batch_size=None))
    if is_tempered and not all(value != 1 for heads in callbacks[-1].temperatures.values() for value in heads):
        raise RuntimeError("A head was left at temperature 1.")

    seconds = [end - start for start, end in pairwise(stopwatch.times)]
    measured = range(WARM_UP_STEPS, WARM_UP_STEPS + steps)
    if every_n_steps is None:
        return median(seconds[step] for step in measured)
    captures = range(0, all_steps, every_n_steps)
    watched_steps = CaptureSession.of(trainer).watched_steps
    if watched_steps != len(captures):
        raise RuntimeError(f"There were {watched_steps} captures, not {len(captures)}.")
    capture_seconds = median(seconds[step] for step in measured if step in captures)
    if every_n_steps == 1:
        return capture_seconds
    other_seconds = median(seconds[step] for step in measured if step not in captures)
    return other_seconds + (capture_seconds - other_seconds) / every_n_steps


def training_rows(effort: Effort) -> Iterator[Row]:
    for name, size in SIZES.items():
        setting = f"{name} LM: {size}"
        progress(f"training steps of the {setting}")
        # A run is compared with one of the same length: its first steps may be faster or slower than later ones.
        default = ratios(
            lambda size=size: step_seconds(size, DEFAULT_CADENCE),
            {
                "monitor": lambda size=size: step_seconds(size, DEFAULT_CADENCE, DEFAULT_CADENCE),
                "early warning": lambda size=size: step_seconds(size, DEFAULT_CADENCE, WARNING_CADENCE, is_warned=True),
                "temperature": lambda size=size: step_seconds(size, DEFAULT_CADENCE, LOOP_CADENCE, is_tempered=True),
                "clip": lambda size=size: step_seconds(size, DEFAULT_CADENCE, CLIP_CADENCE, is_clipped=True),
            },
            effort.rounds_of_short_steps if name == "demo" else effort.rounds,
        )
        every_step = ratios(
            lambda size=size: step_seconds(size, effort.steps),
            {
                "clip": lambda size=size: step_seconds(size, effort.steps, 1, is_clipped=True),
                "hidden states": lambda size=size: step_seconds(size, effort.steps, 1, OF_STATES),
                "not spectral": lambda size=size: step_seconds(size, effort.steps, 1, NOT_SPECTRAL),
                "all": lambda size=size: step_seconds(size, effort.steps, 1),
            },
            effort.rounds,
        )
        compiled = ratios(
            lambda size=size: step_seconds(size, DEFAULT_CADENCE, is_compiled=True),
            {
                "temperature": lambda size=size: step_seconds(
                    size, DEFAULT_CADENCE, LOOP_CADENCE, is_tempered=True, is_compiled=True
                ),
            },
            effort.rounds,
        )
        monitor, early_warning = default["monitor"], default["early warning"]
        yield monitor.row("training step, `AttentionMonitor()`", setting, "plain step", goal(1.01), at_most(1.03))
        yield early_warning.row("training step, `AttentionEarlyWarning()`", setting, "plain step", at_most(1.1))
        measured = "training step, `AdaptiveTemperature()`, all heads at other temperatures than 1"
        yield default["temperature"].row(measured, setting, "plain step", at_most(1.05))
        yield compiled["temperature"].row(f"{measured}, compiled", setting, "compiled plain step")
        yield every_step["clip"].row("training step, `QKClip()`, all heads clipped", setting, "plain step")
        yield default["clip"].row(
            f"training step, `QKClip(every_n_steps={CLIP_CADENCE})`, all heads clipped", setting, "plain step"
        )
        yield heat_map_row(size, setting, monitor.baseline_seconds)
        yield every_step["hidden states"].row(
            f"training step, `every_n_steps=1`, the {len(OF_STATES)} statistics of hidden states alone",
            setting,
            "plain step",
        )
        yield every_step["not spectral"].row(
            "training step, `every_n_steps=1`, all but spectral statistics", setting, "plain step", goal(1.10)
        )
        yield every_step["all"].row("training step, `every_n_steps=1`, all statistics", setting, "plain step")


def heat_map_row(size: Size, setting: str, step_seconds: float) -> Row:
    """What TensorBoard's heat maps add. The runs above have no logger, so that disks are not measured."""
    model = LanguageModel(size)
    observer = AttentionObserver(model)
    with observer:
        model(size.random_batch())
    snapshot = observer.snapshot()
    seconds = seconds_of(lambda: [heat_map(snapshot, name) for name in snapshot.statistics], calls=1)
    ratio = 1 + seconds / (HEAT_MAP_CADENCE * step_seconds)
    return Row(
        f"training step, the heat maps of all statistics every {HEAT_MAP_CADENCE} steps alone",
        setting,
        f"plain step, {1000 * step_seconds:.3g} ms",
        f"× {ratio:.3f}",
        "",
        judged(ratio, at_most(1.03)),
    )
