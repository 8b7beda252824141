"""Where the time of a captured step goes when several ranks train together."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from models import SIZES, LanguageModel, Size
from rank_processes import device_of_rank, on_ranks
from table import header
from torch import Tensor
from torch import distributed as dist
from turns import Effort, progress

from lightning_attn import AttentionObserver
from lightning_attn.callbacks.budget import wait_for
from lightning_attn.distributed import RankReduction

HEADER = header(
    "model",
    "ranks",
    "plain forward and backward",
    "statistics",
    "waiting for the slowest rank",
    "`MAX`",
    "`SUM`",
    "packing",
    "all of these, over the plain one",
    "exchange of names, once",
)

_WARM_UP_CAPTURES = 2


class TimedReduction(RankReduction):
    """Knows when it was asked, and how long each part of it took."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.began = 0.0
        self.seconds: Counter[str] = Counter()

    def __call__(self, *arguments: Any) -> Any:
        self.began = self._now()
        self.seconds.clear()
        with self._adding("waiting"):
            dist.barrier()
        start = self._now()
        with self._timed_collectives():
            joined = super().__call__(*arguments)
        in_collectives = sum(self.seconds[part] for part in ("MAX", "SUM", "exchange"))
        self.seconds["packing"] = self._now() - start - in_collectives
        return joined

    @contextmanager
    def _timed_collectives(self) -> Iterator[None]:
        all_reduce, gather = dist.all_reduce, dist.all_gather_object

        def timed_all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> None:
            with self._adding("MAX" if op == dist.ReduceOp.MAX else "SUM"):
                all_reduce(tensor, op=op, **options)

        def timed_gather(*arguments: Any, **options: Any) -> None:
            with self._adding("exchange"):
                gather(*arguments, **options)

        with patch.object(dist, "all_reduce", timed_all_reduce), patch.object(dist, "all_gather_object", timed_gather):
            yield

    @contextmanager
    def _adding(self, part: str) -> Iterator[None]:
        start = self._now()
        yield
        self.seconds[part] += self._now() - start

    def _now(self) -> float:
        wait_for(self._device)
        return time.perf_counter()


def capture_rows(worlds: Sequence[int], backend: str, effort: Effort) -> Iterator[str]:
    """The table, a line for each model and number of ranks."""
    captures = max(effort.rounds * effort.steps, 8)
    for name, size in SIZES.items():
        for ranks in worlds:
            progress(f"captured steps of the {name} LM on {ranks} ranks")
            seconds = on_ranks(_seconds_of_parts, size, captures, ranks=ranks, backend=backend)
            plain, exchange = seconds.pop("plain"), seconds.pop("exchange")
            parts = [_milliseconds(seconds[part]) for part in ("statistics", "waiting", "MAX", "SUM", "packing")]
            ratio = sum(seconds.values()) / plain
            cells = [_milliseconds(plain), *parts, f"× {ratio:.2f}", _milliseconds(exchange)]
            yield f"| {name} LM: {size} | {ranks} | {' | '.join(cells)} |"


def _seconds_of_parts(size: Size, captures: int) -> dict[str, float]:
    """Seconds of a plain step and of what a capture adds to one, medians over captures on this rank.

    Plain and captured steps take turns.
    """
    device = device_of_rank()
    model = LanguageModel(size).to(device)
    observer = AttentionObserver(model, max_sequences=4)  # as many as `AttentionMonitor` looks at
    reduction = observer.reduction = TimedReduction(device)
    torch.manual_seed(dist.get_rank())
    seconds: dict[str, list[float]] = defaultdict(list)
    exchange = 0.0
    for capture in range(_WARM_UP_CAPTURES + captures):
        tokens = size.random_batch().to(device)
        plain = _seconds_of(lambda tokens=tokens: _step(model, tokens), device)
        with observer:
            watched = _seconds_of(lambda tokens=tokens: _step(model, tokens), device)
        start = time.perf_counter()
        observer.snapshot()
        if capture == 0:
            exchange = reduction.seconds["exchange"]
        if capture >= _WARM_UP_CAPTURES:
            seconds["plain"].append(plain)
            # Small calls are measured when the snapshot is asked for, before anything is reduced.
            seconds["statistics"].append(watched - plain + reduction.began - start)
            for part in ("waiting", "MAX", "SUM", "packing"):
                seconds[part].append(reduction.seconds[part])
    return {part: median(values) for part, values in seconds.items()} | {"exchange": exchange}


def _step(model: LanguageModel, tokens: Tensor) -> None:
    model(tokens).backward()


def _seconds_of(function: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    function()
    wait_for(device)
    return time.perf_counter() - start


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
