"""The scalars that loggers get of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_attn.snapshot import Snapshot
from lightning_attn.statistics.registry import known_statistics

#: The statistics that have one scalar for each site.
PER_SITE = ("entropy", "max_logit", "logit_std", "sink_strength", "token_similarity")
#: TensorBoard becomes slow with thousands of tags; with more than so many, heat maps take the place of scalars per
#: site.
MAX_TAGS = 250
SUMMARIES = ("min", "mean", "max")


def scalars(snapshot: Snapshot, prefix: str, per_site: bool = True) -> dict[str, float]:
    """The scalars of a snapshot by their tags.

    For every statistic ``<prefix>/<statistic>/min``, ``mean`` and ``max`` over all heads of all sites, or over all
    sites for a statistic of sites; for some statistics ``<prefix>/<statistic>/<site>`` as well. Absent values have no
    tag, and faults have one where they are not zero.

    Args:
        snapshot: the snapshot.
        prefix: what all tags begin with.
        per_site: whether sites have scalars of their own.
    """
    tagged: dict[str, float] = {}
    known = known_statistics()
    for statistic in snapshot.statistics:
        summary = snapshot.summary(statistic)
        if summary is None or (known[statistic].is_fault and summary.max == 0):
            continue
        tagged |= {f"{prefix}/{statistic}/{name}": getattr(summary, name) for name in SUMMARIES}
        if per_site and statistic in PER_SITE:
            values = {site: snapshot.over_heads(site, statistic) for site in snapshot.sites}
            tagged |= {f"{prefix}/{statistic}/{site}": value for site, value in values.items() if value is not None}
    return tagged


def summary_value(snapshot: Snapshot, name: str) -> float | None:
    """The value of ``"<statistic>/<min, mean or max>"``; ``None`` where it is absent."""
    statistic, kind = name.rsplit("/", 1)
    summary = snapshot.summary(statistic)
    return None if summary is None else float(getattr(summary, kind))


def check_summary_names(names: Sequence[str], statistics: Sequence[str]) -> None:
    """Refuse names that `summary_value` cannot answer.

    Args:
        names: the names.
        statistics: the statistics that there will be.

    Raises:
        ValueError: if a name is not a statistic and a summary, joined by a slash.
    """
    for name in names:
        statistic, _, kind = str(name).rpartition("/")
        if statistic not in statistics or kind not in SUMMARIES:
            raise ValueError(
                f"`callback_metrics` holds {name!r}; allowed is '<statistic>/<summary>' with a statistic of "
                f"{list(statistics)} and a summary of {list(SUMMARIES)}, such as 'entropy/min'."
            )
