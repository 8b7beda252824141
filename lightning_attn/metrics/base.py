"""What metrics share: sums over batches and ranks, in tensors whose shape is known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

#: Devices that have no double precision, in which sums are held elsewhere.
_SINGLE = ("mps",)


class StreamedMetric(Metric):
    """A metric whose states add up over batches, in double precision where the device has it.

    Metrics of one collection that have states of the same names and values are taken for one metric and updated
    together: what computes something else must name its states otherwise.
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    def _add_sums(self, **sums: Tensor) -> None:
        """Add the sums of a batch to the states of the same names."""
        for name, sum_of_batch in sums.items():
            known: Tensor = getattr(self, name)
            setattr(self, name, known + sum_of_batch.to(known))

    def set_dtype(self, dst_type: str | torch.dtype) -> Metric:
        """Hold sums in another type: double or single precision, for those of half precision overflow.

        Args:
            dst_type: ``torch.float64`` or ``torch.float32``.

        Raises:
            ValueError: if it is another one.
        """
        if dst_type not in (torch.float64, torch.float32):
            raise ValueError(f"`dst_type` must be torch.float64 or torch.float32, got {dst_type!r}.")
        return super().set_dtype(dst_type)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, default in self._defaults.items():
            saved = state_dict.get(prefix + name)
            if isinstance(default, Tensor) and isinstance(saved, Tensor) and saved.shape != default.shape:
                raise ValueError(
                    f"State {prefix + name!r} was saved with shape {tuple(saved.shape)}, and this metric has "
                    f"{tuple(default.shape)}: make it with the same number of heads or layers."
                )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> torch.nn.Module:
        if fn(torch.zeros(())).device.type in _SINGLE:
            self.set_dtype(torch.float32)
        # `to(torch.bfloat16)` of a model, as Lightning's bf16-true has it, must not make sums of that type.
        moved: torch.nn.Module = super()._apply(fn if self._dtype_convert else _keeping_type(fn), exclude_state)
        return moved

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Plot a value of `compute` or `forward`, or a list of them as a series in time.

        Args:
            val: the values; by default what `compute` gives now.
            ax: the axis of matplotlib to plot on; a new figure by default.

        Returns:
            The figure and its axis.
        """
        return self._plot(val, ax)


def _keeping_type(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What moves tensors as a function does, and does not convert them."""

    def moved(tensor: Tensor) -> Tensor:
        converted = fn(tensor)
        return converted if converted.dtype == tensor.dtype else tensor.to(converted.device)

    return moved


def checked_count(name: str, count: int) -> int:
    """A number of heads or layers.

    Raises:
        ValueError: if it is no positive integer.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"`{name}` must be a positive integer, got {count!r}.")
    return count
