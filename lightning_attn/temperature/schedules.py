"""Temperatures that are a function of the optimiser step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping


class TemperatureSchedule(ABC):
    """The temperature of all heads of a site at each optimiser step, counted from when it is switched on.

    A call that fails, or gives what is no temperature, leaves the temperature as it was.
    """

    #: Whether it gives the same on all ranks; otherwise these have what rank zero has, told at each step.
    is_same_on_ranks: bool = False

    @abstractmethod
    def __call__(self, step: int) -> float:
        """The temperature at a step."""

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({arguments})"


class ConstantTemperature(TemperatureSchedule):
    """One temperature throughout.

    Args:
        temperature: it.

    Raises:
        ValueError: if it is not positive.
    """

    is_same_on_ranks = True

    def __init__(self, temperature: float) -> None:
        self.temperature = checked(temperature, "temperature")

    def __call__(self, step: int) -> float:
        """The temperature at a step."""
        return self.temperature


class LinearTemperature(TemperatureSchedule):
    """From one temperature to another in a straight line, and the latter from then on.

    Args:
        start: the temperature at first.
        end: the temperature at last.
        steps: so many steps later.

    Raises:
        ValueError: if a temperature is not positive, or there is no step.

    Example:
        >>> schedule = LinearTemperature(start=2.0, end=1.0, steps=100)
        >>> schedule(0), schedule(50), schedule(1000)
        (2.0, 1.5, 1.0)
    """

    is_same_on_ranks = True

    def __init__(self, start: float, end: float, steps: int) -> None:
        self.start = checked(start, "start")
        self.end = checked(end, "end")
        self.steps = _checked_steps(steps)

    def __call__(self, step: int) -> float:
        """The temperature at a step."""
        return self.start + (self.end - self.start) * self.share(min(step / self.steps, 1.0))

    def share(self, progress: float) -> float:
        """Which share of the way is gone after a share of the steps."""
        return progress


class CosineTemperature(LinearTemperature):
    """From one temperature to another along half a cosine: slowly at both ends.

    Args:
        start: the temperature at first.
        end: the temperature at last.
        steps: so many steps later.

    Raises:
        ValueError: if a temperature is not positive, or there is no step.
    """

    def share(self, progress: float) -> float:
        """Which share of the way is gone after a share of the steps."""
        return (1 - math.cos(math.pi * progress)) / 2


class ExponentialTemperature(LinearTemperature):
    """From one temperature to another by equal factors in equal times.

    Args:
        start: the temperature at first.
        end: the temperature at last.
        steps: so many steps later.

    Raises:
        ValueError: if a temperature is not positive, or there is no step.

    Example:
        >>> ExponentialTemperature(start=4.0, end=1.0, steps=100)(50)
        2.0
    """

    def __call__(self, step: int) -> float:
        """The temperature at a step."""
        share = min(step / self.steps, 1.0)
        return float(self.start ** (1 - share) * self.end**share)


class PiecewiseTemperature(TemperatureSchedule):
    """Given temperatures at given steps, and straight lines between them.

    Args:
        temperatures: temperatures by steps; before the first and after the last one they stay.
        is_linear: ``False`` for the last given temperature instead of lines.

    Raises:
        ValueError: if there are none, a temperature is not positive, or a step is negative.

    Example:
        >>> PiecewiseTemperature({0: 3.0, 100: 1.0})(50)
        2.0
    """

    is_same_on_ranks = True

    def __init__(self, temperatures: dict[int, float], is_linear: bool = True) -> None:
        if not isinstance(temperatures, Mapping) or not temperatures:
            raise ValueError(f"`temperatures` must be a mapping from steps to temperatures, got {temperatures!r}.")
        if any(not isinstance(step, int) or step < 0 for step in temperatures):
            raise ValueError(f"`temperatures` must be given at steps from 0 on, got {list(temperatures)!r}.")
        self.temperatures = {step: checked(temperatures[step], "temperatures") for step in sorted(temperatures)}
        self.is_linear = bool(is_linear)

    def __call__(self, step: int) -> float:
        """The temperature at a step."""
        steps = list(self.temperatures)
        after = bisect_right(steps, step)
        before = steps[max(after - 1, 0)]
        if after in (0, len(steps)) or not self.is_linear:
            return self.temperatures[before]
        share = (step - before) / (steps[after] - before)
        return (1 - share) * self.temperatures[before] + share * self.temperatures[steps[after]]


class FunctionTemperature(TemperatureSchedule):
    """A function of the step.

    Args:
        function: gives the temperature at a step.

    Raises:
        ValueError: if it is no function.
    """

    def __init__(self, function: Callable[[int], float]) -> None:
        if not callable(function):
            raise ValueError(f"`function` must be a function of the step, got {function!r}.")
        self.function = function

    def __call__(self, step: int) -> float:
        """The temperature at a step.

        Raises:
            ValueError: if the function gives none.
        """
        return checked(self.function(step), f"the temperature at step {step}")

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        return f"{type(self).__name__}({name})"


class HighToLow(CosineTemperature):
    """High early and 1 in the end: heads are soft while they find out what to look at.

    No published result supports it; it is here because people ask for it, and to be compared with.

    Args:
        start: the temperature at first.
        steps: after so many steps it is 1.

    Raises:
        ValueError: if an argument is not allowed.
    """

    def __init__(self, start: float = 2.0, steps: int = 1000) -> None:
        super().__init__(start, 1.0, steps)


class LogLength(TemperatureSchedule):
    r"""Logits times ``γ log m`` for sequences in which a query sees ``m`` keys, as critical attention has it.

    With scores of order one, attention to ``m`` keys becomes uniform as ``m`` grows unless the inverse temperature
    grows with ``log m``; in a model of equal pairwise similarities ``ρ`` the change is at ``γ = 1 / (1 − ρ)`` (Chen,
    Lin, Polyanskiy & Rigollet, ICLR 2026). One number for all queries, since what depends on the place of a query could
    not be written into weights.

    Args:
        length: the number of keys that a query sees: the length of the sequences, or of the window.
        gamma: the factor ``γ``.

    Raises:
        ValueError: if an argument is not allowed.

    Example:
        >>> round(LogLength(length=512, gamma=0.5)(0), 4)
        0.3206
    """

    is_same_on_ranks = True

    def __init__(self, length: int, gamma: float = 1.0) -> None:
        if not isinstance(length, int) or length < 2:
            raise ValueError(f"`length` must be an integer of at least 2, got {length!r}.")
        self.length = length
        self.gamma = checked(gamma, "gamma")

    def __call__(self, step: int) -> float:
        """The temperature at a step."""
        return 1 / (self.gamma * math.log(self.length))


class SSMax(LogLength):
    """Scalable softmax: logits times ``s log n`` (Nakanishi 2025, arXiv:2501.19399).

    The paper learns ``s`` for each head, from values around the default; here the query projection, which can scale
    each head as well, learns it.

    Args:
        length: the number ``n`` of keys that a query sees.
        scale: the factor ``s``.

    Raises:
        ValueError: if an argument is not allowed.
    """

    def __init__(self, length: int, scale: float = 0.43) -> None:
        super().__init__(length, checked(scale, "scale"))


def checked(temperature: float, name: str) -> float:
    """A number that may be a temperature.

    Raises:
        ValueError: if it is not positive and finite.
    """
    is_number = hasattr(temperature, "__float__") and not isinstance(temperature, bool)
    try:
        value = float(temperature) if is_number else math.nan  # also of torch and NumPy
    except (TypeError, ValueError, RuntimeError):  # it has several
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be positive and finite, got {temperature!r}.")
    return value


def _checked_steps(steps: int) -> int:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"`steps` must be a positive integer, got {steps!r}.")
    return steps
