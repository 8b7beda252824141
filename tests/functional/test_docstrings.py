"""What functions tell about themselves has one form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from lightning_attn import functional

#: Those that give what others are computed of, or several statistics, each of which has a source of its own.
WITHOUT_SOURCE = {"attention_call", "attention_statistics"}


@pytest.mark.parametrize("function", functional.WRITTEN, ids=lambda function: function.__name__)
def test_a_docstring_has_its_sections_in_order(function: Callable[..., Any]) -> None:
    text = inspect.getdoc(function) or ""
    sections = ["\nArgs:\n", "\nReturns:\n", "\nRaises:\n", "\nSource: ", "\nExample:\n    >>> "]
    if function.__name__ in WITHOUT_SOURCE:
        sections.remove("\nSource: ")
    places = [text.find(section) for section in sections]
    assert -1 not in places and places == sorted(places), dict(zip(sections, places, strict=True))
    assert "(..., " not in text, "write (…, N, M)"
    arguments = text.split("\nArgs:\n")[1].split("\nReturns:\n")[0]
    for name in inspect.signature(function).parameters:
        assert f"    {name}: " in arguments, name
