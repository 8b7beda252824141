"""`docs/support.md`, made of the cells: `python tests/support/page.py` writes it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.cell import Cell, NoAttention, Refused, Seen

PAGE = Path(__file__).parents[2] / "docs" / "support.md"

#: The files that hold cells, in the order of the page.
FILES = (
    "test_decoders",
    "test_decoder_variants",
    "test_flex_decoders",
    "test_opaque_decoders",
    "test_generation",
    "test_hybrids",
    "test_encoders",
    "test_encoder_decoders",
    "test_vision",
    "test_timm",
    "test_torch_modules",
    "test_x_transformers",
    "test_own_attention",
    "test_training_setups",
)

#: What is longer than this stands below its table.
LONGEST = 50

#: What a case may begin with.
MODES = ("train", "eval")

HEAD = """\
# What is seen of which model

Each row was tested: the attention that is seen is held against a computation of its own, in float64, from what the
model's own projections gave. Logits and weights agree to 1e-5, and so do `A V` and the output of the model's attention.
The model's output, its gradients and the state of the random numbers are the same, bit for bit, with and without
watching, and nothing is left on the model.

This page is made from the tests in `tests/support/` by `python tests/support/page.py`. Which attention your own model
uses, and how to find out, is told in [which_attention.md](which_attention.md).

What is refused is said once per site by an `AttentionWarning`, with the reason and a way out. Where it says *nothing*,
there is no attention over tokens, and none is shown.
"""


def cells() -> list[Cell]:
    """Every cell of the matrix."""
    there = [name for name in FILES if (Path(__file__).parent / f"{name}.py").exists()]
    return [cell for name in there for cell in importlib.import_module(f"support.{name}").CELLS]


def page() -> str:
    """The page, from its heading to its last table."""
    parts = [HEAD]
    for family, of_family in groupby(cells(), key=lambda cell: cell.family):
        parts.append(f"\n## {family}\n\n| model | attention | run as | what is seen | sites |\n|---|---|---|---|---|\n")
        cases: dict[tuple[str, ...], list[str]] = {}
        for cell in of_family:
            sites = ", ".join(f"`{site}`" for site in cell.sites)
            cases.setdefault((cell.model, cell.way, _told(cell), sites), []).append(cell.case)
        ways: dict[tuple[str, ...], list[str]] = {}
        for (model, way, told, sites), of_row in cases.items():
            ways.setdefault((model, _run_as(of_row), told, sites), []).append(way)
        letters = _letters(run_as for _, run_as, _, _ in ways)
        for (model, run_as, told, sites), of_row in ways.items():
            parts.append(f"| {model} | {', '.join(of_row)} | {letters.get(run_as, run_as)} | {told} | {sites} |\n")
        if letters:
            parts.append("\n")
        for run_as, letter in letters.items():
            parts.append(f"- **{letter}** – {run_as}\n")
    return "".join(parts)


def _letters(texts: Iterable[str]) -> dict[str, str]:
    """A letter for every text that is too long to stand in a table."""
    long = [text for text in dict.fromkeys(texts) if len(text) > LONGEST]
    return {text: chr(ord("A") + number) for number, text in enumerate(long)}


def _run_as(cases: list[str]) -> str:
    """The cases of a row, of which each may begin with a mode and a comma: those of the same modes together."""
    modes: dict[str, list[str]] = {}
    for case in dict.fromkeys(cases):
        mode, comma, rest = case.partition(", ")
        modes.setdefault(rest if comma and mode in MODES else case, []).extend(
            [mode] if comma and mode in MODES else []
        )
    told: dict[str, list[str]] = {}
    for case, of_case in modes.items():
        told.setdefault(" and ".join(of_case), []).append(case)
    return "; ".join(f"{mode}: {'; '.join(of_mode)}" if mode else "; ".join(of_mode) for mode, of_mode in told.items())


def _told(cell: Cell) -> str:
    outcome = cell.outcome
    if isinstance(outcome, Seen):
        seen = "all" if outcome.with_values else "all but the values"
        return f"{seen}: {outcome.note}" if outcome.note else seen
    if isinstance(outcome, Refused):
        return f"refused: {outcome.note}"
    assert isinstance(outcome, NoAttention)
    return f"nothing: {outcome.note}"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE.name}: {len(cells())} cells")
