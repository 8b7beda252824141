"""The two operands of a product, with what is known of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_attn.capture.axes import Axes, Contraction
from lightning_attn.capture.softmax.trail import Followed, Rearranged
from lightning_attn.capture.softmax.walk import Walk


@dataclass(frozen=True)
class Factor:
    """An operand of a product.

    Args:
        tensor: the operand.
        labels: of its axes, as in `Contraction`.
        followed: what is known of it; ``None`` for data.
    """

    tensor: Tensor
    labels: Axes
    followed: Followed | None


def factors_of(walk: Walk, product: Contraction) -> tuple[Factor, Factor]:
    """The left and the right operand of a product."""
    return (
        Factor(product.left, product.left_axes, followed_as_factor(walk, product.left)),
        Factor(product.right, product.right_axes, followed_as_factor(walk, product.right)),
    )


def followed_as_factor(walk: Walk, tensor: Tensor) -> Followed | None:
    """What is known of an operand of a product; what was once a product, and is no logits any more, is data."""
    followed = walk.trail.get(tensor)
    return None if isinstance(followed, Rearranged) and not followed.softmaxes else followed
