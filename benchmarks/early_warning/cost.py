"""What the built-in rules cost at each capture: ``python benchmarks/early_warning/cost.py``.

Milliseconds of `Watch.look` alone, of snapshots of 48 sites with 16 heads and 20 statistics: in runs where nothing
happens, where all heads grow, where everything is wrong for good, and at the one capture at which all of it is new.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from machine import machine
from table import HEADER, Row, goal, judged
from turns import quartiles

from lightning_attn import Snapshot
from lightning_attn.statistics import known_statistics
from lightning_attn.warning import Watch, built_in_rules

SITES, HEADS, STATISTICS = 48, 16, 20
EVERY_N_STEPS = 10
#: More than any rule's window.
CAPTURES = 120
GOAL_MILLISECONDS = 5.0

#: What healthy heads show; 0.5 where nothing is said.
HEALTHY = {"logit_std": 2.0, "max_logit": 8.0, "non_finite_share": 0.0, "sink_strength": 0.3}
#: What is beyond every limit.
BROKEN = {
    "logit_std": 1e3,
    "max_logit": 1e5,
    "non_finite_share": 0.1,
    "sink_strength": 0.99,
    "entropy": 0.999,
    "entropy_without_sink": 1e-4,
    "softmax_sensitivity": 1e-3,
    "rank_residual": 1e-3,
    "positional_share": 0.0,
}

Course = Callable[[str, int], float]


def names() -> tuple[str, ...]:
    """Statistics that the rules read, and others beside them."""
    read = dict.fromkeys(name for rule in built_in_rules() for name in rule.statistics)
    others = [name for name in known_statistics() if name not in read]
    return (*read, *others[: STATISTICS - len(read)])


def healthy(name: str, capture: int) -> float:
    return HEALTHY.get(name, 0.5)


def growing(name: str, capture: int) -> float:
    """Logits of all heads on their way to every limit."""
    return HEALTHY[name] * 1.03**capture if name in ("logit_std", "max_logit") else healthy(name, capture)


def broken(name: str, capture: int) -> float:
    return BROKEN.get(name, 0.5)


def breaking(name: str, capture: int) -> float:
    """Everything is wrong from the last capture but one on, so that patience of two ends in the last."""
    return (broken if capture >= CAPTURES - 2 else healthy)(name, capture)


def snapshots(course: Course) -> Iterator[Snapshot]:
    statistics = names()
    noise = np.random.default_rng(0)
    for capture in range(CAPTURES):
        level_S = np.array([course(name, capture) for name in statistics])
        values_SH = level_S[:, None] * (1 + 0.02 * noise.standard_normal((len(statistics), SITES * HEADS)))
        heads = {f"blocks.{site}.attention": HEADS for site in range(SITES)}
        yield Snapshot(capture * EVERY_N_STEPS, heads, statistics, torch.from_numpy(values_SH))


def milliseconds(course: Course) -> tuple[list[float], list[int]]:
    """What each look took, and the warnings that came of it."""
    watch = Watch(built_in_rules())
    times, found = [], []
    for snapshot in snapshots(course):
        start = time.process_time()
        warnings = watch.look(snapshot)
        times.append(1000 * (time.process_time() - start))
        found.append(len(warnings))
    return times, found


def row(measured: str, course: Course, captures: slice, limit: float | None, rounds: int = 1) -> Row:
    times: list[float] = []
    found = 0
    for _ in range(rounds):
        of_all, warnings = milliseconds(course)
        times += of_all[captures]
        found = sum(warnings[captures])
    low, middle, high = quartiles(times)
    assert middle == median(times)
    return Row(
        measured,
        f"{SITES} sites × {HEADS} heads × {STATISTICS} statistics, {len(built_in_rules())} rules",
        f"{len(times)} captures, {found} warnings",
        f"{middle:.2f} ms",
        f"{low:.2f} – {high:.2f}",
        "" if limit is None else judged(middle, goal(limit)),
    )


def main() -> None:
    settled = slice(60, None)
    rows = [
        row("nothing happens", healthy, settled, GOAL_MILLISECONDS),
        row("all heads grow", growing, settled, GOAL_MILLISECONDS),
        row("everything is wrong", broken, settled, None),
        row("everything becomes wrong at once", breaking, slice(-1, None), None, rounds=5),
    ]
    print("\n".join([machine(), "", HEADER, *map(str, rows)]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
