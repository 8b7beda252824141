"""What was found at each site of a model since the last snapshot."""

from __future__ import annotations

from lightning_attn.capture.call import AttentionCall
from lightning_attn.capture.head_share import HeadShare
from lightning_attn.capture.passes import PassesOfSites
from lightning_attn.capture.refusals import OTHER_HEADS_OF_RANK, UnreadableError
from lightning_attn.statistics.measure import Sums


class Findings:
    """The sums of each site, in the order in which sites ran."""

    def __init__(self) -> None:
        self._order: dict[str, None] = {}
        self._sums: dict[str, Sums] = {}
        #: What was found of the heads of loops that have not ended.
        self._loops: dict[str, list[Sums]] = {}
        self._passes = PassesOfSites()
        #: Which of each site's heads this rank computes; ``None`` where it is all of them.
        self._shares: dict[str, HeadShare | None] = {}

    def meet(self, site: str) -> None:
        """Remember when a site ran, whatever comes of it."""
        self._order.setdefault(site)

    def add(self, call: AttentionCall, found: Sums) -> None:
        """Add what was found of a call.

        Raises:
            UnreadableError: if the site has other heads now.
        """
        if self._shares.setdefault(call.site, call.share) != call.share:
            raise OTHER_HEADS_OF_RANK.error()
        if self._passes.is_next_head(call):
            self._loops[call.site].append(found)
            return
        self.end_loop(call.site)
        if self._passes.begin(call):
            self._loops[call.site] = [found]
        else:
            self._join(call.site, found)

    def end_loop(self, site: str) -> None:
        """End the loop over heads that a site may have been in.

        Raises:
            UnreadableError: if the site has other heads now.
        """
        self._passes.end_loop(site)
        heads = self._loops.pop(site, None)
        if heads is not None:
            self._join(site, Sums.side_by_side(heads))

    @property
    def pooled(self) -> set[str]:
        """The sites of which one forward pass made several calls that were no loop over heads."""
        return self._passes.pooled

    @property
    def sites_in_loops(self) -> list[str]:
        """The sites whose loops over heads have not ended."""
        return list(self._loops)

    def of(self, site: str) -> Sums | None:
        """What was found at a site."""
        return self._sums.get(site)

    def all(self) -> dict[str, Sums]:
        """What was found at every site, with a place for the heads of other ranks where they share a site."""
        return {site: self._among_all_heads(site) for site in self._order if site in self._sums}

    def _among_all_heads(self, site: str) -> Sums:
        sums, share = self._sums[site], self._shares[site]
        return sums if share is None else sums.among_heads(*share.of_heads(sums.heads))

    def _join(self, site: str, found: Sums) -> None:
        share = self._shares[site]
        if share is not None:
            share.of_heads(found.heads)  # raises, if these are none
        known = self._sums.get(site)
        if known is not None and known.heads != found.heads:
            raise UnreadableError(
                f"it ran with {known.heads} heads and again with {found.heads} before one snapshot, "
                "so that the heads of its calls cannot be matched; take a snapshot after each, or choose `sites` "
                "without it"
            )
        self._sums[site] = found if known is None else known.joined(found)
