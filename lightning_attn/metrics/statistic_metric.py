"""Statistics as metrics of torchmetrics: each is made from the statistic, with no formula of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_attn.capture.call import AttentionCall
from lightning_attn.functional.attention import attention_call
from lightning_attn.functional.hidden_states import hidden_states
from lightning_attn.functional.statistic_function import (
    OverHeads,
    _statistics_compute,
    _statistics_update,
    check_over_heads,
    statistics_of_heads,
    with_parameters,
)
from lightning_attn.metrics.base import StreamedMetric, checked_count
from lightning_attn.statistics.description import metric_docstring, metric_name
from lightning_attn.statistics.measure import Sums
from lightning_attn.statistics.registry import resolve
from lightning_attn.statistics.statistic import Statistic

#: Names of states become keys of checkpoints.
_LONGEST_NAME = 80

_METRICS: dict[type[Statistic], type[Metric]] = {}


class _StatisticMetric(StreamedMetric):
    """The sums of some statistics over batches and ranks, in tensors whose shape is known beforehand."""

    plot_legend_name = "Head"

    def __init__(
        self, statistics: Sequence[type[Statistic]], num_heads: int, over_heads: OverHeads, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads = checked_count("num_heads", num_heads)
        self.over_heads = check_over_heads(over_heads)
        nothing = Sums.nothing(statistics, num_heads, torch.device("cpu"))
        # Metrics of one collection that have states of the same names and values are taken for one metric and updated
        # together: those of two statistics, which may begin alike, must not have the same names.
        subject = _state_name(statistics)
        self._sums_name, self._maxima_name = f"sums_of_{subject}", f"maxima_of_{subject}"
        if len(nothing.ratios_S2H):
            self.add_state(self._sums_name, nothing.ratios_S2H, dist_reduce_fx="sum")
        if len(nothing.maxima_XH):
            self.add_state(self._maxima_name, nothing.maxima_XH, dist_reduce_fx="max")

    @property
    def _statistics(self) -> tuple[type[Statistic], ...]:
        raise NotImplementedError

    def _sums(self) -> Sums:
        nothing = Sums.nothing(self._statistics, self.num_heads, self.device)
        return Sums(
            self._statistics,
            getattr(self, self._sums_name, nothing.ratios_S2H),
            getattr(self, self._maxima_name, nothing.maxima_XH),
        )

    def _add(self, found: Sums) -> None:
        if self._sums_name in self._defaults:
            self._add_sums(**{self._sums_name: found.ratios_S2H})
        if self._maxima_name in self._defaults:
            known_XH: Tensor = getattr(self, self._maxima_name)
            setattr(self, self._maxima_name, torch.maximum(known_XH, found.maxima_XH.to(known_XH)))

    def _values(self) -> dict[str, Tensor]:
        return _statistics_compute(self._sums(), self.over_heads)


class _AttentionMetric(_StatisticMetric):
    """Statistics of heads."""

    def update(
        self,
        weights: Tensor | AttentionCall | None = None,
        mask: Tensor | None = None,
        *,
        query: Tensor | None = None,
        key: Tensor | None = None,
        value: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        soft_cap: float | None = None,
        sink_logits: Tensor | None = None,
        self_attention: bool | None = None,
        validate_args: bool = True,
    ) -> None:
        """Add the attention of a batch; see `lightning_attn.functional.attention_call` for the arguments."""
        call = attention_call(
            weights,
            mask,
            query=query,
            key=key,
            value=value,
            is_causal=is_causal,
            scale=scale,
            soft_cap=soft_cap,
            sink_logits=sink_logits,
            self_attention=self_attention,
            validate_args=validate_args,
        )
        if call.heads != self.num_heads:
            raise ValueError(f"This metric is of `num_heads` = {self.num_heads} heads, got attention of {call.heads}.")
        self._add(_statistics_update(self._statistics, call))


class AttentionStatistics(_AttentionMetric):
    """Several statistics of attention at once, which share one walk over its rows and one state.

    `update` and `forward` take what `lightning_attn.functional.attention_statistics` takes. `compute` gives for each
    name the values of the heads, (H,), NaN where a value is absent: where nothing defines it, or where it needs values
    or logits that were not given.

    Args:
        num_heads: how many heads the attention has, H.
        statistics: their names; ``None`` for those that a monitor computes by default, ``"all"`` for every one, in
            both cases without those of hidden states.
        over_heads: ``"none"`` for a value of each head; ``"mean"``, ``"min"`` or ``"max"`` for one of all.
        kwargs: see `torchmetrics.Metric`.

    Raises:
        ValueError: if a name is unknown or that of a statistic of hidden states, or an argument of another shape, type
            or value than these.

    Example:
        >>> from torch import ones
        >>> metric = AttentionStatistics(num_heads=2, statistics=["entropy", "sink_strength"])
        >>> weights = ones(1, 2, 3, 3).tril() / ones(1, 2, 3, 3).tril().sum(-1, keepdim=True)
        >>> metric.update(weights, is_causal=True)
        >>> metric.compute()
        {'entropy': tensor([1., 1.]), 'sink_strength': tensor([0.4167, 0.4167])}
    """

    def __init__(
        self,
        num_heads: int,
        statistics: str | Sequence[str] | None = None,
        over_heads: OverHeads = "none",
        **kwargs: Any,
    ) -> None:
        chosen = statistics_of_heads(statistics)
        self.names = tuple(statistic.name for statistic in chosen)
        super().__init__(chosen, num_heads, over_heads, **kwargs)

    @property
    def _statistics(self) -> tuple[type[Statistic], ...]:
        return resolve(self.names)

    def __repr__(self) -> str:
        heads = f"num_heads={self.num_heads}, over_heads={self.over_heads!r}"
        return f"{type(self).__name__}({heads}, statistics={list(self.names)})"

    def compute(self) -> dict[str, Tensor]:
        """The values of each statistic."""
        return self._values()

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Plot each statistic over the heads, or over time where heads are joined and a list of values is given.

        Args:
            val: what `compute` or `forward` gave, or a list of it; by default what `compute` gives now.
            ax: the axis of matplotlib to plot on; a new figure by default.

        Returns:
            The figure and its axis.
        """
        figure, axis = super().plot(val, ax)
        if self.over_heads == "none" and not isinstance(val, Sequence):
            axis.set_xlabel("Head")  # torchmetrics takes vectors by name for series in time
        return figure, axis


