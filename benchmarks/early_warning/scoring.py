"""How well warnings tell runs that end badly from others, where the loss alone says which those are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from settings import FAMILIES
from training_runs import Run

from lightning_attn.warning import Watch, built_in_rules

#: Says when it first raised an alarm in a run; ``None`` where it never did.
Detector = Callable[[Run], "int | None"]

Outcome = Literal["healthy", "border", "ruined"]

#: A run is ruined if its final loss is so many nats above the median of the settings of its family that are healthy by
#: their making, and on the border if it is above by two thirds of that. Both losses are in nats.
MARGIN, BORDER = 0.3, 0.2


def early_warning(run: Run) -> int | None:
    """The first warning of the built-in rules; events are none."""
    watch = Watch(built_in_rules())
    for snapshot in run.snapshots:
        if any(warning.severity != "info" for warning in watch.look(snapshot)):
            return snapshot.step
    return None


def max_logit_above_50(run: Run) -> int | None:
    """A bare limit of the largest logit."""
    return _first(run, "max_logit", lambda lowest, highest: highest > 50)


def entropy_below_a_quarter(run: Run) -> int | None:
    """A bare limit of the lowest entropy."""
    return _first(run, "entropy", lambda lowest, highest: lowest < 0.25)


def loss_spike(run: Run) -> int | None:
    """A loss that is six standard deviations above the mean of the last 128 steps, as OLMo-core has it."""
    window = 128
    for step in range(window, len(run.losses)):
        before = run.losses[step - window : step]
        mean = sum(before) / window
        deviation = (sum((loss - mean) ** 2 for loss in before) / window) ** 0.5
        if not run.losses[step] <= mean + 6 * deviation:  # a loss that is not a number is a spike
            return step
    return None


DETECTORS: dict[str, Detector] = {
    "AttentionEarlyWarning": early_warning,
    "max logit > 50": max_logit_above_50,
    "lowest entropy < 0.25": entropy_below_a_quarter,
    "loss spike, 6 σ of 128": loss_spike,
}


@dataclass(frozen=True)
class Scored:
    """A run, how it ended, and when a detector first raised an alarm."""

    run: Run
    outcome: Outcome
    alarm: int | None

    @property
    def share_of_run(self) -> float | None:
        """When the alarm came, as a share of the run."""
        return None if self.alarm is None else self.alarm / len(self.run.losses)


def scored(runs: Sequence[Run], detector: Detector) -> list[Scored]:
    """Judge every run by its loss, and ask the detector."""
    references = {name: reference(runs, name) for name in FAMILIES}
    return [Scored(run, outcome(run, references[run.family]), detector(run)) for run in runs]


def reference(runs: Iterable[Run], family: str) -> float:
    """The median final loss of those settings of a family that are healthy by their making."""
    settings = FAMILIES[family].settings
    losses = [run.final_loss for run in runs if run.family == family and settings[run.setting].is_reference]
    return median(losses) if losses else float("nan")


def outcome(run: Run, healthy_loss: float) -> Outcome:
    """How a run ended, by its loss alone."""
    above = run.final_loss - healthy_loss
    if above < BORDER:
        return "healthy"
    return "border" if above < MARGIN else "ruined"


def _first(run: Run, statistic: str, is_alarm: Callable[[float, float], bool]) -> int | None:
    for snapshot in run.snapshots:
        summary = snapshot.summary(statistic)
        if summary is not None and is_alarm(summary.min, summary.max):
            return snapshot.step
    return None
