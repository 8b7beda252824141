"""Which control the temperatures of a site follow, and within which limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from lightning_attn.capture.sites import SitePatterns
from lightning_attn.temperature.control import HoldLogitScale, TemperatureControl
from lightning_attn.temperature.schedules import (
    ConstantTemperature,
    FunctionTemperature,
    TemperatureSchedule,
    checked,
)

#: What a user may say: a closed loop, a schedule, a constant temperature, or a function of the step.
Control: TypeAlias = TemperatureControl | TemperatureSchedule | float | Callable[[int], float]

#: One for all sites, or by patterns of sites. LightningCLI takes the first that fits: it would read the ``class_path``
#: and ``init_args`` of a class as a mapping, and write a mapping as a function.
Controls: TypeAlias = TemperatureControl | TemperatureSchedule | float | dict[str, Control] | Callable[[int], float]


class TemperaturePlan:
    """The controls of all sites.

    Args:
        control: of all sites, or by glob patterns of sites, of which the first that matches counts; ``None`` for
            `HoldLogitScale`.
        min_temperature: no temperature is lower.
        max_temperature: no temperature is higher.

    Raises:
        ValueError: if a control is none, or the limits are not in order.
    """

    def __init__(
        self,
        control: Control | Mapping[str, Control] | None = None,
        min_temperature: float = 0.1,
        max_temperature: float = 1000.0,
    ) -> None:
        given = control if isinstance(control, Mapping) else {"*": HoldLogitScale() if control is None else control}
        if not given:
            raise ValueError("`control` must name at least one pattern of sites.")
        self._controls = [(SitePatterns(pattern), _control(of_sites)) for pattern, of_sites in given.items()]
        self.min_temperature = checked(min_temperature, "min_temperature")
        self.max_temperature = checked(max_temperature, "max_temperature")
        if not self.min_temperature <= 1 <= self.max_temperature:
            raise ValueError(
                f"`min_temperature` must be at most 1 and `max_temperature` at least 1, got {min_temperature!r} and "
                f"{max_temperature!r}."
            )

    @property
    def patterns(self) -> tuple[SitePatterns, ...]:
        """The patterns, in order."""
        return tuple(patterns for patterns, _ in self._controls)

    @property
    def loops(self) -> tuple[TemperatureControl, ...]:
        """The closed loops."""
        return tuple(control for _, control in self._controls if isinstance(control, TemperatureControl))

    @property
    def schedules(self) -> tuple[TemperatureSchedule, ...]:
        """The functions of the step."""
        return tuple(control for _, control in self._controls if isinstance(control, TemperatureSchedule))

    @property
    def has_schedules(self) -> bool:
        """Whether temperatures of some sites are functions of the step."""
        return bool(self.schedules)

    @property
    def statistics(self) -> tuple[str, ...]:
        """What the loops read."""
        return tuple(dict.fromkeys(name for loop in self.loops for name in loop.statistics))

    def loop_of(self, site: str) -> TemperatureControl | None:
        """The closed loop of a site."""
        control = self._of(site)
        return control if isinstance(control, TemperatureControl) else None

    def schedule_of(self, site: str) -> TemperatureSchedule | None:
        """The schedule of a site."""
        control = self._of(site)
        return control if isinstance(control, TemperatureSchedule) else None

    def governs(self, site: str) -> bool:
        """Whether a site has a control."""
        return self._of(site) is not None

    def _of(self, site: str) -> TemperatureControl | TemperatureSchedule | None:
        return next((control for patterns, control in self._controls if patterns.match(site)), None)

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(str(control) for _, control in self._controls))


def _control(given: Control) -> TemperatureControl | TemperatureSchedule:
    if isinstance(given, (TemperatureControl, TemperatureSchedule)):
        return given
    if isinstance(given, type):
        raise ValueError(f"`control` must be an instance, not a class: {given.__name__}(…), got {given!r}.")
    if callable(given):
        return FunctionTemperature(given)
    if hasattr(given, "__float__") and not isinstance(given, bool):
        return ConstantTemperature(checked(given, "control"))
    raise ValueError(
        f"`control` must be a TemperatureControl, a TemperatureSchedule, a temperature, a function of the step, or a "
        f"mapping to these from patterns of sites, got {given!r}."
    )
