"""Scores as tables in Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scoring import Interval, Losses
from treatments import QK_NORM, TREATMENTS, UNTREATED, treatments_of

_COLOURS = {UNTREATED: "#d1495b", QK_NORM: "#777777", "loop from the start": "#1f6fb4", "loop on warning": "#2a9d6f"}
_OTHER = "#b08b2e"


def by_treatment(losses: Sequence[Losses]) -> str:
    """One row for each case and treatment: the mean final loss, and how much of the gap is closed."""
    rows = [("case", "treatment", "seeds", "final loss", "gap closed, %", "above untreated")]
    for of_case in losses:
        for name in treatments_of(of_case.case):
            seeds = of_case.seeds(name)
            if not seeds:
                continue
            is_healthy = of_case.case.kind == "healthy"
            recovered = None if is_healthy or name in (UNTREATED, QK_NORM) else of_case.recovered(name)
            above = of_case.above_untreated(name) if is_healthy and name != UNTREATED else None
            rows.append(
                (
                    of_case.case.title,
                    name,
                    str(len(seeds)),
                    f"{of_case.mean_of(name):.3f}",
                    "" if recovered is None else _text(recovered, 100, ".0f"),
                    "" if above is None else _text(above, 1, "+.4f"),
                )
            )
    return _table(rows)


def by_seed(losses: Sequence[Losses], names: Sequence[str]) -> str:
    """One row for each case and seed: every final loss, and the share of the gap that is closed."""
    rows = [("case", "seed", *names)]
    for of_case in losses:
        known = [name for name in names if name in treatments_of(of_case.case)]
        for seed in of_case.seeds(UNTREATED):
            cells = []
            for name in names:
                if name not in known or (name, seed) not in of_case.runs:
                    cells.append("")
                    continue
                run = of_case.runs[name, seed]
                more = "" if run.started_at in (None, 0) else f", from step {run.started_at}"
                if of_case.case.kind != "healthy" and name not in (UNTREATED, QK_NORM):
                    more = f" ({100 * of_case.recovered_of_seed(name, seed):.0f} %{more})"
                elif more:
                    more = f" ({more[2:]})"
                cells.append(f"{run.final_loss:.3f}{more}")
            rows.append((of_case.case.title, str(seed), *cells))
    return _table(rows)


def draw(losses: Sequence[Losses], picture: Path) -> None:
    """Every seed's final loss by case and treatment, each seed joined by a line."""
    figure = Figure(figsize=(15, 7.5), layout="constrained")
    hot = [of_case for of_case in losses if of_case.case.kind != "healthy"]
    healthy = [of_case for of_case in losses if of_case.case.kind == "healthy"]
    rows = figure.subplots(2, max(len(hot), len(healthy)), squeeze=False)
    for axes, group in zip(rows, (hot, healthy), strict=True):
        for panel, of_case in zip(axes, group, strict=False):
            _draw_case(panel, of_case)
        for panel in axes[len(group) :]:
            panel.set_axis_off()
        axes[0].set_ylabel("final loss, nats")
    figure.suptitle("Every seed of every case: above runs that go wrong untreated, below runs that do not")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=100)


def _draw_case(panel: Axes, losses: Losses) -> None:
    names = [name for name in treatments_of(losses.case) if losses.seeds(name)]
    for seed in losses.seeds(*[name for name in names if TREATMENTS[name].is_main]):
        main = [name for name in names if TREATMENTS[name].is_main]
        panel.plot(range(len(main)), [losses.runs[name, seed].final_loss for name in main], color="#dddddd", zorder=1)
    for place, name in enumerate(names):
        values = losses.of(name, losses.seeds(name))
        spread = np.linspace(-0.12, 0.12, len(values))
        panel.scatter(place + spread, values, color=_COLOURS.get(name, _OTHER), s=18, zorder=2)
        panel.hlines(np.mean(values), place - 0.3, place + 0.3, color="black", lw=1.5, zorder=3)
    panel.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    panel.set_title(losses.case.title, fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)


def _text(interval: Interval, factor: float, form: str) -> str:
    value, low, high = (factor * number for number in (interval.value, interval.low, interval.high))
    return f"{value:{form}} ({low:{form}} … {high:{form}})"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)
