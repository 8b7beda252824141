"""Closed loops: where the temperature of a head goes, from what the head does."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class TemperatureControl(ABC):
    """Moves temperatures by what is measured of heads; several sites and runs may share one, since it keeps nothing.

    Args:
        gain: which share of what is wanted is done at once.
        max_change: by which factor a temperature may change at once.

    Raises:
        ValueError: if one of them is not allowed.
    """

    #: The statistics that it reads.
    statistics: tuple[str, ...] = ()

    def __init__(self, gain: float, max_change: float) -> None:
        self.gain = _check(lambda gain: 0 < gain <= 1, "gain", gain, "a number above 0 and at most 1")
        self.max_change = _check(lambda factor: factor > 1, "max_change", max_change, "a factor above 1")

    def wakes(self, read: Mapping[str, Tensor], before: Mapping[str, Tensor] | None) -> Tensor:
        """Which of some heads wake the loop, which until then does nothing; all, if it does not sleep.

        Args:
            read: see `moved`; the temperatures are 1 still.
            before: the same of the measurement before; ``None`` where there was none.
        """
        return torch.ones_like(next(iter(read.values())), dtype=torch.bool)

    def moved(self, log_temperatures: Tensor, read: Mapping[str, Tensor]) -> Tensor:
        """The logarithms of the temperatures of some heads after one move.

        Args:
            log_temperatures: before it, (H,) in float64.
            read: the statistics by their names, (H,) each, NaN where there is none: that head's temperature stays.
                ``logit_std`` is that of the products of queries and keys alone, as the softmax gets them.
        """
        limit = math.log(self.max_change)
        change = (self.gain * self.error(log_temperatures, read)).clamp(-limit, limit)
        return log_temperatures + torch.where(change.isfinite(), change, 0.0)

    @abstractmethod
    def error(self, log_temperatures: Tensor, read: Mapping[str, Tensor]) -> Tensor:
        """How far the logarithms of the temperatures are below what is wanted; see `moved`."""

    @abstractmethod
    def __str__(self) -> str:
        """What it does, in a few words."""

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"


class HoldLogitScale(TemperatureControl):
    r"""Holds the deviation of each head's logits in a band by what it is before the temperature.

    The loop sleeps until a head's raw scale is above ``wakes_at``, or above half of it and growing so fast that the
    next measurement would find twice as much. From then on it holds all heads: where one is about to saturate others
    follow, and it takes less to hold them early. A run in which no head comes so far, such as most that are well, is
    left as it is to the last digit.

    Of a head whose queries and keys, row by row, have products of the deviation ``s`` (the raw scale), the temperature
    goes to

    .. math:: \tau^* = \max(1, s / \text{upper}), \qquad
        \log\tau \leftarrow \log\tau + \mathrm{clip}(\text{gain} \cdot (\log\tau^* - \log\tau))

    or, where ``lower`` is given and ``s`` is below it, to ``s / lower``. A head inside the band keeps, or goes back to,
    the temperature 1.

    Stability: the raw scale does not depend on the temperature of the same step. While it stands still the distance
    ``log τ* − log τ`` shrinks by ``1 − gain`` at each move and never changes its sign: nothing oscillates. While it
    grows by a factor ``r`` between two moves, the logits stay behind by at most ``log r / gain`` (as long as that is
    less than ``log max_change``). In the long run weights may grow because the temperature lets them: with ``s ∝ τ^ε``
    a move shrinks the distance by ``1 − gain (1 − ε)``, which settles for every ``ε < 1``; from ``ε = 1`` on,
    temperature and weights would chase each other, and the limit of the callback ends it.

    Args:
        upper: the deviation of logits that heads are brought down to.
        wakes_at: the raw scale of a head that wakes the loop; ``None`` for a loop that does not sleep.
        lower: the one that they are brought up to; ``None`` for no such.
        gain: which share of the way is gone at once.
        max_change: by which factor a temperature may change at once.

    Raises:
        ValueError: if an argument is not allowed.

    Example:
        >>> control = HoldLogitScale(upper=4.0, gain=0.5)
        >>> cool, hot = torch.zeros(2, dtype=torch.float64), {"logit_std": torch.tensor([16.0, 2.0])}
        >>> control.wakes(hot, before=None)
        tensor([ True, False])
        >>> control.moved(cool, hot).exp()
        tensor([2., 1.], dtype=torch.float64)
    """

    statistics = ("logit_std",)

    def __init__(
        self,
        upper: float = 3.0,
        wakes_at: float | None = 10.0,
        lower: float | None = None,
        gain: float = 0.9,
        max_change: float = 10.0,
    ) -> None:
        super().__init__(gain, max_change)
        self.upper = _check(lambda upper: upper > 0, "upper", upper, "a positive number")
        self.wakes_at: float | None = None
        if wakes_at is not None:
            allowed = f"a number of at least `upper` ({upper}), or None"
            self.wakes_at = _check(lambda scale: scale >= self.upper, "wakes_at", wakes_at, allowed)
        self.lower: float | None = None
        if lower is not None:
            allowed = f"a positive number below `upper` ({upper}), or None"
            self.lower = _check(lambda lower: 0 < lower < self.upper, "lower", lower, allowed)

    def wakes(self, read: Mapping[str, Tensor], before: Mapping[str, Tensor] | None) -> Tensor:
        """Which heads have a raw scale that wakes the loop, or are about to."""
        if self.wakes_at is None:
            return super().wakes(read, before)
        scale = read["logit_std"]
        is_above = scale > self.wakes_at
        if before is None:
            return is_above
        next_scale = scale * (scale / before["logit_std"])
        return is_above | ((scale > self.wakes_at / 2) & (next_scale > 2 * self.wakes_at))

    def error(self, log_temperatures: Tensor, read: Mapping[str, Tensor]) -> Tensor:
        """How far the temperatures are below those that bring the deviation into the band."""
        log_scale = read["logit_std"].double().log() + log_temperatures
        wanted = (log_scale - math.log(self.upper)).clamp(min=0)
        if self.lower is not None:
            wanted = wanted + (log_scale - math.log(self.lower)).clamp(max=0)
        return torch.where(log_scale.isneginf(), 0.0, wanted - log_temperatures)

    def __str__(self) -> str:
        band = f"at most {self.upper:g}" if self.lower is None else f"between {self.lower:g} and {self.upper:g}"
        return f"holds the logit_std of all heads {band}"


class HoldEntropy(TemperatureControl):
    r"""Holds the normalised entropy of each head in a band.

    Below it the logarithm of the temperature grows by ``gain · speed · (lower − h)``, above it shrinks in the same way,
    but not below 0: a head that is soft of itself is left alone, unless ``sharpens``.

    Stability: the entropy ``h`` (a share of ``log m`` of ``m`` visible keys) grows with ``log τ``, by the variance of
    the logits under the weights over ``log m``, which is at most ``log(m) / 4 + 1``. A move that is less than twice the
    inverse of that slope does not oscillate: ``gain · speed`` up to 0.4 is safe for every ``m`` up to a million. Heads
    with one strong key among many come near that bound: at 2, those of a sink go to and fro for ever.

    Args:
        lower: the entropy that heads are brought up to.
        upper: the one that they are brought down to.
        sharpens: whether a temperature may fall below 1 for that.
        gain: of the loop, beside ``speed``.
        speed: by how much the logarithm of a temperature would move for an error of 1.
        max_change: by which factor a temperature may change at once.

    Raises:
        ValueError: if an argument is not allowed.

    Example:
        >>> control = HoldEntropy(lower=0.4, upper=0.6)
        >>> control.moved(torch.zeros(2, dtype=torch.float64), {"entropy": torch.tensor([0.1, 0.9])}).exp() > 1
        tensor([ True, False])
    """

    statistics = ("entropy",)

    def __init__(
        self,
        lower: float = 0.4,
        upper: float = 0.6,
        sharpens: bool = False,
        gain: float = 1.0,
        speed: float = 0.4,
        max_change: float = 4.0,
    ) -> None:
        super().__init__(gain, max_change)
        self.lower = _check(lambda lower: 0 < lower < 1, "lower", lower, "an entropy between 0 and 1")
        allowed = f"an entropy between `lower` ({lower}) and 1"
        self.upper = _check(lambda upper: self.lower <= upper <= 1, "upper", upper, allowed)
        self.sharpens = bool(sharpens)
        self.speed = _check(lambda speed: speed > 0, "speed", speed, "a positive number")

    def error(self, log_temperatures: Tensor, read: Mapping[str, Tensor]) -> Tensor:
        """How far the logarithms of the temperatures are below what brings the entropy into the band."""
        entropy = read["entropy"].double()
        outside = (self.lower - entropy).clamp(min=0) - (entropy - self.upper).clamp(min=0)
        error = self.speed * outside
        if self.sharpens:
            return error
        return torch.maximum(error, -log_temperatures.clamp(min=0) / self.gain)

    def __str__(self) -> str:
        return f"holds entropy between {self.lower:g} and {self.upper:g}"


def _check(is_allowed: Callable[[float], bool], name: str, value: Any, allowed: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not is_allowed(value):
        raise ValueError(f"`{name}` must be {allowed}, got {value!r}.")
    return float(value)
