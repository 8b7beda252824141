"""Scores as tables in Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scoring import BORDER, MARGIN, Scored, reference

_COLOURS = {"healthy": "#1f6fb4", "border": "#b08b2e", "ruined": "#d1495b"}


def by_setting(scores: Sequence[Scored]) -> str:
    """One row for each setting: how its runs ended, and when they were warned of."""
    header = ("model", "setting", "final losses", "ruined", "warned", "healthy", "false alarms", "border", "warned")
    rows = [(*header, "warned at, % of the run")]
    for (family, setting), group in groupby(scores, key=lambda scored: (scored.run.family, scored.run.setting)):
        of_setting = list(group)
        losses = sorted(scored.run.final_loss for scored in of_setting)
        counts = [
            str(count) if of_outcome else ""
            for outcome in ("ruined", "healthy", "border")
            for of_outcome in [_of(of_setting, outcome)]
            for count in (len(of_outcome), len(_warned(of_outcome)))
        ]
        alarms = ", ".join(f"{100 * share:.0f}" for share in sorted(_shares(of_setting)))
        rows.append((family, setting, f"{losses[0]:.2f}–{losses[-1]:.2f}", *counts, alarms))
    return _table(rows)


def by_detector(scores: Mapping[str, Sequence[Scored]]) -> str:
    """One row for each detector, over all settings."""
    rows = [("detector", "ruined, warned", "median warning, % of the run", "before 25 %", "healthy, false alarms")]
    for name, of_detector in scores.items():
        ruined, healthy = _of(of_detector, "ruined"), _of(of_detector, "healthy")
        shares = list(_shares(ruined))
        middle = f"{100 * median(shares):.0f}" if shares else "–"
        early = sum(share <= 0.25 for share in shares)
        rows.append(
            (
                name,
                f"{len(_warned(ruined))} of {len(ruined)}",
                middle,
                f"{early} of {len(ruined)}",
                f"{len(_warned(healthy))} of {len(healthy)}",
            )
        )
    return _table(rows)


def seeds(scores: Sequence[Scored]) -> str:
    """One row for each run: every seed is shown."""
    rows = [("model", "setting", "seed", "final loss", "outcome", "first warning")]
    for scored in scores:
        run = scored.run
        alarm = "" if scored.alarm is None else f"step {scored.alarm}"
        rows.append((run.family, run.setting, str(run.seed), f"{run.final_loss:.3f}", scored.outcome, alarm))
    return _table(rows)


def draw(scores: Sequence[Scored], path: Path) -> None:
    """Draw every run by its final loss and its first warning."""
    families = list(dict.fromkeys(scored.run.family for scored in scores))
    figure = Figure(figsize=(10, 4.6), dpi=120)
    panels = figure.subplots(1, len(families), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(left=0.085, right=0.985, bottom=0.13, top=0.8, wspace=0.06)
    figure.text(0.012, 0.93, _headline(scores), fontsize=16, fontweight="bold")
    explanation = (
        f"Each dot is a run. A ruined one ends at least {MARGIN} nats above those of healthy settings, "
        f"one on the border at least {BORDER}."
    )
    figure.text(0.012, 0.875, explanation, fontsize=11.5, color="0.35")
    for panel, family in zip(panels, families, strict=True):
        _draw_family(panel, family, [scored for scored in scores if scored.run.family == family])
    panels[0].set_ylabel("first warning, % of the run", fontsize=11.5)
    panels[0].set_yticks([0, 25, 50, 75, 100, 115], ["0", "25", "50", "75", "100", "none"])
    panels[0].legend(frameon=False, fontsize=11.5, loc="upper right", bbox_to_anchor=(1, 0.93))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_family(panel: Axes, family: str, scores: Sequence[Scored]) -> None:
    panel.set_title(family, fontsize=12.5, loc="left")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", color="0.92")
    panel.set_xscale("log")
    panel.axhspan(0, 25, color="0.94", zorder=0)
    panel.axvline(reference([scored.run for scored in scores], family) + MARGIN, color="0.6", linewidth=1)
    for outcome, colour in _COLOURS.items():
        of_outcome = _of(scores, outcome)
        losses = [scored.run.final_loss for scored in of_outcome]
        alarms = [115 if s.share_of_run is None else 100 * s.share_of_run for s in of_outcome]
        panel.scatter(losses, alarms, color=colour, label=outcome, s=34, alpha=0.75, linewidths=0)
    panel.set_xlabel("final loss (log scale)", fontsize=11.5)
    panel.minorticks_off()
    low, high = panel.get_xlim()
    known = (0.1, 0.2, 0.3, 0.5, 1, 2, 5) if high > 3 * low else (1.6, 1.8, 2, 2.3, 2.6, 3, 3.5)
    ticks = [tick for tick in known if low <= tick <= high]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _headline(scores: Sequence[Scored]) -> str:
    ruined, healthy = _of(scores, "ruined"), _of(scores, "healthy")
    middle = 100 * median(_shares(ruined)) if _warned(ruined) else float("nan")
    return (
        f"{len(_warned(ruined))} of {len(ruined)} ruined runs warned, half by {middle:.0f} % of the run; "
        f"{len(_warned(healthy))} of {len(healthy)} healthy ones"
    )


def _of(scores: Sequence[Scored], outcome: str) -> list[Scored]:
    return [scored for scored in scores if scored.outcome == outcome]


def _warned(scores: Sequence[Scored]) -> list[Scored]:
    return [scored for scored in scores if scored.alarm is not None]


def _shares(scores: Sequence[Scored]) -> Iterator[float]:
    return (scored.share_of_run for scored in scores if scored.share_of_run is not None)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a table of Markdown that can be read as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    cells = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in [cells[0], rule, *cells[1:]])
