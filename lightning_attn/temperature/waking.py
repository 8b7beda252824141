"""Which of a plan's closed loops are awake, and what wakes those that sleep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_attn.temperature.control import TemperatureControl
from lightning_attn.temperature.plan import TemperaturePlan


class Woken(NamedTuple):
    """A loop, and the head that has woken it."""

    loop: TemperatureControl
    site: str
    head: int
    #: What was read of it.
    read: dict[str, float]
    #: The same at the measurement before, where there was one.
    before: dict[str, float] | None

    @property
    def reason(self) -> str:
        """What has woken it, in a few words."""
        after = "" if self.before is None else " after {} at the measurement before"
        return ", ".join(
            f"{_CALLED.get(name, name)} {value:.3g}" + after.format(f"{(self.before or {}).get(name, math.nan):.3g}")
            for name, value in self.read.items()
        )


#: The deviation of logits while all temperatures are 1.
_CALLED = {"logit_std": "raw scale"}


class Waking:
    """Remembers which loops are awake: once it is, a loop stays so until the run ends.

    Args:
        plan: whose loops.
    """

    def __init__(self, plan: TemperaturePlan) -> None:
        self._plan = plan
        self._awake: set[int] = set()
        #: What was read last for loops that sleep, by sites.
        self._before: dict[str, dict[str, Tensor]] = {}

    def wake(self) -> None:
        """Wake all loops."""
        self._awake.update(range(len(self._plan.loops)))
        self._before.clear()

    def is_awake(self, loop: TemperatureControl) -> bool:
        """Whether a loop is awake."""
        return any(self._plan.loops[number] is loop for number in self._awake)

    def look(self, loop: TemperatureControl, read: Mapping[str, Mapping[str, Tensor]]) -> list[Woken]:
        """Wake a loop that sleeps if a head does so.

        Args:
            loop: it.
            read: what it reads of each of its sites.

        Returns:
            Of such heads the hottest, that whose temperature has the longest way to go.
        """
        number = next(number for number, one in enumerate(self._plan.loops) if one is loop)
        if number in self._awake:
            return []
        heads = [
            (self._urgency(loop, of_site, head), Woken(loop, site, head, *self._of_head(site, of_site, head)))
            for site, of_site in read.items()
            for head in loop.wakes(of_site, self._before.get(site)).nonzero()[:, 0].tolist()
        ]
        if not heads:
            self._before |= {site: dict(of_site) for site, of_site in read.items()}
            return []
        for site in read:
            self._before.pop(site, None)
        self._awake.add(number)
        return [max(heads, key=lambda one: one[0])[1]]

    @staticmethod
    def _urgency(loop: TemperatureControl, read: Mapping[str, Tensor], head: int) -> float:
        cool = torch.zeros(len(next(iter(read.values()))), dtype=torch.float64)
        error = float(loop.error(cool, read).expand_as(cool)[head])
        return -math.inf if math.isnan(error) else error

    def _of_head(
        self, site: str, read: Mapping[str, Tensor], head: int
    ) -> tuple[dict[str, float], dict[str, float] | None]:
        before = self._before.get(site)
        now = {name: float(values[head]) for name, values in read.items()}
        return now, None if before is None else {name: float(values[head]) for name, values in before.items()}

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, in plain values and tensors."""
        return {"awake": sorted(self._awake), "before": {site: dict(read) for site, read in self._before.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self._awake = set(state["awake"])
        self._before = {site: dict(read) for site, read in state["before"].items()}
