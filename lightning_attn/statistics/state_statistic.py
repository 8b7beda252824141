"""Statistics of the hidden states around a site: one number for the site as a whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lightning_attn.capture.states import HiddenStates
from lightning_attn.statistics.measure import Sums
from lightning_attn.statistics.rows.row_pass import default_block_bytes
from lightning_attn.statistics.states.median import TABLE_SIZE
from lightning_attn.statistics.states.tokens import Tokens
from lightning_attn.statistics.statistic import Maximum, Ratio, Statistic, mean_over_sequences

#: So many tokens of a sequence are worth a block of their own; more sequences than fit beside them come later.
_MIN_TOKENS = 32


class StateStatistic(Statistic, ABC):
    """One number per site, got from the hidden states that enter and leave its module.

    It stands at the place of the site's first head. Sums over sequences, calls and ranks are taken by others.
    """

    per = "site"
    #: Whether nothing is told by the states that enter alone.
    needs_leaving: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def result(cls, entering: Tokens, leaving: Tokens | None) -> Ratio | Maximum:
        """The sums or the maximum of each sequence, (B,).

        Args:
            entering: the states that enter the module.
            leaving: the states of the same tokens that leave it; ``None`` where none could be told.
        """


def mean_where_defined(value_B: Tensor, defined_B: Tensor) -> Ratio:
    """One value for each sequence, where it is defined and finite.

    Args:
        value_B: the values.
        defined_B: which of them mean anything.
    """
    return mean_over_sequences(value_B, defined_B & value_B.isfinite())


class StateSums(dict[str, Ratio | Maximum]):
    """What was found of the states of some sequences, by the names of the statistics, each (B,)."""

    def divided(self, sequences: Sequence[int]) -> list[StateSums]:
        """What was found of sites whose sequences were measured as those of one.

        Args:
            sequences: how many sequences each of them has.
        """
        parts = [StateSums() for _ in sequences]
        for name, found in self.items():
            for part, tensors in zip(parts, zip(*(t.split(list(sequences)) for t in found), strict=True), strict=True):
                part[name] = type(found)(*tensors)
        return parts

    def add_to(self, sums: Sums) -> None:
        """Add it to what the attention of the site gave, at the place of its first head."""
        device = sums.ratios_S2H.device  # a model may be spread over several
        of_one_head = {
            name: type(found)(*(tensor[:, None].to(device) for tensor in found)) for name, found in self.items()
        }
        sums.add(of_one_head, slice(0, 1))


def measure_states(
    states: HiddenStates, statistics: Sequence[type[Statistic]], block_bytes: int | None = None
) -> StateSums:
    """Compute the statistics of the states around a site.

    Args:
        states: the states; no gradient must be recorded while this runs.
        statistics: which ones; those that are not of states are left out.
        block_bytes: the memory that a block of states may take; the default depends on the device.
    """
    wanted = [statistic for statistic in statistics if issubclass(statistic, StateStatistic)]
    sequences, tokens, width = states.entering.shape
    if not wanted or sequences * tokens * width == 0:
        return StateSums()
    if block_bytes is None:
        block_bytes = default_block_bytes(states.entering.device)
    elements = block_bytes // 8
    at_once = max(1, elements // max(min(tokens, _MIN_TOKENS) * width, TABLE_SIZE))
    parts: list[dict[str, Ratio | Maximum]] = []
    for start in range(0, sequences, at_once):
        part = slice(start, start + at_once)
        real_BN = states.real if states.real is None or len(states.real) == 1 else states.real[part]
        entering = Tokens(states.entering[part], real_BN, elements)
        leaving = None if states.leaving is None else Tokens(states.leaving[part], real_BN, elements)
        parts.append({statistic.name: statistic.result(entering, leaving) for statistic in wanted})
    if len(parts) == 1:
        return StateSums(parts[0])
    return StateSums(
        {
            name: type(found)(*(torch.cat(tensors) for tensors in zip(*(part[name] for part in parts), strict=True)))
            for name, found in parts[0].items()
        }
    )
