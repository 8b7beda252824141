"""The README says what the code does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_of_functions_and_metrics_runs() -> None:
    section = README.split("## Functions and metrics\n")[1].split("\n## ")[0]
    code = section.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert 0 < names["entropy"].compute() < 1


def test_every_example_is_listed() -> None:
    section = README.split("## Examples\n")[1].split("\n## ")[0]
    examples = [path.name for path in (ROOT / "examples").iterdir() if path.is_file()]
    assert [name for name in examples if f"`{name}`" not in section] == []
