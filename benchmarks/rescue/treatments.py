"""What is done about runs that go wrong, and to which runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lightning.pytorch import Callback

from lightning_attn import AdaptiveTemperature, AttentionEarlyWarning, QKClip
from lightning_attn.temperature import HighToLow, HoldEntropy, HoldLogitScale

sys.path.append(str(Path(__file__).parents[1] / "early_warning"))  # its models and settings
from settings import FAMILIES, Setting

#: How a setting ends when nothing is done: stalled, hot (it learns, badly), or well.
Kind = Literal["stalled", "hot", "healthy"]


@dataclass(frozen=True)
class Case:
    """A setting of a family of models.

    Args:
        family: name of the family.
        setting: name of the setting.
        kind: how it ends when nothing is done.
    """

    family: str
    setting: str
    kind: Kind

    @property
    def title(self) -> str:
        """What it is called in tables."""
        return f"{self.family}, {self.setting}"


@dataclass(frozen=True)
class Treatment:
    """Something that is done about a run.

    Args:
        callbacks: makes the callbacks that do it.
        has_qk_norm: whether the model is built with q/k norm.
        is_main: whether it is one of the four that are compared first.
    """

    callbacks: Callable[[], list[Callback]] = list
    has_qk_norm: bool = False
    is_main: bool = True

    def setting(self, case: Case) -> Setting:
        """The setting that is trained."""
        setting = FAMILIES[case.family].settings[case.setting]
        return replace(setting, qk_norm=True) if self.has_qk_norm else setting


def _loop(**arguments: object) -> Callback:
    return AdaptiveTemperature(file=None, print_summary=False, **arguments)  # type: ignore[arg-type]


def _on_warning() -> list[Callback]:
    return [AttentionEarlyWarning(file=None, print_summary=False), _loop(start="warning")]


CASES = (
    Case("language model", "lr .02", "stalled"),
    Case("vision transformer", "lr .01", "hot"),
    Case("vision transformer", "lr .03", "stalled"),
    Case("language model", "lr .001", "healthy"),
    Case("language model", "lr .002", "healthy"),
    Case("language model", "post-norm, lr .002", "healthy"),
    Case("vision transformer", "lr .001", "healthy"),
    Case("vision transformer", "lr .003", "healthy"),
)

UNTREATED, QK_NORM, FROM_START, ON_WARNING = "untreated", "q/k norm", "loop from the start", "loop on warning"
NEVER_ASLEEP = "loop that never sleeps"
TREATMENTS = {
    UNTREATED: Treatment(),
    QK_NORM: Treatment(has_qk_norm=True),
    FROM_START: Treatment(lambda: [_loop()]),
    ON_WARNING: Treatment(_on_warning),
    NEVER_ASLEEP: Treatment(lambda: [_loop(control=HoldLogitScale(wakes_at=None))], is_main=False),
    "clip at 30": Treatment(lambda: [QKClip(30.0, file=None, print_summary=False)], is_main=False),
    "entropy loop": Treatment(lambda: [_loop(control=HoldEntropy())], is_main=False),
    "high to low": Treatment(lambda: [_loop(control=HighToLow(start=4.0, steps=250))], is_main=False),
}


def treatments_of(case: Case) -> dict[str, Treatment]:
    """What is tried on a case: a healthy one is given what may be left on, the others everything."""
    if case.kind == "healthy":
        return {name: TREATMENTS[name] for name in (UNTREATED, FROM_START, ON_WARNING, NEVER_ASLEEP)}
    return TREATMENTS
