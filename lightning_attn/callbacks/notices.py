"""What AttentionMonitor has to say about what it sees, each thing once and on rank zero alone."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_warn

from lightning_attn.capture.report import AttentionWarning
from lightning_attn.capture.sites import SitePatterns
from lightning_attn.snapshot import Snapshot
from lightning_attn.statistics.logits import NonFiniteShare


class Notices:
    """Warnings, and the memory of those that were given."""

    def __init__(self) -> None:
        self._said: set[object] = set()
        self._seen: set[str] = set()

    def warn(self, message: str, once_for: object = None) -> None:
        """Say something once: once in these words, or once for a reason."""
        if (once_for or message) not in self._said:
            self._said.add(once_for or message)
            rank_zero_warn(message, category=AttentionWarning)

    def warn_of_oddities(self, snapshot: Snapshot, wanted: SitePatterns) -> None:
        """Say which of the wanted sites were never seen, and where logits are not finite."""
        for pattern in wanted.patterns:
            if any(SitePatterns(pattern).match(site) for site in snapshot.sites):
                self._seen.add(pattern)
            elif pattern not in self._seen:  # a layer that is skipped at times has run before
                self.warn(f"No attention was seen at the sites {pattern!r}; it was at {list(snapshot.sites)}.")
        if NonFiniteShare.name not in snapshot.statistics:
            return
        for site in snapshot.sites:
            share = snapshot.over_heads(site, NonFiniteShare.name)
            if share:
                self.warn(
                    f"At step {snapshot.step} attention logits at {site!r} are infinite or NaN, in {share:.1%} of the"
                    " rows of the worst head. These rows are in no other statistic.",
                    once_for=("non-finite", site),
                )
