"""The temperatures of a model's attention, site by site and head by head."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lightning_attn.capture.met import Met
from lightning_attn.capture.sites import SiteNames, SitePatterns
from lightning_attn.capture.spread import is_spread
from lightning_attn.joined_ranks import WhoJoins
from lightning_attn.temperature.agreement import Finding, agreed
from lightning_attn.temperature.layouts import likely
from lightning_attn.temperature.projection import QueryProjection
from lightning_attn.temperature.proof import Proven
from lightning_attn.temperature.refusals import refusal
from lightning_attn.temperature.search import Surrounding, met_in, paths_of, search
from lightning_attn.temperature.site_temperature import SiteTemperature


class AttentionTemperature:
    """Divides the queries of every head by a temperature of its own: ``softmax(Q Kᵀ / (τ √d) + bias) V``.

    It needs no Trainer. Where the queries of a site are made is found from its modules and proven by running them again
    as they were met in a forward pass (`find`). While it is attached the parameters are what is trained, and state
    dicts are those of an ordinary model that computes the same; when it is detached, the model is that model.

    Args:
        model: the model.
        sites: glob patterns over `named_modules()` names; ``None`` for all.
        process_group: with which ranks the same must be found; see `AttentionObserver`.

    Raises:
        ValueError: if a pattern matches no module of the model.

    Example:
        >>> layer = nn.MultiheadAttention(16, num_heads=2, batch_first=True)
        >>> tokens = torch.randn(3, 5, 16)
        >>> temperature = AttentionTemperature(layer)
        >>> temperature.find(lambda: layer(tokens, tokens, tokens))
        >>> temperature.set_temperatures("(root)", [1.0, 4.0])
        >>> hot, _ = layer(tokens, tokens, tokens)
        >>> temperature.detach()
        >>> torch.allclose(hot, layer(tokens, tokens, tokens)[0], atol=1e-6)
        True
    """

    def __init__(
        self, model: nn.Module, sites: str | Sequence[str] | None = None, process_group: WhoJoins = None
    ) -> None:
        self.model = model
        self._patterns = SitePatterns(sites)
        self._patterns.check(SiteNames(model))
        self._process_group = process_group
        self._copies: list[nn.Module] = []
        #: The sites whose temperatures can be set.
        self.sites: dict[str, SiteTemperature] = {}
        #: Why the temperatures of other sites cannot be.
        self.refused: dict[str, str] = {}
        #: The sites whose projection is a guess still.
        self.guessed: set[str] = set()

    def __getitem__(self, site: str) -> list[float]:
        """The temperature of each head of a site."""
        return self.sites[site].temperatures

    @property
    def is_spread(self) -> bool:
        """Whether ranks have divided parameters that temperatures are written into among each other."""
        held = (held.projection for held in self.sites.values())
        return any(is_spread(projection.tensor(part)) for projection in held for part in projection.parameters)

    def set_temperatures(self, site: str, temperatures: float | Sequence[float]) -> None:
        """Change the temperatures of a site: one for all its heads, or one for each.

        Raises:
            KeyError: if its temperatures cannot be set.
            ValueError: if they are not positive, or not as many as the site can have.
        """
        held = self.sites[site]
        given = torch.as_tensor(temperatures, dtype=torch.float64)
        count = len(held.log_temperatures)
        if given.dim() and len(given) != count:
            raise ValueError(f"`temperatures` of {site!r} must be one number or {count} of them, got {len(given)}.")
        if not bool((given > 0).all() & given.isfinite().all()):
            raise ValueError(f"`temperatures` must be positive and finite, got {temperatures!r}.")
        held.set(given.log().expand(count).clone())

    def find(self, run: Callable[[], Any]) -> None:
        """Find where the queries of every site are made, and attach to it.

        Args:
            run: runs the model forward, in training mode or not.
        """
        self.find_among(met_in(self.model, self._patterns, run))

    def find_among(self, met: Mapping[str, Met], surrounding: Surrounding = ExitStack) -> set[str]:
        """Find where the queries of sites are made that were met, and attach to it.

        Every rank must come, with the sites that it has met.

        Args:
            met: the modules by their sites.
            surrounding: makes the context in which they run again, as of their precision.

        Returns:
            The sites whose queries cannot be told now, since they are zero, but may be later.
        """
        wanted = [
            found
            for site, found in met.items()
            if self._patterns.match(site) and (site not in self.sites or site in self.guessed)
        ]
        former = {site: self.sites[site].log_temperatures for site in self.guessed & met.keys()}
        for site in former:
            self.drop_guess(site)
        found = agreed({one.site: search(one, self.model, surrounding) for one in wanted}, self._process_group)
        self._attach(self._held_by(found))
        for site in former.keys() & self.sites.keys():
            held = self.sites[site]
            held.set(former[site].mean().expand_as(held.log_temperatures).clone())
        return {site for site, finding in found.items() if finding.is_for_later}

    def _held_by(self, found: Mapping[str, Finding]) -> Iterator[SiteTemperature]:
        """The sites whose queries were found and can be divided."""
        owners = {held.projection.name: site for site, held in self.sites.items()}
        for site, finding in found.items():
            if finding.projection is None:
                self.refused[site] = finding.reason
                continue
            try:
                projection = QueryProjection.from_dict(finding.projection, self.model)
            except AttributeError:  # it is another rank's, as in a pipeline
                continue
            owner = owners.setdefault(projection.name, site)
            if owner != site:
                self.refused[site] = f"its query projection is also that of {owner!r}, whose temperature it has"
                continue
            self.refused.pop(site, None)
            yield SiteTemperature(site, Proven(projection, finding.bias_std))

    def guess(self) -> None:
        """Attach to what very probably makes the queries of modules, before any has run.

        It serves temperatures that all heads share, for the steps until `find` proves what is true.
        """
        names = SiteNames(self.model)
        paths = paths_of(self.model)
        guessed = []
        for module in paths:
            site = names[module]
            projection = likely(module, paths) if self._patterns.match(site) and site not in self.sites else None
            if projection is not None and refusal(projection, self.model) is None:
                guessed.append(SiteTemperature(site, Proven(projection, torch.zeros(projection.temperatures))))
        self._attach(guessed)
        self.guessed |= {held.site for held in guessed}

    def drop_guess(self, site: str) -> None:
        """Leave a site alone again whose projection is a guess still."""
        held = self.sites.pop(site)
        held.set(torch.zeros_like(held.log_temperatures))
        held.detach()
        self.guessed.remove(site)

    def follow(self, copies: Sequence[nn.Module]) -> None:
        """Have other models have the same temperatures, which are averages of this one."""
        self._copies = list(copies)
        for held in self.sites.values():
            held.attach(self._copies)

    def fold(self) -> dict[str, str]:
        """Write the temperatures into the parameters, and leave nothing behind, but where that cannot be.

        Returns:
            The sites whose temperatures stay attached, with the reason: there is nothing to write them into, or their
            module was proven to give something else with it.
        """
        left = {site: reason for site, held in self.sites.items() if (reason := held.fold())}
        self.sites = {site: self.sites[site] for site in left}
        return left

    def detach(self) -> None:
        """Write the temperatures into the parameters, and leave nothing behind on the model."""
        for held in self.sites.values():
            held.detach()
        self.sites.clear()

    def state_dict(self) -> dict[str, Any]:
        """What goes on with the temperatures after a restart, to the last digit; all ranks must ask."""
        return {site: {**held.state_dict(), "is_guessed": site in self.guessed} for site, held in self.sites.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Go on with temperatures whose model has been loaded.

        Returns:
            The sites whose weights are not those that belong to the temperatures; theirs are one.
        """
        others = []
        for site, of_site in state.items():
            if site not in self.sites:
                try:
                    self._attach([SiteTemperature.from_state(site, of_site, self.model)])
                except AttributeError:  # another model
                    others.append(site)
                    continue
            if of_site["is_guessed"]:
                self.guessed.add(site)
            if not self.sites[site].load_state_dict(of_site):
                others.append(site)
        return others

    def _attach(self, sites: Iterable[SiteTemperature]) -> None:
        attached = {held.site: held for held in sites}
        if attached and "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # what was compiled before would never call a new hook
        self.sites |= attached
        for held in attached.values():
            held.attach(self._copies)
