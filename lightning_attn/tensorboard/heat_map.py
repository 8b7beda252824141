"""One picture for all heads: sites from top to bottom, heads from left to right."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightning_attn.snapshot import Snapshot
from lightning_attn.statistics.registry import known_statistics

#: Up to so many cells have their value written in.
_LABELLED_CELLS = 200


def heat_map(snapshot: Snapshot, statistic: str) -> npt.NDArray[np.uint8]:
    """Draw one statistic of every head.

    Args:
        snapshot: the snapshot, with at least one site.
        statistic: a statistic in it.

    Returns:
        An RGB picture of shape (height, width, 3).
    """
    matrix = snapshot.matrix(statistic).numpy()
    sites, heads = matrix.shape
    figure = Figure(figsize=(2.6 + 0.45 * max(heads, 6), 1.2 + 0.3 * max(sites, 3)), layout="constrained")
    canvas = FigureCanvasAgg(figure)  # no pyplot: nothing to close, and the user's backend stays as it is
    axes = figure.add_subplot()
    low, high = _limits(statistic, matrix)
    picture = axes.imshow(np.ma.masked_invalid(matrix), aspect="auto", cmap="viridis", vmin=low, vmax=high)
    axes.set_yticks(range(sites), snapshot.sites, fontsize=8)
    axes.set_xticks(range(heads), [str(head) for head in range(heads)], fontsize=8)
    axes.set_xlabel("head")
    registered = known_statistics().get(statistic)
    unit = "" if registered is None or registered.unit == "1" else f" [{registered.unit}]"
    axes.set_title(f"{statistic}{unit}, step {snapshot.step}", fontsize=10)
    figure.colorbar(picture, ax=axes)
    if matrix.size <= _LABELLED_CELLS:
        for (site, head), value in np.ndenumerate(matrix):
            if not np.isnan(value):
                dark = (value - low) / (high - low or 1) < 0.6
                axes.text(
                    head, site, f"{value:.2g}", ha="center", va="center", fontsize=7, color="white" if dark else "black"
                )
    canvas.draw()
    pixels: npt.NDArray[np.uint8] = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    return pixels


def _limits(statistic: str, matrix: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The same colours at every step where the range is known, so that pictures can be compared."""
    registered = known_statistics().get(statistic)
    if registered is not None and registered.range == "0 … 1":
        return 0.0, 1.0
    present = matrix[~np.isnan(matrix)]
    if not present.size:
        return 0.0, 1.0
    return min(0.0, float(present.min())), float(present.max())
