"""Tokens that become one and the same."""

from __future__ import annotations

from lightning_attn.warning.limit_rule import LimitRule


class RankCollapse(LimitRule):
    """The tokens that enter a site are all alike.

    Attention without enough to counter it brings tokens together, doubly exponentially with depth (Dong et al. 2021,
    arXiv:2103.03404). `rank_residual` is what of the tokens is not their mean: 0 where they are one and the same.

    Args:
        limit: of `rank_residual`, from below.
        patience: so many snapshots in a row must be beyond.
        warmup_steps: nothing is said before that step.
    """

    meaning = (
        "Tokens have become one and the same: what follows cannot tell them apart, and gradients to queries and keys "
        "vanish."
    )
    remedy = (
        "lower the learning rate; check that residual connections are there and are not scaled away; normalise "
        "before attention rather than behind it, or scale residual branches down at the beginning"
    )

    def __init__(self, limit: float = 0.01, patience: int = 2, warmup_steps: int = 0) -> None:
        super().__init__(
            "rank_collapse",
            "rank_residual",
            below=limit,
            patience=patience,
            warmup_steps=warmup_steps,
        )
