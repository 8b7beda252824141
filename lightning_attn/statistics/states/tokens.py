"""The hidden states of the tokens of some sequences, and what statistics ask of them.

States are walked over in blocks of tokens, in the widest floating type, so that they are never copied as a whole.

Shape suffixes: B sequences, N tokens, T tokens of a block, L width of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_attn.statistics.states.median import lower_median
from lightning_attn.statistics.statistic import wide


class _Sums(NamedTuple):
    """What one walk over the tokens adds up: padding is in none of it."""

    #: Sum of squared norms, (B,).
    square: Tensor
    #: How many tokens have a direction: those that are not zero, (B,).
    directed: Tensor
    #: Sum of unit vectors, (B, L).
    unit: Tensor
    #: Sum of the states, (B, L).
    state: Tensor


class Tokens:
    """The states of some sequences; each number is computed when it is first asked for.

    Args:
        states_BNL: the states, of any floating type.
        real_BN: false where a token is padding, (B, N) or (1, N); ``None`` where there is no padding.
        block_elements: how many entries a block may hold. One token of every sequence is always allowed.
    """

    def __init__(self, states_BNL: Tensor, real_BN: Tensor | None, block_elements: int) -> None:
        self.block_elements = block_elements
        self._states_BNL = states_BNL
        self._real_BN = None if real_BN is None else real_BN.to(states_BNL.device).expand(states_BNL.shape[:2])
        self._tokens_per_block = max(1, block_elements // max(1, states_BNL.shape[0] * states_BNL.shape[2]))
        self._of_number: dict[tuple[Callable[[Tokens, int], Tensor], int], Tensor] = {}

    @property
    def sequences(self) -> int:
        """Number of sequences, B."""
        return self._states_BNL.shape[0]

    @property
    def width(self) -> int:
        """Number of entries of a state, L."""
        return self._states_BNL.shape[2]

    def shared(self, compute: Callable[[Tokens, int], Tensor], number: int) -> Tensor:
        """What several statistics need of some number of tokens, computed by the first that asks."""
        if (compute, number) not in self._of_number:
            self._of_number[compute, number] = compute(self, number)
        return self._of_number[compute, number]

    def evenly_spaced(self, number: int) -> Tensor:
        r"""The places of some tokens, (B, number).

        Of the :math:`n` tokens of a sequence that are no padding they are those at :math:`\lfloor k n / n_0 \rfloor`,
        with :math:`k = 0 \dots n_0 - 1` for a number of :math:`n_0`. So the first token is one of them, as it is in
        shorter sequences. Any places where a sequence has fewer tokens than that.
        """
        device = self._states_BNL.device
        rank_BT = torch.arange(number, device=device) * self.count_B[:, None] // number
        if self._real_BN is None:
            return rank_BT
        place_BT = torch.searchsorted(self._real_BN.cumsum(1), rank_BT + 1)
        return place_BT.clamp(max=self._states_BNL.shape[1] - 1)

    def states_at(self, place_BT: Tensor, sequences: slice, entries: slice) -> Tensor:
        """Some entries of the states at some places of some sequences, in the widest floating type."""
        part_BNL = self._states_BNL[sequences, :, entries]
        number_B1 = torch.arange(part_BNL.shape[0], device=part_BNL.device)[:, None]
        return part_BNL[number_B1, place_BT[sequences]].to(wide(part_BNL.device))

    @cached_property
    def count_B(self) -> Tensor:
        """Number of tokens that are no padding."""
        if self._real_BN is not None:
            return self._real_BN.sum(1)
        sequences, tokens, _ = self._states_BNL.shape
        return torch.full((sequences,), tokens, device=self._states_BNL.device)

    @cached_property
    def finite_B(self) -> Tensor:
        """Whether there is a token, and every state is finite."""
        return self._sums.square.isfinite() & (self.count_B > 0)

    @property
    def directed_B(self) -> Tensor:
        """Number of tokens that have a direction: whose state is not zero."""
        return self._sums.directed

    @property
    def square_sum_B(self) -> Tensor:
        """Sum of the squares of all entries."""
        return self._sums.square

    @cached_property
    def largest_B(self) -> Tensor:
        """Largest magnitude of an entry."""
        largest_B = torch.zeros_like(self._sums.square)
        for block, real_BT in self._slices():
            states_BTL = _only(self._states_BNL[:, block], real_BT, 0.0)
            of_block_B = torch.linalg.vector_norm(states_BTL, ord=torch.inf, dim=(1, 2))
            largest_B = torch.maximum(largest_B, of_block_B.to(largest_B.dtype))
        return largest_B

    @cached_property
    def similarity_B(self) -> Tensor:
        """Mean cosine of all pairs of different tokens with a direction; anything where there is no pair.

        The sum over all pairs is the squared length of the sum of unit vectors, less one for each token with itself.
        """
        directed_B = self.directed_B
        pairs_B = (directed_B * (directed_B - 1)).clamp(min=1)
        similarity_B: Tensor = (self._sums.unit.square().sum(1) - directed_B) / pairs_B
        return similarity_B.clamp(-1, 1)

    @cached_property
    def has_pairs_B(self) -> Tensor:
        """Whether there are two tokens with a direction to be compared, and every state is finite."""
        return self.finite_B & (self.directed_B >= 2)

    @cached_property
    def leader_cosine_B(self) -> Tensor:
        """Mean cosine of the first token with every token, itself among them; NaN where it has no direction."""
        leader_BL = self._first_BL
        norm_B = torch.linalg.vector_norm(leader_BL, dim=1)
        cosine_B: Tensor = (leader_BL * self._sums.unit).sum(1) / norm_B / self.directed_B
        return cosine_B

    @cached_property
    def others_leader_cosine_B(self) -> Tensor:
        """The same without the first token itself; NaN where it has no direction, or there is no other token."""
        others_B: Tensor = self.leader_cosine_B * self.directed_B - 1
        return others_B / (self.directed_B - 1)

    @cached_property
    def deviation_square_sum_B(self) -> Tensor:
        """Sum of the squared distances of all tokens to their mean: of differences, so that nothing cancels."""
        mean_BL = self._sums.state / self.count_B.clamp(min=1)[:, None]
        total_B = torch.zeros_like(self._sums.square)
        for states_BTL, real_BT in self._blocks():
            distance_BT = torch.linalg.vector_norm(states_BTL - mean_BL[:, None], dim=-1)
            total_B += _only(distance_BT, real_BT, 0.0).square().sum(1)
        return total_B

    @cached_property
    def median_magnitude_B(self) -> Tensor:
        """Lower median of the magnitudes of all entries, in float32; anything where there is no token."""

        def magnitudes() -> Iterator[Tensor]:
            for block, real_BT in self._slices():
                yield _only(self._states_BNL[:, block].float().abs(), real_BT, torch.inf).contiguous().flatten(1)

        return lower_median(magnitudes, self.count_B * self._states_BNL.shape[2])

    @cached_property
    def _first_BL(self) -> Tensor:
        """The first token that is no padding."""
        if self._real_BN is None:
            first_BL = self._states_BNL[:, 0]
        else:
            sequences = torch.arange(self._states_BNL.shape[0], device=self._states_BNL.device)
            first_BL = self._states_BNL[sequences, self._real_BN.int().argmax(1)]
        return first_BL.to(wide(first_BL.device))

    @cached_property
    def _sums(self) -> _Sums:
        sequences, _, width = self._states_BNL.shape
        vectors_B2L = self._states_BNL.new_zeros(sequences, 2, width, dtype=wide(self._states_BNL.device))
        square_B = directed_B = vectors_B2L[:, 0, 0]
        for states_BTL, _ in self._blocks():
            norm_BT = torch.linalg.vector_norm(states_BTL, dim=-1)
            has_direction_BT = norm_BT != 0
            weights_B2T = torch.stack(
                [torch.where(has_direction_BT, 1 / norm_BT, 0.0), torch.ones_like(norm_BT)], dim=1
            )
            vectors_B2L = vectors_B2L + weights_B2T @ states_BTL
            square_B = square_B + norm_BT.square().sum(1)
            directed_B = directed_B + has_direction_BT.sum(1)
        return _Sums(square_B, directed_B, *vectors_B2L.unbind(1))

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The states of a block (B, T, L), zero where a token is padding, and which tokens are none (B, T)."""
        for block, real_BT in self._slices():
            yield _only(self._states_BNL[:, block].to(wide(self._states_BNL.device)), real_BT, 0.0), real_BT

    def _slices(self) -> Iterator[tuple[slice, Tensor | None]]:
        tokens = self._states_BNL.shape[1]
        for start in range(0, tokens, self._tokens_per_block):
            block = slice(start, start + self._tokens_per_block)
            yield block, None if self._real_BN is None else self._real_BN[:, block]


def _only(tensor: Tensor, real_BT: Tensor | None, filling: float) -> Tensor:
    """A tensor (B, T, …) with something else in the place of padding."""
    if real_BT is None:
        return tensor
    return torch.where(real_BT.reshape(real_BT.shape + (1,) * (tensor.dim() - 2)), tensor, filling)
