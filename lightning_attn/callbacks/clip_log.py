"""What people and programs get to hear of clipped heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_attn.callbacks.loggers import log_scalars
from lightning_attn.callbacks.run_file import RunFile, checked_name, file_path
from lightning_attn.capture.report import AttentionWarning
from lightning_attn.clipping.head_clip import HeadClip

if TYPE_CHECKING:
    import lightning.pytorch as pl

_PREFIX = "attention_qk_clip"
#: So many heads are named in a message, and so many lines are in the summary.
_NAMED, _LINES = 4, 10


class ClipLog:
    """Messages, scalars, and a line in a file for each clip; all on rank zero.

    Args:
        file: the file's name, or where it is; ``None`` for none.
        print_summary: whether it is summed up at the end.
        is_dry: whether nothing is done but said.

    Raises:
        ValueError: if the file has no name.
    """

    def __init__(self, file: str | None, print_summary: bool, is_dry: bool) -> None:
        self._file_name = checked_name(file)
        self._print_summary = print_summary
        self._is_dry = is_dry
        self._name = "QKClip (dry run)" if is_dry else "QKClip"
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        self._run: str | None = None
        self._file: RunFile | None = None
        self._said: set[str] = set()
        self._resumed_at: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """What was said, and which lines of the file are of this run."""
        return {"run": self._run, "said": sorted(self._said)}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Go on where a checkpoint left off."""
        self._run, self._said, self._resumed_at = state["run"], set(state["said"]), step

    def open(self, trainer: pl.Trainer, folder: str) -> None:
        """Find the file of the run that was begun or is gone on with."""
        if self._file_name is None or not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        self._file = RunFile(file_path(folder, self._file_name), self._run, "Clips of heads")
        self._run = self._file.run
        if self._resumed_at is not None:
            last = self._resumed_at
            self._file.resume(lambda line: int(line.get("step", 0)) <= last)
            self._resumed_at = None

    def warn(self, message: str) -> None:
        """Say once what its owner should know."""
        if message not in self._said:
            self._said.add(message)
            rank_zero_warn(f"{self._name}: {message}", category=AttentionWarning)

    def info(self, message: str) -> None:
        """Say once what is good to know."""
        if message not in self._said:
            self._said.add(message)
            rank_zero_info(f"{self._name}: {message}")

    def write(self, trainer: pl.Trainer, step: int, largest: float | None, clips: Sequence[HeadClip]) -> None:
        """Write down what was done in a step, and say it of each site once.

        Args:
            trainer: whose loggers.
            step: the optimiser step.
            largest: the largest logit of all heads that can be clipped.
            clips: what was done; may be nothing.
        """
        if self._file is not None:
            self._file.add(clip.to_dict() for clip in clips)
        if clips or step % max(trainer.log_every_n_steps, 1) == 0:  # type: ignore[attr-defined]
            scalars = {
                f"{_PREFIX}/heads_clipped": float(len(clips)),
                f"{_PREFIX}/smallest_factor": min((clip.factor for clip in clips), default=1.0),
            }
            if largest is not None:
                scalars[f"{_PREFIX}/max_logit"] = largest
            log_scalars(trainer, scalars, step)
        for site in dict.fromkeys(clip.site for clip in clips):
            if (key := f"clips of {site}") not in self._said:
                self._said.add(key)
                rank_zero_info(f"{self._name}: {_first_words([clip for clip in clips if clip.site == site])}")

    def end(self, trainer: pl.Trainer, counts: Mapping[str, Sequence[int]]) -> None:
        """Sum up.

        Args:
            trainer: the Trainer.
            counts: how often each head of each site was clipped.
        """
        if not self._print_summary or not trainer.is_global_zero or not counts:
            return
        heads = [(count, site, head) for site, of_heads in counts.items() for head, count in enumerate(of_heads)]
        clipped = sorted((one for one in heads if one[0]), key=lambda one: -one[0])
        did = "would have been clipped" if self._is_dry else "were clipped"
        if not clipped:
            print(f"\n{self._name}: none of {len(heads)} heads {did.replace('were', 'was')}.")
            return
        print(f"\n{self._name}: {len(clipped)} of {len(heads)} heads {did}:")
        for count, site, head in clipped[:_LINES]:
            print(f"  {count:6} times  {site}, head {head}")
        if len(clipped) > _LINES:
            print(f"  … and {len(clipped) - _LINES} more")


def listed(names: Iterable[object]) -> str:
    """The first of some names, and how many more there are."""
    all_names = list(map(str, names))
    more = f" and {len(all_names) - _NAMED} more" if len(all_names) > _NAMED else ""
    return ", ".join(all_names[:_NAMED]) + more


def _first_words(clips: Sequence[HeadClip]) -> str:
    largest = max(clips, key=lambda clip: clip.max_logit)
    also = f" (so is head {listed(clip.head for clip in clips if clip is not largest)})" if len(clips) > 1 else ""
    return (
        f"at step {largest.step} head {largest.head} of {largest.site} is clipped, whose max_logit was "
        f"{largest.max_logit:.4g}: its queries are multiplied by {largest.query_factor:.4g}, its keys by "
        f"{largest.key_factor:.4g}{also}. The optimiser's moments stay as they are."
    )
