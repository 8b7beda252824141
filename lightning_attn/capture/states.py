"""The hidden states that enter and leave a module that computes attention.

Shape suffixes: B sequences, N tokens, L width of a state that enters, E width of one that leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from lightning_attn.capture.call import AttentionCall
from lightning_attn.capture.spread import arrived, held, is_spread, is_whole_but_for_sequences

#: How many entries of a mask are looked at together.
_BLOCK_ELEMENTS = 2**20


@dataclass(frozen=True, repr=False)
class HiddenStates:
    """What entered a module that computes attention, and what left it: of the first sequences, detached, not copied.

    Where the module is the attention alone, as it mostly is, what leaves it has not been added to the residual stream
    yet. Where a whole block computes attention without a module of its own for it, it is what leaves the block.

    Args:
        site: canonical name of the module.
        entering: (B, N, L), the states that entered.
        leaving: (B, N, E), the states of the same tokens that left; ``None`` where none could be told.
        real: (B, N) or (1, N), boolean, false where a token is padding; ``None`` where all are taken for real.
    """

    site: str
    entering: Tensor
    leaving: Tensor | None
    real: Tensor | None


@dataclass(frozen=True)
class Attended:
    """What the attention of a module tells about the states around it, while the module is still computing.

    Args:
        site: canonical name of the module.
        queries: how many queries its attention has.
        real: which of them are tokens, of how many sequences the call has; see `HiddenStates`.
        width_of_one_head: width of a query where the call has a single head; ``None`` where it has several, or where
            that is not known.
        is_one_sequence: whether the call has a single sequence.
        is_batch_first: false where tokens surely come before sequences.
        device: where the attention ran.
    """

    site: str
    queries: int
    real: Tensor | None
    width_of_one_head: int | None
    is_one_sequence: bool
    is_batch_first: bool
    device: torch.device

    @classmethod
    def by(cls, call: AttentionCall, module: nn.Module) -> Attended:
        """What the first attention call of a module tells.

        Args:
            call: the call.
            module: the module that made it.
        """
        return cls(
            site=call.site,
            queries=call.queries,
            real=_real_tokens(call),
            width_of_one_head=call.query.shape[-1] if call.heads == 1 and call.logit_matrix is None else None,
            is_one_sequence=call.sequences == 1,
            is_batch_first=not isinstance(module, nn.MultiheadAttention) or bool(module.batch_first),
            device=call.query.device,
        )

    def states(
        self, args: tuple[object, ...], kwargs: Mapping[str, object], output: object, max_sequences: int | None
    ) -> HiddenStates | None:
        """The states around the module, if they can be told among its arguments and what it returned.

        Those are the first floating-point tensors with as many tokens as the attention has queries: (B, N, L),
        (N, B, L), (N, L) for one sequence, or (B, height, width, L), whose places are tokens. Failing that, with a
        multiple of it, since some modules divide their tokens into windows. An image is left out where its channels may
        come first, and so is what is named a mask.

        Args:
            args: the arguments of the module by position.
            kwargs: and by name.
            output: what it returned.
            max_sequences: the first so many sequences are wanted; ``None`` for all.
        """
        arguments = (*args, *(value for name, value in kwargs.items() if "mask" not in name))
        entering_BNL = next(
            (found for found in self._found_in(arguments, max_sequences) if found.shape[1] == self.queries), None
        )
        if entering_BNL is None:
            entering_BNL = next(self._found_in(arguments, max_sequences), None)
        if entering_BNL is None:
            return None
        shape = entering_BNL.shape[:2]
        same_tokens = (found for found in self._found_in(output, max_sequences) if found.shape[:2] == shape)
        return HiddenStates(self.site, entering_BNL, next(same_tokens, None), self._real_among(entering_BNL))

    def _real_among(self, states_BNL: Tensor) -> Tensor | None:
        """Which states are tokens, where the sequences of the attention are those of the states."""
        sequences, tokens, width = states_BNL.shape
        if self.real is None or self.real.shape[1] != tokens:
            return None
        if len(self.real) == 1:
            return self.real
        # A head that is narrower than the states is one of several that were made sequences of one head each.
        is_folded = self.width_of_one_head is not None and self.width_of_one_head < width
        return self.real if len(self.real) == sequences and not is_folded else None

    def _found_in(self, value: object, max_sequences: int | None) -> Iterator[Tensor]:
        for tensor in _tensors(value):
            states_BNL = self._as_states(tensor.detach(), max_sequences)
            if states_BNL is not None:
                yield states_BNL

    def _as_states(self, tensor: Tensor, max_sequences: int | None) -> Tensor | None:
        """The first sequences of a tensor as (B, N, L), ``None`` where its dimensions do not fit the attention."""
        shape = tensor.shape
        if not tensor.is_floating_point() or len(shape) < 2 or self.queries == 0:
            return None
        if len(shape) == 2:
            return tensor[None] if shape[0] == self.queries and self.is_one_sequence else None
        if len(shape) == 3 and shape[0] == self.queries and not (self.is_batch_first and shape[1] == self.queries):
            return tensor.transpose(0, 1)[:max_sequences]  # as in fairseq and Megatron
        may_be_channels_first = len(shape) > 3 and prod(shape[2:]) == self.queries
        if may_be_channels_first or not self.is_batch_first or prod(shape[1:-1]) % self.queries:
            return None
        return tensor[:max_sequences].flatten(1, -2)


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in arguments or results, in order. Nested tensors and those that divide tokens are left out."""
    if is_spread(value):
        if is_whole_but_for_sequences(value):
            yield arrived(held(value))
    elif isinstance(value, Tensor):
        value = arrived(value)
        # A subclass with operations of its own may hold a part of what it stands for.
        if type(value).__torch_dispatch__ is Tensor.__torch_dispatch__ and not value.is_nested:
            yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _real_tokens(call: AttentionCall) -> Tensor | None:
    """The tokens that some head lets some query see, (B or 1, N); ``None`` where nothing hides any for good."""
    if call.visibility.padding is not None:
        return ~call.visibility.padding
    if not call.self_attention or call.visibility.is_causal_at_most:
        return None
    rows = max(1, _BLOCK_ELEMENTS // max(1, call.sequences * call.heads * call.keys))
    return call.seen_keys(rows)[..., : call.queries].any(1)
