"""What a rule found, at one place and one step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from lightning_attn.warning.series import Scope

#: How bad it is: worth knowing, likely to cost loss, or the run is being lost.
Severity = Literal["info", "warning", "critical"]

SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True)
class EarlyWarning:
    """That something begins to go wrong with a head, a site or the whole model.

    Args:
        step: the optimiser step at which it was found.
        rule: name of the rule.
        severity: how bad it is.
        scope: what it is about: a head, a site, or the model as a whole.
        site: where; ``None`` for the mean of all sites. Where heads are counted, that of the worst one.
        head: which head; ``None`` for a site as a whole, or for all. Where heads are counted, the worst one.
        statistic: what tells it.
        value: of the statistic.
        limit: what it has gone beyond, or is about to; ``None`` where the rule has none.
        since: the first step from which it was as bad as that, without a break until now.
        slope: change of the value per step; ``None`` where there are too few snapshots to tell.
        predicted_step: when the limit will be crossed, going on like this; ``None`` where nothing is predicted.
        heads: how many heads are alike, where the rule counts heads; the one named is the worst.
        of_heads: out of how many.
        meaning: what follows.
        remedy: what to try.
    """

    step: int
    rule: str
    severity: Severity
    site: str | None
    head: int | None
    statistic: str
    value: float
    limit: float | None = None
    scope: Scope = "head"
    since: int | None = None
    slope: float | None = None
    predicted_step: int | None = None
    heads: int | None = None
    of_heads: int | None = None
    meaning: str = ""
    remedy: str = ""

    @property
    def place(self) -> str:
        """Site and head, for people."""
        if self.site is None:
            return "all sites"
        return self.site if self.head is None else f"{self.site} #{self.head}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name, ready for JSON and checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EarlyWarning:
        """What `to_dict` was made of; names that this version does not know are left out."""
        return cls(**{name: value for name, value in values.items() if name in cls.__dataclass_fields__})
