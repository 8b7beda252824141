"""How sharp heads are: too sharp, too many of them, or not sharp at all."""

from __future__ import annotations

from lightning_attn.warning.limit_rule import LimitRule

_LESS_SHARP = (
    "lower the learning rate or warm up longer; normalise queries and keys (q/k norm); raise the temperature of these "
    "heads"
)


#: Of fewer heads it cannot be said that many do something.
_MANY = 4


class EntropyCollapse(LimitRule):
    """A head looks at a single key, sinks aside.

    Sharp heads are healthy; one that has collapsed altogether, and stays so, is dead weight. The key that receives most
    weight is left out, since healthy decoders park weight on it.

    Args:
        limit: of `entropy_without_sink`, from below.
        patience: so many snapshots in a row must be beyond.
        warmup_steps: nothing is said before that step.
    """

    meaning = "The head looks at one key whatever it is asked, and no gradient leads it back."
    remedy = _LESS_SHARP

    def __init__(self, limit: float = 0.01, patience: int = 3, warmup_steps: int = 0) -> None:
        super().__init__(
            "entropy_collapse",
            "entropy_without_sink",
            below=limit,
            severity="info",
            patience=patience,
            warmup_steps=warmup_steps,
        )


class SharpHeads(LimitRule):
    """Sharp heads are spreading: many of the model's heads are sharp, sinks aside.

    How many heads are sharp tells more than how sharp the sharpest is.

    Args:
        limit: of `entropy_without_sink`, from below.
        share_of_heads: of all heads of the model.
        patience: so many snapshots in a row must show it.
        warmup_steps: nothing is said before that step.
    """

    meaning = (
        "Many heads have become sharp at once, which is not specialisation: the softmax saturates all over the model, "
        "and the run is likely to stall."
    )
    remedy = _LESS_SHARP

    def __init__(
        self, limit: float = 0.3, share_of_heads: float = 0.75, patience: int = 2, warmup_steps: int = 0
    ) -> None:
        super().__init__(
            "sharp_heads",
            "entropy_without_sink",
            below=limit,
            scope="model",
            share_of_heads=share_of_heads,
            min_heads=_MANY,
            patience=patience,
            warmup_steps=warmup_steps,
        )


class Saturation(LimitRule):
    """The softmax of most heads passes hardly any gradient on, sinks aside.

    Args:
        limit: of `entropy_without_sink`, from below.
        share_of_heads: of all heads of the model.
        patience: so many snapshots in a row must show it.
        warmup_steps: nothing is said before that step.
    """

    meaning = (
        "Rows are locked onto one key each: queries and keys get no gradient any more, and cannot learn to let go."
    )
    remedy = _LESS_SHARP

    def __init__(
        self, limit: float = 0.05, share_of_heads: float = 0.5, patience: int = 2, warmup_steps: int = 0
    ) -> None:
        super().__init__(
            "saturation",
            "entropy_without_sink",
            below=limit,
            scope="model",
            share_of_heads=share_of_heads,
            min_heads=_MANY,
            severity="critical",
            patience=patience,
            warmup_steps=warmup_steps,
        )


class UniformCollapse(LimitRule):
    """All heads still look everywhere alike, long after training began, or do so again.

    It is worth knowing and not a fault by itself: with a long warm-up, or where attention has little to tell, heads
    stay uniform for long, and small models begin more uniform than wide ones.

    Args:
        limit: of `entropy`, from above.
        share_of_heads: of all heads of the model.
        patience: so many snapshots in a row must show it.
        warmup_steps: nothing is said before that step: heads begin like this.
    """

    meaning = "The heads average all tokens: attention carries no information, and deeper layers see one and the same."
    remedy = (
        "check masks, positions and the scale of the initialisation; raise the learning rate of queries and keys, or "
        "lower their weight decay"
    )

    def __init__(
        self, limit: float = 0.995, share_of_heads: float = 0.95, patience: int = 5, warmup_steps: int = 1000
    ) -> None:
        super().__init__(
            "uniform_collapse",
            "entropy",
            above=limit,
            scope="model",
            share_of_heads=share_of_heads,
            min_heads=_MANY,
            hysteresis=0.005,
            severity="info",
            patience=patience,
            warmup_steps=warmup_steps,
        )
