"""How much of the first token is in the tokens behind each layer, over batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_attn.capture.call import AttentionCall
from lightning_attn.functional.rollout import _rollout_first_token_mass_compute, _rollout_first_token_mass_update
from lightning_attn.metrics.base import StreamedMetric, checked_count


class RolloutFirstTokenMass(StreamedMetric):
    r"""How much of the first token is in the tokens behind each layer, :math:`\frac1n \sum_i P^{(t)}_{i1}`.

    :math:`P^{(t)}` is the rollout of the first :math:`t` layers; see
    `lightning_attn.functional.rollout_first_token_mass`.

    `update` and `forward` take the layers and a mask as that function does. `compute` gives a value for each depth,
    (L,), in [0, 1], the mean over all sequences that have one; NaN where none has.

    Args:
        num_layers: how many layers the model has, L.
        residual: have half of each layer's input pass by, :math:`\frac12 \bar A + \frac12 I`.
        kwargs: see `torchmetrics.Metric`.

    Raises:
        ValueError: if ``num_layers`` is no positive integer, or ``residual`` neither true nor false.

    Source: Wu et al. 2025, arXiv:2502.01951; Abnar and Zuidema 2020, arXiv:2005.00928 (the residual).

    Example:
        >>> from torch import ones, tensor
        >>> metric = RolloutFirstTokenMass(num_layers=3)
        >>> uniform_causal = ones(1, 2, 3, 3).tril() / tensor([1, 2, 3])[:, None]
        >>> metric.update([uniform_causal] * 3)
        >>> metric.compute()
        tensor([0.6111, 0.7870, 0.8873])
    """

    plot_lower_bound = 0.0
    plot_upper_bound = 1.0
    plot_legend_name = "Layer"

    def __init__(self, num_layers: int, residual: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not isinstance(residual, bool):
            raise ValueError(f"`residual` must be True or False, got {residual!r}.")
        self.num_layers = checked_count("num_layers", num_layers)
        self.residual = residual
        subject = "rollout_first_token_mass" + ("_with_residual" if residual else "")
        self._sums_name, self._counts_name = f"sums_of_{subject}", f"counts_of_{subject}"
        for name in (self._sums_name, self._counts_name):
            self.add_state(name, torch.zeros(num_layers, dtype=torch.float64), dist_reduce_fx="sum")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_layers={self.num_layers}, residual={self.residual})"

    def update(self, layers: Sequence[Tensor | AttentionCall], mask: Tensor | None = None) -> None:
        """Add the attention of a batch; see `lightning_attn.functional.rollout_first_token_mass` for the arguments."""
        sums_L, counts_L = _rollout_first_token_mass_update(layers, mask, self.residual)
        if len(sums_L) != self.num_layers:
            raise ValueError(f"`layers` must be `num_layers` = {self.num_layers} in number, got {len(sums_L)}.")
        self._add_sums(**{self._sums_name: sums_L, self._counts_name: counts_L})

    def compute(self) -> Tensor:
        """The value behind each layer."""
        sums_L, counts_L = getattr(self, self._sums_name), getattr(self, self._counts_name)
        return _rollout_first_token_mass_compute(sums_L, counts_L).to(torch.get_default_dtype())
