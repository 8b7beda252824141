"""Finding the queries of the sites that are met while a model trains, and saying whose are not found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning_attn.capture.met import Met
from lightning_attn.temperature.attention_temperature import AttentionTemperature

#: So many captures are tried at a site whose queries cannot be told, as when they are zero at first.
_TRIES = 10
_UNFOLDABLE = (
    "cannot be saved: its queries come from a norm without a gain, into which no temperature can be written. Load it "
    "for inference with `lightning_attn.temperature.load_temperatures(model, checkpoint)`, or give the norm a gain"
)


class TemperatureSearch:
    """Looks for the queries of sites in one capture after another, until it is settled for each where they are made.

    Args:
        report: says something aloud; each message is said once in a run.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        #: Whether the next capture is to be searched.
        self.is_on = True
        self._tries: dict[str, int] = {}
        self._settled: set[str] = set()
        self._told: set[str] = set()
        self._met: dict[str, Met] = {}

    def meet(self, met: Met) -> None:
        """Remember a module that computes attention, as it was met, until the end of its batch."""
        self._met.setdefault(met.site, met)

    def forget(self) -> None:
        """Let go of what was met."""
        self._met = {}

    def settle(
        self,
        temperature: AttentionTemperature,
        seen: Sequence[str],
        surrounding: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Find the queries of what was met, and say whose cannot be found; every rank must come.

        Args:
            temperature: is attached to what is found.
            seen: the sites of the capture, the same on all ranks.
            surrounding: see `AttentionTemperature.find_among`.
        """
        if self.is_on:
            met, self._met = self._met, {}
            wanted = {site: one for site, one in met.items() if site in seen}
            later = temperature.find_among(wanted, surrounding)
            for site in seen:
                self._tries[site] = self._tries.get(site, 0) + 1
            refused = {site: why for site, why in temperature.refused.items() if site not in later}
            self._settled |= temperature.sites.keys() | refused.keys()
            self._say(temperature, refused, later)
        unsettled = (self._tries.keys() | set(seen)) - self._settled
        self.is_on = any(self._tries.get(site, 0) < _TRIES for site in unsettled)

    def state_dict(self) -> dict[str, Any]:
        """What was tried, found and said."""
        return {
            "is_on": self.is_on,
            "tries": dict(self._tries),
            "settled": sorted(self._settled),
            "told": sorted(self._told),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self.is_on = state["is_on"]
        self._tries = dict(state["tries"])
        self._settled = set(state["settled"])
        self._told = set(state["told"])

    def _say(self, temperature: AttentionTemperature, refused: Mapping[str, str], later: Collection[str]) -> None:
        by_reason: dict[str, list[str]] = {}
        for site, reason in refused.items():
            by_reason.setdefault(f"stays 1: {reason}", []).append(site)
        for site in later:
            if self._tries.get(site, 0) == _TRIES:
                reason = f"stays 1: in {_TRIES} captures {temperature.refused[site]}"
                by_reason.setdefault(reason, []).append(site)
        unfoldable = [site for site, held in temperature.sites.items() if not held.is_foldable]
        by_reason[_UNFOLDABLE] = unfoldable
        for reason, sites in by_reason.items():
            new = [site for site in sites if site not in self._told]
            if new:
                self._told.update(new)
                self._report(f"the temperature of {some(new)} {reason}.")


def some(sites: Sequence[str]) -> str:
    """A few of several sites by name, and how many more there are."""
    return ", ".join(sites[:3]) + (f" and {len(sites) - 3} more" if len(sites) > 3 else "")
