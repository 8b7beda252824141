"""Keeping the attention calls of a forward pass, to look at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_attn.capture.call import AttentionCall
from lightning_attn.capture.capture import Capture
from lightning_attn.capture.description import heads, seen_keys, source
from lightning_attn.capture.passes import PassesOfSites
from lightning_attn.capture.reader import check_sequences
from lightning_attn.capture.report import SiteFaults, warn_of_nothing
from lightning_attn.capture.sites import SiteNames, SitePatterns
from lightning_attn.table import aligned


@dataclass
class Recording:
    """The attention calls of a forward pass.

    Args:
        calls: in the order in which they were made. Their tensors are copies.
    """

    calls: list[AttentionCall] = field(default_factory=list)

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that made calls, in the order of their first one."""
        return tuple(dict.fromkeys(call.site for call in self.calls))

    def __getitem__(self, site: str) -> list[AttentionCall]:
        """The calls of one site.

        Raises:
            KeyError: if the site made none.
        """
        calls = [call for call in self.calls if call.site == site]
        if not calls:
            raise KeyError(f"{site!r} made no call; these sites did: {list(self.sites)}")
        return calls

    def table(self) -> str:
        """What each site does, for printing: its calls and heads, which keys they see, and what they were read from.

        Calls of a site that differ in that have a line each.
        """
        lines: dict[tuple[str, ...], int] = {}
        for call in self.calls:
            line = (call.site, heads(call), f"{call.queries} × {call.keys}", seen_keys(call), source(call))
            lines[line] = lines.get(line, 0) + 1
        head = ("site", "calls", "heads", "queries × keys", "see", "read from")
        return "\n".join(aligned([head, *((site, f"{n}", *rest) for (site, *rest), n in lines.items())], "<>><<<"))

    def __str__(self) -> str:
        return self.table()


@contextmanager
def record(
    model: nn.Module, sites: str | Sequence[str] | None = None, max_sequences: int | None = None
) -> Iterator[Recording]:
    """Record the attention calls that a model makes while the block runs.

    Each call holds the queries, keys and values as they entered the attention function (after rotary embedding and
    normalisation), its scale and its visibility, copied; a call costs the memory of these tensors. Of attention that is
    written out with a softmax it holds the logits (`logit_matrix`) in the place of queries and keys. The model is not
    changed.

    Args:
        model: the model that runs inside the block.
        sites: glob patterns over `named_modules()` names; ``None`` for all.
        max_sequences: keep the first so many sequences of each call; ``None`` for all.

    Yields:
        The recording, filled as the model runs.

    Raises:
        ValueError: if a pattern matches no module, or ``max_sequences`` is not positive.

    Example:
        >>> import torch
        >>> layer = torch.nn.MultiheadAttention(16, num_heads=2, batch_first=True)
        >>> tokens = torch.randn(3, 5, 16)
        >>> with record(layer) as recording:
        ...     output, _ = layer(tokens, tokens, tokens, need_weights=False)
        >>> recording.calls[0].weights().shape
        torch.Size([3, 2, 5, 5])
        >>> print(recording)
        site    calls  heads  queries × keys  see       read from
        (root)      1      2           5 × 5  all keys  queries and keys of width 8
    """
    patterns = SitePatterns(sites)
    check_sequences(max_sequences=max_sequences)
    patterns.check(SiteNames(model))
    recording, faults, passes = Recording(), SiteFaults(), PassesOfSites()

    def keep(call: AttentionCall) -> None:
        recording.calls.append(call.map_tensors(torch.clone))  # a cache of keys may be overwritten later
        if not passes.is_next_head(call):
            passes.begin(call)

    with Capture(model, keep, sites=patterns, max_sequences=max_sequences, with_values=True, faults=faults):
        yield recording
    for site in sorted(passes.pooled - faults.in_pieces):  # pieces that are left out are pooled by nobody
        faults.report_pooled(site)
    recording.calls = [call for call in recording.calls if not faults.is_piece(call)]
    if not recording.calls and not faults.reported:
        warn_of_nothing(model, patterns)
