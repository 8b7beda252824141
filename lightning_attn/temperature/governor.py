"""Moving the temperatures of a model as a plan has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_attn.snapshot import Snapshot
from lightning_attn.temperature.attention_temperature import AttentionTemperature
from lightning_attn.temperature.change import TemperatureChange
from lightning_attn.temperature.control import TemperatureControl
from lightning_attn.temperature.plan import TemperaturePlan
from lightning_attn.temperature.schedules import TemperatureSchedule, checked
from lightning_attn.temperature.site_temperature import SiteTemperature
from lightning_attn.temperature.waking import Waking, Woken

#: What a schedule gives on this rank: a temperature, or why there is none.
Given: TypeAlias = float | str


class TemperatureGovernor:
    """Decides on temperatures, and sets them when it is told to.

    What a snapshot says is decided on at once and done later, at the end of the optimiser step, so that all
    micro-batches of a step have the same temperatures.

    Args:
        temperature: the temperatures of the model.
        plan: what they follow.
        is_dry: decide, and do nothing.
        report: is told once of each control that fails, with its sites, whose temperatures stay as they are; ``None``
            to have it raise.
        of_first_rank: gives what the first rank gives to it; every rank must come.
    """

    def __init__(
        self,
        temperature: AttentionTemperature,
        plan: TemperaturePlan,
        is_dry: bool = False,
        report: Callable[[Sequence[str], str], None] | None = None,
        of_first_rank: Callable[[list[Given]], list[Given]] | None = None,
    ) -> None:
        self.temperature = temperature
        self._plan = plan
        self._is_dry = is_dry
        self._report = report
        self._of_first_rank = of_first_rank
        #: The controls whose failure was told.
        self._failed: list[TemperatureControl | TemperatureSchedule] = []
        self._waking = Waking(plan)
        #: What a dry run would have set, by sites.
        self._imagined: dict[str, Tensor] = {}
        #: What was decided and not done, by sites: logarithms of temperatures, and the record of it.
        self._waiting: dict[str, tuple[Tensor, TemperatureChange]] = {}
        #: The last of each site that wants to go beyond a limit at which it is, not taken by anybody.
        self._held_back: dict[str, TemperatureChange] = {}
        #: The highest raw scale that was read and not taken by anybody.
        self._highest_scale: float | None = None
        #: What was done and not taken by anybody.
        self._done: dict[str, TemperatureChange] = {}

    def log_temperatures(self, site: str) -> Tensor:
        """What a site has, or would have if this were not dry: see `SiteTemperature.log_temperatures`."""
        held = self.temperature.sites[site].log_temperatures
        return self._imagined.get(site, held) if self._is_dry else held

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
        given = self._given(step - started_at)
        sites: dict[int, list[str]] = {}
        for site, held in self.temperature.sites.items():
            schedule = self._plan.schedule_of(site)
            if schedule is None:
                continue
            sites.setdefault(id(schedule), []).append(site)
            value = given[id(schedule)]
            if isinstance(value, float):
                decided = self._decided(step, held, torch.full_like(held.log_temperatures, math.log(value)))
                if decided is not None:
                    self._do(*decided)
        for schedule in self._plan.schedules:
            value = given[id(schedule)]
            if isinstance(value, str) and id(schedule) in sites:
                self._tell(schedule, sites[id(schedule)], step, value)

    def _given(self, step: int) -> dict[int, Given]:
        """What the schedules give, the same on all ranks, by their identities: a user's may have no hash."""
        schedules = self._plan.schedules
        given = {id(schedule): self._value(schedule, step) for schedule in schedules}
        own = [id(schedule) for schedule in schedules if not schedule.is_same_on_ranks]
        if own and self._of_first_rank is not None:
            given |= zip(own, self._of_first_rank([given[one] for one in own]), strict=True)
        if self._report is None:
            for schedule in schedules:
                value = given[id(schedule)]
                if isinstance(value, str):
                    raise ValueError(f"{schedule!r} gave no temperature: {value}")
        return given

    @staticmethod
    def _value(schedule: TemperatureSchedule, step: int) -> Given:
        try:
            return checked(schedule(step), f"the temperature at step {step}")
        except Exception as error:  # it may be anybody's
            return f"{type(error).__name__}: {error}"

    def _tell(
        self, control: TemperatureControl | TemperatureSchedule, sites: Sequence[str], step: int, cause: str
    ) -> None:
        """Say that a control has failed."""
        if self._report is not None and not any(control is failed for failed in self._failed):
            self._failed.append(control)
            self._report(
                sites,
                f"stays as it is at step {step}, and wherever this comes again: {control!r} failed "
                f"({cause.rstrip('.')}).",
            )

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
        self._note_scales(read)
        woken: list[Woken] = []
        for loop in self._plan.loops:
            of_loop = {site: read[site] for site in read if loops[site] is loop}
            try:
                woken += self._waking.look(loop, of_loop)
                if self._waking.is_awake(loop):
                    for site, of_site in of_loop.items():
                        self._decide(loop, self.temperature.sites[site], of_site, snapshot.step)
            except Exception as error:  # it may be anybody's
                if self._report is None:
                    raise
                for site in of_loop:
                    self._waiting.pop(site, None)
                self._tell(loop, list(of_loop), snapshot.step, f"{type(error).__name__}: {error}")
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

    @property
    def has_changes(self) -> bool:
        """Whether something was done that nobody has taken."""
        return bool(self._done)

    def take_changes(self) -> list[TemperatureChange]:
        """What was done since this was last asked: one record for each site, from its first state to its last.

        Of a site whose queries are a guess still it is told when they are found, since its heads are not known before.
        """
        sites, guessed = self.temperature.sites, self.temperature.guessed
        taken = [change for site, change in self._done.items() if site not in guessed]
        self._done = {site: change for site, change in self._done.items() if site in guessed}
        return [_of_heads(change, sites[change.site].heads) for change in taken if change.site in sites]

    def take_held_back(self) -> list[TemperatureChange]:
        """Which sites want to go beyond a limit at which they are: moves that changed nothing since this was called."""
        sites, guessed = self.temperature.sites, self.temperature.guessed
        taken = [move for site, move in self._held_back.items() if site in sites and site not in guessed]
        self._held_back.clear()
        return [_of_heads(move, sites[move.site].heads) for move in taken]

    def take_highest_scale(self) -> float | None:
        """The highest raw scale that was read since this was last asked; ``None`` where none was."""
        taken, self._highest_scale = self._highest_scale, None
        return taken

    def state_dict(self) -> dict[str, Any]:
        """What was decided or done and not taken up, in plain values and tensors."""
        return {
            "waking": self._waking.state_dict(),
            "highest_scale": self._highest_scale,
            "imagined": dict(self._imagined),
            "waiting": {site: (allowed, change.to_dict()) for site, (allowed, change) in self._waiting.items()},
            "done": {site: change.to_dict() for site, change in self._done.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self._waking.load_state_dict(state["waking"])
        self._highest_scale = state["highest_scale"]
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

    def _note_scales(self, read: Mapping[str, Mapping[str, Tensor]]) -> None:
        scales = [
            value
            for site, of_site in read.items()
            if "logit_std" in of_site
            for value in (of_site["logit_std"] * self.log_temperatures(site).exp()).tolist()
            if math.isfinite(value)
        ]
        before = [] if self._highest_scale is None else [self._highest_scale]
        self._highest_scale = max([*scales, *before], default=None)

    def _decide(self, loop: TemperatureControl, held: SiteTemperature, read: Mapping[str, Tensor], step: int) -> None:
        """Decide what a loop makes of what it has read."""
        now, scale = self.log_temperatures(held.site), None
        if "logit_std" in read:
            scale = [value if math.isfinite(value) else None for value in (read["logit_std"] * now.exp()).tolist()]
        else:
            now = held.log_temperatures  # what a dry run would have made of it cannot be told: it says the first move
        moved = loop.moved(now.expand(held.heads), read).to("cpu", torch.float64)
        if moved.shape != (held.heads,) or not bool(moved.isfinite().all()):
            raise ValueError(f"it moves {held.heads} temperatures of {held.site} to {moved.exp().tolist()}")
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
        is_limited, is_still = allowed != wanted, torch.equal(allowed, now)
        if is_still and not bool(is_limited.any()):
            return None
        limited = is_limited.expand(held.heads).nonzero()[:, 0].tolist()
        before, after = (values.exp().expand(held.heads).tolist() for values in (now, allowed))
        change = TemperatureChange(step, held.site, before, after, scale, tuple(limited))
        if is_still:
            self._held_back[held.site] = change
            return None
        return allowed, change

    def _do(self, allowed: Tensor, change: TemperatureChange) -> None:
        if self._is_dry:
            self._imagined[change.site] = allowed
        else:
            self.temperature.sites[change.site].set(allowed)
        earlier = self._done.get(change.site)
        self._done[change.site] = change if earlier is None else replace(change, before=earlier.before)


def _of_heads(change: TemperatureChange, heads: int) -> TemperatureChange:
    """A record with as many values as a site has heads."""
    before, after = (values * heads if len(values) == 1 else values for values in (change.before, change.after))
    limited = tuple(range(heads)) if change.limited and len(change.after) == 1 else change.limited
    return replace(change, before=before, after=after, limited=limited)


def _values(snapshot: Snapshot, site: str, statistic: str) -> Tensor:
    values = [math.nan if value is None else value for value in snapshot[site, statistic]]
    return torch.tensor(values, dtype=torch.float64)
