"""Tables for TensorBoard's text, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_attn.statistics.description import table
from lightning_attn.statistics.registry import known_statistics
from lightning_attn.transition import Transition

_DIRECTIONS = {"positional_to_semantic": "positional → semantic", "semantic_to_positional": "semantic → positional"}


def statistics_table(names: Iterable[str]) -> str:
    """What statistics are and how to read them.

    Args:
        names: the statistics; those that are not registered are left out.
    """
    known = known_statistics()
    return table(known[name] for name in names if name in known)


def transitions_table(transitions: Mapping[tuple[str, int], Transition | None]) -> str:
    """The heads that went over from position to content or back, and how many did not.

    Args:
        transitions: for each site and head its transition, ``None`` where there is none.
    """
    found = {place: transition for place, transition in transitions.items() if transition is not None}
    if not found:
        return f"**None**: no head of {len(transitions)} went over from position to content, or back."
    lines = ["| site | head | step | direction | certainty | before → after |", "|---|---|---|---|---|---|"]
    for (site, head), transition in sorted(found.items(), key=lambda item: (item[1].step, item[0])):
        lines.append(
            f"| `{site}` | {head} | {transition.step} | {_DIRECTIONS[transition.direction]} "
            f"| {transition.certainty:.3f} | {transition.before:.2f} → {transition.after:.2f} |"
        )
    return "\n".join([*lines, "", f"None in the other {len(transitions) - len(found)} of {len(transitions)} heads."])
