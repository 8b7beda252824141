"""Early warnings in words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from lightning_attn.table import aligned
from lightning_attn.warning.early_warning import SEVERITIES, EarlyWarning

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
    found = f"Step {first.step}, {first.severity}, {first.rule}: {_found(first)}{_others(warnings)}."
    forecast = ""
    if first.predicted_step is not None and first.limit is not None:
        if first.predicted_step > first.step:
            forecast = f"Going on like this it passes {first.limit:.3g} at about step {first.predicted_step}. "
        else:
            forecast = f"It has just passed {first.limit:.3g}. "
    if not is_first:
        return f"{found} {forecast}".strip()
    lines = [found, f"{forecast}{first.meaning}".strip()]
    remedy = f"What to try: {first.remedy}. " if first.remedy else ""
    lines.append(f"{remedy}More: {PAGE}#{first.rule}")
    return "\n".join(line for line in lines if line)


def summary(warnings: Sequence[EarlyWarning]) -> str:
    """All that was found in a run, one line for each rule: how many heads or sites, first when, and the worst of them.

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


def _found(warning: EarlyWarning) -> str:
    if warning.heads is not None:
        many = f"{warning.heads} of {warning.of_heads} heads"
        if warning.limit is None:
            return f"{many}; {_place(warning)} is the worst: {warning.statistic} {warning.value:.3g}{_pace(warning)}"
        beyond = "above" if warning.value > warning.limit else "below"
        return (
            f"{many} have {warning.statistic} {beyond} {warning.limit:.3g}; "
            f"{_place(warning)} is farthest with {warning.value:.3g}{_pace(warning)}"
        )
    limit = ""
    if warning.predicted_step is None and warning.limit is not None:
        limit = f", {'above' if warning.value > warning.limit else 'below'} {warning.limit:.3g}"
        if warning.since is not None and warning.since < warning.step:
            limit += f" since step {warning.since}"
    return f"{_place(warning)} has {warning.statistic} {warning.value:.3g}{limit}{_pace(warning)}"


def _place(warning: EarlyWarning) -> str:
    if warning.site is None:
        return "the mean of all heads"
    return warning.site if warning.head is None else f"head {warning.head} of {warning.site}"


def _pace(warning: EarlyWarning) -> str:
    if not warning.slope:
        return ""
    return f", {'rising' if warning.slope > 0 else 'falling'} by {abs(100 * warning.slope):.3g} per 100 steps"


def _others(warnings: Sequence[EarlyWarning]) -> str:
    places = {(warning.site, warning.head) for warning in warnings}
    sites = {warning.site for warning in warnings}
    if len(places) < 2:
        return ""
    more = len(places) - 1
    of_heads = any(warning.head is not None for warning in warnings)
    kind = ("head" if of_heads else "site") + ("s" if more > 1 else "")
    return f"; so have {more} more {kind}" + (f" at {len(sites)} sites" if of_heads and len(sites) > 1 else "")
