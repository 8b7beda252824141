"""The temperatures of the heads of one site, and what they do to its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_attn.temperature.folding import FoldedStateDict, LoadedWeights, fold, unfold, unfolded_rows
from lightning_attn.temperature.folding_proof import fold_proven
from lightning_attn.temperature.projection import QueryProjection
from lightning_attn.temperature.proof import Proven
from lightning_attn.temperature.scaling import ChannelScale, release, scale_outputs


class SiteTemperature:
    """Divides the queries of each head of a site by its temperature while it is attached.

    In memory the parameters are what is trained; state dicts of the model hold them with the temperatures written into
    them, and so does the model itself once this is detached. Weights that are loaded meanwhile are taken for such as
    well: the temperatures become one.

    Args:
        site: its name.
        proven: what makes its queries.
    """

    def __init__(self, site: str, proven: Proven) -> None:
        self.site = site
        #: How many heads it has.
        self.heads = len(proven.bias_std)
        self.projection = proven.projection
        #: (H,) see `Proven`.
        self.bias_std = proven.bias_std
        self._log_temperatures = torch.zeros(self.projection.temperatures, dtype=torch.float64)
        self._scale = ChannelScale.of(self.projection)
        self._copies: list[QueryProjection] = []
        self._is_attached = False

    @property
    def log_temperatures(self) -> Tensor:
        """Natural logarithms of the temperatures in float64: one for each head, or one for all."""
        # Weights that were loaded make the scale neutral.
        return torch.zeros_like(self._log_temperatures) if self._scale.is_neutral else self._log_temperatures

    @property
    def is_shared(self) -> bool:
        """Whether all heads have one temperature."""
        return self.projection.temperatures == 1 < self.heads

    @property
    def is_foldable(self) -> bool:
        """Whether the temperatures can be written into parameters."""
        return bool(self.projection.parameters)

    @property
    def temperatures(self) -> list[float]:
        """The temperature of each head."""
        return self.log_temperatures.exp().expand(self.heads).tolist()

    def attach(self, copies: Sequence[nn.Module] = ()) -> None:
        """Begin to divide queries.

        Args:
            copies: models that are built alike and are to have the same temperatures: averages of this one.
        """
        self._copies = [self.projection.of(copy) for copy in copies]
        for held in self._held():
            release(held.module)  # a copy has what was on it when it was made
            scale_outputs(held, self._scale)
            held.module.register_state_dict_post_hook(FoldedStateDict(self._scale))
        self.projection.module.register_load_state_dict_pre_hook(LoadedWeights(self._scale))
        self._is_attached = True
        self.set(self.log_temperatures)

    def fold(self) -> str:
        """Write the temperatures into the parameters, and leave nothing behind, where the module then gives the same.

        Returns:
            Why it does not; all is as it was, and this stays attached.
        """
        if self._is_attached and not self._scale.is_neutral:
            if not self.is_foldable:
                return "its queries come from a norm without a gain"
            reason = fold_proven(self.projection, self._scale.multiplier_O)
            if reason:
                return reason
            for held in self._copies:
                fold(held, self._scale.multiplier_O)
            self._scale.reset()
        self.detach()
        return ""

    def detach(self) -> None:
        """Write the temperatures into the parameters, and leave nothing behind."""
        if not self._is_attached:
            return
        for held in self._held():
            if not self._scale.is_neutral:
                fold(held, self._scale.multiplier_O)
            release(held.module)
        # Code that was compiled meanwhile holds its tensor, and goes on multiplying with it.
        self._scale.reset()
        self._is_attached, self._copies = False, []

    def set(self, log_temperatures: Tensor) -> None:
        """Change the temperatures."""
        self._log_temperatures = log_temperatures.to("cpu", torch.float64)
        is_neutral = bool((self._log_temperatures == 0).all())
        self._scale.set(self.projection.multiplier((-self._log_temperatures).exp()), is_neutral)

    def state_dict(self) -> dict[str, Any]:
        """What goes on with the temperatures after a restart, to the last digit; all ranks must ask."""
        changed = self.log_temperatures.nonzero()[:, 0]
        return {
            "projection": self.projection.to_dict(),
            "bias_std": self.bias_std,
            "log_temperatures": self.log_temperatures,
            "unfolded": [unfolded_rows(held, changed) if len(changed) else {} for held in self._held()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go on with temperatures whose model has been loaded, before or after this is attached.

        Returns:
            Whether that was done. Where the weights are not those that belong to the temperatures, they are left as
            they are.
        """
        log_temperatures: Tensor = state["log_temperatures"]
        changed = log_temperatures.nonzero()[:, 0]
        if not len(changed) or not self.is_foldable:
            self.set(log_temperatures)
            return True
        multiplier = ChannelScale.of(
            self.projection, self.projection.multiplier((-log_temperatures).exp())
        ).multiplier_O
        done = [
            unfold(held, changed, unfolded, multiplier)
            for held, unfolded in zip(self._held(), state["unfolded"], strict=False)
        ]
        if done[0]:
            self.set(log_temperatures)
        return done[0]

    @classmethod
    def from_state(cls, site: str, state: Mapping[str, Any], model: nn.Module) -> SiteTemperature:
        """The temperatures of a model's site, all one still.

        Raises:
            AttributeError: if the model has no such module.
        """
        return cls(site, Proven(QueryProjection.from_dict(state["projection"], model), state["bias_std"]))

    def _held(self) -> tuple[QueryProjection, ...]:
        return (self.projection, *self._copies)
