"""Statistics as functions of tensors: each is made from the statistic, with no formula of its own.

Shape suffixes: S statistics, H heads.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_attn.capture.call import AttentionCall
from lightning_attn.capture.isolation import isolated
from lightning_attn.capture.states import HiddenStates
from lightning_attn.functional.attention import attention_call
from lightning_attn.functional.hidden_states import hidden_states
from lightning_attn.statistics.description import function_docstring, function_name
from lightning_attn.statistics.measure import Sums, measure
from lightning_attn.statistics.registry import resolve
from lightning_attn.statistics.state_statistic import StateStatistic, measure_states
from lightning_attn.statistics.statistic import RowStatistic, Statistic

OverHeads = Literal["none", "mean", "min", "max"]

_FUNCTIONS: dict[type[Statistic], Callable[..., Tensor]] = {}


def attention_statistics(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    statistics: str | Sequence[str] | None = None,
    over_heads: OverHeads = "none",
    **attention: Any,
) -> dict[str, Tensor]:
    """Several statistics of attention at once, which share one walk over its rows.

    Args:
        weights: see `attention_call`, whose other arguments are taken too.
        mask: see `attention_call`.
        statistics: their names; ``None`` for those that a monitor computes by default, ``"all"`` for every one, in
            both cases without those of hidden states.
        over_heads: what becomes of the heads: ``"none"`` gives a value for each.
        attention: see `attention_call`.

    Returns:
        For each name the values of the heads, (H,), NaN where a value is absent: where nothing defines it, or where it
        needs values or logits that were not given.

    Raises:
        ValueError: if a name is unknown or that of a statistic of hidden states, or as `attention_call` does.

    Example:
        >>> from torch import ones
        >>> weights = ones(1, 2, 3, 3).tril() / ones(1, 2, 3, 3).tril().sum(-1, keepdim=True)
        >>> attention_statistics(weights, is_causal=True, statistics=["entropy", "sink_strength"])
        {'entropy': tensor([1., 1.]), 'sink_strength': tensor([0.4167, 0.4167])}
    """
    check_over_heads(over_heads)
    chosen = statistics_of_heads(statistics)
    return _statistics_compute(_statistics_update(chosen, attention_call(weights, mask, **attention)), over_heads)


def statistics_of_heads(names: str | Sequence[str] | None) -> list[type[Statistic]]:
    """The statistics of these names, of which all must be of heads; of all or the default ones, those that are.

    Raises:
        ValueError: if a name is unknown, or one of a statistic of hidden states.
    """
    found = resolve(names)
    others = [statistic.name for statistic in found if not issubclass(statistic, RowStatistic)]
    if others and names is not None and names != "all":
        raise ValueError(
            f"`statistics` must name statistics of heads, got {others}, of hidden states, each of which has a function "
            "and a metric of its own."
        )
    return [statistic for statistic in found if statistic.name not in others]


def function_of(statistic: type[Statistic]) -> Callable[..., Tensor]:
    """The function that computes one statistic of tensors."""
    if statistic not in _FUNCTIONS:
        _FUNCTIONS[statistic] = _made_of(statistic)
    return _FUNCTIONS[statistic]


def _made_of(statistic: type[Statistic]) -> Callable[..., Tensor]:
    signature = _signature(statistic)

    def function(*args: Any, **kwargs: Any) -> Tensor:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        over_heads = check_over_heads(arguments.pop("over_heads", "none"))
        parameters = {name: arguments.pop(name) for name in statistic.parameters if name in arguments}
        chosen = with_parameters(statistic, tuple(parameters.items()))
        sums = _statistics_update([chosen], as_input(statistic, (), arguments))
        return _statistics_compute(sums, over_heads)[statistic.name]

    function.__name__ = function.__qualname__ = function_name(statistic)
    function.__module__ = "lightning_attn.functional"
    function.__doc__ = function_docstring(statistic)
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _statistics_update(statistics: Sequence[type[Statistic]], given: AttentionCall | HiddenStates) -> Sums:
    """Everything that is done before ranks and batches are joined: the sums of some statistics over one batch.

    Raises:
        ValueError: if a single statistic is wanted that needs more than was given; of several it is absent.
    """
    device = given.query.device if isinstance(given, AttentionCall) else given.entering.device
    with isolated(device):
        lacks = [_what_lacks(statistic, given) for statistic in statistics]
        if len(lacks) == 1 and lacks[0] is not None:
            raise ValueError(lacks[0])
        if isinstance(given, HiddenStates):
            sums = Sums.nothing(statistics, 1, device)
            found = measure_states(given, statistics)
            if found:
                found.add_to(sums)
            return sums
        defined = [statistic for statistic, lack in zip(statistics, lacks, strict=True) if lack is None]
        return measure(given, defined).among(statistics)


def _statistics_compute(sums: Sums, over_heads: OverHeads) -> dict[str, Tensor]:
    """What is done after: the values of each statistic, NaN where they are absent."""
    names = list(sums)
    values_SH = sums.head_values(names).to(torch.get_default_dtype())
    return {
        name: values_H[0] if statistic.per == "site" else _over_heads(values_H, over_heads)
        for name, statistic, values_H in zip(names, sums.statistics, values_SH, strict=True)
    }


def _over_heads(values_H: Tensor, how: OverHeads) -> Tensor:
    """One value for all heads that have one."""
    if how == "none":
        return values_H
    if how == "mean":
        return values_H.nanmean()
    worst = -torch.inf if how == "max" else torch.inf
    present_H = torch.where(values_H.isnan(), worst, values_H)
    value = present_H.amax() if how == "max" else present_H.amin()
    return torch.where(values_H.isnan().all(), torch.nan, value)


def _what_lacks(statistic: type[Statistic], given: AttentionCall | HiddenStates) -> str | None:
    """What a statistic needs that was not given."""
    if isinstance(given, HiddenStates):
        if issubclass(statistic, StateStatistic) and statistic.needs_leaving and given.leaving is None:
            return f"{statistic.name!r} needs `leaving`, got None."
    elif issubclass(statistic, RowStatistic):
        if statistic.needs_logits and given.weight_matrix is not None:
            return (
                f"{statistic.name!r} is of logits, which weights tell only up to a constant for each row: give `query` "
                "and `key` rather than `weights`."
            )
        if statistic.needs_values and given.value is None:
            return f"{statistic.name!r} needs `value`, got None."
    return None


def as_input(statistic: type[Statistic], args: Sequence[Any], kwargs: dict[str, Any]) -> AttentionCall | HiddenStates:
    """What a statistic is computed of, from the arguments of its function."""
    if issubclass(statistic, StateStatistic):
        return hidden_states(*args, **kwargs)
    return attention_call(*args, **kwargs)


def with_parameters(statistic: type[Statistic], parameters: tuple[tuple[str, Any], ...]) -> type[Statistic]:
    """A statistic with other values of its parameters.

    Raises:
        ValueError: if a value is no number, or a statistic has no such parameter.
    """
    for name, value in parameters:
        if name not in statistic.parameters:
            raise ValueError(f"{statistic.name!r} has no parameter {name!r}, but {list(statistic.parameters)}.")
        kind = type(getattr(statistic, name))
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise ValueError(f"`{name}` must be of type {kind.__name__}, got {value!r}.")
        if not math.isfinite(value):
            raise ValueError(f"`{name}` must be finite, got {value!r}.")
    if not parameters:
        return statistic
    return type(statistic.__name__, (statistic,), dict(parameters))


def check_over_heads(over_heads: OverHeads) -> OverHeads:
    """Refuse what is no way of joining heads."""
    if over_heads not in get_args(OverHeads):
        raise ValueError(f"`over_heads` must be one of {list(get_args(OverHeads))}, got {over_heads!r}.")
    return over_heads


def _signature(statistic: type[Statistic]) -> inspect.Signature:
    """The arguments of a statistic's function: what it is computed of, its parameters, and how heads are joined."""
    is_of_states = issubclass(statistic, StateStatistic)
    given = inspect.signature(hidden_states if is_of_states else attention_call).parameters.values()
    own = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=getattr(statistic, name), annotation=_kind(statistic, name)
        )
        for name in statistic.parameters
    ]
    if not is_of_states:
        own.append(
            inspect.Parameter("over_heads", inspect.Parameter.KEYWORD_ONLY, default="none", annotation="OverHeads")
        )
    return inspect.Signature([*given, *own], return_annotation="Tensor")


def _kind(statistic: type[Statistic], parameter: str) -> str:
    return type(getattr(statistic, parameter)).__name__
