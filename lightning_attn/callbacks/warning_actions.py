"""What is done about early warnings, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.utilities import rank_zero_info

from lightning_attn.warning.early_warning import SEVERITIES, EarlyWarning
from lightning_attn.warning.message import message

if TYPE_CHECKING:
    import lightning.pytorch as pl

#: A function of the Trainer, the model and the warnings of one step.
ActionFunction = Callable[..., Any]
Word = Literal["warn", "stop", "raise", "checkpoint"]
#: A word or a function, or several of them. Functions come last, since LightningCLI would take a list for one.
Actions = Word | list[Word | ActionFunction] | ActionFunction

#: Events are told of, and nothing else is done about them unless somebody says so.
_ACTED_ON = ("warning", "critical")


class EarlyWarningError(RuntimeError):
    """Training was ended by an early warning.

    Args:
        warnings: what was found.
    """

    def __init__(self, warnings: Sequence[EarlyWarning]) -> None:
        super().__init__(list(warnings))  # what it is made of, so that it can be pickled
        self.warnings = list(warnings)

    def __str__(self) -> str:
        of_rules: dict[str, list[EarlyWarning]] = {}
        for warning in self.warnings:
            of_rules.setdefault(warning.rule, []).append(warning)
        return "\n".join(message(of_rule) for of_rule in of_rules.values())


class WarningActions:
    """What is done about which warnings, once the optimiser step in which they were found has ended.

    Args:
        action: what is done about warnings and critical ones: a word, a function, or a list of them; or a mapping to
            these from names of severities and of rules, of which the latter count.
        rules: names of the rules that there are.

    Raises:
        ValueError: if a word, a severity or a rule is unknown.
    """

    def __init__(self, action: Mapping[str, Actions] | Actions, rules: Iterable[str]) -> None:
        if isinstance(action, Mapping):
            known = [*SEVERITIES, *rules]
            for key in action:
                if key not in known:
                    raise ValueError(f"`action` has the key {key!r}; allowed are severities and rules: {known}.")
            self._actions = {key: _checked(value) for key, value in action.items()}
        else:
            self._actions = dict.fromkeys(_ACTED_ON, _checked(action))
        self.begin()
        #: The warning that training was stopped for.
        self.stopped_for: EarlyWarning | None = None

    def begin(self) -> None:
        """Begin a run."""
        self._waiting: list[EarlyWarning] = []
        self._saved: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """About what nothing was done yet, and of which rules there is a checkpoint, in plain values."""
        return {"waiting": [warning.to_dict() for warning in self._waiting], "saved": sorted(self._saved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self._waiting = [EarlyWarning.from_dict(values) for values in state["waiting"]]
        self._saved = set(state["saved"])

    def add(self, warnings: Iterable[EarlyWarning]) -> None:
        """Take up new warnings, about which something is done when the step has ended."""
        self._waiting += warnings

    def act(self, trainer: pl.Trainer, model: pl.LightningModule, folder: str) -> None:
        """Do what is to be done: call functions, save what these have made of the run, and end it.

        Args:
            trainer: the Trainer.
            model: its model.
            folder: where checkpoints go if the Trainer has no callback that says so.

        Raises:
            EarlyWarningError: if that is what is to be done.
        """
        waiting, self._waiting = self._waiting, []  # a checkpoint that is saved here must not have it done again
        words, functions = self._due(waiting)
        try:
            for function, concerned in functions:
                function(trainer, model, concerned)
        finally:
            if "checkpoint" in words:
                self._save(trainer, words["checkpoint"], folder)
        if "stop" in words and self.stopped_for is None:
            self.stopped_for = words["stop"][0]
            rank_zero_info(f"AttentionEarlyWarning stops training. {message([self.stopped_for])}")
        if "stop" in words:
            trainer.should_stop = True
        if "raise" in words:
            raise EarlyWarningError(words["raise"])

    def _due(
        self, warnings: Iterable[EarlyWarning]
    ) -> tuple[dict[str, list[EarlyWarning]], list[tuple[ActionFunction, list[EarlyWarning]]]]:
        """Words and functions with the warnings that they are for."""
        words: dict[str, list[EarlyWarning]] = {}
        functions: dict[int, tuple[ActionFunction, list[EarlyWarning]]] = {}  # by identity: not all have a hash
        for warning in warnings:
            for action in self._actions.get(warning.rule, self._actions.get(warning.severity, ())):
                if isinstance(action, str):
                    words.setdefault(action, []).append(warning)
                else:
                    functions.setdefault(id(action), (action, []))[1].append(warning)
        return words, list(functions.values())

    def _save(self, trainer: pl.Trainer, warnings: Sequence[EarlyWarning], folder: str) -> None:
        """Save the model once for each rule: the first time it warns, there is most left to be saved."""
        new = {warning.rule for warning in warnings} - self._saved
        if not new or getattr(trainer, "fast_dev_run", False):
            return
        self._saved |= new
        callback = trainer.checkpoint_callback
        directory = getattr(callback, "dirpath", None) or f"{folder.rstrip('/')}/checkpoints"
        path = _unused(trainer, f"{str(directory).rstrip('/')}/early-warning-step={warnings[-1].step}")
        trainer.save_checkpoint(path)
        rank_zero_info(f"AttentionEarlyWarning saved {path} because of {', '.join(sorted(new))}.")


def _unused(trainer: pl.Trainer, stem: str) -> str:
    """The path of a checkpoint that takes the place of none, such as another run's; all ranks find the same."""
    for version in count():
        path = f"{stem}.ckpt" if version == 0 else f"{stem}-v{version}.ckpt"
        if not trainer.strategy.broadcast(get_filesystem(path).exists(path)):
            return path
    raise AssertionError


def _checked(given: Actions) -> tuple[Word | ActionFunction, ...]:
    actions = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for action in actions:
        if not callable(action) and action not in get_args(Word):
            raise ValueError(
                f"`action` must be one of {list(get_args(Word))}, a function, a list of them, or a mapping to these "
                f"from severities and rules, got {given!r}."
            )
    return actions
