"""What people and programs get to hear of early warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_attn.callbacks.loggers import log_scalars, log_text
from lightning_attn.callbacks.run_file import checked_name, file_path
from lightning_attn.callbacks.warning_file import WarningFile
from lightning_attn.capture.report import AttentionWarning
from lightning_attn.warning.announcer import Announcer
from lightning_attn.warning.early_warning import EarlyWarning, Severity
from lightning_attn.warning.message import summary

if TYPE_CHECKING:
    import lightning.pytorch as pl


class WarningLog:
    """Messages, texts in TensorBoard, a scalar for each rule that has warned, and lines in a file; all on rank zero.

    Args:
        quiet_steps: see `Announcer`.
        file: the file's name, or where it is; ``None`` for none.
        print_summary: whether all is summed up when training ends.

    Raises:
        ValueError: if the file has no name.
    """

    def __init__(self, quiet_steps: int, file: str | None, print_summary: bool) -> None:
        self._announcer = Announcer(quiet_steps)
        self._file_name = checked_name(file)
        self._print_summary = print_summary
        self._file: WarningFile | None = None
        self._run: str | None = None
        self._is_resumed = False

    def state_dict(self) -> dict[str, Any]:
        """What was said, and which lines of the file are of this run."""
        return {"announcer": self._announcer.state_dict(), "run": self._run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self._announcer.load_state_dict(state["announcer"])
        self._run = state["run"]
        self._is_resumed = True

    def begin(self) -> None:
        """Begin a run."""
        self._announcer.clear()
        self._file, self._run, self._is_resumed = None, None, False

    def open(self, trainer: pl.Trainer, folder: str, known: Sequence[EarlyWarning]) -> None:
        """Find the file of the run that was begun or is gone on with.

        Args:
            trainer: the Trainer.
            folder: where a file is that has but a name.
            known: what was found in this run already.
        """
        if self._file_name is not None and trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False):
            file = WarningFile(file_path(folder, self._file_name), self._run)
            if self._file is None or (self._file.path, self._file.run) != (file.path, file.run):
                self._file = file  # a file that could not be written is not tried, and told of, again
            self._run = self._file.run
            if self._is_resumed:
                self._file.resume(known)
        self._is_resumed = False

    def write(self, trainer: pl.Trainer, step: int, new: Sequence[EarlyWarning], standing: Mapping[str, int]) -> None:
        """Write down and say what a snapshot has shown.

        Args:
            trainer: the Trainer.
            step: of the snapshot.
            new: what was found in it; may be nothing.
            standing: how many places there are that each rule has warned of and that are no better since, of every rule
                that has ever warned.
        """
        if self._file is not None:
            self._file.add(new)
        if standing:
            log_scalars(trainer, {f"attention_warnings/{rule}": float(standing[rule]) for rule in standing}, step)
        self._say(trainer, self._announcer.messages(step, new), step)

    def end(self, trainer: pl.Trainer, warnings: Sequence[EarlyWarning]) -> None:
        """Say what is still held back, and sum up what was found."""
        if warnings:
            self._say(trainer, self._announcer.rest(), warnings[-1].step)
        if self._print_summary and trainer.is_global_zero:
            print(f"\n{summary(warnings)}")

    def _say(self, trainer: pl.Trainer, said: Sequence[tuple[Severity, str]], step: int) -> None:
        if said:
            log_text(trainer, "attention_warnings", _markdown([text for _, text in said]), step)
        for severity, text in said:  # last, since warnings are errors for some people
            if severity == "info":
                rank_zero_info(f"AttentionEarlyWarning. {text}")
            else:
                rank_zero_warn(f"AttentionEarlyWarning. {text}", category=AttentionWarning)


def _markdown(messages: Sequence[str]) -> str:
    return "\n\n---\n\n".join(text.replace("\n", "  \n") for text in messages)
