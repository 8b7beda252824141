"""How much memory measuring one attention call takes beside the call's own tensors."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from kinds import ALL, NOT_SPECTRAL
from random_calls import described, random_call, statistics_of
from table import Row, at_most, judged
from turns import Effort, progress, quartiles

TOKENS = 8192


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


def memory_rows(effort: Effort) -> Iterator[Row]:
    call = random_call(1, TOKENS, is_causal=True)
    matrix_megabytes = call.heads * TOKENS**2 * 4 / 1e6
    for measured, names in (("all but spectral statistics", NOT_SPECTRAL), ("all statistics", ALL)):
        progress(f"peak memory of measuring one call ({described(call)}; {measured})")
        low, middle, high = quartiles([_in_a_fresh_process(names) for _ in range(effort.rounds)])
        yield Row(
            f"peak extra memory of measuring a call, {measured}",
            described(call),
            f"dense matrices, {matrix_megabytes:.0f} MB each",
            f"{middle:.0f} MB",
            f"{low:.0f} – {high:.0f}",
            judged(middle, at_most(128)),
        )


def _in_a_fresh_process(names: Sequence[str]) -> float:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh_process:
        megabytes = fresh_process.submit(extra_megabytes, TOKENS, names).result()
    progress(f"  {megabytes:.0f} MB")
    return megabytes
