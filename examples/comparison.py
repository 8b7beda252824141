"""Three runs beside each other, in words that are made of the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from watched_run import Run


@dataclass(frozen=True)
class Finding:
    """What a run looked like early, and how it ended."""

    early_loss: float
    logit_std: float
    max_logit: float
    entropy: float
    final_loss: float
    test_accuracy: float | None

    @classmethod
    def of(cls, run: Run) -> Finding:
        first, last = run.early
        early = [snapshot for snapshot in run.history if first <= snapshot.step <= last]

        def over_time(statistic: str, over_heads: str) -> float:
            return mean(getattr(snapshot.summary(statistic), over_heads) for snapshot in early)

        return cls(
            early_loss=mean(run.losses[first:last]),
            logit_std=over_time("logit_std", "max"),
            max_logit=over_time("max_logit", "max"),
            entropy=over_time("entropy", "mean"),
            final_loss=mean(run.losses[-30:]),
            test_accuracy=run.test_accuracy,
        )


class Comparison:
    """A run with too high a learning rate beside a healthy one, and the same run rescued."""

    def __init__(self, healthy: Run, hot: Run, rescued: Run) -> None:
        self.early, self.steps = healthy.early, len(healthy.losses)
        self.rescued_at = rescued.rescued_at
        self.healthy, self.hot, self.rescued = Finding.of(healthy), Finding.of(hot), Finding.of(rescued)
        self.early_loss_gap = self.hot.early_loss / self.healthy.early_loss - 1
        self.final_loss_gap = self.hot.final_loss / self.healthy.final_loss - 1
        self.rescued_loss_gap = self.rescued.final_loss / self.healthy.final_loss - 1
        self.logit_std_ratio = self.hot.logit_std / self.healthy.logit_std
        self.max_logit_ratio = self.hot.max_logit / self.healthy.max_logit
        self.losses_look_alike = abs(self.early_loss_gap) < 0.1
        self.heads_differ = (
            self.logit_std_ratio > 3 and self.max_logit_ratio > 3 and self.hot.entropy < 0.75 * self.healthy.entropy
        )

    def table(self) -> str:
        runs = (self.healthy, self.hot, self.rescued)
        steps = f"Steps {self.early[0]} to {self.early[1]} of {self.steps}"
        lines = [
            f"{steps:27}{'healthy':>9}{'too hot':>18}{'rescued':>18}",
            _row("loss", [run.early_loss for run in runs], _share),
            _row("logit_std, largest head", [run.logit_std for run in runs], _factor),
            _row("max_logit, largest head", [run.max_logit for run in runs], _factor),
            _row("entropy, mean of heads", [run.entropy for run in runs], _difference),
            "The last 30 steps",
            _row("loss", [run.final_loss for run in runs], _share),
        ]
        accuracies = [run.test_accuracy for run in runs if run.test_accuracy is not None]
        if len(accuracies) == len(runs):
            lines += ["Afterwards", _row("test accuracy", accuracies, _difference)]
        return "\n".join(lines)

    def headline(self) -> str:
        if self.heads_differ and self.early_loss_gap < 0:
            return (
                f"A quarter in, the too hot run's loss is {-self.early_loss_gap:.0%} lower,"
                f" its logits {self.logit_std_ratio:.0f}-fold"
            )
        if self.heads_differ and self.losses_look_alike:
            return (
                f"A quarter in, the losses are {abs(self.early_loss_gap):.0%} apart,"
                f" the attention logits {self.logit_std_ratio:.0f}-fold"
            )
        if self.heads_differ:
            return "A quarter in, the losses and the heads both tell the runs apart"
        return "A quarter in, the heads do not yet tell the runs apart"

    def conclusion(self) -> str:
        return f"{self.headline()}; in the end the too hot run's loss is {_size(self.final_loss_gap)}."

    def rescue(self) -> str:
        """What AdaptiveTemperature made of the too hot run."""
        if self.rescued_at is None:
            return "AdaptiveTemperature in the rescued run: it was not warned of, so nothing was done."
        share = f"{self.rescued_at / self.steps:.0%}"
        return (
            f"AdaptiveTemperature in the rescued run: switched on by the warning, at {share} of it.\n\n  At the end its"
            f" loss is {_size(self.rescued_loss_gap)} than that of the healthy run; without the rescue it is"
            f" {_size(self.final_loss_gap)}."
        )

    def panel_titles(self) -> dict[str, str]:
        return {
            "loss": f"Loss at the end: {self.final_loss_gap:+.0%} too hot, {self.rescued_loss_gap:+.0%} rescued",
            "logit_std": f"Spread of the logits: {self.logit_std_ratio:.0f}-fold in the grey band",
            "max_logit": f"Largest logit: {self.max_logit_ratio:.0f}-fold",
            "entropy": f"Entropy: {self.healthy.entropy:.2f} and {self.hot.entropy:.2f} on average",
        }


def _row(name: str, values: Sequence[float], compared: Callable[[float, float], str]) -> str:
    healthy, *others = values
    return f"  {name:25}{healthy:9.2f}" + "".join(f"{value:9.2f}{compared(value, healthy):>9}" for value in others)


def _size(gap: float) -> str:
    return f"{abs(gap):.0%} {'higher' if gap > 0 else 'lower'}"


def _share(value: float, healthy: float) -> str:
    return f"{value / healthy - 1:+.0%}"


def _factor(value: float, healthy: float) -> str:
    return f"×{value / healthy:.0f}"


def _difference(value: float, healthy: float) -> str:
    return f"{value - healthy:+.2f}"
