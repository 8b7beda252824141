"""What was found at each site of a model since the last snapshot."""

from __future__ import annotations

from lightning_attn.capture.call import AttentionCall
from lightning_attn.capture.refusals import UnreadableError
from lightning_attn.statistics.measure import Sums


class Findings:
    """The sums of each site, in the order in which sites ran."""

    def __init__(self) -> None:
        self._order: dict[str, None] = {}
        self._sums: dict[str, Sums] = {}
        self._loops: dict[str, _LoopOverHeads] = {}
        self._last: dict[str, int | None] = {}
        #: The sites of which one forward pass made several calls that were no loop over heads.
        self.pooled: set[str] = set()

    def meet(self, site: str) -> None:
        """Remember when a site ran, whatever comes of it."""
        self._order.setdefault(site)

    def add(self, call: AttentionCall, found: Sums) -> None:
        """Add what was found of a call.

        Raises:
            UnreadableError: if the site has other heads now.
        """
        loop = self._loops.get(call.site)
        if loop is not None and loop.goes_on_with(call):
            loop.heads.append(found)
            return
        last, self._last[call.site] = self._last.get(call.site), call.forward
        if call.forward is not None and call.forward == last:
            self.pooled.add(call.site)
        self.end_loop(call.site)
        if call.heads == 1 and call.is_of_all_tokens:
            self._loops[call.site] = _LoopOverHeads(call, [found])
        else:
            self._join(call.site, found)

    def end_loop(self, site: str) -> None:
        """End the loop over heads that a site may have been in.

        Raises:
            UnreadableError: if the site has other heads now.
        """
        loop = self._loops.pop(site, None)
        if loop is not None:
            self._join(site, Sums.side_by_side(loop.heads))

    @property
    def sites_in_loops(self) -> list[str]:
        """The sites whose loops over heads have not ended."""
        return list(self._loops)

    def of(self, site: str) -> Sums | None:
        """What was found at a site."""
        return self._sums.get(site)

    def all(self) -> dict[str, Sums]:
        """What was found at every site."""
        return {site: self._sums[site] for site in self._order if site in self._sums}

    def _join(self, site: str, found: Sums) -> None:
        known = self._sums.get(site)
        if known is not None and known.heads != found.heads:
            raise UnreadableError(
                f"it ran with {known.heads} heads and again with {found.heads} before one snapshot, "
                "so that the heads of its calls cannot be matched; take a snapshot after each, or choose `sites` "
                "without it"
            )
        self._sums[site] = found if known is None else known.joined(found)


class _LoopOverHeads:
    """Calls of one head each that one forward pass of a site makes one after the other: a loop over its heads."""

    def __init__(self, call: AttentionCall, heads: list[Sums]) -> None:
        self._shape = self._shape_of(call)
        self.heads = heads

    def goes_on_with(self, call: AttentionCall) -> bool:
        """Whether a call is that of the next head."""
        return self._shape_of(call) == self._shape

    @staticmethod
    def _shape_of(call: AttentionCall) -> tuple[int | None, ...]:
        return call.forward, call.sequences, call.heads, call.queries, call.keys
