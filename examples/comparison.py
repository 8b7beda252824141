"""Two runs beside each other, in words that are made of the numbers."""

from __future__ import annotations

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
    """A run with too high a learning rate beside a healthy one."""

    def __init__(self, healthy: Run, hot: Run) -> None:
        self.early, self.steps = healthy.early, len(healthy.losses)
        self.healthy, self.hot = Finding.of(healthy), Finding.of(hot)
        self.early_loss_gap = self.hot.early_loss / self.healthy.early_loss - 1
        self.final_loss_gap = self.hot.final_loss / self.healthy.final_loss - 1
        self.logit_std_ratio = self.hot.logit_std / self.healthy.logit_std
        self.max_logit_ratio = self.hot.max_logit / self.healthy.max_logit
        self.losses_look_alike = abs(self.early_loss_gap) < 0.1
        self.heads_differ = (
            self.logit_std_ratio > 3 and self.max_logit_ratio > 3 and self.hot.entropy < 0.75 * self.healthy.entropy
        )

    def table(self) -> str:
        healthy, hot = self.healthy, self.hot
        lines = [
            f"{f'Steps {self.early[0]} to {self.early[1]} of {self.steps}':27}{'healthy':>9}{'too hot':>9}",
            _row("loss", healthy.early_loss, hot.early_loss, f"{self.early_loss_gap:+.0%}"),
            _row("logit_std, largest head", healthy.logit_std, hot.logit_std, f"×{self.logit_std_ratio:.0f}"),
            _row("max_logit, largest head", healthy.max_logit, hot.max_logit, f"×{self.max_logit_ratio:.0f}"),
            _row("entropy, mean of heads", healthy.entropy, hot.entropy, f"{hot.entropy - healthy.entropy:+.2f}"),
            "The last 30 steps",
            _row("loss", healthy.final_loss, hot.final_loss, f"{self.final_loss_gap:+.0%}"),
        ]
        if healthy.test_accuracy is not None and hot.test_accuracy is not None:
            change = f"{hot.test_accuracy - healthy.test_accuracy:+.2f}"
            lines += ["Afterwards", _row("test accuracy", healthy.test_accuracy, hot.test_accuracy, change)]
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
        end = f"{abs(self.final_loss_gap):.0%} {'higher' if self.final_loss_gap > 0 else 'lower'}"
        return f"{self.headline()}; in the end the too hot run's loss is {end}."

    def panel_titles(self) -> dict[str, str]:
        return {
            "loss": f"Loss: {abs(self.early_loss_gap):.0%} apart in the grey band,"
            f" {abs(self.final_loss_gap):.0%} at the end",
            "logit_std": f"Spread of the logits: {self.logit_std_ratio:.0f}-fold in the grey band",
            "max_logit": f"Largest logit: {self.max_logit_ratio:.0f}-fold",
            "entropy": f"Entropy: {self.healthy.entropy:.2f} and {self.hot.entropy:.2f} on average",
        }


def _row(name: str, healthy: float, hot: float, change: str) -> str:
    return f"  {name:25}{healthy:9.2f}{hot:9.2f}{change:>9}"
