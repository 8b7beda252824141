"""docs/distributed.md has the tables that its command prints, where they do not depend on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_page_has_what_the_benchmark_prints() -> None:
    command = [sys.executable, "benchmarks/distributed.py", "--only", "payload,paper"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = [line for line in ended.stdout.splitlines() if line.startswith("|")]
    assert len(rows) > 15
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in rows if row not in page] == [], f"put the tables of `{' '.join(command[1:])}` into the page"
