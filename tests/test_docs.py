"""The pages in docs/ say what the code says, and lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])

#: What stands in a message for what only the moment knows.
BLANK = "…"


def texts() -> list[str]:
    """Every string of the package, with a blank for what is put into it."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(text(part) for part in node.values)
        return str(node.value) if isinstance(node, ast.Constant) else BLANK

    trees = [ast.parse(path.read_text()) for path in (ROOT / "lightning_attn").rglob("*.py")]
    return [text(node) for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.JoinedStr, ast.Constant))]


def test_every_message_of_the_page_is_one_of_the_package() -> None:
    page = (ROOT / "docs" / "which_attention.md").read_text()
    rows = page.split("| message | what it means | way out |\n|---|---|---|\n")[1].splitlines()
    messages = [
        message.strip().replace(f"`{BLANK}`", BLANK) for row in rows for message in row.split("|")[1].split(";")
    ]
    assert len(messages) > 15
    plain = [text.replace("`", "") for text in texts()]
    for message in messages:
        pattern = re.compile(".*".join(re.escape(part) for part in message.replace("`", "").split(BLANK)))
        assert any(pattern.search(text) for text in plain), f"no message says {message!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target!r}"
