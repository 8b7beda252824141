"""How often captures can be afforded, told from what they were measured to take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil, log2
from statistics import fmean, median, median_low
from time import monotonic
from typing import Literal

import torch

#: The first plain batches say little: caches are filled, kernels chosen, modules compiled. So does the first capture.
#: (A device that lags behind does their work in the first window still, which the median over windows forgets.)
_WARM_UP = 5
#: So many steps lie between captures until their time is known: enough for the first plain batches to pass.
_STEPS_AT_FIRST = 8
#: The cost of a capture is the mean of so many, since what is seldom and dear, such as heat maps, is part of it.
_CAPTURES = 10
#: One that takes so many times as long as is usual, since a disk or a neighbour stalled, counts as no longer than that.
_STALL = 10
#: The time of a plain batch is the median of so many windows between captures.
_WINDOWS = 5
#: The interval is not made longer than so many times at once: the next measurement must not be far away.
_MOST_AT_ONCE = 8


class TimeBudget:
    r"""The fewest optimiser steps between captures that keep them within a share of the training time.

    With a plain step of :math:`p` seconds and a capture of :math:`e` more, captures every :math:`n` steps take the
    share :math:`e / (np + e)`, which is at most :math:`s` from :math:`n = e (1 - s) / (s p)` on.

    A device works on while its host has gone ahead, so that one plain batch cannot be timed. What is timed is a window
    from the end of a capture, which waits for the device, to the beginning of the next one, before which
    `batch_starts` waits for it: all batches in it together, in whichever of them their work was waited for. Time
    between batches, for data, validation and checkpoints, is not counted; captures are rarer for it than they might be.

    `fewest_steps` moves by factors of two, and back only when less than half would do with a quarter to spare, so that
    it does not go back and forth. It is eight at first, so that few captures pass before their time is known.

    Args:
        max_overhead: the share, between 0 and 1.
        clock: seconds that never go back; by default those of the system.

    Raises:
        ValueError: if the share is not between 0 and 1.
    """

    def __init__(self, max_overhead: float, clock: Callable[[], float] | None = None) -> None:
        is_number = isinstance(max_overhead, (int, float)) and not isinstance(max_overhead, bool)
        if not (is_number and 0 < max_overhead < 1):
            raise ValueError(
                "`max_overhead` must be a number between 0 and 1, such as 0.01 for one per cent of the training time, "
                f"or None for no limit, got {max_overhead!r}."
            )
        #: The share of the training time that captures may take.
        self.max_overhead = float(max_overhead)
        self._clock = clock or monotonic
        self.restart()

    def restart(self) -> None:
        """Forget what was measured, as a run begins."""
        #: Optimiser steps that must lie between two captures.
        self.fewest_steps = _STEPS_AT_FIRST
        self._start: float | None = None
        self._batches = self._steps = 0
        self._warm_up = _WARM_UP
        self._window_seconds, self._window_batches = 0.0, 0
        self._windows: deque[float] = deque(maxlen=_WINDOWS)
        self._is_first_capture = True
        self._captures: deque[float] = deque(maxlen=_CAPTURES)

    def batch_starts(self, wait: Callable[[], None] | None = None) -> None:
        """A batch starts.

        Args:
            wait: waits for the device; given before a batch that is to be captured.
        """
        if wait is not None:
            before = self._clock()
            wait()
            if self._window_batches:
                self._windows.append((self._window_seconds + self._clock() - before) / self._window_batches)
            self._window_seconds, self._window_batches = 0.0, 0
        self._start = self._clock()

    def batch_ends(self, kind: Literal["plain", "capture", "other"], stepped: bool) -> None:
        """A batch has ended.

        Args:
            kind: whether it was plain, or was captured, or neither, as a batch that others captured.
            stepped: whether an optimiser stepped in it.
        """
        if self._start is None:
            return
        seconds, self._start = self._clock() - self._start, None
        self._batches += 1
        self._steps += stepped
        if kind == "capture":
            if not self._is_first_capture:
                self._captures.append(seconds)
            self._is_first_capture = False
        elif kind == "plain":
            self._warm_up -= 1
            if self._warm_up < 0:
                self._window_seconds += seconds
                self._window_batches += 1

    @property
    def plain_step(self) -> float | None:
        """Seconds of an optimiser step without a capture; ``None`` before it is known."""
        if not (self._windows and self._steps):
            return None
        return median(self._windows) * self._batches / self._steps

    @property
    def capture(self) -> float | None:
        """Seconds that a capture takes beyond what its batch would take; ``None`` before it is known."""
        if not (self._windows and self._captures):
            return None
        longest = _STALL * median_low(self._captures)
        return max(fmean(min(seconds, longest) for seconds in self._captures) - median(self._windows), 0.0)

    @property
    def needed_steps(self) -> float:
        """The steps between captures that this process needs; as many as now before it knows."""
        capture, plain_step = self.capture, self.plain_step
        if capture is None or not plain_step:
            return float(self.fewest_steps)
        return capture * (1 - self.max_overhead) / (self.max_overhead * plain_step)

    def settle(self, needed_steps: float, asked_steps: int) -> None:
        """Decide how many steps must lie between captures.

        Args:
            needed_steps: the most that any rank needs, so that all ranks decide alike.
            asked_steps: the steps between captures that the user asked for.
        """
        if needed_steps > self.fewest_steps:
            most = _MOST_AT_ONCE * max(self.fewest_steps, asked_steps)
            self.fewest_steps = min(_power_of_two(min(needed_steps, most)), most)
        elif 2.5 * needed_steps <= self.fewest_steps:
            self.fewest_steps = _power_of_two(1.25 * needed_steps)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that it was given to do; a CPU has."""
    synchronize = getattr(getattr(torch, device.type, None), "synchronize", None)
    if device.type != "cpu" and synchronize is not None:
        synchronize()


def _power_of_two(at_least: float) -> int:
    return 1 << max(ceil(log2(at_least)), 0) if at_least > 1 else 1
