"""The page of what is seen of which model is made of the cells."""

from __future__ import annotations

from support.page import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `python tests/support/page.py`"
