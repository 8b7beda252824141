"""What the statistics cost that are computed only where they are named, over one fused forward of the same call."""

from __future__ import annotations

from collections.abc import Iterator

from random_calls import described, fused_forward, random_call, statistics_of
from table import Row, code
from turns import Effort, progress, ratios, seconds_of

from lightning_attn.statistics import RowStatistic, known_statistics

NAMED = {
    name: statistic
    for name, statistic in known_statistics().items()
    if issubclass(statistic, RowStatistic) and not statistic.by_default and not statistic.compares_sequences
}
#: Those that share their work are timed as one.
SHARED = {"leader_mass": "leader_position"}


def named_rows(effort: Effort) -> Iterator[Row]:
    one_walk = [name for name, statistic in NAMED.items() if not statistic.is_spectral]
    spectral = [name for name in NAMED if name not in one_walk and name not in SHARED.values()]
    groups = {f"{len(one_walk)} one-pass statistics by name": one_walk}
    for name in spectral:
        together = [name, SHARED[name]] if name in SHARED else [name]
        groups[code(together)] = together
    for causal in (True, False):
        call = random_call(1, 1024, causal)
        progress(f"statistics by name ({described(call)})")
        found = ratios(
            lambda call=call: seconds_of(lambda: fused_forward(call), effort.calls),
            {
                group: lambda names=names, call=call: seconds_of(lambda: statistics_of(call, names), effort.calls)
                for group, names in groups.items()
            },
            effort.rounds,
        )
        for measured, ratio in found.items():
            yield ratio.row(f"{measured} of a call", described(call), "fused forward")
