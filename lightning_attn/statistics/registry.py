"""Every statistic by its name."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TypeVar

from lightning_attn.statistics.statistic import Statistic

_STATISTICS: dict[str, type[Statistic]] = {}

_SomeStatistic = TypeVar("_SomeStatistic", bound=type[Statistic])


def register(statistic: _SomeStatistic) -> _SomeStatistic:
    """Make a statistic known by its name: to be logged, drawn and asked for.

    Args:
        statistic: a subclass of `Statistic` with a ``name``.

    Raises:
        ValueError: if another statistic has that name.
    """
    known = _STATISTICS.setdefault(statistic.name, statistic)
    if known is not statistic:
        raise ValueError(
            f"There is a statistic named {statistic.name!r} already, {known.__module__}.{known.__qualname__}."
        )
    return statistic


def known_statistics() -> dict[str, type[Statistic]]:
    """Every statistic by its name, in alphabetical order. Each file of this package may register some."""
    _import_files()
    return dict(sorted(_STATISTICS.items()))


def is_per_site(name: str) -> bool:
    """Whether a statistic is one value of a site, rather than one of each head, as an unknown name is."""
    _import_files()
    statistic = _STATISTICS.get(name)
    return statistic is not None and statistic.per == "site"


def resolve(names: str | Sequence[str] | None) -> tuple[type[Statistic], ...]:
    """The statistics of some names.

    Args:
        names: one name or several; ``None`` for those that are computed by default, ``"all"`` for every one.

    Raises:
        ValueError: if there is no name, or one that no statistic has.
    """
    known = known_statistics()
    if names is None:
        return tuple(statistic for statistic in known.values() if statistic.by_default)
    if names == "all":
        return tuple(known.values())
    wanted = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else ()
    if not wanted:
        raise ValueError(f"`statistics` must name at least one statistic, or be None or 'all', got {names!r}.")
    for name in wanted:
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"`statistics` holds {name!r}, which is none of {list(known)}.{hint}")
    return tuple(known[name] for name in dict.fromkeys(wanted))


@cache
def _import_files() -> None:
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
