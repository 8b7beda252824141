"""What people and programs get to hear of temperatures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_attn.callbacks.loggers import log_heat_maps, log_scalars
from lightning_attn.callbacks.run_file import RunFile, checked_name, file_path
from lightning_attn.callbacks.snapshot_log import MAX_TAGS
from lightning_attn.callbacks.temperature_search import some
from lightning_attn.capture.report import AttentionWarning
from lightning_attn.snapshot import Snapshot
from lightning_attn.temperature.change import TemperatureChange
from lightning_attn.temperature.governor import TemperatureGovernor

if TYPE_CHECKING:
    import lightning.pytorch as pl

_PREFIX = "attention_temperature"
#: So many heads are named in a message, and so many sites without their number.
_NAMED, _NAMED_SITES = 4, 3
#: The colours of heat maps tell at least these temperatures apart: those of a run that is left alone, and of a hot one.
_SPANS = (1.0, 10.0)


class TemperatureLog:
    """Messages, scalars, heat maps in TensorBoard, and a line in a file for each change; all on rank zero.

    Args:
        file: the file's name, or where it is; ``None`` for none.
        heat_map_every_n_steps: the steps from one heat map to the next; ``None`` for none.
        print_summary: whether the temperatures at the end are printed.
        is_dry: whether nothing is done but said.

    Raises:
        ValueError: if the file has no name.
    """

    def __init__(self, file: str | None, heat_map_every_n_steps: int | None, print_summary: bool, is_dry: bool) -> None:
        self._file_name = checked_name(file)
        self._heat_map_every_n_steps = heat_map_every_n_steps
        self._print_summary = print_summary
        self._is_dry = is_dry
        self._name = "AdaptiveTemperature (dry run)" if is_dry else "AdaptiveTemperature"
        self._file: RunFile | None = None
        self._run: str | None = None
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        self._run, self._file = None, None
        self._last_heat_map: int | None = None
        self._moved: set[str] = set()
        self._limited: set[tuple[str, int]] = set()
        #: How many lines of the file are of this run.
        self._lines = 0
        self._is_resumed = False

    def state_dict(self) -> dict[str, Any]:
        """What was said, and which lines of the file are of this run."""
        return {
            "run": self._run,
            "moved": sorted(self._moved),
            "limited": sorted(self._limited),
            "last_heat_map": self._last_heat_map,
            "lines": self._lines,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self._run, self._is_resumed = state["run"], True
        self._lines = state["lines"]
        self._moved = set(state["moved"])
        self._limited = {(site, head) for site, head in state["limited"]}
        self._last_heat_map = state["last_heat_map"]

    def open(self, trainer: pl.Trainer, folder: str) -> None:
        """Find the file of the run that was begun or is gone on with."""
        if self._file_name is None or not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        self._file = RunFile(file_path(folder, self._file_name), self._run, "Changes of temperatures")
        self._run = self._file.run
        if self._is_resumed:
            number = count()
            self._file.resume(lambda line: next(number) < self._lines)
            self._is_resumed = False

    def say(self, message: str) -> None:
        """Say what was done, or found out."""
        rank_zero_info(f"{self._name}: {message}")

    def warn(self, message: str) -> None:
        """Say what its owner should know."""
        rank_zero_warn(f"{self._name}: {message}", category=AttentionWarning)

    def write(self, trainer: pl.Trainer, step: int, governor: TemperatureGovernor) -> None:
        """Write down what the temperatures are, and say what is new about them.

        Args:
            trainer: whose loggers.
            step: the optimiser step.
            governor: has the temperatures, and what was done to them since this was last called.
        """
        temperatures, changes = governor.temperatures(), governor.take_changes()
        if self._file is not None:
            self._file.add(change.to_dict() for change in changes)
        self._lines += len(changes)
        if temperatures:
            log_scalars(trainer, _scalars(temperatures, governor.take_highest_scale()), step)
            every, last = self._heat_map_every_n_steps, self._last_heat_map
            if every is not None and (last is None or step - last >= every):
                self._last_heat_map = step
                _draw(trainer, step, temperatures)
        new = [change for change in changes if change.heads and change.site not in self._moved]
        self._moved.update(change.site for change in new)
        for message in _first_words(new):
            self.say(message)
        self._tell_limits([*changes, *governor.take_held_back()])

    def draw_last(self, trainer: pl.Trainer, step: int, temperatures: Mapping[str, list[float]]) -> None:
        """Draw the temperatures at the end of training, unless that was just done."""
        if self._heat_map_every_n_steps is not None and self._last_heat_map != step and temperatures:
            _draw(
                trainer, step, temperatures
            )  # not kept as the last: a run that goes on draws as if it had never ended

    def end(self, trainer: pl.Trainer, temperatures: Mapping[str, list[float]], left: Mapping[str, str]) -> None:
        """Sum up.

        Args:
            trainer: whose rank prints.
            temperatures: of every head of every site.
            left: the sites whose temperatures could not be written into weights, with the reason.
        """
        for site, reason in left.items():
            self.warn(
                f"the temperatures of {site} are not written into its weights: {reason}. They stay on the model as a "
                "forward hook."
            )
        if not self._print_summary or not trainer.is_global_zero or not temperatures:
            return
        heads = [(value, site, head) for site, values in temperatures.items() for head, value in enumerate(values)]
        changed = sorted((one for one in heads if one[0] != 1), reverse=True)
        if not changed:
            print(f"\n{self._name}: all {len(heads)} heads were left at temperature 1.")
            return
        lines = [f"  {value:8.3g}  {site}, head {head}" for value, site, head in changed[:10]]
        more = f"\n  … and {len(changed) - 10} more" if len(changed) > 10 else ""
        where = "" if self._is_dry or left else "; they are written into the weights of the query projections"
        print(f"\n{self._name}: temperatures of {len(changed)} of {len(heads)} heads{where}:")
        print("\n".join(lines) + more)

    def _tell_limits(self, changes: Sequence[TemperatureChange]) -> None:
        """Say which heads have come to a limit: all at once where whole sites have come to one as a schedule has it."""
        whole: dict[tuple[int, float], list[str]] = {}
        for change in changes:
            by_limit: dict[float, list[int]] = {}
            for head in change.limited:
                if (change.site, head) not in self._limited:
                    self._limited.add((change.site, head))
                    by_limit.setdefault(change.after[head], []).append(head)
            for limit, heads in by_limit.items():
                if change.scale is None and len(heads) == len(change.after):
                    whole.setdefault((change.step, limit), []).append(change.site)
                else:
                    self._tell_limit(change.step, f"head {_listed(heads)} of {change.site}", limit, change.scale)
        for (step, limit), sites in whole.items():
            self._tell_limit(step, _several(sites), limit, None)

    def _tell_limit(self, step: int, whose: str, limit: float, scale: Sequence[float | None] | None) -> None:
        why = ""
        if scale is not None and limit > 1:
            why = (
                " Its weights grow faster than a temperature makes up for: lower the learning rate, or normalise "
                "queries and keys."
            )
        self.warn(
            f"at step {step} the temperature of {whose} has come to its limit of {limit:.4g} and goes no farther.{why}"
        )


def _draw(trainer: pl.Trainer, step: int, temperatures: Mapping[str, list[float]]) -> None:
    values = torch.tensor([[value for of_site in temperatures.values() for value in of_site]], dtype=torch.float64)
    heads = {site: len(of_site) for site, of_site in temperatures.items()}
    log_heat_maps(trainer, Snapshot(step, heads, ("temperature",), values), _PREFIX, spans=_SPANS)


def _scalars(temperatures: Mapping[str, list[float]], highest_scale: float | None) -> dict[str, float]:
    heads = [value for values in temperatures.values() for value in values]
    tagged = {
        f"{_PREFIX}/min": min(heads),
        f"{_PREFIX}/mean": sum(heads) / len(heads),
        f"{_PREFIX}/max": max(heads),
        f"{_PREFIX}/share_changed": sum(value != 1 for value in heads) / len(heads),
    }
    if highest_scale is not None:
        tagged[f"{_PREFIX}/highest_raw_scale"] = highest_scale
    if len(temperatures) <= MAX_TAGS:
        tagged |= {f"{_PREFIX}/site/{site}": max(values) for site, values in temperatures.items()}
    return tagged


def _first_words(changes: Sequence[TemperatureChange]) -> list[str]:
    """What is said of sites that move for the first time; of those together that one schedule moves."""
    together: dict[tuple[int, float], list[str]] = {}
    alone = []
    for change in changes:
        if change.scale is None and len(change.heads) == len(change.after) and len(set(change.after)) == 1:
            together.setdefault((change.step, change.after[0]), []).append(change.site)
        else:
            alone.append(_words_of(change))
    return [
        f"from step {step} on {_several(sites)} {'has' if len(sites) == 1 else 'have'} temperature {value:.3g}."
        for (step, value), sites in together.items()
    ] + alone


def _words_of(change: TemperatureChange) -> str:
    heads = change.heads
    named = ", ".join(
        f"head {head} {change.after[head]:.3g}"
        + (
            ""
            if change.scale is None or change.scale[min(head, len(change.scale) - 1)] is None
            else f" (logits deviated by {change.scale[min(head, len(change.scale) - 1)]:.3g} without it)"
        )
        for head in heads[:_NAMED]
    )
    more = f" and {len(heads) - _NAMED} more" if len(heads) > _NAMED else ""
    return f"at step {change.step} temperatures of {change.site} begin to move: {named}{more}."


def _several(sites: Sequence[str]) -> str:
    return some(sites) if len(sites) <= _NAMED_SITES else f"{len(sites)} sites ({some(sites)})"


def _listed(heads: Sequence[int]) -> str:
    return ", ".join(map(str, heads[:_NAMED])) + (f" and {len(heads) - _NAMED} more" if len(heads) > _NAMED else "")
