"""Which of a plan's closed loops are awake, and what wakes those that sleep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightning_attn.temperature.control import TemperatureControl
from lightning_attn.temperature.plan import TemperaturePlan


class Woken(NamedTuple):
    """A loop, and the head that has woken it."""

    loop: TemperatureControl
    site: str
    head: int


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

    def look(self, read: Mapping[str, Mapping[str, Tensor]]) -> list[Woken]:
        """Wake the loops of which a head does so.

        Args:
            read: what the loops read of each site.

        Returns:
            The first such head of each.
        """
        woken = []
        for number, loop in enumerate(self._plan.loops):
            if number in self._awake:
                continue
            sites = [site for site in read if self._plan.loop_of(site) is loop]
            heads = (
                Woken(loop, site, head)
                for site in sites
                for head in loop.wakes(read[site], self._before.get(site)).nonzero()[:, 0].tolist()
            )
            first = next(heads, None)
            for site in sites:
                if first is None:
                    self._before[site] = dict(read[site])
                else:
                    self._before.pop(site, None)
            if first is not None:
                self._awake.add(number)
                woken.append(first)
        return woken

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, in plain values and tensors."""
        return {"awake": sorted(self._awake), "before": {site: dict(read) for site, read in self._before.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self._awake = set(state["awake"])
        self._before = {site: dict(read) for site, read in state["before"].items()}
