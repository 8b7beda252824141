"""The layout of TensorBoard's custom scalars: one chart for each statistic instead of one for each tag."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lightning_attn.snapshot import Summary

#: Categories of charts by their titles: of each its kind, ``"Margin"`` or ``"Multiline"``, and what it shows.
Layout = dict[str, dict[str, tuple[str, list[str]]]]


def scalar_layout(tags: Iterable[str], prefix: str) -> Layout:
    """Lay out the scalars of a snapshot, for `SummaryWriter.add_custom_scalars`.

    In the category ``<prefix>, all heads`` each statistic has its mean over heads within the margin of its minimum and
    maximum; in ``<prefix>, by site`` one line for each site, also for sites that are first met later.

    Args:
        tags: the scalars' tags, ``<prefix>/<statistic>/<summary or site>``; others are left out.
        prefix: what the tags begin with.
    """
    parts: dict[str, set[str]] = {}
    for tag in tags:
        statistic, slash, part = tag.removeprefix(f"{prefix}/").partition("/")
        if slash and tag.startswith(f"{prefix}/"):
            parts.setdefault(statistic, set()).add(part)
    summaries = set(Summary._fields)
    margins, sites = {}, {}
    for statistic, of_statistic in parts.items():
        if summaries <= of_statistic:
            # TensorBoard takes the tags of a margin chart literally, in this order.
            margins[statistic] = ("Margin", [f"{prefix}/{statistic}/{name}" for name in ("mean", "min", "max")])
        if of_statistic - summaries:
            sites[statistic] = ("Multiline", [_all_but(summaries, f"{prefix}/{statistic}/")])
    layout = {f"{prefix}, all heads": margins, f"{prefix}, by site": sites}
    return {category: charts for category, charts in layout.items() if charts}


def _all_but(names: Iterable[str], start: str) -> str:
    """A pattern of tags for TensorBoard, which matches it in Python from the beginning of a tag on.

    A list of all sites would be a long address to ask for, and leave out those met later.
    """
    return f"{re.escape(start)}(?!(?:{'|'.join(sorted(map(re.escape, names)))})$)"
