"""What is made of the statistics' own words is what stands in the files, and is enough."""

from __future__ import annotations

from pathlib import Path

import generate
import pytest

from lightning_attn.statistics import known_statistics
from lightning_attn.statistics.description import LENSES

PAGES = generate.pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(generate.ROOT)))
def test_a_file_is_what_the_statistics_say(path: Path) -> None:
    assert path.read_text() == PAGES[path], "`make docs` writes it"


def test_every_statistic_is_under_a_heading_of_the_page() -> None:
    for name, statistic in known_statistics().items():
        assert statistic.lens in LENSES and statistic.lens != "Others", name
        assert f"### `{name}`" in PAGES[generate.ROOT / "docs" / "statistics.md"]


def test_every_statistic_carries_what_the_pages_say() -> None:
    for name, statistic in known_statistics().items():
        assert all((statistic.unit, str(statistic.range), statistic.uniform, statistic.reading, statistic.source)), name
        assert statistic.reading.endswith("."), name


def test_the_page_is_markdown_that_needs_nothing_else() -> None:
    page = PAGES[generate.ROOT / "docs" / "statistics.md"]
    assert not any(markup in page for markup in (":math:", ".. ", "See `StateRank`"))
    assert page.count("$$\n") == 2 * page.count(r"H_i \ge \log")
