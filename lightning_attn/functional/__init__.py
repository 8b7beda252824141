"""Attention's statistics as functions of tensors, for people who have weights, or queries and keys.

Every statistic that is registered has a function here, also one of your own: `attention_entropy` for ``"entropy"``.
They are made from the statistics when they are first asked for; `docs/statistics.md` lists them. What is no number per
head is written out in the files of this folder: plans, distributions, rollouts, tests over two runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_attn.functional.attention import attention_call
from lightning_attn.functional.balanced_transport import sinkhorn
from lightning_attn.functional.composite_residual import rank_residual_composite
from lightning_attn.functional.consensus import stationary_distribution
from lightning_attn.functional.critical_scaling import (
    critical_gamma,
    estimated_gamma,
    predicted_self_weight,
    predicted_similarity,
)
from lightning_attn.functional.floor import entropy_floor
from lightning_attn.functional.marginals import key_marginal, reference_key_marginal
from lightning_attn.functional.permutation import permutation_response
from lightning_attn.functional.ranks import effective_rank, participation_ratio, stable_rank
from lightning_attn.functional.rollout import (
    attention_rollout,
    rollout_first_token_mass,
    uniform_rollout_first_token_mass,
)
from lightning_attn.functional.sinks import sink_importance, uniform_sink_importance
from lightning_attn.functional.statistic_function import attention_statistics, function_of
from lightning_attn.functional.transport import free_energy, transport_cost, transport_plan
from lightning_attn.statistics.description import function_name
from lightning_attn.statistics.registry import known_statistics

WRITTEN = (
    attention_call,
    attention_rollout,
    attention_statistics,
    critical_gamma,
    effective_rank,
    entropy_floor,
    estimated_gamma,
    free_energy,
    key_marginal,
    participation_ratio,
    permutation_response,
    predicted_self_weight,
    predicted_similarity,
    rank_residual_composite,
    reference_key_marginal,
    rollout_first_token_mass,
    sink_importance,
    sinkhorn,
    stable_rank,
    stationary_distribution,
    transport_cost,
    transport_plan,
    uniform_rollout_first_token_mass,
    uniform_sink_importance,
)


def __getattr__(name: str) -> Callable[..., Any]:
    for statistic in known_statistics().values():
        if function_name(statistic) == name:
            return function_of(statistic)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_names())


def _names() -> list[str]:
    return [*(function.__name__ for function in WRITTEN), *map(function_name, known_statistics().values())]


__all__ = _names()
