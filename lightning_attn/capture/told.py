"""Attention that a model tells of and that is seen as well: it is one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_attn.capture.call import AttentionCall

#: How far apart the weights of the same attention may be, told and seen.
_TOLERANCE = 1e-2


class ToldAttention:
    """What each module told last of its attention: enough to know it again."""

    def __init__(self) -> None:
        self._told: dict[nn.Module, tuple[int, tuple[int, int], Tensor]] = {}

    def tell(self, module: nn.Module, call: AttentionCall) -> None:
        """A module tells of an attention that it is about to compute."""
        rows = call.sequences * call.heads * call.queries
        self._told[module] = (rows, (call.queries, call.keys), _last_row(call))

    def is_known(self, modules: tuple[nn.Module, ...], call: AttentionCall) -> bool:
        """Whether a call, or that of a single head, is what one of the modules that compute it told of."""
        return any(self._is_known(module, call) for module in modules if module in self._told)

    def _is_known(self, module: nn.Module, call: AttentionCall) -> bool:
        _, shape, told_HM = self._told[module]
        if shape != (call.queries, call.keys):
            return False
        if not told_HM.numel():
            return True  # of no sequences, queries or keys
        difference_H = (told_HM - _last_row(call)[:1]).abs().amax(-1)
        return bool((difference_H <= _TOLERANCE * told_HM.amax(-1)).any())

    def covers(self, module: nn.Module, rows: int | None) -> bool:
        """Whether a call that cannot be read, of so many rows, may be what its module told of."""
        if module not in self._told:
            return False
        told, _, _ = self._told[module]
        return rows is None or (rows > 0 and told % rows == 0)


def _last_row(call: AttentionCall) -> Tensor:
    """The weights of the last query of the first sequence, (H, M)."""
    if not call.sequences or not call.queries:
        return torch.empty(call.heads, 0)
    return call.select(slice(0, 1)).weights(call.queries - 1)[0, :, 0]
