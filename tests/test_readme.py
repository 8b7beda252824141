"""The README says what the code does."""

from __future__ import annotations

from pathlib import Path

from lightning_attn.statistics import known_statistics

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_table_of_statistics_is_the_registry() -> None:
    expected = [
        f"| `{name}` | {s.range}{'' if s.unit == '1' else ' ' + s.unit} | {s.uniform} | {s.reading} |"
        for name, s in known_statistics().items()
    ]
    header = "| name | range | uniform attention | how to read it |\n|---|---|---|---|\n"
    table = README.split(header)[1].split("\n\n")[0]
    assert table.splitlines() == expected


def test_every_example_is_listed() -> None:
    section = README.split("## Examples\n")[1].split("\n## ")[0]
    examples = [path.name for path in (ROOT / "examples").iterdir() if path.is_file()]
    assert [name for name in examples if f"`{name}`" not in section] == []
