"""Clipping the heads of a model, site by site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_attn.capture.met import Met
from lightning_attn.capture.module_tree import modules_of
from lightning_attn.capture.sites import SiteNames, SitePatterns
from lightning_attn.clipping.clipped_site import ClippedSite
from lightning_attn.clipping.head_clip import HeadClip
from lightning_attn.clipping.key_layouts import key_guesses
from lightning_attn.clipping.key_projection import KeyProjection
from lightning_attn.joined_ranks import WhoJoins
from lightning_attn.temperature.agreement import Finding, agreed
from lightning_attn.temperature.layouts import is_norm
from lightning_attn.temperature.projection import QueryProjection
from lightning_attn.temperature.scaling import ChannelScale, ReadsScaled
from lightning_attn.temperature.search import Surrounding, met_in, search

# Why a site is left alone.
_NORMALISED = (
    "its queries are normalised after their projection, so that the size of its weights does not matter to the logits"
)
_SOFT_CAPPED = "its logits are soft-capped, which bounds them already"
_FROZEN = "its query projection is frozen"
_SERVES_OTHERS = "its queries are made by a module that makes those of other sites too"
_HAS_TEMPERATURES = "AdaptiveTemperature divides its queries already; give the two callbacks different `sites`"
# Why its queries are clipped alone.
_NO_KEYS = "it was not proven which weights make its keys and nothing else, or they must not be changed"
_SHARED_BY_HEADS = "its keys are shared by several heads"
_SHARED_BY_SITES = "its keys are made by a module that makes those of other sites too"


class AttentionClip:
    """Multiplies the weights that make a head's queries and keys by a factor where its logits were too large.

    It is done in place, and nothing is put on the model. It needs no Trainer. Where the queries and keys of a site are
    made is found from its modules and proven by running them again as they were met in a forward pass (`find`).

    Args:
        model: the model.
        sites: glob patterns over `named_modules()` names; ``None`` for all.
        process_group: with which ranks the same must be found; see `AttentionObserver`.

    Raises:
        ValueError: if a pattern matches no module of the model.

    Example:
        >>> layer = nn.MultiheadAttention(16, num_heads=2, batch_first=True)
        >>> before = layer.in_proj_weight.detach().clone()
        >>> tokens = torch.randn(3, 5, 16)
        >>> clip = AttentionClip(layer)
        >>> clip.find(lambda: layer(tokens, tokens, tokens))
        >>> clips = clip.clips(step=1, max_logits={"(root)": [250.0, 60.0]}, threshold=100.0)
        >>> [(one.head, round(one.query_factor, 6), round(one.key_factor, 6)) for one in clips]
        [(0, 0.632456, 0.632456)]
        >>> clip.apply(clips)
        >>> (layer.in_proj_weight != before).any(-1).nonzero()[:, 0].tolist()  # the queries and keys of head 0
        [0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23]
    """

    def __init__(
        self, model: nn.Module, sites: str | Sequence[str] | None = None, process_group: WhoJoins = None
    ) -> None:
        self.model = model
        self._patterns = SitePatterns(sites)
        self._patterns.check(SiteNames(model))
        self._process_group = process_group
        #: The sites whose heads can be clipped.
        self.sites: dict[str, ClippedSite] = {}
        #: Why those of other sites cannot.
        self.refused: dict[str, str] = {}

    def find(self, run: Callable[[], Any]) -> None:
        """Find where the queries and keys of every site are made.

        Args:
            run: runs the model forward.
        """
        self.find_among(met_in(self.model, self._patterns, run))

    def find_among(self, met: Mapping[str, Met], surrounding: Surrounding = ExitStack) -> set[str]:
        """Find where the queries and keys of sites are made that were met.

        Every rank must come, with the sites that it has met.

        Args:
            met: the modules by their sites.
            surrounding: makes the context in which they run again, as of their precision.

        Returns:
            The sites whose queries cannot be told now, since they are zero, but may be later.
        """
        wanted = [
            one
            for site, one in met.items()
            if self._patterns.match(site) and site not in self.sites and site not in self.refused
        ]
        queries = agreed({one.site: self._queries(one, surrounding) for one in wanted}, self._process_group)
        found = [one for one in wanted if queries[one.site].projection is not None]
        keys = agreed({one.site: self._keys(one, queries[one.site], surrounding) for one in found}, self._process_group)
        for site, finding in queries.items():
            if finding.projection is not None:
                self._add(site, finding, keys[site])
            elif not finding.is_for_later:
                self.refused[site] = finding.reason
        self._leave_alone_what_serves_several()
        return {site for site, finding in queries.items() if finding.is_for_later}

    def leave_divided(self) -> None:
        """Leave those sites alone from now on whose queries `AdaptiveTemperature` has come to divide."""
        for site, held in list(self.sites.items()):
            if _has_temperatures(held.queries.module):
                del self.sites[site]
                self.refused[site] = _HAS_TEMPERATURES

    def clips(
        self, step: int, max_logits: Mapping[str, Sequence[float | None]], threshold: float, alpha: float = 0.5
    ) -> list[HeadClip]:
        """What is to be done so that no head's largest logit exceeds a threshold.

        Args:
            step: the optimiser step, which the records carry.
            max_logits: the largest logit of each head, by sites.
            threshold: the largest that is left alone. A head without a finite logit is left alone too.
            alpha: the part of a factor that queries take, as an exponent; keys take the rest.
        """
        return [
            clip
            for site, held in self.sites.items()
            for clip in held.clips(step, max_logits.get(site, ()), threshold, alpha)
        ]

    def apply(self, clips: Sequence[HeadClip]) -> None:
        """Do it: multiply the weights of each of these heads, and of no other."""
        for site, held in self.sites.items():
            of_site = [clip for clip in clips if clip.site == site]
            if of_site:
                held.apply(of_site)

    def state_dict(self) -> dict[str, Any]:
        """What was found, in plain values and tensors."""
        return {"sites": [held.to_dict() for held in self.sites.values()], "refused": dict(self.refused)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was found, as far as this model has it."""
        self.refused = dict(state["refused"])
        for values in state["sites"]:
            try:
                held = ClippedSite.from_dict(values, self.model)
            except AttributeError:  # another model, or the part of one
                continue
            self.sites[held.site] = held

    def _queries(self, met: Met, surrounding: Surrounding) -> Finding:
        if any(map(_has_temperatures, modules_of(met.module))):
            return Finding(reason=_HAS_TEMPERATURES)
        finding = search(met, self.model, surrounding)
        if finding.projection is None:
            return finding
        projection = QueryProjection.from_dict(finding.projection, self.model)
        if projection.kind == "shared" or is_norm(projection.module):
            return Finding(reason=_NORMALISED)
        if finding.is_soft_capped:
            return Finding(reason=_SOFT_CAPPED)
        if _is_frozen(projection):
            return Finding(reason=_FROZEN)
        return finding

    def _keys(self, met: Met, queries: Finding, surrounding: Surrounding) -> Finding:
        assert queries.projection is not None
        projection = QueryProjection.from_dict(queries.projection, self.model)

        def guesses(*of_site: Any) -> Iterator[KeyProjection]:
            # Where logits are written out, nothing but its name tells queries from keys: each makes them smaller.
            return (guess for guess in key_guesses(*of_site) if not guess.overlaps(projection))

        return search(met, self.model, surrounding, guesses)

    def _add(self, site: str, of_queries: Finding, of_keys: Finding) -> None:
        assert of_queries.projection is not None
        # Otherwise a part of the logits is of queries and of keys that are made elsewhere: DeepSeek's rotary ones.
        has_same_bias = of_keys.bias_std.shape == of_queries.bias_std.shape and torch.allclose(
            of_keys.bias_std, of_queries.bias_std, rtol=1e-2, atol=1e-6, equal_nan=True
        )
        try:
            queries = QueryProjection.from_dict(of_queries.projection, self.model)
            keys, reason = None, _NO_KEYS
            if of_keys.projection is not None and has_same_bias:
                keys = KeyProjection.from_dict(of_keys.projection, self.model)
                reason = _SHARED_BY_HEADS if keys.is_shared_by_heads else _NO_KEYS if _is_frozen(keys) else ""
        except AttributeError:  # it is another rank's, as in a pipeline
            return
        largest_bias = tuple(of_queries.largest_bias.nan_to_num().tolist())
        self.sites[site] = ClippedSite(site, queries, None if reason else keys, reason, largest_bias)

    def _leave_alone_what_serves_several(self) -> None:
        """A factor for a head of one site would also be one of a head of another."""
        of_queries = Counter(held.queries.name for held in self.sites.values())
        of_keys = Counter(held.keys.name for held in self.sites.values() if held.keys is not None)
        for site, held in list(self.sites.items()):
            if of_queries[held.queries.name] > 1:
                del self.sites[site]
                self.refused[site] = _SERVES_OTHERS
            elif held.keys is not None and of_keys[held.keys.name] > 1:
                self.sites[site] = replace(held, keys=None, reason=_SHARED_BY_SITES)


def _is_frozen(projection: QueryProjection) -> bool:
    return not all(projection.tensor(part).requires_grad for part in projection.parameters)


def _has_temperatures(module: nn.Module) -> bool:
    is_divided = any(isinstance(hook, ChannelScale) for hook in module._forward_hooks.values())
    return issubclass(type(module), ReadsScaled) or is_divided
