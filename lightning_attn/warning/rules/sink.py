"""Weight parked on the first token."""

from __future__ import annotations

from lightning_attn.warning.limit_rule import LimitRule


class SinkTakeover(LimitRule):
    """Most heads of the model park nearly all of their weight on the first token.

    Sinks are healthy: heads of trained decoders park weight there when they have nothing to do (Xiao et al. 2024,
    arXiv:2309.17453; Gu et al. 2025, arXiv:2410.10781). When nearly all heads do so with nearly all weight, attention
    does nothing.

    Args:
        limit: of `sink_strength`, from above.
        share_of_heads: of all heads of the model.
        patience: so many snapshots in a row must show it.
        warmup_steps: nothing is said before that step.
    """

    meaning = "Attention has all but switched itself off: tokens hardly hear of each other any more."
    remedy = (
        "lower the learning rate; give heads a way to be silent that is not a token (gated attention, a learned sink "
        "logit); look for massive activations (`massive_activation`)"
    )

    def __init__(
        self, limit: float = 0.95, share_of_heads: float = 0.95, patience: int = 3, warmup_steps: int = 0
    ) -> None:
        super().__init__(
            "sink_takeover",
            "sink_strength",
            above=limit,
            scope="model",
            share_of_heads=share_of_heads,
            min_heads=4,
            patience=patience,
            warmup_steps=warmup_steps,
        )
