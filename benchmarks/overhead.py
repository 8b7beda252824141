"""What watching attention costs: training steps, the statistics of one call, and its memory.

    python benchmarks/overhead.py --output table.md

Everything is measured in one process and given as a ratio, so that the table means the same on another machine. What is
compared takes turns: each block of measurements stands between two blocks of its baseline and is divided by their mean,
which cancels a machine that slowly becomes faster or slower. A ratio is the median over rounds of such turns.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import math
import multiprocessing
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, Trainer
from models import LanguageModel, Size
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_attn import AttentionMonitor, AttentionObserver
from lightning_attn.capture.call import AttentionCall, Visibility
from lightning_attn.snapshot import Snapshot
from lightning_attn.statistics import RowStatistic, known_statistics, measure
from lightning_attn.statistics.measure import Sums
from lightning_attn.tensorboard import heat_map

ALL = list(known_statistics())
OF_ROWS = {name: statistic for name, statistic in known_statistics().items() if issubclass(statistic, RowStatistic)}
SPECTRAL = [name for name, statistic in OF_ROWS.items() if statistic.is_spectral]
NOT_SPECTRAL = [name for name in ALL if name not in SPECTRAL]
SECOND_WALK = ["entropy_without_sink"]  # which key to leave out is known only when all rows were seen
SINGULAR = ["spectral_gap", "stable_rank"]  # one iteration for both
#: Those that have dense formulas here to be compared with.
ONE_PASS = [
    "entropy",
    "hidden_row_share",
    "kl_to_uniform",
    "logit_std",
    "max_logit",
    "max_weight",
    "non_finite_share",
    "self_weight",
    "sink_rate",
    "sink_strength",
]

HEADS, WIDTH = 8, 64
SHARP = 50.0  # heads of a run that is lost: most weights are too small for float32, which must not make them slow


@dataclass(frozen=True)
class Effort:
    """How often everything is repeated.

    Args:
        rounds: turns of everything that is compared.
        steps: training steps of one turn.
        calls: attention calls of one turn.
    """

    rounds: int
    steps: int
    calls: int


THOROUGH = Effort(rounds=7, steps=12, calls=2)
QUICK = Effort(rounds=2, steps=4, calls=1)


# --- The table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    measured: str
    setting: str
    baseline: str
    result: str
    spread: str
    goal: str

    def __str__(self) -> str:
        return f"| {self.measured} | {self.setting} | {self.baseline} | {self.result} | {self.spread} | {self.goal} |"


HEADER = """\
| measured | setting | over | result | middle half of the rounds | goal |
|---|---|---|---|---|---|"""


def judged(value: float, *limits: tuple[str, float]) -> str:
    """A value beside its goals: ``≤ 1.01 ✗, at most 1.03 ✓``."""
    return ", ".join(f"{words} {limit:g} {'✓' if value <= limit else '✗'}" for words, limit in limits)


def goal(limit: float) -> tuple[str, float]:
    return "≤", limit


def at_most(limit: float) -> tuple[str, float]:
    return "at most", limit


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- Taking turns -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    """How much longer something takes than its baseline: the median over rounds, and the quartiles."""

    value: float
    low: float
    high: float
    baseline_seconds: float

    def row(self, measured: str, setting: str, baseline: str, *limits: tuple[str, float]) -> Row:
        digits = 3 if self.value < 2 else 2
        return Row(
            measured,
            setting,
            f"{baseline}, {1000 * self.baseline_seconds:.3g} ms",
            f"× {self.value:.{digits}f}",
            f"{self.low:.{digits}f} – {self.high:.{digits}f}",
            judged(self.value, *limits),
        )


def ratios(baseline: Callable[[], float], others: dict[str, Callable[[], float]], rounds: int) -> dict[str, Ratio]:
    """Time things in turn with their baseline.

    Args:
        baseline: runs one block of measurements and returns its seconds.
        others: what is compared with it, in the same way.
        rounds: how often everything has its turn.
    """
    found: dict[str, list[float]] = {name: [] for name in others}
    before = baseline()
    baselines = [before]
    for number in range(rounds):
        for name, other in others.items():
            seconds, after = other(), baseline()
            found[name].append(seconds / mean([before, after]))
            baselines.append(after)
            before = after
        latest = ", ".join(f"{name} {values[-1]:.3f}" for name, values in found.items())
        progress(f"  round {number + 1} of {rounds}: {1000 * before:.1f} ms; {latest}")
    return {name: _summary(values, median(baselines)) for name, values in found.items()}


def _summary(values: list[float], baseline_seconds: float) -> Ratio:
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Ratio(middle, low, high, baseline_seconds)


# --- Training steps ---------------------------------------------------------------------------------------------------

SIZES = {
    "demo": Size(layers=3, heads=4, width=64, tokens=64, batch=16),
    "larger": Size(layers=4, heads=8, width=256, tokens=256, batch=8),
}
DEFAULT_CADENCE, HEAT_MAP_CADENCE = 50, 500
WARM_UP_STEPS = 4


class Stopwatch(Callback):
    """Takes the time whenever a batch begins.

    As the first callback of its Trainer it divides a run into steps that each hold every hook of the callbacks behind
    it, at both ends of the batch.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.perf_counter())


