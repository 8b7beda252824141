"""Measuring small calls of equal shape as one.

What a small call costs is the number of operations, whatever their size: a layer of a small model takes nearly as long
to measure as all its layers together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from lightning_attn.capture.call import AttentionCall
from lightning_attn.capture.isolation import isolated
from lightning_attn.capture.states import HiddenStates
from lightning_attn.statistics.measure import Sums, measure
from lightning_attn.statistics.rows.row_pass import default_block_bytes
from lightning_attn.statistics.state_statistic import StateSums, measure_states
from lightning_attn.statistics.statistic import Statistic

#: What takes at most this part of a block is small, and what takes a whole block together is measured.
_PARTS_OF_A_BLOCK = 8

_Held = TypeVar("_Held", AttentionCall, HiddenStates)
_Found = TypeVar("_Found", Sums, StateSums)
_Measured = tuple[AttentionCall, Callable[[], Sums]] | tuple[HiddenStates, Callable[[], StateSums]]


class SmallCalls:
    """Small calls and hidden states, copied, until they are measured: together no more than a block or two.

    Args:
        statistics: which statistics.
        spectral_sequences: how many sequences the spectral ones are taken of; ``None`` for all.
    """

    def __init__(self, statistics: Sequence[type[Statistic]], spectral_sequences: int | None) -> None:
        self._statistics = statistics
        self._spectral_sequences = spectral_sequences
        self._held: list[AttentionCall | HiddenStates] = []
        self._bytes, self._block_bytes = 0, 1

    def take(self, call: AttentionCall) -> bool:
        """Take a call if it is small; whether it was taken."""
        if (
            call.logit_matrix is not None
            or call.weight_matrix is not None
            or call.score_rule is not None
            or call.visibility.rule is not None
        ):
            return False
        visibility = call.visibility
        tensors = [call.query, call.key, call.value, visibility.mask, visibility.bias]
        matrices = 4 * call.sequences * call.heads * call.queries * call.keys
        if not self._has_room(matrices + sum(_bytes(t) for t in tensors if t is not None), call.query.device):
            return False
        self._held.append(call.map_tensors(torch.clone))
        return True

    def take_states(self, states: HiddenStates) -> bool:
        """Take hidden states if they are small; whether they were taken."""
        tensors = [states.entering] if states.leaving is None else [states.entering, states.leaving]
        if not self._has_room(sum(map(_bytes, tensors)), states.entering.device):
            return False
        leaving = None if states.leaving is None else states.leaving.clone()
        self._held.append(replace(states, entering=states.entering.clone(), leaving=leaving))
        return True

    def measured(
        self,
    ) -> Iterator[tuple[AttentionCall, Callable[[], Sums]] | tuple[HiddenStates, Callable[[], StateSums]]]:
        """All that was taken, in that order, each with its sums, or what raises the fault that it met."""
        held, self._held = self._held, []
        self._bytes = 0
        held_calls = _with_common_masks([item for item in held if isinstance(item, AttentionCall)])
        calls = _in_groups(held_calls, _shape, self._one, self._several)
        states = _in_groups(
            [item for item in held if isinstance(item, HiddenStates)],
            _shape_of_states,
            self._one_of_states,
            self._several_of_states,
        )
        for item in held:
            if isinstance(item, AttentionCall):
                yield next(calls)
            else:
                yield next(states)

    def _one(self, call: AttentionCall) -> Sums:
        with isolated(call.query.device):
            return measure(call, self._statistics, spectral_sequences=self._spectral_sequences)

    def _several(self, group: list[AttentionCall]) -> list[Sums]:
        return self._one(_side_by_side(group)).divided([call.heads for call in group])

    def _one_of_states(self, states: HiddenStates) -> StateSums:
        with isolated(states.entering.device):
            return measure_states(states, self._statistics)

    def _several_of_states(self, group: list[HiddenStates]) -> list[StateSums]:
        return self._one_of_states(_one_after_the_other(group)).divided([len(states.entering) for states in group])

    @property
    def is_full(self) -> bool:
        """Whether it is time to measure them."""
        return self._bytes >= self._block_bytes

    def _has_room(self, more: int, device: torch.device) -> bool:
        self._block_bytes = default_block_bytes(device)
        if more > self._block_bytes // _PARTS_OF_A_BLOCK:
            return False
        self._bytes += more
        return True


def _with_common_masks(calls: list[AttentionCall]) -> list[AttentionCall]:
    """The calls, of which those whose masks are equal have the same one."""
    distinct: list[Tensor] = []

    def common(mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        for known in distinct:
            if known.shape == mask.shape and known.dtype == mask.dtype and torch.equal(known, mask):
                return known
        distinct.append(mask)
        return mask

    def with_common(call: AttentionCall) -> AttentionCall:
        visibility = call.visibility
        if visibility.mask is None and visibility.bias is None:
            return call
        with isolated(call.query.device):
            masks = common(visibility.mask), common(visibility.bias)
        return replace(call, visibility=replace(visibility, mask=masks[0], bias=masks[1]))

    return [with_common(call) for call in calls]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _in_groups(
    held: list[_Held],
    shape: Callable[[_Held], Hashable],
    one: Callable[[_Held], _Found],
    several: Callable[[list[_Held]], list[_Found]],
) -> Iterator[tuple[_Held, Callable[[], _Found]]]:
    """Measure those of equal shape together, and one by one if that fails: then each has its own fault."""
    groups: dict[Hashable, list[int]] = {}
    for number, item in enumerate(held):
        groups.setdefault(shape(item), []).append(number)
    found: dict[int, _Found] = {}
    for numbers in groups.values():
        if len(numbers) > 1:
            try:
                found.update(zip(numbers, several([held[number] for number in numbers]), strict=True))
            except Exception:
                continue
    for number, item in enumerate(held):
        yield item, partial(found.__getitem__, number) if number in found else partial(one, item)


def _shape(call: AttentionCall) -> Hashable:
    """Calls for which this is equal can be joined along their heads."""
    visibility, value = call.visibility, call.value
    of_masks = tuple(
        None if mask is None else id(mask) if mask.shape[1] == 1 else object()
        for mask in (visibility.mask, visibility.bias)
    )
    return (
        call.query.shape,
        call.key.shape,
        None if value is None else value.shape,
        call.query.dtype,
        call.query.device,
        call.scale,
        visibility.causal_offset,
        of_masks,
        call.self_attention,
        call.soft_cap,
        call.sink_logits is None,
        None if visibility.padding is None else object(),
    )


def _side_by_side(calls: list[AttentionCall]) -> AttentionCall:
    def joined(tensors: list[Tensor | None], axis: int) -> Tensor | None:
        there = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(there, dim=axis) if there else None

    return replace(
        calls[0],
        query=torch.cat([call.query for call in calls], dim=1),
        key=torch.cat([call.key for call in calls], dim=1),
        value=joined([call.value for call in calls], axis=1),
        sink_logits=joined([call.sink_logits for call in calls], axis=0),
    )


def _shape_of_states(states: HiddenStates) -> Hashable:
    """States for which this is equal can be joined along their sequences."""
    leaving = states.leaving
    return (
        states.entering.shape,
        states.entering.dtype,
        states.entering.device,
        None if leaving is None else (leaving.shape, leaving.dtype, leaving.device),
    )


def _one_after_the_other(group: list[HiddenStates]) -> HiddenStates:
    leaving = [states.leaving for states in group if states.leaving is not None]
    real: Tensor | None = None
    if any(states.real is not None for states in group):
        real = torch.cat(
            [
                (torch.ones(1, 1, dtype=torch.bool) if states.real is None else states.real)
                .to(states.entering.device)
                .expand(states.entering.shape[:2])
                for states in group
            ]
        )
    return HiddenStates(
        site=group[0].site,
        entering=torch.cat([states.entering for states in group]),
        leaving=torch.cat(leaving) if leaving else None,
        real=real,
    )
