"""Whether attention goes with the content of tokens or with their positions, over batches and ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_attn.functional.permutation import _permutation_response_compute, _permutation_response_update
from lightning_attn.metrics.base import StreamedMetric, checked_count


class PermutationResponse(StreamedMetric):
    """How far each head's attention moves along when tokens are moved: 1 by content, 0 by position.

    `update` and `forward` take what `lightning_attn.functional.permutation_response` takes, which has the formula: the
    weights of two runs, the second with the tokens of each sequence in another order. `compute` gives the value of each
    head, (H,); noise may exceed the bounds 0 and 1. NaN where moving tokens makes no difference. Batches add up as if
    they were one.

    Args:
        num_heads: how many heads the attention has, H.
        kwargs: see `torchmetrics.Metric`.

    Raises:
        ValueError: if ``num_heads`` is no positive integer.

    Source: our proposal; the order parameters it stands for are those of Cui et al. 2024, arXiv:2402.03902.

    Example:
        >>> from torch import stack, tensor
        >>> metric = PermutationResponse(num_heads=2)
        >>> by_position = tensor([[0.7, 0.2, 0.1], [0.1, 0.7, 0.2], [0.6, 0.3, 0.1]])
        >>> swap = tensor([0, 2, 1])  # the last two tokens
        >>> after = stack([by_position, by_position[swap][:, swap]])
        >>> metric.update(by_position.expand(1, 2, 3, 3), after[None], swap)
        >>> metric.compute()
        tensor([0., 1.])
    """

    plot_legend_name = "Head"

    numerator_of_permutation_response: Tensor
    denominator_of_permutation_response: Tensor

    def __init__(self, num_heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_heads = checked_count("num_heads", num_heads)
        for name in ("numerator_of_permutation_response", "denominator_of_permutation_response"):
            self.add_state(name, torch.zeros(num_heads, dtype=torch.float64), dist_reduce_fx="sum")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_heads={self.num_heads})"

    def update(
        self,
        weights: Tensor,
        weights_of_permuted: Tensor,
        permutation: Tensor,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> None:
        """Add the two runs of a batch; see `lightning_attn.functional.permutation_response` for the arguments."""
        numerator_H, denominator_H = _permutation_response_update(
            weights, weights_of_permuted, permutation, mask, is_causal=is_causal
        )
        if len(numerator_H) != self.num_heads:
            raise ValueError(
                f"This metric is of `num_heads` = {self.num_heads} heads, got attention of {len(numerator_H)}."
            )
        self._add_sums(numerator_of_permutation_response=numerator_H, denominator_of_permutation_response=denominator_H)

    def compute(self) -> Tensor:
        """The response of each head; NaN where it is absent."""
        response_H = _permutation_response_compute(
            self.numerator_of_permutation_response, self.denominator_of_permutation_response
        )
        return response_H.to(torch.get_default_dtype())
