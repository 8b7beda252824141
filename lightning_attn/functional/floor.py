"""The least entropy that logits of a given spread can have."""

from __future__ import annotations

from torch import Tensor

from lightning_attn.functional.numbers import as_floating, refuse
from lightning_attn.statistics.entropy_floor import least_entropy


def entropy_floor(spread: Tensor | float, keys: Tensor | float) -> Tensor:
    r"""Least entropy in nats of a softmax over some keys, whose logits are as far from their mean as given.

    With :math:`\beta = e^{-\sigma \sqrt{m / (m - 1)}}`,

    .. math:: H \ge \log(1 + (m - 1) \beta) + \sigma \sqrt{m (m - 1)} \frac{\beta}{1 + (m - 1) \beta},

    attained where one key is ahead of others that are alike. It is :math:`\log m` for equal logits, and
    falls to 0 from about :math:`\sigma = \log m` on. Of a whole layer :math:`\sigma = \|W_K W_Q^T\|_2 \|X X^T\|_2`
    gives a bound, which is far looser.

    Args:
        spread: :math:`\sigma = \|z - \bar z\|_2` of the logits :math:`z`, 0 or more: the root of :math:`m` times their
            population standard deviation.
        keys: number of keys :math:`m`, 1 or more; broadcasts.

    Returns:
        The floor, of the shape of both; NaN where one is NaN.

    Raises:
        ValueError: if a spread is negative, or there are fewer keys than one.

    Source: Zhai et al. 2023, arXiv:2303.06296, theorem 3.1.

    Example:
        >>> import torch
        >>> entropy_floor(torch.tensor([0.0, 1.0, 5.0, 10.0]), keys=64)
        tensor([4.1589, 4.1437, 1.8026, 0.0292])
    """
    spread, keys = as_floating(spread), as_floating(keys)
    refuse("spread", spread, spread < 0, "0 or more")
    refuse("keys", keys, keys < 1, "1 or more")
    floor = least_entropy(spread, keys.clamp(min=2))
    return floor.where(keys != 1, floor.new_zeros(()))
