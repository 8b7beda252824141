"""Finding the queries of the sites that are met while a model trains, and saying whose are not found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from lightning_attn.capture.met import Met
from lightning_attn.temperature.attention_temperature import AttentionTemperature

#: So many captures are tried at a site whose queries cannot be told, as when they are zero at first.
_TRIES = 10


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
        self._met: dict[str, Met] = {}
        self._reported: set[str] = set()

    def meet(self, met: Met) -> None:
        """Remember a module that computes attention, as it was met, until the end of its batch."""
        self._met.setdefault(met.site, met)

    def forget(self) -> None:
        """Let go of what was met."""
        self._met = {}

    def settle(
        self,
        temperature: AttentionTemperature,
        seen: Iterable[str],
        surrounding: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Find the queries of what was met, and say whose cannot be found; every rank must come.

        Args:
            temperature: is attached to what is found.
            seen: the sites of the capture, the same on all ranks.
            surrounding: see `AttentionTemperature.find_among`.
        """
        seen = list(seen)
        if self.is_on:
            met, self._met = self._met, {}
            later = temperature.find_among(met, surrounding)
            for site in seen:
                self._tries[site] = self._tries.get(site, 0) + 1
            for site in later:
                if self._tries.get(site, 0) == _TRIES:
                    self._say(f"{site}: its queries could not be told in {_TRIES} captures; its temperature stays 1.")
            self._say_what_is_refused(temperature, later)
        settled = temperature.sites.keys() | (temperature.refused.keys() & self._tries.keys())
        unsettled = {site: self._tries.get(site, 0) for site in (*self._tries, *seen) if site not in settled}
        unsettled |= {site: self._tries.get(site, 0) for site in temperature.refused if site in self._later}
        self.is_on = any(tries < _TRIES for tries in unsettled.values())

    def state_dict(self) -> dict[str, Any]:
        """What was tried, and said."""
        return {"is_on": self.is_on, "tries": dict(self._tries), "reported": sorted(self._reported)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self.is_on = state["is_on"]
        self._tries = dict(state["tries"])
        self._reported = set(state["reported"])
