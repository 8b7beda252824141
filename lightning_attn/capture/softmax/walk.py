"""What all share that follow the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import Size, nn

from lightning_attn.capture.channels import ChannelTrail
from lightning_attn.capture.module_tree import buffers_of, parameters_of
from lightning_attn.capture.sites import SiteNames
from lightning_attn.capture.softmax.open_trails import OpenTrails, Place, place_of
from lightning_attn.capture.softmax.operation import Operation
from lightning_attn.capture.softmax.trail import Trail
from lightning_attn.capture.softmax.written import WrittenAttention


class Walk:
    """A forward pass as far as it was followed.

    Args:
        model: the model; its weights and buffers are no activations.
        names: tells which modules are computing, and what they were given.
        found: called with each attention, when its weights have multiplied its values.
        channels: follows the channels of tensors, from the layers that made them.
    """

    def __init__(
        self,
        model: nn.Module,
        names: SiteNames,
        found: Callable[[WrittenAttention], None],
        channels: ChannelTrail,
    ) -> None:
        self.model = model
        #: The modules that are computing, from the innermost outwards.
        self.modules: Callable[[], tuple[nn.Module, ...]] = names.computing
        #: The shapes of the hidden states that they were given.
        self.given: Callable[[], list[Size]] = names.given
        self.found = found
        self.channels = channels
        self.trail = Trail(constants=(*parameters_of(model), *buffers_of(model)))
        self.open = OpenTrails()

    def place(self, shape: Size) -> Place:
        """Where something of a shape is computed now."""
        return place_of(self.modules(), shape)


#: Follows one operation, of which some operand is known.
Step = Callable[[Walk, Operation], None]
