"""Statistics of the hidden states around a site: one number for the site as a whole."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightning_attn.capture.states import HiddenStates
from lightning_attn.statistics.measure import Sums
from lightning_attn.statistics.median import TABLE_SIZE
from lightning_attn.statistics.row_pass import BLOCK_BYTES, BLOCK_BYTES_ELSEWHERE
from lightning_attn.statistics.statistic import Maximum, Ratio, Statistic, mean_over_sequences
from lightning_attn.statistics.tokens import Tokens

#: So many tokens of a sequence are worth a block of their own; more sequences than fit beside them come later.
_MIN_TOKENS = 32


class StateStatistic(Statistic, ABC):
    """One number per site, got from the hidden states that enter and leave its module.

    It stands at the place of the site's first head. Sums over sequences, calls and ranks are taken by others.
    """

    per = "site"

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


def add_states(sums: Sums, states: HiddenStates, block_bytes: int | None = None) -> None:
    """Add the statistics of the states around a site to what its attention gave.

    Args:
        sums: the sums of the site, of all its statistics.
        states: the states; no gradient must be recorded while this runs.
        block_bytes: the memory that a block of states may take; the default depends on the device.
    """
    wanted = [statistic for statistic in sums.statistics if issubclass(statistic, StateStatistic)]
    sequences, tokens, width = states.entering.shape
    if not wanted or tokens * width == 0:
        return
    if block_bytes is None:
        block_bytes = BLOCK_BYTES.get(states.entering.device.type, BLOCK_BYTES_ELSEWHERE)
    elements = block_bytes // 8
    at_once = max(1, elements // max(min(tokens, _MIN_TOKENS) * width, TABLE_SIZE))
    device = sums.ratios_S2H.device  # a model may be spread over several
    for start in range(0, sequences, at_once):
        part = slice(start, start + at_once)
        real_BN = states.real if states.real is None or len(states.real) == 1 else states.real[part]
        entering = Tokens(states.entering[part], real_BN, elements)
        leaving = None if states.leaving is None else Tokens(states.leaving[part], real_BN, elements)
        results = {statistic.name: statistic.result(entering, leaving) for statistic in wanted}
        sums.add({name: _of_one_head(result, device) for name, result in results.items()}, slice(0, 1))


def _of_one_head(result: Ratio | Maximum, device: torch.device) -> Ratio | Maximum:
    return type(result)(*(part[:, None].to(device) for part in result))
