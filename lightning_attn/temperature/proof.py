"""Proving that a projection makes the queries of a site, and nothing else, by running the site's module again.

A head's queries are multiplied by a number, and its logits have to be multiplied by it too: what a bias or a mask adds
stays. Shape suffixes as in `lightning_attn.capture.call`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from lightning_attn.capture.call import AttentionCall
from lightning_attn.capture.capture import Capture
from lightning_attn.capture.isolation import after_every_module, eager, unnoticed_by_fast_paths
from lightning_attn.capture.met import Met
from lightning_attn.capture.module_tree import modules_of
from lightning_attn.capture.sites import SitePatterns
from lightning_attn.temperature.held_attention import HeldAttention
from lightning_attn.temperature.layouts import is_layer
from lightning_attn.temperature.lockstep import Lockstep
from lightning_attn.temperature.projection import QueryProjection
from lightning_attn.temperature.refusals import READ_ELSEWHERE, is_adapted
from lightning_attn.temperature.scaling import ChannelScale, release, scale_outputs
from lightning_attn.temperature.unchanged import without_trace

#: So many rows of the attention matrix are looked at, the last ones, and so many sequences.
_ROWS, _SEQUENCES = 64, 2
#: By how much a logit may be off, as a share of the largest.
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
_EXACT = 1e-4
#: A factor by which nothing that is linear is rounded otherwise.
_MUCH = 64.0


class Replay:
    """Runs a module again as it was met, and sees the attention that it computes.

    Nothing is left of it: no gradient, no drawn number, no key in a cache, no other buffer or attribute.

    Args:
        met: the module.
    """

    def __init__(self, met: Met) -> None:
        self._met = met
        self.module = met.module
        self._args = tuple(None if _is_cache(value) else value for value in met.args)
        self._kwargs = {name: None if _is_cache(value) else value for name, value in met.kwargs.items()}
        #: How often it ran.
        self.count = 0

    def run(self, attention: HeldAttention) -> None:
        """Run the module while its attention is held."""
        self.count += 1
        with (
            without_trace(self._met.module),
            eager(),
            unnoticed_by_fast_paths(),
            after_every_module(attention.see_return),
            attention,
        ):
            self._met.module(*self._args, **self._kwargs)

    def __call__(self) -> list[AttentionCall]:
        """The attention calls that the module makes."""
        self.count += 1
        calls: list[AttentionCall] = []
        module = self._met.module
        capture = Capture(
            module,
            calls.append,
            sites=SitePatterns(None),
            max_sequences=_SEQUENCES,
            with_values=True,
            strict=True,
        )
        with without_trace(module), capture:
            module(*self._args, **self._kwargs)
        return calls


@dataclass(frozen=True)
class Proven:
    """What a proof has found.

    Args:
        projection: what makes the queries.
        bias_std: (H,) of all heads of the site: how far what a bias adds to a head's logits deviates, centred row by
            row; NaN for a head that another rank has.
        is_soft_capped: whether logits are not as many times smaller as queries are.
        largest_bias: (H,) the largest that a bias adds to a logit of each head, at least zero; NaN as above.
    """

    projection: QueryProjection
    bias_std: Tensor
    is_soft_capped: bool = False
    largest_bias: Tensor = field(default_factory=lambda: torch.zeros(0))


class NotNowError(Exception):
    """The site computes nothing now from which its queries could be told."""


class ReadElsewhereError(Exception):
    """A projection makes the queries, but they are more than queries."""


#: Makes projections, of the number of heads, the width of a query, and that of a value; ``None`` what is not known.
Guesses = Callable[[int, int | None, int | None], Iterable[QueryProjection]]


def prove(guesses: Guesses, replay: Replay, lockstep: Lockstep) -> Proven | None:
    """Find which of several projections makes the queries of a site; ``None`` if none does.

    Args:
        guesses: makes the projections.
        replay: runs the site's module.
        lockstep: the ranks that run it together.

    Raises:
        NotNowError: if the site makes no call, or all its queries are zero.
        ReadElsewhereError: if something else than the attention reads them.
    """
    plain = replay()
    if not lockstep.all(bool(plain)):
        raise NotNowError("it computed no attention when it was run again")
    if not lockstep.all(all(bool(_logits(call).isfinite().all()) for call in plain)):
        raise NotNowError("its logits are not finite")
    first = plain[0]
    heads = len(plain) if first.heads == 1 else first.heads
    if first.share is not None:
        heads = first.share.of_heads(first.heads)[1]
    if any(call.heads not in (1, first.heads) for call in plain):
        return None
    width, value_width = first.query.shape[-1] or None, None if first.value is None else first.value.shape[-1]
    tolerance = _TOLERANCE.get(first.query.dtype, _EXACT)
    is_zero = all(not _logits(call).any() or (width and not call.query.any()) for call in plain)
    matters: dict[nn.Module, bool] = {}
    is_read_elsewhere = False
    for projection in guesses(heads, width, value_width):
        if not matters.get(projection.module, True):
            continue
        proof = _Proof(projection, replay, lockstep, plain, heads, tolerance)
        if proof.holds():
            if proof.is_read_elsewhere():
                is_read_elsewhere = True
                continue
            if not lockstep.all(not _has_idle_layer(replay.module, projection)):
                raise NotNowError("a layer of it that may add to its queries is zero still")
            return Proven(projection, proof.bias_std(), proof.is_soft_capped, proof.largest_bias())
        is_zero |= projection.makes_zeros
        if projection.module not in matters:  # of many guesses for one module the first is right more often than not
            matters[projection.module] = proof.module_matters()
    if is_read_elsewhere:
        raise ReadElsewhereError(READ_ELSEWHERE)
    if not lockstep.all(not is_zero):
        raise NotNowError("all its queries are zero, or those of a layer that may make them")
    return None


class _Proof:
    """The trial of one projection."""

    def __init__(
        self,
        projection: QueryProjection,
        replay: Replay,
        lockstep: Lockstep,
        plain: Sequence[AttentionCall],
        heads: int,
        tolerance: float,
    ) -> None:
        self._projection, self._replay, self._lockstep, self._plain = projection, replay, lockstep, plain
        self._heads, self._tolerance = heads, tolerance
        self._logits = [_logits(call) for call in plain]
        self._biases: list[Tensor] = []
        self._served_by: Tensor | None = None
        #: See `Proven`.
        self.is_soft_capped = any(call.soft_cap is not None for call in plain)

    def holds(self) -> bool:
        """Whether the projection makes the queries and nothing else."""
        count = self._projection.temperatures
        self._served_by = self._projection.served_by(self._heads)
        if self._served_by is None:
            return False
        biases = self._with(torch.zeros(count), is_anything_made=False)
        if biases is None:
            return False
        self._biases = biases
        matters = all(
            bool(((logits - bias) != 0).any()) for logits, bias in zip(self._logits, self._biases, strict=True)
        )
        return (
            self._lockstep.all(matters)
            and self._shrinks(count)
            and self._follows(count, 0.5)
            and self._follows(count, _MUCH)
            and self._turns_heads(count)
            and self._needs_all_rows()
            and self._has_all_rows()
        )

    def module_matters(self) -> bool:
        """Whether logits depend at all on the size of what leaves the module: they do not if it is normalised later."""
        calls = self._calls_with(torch.full((1,), 0.5))
        is_alike = calls is not None and all(
            self._is_near(_logits(call), logits, logits) for call, logits in zip(calls, self._logits, strict=True)
        )
        return not self._lockstep.all(is_alike)

    def is_read_elsewhere(self) -> bool:
        """Whether something else in the module than its attention reads what the projection makes.

        Of an attention that cannot be held, by a kernel into which nothing can see, that is not known.
        """
        if self._projection.kind == "packed":  # nothing but one function gets it
            return False
        keys = min(call.keys for call in self._plain)
        without = self._held(HeldAttention(keys), torch.zeros(self._projection.temperatures))
        if not self._lockstep.all(without is None or len(without.results) >= len(self._plain)):
            return False
        held = self._held(HeldAttention(keys, without), torch.ones(self._projection.temperatures))
        return not self._lockstep.all(without is not None and held is not None and held.is_same(without))

    def _held(self, attention: HeldAttention, factors: Tensor) -> HeldAttention | None:
        try:
            with self._scaled(self._projection.multiplier(factors)):
                self._replay.run(attention)
        except Exception:
            return None
        return attention

    def bias_std(self) -> Tensor:
        """See `Proven`."""
        found = torch.full((self._heads,), torch.nan)
        for number, (call, bias_BHRM) in enumerate(zip(self._plain, self._biases, strict=True)):
            visible_BHRM = call.logits(_first_row(call))[1]
            count_BHR1 = visible_BHRM.sum(-1, keepdim=True).clamp(min=1)
            mean_BHR1 = bias_BHRM.sum(-1, keepdim=True) / count_BHR1
            square_BHRM = torch.where(visible_BHRM, (bias_BHRM - mean_BHR1).square(), 0.0)
            std_H = (square_BHRM.sum(-1, keepdim=True) / count_BHR1).sqrt().mean((0, 2, 3))
            found[self._places(call, number)] = std_H.cpu()
        return found

    def largest_bias(self) -> Tensor:
        """See `Proven`."""
        found = torch.full((self._heads,), torch.nan)
        for number, (call, bias_BHRM) in enumerate(zip(self._plain, self._biases, strict=True)):
            found[self._places(call, number)] = bias_BHRM.amax((0, 2, 3)).clamp(min=0).float().cpu()
        return found

    def _turns_heads(self, count: int) -> bool:
        """Whether the logits of just those heads change their sign whose queries do, and values do not change.

        For each binary digit those heads whose number has it, counted from one: each changes some time, and no two are
        alike every time. It holds under a soft-cap as well.
        """
        numbers = torch.arange(1, count + 1)
        return all(self._multiplies(1 - 2 * (numbers >> digit & 1).float()) for digit in range(count.bit_length()))

    def _shrinks(self, count: int) -> bool:
        """Whether logits are halved as queries are, or at least small ones, as under a soft-cap.

        What is normalised afterwards does not care about its size.
        """
        halves = torch.full((count,), 0.5)
        halved = self._with(halves)
        if halved is None:
            return False
        is_halved = self._are_multiplied(halves, halved)
        self.is_soft_capped |= not is_halved
        return self._lockstep.all(
            is_halved
            or all(
                _halves_small_ones(half - bias, logits - bias)
                for half, logits, bias in zip(halved, self._logits, self._biases, strict=True)
            )
        )

    def _follows(self, count: int, factor: float) -> bool:
        """Whether queries are multiplied as what leaves the module is, or logits where queries are not known.

        Multiplying by much shows what is bounded on the way, such as by a clamp that only hot runs come to.
        """
        calls = self._calls_with(self._projection.multiplier(torch.full((count,), factor)))
        is_known = bool(self._plain[0].query.shape[-1])
        if not is_known and self.is_soft_capped:
            return True
        return self._lockstep.all(
            calls is not None and all(map(partial(self._has_followed, factor), calls, self._plain))
        )

    def _has_followed(self, factor: float, call: AttentionCall, plain: AttentionCall) -> bool:
        number = next(place for place, one in enumerate(self._plain) if one is plain)
        if plain.query.shape[-1]:
            expected = factor * self._projection.made(plain)
            return self._is_near(self._projection.made(call), expected, expected)
        expected = factor * (self._logits[number] - self._biases[number])
        return self._is_near(_logits(call) - self._biases[number], expected, expected)

    def _multiplies(self, factors: Tensor) -> bool:
        """Whether logits, less what a bias adds, are multiplied as queries are."""
        found = self._with(factors)
        return found is not None and self._lockstep.all(self._are_multiplied(factors, found))

    def _are_multiplied(self, factors: Tensor, found: list[Tensor]) -> bool:
        return all(
            self._is_near(scaled - bias, self._of_call(factors, number) * (logits - bias), logits - bias)
            for number, (scaled, logits, bias) in enumerate(zip(found, self._logits, self._biases, strict=True))
        )

    def _needs_all_rows(self) -> bool:
        """Whether each half of the channels of a head makes part of its logits: others may be there, such as gates."""
        rows = self._projection.rows
        width = self._plain[0].query.shape[-1]
        if rows is None or rows.shape[1] in (1, width):
            return True
        for half in (rows[:, : rows.shape[1] // 2], rows[:, rows.shape[1] // 2 :]):
            multiplier = torch.ones(self._projection.channels)
            multiplier[half] = 0
            found = self._seen_with(multiplier)
            if found is None or not self._lockstep.all(
                all(
                    bool(((part - logits).abs().amax((0, 2, 3)) > 0).all())
                    for part, logits in zip(found, self._logits, strict=True)
                )
            ):
                return False
        return True

    def _has_all_rows(self) -> bool:
        """Whether what a bias adds does not depend on other channels: they would be queries as well.

        Where queries are known, they were found to be nothing but these channels.
        """
        rows, width = self._projection.rows, self._plain[0].query.shape[-1]
        if rows is None or width or rows.numel() == self._projection.channels:
            return True
        multiplier = torch.full((self._projection.channels,), 0.5)
        multiplier[rows] = 0
        calls = self._calls_with(multiplier)
        return self._lockstep.all(
            calls is not None
            and all(
                self._is_near(_logits(call), bias, logits - bias)
                for call, bias, logits in zip(calls, self._biases, self._logits, strict=True)
            )
        )

    def _with(self, factors: Tensor, is_anything_made: bool = True) -> list[Tensor] | None:
        return self._seen_with(self._projection.multiplier(factors), is_anything_made)

    def _seen_with(self, multiplier: Tensor, is_anything_made: bool = True) -> list[Tensor] | None:
        """The logits where channels are multiplied; ``None`` where nothing can be compared or something else changes.

        That are the values; and queries, where they are known, must be zero if the channels are: what is added to them
        later is no bias of logits.
        """
        calls = self._calls_with(multiplier)
        is_alike = calls is not None and all(
            _logits(call).shape == _logits(plain).shape
            and (call.value is None or plain.value is None or self._is_near(call.value, plain.value, plain.value))
            and (is_anything_made or not bool(self._projection.made(call).any()))
            for call, plain in zip(calls, self._plain, strict=True)
        )
        if not self._lockstep.all(is_alike) or calls is None:
            return None
        return [_logits(call) for call in calls]

    def _calls_with(self, multiplier: Tensor) -> list[AttentionCall] | None:
        try:
            with self._scaled(multiplier):
                calls = self._replay()
        except Exception:
            return None
        return calls if len(calls) == len(self._plain) else None

    @contextmanager
    def _scaled(self, multiplier: Tensor) -> Iterator[None]:
        """Multiply the channels that leave the projection while the block runs."""
        scale = ChannelScale.of(self._projection, multiplier)
        scale_outputs(self._projection, scale)
        try:
            yield
        finally:
            release(self._projection.module, scale)

    def _of_call(self, factors: Tensor, number: int) -> Tensor:
        """The factors of the heads of one call, (H, 1, 1)."""
        call = self._plain[number]
        assert self._served_by is not None
        return factors[self._served_by[self._places(call, number)]].to(call.query.device)[:, None, None]

    def _places(self, call: AttentionCall, number: int) -> slice:
        """Which of the site's heads a call has: all, those of this rank, or the next one of a loop."""
        if call.share is not None:
            first, _ = call.share.of_heads(call.heads)
        else:
            first = number if call.heads == 1 and len(self._plain) == self._heads else 0
        return slice(first, first + call.heads)

    def _is_near(self, found: Tensor, expected: Tensor, scale: Tensor) -> bool:
        if found.shape != expected.shape:
            return False
        return bool((found - expected).abs().max() <= self._tolerance * scale.abs().max())


