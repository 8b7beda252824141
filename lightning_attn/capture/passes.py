"""Which calls of a site belong to one forward pass: the heads of a loop over them, or several attentions."""

from __future__ import annotations

from lightning_attn.capture.call import AttentionCall


class PassesOfSites:
    """Tells calls that loop over the heads of a site from several attentions that it computes in one forward pass."""

    def __init__(self) -> None:
        self._loops: dict[str, tuple[int | None, ...]] = {}
        self._last: dict[str, int | None] = {}
        #: The sites of which one forward pass made several calls that were no loop over heads.
        self.pooled: set[str] = set()

    def is_next_head(self, call: AttentionCall) -> bool:
        """Whether a call is that of the next head of the loop that its site is in."""
        return self._loops.get(call.site) == _shape_of(call)

    def begin(self, call: AttentionCall) -> bool:
        """Begin with a call that is no next head; whether it may be the first of a loop."""
        last, self._last[call.site] = self._last.get(call.site), call.forward
        if call.forward is not None and call.forward == last:
            self.pooled.add(call.site)
        self.end_loop(call.site)
        is_first = call.heads == 1 and call.is_of_all_tokens
        if is_first:
            self._loops[call.site] = _shape_of(call)
        return is_first

    def end_loop(self, site: str) -> None:
        """End the loop that a site may be in, as where its module returns."""
        self._loops.pop(site, None)


def _shape_of(call: AttentionCall) -> tuple[int | None, ...]:
    return call.forward, call.sequences, call.heads, call.queries, call.keys
