"""Early warnings in words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby

from lightning_attn.table import aligned
from lightning_attn.warning.early_warning import SEVERITIES, EarlyWarning
from lightning_attn.warning.rules import built_in_rules

#: The page that explains each rule under a heading of its name.
PAGE = "docs/early-warning.md"


def worst_first(warnings: Sequence[EarlyWarning]) -> list[EarlyWarning]:
    """Warnings by how bad they are: by severity, then by what will be crossed soonest or is crossed farthest."""
    return sorted(
        warnings,
        key=lambda warning: (
            -SEVERITIES.index(warning.severity),
            warning.predicted_step if warning.predicted_step is not None else -1,
            -abs(warning.value - (warning.limit or 0.0)),
        ),
    )


def message(warnings: Sequence[EarlyWarning], is_first: bool = True) -> str:
    """What a rule found, as one message however many heads it is about.

    Args:
        warnings: of one rule, at least one.
        is_first: whether the rule speaks for the first time, and explains itself.

    Returns:
        What, where, since when and how fast; what follows; what to try; where to read more.

    Example:
        >>> print(
        ...     message(
        ...         [
        ...             EarlyWarning(
        ...                 step=120,
        ...                 rule="logit_growth",
        ...                 severity="warning",
        ...                 site="blocks.2",
        ...                 head=3,
        ...                 statistic="logit_std",
        ...                 value=18.4,
        ...                 limit=25.0,
        ...                 since=110,
        ...                 slope=0.31,
        ...                 predicted_step=142,
        ...                 meaning="The logits grow and do not level off.",
        ...                 remedy="lower the learning rate",
        ...             )
        ...         ]
        ...     )
        ... )
        Step 120, warning, logit_growth: head 3 of blocks.2 has logit_std 18.4, rising by 31 per 100 steps.
        Going on like this it passes 25 at about step 142. The logits grow and do not level off.
        What to try: lower the learning rate. More: docs/early-warning.md#logit_growth
    """
    first = worst_first(warnings)[0]
    found = f"Step {first.step}, {first.severity}, {first.rule}: {_found(first)}{_others(warnings, first)}."
    forecast = ""
    if first.predicted_step is not None and first.limit is not None:
        if first.predicted_step > first.step:
            forecast = f"Going on like this it passes {first.limit:.3g} at about step {first.predicted_step}. "
        else:
            forecast = f"It has passed {first.limit:.3g}. "
    if not is_first:
        return f"{found} {forecast}".strip()
    lines = [found, f"{forecast}{first.meaning}".strip()]
    remedy = f"What to try: {first.remedy.rstrip('.')}. " if first.remedy else ""
    more = f"More: {PAGE}#{first.rule}" if first.rule in _explained() else ""
    lines.append(f"{remedy}{more}".strip())
    return "\n".join(line for line in lines if line)


def summary(warnings: Sequence[EarlyWarning]) -> str:
    """All that was found in a run, one line for each rule: first when, how often, and the worst place.

    Example:
        >>> summary([])
        'Early warnings: none.'
    """
    if not warnings:
        return "Early warnings: none."
    rows = [("rule", "severity", "first at step", "times", "worst place", "statistic", "value")]
    by_rule = {
        rule: list(of_rule)
        for rule, of_rule in groupby(sorted(warnings, key=lambda warning: warning.rule), lambda warning: warning.rule)
    }
    for of_rule in sorted(by_rule.values(), key=lambda of_rule: min(warning.step for warning in of_rule)):
        worst = worst_first(of_rule)[0]
        rows.append(
            (
                worst.rule,
                worst.severity,
                str(min(warning.step for warning in of_rule)),
                str(len(of_rule)),
                worst.place,
                worst.statistic,
                f"{worst.value:.4g}",
            )
        )
    return "\n".join(["Early warnings:", *aligned(rows, "<<>><<>")])


@cache
def _explained() -> set[str]:
    """The rules that the page is about."""
    return {rule.name for rule in built_in_rules()}


def _found(warning: EarlyWarning) -> str:
    if warning.heads is not None:
        where = f" of {warning.site}" if warning.scope == "site" else ""
        many = f"{warning.heads} of {warning.of_heads} heads{where}"
        worst = f"head {warning.head}" if where else _place(warning)
        if warning.limit is None:
            return f"{many}; {worst} is the worst: {warning.statistic} {warning.value:.3g}{_pace(warning)}"
        return (
            f"{many} have {warning.statistic} {_beyond(warning)}{_since(warning)}; "
            f"{worst} is farthest with {warning.value:.3g}{_pace(warning)}"
        )
    beyond = ""
    if warning.predicted_step is None:
        beyond = (f", {_beyond(warning)}" if warning.limit is not None else "") + _since(warning)
    return f"{_place(warning)} has {warning.statistic} {warning.value:.3g}{beyond}{_pace(warning)}"


def _beyond(warning: EarlyWarning) -> str:
    assert warning.limit is not None
    return f"{'above' if warning.value > warning.limit else 'below'} {warning.limit:.3g}"


def _since(warning: EarlyWarning) -> str:
    return f" since step {warning.since}" if warning.since is not None and warning.since < warning.step else ""


def _place(warning: EarlyWarning) -> str:
    if warning.site is None:
        return "the mean of all heads"
    return warning.site if warning.head is None else f"head {warning.head} of {warning.site}"


def _pace(warning: EarlyWarning) -> str:
    """How fast it goes, where it goes at all."""
    change = 100 * (warning.slope or 0.0)
    if abs(change) <= 0.001 * abs(warning.value):
        return ""
    return f", {'rising' if change > 0 else 'falling'} by {abs(change):.3g} per 100 steps"


def _others(warnings: Sequence[EarlyWarning], first: EarlyWarning) -> str:
    """How many places are as bad as the first one, and how many not quite."""
    if first.scope == "model":
        return ""
    places = {_identity(warning) for warning in warnings} - {_identity(first)}
    alike = {_identity(warning) for warning in warnings if warning.limit == first.limit} - {_identity(first)}
    text = ""
    if alike:
        sites = {site for site, _ in alike} | {first.site}
        spread = f" at {len(sites)} sites" if first.head is not None and first.heads is None and len(sites) > 1 else ""
        text = f"; so {'has' if len(alike) == 1 else 'have'} {len(alike)} more {_kind(first, len(alike))}{spread}"
    less = len(places - alike)
    return text + (f"; {less} more {'is' if less == 1 else 'are'} beyond a lower limit" if less else "")


def _identity(warning: EarlyWarning) -> tuple[str | None, int | None]:
    """What a warning is about: where heads of a site are counted, the site."""
    return warning.site, None if warning.scope == "site" else warning.head


def _kind(warning: EarlyWarning, count: int) -> str:
    return ("head" if warning.scope == "head" else "site") + ("" if count == 1 else "s")