def _has_idle_layer(site: nn.Module, projection: QueryProjection) -> bool:
    """Whether a layer whose weights are all zero may add to the queries once it is trained, as an adapter's does."""
    rows = projection.rows
    if rows is None or projection.kind == "packed":
        return False
    sizes = {rows.numel(), projection.channels}
    layers = [module for module in modules_of(site) if is_layer(module) and not is_adapted(module, site)]
    weights = [layer._parameters["weight"] for layer in layers]  # adapters of libraries are refused by their names
    return any(weight is not None and sizes & set(weight.shape) and not bool(weight.any()) for weight in weights)


def _halves_small_ones(found_BHRM: Tensor, logits_BHRM: Tensor) -> bool:
    """Whether those logits of each head are halved that are small among its own."""
    size_BHRM = logits_BHRM.abs()
    small_BHRM = torch.where(size_BHRM < 0.3 * size_BHRM.amax((0, 2, 3), keepdim=True), logits_BHRM, 0.0)
    ratio_H = (found_BHRM * small_BHRM).sum((0, 2, 3)) / (small_BHRM**2).sum((0, 2, 3))
    return bool(((ratio_H > 0.45) & (ratio_H < 0.6)).all())


def _logits(call: AttentionCall) -> Tensor:
    """The visible logits of the last rows before a soft-cap, zero elsewhere."""
    logits_BHRM, visible_BHRM = replace(call, soft_cap=None).logits(_first_row(call))
    return torch.where(visible_BHRM, logits_BHRM, 0.0)


def _first_row(call: AttentionCall) -> int:
    return max(0, call.queries - _ROWS)


def _is_cache(value: object) -> bool:
    """Whether an argument remembers keys, to which another run would add some."""
    return "Cache" in type(value).__name__
