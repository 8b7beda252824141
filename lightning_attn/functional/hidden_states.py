"""From tensors that somebody has to the hidden states that statistics are computed of.

Shape suffixes as in `lightning_attn.capture.states`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_attn.capture.states import HiddenStates


def hidden_states(entering: Tensor, leaving: Tensor | None = None, token_mask: Tensor | None = None) -> HiddenStates:
    """The hidden states around a module.

    Args:
        entering: (B, N, L), the states of N tokens that enter.
        leaving: (B, N, E), the states of the same tokens that leave.
        token_mask: (B, N) or (1, N), boolean, false where a token is padding.

    Raises:
        ValueError: if an argument is of another shape or type.
    """
    if not isinstance(entering, Tensor) or not entering.is_floating_point() or entering.dim() != 3:
        raise ValueError(f"`entering` must be a floating tensor of shape (B, N, L), got {_described(entering)}.")
    if leaving is not None:
        is_of_tokens = isinstance(leaving, Tensor) and leaving.is_floating_point() and leaving.dim() == 3
        if not is_of_tokens or leaving.shape[:2] != entering.shape[:2]:
            expected = f"({entering.shape[0]}, {entering.shape[1]}, E)"
            raise ValueError(f"`leaving` must be a floating tensor of shape {expected}, got {_described(leaving)}.")
        leaving = leaving.detach()
    if token_mask is not None and (
        not isinstance(token_mask, Tensor)
        or token_mask.dtype != torch.bool
        or token_mask.dim() != 2
        or token_mask.shape[0] not in (1, entering.shape[0])
        or token_mask.shape[1] != entering.shape[1]
    ):
        raise ValueError(
            f"`token_mask` must be a boolean tensor of shape {tuple(entering.shape[:2])}, false where a token is "
            f"padding, got {_described(token_mask)}."
        )
    return HiddenStates("states", entering.detach(), leaving, token_mask)


def _described(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.100}"
