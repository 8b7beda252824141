"""What is done about early warnings, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_attn.warning.early_warning import SEVERITIES, EarlyWarning
from lightning_attn.warning.message import message

if TYPE_CHECKING:
    import lightning.pytorch as pl

#: A function of the Trainer, the model and the warnings of one step.
ActionFunction = Callable[..., Any]
#: A word or a function, or several of them.
Actions = str | ActionFunction | Sequence[str | ActionFunction]

WORDS = ("warn", "stop", "raise", "checkpoint")
#: Events are told of, and nothing else is done about them unless somebody says so.
_ACTED_ON = ("warning", "critical")


class EarlyWarningError(RuntimeError):
    """Training was ended by an early warning.

    Args:
        warnings: what was found.
    """

    def __init__(self, warnings: Sequence[EarlyWarning]) -> None:
        super().__init__("\n".join(message([warning]) for warning in warnings[:3]))
        self.warnings = list(warnings)


class WarningActions:
    """What is done about which warnings.

    Args:
        action: what is done about warnings and critical ones: a word, a function, or a list of them; or a mapping to
            these from names of severities and of rules, of which the latter count.
        rules: names of the rules that there are.

    Raises:
        ValueError: if a word, a severity or a rule is unknown.
    """

    def __init__(self, action: Actions | Mapping[str, Actions], rules: Iterable[str]) -> None:
        if isinstance(action, Mapping):
            known = [*SEVERITIES, *rules]
            for key in action:
                if key not in known:
                    raise ValueError(f"`action` has the key {key!r}; allowed are severities and rules: {known}.")
            self._actions = {key: _checked(value) for key, value in action.items()}
        else:
            self._actions = dict.fromkeys(_ACTED_ON, _checked(action))
        self._saved: set[str] = set()
        #: The warning that training was stopped for.
        self.stopped_for: EarlyWarning | None = None

    def act(
        self, trainer: pl.Trainer, model: pl.LightningModule, warnings: Sequence[EarlyWarning], folder: str
    ) -> None:
        """Do what is to be done about the new warnings of a step.

        Args:
            trainer: the Trainer.
            model: its model.
            warnings: the warnings.
            folder: where checkpoints go if the Trainer has no callback that says so.

        Raises:
            EarlyWarningError: if that is what is to be done.
        """
        due: dict[str | ActionFunction, list[EarlyWarning]] = {}
        for warning in warnings:
            for action in self._actions.get(warning.rule, self._actions.get(warning.severity, ())):
                due.setdefault(action, []).append(warning)
        for action, concerned in due.items():
            if callable(action):
                action(trainer, model, concerned)
        if "checkpoint" in due:
            self._save(trainer, due["checkpoint"], folder)
        if "stop" in due and self.stopped_for is None:
            self.stopped_for = due["stop"][0]
            rank_zero_info(f"AttentionEarlyWarning stops training: {message([self.stopped_for])}")
            trainer.should_stop = True
        if "raise" in due:
            raise EarlyWarningError(due["raise"])

    def begin(self) -> None:
        """Begin a run."""
        self._saved.clear()
        self.stopped_for = None

    def state_dict(self) -> dict[str, Any]:
        """Of which rules there is a checkpoint."""
        return {"saved": sorted(self._saved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off; a run that was stopped was resumed on purpose."""
        self._saved = set(state["saved"])

    def _save(self, trainer: pl.Trainer, warnings: Sequence[EarlyWarning], folder: str) -> None:
        """Save the model once for each rule: the first time it warns, there is most left to be saved."""
        new = {warning.rule for warning in warnings} - self._saved
        if not new or getattr(trainer, "fast_dev_run", False):
            return
        self._saved |= new
        callback = trainer.checkpoint_callback
        directory = getattr(callback, "dirpath", None) or f"{folder.rstrip('/')}/checkpoints"
        path = f"{str(directory).rstrip('/')}/early-warning-step={warnings[0].step}.ckpt"
        trainer.save_checkpoint(path)
        rank_zero_info(f"AttentionEarlyWarning saved {path} because of {', '.join(sorted(new))}.")


def _checked(given: Actions) -> tuple[str | ActionFunction, ...]:
    actions = (given,) if isinstance(given, str) or callable(given) else tuple(given)
    for action in actions:
        if not callable(action) and action not in WORDS:
            raise ValueError(f"`action` must be one of {list(WORDS)}, a function, or a list of them, got {given!r}.")
    return actions
