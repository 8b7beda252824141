"""Joining the sums of all ranks, in two collectives of a fixed shape.

Every rank packs what it found into two tensors that are laid out alike everywhere: one whose entries add, one of which
the largest entries count. The second one also holds what ranks tell each other. A rank with news, such as a site that
the layout has no place for, raises a flag in it; all ranks see that, exchange their news, and pack again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import NamedTuple
from weakref import ReferenceType, ref
from zlib import crc32

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_attn.capture.report import AttentionWarning, Messages
from lightning_attn.joined_ranks import JoinedRanks, WhoJoins
from lightning_attn.layout import Layout
from lightning_attn.statistics.measure import Sums
from lightning_attn.statistics.statistic import Statistic


class _Found(NamedTuple):
    """What this rank found, and was asked for."""

    sums: Mapping[str, Sums]
    statistics: Sequence[type[Statistic]]

    @property
    def heads(self) -> dict[str, int]:
        return {site: sums.heads for site, sums in self.sums.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(statistic.name for statistic in self.statistics)


class _Signals(NamedTuple):
    """What ranks tell each other with every capture."""

    have_news: bool
    ask_alike: bool
    smallest_step: int
    failed: set[str]
    ran: list[str]


class _News(NamedTuple):
    """What a rank tells the others when one of them has news."""

    heads: dict[str, int]
    statistics: tuple[str, ...]
    numbers: int
    messages: list[tuple[str, str]]


class RankReduction:
    """Joins the sums of all ranks and remembers the layout from capture to capture.

    In the steady state a capture costs one ``all_reduce(MAX)`` and one ``all_reduce(SUM)``, whatever the number of
    sites, heads and statistics. A new site, a statistic that is asked for the first time, or something to be said,
    costs one exchange more. A process that joins with nobody calls none.

    Args:
        process_group: who joins; see `JoinedRanks`.

    Raises:
        ValueError: if that is not allowed.
    """

    def __init__(self, process_group: WhoJoins = None) -> None:
        JoinedRanks.of(process_group)  # refuses at once what is not allowed
        #: Who joins. May be replaced between two snapshots.
        self.process_group = process_group
        self._layout = Layout()
        self._agreed_in: ReferenceType[dist.ProcessGroup] | None = None
        self._told_of_steps = False
        #: The step of the capture: the next call replaces it by the largest of all ranks.
        self.step = 0
        #: Numbers to agree on, as many on every rank: the next call replaces each by the largest of all ranks.
        self.numbers: list[float] = []

    @property
    def ranks(self) -> JoinedRanks:
        """The ranks that join at present."""
        return JoinedRanks.of(self.process_group)

    def __call__(
        self,
        found: Mapping[str, Sums],
        statistics: Sequence[type[Statistic]],
        quiet: set[str],
        device: torch.device,
        messages: Messages | None = None,
    ) -> dict[str, Sums]:
        """Join the sums of all ranks. Every rank calls this, also one that found nothing.

        Args:
            found: this rank's sums of each site.
            statistics: the statistics, the same on every rank.
            quiet: sites that failed on this rank; those that failed on another are added.
            device: where the collectives run.
            messages: what this rank has to say; what another rank says is taken out.

        Returns:
            The joined sums of each site that ran on some rank, on the CPU.

        Raises:
            ValueError: on every rank, if they were not asked for the same.
            RuntimeError: if not all ranks came.
        """
        mine = _Found(found, statistics)
        messages = Messages() if messages is None else messages
        self._begin(mine)
        ratios, maxima = self._layout.packed(found, statistics, device)
        signals, maxima = self._join_maxima(mine, maxima, quiet, messages)
        if signals.have_news or not signals.ask_alike:
            before = self._layout
            self._exchange_news(mine, quiet, messages)
            if self._layout != before:
                ratios, maxima = self._layout.packed(found, statistics, device)
                signals, maxima = self._join_maxima(mine, maxima, quiet, messages)
        ratios = self._reduced(ratios, dist.ReduceOp.SUM)
        quiet.update(signals.failed)
        self._warn_of_steps(signals.smallest_step)
        joined = self._layout.unpacked(ratios, maxima, statistics)
        return {site: joined[site] for site in signals.ran if site not in quiet}

    def _begin(self, mine: _Found) -> None:
        """Alone, know at once what there is to know; with others than before, forget what was agreed."""
        group = self.ranks.group
        if group is None:
            self._layout = Layout(self._layout.heads).joined(mine.heads, mine.statistics, len(self.numbers))
            self._agreed_in = None
        elif self._agreed_in is None or self._agreed_in() is not group:
            self._layout, self._agreed_in = Layout(), ref(group)

    def _join_maxima(
        self, mine: _Found, maxima: Tensor, quiet: set[str], messages: Messages
    ) -> tuple[_Signals, Tensor]:
        """What ranks tell each other, and the largest entries of all ranks."""
        layout, sites = self._layout, self._layout.sites
        has_room = layout.has_room(mine.heads, mine.statistics, len(self.numbers))
        has_news = self.ranks.are_several and (bool(messages.held) or not has_room)  # alone there is nobody to tell
        asked = crc32(repr((mine.names, len(self.numbers))).encode())
        says = [has_news, self.step, -self.step, asked, -asked]
        flags = [*(site in quiet for site in sites), *(site in mine.sums for site in sites)]
        numbers = (self.numbers + [-torch.inf] * layout.numbers)[: layout.numbers]
        told = torch.tensor([*says, *flags, *numbers], dtype=maxima.dtype).to(maxima.device)
        joined = self._reduced(torch.cat([told, maxima]), dist.ReduceOp.MAX)
        said, flagged, agreed, maxima = joined.split([len(says), len(flags), len(numbers), len(maxima)])
        self.numbers = [*agreed.tolist(), *self.numbers[len(numbers) :]][: len(self.numbers)]
        have_news, step, minus_smallest, asked, minus_asked = said.tolist()
        self.step = int(step)
        failed, ran = flagged.bool().view(2, len(sites)).tolist()
        signals = _Signals(
            have_news=bool(have_news),
            ask_alike=asked == -minus_asked,
            smallest_step=-int(minus_smallest),
            failed=set(compress(sites, failed)),
            ran=list(compress(sites, ran)),
        )
        return signals, maxima

    def _exchange_news(self, mine: _Found, quiet: set[str], messages: Messages) -> None:
        """Agree on the layout and on who says what; a site on whose heads ranks disagree is given up by all."""
        ranks = self.ranks
        news = [_News(mine.heads, mine.names, len(self.numbers), list(messages.held))] * ranks.size
        with self._expecting_all(ranks):
            dist.all_gather_object(news, news[0], group=ranks.group)
        _refuse_other_requests(news)
        counts: dict[str, set[int]] = {}
        for of_rank in news:
            for site, heads in of_rank.heads.items():
                counts.setdefault(site, set()).add(heads)
        for of_rank in news:
            largest = {site: max(counts[site]) for site in of_rank.heads}
            self._layout = self._layout.joined(largest, mine.statistics, of_rank.numbers)
        for site in counts:
            if len(counts[site]) > 1 and site not in quiet:
                quiet.add(site)
                if ranks.is_first:
                    counted = " and ".join(map(str, sorted(counts[site])))
                    _warn(f"Ranks count {counted} heads at {site!r}; it is not watched.")
        messages.share([of_rank.messages for of_rank in news], ranks.rank)

    def _reduced(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """A tensor joined over all ranks, on the CPU."""
        ranks = self.ranks
        if not ranks.are_several:
            return tensor.cpu()
        with self._expecting_all(ranks):
            dist.all_reduce(tensor, op=operation, group=ranks.group)
            return tensor.cpu()

    @contextmanager
    def _expecting_all(self, ranks: JoinedRanks) -> Iterator[None]:
        """Say in words of the owner of the run what it means that a collective fails."""
        try:
            yield
        except RuntimeError as error:  # those of torch.distributed and of every backend are
            raise RuntimeError(
                f"The attention statistics of step {self.step} cannot be joined, since not all of the {ranks.size} "
                f"ranks came to join them; this is rank {ranks.rank} of these. The usual reasons: ranks have different "
                "numbers of batches; an exception on another rank, which is what to look at then; "
                "`trainer.should_stop` or `on_train_batch_start` returning -1 on one rank only; the callback is on "
                "some ranks only; or, without a Trainer, `snapshot` called on some ranks only or inside torch's "
                f"`Join`. Cause: {error}"
            ) from error

    def _warn_of_steps(self, smallest: int) -> None:
        if smallest != self.step and not self._told_of_steps:
            self._told_of_steps = True
            if self.ranks.is_first:
                _warn(
                    f"Ranks are out of step: a capture is of step {smallest} on one and of step {self.step} on "
                    "another, and counts as one of the latter. They have different numbers of batches, or an optimiser "
                    "stepped on some ranks only."
                )


def _refuse_other_requests(news: Sequence[_News]) -> None:
    """Refuse to join what was not asked for alike.

    Raises:
        ValueError: if ranks were asked for different statistics, or by different numbers of callbacks.
    """
    first = news[0]
    for rank, of_rank in enumerate(news):
        if of_rank.statistics != first.statistics:
            raise ValueError(
                "All ranks must ask for the same statistics in the same order, but rank 0 asks for "
                f"{list(first.statistics)}, and rank {rank} for {list(of_rank.statistics)}."
            )
        if of_rank.numbers != first.numbers:
            raise ValueError(
                f"All ranks must have the same callbacks, but {first.numbers} of them watch this step on rank 0, and "
                f"{of_rank.numbers} on rank {rank}."
            )


def _warn(message: str) -> None:
    warnings.warn(message, AttentionWarning, stacklevel=2)
