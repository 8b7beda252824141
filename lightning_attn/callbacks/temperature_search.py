"""Finding the queries of the sites that are met while a model trains, and saying whose are not found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning_attn.callbacks.site_search import TRIES, SiteSearch
from lightning_attn.capture.met import Met
from lightning_attn.temperature.attention_temperature import AttentionTemperature

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
        self._search = SiteSearch()
        self._told: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether the next capture is to be searched."""
        return self._search.is_on

    def meet(self, met: Met) -> None:
        """Remember a module that computes attention, as it was met, until the end of its batch."""
        self._search.meet(met)

    def forget(self) -> None:
        """Let go of what was met."""
        self._search.forget()

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
        if not self._search.is_on:
            self._search.notice(seen)
            return
        later: set[str] = set()

        def find(met: Mapping[str, Met]) -> set[str]:
            later.update(temperature.find_among({site: met[site] for site in met if site in seen}, surrounding))
            return later

        looked_for = [*seen, *(site for site in sorted(temperature.guessed) if site not in seen)]
        given_up = self._search.look(
            looked_for, find, lambda: (temperature.sites.keys() - temperature.guessed) | temperature.refused.keys()
        )
        self._say(temperature, later, given_up)
        for site in sorted(temperature.guessed):
            if self._search.gives_up(site):
                temperature.drop_guess(site)
                self._report(f"{site} computed no attention in {TRIES} captures; its temperature is 1 until it does.")

    def state_dict(self) -> dict[str, Any]:
        """What was tried and said."""
        return {"search": self._search.state_dict(), "told": sorted(self._told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self._search.load_state_dict(state["search"])
        self._told = set(state["told"])

    def _say(self, temperature: AttentionTemperature, later: Collection[str], given_up: Collection[str]) -> None:
        by_reason: dict[str, list[str]] = {}
        for site, reason in temperature.refused.items():
            if site in given_up:
                by_reason.setdefault(f"stays 1: in {TRIES} captures {reason}", []).append(site)
            elif site not in later:
                by_reason.setdefault(f"stays 1: {reason}", []).append(site)
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
