"""What enters the softmax: how large it is, how fast it grows, whether it is a number at all."""

from __future__ import annotations

from lightning_attn.warning.early_warning import Severity
from lightning_attn.warning.limit_rule import LimitRule
from lightning_attn.warning.trend_rule import TrendRule

_TAME = (
    "lower the learning rate or warm up longer; better, normalise queries and keys (q/k norm); in this run, let "
    "AdaptiveTemperature hold the logits, or QKClip bound them"
)


def _severities(given: list[Severity] | None, limits: list[float], usual: list[Severity]) -> Severity | list[Severity]:
    """What is given; or what is usual, if that is one for each limit."""
    if given is not None:
        return given
    return usual if isinstance(limits, (list, tuple)) and len(limits) == len(usual) else "warning"


def _half(limit: float) -> float | None:
    """Half of a limit; of what is none, which is refused elsewhere, there is no half."""
    return limit / 2 if isinstance(limit, (int, float)) and limit > 0 else None


class LogitSpread(LimitRule):
    """Logits of a head are so far apart that its softmax is all but hard.

    It holds `logit_std`, the inverse temperature at which the head works, against limits that healthy runs hardly ever
    reach. The first was chosen on runs of two small models. Twice what was there in the first snapshot is taken off:
    position biases and finite masks spread logits from the beginning.

    Args:
        limits: of `logit_std`, increasing.
        severity: how bad each is; by default a warning and critical, or warnings where there are not two.
        patience: so many snapshots in a row must be beyond.
        warmup_steps: nothing is said before that step.
    """

    meaning = (
        "The softmax of the head is all but hard: its weights hardly pass gradients on. Runs in which this goes on "
        "growing stall: their loss looks fine for long, and ends high."
    )
    remedy = _TAME

    def __init__(
        self,
        limits: list[float] = [30.0, 100.0],  # noqa: B006  never changed: it is kept as a tuple
        severity: list[Severity] | None = None,
        patience: int = 2,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(
            "logit_spread",
            "logit_std",
            above=limits,
            without_start=True,
            severity=_severities(severity, limits, ["warning", "critical"]),
            patience=patience,
            warmup_steps=warmup_steps,
        )


class LogitGrowth(TrendRule):
    """The spread of a head's logits grows, does not level off, and will soon cross a limit.

    Args:
        limit: of `logit_std`.
        beyond: only heads that have come so far are looked at: all grow fast at first, from next to nothing. ``None``
            for half of the limit.
        horizon: within so many steps; ``None`` for a quarter of what the window spans, at whatever cadence: to look
            farther ahead alarms on more healthy runs.
        window: the newest snapshots that the trend is taken of.
        patience: so many snapshots in a row must predict it.
        warmup_steps: nothing is said before that step.
    """

    meaning = (
        "The logits grow and do not level off. Growth that goes on hardens the softmax until gradients no longer pass; "
        "the loss shows it long after."
    )
    remedy = _TAME

    def __init__(
        self,
        limit: float = 30.0,
        beyond: float | None = None,
        horizon: int | None = None,
        window: int = 10,
        patience: int = 2,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(
            "logit_growth",
            "logit_std",
            above=limit,
            beyond=_half(limit) if beyond is None else beyond,
            without_start=True,
            horizon=horizon,
            window=window,
            patience=patience,
            warmup_steps=warmup_steps,
        )


class LogitLevel(LimitRule):
    """The largest logit of a head is beyond 30, 100, 1000 or 10 000.

    A level alone is no fault: healthy heads reach 30, and a healthy model of three billion parameters reached 318. 100
    is where QK-clip begins to act (Kimi K2, arXiv:2507.20534), and 10 000 is what diverging runs of ViT-22B showed
    (Wortsman et al. 2023, arXiv:2309.14322).

    Args:
        limits: of `max_logit`, increasing.
        severity: how bad each is; by default worth knowing up to 1000, and warnings where there are not four.
        patience: so many snapshots in a row must be beyond.
        warmup_steps: nothing is said before that step.
    """

    meaning = "Large logits come before a softmax that is all but hard, and leave no room in half precision."
    remedy = _TAME

    def __init__(
        self,
        limits: list[float] = [30.0, 100.0, 1e3, 1e4],  # noqa: B006
        severity: list[Severity] | None = None,
        patience: int = 2,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(
            "logit_level",
            "max_logit",
            above=limits,
            severity=_severities(severity, limits, ["info", "info", "warning", "critical"]),
            patience=patience,
            warmup_steps=warmup_steps,
        )


class LogitPrecision(LimitRule):
    """Logits of a head are so large that keys it tells apart are one and the same to their dtype.

    What `LogitLevel` does not know is how exactly logits are computed. At a `logit_spacing` of 4 two of them that
    differ by nearly 4 may be rounded to one number, and weights that should differ by a factor of fifty to one weight.
    Spacings are powers of two, so that a limit of 3 means 4 and more: logits from 512 on in bf16, from 4096 on in fp16,
    and from 3e7 on in float32.

    Args:
        limits: of `logit_spacing`, increasing.
        severity: how bad each is; by default warnings.
        patience: so many snapshots in a row must be beyond.
        warmup_steps: nothing is said before that step.
    """

    meaning = (
        "The logits of the head are too large for the precision of its queries and keys: which of its foremost keys "
        "gets the weight may be decided by rounding, and so are the gradients that could make the logits smaller."
    )
    remedy = (
        "normalise queries and keys (q/k norm), or bound the logits (QKClip, a soft-cap); lower the learning rate; "
        "until then compute logits in float32, best from queries and keys that are in float32 too"
    )

    def __init__(
        self,
        limits: list[float] = [3.0],  # noqa: B006
        severity: list[Severity] | None = None,
        patience: int = 2,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(
            "logit_precision",
            "logit_spacing",
            above=limits,
            severity=_severities(severity, limits, ["warning"]),
            patience=patience,
            warmup_steps=warmup_steps,
        )


class NonFiniteLogits(LimitRule):
    """Logits are infinite or NaN."""

    meaning = (
        "Some rows of the head have logits that are infinite or NaN: an overflow, or a NaN that came from before. Such "
        "a row spoils everything behind it."
    )
    remedy = (
        "look for the first layer that has them; compute attention in a wider dtype (bf16 or fp32 in the place of "
        "fp16), lower the learning rate, clip gradients, and go back to the last good checkpoint"
    )

    def __init__(self) -> None:
        super().__init__("non_finite_logits", "non_finite_share", above=0.0, severity="critical", patience=1)
