"""benchmarks/gpu_check.py on the CPU: what it says, and that it fails where something is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPT = str(BENCHMARKS / "gpu_check.py")
ON_TWO_RANKS = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]

#: Has the script find everything too far from the truth.
WRONG = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu_check
gpu_check.TOLERANCES["32-true"] = -1.0
sys.exit(gpu_check.main())
"""

pytestmark = pytest.mark.slow


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, *arguments, "--device", "cpu", "--precision", "32-true"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)


def verdicts(printed: str) -> dict[str, str]:
    """The result of each strategy."""
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    return {row[0].removeprefix("| "): row[2] for row in rows[1:]}


def test_every_strategy_that_runs_here_tells_the_truth_and_changes_no_loss() -> None:
    ended = run(*ON_TWO_RANKS, SCRIPT)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert verdicts(ended.stdout) == {
        "DDP": "OK",
        "DDP, static graph": "OK",
        "DDP, compiled": "OK",
        "FSDP": "skipped: needs GPUs",
        "FSDP2": "OK",
        "FSDP2, compiled": "OK",
        "TP": "OK",
        "TP × FSDP2": "skipped: needs 4 ranks or more, an even number",
        "DeepSpeed stage 2": "skipped: needs GPUs",
        "DeepSpeed stage 3": "skipped: needs GPUs",
    }
    assert ended.stdout.count("the same |") == 6


def test_it_ends_with_an_error_where_a_cell_differs() -> None:
    ended = run("-c", WRONG, "--only", "static")
    assert ended.returncode == 1, ended.stderr[-3000:]
    assert verdicts(ended.stdout) == {"DDP, static graph": "differs"}


def test_unknown_cells_are_refused() -> None:
    ended = run(SCRIPT, "--only", "DDQ")
    assert ended.returncode == 2
    assert "'DDQ' is in none of DDP, DDP, static graph" in ended.stderr
