"""Moving the temperatures of a model as a plan has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_attn.snapshot import Snapshot
from lightning_attn.temperature.attention_temperature import AttentionTemperature
from lightning_attn.temperature.change import TemperatureChange
from lightning_attn.temperature.control import TemperatureControl
from lightning_attn.temperature.plan import TemperaturePlan
from lightning_attn.temperature.site_temperature import SiteTemperature
from lightning_attn.temperature.waking import Waking, Woken


class TemperatureGovernor:
    """Decides on temperatures, and sets them when it is told to.

    What a snapshot says is decided on at once and done later, at the end of the optimiser step, so that all
    micro-batches of a step have the same temperatures.

    Args:
        temperature: the temperatures of the model.
        plan: what they follow.
        is_dry: decide, and do nothing.
    """

    def __init__(self, temperature: AttentionTemperature, plan: TemperaturePlan, is_dry: bool = False) -> None:
        self.temperature = temperature
        self._plan = plan
        self._is_dry = is_dry
        self._waking = Waking(plan)
        #: What a dry run would have set, by sites.
        self._imagined: dict[str, Tensor] = {}
        #: What was decided and not done, by sites: logarithms of temperatures, and the record of it.
        self._waiting: dict[str, tuple[Tensor, TemperatureChange]] = {}
        #: What was done and not taken by anybody.
        self._done: dict[str, TemperatureChange] = {}

    def log_temperatures(self, site: str) -> Tensor:
        """What a site has, or would have if this were not dry: see `SiteTemperature.log_temperatures`."""
        held = self.temperature.sites[site].log_temperatures
        return self._imagined.get(site, torch.zeros_like(held)) if self._is_dry else held

    def temperatures(self) -> dict[str, list[float]]:
        """The temperature of each head of each site."""
        return {
            site: self.log_temperatures(site).exp().expand(held.heads).tolist()
            for site, held in self.temperature.sites.items()
        }

    def follow_schedules(self, step: int, started_at: int) -> None:
        """Set what schedules say of a step.

        Args:
            step: the optimiser step that begins.
            started_at: the one at which they were switched on.
        """
        for site, held in self.temperature.sites.items():
            schedule = self._plan.schedule_of(site)
            if schedule is not None:
                wanted = torch.full_like(held.log_temperatures, math.log(schedule(step - started_at)))
                decided = self._decided(step, held, wanted)
                if decided is not None:
                    self._do(*decided)

    def wake(self) -> None:
        """Wake all loops that sleep."""
        self._waking.wake()

    def look(self, snapshot: Snapshot) -> list[Woken]:
        """Decide what loops make of a snapshot.

        Returns:
            The loops that it has woken.
        """
        loops = {site: self._plan.loop_of(site) for site in self.temperature.sites if site in snapshot.heads}
        read = {site: self._read(loop, site, snapshot) for site, loop in loops.items() if loop is not None}
        woken = self._waking.look(read)
        for site, of_site in read.items():
            loop = loops[site]
            if loop is not None and self._waking.is_awake(loop):
                self._decide(loop, self.temperature.sites[site], of_site, snapshot.step)
        return woken

    def act(self, step: int) -> None:
        """Do what was decided.

        Args:
            step: the optimiser step that is the next.
        """
        waiting, self._waiting = self._waiting, {}
        for site, (allowed, change) in waiting.items():
            if site in self.temperature.sites:
                self._do(allowed, replace(change, step=step))

    def take_changes(self) -> list[TemperatureChange]:
        """What was done since this was last asked: one record for each site, from its first state to its last."""
        done, self._done = self._done, {}
        return list(done.values())

    def state_dict(self) -> dict[str, Any]:
        """What was decided or done and not taken up, in plain values and tensors."""
        return {
            "waking": self._waking.state_dict(),
            "imagined": dict(self._imagined),
            "waiting": {site: (allowed, change.to_dict()) for site, (allowed, change) in self._waiting.items()},
            "done": {site: change.to_dict() for site, change in self._done.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self._waking.load_state_dict(state["waking"])
        self._imagined = dict(state["imagined"])
        self._waiting = {
            site: (allowed, TemperatureChange.from_dict(values)) for site, (allowed, values) in state["waiting"].items()
        }
        self._done = {site: TemperatureChange.from_dict(values) for site, values in state["done"].items()}

    def _read(self, loop: TemperatureControl, site: str, snapshot: Snapshot) -> dict[str, Tensor]:
        """What a loop reads of a site."""
        held = self.temperature.sites[site]
        read = {name: _values(snapshot, site, name) for name in loop.statistics}
        if "logit_std" in read:
            products = (read["logit_std"].square() - held.bias_std.double().square()).clamp(min=0).sqrt()
            # What a dry run would have made of the deviation that it did not change.
            read["logit_std"] = products * (held.log_temperatures - self.log_temperatures(site)).exp()
        return read

    def _decide(self, loop: TemperatureControl, held: SiteTemperature, read: Mapping[str, Tensor], step: int) -> None:
        """Decide what a loop makes of what it has read."""
        now, scale = self.log_temperatures(held.site), None
        if "logit_std" in read:
            scale = [value if math.isfinite(value) else None for value in (read["logit_std"] * now.exp()).tolist()]
        else:
            now = held.log_temperatures  # what a dry run would have made of it cannot be told: it says the first move
        moved = loop.moved(now.expand(held.heads), read)
        if held.is_shared:  # what the hottest head needs
            moved = moved.max().reshape(1)
        decided = self._decided(step, held, moved, scale)
        if decided is not None:
            self._waiting[held.site] = decided
        else:
            self._waiting.pop(held.site, None)

    def _decided(
        self, step: int, held: SiteTemperature, wanted: Tensor, scale: list[float | None] | None = None
    ) -> tuple[Tensor, TemperatureChange] | None:
        """What is wanted, within the limits; ``None`` where nothing changes."""
        low, high = math.log(self._plan.min_temperature), math.log(self._plan.max_temperature)
        allowed = wanted.clamp(low, high)
        now = self.log_temperatures(held.site)
        if torch.equal(allowed, now):
            return None
        limited = (allowed != wanted).expand(held.heads).nonzero()[:, 0].tolist()
        before, after = (values.exp().expand(held.heads).tolist() for values in (now, allowed))
        return allowed, TemperatureChange(step, held.site, before, after, scale, tuple(limited))

    def _do(self, allowed: Tensor, change: TemperatureChange) -> None:
        if self._is_dry:
            self._imagined[change.site] = allowed
        else:
            self.temperature.sites[change.site].set(allowed)
        earlier = self._done.get(change.site)
        self._done[change.site] = change if earlier is None else replace(change, before=earlier.before)


def _values(snapshot: Snapshot, site: str, statistic: str) -> Tensor:
    values = [math.nan if value is None else value for value in snapshot[site, statistic]]
    return torch.tensor(values, dtype=torch.float64)
