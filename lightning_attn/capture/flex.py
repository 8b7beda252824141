"""Reading `torch.nn.attention.flex_attention.flex_attention`.

It reaches torch's functions as a higher-order operator, with the functions that change scores and hide keys. These are
asked block by block, as the kernel asks them, so that neither scores nor mask are written down. Shape suffixes as in
`lightning_attn.capture.call`, and R: rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_attn.capture.autocast import as_autocast
from lightning_attn.capture.call import AttentionCall, Visibility
from lightning_attn.capture.reader import Sampling, reads


@dataclass(frozen=True)
class IndexRule:
    """A function of the numbers of sequence, head, query and key, each a tensor without dimensions.

    Args:
        function: ``mask_mod``, or ``score_mod``, which is given the score first.
        sequences: numbers of the sequences, (B,).
        heads: numbers of the query heads, (H,).
    """

    function: Callable[..., Tensor]
    sequences: Tensor
    heads: Tensor

    def rows(self, start: int, stop: int, keys: int) -> Tensor:
        """What the function says of the queries ``start:stop`` and the first ``keys`` keys."""
        allowed_BHRM: Tensor = self._over_all(with_score=False)(*self._numbers(start, stop, keys))
        return allowed_BHRM

    def change(self, logits_BHRM: Tensor, start: int) -> Tensor:
        """What the function makes of logits."""
        numbers = self._numbers(start, start + logits_BHRM.shape[2], logits_BHRM.shape[3])
        changed_BHRM: Tensor = self._over_all(with_score=True)(logits_BHRM, *numbers)
        return changed_BHRM

    def select(self, sequences: slice, heads: slice) -> IndexRule:
        """The rule for some sequences and heads."""
        return replace(self, sequences=self.sequences[sequences], heads=self.heads[heads])

    def _numbers(self, start: int, stop: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        device = self.sequences.device
        return (
            self.sequences,
            self.heads,
            torch.arange(start, stop, device=device),
            torch.arange(keys, device=device),
        )

    def _over_all(self, with_score: bool) -> Callable[..., Any]:
        """The function for every sequence, head, query and key."""
        function: Callable[..., Any] = self.function
        for axis in reversed(range(4)):
            numbers = [0 if axis == other else None for other in range(4)]
            function = torch.vmap(function, in_dims=(0, *numbers) if with_score else tuple(numbers))
        return function


@reads(torch.ops.higher_order.flex_attention)
def read(args: tuple[Any, ...], kwargs: dict[str, Any], sampling: Sampling) -> AttentionCall:
    """Read one call: any score and mask function, and grouped heads; under autocast, of what is rounded."""
    return as_autocast(_read(sampling, *args, **kwargs), sampling.autocast_dtype)


def _read(
    sampling: Sampling,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> AttentionCall:
    sampling.check_tokens(query, key)
    query_BHND = query[: sampling.max_sequences]
    sequences, heads = query_BHND.shape[:2]
    key_BKMD, value_BKME = (tensor[: sampling.max_sequences].expand(sequences, -1, -1, -1) for tensor in (key, value))
    numbers = (torch.arange(sequences, device=query.device), torch.arange(heads, device=query.device))
    hide_keys = block_mask[-1]
    return AttentionCall(
        site=sampling.site,
        query=query_BHND,
        key=key_BKMD,
        value=value_BKME if sampling.with_values else None,
        scale=scale,
        visibility=Visibility(rule=IndexRule(hide_keys, *numbers)),
        self_attention=query.shape[-2] == key.shape[-2],
        score_rule=IndexRule(score_mod, *numbers),
    )
