"""One picture for all heads: sites from top to bottom, heads from left to right.

It is drawn with Pillow: a training run waits while it is drawn, and a figure of matplotlib takes fifty times as long.
"""

from __future__ import annotations

from functools import cache

import matplotlib
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from lightning_attn.snapshot import Snapshot
from lightning_attn.statistics.registry import is_per_site, known_statistics

#: Up to so many heads and cells, cells are wide and have their value written in.
_LABELLED_HEADS = 24
_LABELLED_CELLS = 400
_LONGEST_NAME = 48
_FONT_SIZE = 13
_ROW, _WIDE_CELL, _NARROW_CELL = 24, 46, 20
_MARGIN, _TITLE, _BAR = 12, 34, 16
#: The bar of the scale is no shorter, so that its two numbers do not overlap.
_SHORTEST_BAR = 40
_INK, _FAINT, _PAPER = (20, 20, 20), (225, 225, 225), (255, 255, 255)


def heat_map(snapshot: Snapshot, statistic: str, spans: tuple[float, float] | None = None) -> npt.NDArray[np.uint8]:
    """Draw one statistic of every head, with the name of each site, the number of each head, and a scale.

    Args:
        snapshot: the snapshot, with at least one site.
        statistic: a statistic in it.
        spans: for colours by the logarithm of positive values, from at least as low to at least as high as this;
            ``None`` for colours by the values themselves.

    Returns:
        An RGB picture of shape (height, width, 3). Heads without a value are grey. A statistic of sites has one column.
    """
    matrix = snapshot.matrix(statistic).numpy()
    low, high = _limits(statistic, matrix) if spans is None else _wider(spans, matrix)
    scaled = (lambda values: values) if spans is None else np.log
    colours = _colours(scaled(matrix), scaled(low), scaled(high))
    sites, heads = matrix.shape
    font = _font()
    names = [name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :] for name in snapshot.sites]
    is_labelled = heads <= _LABELLED_HEADS and matrix.size <= _LABELLED_CELLS
    cell = _WIDE_CELL if is_labelled else _NARROW_CELL
    left = 2 * _MARGIN + int(max(font.getlength(name) for name in names))
    right, bottom = left + heads * cell, _TITLE + sites * _ROW
    scale = [f"{high:.3g}", f"{low:.3g}"]
    bar, bar_end = right + 2 * _MARGIN, max(bottom, _TITLE + _SHORTEST_BAR)
    width = bar + _BAR + 2 * _MARGIN + int(font.getlength("-0.00e-00"))  # the same at every step
    title = _title(snapshot, statistic)
    width = max(width, left + int(font.getlength(title)) + _MARGIN)

    picture = Image.new("RGB", (width, bottom + _ROW + 2 * _MARGIN), _PAPER)
    draw = ImageDraw.Draw(picture)
    cells = Image.fromarray(colours).resize((heads * cell, sites * _ROW), Image.Resampling.NEAREST)
    picture.paste(cells, (left, _TITLE))
    draw.text((left, _TITLE // 2), title, _INK, font, anchor="lm")
    for row, name in enumerate(names):
        draw.text((left - _MARGIN // 2, _TITLE + row * _ROW + _ROW // 2), name, _INK, font, anchor="rm")
    if not is_per_site(statistic):
        for head in range(0, heads, 1 if is_labelled else 4):
            draw.text((left + head * cell + cell // 2, bottom + _ROW // 2), str(head), _INK, font, anchor="mm")
        draw.text(((left + right) // 2, bottom + _ROW + _MARGIN // 2), "head", _INK, font, anchor="mm")
    if is_labelled:
        for (row, head), value in np.ndenumerate(matrix):
            if not np.isnan(value):
                ink = _INK if colours[row, head] @ [0.3, 0.6, 0.1] > 130 else _PAPER
                centre = (left + head * cell + cell // 2, _TITLE + row * _ROW + _ROW // 2)
                draw.text(centre, _short(value), ink, font, anchor="mm")
    gradient = _colours(np.linspace(1, 0, 64)[:, None], 0, 1)
    picture.paste(Image.fromarray(gradient).resize((_BAR, bar_end - _TITLE)), (bar, _TITLE))
    for text, y, anchor in zip(scale, (_TITLE, bar_end), ("la", "ld"), strict=True):
        draw.text((bar + _BAR + _MARGIN // 2, y), text, _INK, font, anchor=anchor)
    return np.asarray(picture)


def _short(value: float) -> str:
    """A number of at most five characters."""
    if abs(value) >= 10_000:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.{0 if abs(value) >= 10 else 1 if abs(value) >= 1 else 2}f}"


def _title(snapshot: Snapshot, statistic: str) -> str:
    registered = known_statistics().get(statistic)
    unit = "" if registered is None or registered.unit == "1" else f" [{registered.unit}]"
    return f"{statistic}{unit}, step {snapshot.step}"


def _limits(statistic: str, matrix: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The same colours at every step where the range is known, so that pictures can be compared."""
    registered = known_statistics().get(statistic)
    present = matrix[np.isfinite(matrix)]
    if not present.size or (registered is not None and registered.range == (0, 1)):
        return 0.0, 1.0
    return min(0.0, float(present.min())), float(present.max())


def _wider(spans: tuple[float, float], matrix: npt.NDArray[np.float64]) -> tuple[float, float]:
    present = matrix[np.isfinite(matrix)]
    return min(spans[0], *present.tolist()), max(spans[1], *present.tolist())


def _colours(matrix: npt.NDArray[np.float64], low: float, high: float) -> npt.NDArray[np.uint8]:
    share = np.clip((matrix - low) / ((high - low) or 1.0), 0.0, 1.0)
    colours: npt.NDArray[np.uint8] = _palette()[np.nan_to_num(share * 255).astype(int)]
    colours[np.isnan(matrix)] = _FAINT
    return colours


@cache
def _palette() -> npt.NDArray[np.uint8]:
    palette: npt.NDArray[np.uint8] = (matplotlib.colormaps["viridis"](range(256))[:, :3] * 255).astype(np.uint8)
    return palette


@cache
def _font() -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(_FONT_SIZE)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font