def step_seconds(
    size: Size, steps: int, every_n_steps: int | None = None, statistics: list[str] | None = None
) -> float:
    """Seconds of one training step in a run of its own.

    A capture happens on one step in ``every_n_steps``, where a median over steps would not see it. So it enters with
    that share: what is returned is the mean step of a whole period between captures, each of its two kinds of steps
    taken by its median.

    Args:
        size: of the model.
        steps: how many steps to measure.
        every_n_steps: the cadence of the monitor; ``None`` for a run without it.
        statistics: of the monitor.
    """
    torch.manual_seed(0)
    stopwatch = Stopwatch()
    callbacks: list[Callback] = [stopwatch]
    if every_n_steps is not None:
        monitor = AttentionMonitor(every_n_steps, statistics=statistics, print_summary=False)
        callbacks.append(monitor)
    all_steps = WARM_UP_STEPS + steps + 1  # the last one only ends the one before
    trainer = Trainer(
        accelerator="cpu",
        max_steps=all_steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = [size.random_batch() for _ in range(all_steps)]
    trainer.fit(LanguageModel(size), DataLoader(batches, batch_size=None))

    seconds = [end - start for start, end in pairwise(stopwatch.times)]
    measured = range(WARM_UP_STEPS, WARM_UP_STEPS + steps)
    if every_n_steps is None:
        return median(seconds[step] for step in measured)
    captures = range(0, all_steps, every_n_steps)
    if len(monitor.history) != len(captures):
        raise RuntimeError(f"There were {len(monitor.history)} captures, not {len(captures)}.")
    capture_seconds = median(seconds[step] for step in measured if step in captures)
    if every_n_steps == 1:
        return capture_seconds
    other_seconds = median(seconds[step] for step in measured if step not in captures)
    return other_seconds + (capture_seconds - other_seconds) / every_n_steps


def training_rows(effort: Effort) -> Iterator[Row]:
    for name, size in SIZES.items():
        setting = f"{name} LM: {size}"
        progress(f"training steps of the {setting}")
        # A run is compared with one of the same length: its first steps may be faster or slower than later ones.
        default = ratios(
            lambda size=size: step_seconds(size, DEFAULT_CADENCE),
            {"default": lambda size=size: step_seconds(size, DEFAULT_CADENCE, DEFAULT_CADENCE)},
            # What is looked for is as small as the noise of short steps, of which many rounds are cheap.
            max(effort.rounds, 7) if name == "demo" else effort.rounds,
        )["default"]
        every_step = ratios(
            lambda size=size: step_seconds(size, effort.steps),
            {
                "not spectral": lambda size=size: step_seconds(size, effort.steps, 1, NOT_SPECTRAL),
                "all": lambda size=size: step_seconds(size, effort.steps, 1),
            },
            effort.rounds,
        )
        yield default.row("training step, `AttentionMonitor()`", setting, "plain step", goal(1.01), at_most(1.03))
        yield heat_map_row(size, setting, default.baseline_seconds)
        yield every_step["not spectral"].row(
            "training step, `every_n_steps=1`, all but spectral statistics", setting, "plain step", goal(1.10)
        )
        yield every_step["all"].row("training step, `every_n_steps=1`, all statistics", setting, "plain step")


def heat_map_row(size: Size, setting: str, step_seconds: float) -> Row:
    """What TensorBoard's heat maps add. The runs above have no logger, so that disks are not measured."""
    model = LanguageModel(size)
    observer = AttentionObserver(model)
    with observer:
        model.training_step(size.random_batch(), 0)
    snapshot = observer.snapshot()
    seconds = seconds_of(lambda: [heat_map(snapshot, name) for name in snapshot.statistics], calls=1)
    ratio = 1 + seconds / (HEAT_MAP_CADENCE * step_seconds)
    return Row(
        f"training step, the heat maps of all statistics every {HEAT_MAP_CADENCE} steps alone",
        setting,
        f"plain step, {1000 * step_seconds:.3g} ms",
        f"× {ratio:.3f}",
        "",
        judged(ratio, at_most(1.03)),
    )


# --- One call ---------------------------------------------------------------------------------------------------------


def random_call(sequences: int, tokens: int, is_causal: bool, logit_std: float = 1.0) -> AttentionCall:
    """A call whose logits have a given standard deviation: 1 at the start of training, 50 in a run that is lost."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sequences, HEADS, tokens, WIDTH, generator=generator) for _ in range(3))
    return AttentionCall(
        site="attention",
        query=query * logit_std,
        key=key,
        value=value,
        scale=1 / math.sqrt(WIDTH),
        visibility=Visibility(causal_offset=0 if is_causal else None),
        self_attention=True,
    )


def is_causal(call: AttentionCall) -> bool:
    return call.visibility.causal_offset is not None


def described(call: AttentionCall) -> str:
    kind = "causal" if is_causal(call) else "full"
    return f"{kind}, n = {call.queries}, {call.heads} heads, {counted(call.sequences, 'sequence')}"


def fused_forward(call: AttentionCall) -> Tensor:
    return functional.scaled_dot_product_attention(
        call.query, call.key, call.value, is_causal=is_causal(call), scale=call.scale
    )


def statistics_of(call: AttentionCall, names: Sequence[str]) -> Sums:
    """The package's own way."""
    return measure(call, [known_statistics()[name] for name in names], spectral_sequences=1)


def dense_formulas(call: AttentionCall) -> dict[str, Tensor]:
    """The one-pass statistics as one would write them down, on whole matrices, for self-attention without padding."""
    logits_BHNM = call.query @ call.key.transpose(-1, -2) * call.scale
    visible_NM = torch.ones(call.queries, call.keys, dtype=torch.bool)
    if is_causal(call):
        visible_NM = visible_NM.tril()
    count_N = visible_NM.sum(-1)
    several_N = count_N >= 2  # rows with a choice
    masked_BHNM = logits_BHNM.masked_fill(~visible_NM, -torch.inf)
    weights_BHNM = masked_BHNM.softmax(-1)
    log_weights_BHNM = masked_BHNM.log_softmax(-1).masked_fill(~visible_NM, 0)
    entropy_BHN = -(weights_BHNM * log_weights_BHNM).sum(-1)
    visible_logits_BHNM = logits_BHNM.masked_fill(~visible_NM, 0)
    centred_BHNM = visible_logits_BHNM - visible_logits_BHNM.sum(-1, keepdim=True) / count_N[:, None]
    variance_BHN = centred_BHNM.square().masked_fill(~visible_NM, 0).sum(-1) / count_N
    diagonal_BHN = weights_BHNM.diagonal(dim1=-2, dim2=-1)

    def over_rows(values_BHN: Tensor, counted_N: Tensor = several_N) -> Tensor:
        return values_BHN[..., counted_N].mean((0, 2))

    return {
        "entropy": over_rows(entropy_BHN / count_N.log()),
        "kl_to_uniform": over_rows(count_N.log() - entropy_BHN),
        "max_logit": masked_BHNM.amax((0, 2, 3)),
        "logit_std": over_rows(variance_BHN.sqrt()),
        "max_weight": over_rows(weights_BHNM.amax(-1)),
        "sink_strength": over_rows(weights_BHNM[..., 0], torch.arange(call.queries) > 0),
        "sink_rate": (weights_BHNM.mean(-2)[..., 0] > 0.3).float().mean(0),
        "self_weight": over_rows(diagonal_BHN, count_N >= 1),
        "non_finite_share": over_rows((~logits_BHNM.isfinite().all(-1)).float(), count_N >= 1),
        "hidden_row_share": over_rows((count_N == 0).expand_as(entropy_BHN).float(), count_N >= 0),
    }


def check_dense_formulas() -> None:
    """Refuse to compare the times of different things."""
    for causal in (True, False):
        call = random_call(2, 192, causal)
        expected = dense_formulas(call)
        snapshot = Snapshot.from_sums(0, {call.site: statistics_of(call, ONE_PASS)}, ONE_PASS)
        for name, values_H in zip(ONE_PASS, snapshot.values, strict=True):
            torch.testing.assert_close(values_H.float(), expected[name].float(), equal_nan=True)


def seconds_of(function: Callable[[], object], calls: int) -> float:
    """The median time of a call, after one that warms up."""
    function()
    times = [time.perf_counter()]
    for _ in range(calls):
        function()
        times.append(time.perf_counter())
    return median(end - start for start, end in pairwise(times))


def call_rows(effort: Effort) -> Iterator[Row]:
    check_dense_formulas()
    for tokens, sequences in ((1024, 4), (4096, 1)):
        for causal in (True, False):
            yield from one_pass_rows(random_call(sequences, tokens, causal), effort)
    yield sharp_row(effort)
    for causal in (True, False):
        yield from spectral_rows(random_call(1, 2048, causal), effort)


def one_pass_rows(call: AttentionCall, effort: Effort) -> Iterator[Row]:
    setting = described(call)
    progress(f"statistics of one call ({setting})")
    ways = {
        "one pass": lambda: statistics_of(call, ONE_PASS),
        "two walks": lambda: statistics_of(call, ONE_PASS + SECOND_WALK),
        "not spectral": lambda: statistics_of(call, NOT_SPECTRAL),
        "dense": lambda: dense_formulas(call),
    }
    found = _ratios_of_call(call, ways, effort)
    yield found["one pass"].row("one-pass statistics of a call", setting, "fused forward", goal(3))
    yield found["two walks"].row(f"one-pass statistics and {code(SECOND_WALK)}", setting, "fused forward")
    yield found["not spectral"].row("all but spectral statistics", setting, "fused forward")
    yield found["dense"].row("one-pass statistics by dense formulas", setting, "fused forward")


def sharp_row(effort: Effort) -> Row:
    call = random_call(4, 1024, is_causal=True, logit_std=SHARP)
    setting = f"{described(call)}, sharp (`logit_std` {SHARP:g})"
    progress(f"statistics of one call ({setting})")
    found = _ratios_of_call(call, {"one pass": lambda: statistics_of(call, ONE_PASS)}, effort)
    return found["one pass"].row("one-pass statistics of a call", setting, "fused forward", goal(3))


def spectral_rows(call: AttentionCall, effort: Effort) -> Iterator[Row]:
    setting = described(call)
    progress(f"spectral statistics of one call ({setting})")
    ways = {
        "singular values": lambda: statistics_of(call, SINGULAR),
        "spectral": lambda: statistics_of(call, SPECTRAL),
    }
    found = _ratios_of_call(call, ways, effort)
    yield found["singular values"].row(f"{code(SINGULAR)} of a call", setting, "fused forward", goal(16))
    yield found["spectral"].row(f"{code(SPECTRAL)} of a call", setting, "fused forward")


def _ratios_of_call(call: AttentionCall, others: dict[str, Callable[[], object]], effort: Effort) -> dict[str, Ratio]:
    return ratios(
        lambda: seconds_of(lambda: fused_forward(call), effort.calls),
        {name: lambda other=other: seconds_of(other, effort.calls) for name, other in others.items()},
        effort.rounds,
    )


# --- Memory -----------------------------------------------------------------------------------------------------------

MEMORY_TOKENS = 8192


def extra_megabytes(tokens: int, names: Sequence[str]) -> float:
    """How far measuring one call raises this process's memory above what it held with the call's own tensors.

    For a fresh process, whose peak so far is low.
    """
    statistics_of(random_call(1, 160, is_causal=True), names)  # loads libraries and starts threads
    call = random_call(1, tokens, is_causal=True)
    with contextlib.suppress(AttributeError):  # only the GNU library has it
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process still holds would be used again unseen
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far; where forbidden, it counts as well
    before = _status_bytes("VmRSS")
    statistics_of(call, names)
    return (_status_bytes("VmHWM") - before) / 1e6


def _status_bytes(field: str) -> int:
    """A figure of this process from Linux.

    `resource.getrusage` would not do: its peak also covers the parent, whose memory a new process has until it loads
    its own program.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024 * int(value.removesuffix("kB"))
    raise LookupError(field)


def memory_rows() -> Iterator[Row]:
    matrix_megabytes = HEADS * MEMORY_TOKENS**2 * 4 / 1e6
    setting = f"causal, n = {MEMORY_TOKENS}, {HEADS} heads, {counted(1, 'sequence')}"
    for measured, names in (("all but spectral statistics", NOT_SPECTRAL), ("all statistics", ALL)):
        progress(f"peak memory of measuring one call ({setting}; {measured})")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh_process:
            megabytes = fresh_process.submit(extra_megabytes, MEMORY_TOKENS, names).result()
        yield Row(
            f"peak extra memory of measuring a call, {measured}",
            setting,
            f"dense matrices, {matrix_megabytes:.0f} MB each",
            f"{megabytes:.0f} MB",
            "",
            judged(megabytes, at_most(128)),
        )


# --- The command ------------------------------------------------------------------------------------------------------


def machine() -> str:
    """What it was measured on, in one line."""
    versions = f"torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()}"
    return f"{versions}; {_processor()}, {counted(torch.get_num_threads(), 'thread')}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def legend(effort: Effort) -> str:
    return (
        f"Medians of {counted(effort.rounds, 'round')}. *One-pass*: {code(ONE_PASS)}. "
        f"In a second walk over the rows: {code(SECOND_WALK)}. Spectral, of one sequence: {code(SPECTRAL)}."
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what watching attention costs, as a Markdown table.")
    parser.add_argument("--quick", action="store_true", help="repeat little: to see that it runs, not to be quoted")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table to a file too")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    effort = QUICK if given.quick else THOROUGH
    # Each of dozens of short runs would introduce itself.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.pytorch")
    rows = [*training_rows(effort), *call_rows(effort), *memory_rows()]
    text = "\n".join([machine(), "", HEADER, *map(str, rows), "", legend(effort)])
    print(text)
    if given.output is not None:
        given.output.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
