"""Numbers that functions take, as Python's or as tensors."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor


def as_floating(number: Tensor | float) -> Tensor:
    """A tensor to compute with: double precision of Python numbers and integers, single of half precision."""
    if not isinstance(number, Tensor):
        return torch.tensor(number, dtype=torch.float64)
    if number.dtype in (torch.float32, torch.float64):
        return number
    return number.float() if number.is_floating_point() else number.double()


def is_number(value: object) -> bool:
    """Whether it is one number, as Python's or as a tensor of one."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)


def refuse(name: str, number: Tensor, is_refused: Tensor, allowed: str) -> None:
    """Raise where a number is none of those that are allowed. NaN stands for a value that is absent, and stays.

    Args:
        name: of the argument.
        number: its values.
        is_refused: which of them are not allowed; broadcasts with them.
        allowed: which are, for the message: it must be …

    Raises:
        ValueError: if any is refused.
    """
    if bool(is_refused.any()):
        first = float(number.expand(torch.broadcast_shapes(number.shape, is_refused.shape))[is_refused][0])
        raise ValueError(f"`{name}` must be {allowed}, got {first:g}.")
