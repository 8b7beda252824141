"""Tables in TensorBoard's text."""

from __future__ import annotations

from tensorboard.plugin_util import markdown_to_safe_html

from lightning_attn import Transition
from lightning_attn.tensorboard import transitions_table

LATE = Transition(3000, "semantic_to_positional", 0.95, 0.1, 0.85)
EARLY = Transition(1500, "positional_to_semantic", 0.999, 0.9049, 0.3)


def test_the_table_names_each_head_in_the_order_of_steps() -> None:
    table = transitions_table({("a", 0): None, ("blocks.1", 3): LATE, ("blocks.0", 1): EARLY, ("a", 1): None})
    assert table.splitlines() == [
        "| site | head | step | direction | certainty | before → after |",
        "|---|---|---|---|---|---|",
        "| `blocks.0` | 1 | 1500 | positional → semantic | 0.999 | 0.90 → 0.30 |",
        "| `blocks.1` | 3 | 3000 | semantic → positional | 0.950 | 0.10 → 0.85 |",
        "",
        "None in the other 2 of 4 heads.",
    ]


def test_none_is_said_plainly() -> None:
    text = transitions_table({("a", 0): None, ("a", 1): None})
    assert text == "**None**: no head of 2 went over from position to content, or back."


def test_tensorboard_shows_a_table_with_the_names_as_they_are() -> None:
    shown = markdown_to_safe_html(transitions_table({("__init__.*x*.a_b_c<i>", 0): EARLY}))
    assert shown.count("<tr>") == 2
    assert "<code>__init__.*x*.a_b_c&lt;i&gt;</code>" in shown
    piped = markdown_to_safe_html(transitions_table({("a|b", 0): EARLY}))
    assert piped.count("<td") == 6
    assert "<code>a|b</code>" in piped
