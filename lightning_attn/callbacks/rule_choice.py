"""Which rules are held against a run, in the words of users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_attn.warning.rule import Rule
from lightning_attn.warning.rules import built_in_rules


def chosen_rules(rules: Rule | Sequence[Rule] | None, without: str | Sequence[str] | None) -> list[Rule]:
    """The built-in rules without those that are left out or replaced, and the user's own.

    Args:
        rules: the user's own.
        without: names of built-in rules that are left out; ``"all"`` for all of them.

    Raises:
        ValueError: if something is no rule, two have one name, a name is unknown, or none is left.
    """
    own = _listed(rules, Rule)
    for rule in own:
        if not isinstance(rule, Rule):
            raise ValueError(f"`rules` must be instances of lightning_attn.warning.Rule, got {rule!r}.")
    names = [rule.name for rule in own]
    if len(set(names)) < len(names):
        raise ValueError(f"`rules` must have different names, got {names}.")
    built_in = built_in_rules()
    left_out = _listed(without, str)
    known = [rule.name for rule in built_in]
    for name in left_out:
        if name not in [*known, "all"]:
            raise ValueError(f"`without` must hold names of built-in rules, {known}, or be 'all', got {name!r}.")
    kept = [] if "all" in left_out else [rule for rule in built_in if rule.name not in [*left_out, *names]]
    if not own and not kept:
        raise ValueError(
            f"`rules` and `without` leave no rule, got {rules!r} and {without!r}; give one to `rules`, or leave the "
            "callback out."
        )
    return [*kept, *own]


def _listed(given: object, kind: type) -> list[Any]:
    """One thing or several as a list; what is neither is alone in it, and refused by who knows what is allowed."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) and not isinstance(given, kind) else [given]
