"""Train one small language model twice, healthily and with too high a learning rate, and watch every attention head.

Run it with ``make demo``. It downloads nothing, takes a minute or two on two cores, and writes to ``demo_output/``.
"""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import lightning.pytorch as pl
import torch
from character_lm import CharacterLM, DocumentationText
from dashboard import Run, draw
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_attn import AttentionMonitor

OUTPUT = Path("demo_output")
STEPS = 500
SEED = 1
#: The two runs are compared from a fifth to a quarter of the way: early enough to save the one that goes wrong.
EARLY = (STEPS // 5, STEPS // 4)


def train(name: str, title: str, learning_rate: float) -> Run:
    """Train the model from the same weights on the same passages; watching it takes one callback."""
    pl.seed_everything(SEED, verbose=False)
    text = DocumentationText(length=64)
    model = CharacterLM(len(text.characters), learning_rate)
    monitor = AttentionMonitor(every_n_steps=10, heat_map_every_n_steps=100, print_summary=False)
    losses = LossHistory()
    trainer = pl.Trainer(
        callbacks=[monitor, losses, ProgressBar(title)],
        logger=TensorBoardLogger(OUTPUT, name, version="", default_hp_metric=False),
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=STEPS,
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(text, batch_size=16, shuffle=True))
    return Run(title, learning_rate, losses.losses, monitor.history)


class LossHistory(pl.Callback):
    """Keeps the loss of every step for the picture."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: dict[str, Tensor], *_: object
    ) -> None:
        self.losses.append(outputs["loss"].item())


class ProgressBar(TQDMProgressBar):
    """Says which run it is; in a log, where each update is a line, it is updated rarely."""

    def __init__(self, title: str) -> None:
        super().__init__(refresh_rate=5 if sys.stdout.isatty() else STEPS // 4)
        self.title = title

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: object) -> None:
        super().on_train_epoch_start(trainer)
        self.train_progress_bar.set_description(f"{self.title:8}")

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, int | str | float]:
        metrics = super().get_metrics(trainer, pl_module)
        return {name: value for name, value in metrics.items() if name != "v_num"}


@dataclass(frozen=True)
class Finding:
    """What a run looked like in the steps of ``EARLY``, and how it ended."""

    early_loss: float
    logit_std: float
    max_logit: float
    entropy: float
    final_loss: float

    @classmethod
    def of(cls, run: Run) -> Finding:
        early = [snapshot for snapshot in run.history if EARLY[0] <= snapshot.step <= EARLY[1]]

        def over_time(statistic: str, over_heads: str) -> float:
            return mean(getattr(snapshot.summary(statistic), over_heads) for snapshot in early)

        return cls(
            early_loss=mean(run.losses[EARLY[0] : EARLY[1]]),
            logit_std=over_time("logit_std", "max"),
            max_logit=over_time("max_logit", "max"),
            entropy=over_time("entropy", "mean"),
            final_loss=mean(run.losses[-30:]),
        )


class Comparison:
    """The too hot run beside the healthy one, in words that are made of the numbers."""

    def __init__(self, healthy: Finding, hot: Finding) -> None:
        self.healthy, self.hot = healthy, hot
        self.early_loss_gap = hot.early_loss / healthy.early_loss - 1
        self.final_loss_gap = hot.final_loss / healthy.final_loss - 1
        self.logit_std_ratio = hot.logit_std / healthy.logit_std
        self.max_logit_ratio = hot.max_logit / healthy.max_logit
        self.losses_look_alike = abs(self.early_loss_gap) < 0.1
        self.heads_differ = (
            self.logit_std_ratio > 3 and self.max_logit_ratio > 3 and hot.entropy < 0.75 * healthy.entropy
        )

    def table(self) -> str:
        healthy, hot = self.healthy, self.hot
        rows = [
            ("loss", healthy.early_loss, hot.early_loss, f"{self.early_loss_gap:+.0%}"),
            ("logit_std, largest head", healthy.logit_std, hot.logit_std, f"×{self.logit_std_ratio:.0f}"),
            ("max_logit, largest head", healthy.max_logit, hot.max_logit, f"×{self.max_logit_ratio:.0f}"),
            ("entropy, mean of heads", healthy.entropy, hot.entropy, f"{hot.entropy - healthy.entropy:+.2f}"),
            ("loss", healthy.final_loss, hot.final_loss, f"{self.final_loss_gap:+.0%}"),
        ]
        lines = [f"  {name:25}{first:9.2f}{second:9.2f}{change:>9}" for name, first, second, change in rows]
        header = f"Steps {EARLY[0]} to {EARLY[1]} of {STEPS}"
        return "\n".join([f"{header:27}{'healthy':>9}{'too hot':>9}", *lines[:-1], f"The last 30 steps\n{lines[-1]}"])

    def headline(self) -> str:
        if self.heads_differ and self.losses_look_alike:
            return (
                f"A quarter in, the losses are {abs(self.early_loss_gap):.0%} apart,"
                f" the attention logits {self.logit_std_ratio:.0f}-fold"
            )
        if self.heads_differ:
            return "A quarter in, the losses and the heads both tell the runs apart"
        return "A quarter in, the heads do not yet tell the runs apart"

    def conclusion(self) -> str:
        end = f"{abs(self.final_loss_gap):.0%} {'worse' if self.final_loss_gap > 0 else 'better'}"
        return f"{self.headline()}; the too hot run's final loss is {end}."

    def panel_titles(self) -> dict[str, str]:
        return {
            "loss": f"Loss: {abs(self.early_loss_gap):.0%} apart in the grey band,"
            f" {abs(self.final_loss_gap):.0%} at the end",
            "logit_std": f"Spread of the logits: {self.logit_std_ratio:.0f}-fold in the grey band",
            "max_logit": f"Largest logit: {self.max_logit_ratio:.0f}-fold",
            "entropy": f"Entropy: {self.healthy.entropy:.2f} and {self.hot.entropy:.2f} on average",
        }


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec")  # Lightning's, of its own code
    torch.set_num_threads(1)  # the model is too small for more: on a busy machine they cost far more than they gain
    print(f"One small language model, trained twice for {STEPS} steps with AttentionMonitor attached\n", flush=True)
    for name in ("healthy", "too_hot"):
        shutil.rmtree(OUTPUT / name, ignore_errors=True)
    healthy = train("healthy", "healthy", learning_rate=0.001)
    hot = train("too_hot", "too hot", learning_rate=0.02)

    found = Comparison(Finding.of(healthy), Finding.of(hot))
    picture = OUTPUT / "dashboard.png"
    draw((healthy, hot), EARLY, found.headline(), found.panel_titles(), picture)
    tensorboard = Path(sys.executable).with_name("tensorboard")
    if tensorboard.is_relative_to(Path.cwd()):
        tensorboard = tensorboard.relative_to(Path.cwd())
    print(f"\n{found.table()}\n\n{found.conclusion()}\n")
    print(f"Every head over training: {picture}")
    print(f"Every curve:              {tensorboard} --logdir {OUTPUT}")


if __name__ == "__main__":
    main()
