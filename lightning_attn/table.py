"""Rows of text as columns, for printing."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], alignments: str) -> list[str]:
    """Lines of equal columns, two spaces apart.

    Args:
        rows: the cells of each row.
        alignments: ``<`` or ``>`` for each column.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(alignments))]
    return [
        "  ".join(f"{cell:{align}{width}}" for cell, align, width in zip(row, alignments, widths, strict=True)).rstrip()
        for row in rows
    ]
