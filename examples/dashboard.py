"""One picture of several runs: their losses, and every attention head over training."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from PIL import Image
from watched_run import Run

COLOURS = ("#1f6fb4", "#d1495b", "#2a9d6f")


def draw(runs: tuple[Run, Run, Run], headline: str, titles: Mapping[str, str], loss_unit: str, path: Path) -> None:
    """Draw the losses and every head of three runs.

    Args:
        runs: the healthy run, the one that goes wrong, and that one rescued.
        headline: what the picture says.
        titles: what to see in each of four panels, for ``"loss"`` and for statistics of the monitor.
        loss_unit: what the loss is measured in.
        path: the PNG file to write.
    """
    figure = Figure(figsize=(10, 6.6), dpi=120)
    panels = figure.subplots(2, 2, sharex=True)
    figure.subplots_adjust(left=0.075, right=0.985, bottom=0.08, top=0.85, wspace=0.2, hspace=0.22)
    figure.text(0.012, 0.945, headline, fontsize=17, fontweight="bold")
    heads = " + ".join(str(count) for count in runs[0].history[-1].heads.values())
    explanation = (
        f"Same model, data and seed. Green: the hot run, its temperatures held from its warning on. {heads} heads."
    )
    figure.text(0.012, 0.905, explanation, fontsize=12, color="0.35")
    for panel, (name, title) in zip(panels.flat, titles.items(), strict=True):
        panel.set_title(title, fontsize=12.5, loc="left")
        panel.axvspan(*runs[0].early, color="0.87", zorder=0)
        panel.grid(axis="y", color="0.92")
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlim(0, len(runs[0].losses))
        panel.tick_params(labelsize=11)
        if name == "loss":
            _draw_losses(panel, runs, loss_unit)
        else:
            _draw_heads(panel, runs, name)
    for panel in panels[-1]:
        panel.set_xlabel("optimiser step", fontsize=11.5)
    pixels = BytesIO()
    figure.savefig(pixels)
    Image.open(pixels).convert("RGB").quantize(128).save(path, optimize=True)  # a third of the size, looks the same


def _draw_losses(panel: Axes, runs: tuple[Run, Run, Run], unit: str) -> None:
    for run, colour in zip(runs, COLOURS, strict=True):
        label = f"{run.title}, learning rate {run.learning_rate:g}"
        panel.plot(run.smooth_losses(), color=colour, linewidth=2.4, label=label)
    panel.set_ylabel(unit, fontsize=11.5)
    panel.legend(frameon=False, fontsize=12, loc="upper right")
    for run, colour in zip(runs, COLOURS, strict=True):
        if run.faults and run.rescued_at is None:  # until it is rescued it is the same run
            step = run.faults[0].step
            panel.axvline(step, color=colour, linewidth=1.4, linestyle="--")
            panel.text(step + 5, panel.get_ylim()[1], f"warned at step {step}", color=colour, fontsize=11.5, va="top")
    early = runs[0].early
    share = "–".join(f"{100 * step / len(runs[0].losses):.0f}" for step in early)
    bottom = panel.get_ylim()[0]
    panel.text(early[1] + 5, bottom, f"{share}% of the run", fontsize=11.5, color="0.35", va="bottom")


def _draw_heads(panel: Axes, runs: tuple[Run, Run, Run], statistic: str) -> None:
    for run, colour in zip(runs, COLOURS, strict=True):
        for site, heads in run.history[-1].heads.items():
            for head in range(heads):
                panel.plot(*run.history.series(site, head, statistic), color=colour, linewidth=1, alpha=0.8)
    if statistic == "entropy":
        panel.set_ylabel("entropy (1: looks everywhere)", fontsize=11.5)
        panel.set_ylim(0, 1.03)
    else:
        panel.set_ylabel(f"{statistic} (log scale)", fontsize=11.5)
        panel.set_yscale("log", nonpositive="mask")
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