class _OneStatistic(_StatisticMetric):
    """A single statistic, with its parameters."""

    statistic: ClassVar[type[Statistic]]

    def __init__(self, num_heads: int, over_heads: OverHeads, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in self.statistic.parameters if name in kwargs}
        self.parameters_of_statistic = tuple(given.items())
        super().__init__(self._statistics, num_heads, over_heads, **kwargs)

    @property
    def _statistics(self) -> tuple[type[Statistic], ...]:
        return (with_parameters(self.statistic, self.parameters_of_statistic),)

    def __repr__(self) -> str:
        statistic = self._statistics[0]
        heads = [] if statistic.per == "site" else [f"num_heads={self.num_heads}, over_heads={self.over_heads!r}"]
        parameters = [f"{name}={getattr(statistic, name)!r}" for name in statistic.parameters]
        return f"{type(self).__name__}({', '.join(heads + parameters)})"

    def compute(self) -> Tensor:
        """The value of each head, or of all; NaN where it is absent."""
        return self._values()[self.statistic.name]


class StatisticMetric(_OneStatistic, _AttentionMetric):
    """One statistic of heads as a metric. `metric_of` makes a class of each."""

    def __init__(self, num_heads: int, over_heads: OverHeads = "none", **kwargs: Any) -> None:
        super().__init__(num_heads, over_heads, **kwargs)


class StateStatisticMetric(_OneStatistic):
    """One statistic of hidden states as a metric, which is of a site as a whole."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(1, "none", **kwargs)

    def update(self, entering: Tensor, leaving: Tensor | None = None, token_mask: Tensor | None = None) -> None:
        """Add the hidden states of a batch; see the statistic's function in `lightning_attn.functional`."""
        self._add(_statistics_update(self._statistics, hidden_states(entering, leaving, token_mask)))


def metric_of(statistic: type[Statistic]) -> type[Metric]:
    """The metric that computes one statistic."""
    if statistic not in _METRICS:
        _METRICS[statistic] = _made_of(statistic)
    return _METRICS[statistic]


def _made_of(statistic: type[Statistic]) -> type[Metric]:
    lower, upper = statistic.range.numbers
    return type(
        metric_name(statistic),
        (StateStatisticMetric if statistic.per == "site" else StatisticMetric,),
        {
            "__module__": "lightning_attn.metrics",
            "__doc__": metric_docstring(statistic),
            "statistic": statistic,
            "plot_lower_bound": lower,
            "plot_upper_bound": upper,
        },
    )


def _state_name(statistics: Sequence[type[Statistic]]) -> str:
    """What is computed, with its parameters, as the name of an attribute; of many statistics a short one."""
    parts = [
        "_".join([statistic.name, *(f"{name}_{getattr(statistic, name)}" for name in statistic.parameters)])
        for statistic in statistics
    ]
    name = re.sub(r"\W", "_", "_and_".join(parts))
    return name if len(name) <= _LONGEST_NAME else f"{len(parts)}_statistics_{crc32(name.encode()):08x}"
