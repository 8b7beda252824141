"""What a statistic is: one named number per head, and how it is got from the rows of an attention matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_attn.statistics.row_block import RowBlock
from lightning_attn.statistics.row_pass import RowPass


class Ratio(NamedTuple):
    """A weighted mean in two sums, of shape (B, H). Weight zero: the value is absent."""

    numerator: Tensor
    denominator: Tensor


class Maximum(NamedTuple):
    """A maximum of shape (B, H). Minus infinity: the value is absent."""

    value: Tensor


class Statistic(ABC):
    """One named number per head.

    A subclass states what its number is in class attributes and computes it for one `RowPass`: an instance is made for
    each, is shown the blocks of rows in turn by `add`, and gives its (B, H) sums or maximum in `result`. Sums over
    sequences, calls and ranks are taken by others. `lightning_attn.statistics.register` makes it known by its name.

    Args:
        row_pass: the sequences and heads it is computed for.
    """

    name: ClassVar[str]
    #: ``"1"`` for a pure number, ``"nats"``, …
    unit: ClassVar[str] = "1"
    #: What values are possible, for people: ``"0 … 1"``.
    range: ClassVar[str]
    #: The value of uniform attention under the same visibility, for people.
    uniform: ClassVar[str]
    #: How to read it, in one line.
    reading: ClassVar[str]
    #: Where the definition comes from.
    source: ClassVar[str] = ""
    #: How the heads of a site become one number.
    over_heads: ClassVar[Literal["mean", "max"]] = "mean"
    #: Whether ranks, calls and sequences are joined by a weighted mean or by a maximum.
    joined_by: ClassVar[Literal["mean", "max"]] = "mean"
    #: Spectral statistics cost many passes, and are taken of fewer sequences.
    is_spectral: ClassVar[bool] = False
    #: Faults of the data rather than properties of the attention: of interest only where they are not zero.
    is_fault: ClassVar[bool] = False

    def __init__(self, row_pass: RowPass) -> None:
        self.row_pass = row_pass

    def add(self, rows: RowBlock) -> None:  # noqa: B027 - a statistic of the whole matrix has nothing to add
        """Look at the next block of rows."""

    @abstractmethod
    def result(self) -> Ratio | Maximum:
        """The sums or the maximum of each sequence and head, once every block was added."""


class RowMean(Statistic):
    """A statistic that is the mean of a number over rows; rows of all sequences count alike."""

    def __init__(self, row_pass: RowPass) -> None:
        super().__init__(row_pass)
        self._numerator: Tensor | float = 0.0
        self._denominator: Tensor | float = 0.0

    @abstractmethod
    def values(self, rows: RowBlock) -> Tensor:
        """The number of each row, (B, H, R); anything where the row does not count."""

    def counted(self, rows: RowBlock) -> Tensor:
        """The rows that count, boolean (B, H, R): those that have at least two keys to choose from."""
        return rows.spread_out_BHR

    def add(self, rows: RowBlock) -> None:
        """Add the values of the rows that count."""
        counted_BHR = self.counted(rows)
        values_BHR = torch.where(counted_BHR, self.values(rows), 0.0)
        self._numerator = self._numerator + values_BHR.sum(-1, dtype=wide(values_BHR.device))
        self._denominator = self._denominator + counted_BHR.sum(-1)

    def result(self) -> Ratio:
        """The two sums."""
        assert isinstance(self._numerator, Tensor) and isinstance(self._denominator, Tensor)
        return Ratio(self._numerator, self._denominator.to(self._numerator.dtype))


def wide(device: torch.device) -> torch.dtype:
    """The widest floating type of a device: sums are taken in it."""
    return torch.float32 if device.type == "mps" else torch.float64


def mean_over_sequences(value_BH: Tensor, defined_BH: Tensor) -> Ratio:
    """One value for each sequence and head, where it is defined."""
    value_BH = torch.where(defined_BH, value_BH, 0.0).to(wide(value_BH.device))
    return Ratio(value_BH, defined_BH.to(value_BH.dtype).expand_as(value_BH))
