"""What a statistic is: a named number, and how it is got from the rows of an attention matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_attn.statistics.rows.row_block import RowBlock
from lightning_attn.statistics.rows.row_pass import RowPass


class Range(NamedTuple):
    """Which values are possible; a bound is a number, a formula for people, or ``None`` where there is none.

    >>> str(Range(0, 1)), str(Range(0, None)), str(Range(1, "n"))
    ('0 … 1', '≥ 0', '1 … n')
    """

    low: float | str | None
    high: float | str | None

    def __str__(self) -> str:
        if self.high is None and self.low is not None:
            return f"≥ {self._low}"
        if self.low is None and self.high is not None:
            return f"≤ {self.high}"
        return f"{'−∞' if self.low is None else self._low} … {'∞' if self.high is None else self.high}"

    @property
    def _low(self) -> str:
        return str(self.low).replace("-", "−")

    @property
    def numbers(self) -> tuple[float | None, float | None]:
        """The bounds that are numbers."""
        low, high = (bound if isinstance(bound, (int, float)) else None for bound in self)
        return low, high


class Ratio(NamedTuple):
    """A weighted mean in two sums, of shape (B, H). Weight zero: the value is absent."""

    numerator: Tensor
    denominator: Tensor

    @property
    def or_nan(self) -> Tensor:
        """The mean, NaN where it is absent."""
        return torch.where(self.denominator > 0, self.numerator / self.denominator, torch.nan)


class Maximum(NamedTuple):
    """A maximum of shape (B, H). Minus infinity: the value is absent."""

    value: Tensor

    @property
    def or_nan(self) -> Tensor:
        """The maximum, NaN where it is absent."""
        return torch.where(self.value.isneginf(), torch.nan, self.value)


class Statistic:
    """What is to be known of a number that heads or sites have: its name, and how to read it.

    `lightning_attn.statistics.register` makes a subclass known by its name. How the number is got depends on what it is
    a number of: see `RowStatistic` and `lightning_attn.statistics.state_statistic.StateStatistic`.
    """

    name: ClassVar[str]
    #: ``"1"`` for a pure number, ``"nats"``, …
    unit: ClassVar[str] = "1"
    #: What values are possible: ``Range(0, 1)``.
    range: ClassVar[Range]
    #: The value of uniform attention under the same visibility, for people.
    uniform: ClassVar[str]
    #: How to read it, in one line.
    reading: ClassVar[str]
    #: Where the definition comes from.
    source: ClassVar[str] = ""
    #: Under which heading it is listed, one of `lightning_attn.statistics.description.LENSES`.
    lens: ClassVar[str] = "Others"
    #: Its value of the example in its description (`lightning_attn.statistics.description`), for people.
    example: ClassVar[float | None] = None
    #: Whether every head has a number of its own, or the site as a whole has one.
    per: ClassVar[Literal["head", "site"]] = "head"
    #: How the heads of a site become one number.
    over_heads: ClassVar[Literal["mean", "max"]] = "mean"
    #: Whether ranks, calls and sequences are joined by a weighted mean or by a maximum.
    joined_by: ClassVar[Literal["mean", "max"]] = "mean"
    #: Whether it is computed where nobody names the statistics that are wanted.
    by_default: ClassVar[bool] = True
    #: Faults of the data rather than properties of the attention: of interest only where they are not zero.
    is_fault: ClassVar[bool] = False
    #: Spectral statistics cost many passes, and are taken of fewer sequences.
    is_spectral: ClassVar[bool] = False
    #: Class attributes that functions and metrics take as arguments.
    parameters: ClassVar[tuple[str, ...]] = ()
    #: Statistics that compare sequences are shown all of a call's at once; those of two ranks are not compared.
    compares_sequences: ClassVar[bool] = False


class RowStatistic(Statistic, ABC):
    """One number per head, got from the rows of its attention matrix.

    An instance is made for each `RowPass`, is shown the blocks of rows in turn by `add`, and gives its (B, H) sums or
    maximum in `result`. Sums over sequences, calls and ranks are taken by others.

    Args:
        row_pass: the sequences and heads it is computed for.
    """

    #: Whether the values are needed, which are captured only then.
    needs_values: ClassVar[bool] = False
    #: Whether it is of the logits themselves, which weights tell only up to a constant for each row.
    needs_logits: ClassVar[bool] = False

    def __init__(self, row_pass: RowPass) -> None:
        self.row_pass = row_pass

    def add(self, rows: RowBlock) -> None:
        """Look at the next block of rows."""

    @abstractmethod
    def result(self) -> Ratio | Maximum:
        """The sums or the maximum of each sequence and head, once every block was added."""


class RowMean(RowStatistic):
    """A statistic that is the mean of a number over rows; rows of all sequences count alike."""

    @abstractmethod
    def values(self, rows: RowBlock) -> Tensor:
        """The number of each row, (B, H, R); anything where the row does not count."""

    def counted(self, rows: RowBlock) -> Tensor:
        """The rows that count, boolean (B, H, R): those that have at least two keys to choose from."""
        return rows.spread_out_BHR

    def result(self) -> Ratio:
        """The mean over one more walk of its own; `measure` takes several means in one walk instead."""
        return sum_of_rows(self, self.row_pass.blocks())


class RowSums:
    """The sums of several means over rows, taken together so that they cost few operations.

    Args:
        statistics: the means, at least one.
    """

    def __init__(self, statistics: Sequence[RowMean]) -> None:
        self._statistics = statistics
        self._numerator_SBH: Tensor | None = None
        self._denominator_SBH: Tensor | None = None

    def add(self, rows: RowBlock) -> None:
        """Add the values of the rows that count."""
        values_SBHR = torch.stack([statistic.values(rows) for statistic in self._statistics])
        counted_SBHR = torch.stack([statistic.counted(rows) for statistic in self._statistics])
        kept_SBHR = torch.where(counted_SBHR, values_SBHR, 0.0)
        numerator_SBH = kept_SBHR.sum(-1, dtype=wide(kept_SBHR.device))
        denominator_SBH = counted_SBHR.sum(-1, dtype=numerator_SBH.dtype)
        if self._numerator_SBH is None or self._denominator_SBH is None:
            self._numerator_SBH, self._denominator_SBH = numerator_SBH, denominator_SBH
        else:
            self._numerator_SBH += numerator_SBH
            self._denominator_SBH += denominator_SBH

    def result(self) -> Ratio:
        """The sums of all means, each of shape (S, B, H)."""
        assert self._numerator_SBH is not None and self._denominator_SBH is not None
        return Ratio(self._numerator_SBH, self._denominator_SBH)


def sum_of_rows(mean: RowMean, blocks: Iterable[RowBlock]) -> Ratio:
    """The sums of one mean over some blocks of rows."""
    sums = RowSums([mean])
    for rows in blocks:
        sums.add(rows)
    numerator_SBH, denominator_SBH = sums.result()
    return Ratio(numerator_SBH[0], denominator_SBH[0])


def wide(device: torch.device) -> torch.dtype:
    """The widest floating type of a device: sums are taken in it."""
    return torch.float32 if device.type == "mps" else torch.float64


def mean_over_sequences(value_BH: Tensor, defined_BH: Tensor) -> Ratio:
    """One value for each sequence and head, where it is defined."""
    value_BH = torch.where(defined_BH, value_BH, 0.0).to(wide(value_BH.device))
    return Ratio(value_BH, defined_BH.to(value_BH.dtype).expand_as(value_BH))
