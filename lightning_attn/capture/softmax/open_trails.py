"""What of an attention was begun and not ended: where its trail was lost, so that this can be said.

Only shapes and modules are remembered, no tensor.
"""

from __future__ import annotations

from torch import Size, nn

from lightning_attn.capture.axes import Axes

#: Where something was computed, and in what shape.
Place = tuple[nn.Module | None, Size]


class OpenTrails:
    """Logits without a softmax, and softmaxes that have multiplied nothing, by the module and the shape of each."""

    def __init__(self) -> None:
        self._logits: dict[Place, Axes] = {}
        self._weights: dict[Place, Axes] = {}

    @property
    def has_logits(self) -> bool:
        """Whether any product has not come to a softmax."""
        return bool(self._logits)

    @property
    def has_weights(self) -> bool:
        """Whether any softmax has multiplied nothing."""
        return bool(self._weights)

    def begin_logits(self, place: Place, axes: Axes) -> None:
        """A product of two activations."""
        self._logits[place] = axes

    def end_logits(self, place: Place) -> None:
        """It has come to a softmax."""
        self._logits.pop(place, None)

    def logits(self, place: Place) -> Axes | None:
        """What the axes of such a product mean, if there is one that has not come to a softmax."""
        return self._logits.get(place)

    def begin_weights(self, place: Place, axes: Axes) -> None:
        """A softmax of such a product."""
        self._weights[place] = axes

    def end_weights(self, place: Place) -> None:
        """It has multiplied values."""
        self._weights.pop(place, None)

    def weights(self, place: Place) -> Axes | None:
        """What the axes of such a softmax mean, if there is one that has multiplied nothing."""
        return self._weights.get(place)


def place_of(modules: tuple[nn.Module, ...], shape: Size) -> Place:
    """Where something was computed: the innermost module that has parameters."""
    for module in modules:
        if next(module.parameters(), None) is not None:
            return module, shape
    return (modules[0] if modules else None), shape
