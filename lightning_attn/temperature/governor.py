"""Moving the temperatures of a model as a plan has it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_attn.snapshot import Snapshot
from lightning_attn.temperature.attention_temperature import AttentionTemperature
from lightning_attn.temperature.change import TemperatureChange
from lightning_attn.temperature.control import TemperatureControl
from lightning_attn.temperature.plan import TemperaturePlan
from lightning_attn.temperature.site_temperature import SiteTemperature


class Waking(NamedTuple):
    """The head that has woken a loop."""

    site: str
    head: int
    loop: TemperatureControl


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
        self._wanted: dict[str, Tensor] = {}
        self._waiting: dict[str, TemperatureChange] = {}
        #: Which of the plan's loops are awake, by their places.
        self._awake: set[int] = set()
        #: What the loops that sleep read at the last measurement, by site.
        self._before: dict[str, dict[str, Tensor]] = {}

    def log_temperatures(self, site: str) -> Tensor:
        """What a site has, or would have if this were not dry: see `SiteTemperature.log_temperatures`."""
        held = self.temperature.sites[site].log_temperatures
        return self._wanted.get(site, torch.zeros_like(held)) if self._is_dry else held

    def temperatures(self) -> dict[str, list[float]]:
        """The temperature of each head of each site."""
        return {
            site: self.log_temperatures(site).exp().expand(held.heads).tolist()
            for site, held in self.temperature.sites.items()
        }

    def follow_schedules(self, step: int) -> list[TemperatureChange]:
        """Set what schedules say of a step.

        Args:
            step: counted from when they were switched on.
        """
        changes: list[TemperatureChange] = []
        for site, held in self.temperature.sites.items():
            schedule = self._plan.schedule_of(site)
            if schedule is not None:
                wanted = torch.full_like(held.log_temperatures, math.log(schedule(step)))
                changes += self._decided(step, held, wanted)
        for change in changes:
            self._set(change.site, self._wanted_of(change))
        return changes

    def wake(self) -> None:
        """Wake all loops."""
        self._awake.update(range(len(self._plan.loops)))

    def look(self, snapshot: Snapshot) -> list[Waking]:
        """Decide what loops make of a snapshot.

        Returns:
            What has woken loops.
        """
        read = {
            site: self._read(loop, held, snapshot)
            for site, held in self.temperature.sites.items()
            if (loop := self._plan.loop_of(site)) is not None and site in snapshot.heads
        }
        woken = [waking for number, loop in enumerate(self._plan.loops) for waking in self._woken(number, loop, read)]
        for site, of_site in read.items():
            loop = self._plan.loop_of(site)
            if loop is not None and self._plan.loops.index(loop) in self._awake:
                self._before.pop(site, None)
                self._decide(loop, self.temperature.sites[site], of_site, snapshot.step)
            else:
                self._before[site] = of_site
        return woken

    def act(self, step: int) -> list[TemperatureChange]:
        """Do what was decided."""
        waiting, self._waiting = self._waiting, {}
        done = []
        for site, change in waiting.items():
            if site in self.temperature.sites:
                self._set(site, self._wanted_of(change))
                done.append(TemperatureChange(step, site, change.before, change.after, change.scale, change.limited))
        return done

    def state_dict(self) -> dict[str, Any]:
        """What was decided and not done, in plain values and tensors."""
        return {
            "awake": sorted(self._awake),
            "before": self._before,
            "wanted": self._wanted,
            "waiting": {site: change.to_dict() for site, change in self._waiting.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self._awake = set(state["awake"])
        self._before = {site: dict(read) for site, read in state["before"].items()}
        self._wanted = dict(state["wanted"])
        self._waiting = {site: TemperatureChange(**values) for site, values in state["waiting"].items()}

    def _read(self, loop: TemperatureControl, held: SiteTemperature, snapshot: Snapshot) -> dict[str, Tensor]:
        """What a loop reads of a site."""
        read = {name: _values(snapshot, held.site, name) for name in loop.statistics}
        if "logit_std" in read:
            products = (read["logit_std"].square() - held.bias_std.double().square()).clamp(min=0).sqrt()
            # In a dry run: what it would have made of the deviation that it did not change.
            read["logit_std"] = products * (held.log_temperatures - self.log_temperatures(held.site)).exp()
        return read

    def _woken(
        self, number: int, loop: TemperatureControl, read: Mapping[str, Mapping[str, Tensor]]
    ) -> Iterator[Waking]:
        """Wake a loop if one of its heads does, and say which."""
        if number in self._awake:
            return
        for site, of_site in read.items():
            if self._plan.loop_of(site) is not loop:
                continue
            heads = loop.wakes(of_site, self._before.get(site)).nonzero()[:, 0].tolist()
            if heads:
                self._awake.add(number)
                yield Waking(site, heads[0], loop)
                return

    def _decide(self, loop: TemperatureControl, held: SiteTemperature, read: Mapping[str, Tensor], step: int) -> None:
        """Decide what a loop makes of what it has read."""
        now = self.log_temperatures(held.site)
        moved = loop.moved(now.expand(held.heads), read)
        if held.is_shared:  # what the hottest head needs
            moved = moved.max().reshape(1)
        scale = None
        if "logit_std" in read:
            scale = [None if math.isnan(value) else value for value in (read["logit_std"] * now.exp()).tolist()]
        for change in self._decided(step, held, moved, scale):
            self._waiting[held.site] = change

    def _decided(
        self, step: int, held: SiteTemperature, wanted: Tensor, scale: list[float | None] | None = None
    ) -> Iterator[TemperatureChange]:
        """The change to what is wanted, within the limits; none where nothing changes."""
        low, high = math.log(self._plan.min_temperature), math.log(self._plan.max_temperature)
        allowed = wanted.clamp(low, high)
        now = self.log_temperatures(held.site)
        if torch.equal(allowed, now):
            return
        limited = (allowed != wanted).expand(held.heads).nonzero()[:, 0].tolist()
        before, after = (values.exp().expand(held.heads).tolist() for values in (now, allowed))
        yield TemperatureChange(step, held.site, before, after, scale, tuple(limited))

    def _wanted_of(self, change: TemperatureChange) -> Tensor:
        count = len(self.temperature.sites[change.site].log_temperatures)
        return torch.tensor(change.after[:count], dtype=torch.float64).log()

    def _set(self, site: str, log_temperatures: Tensor) -> None:
        if self._is_dry:
            self._wanted[site] = log_temperatures
        else:
            self.temperature.sites[site].set(log_temperatures)


def _values(snapshot: Snapshot, site: str, statistic: str) -> Tensor:
    values = [math.nan if value is None else value for value in snapshot[site, statistic]]
    return torch.tensor(values, dtype=torch.float64)
