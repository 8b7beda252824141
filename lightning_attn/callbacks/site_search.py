"""Looking for the weights of sites in the first captures of a run, for callbacks that change them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from lightning_attn.capture.met import Met

#: So many captures are tried at a site whose queries cannot be told, as when they are zero at first.
TRIES = 10


class SiteSearch:
    """Keeps the modules that a capture has met, and says when there is nothing left to look for."""

    def __init__(self) -> None:
        self._met: dict[str, Met] = {}
        self._tries: dict[str, int] = {}
        #: Whether modules that the next capture meets are wanted.
        self.is_on = True

    def meet(self, met: Met) -> None:
        """Keep a module until the end of the capture."""
        self._met.setdefault(met.site, met)

    def look(
        self,
        sites: Iterable[str],
        find: Callable[[Mapping[str, Met]], set[str]],
        settled: Callable[[], Collection[str]],
    ) -> set[str]:
        """Look among what was met.

        Args:
            sites: the sites that were seen on any rank.
            find: looks for the weights of modules, and says of which sites they cannot be told yet.
            settled: the sites of which nothing more is to be found out, after that.

        Returns:
            The sites that are given up.
        """
        met, self._met = self._met, {}
        later = find(met)
        for site in sites:
            self._tries[site] = self._tries.get(site, 0) + 1
        done = set(settled()) - later
        self.is_on = any(tries < TRIES for site, tries in self._tries.items() if site not in done)
        return {site for site in later if self._tries.get(site, 0) == TRIES}

    def gives_up(self, site: str) -> bool:
        """Whether a site was looked for as often as any is; if so, it counts as never seen from now on."""
        has_tried = self._tries.get(site, 0) >= TRIES
        if has_tried:
            del self._tries[site]
        return has_tried

    def notice(self, sites: Iterable[str]) -> None:
        """Look again where a site is seen for the first time, such as that of a layer that was skipped before."""
        self.is_on = self.is_on or any(site not in self._tries for site in sites)

    def forget(self) -> None:
        """Hold no module any more."""
        self._met.clear()

    def state_dict(self) -> dict[str, Any]:
        """What was tried, in plain values."""
        return {"tries": dict(self._tries), "is_on": self.is_on}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self._tries, self.is_on = dict(state["tries"]), state["is_on"]
