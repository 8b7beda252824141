"""Temperatures for models that cannot hold them in their weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_attn.temperature.attention_temperature import AttentionTemperature

_CALLBACK = "AdaptiveTemperature"


def load_temperatures(
    model: nn.Module, checkpoint: str | os.PathLike[str] | Mapping[str, Any], prefix: str = ""
) -> AttentionTemperature:
    """Give a trained model the temperatures that could not be written into its weights.

    Where queries come from a norm without a gain there is no weight to write them into; the callback says so when
    training starts. All other sites have theirs in the weights of the checkpoint, and are left alone.

    Args:
        model: has the weights of the checkpoint.
        checkpoint: of a Lightning Trainer with an `AdaptiveTemperature`: its path, or what is in it.
        prefix: what names in the checkpoint begin with before those of the model, such as ``"net."`` for
            ``lightning_module.net``.

    Returns:
        The temperatures, which are attached to the model; `AttentionTemperature.detach` takes them off.

    Raises:
        ValueError: if the checkpoint has no state of the callback, or the model has no module of such a name.
    """
    saved: Mapping[str, Any] = checkpoint if isinstance(checkpoint, Mapping) else _read(checkpoint)
    states = [state for key, state in saved.get("callbacks", {}).items() if key.split("{")[0] == _CALLBACK]
    if not states:
        raise ValueError(f"`checkpoint` holds no state of {_CALLBACK}; was it saved with `save_weights_only=True`?")
    wanted = {
        site.removeprefix(prefix): _renamed(of_site, prefix)
        for state in states
        for site, of_site in state.get("sites", {}).items()
        if not of_site["projection"]["parameters"]
    }
    temperature = AttentionTemperature(model)
    others = temperature.load_state_dict(wanted)
    if others:
        temperature.detach()
        raise ValueError(
            f"`model` has no {others[0]!r}, of which the checkpoint has a temperature. Where it is a part of the model "
            f"that was trained, name the rest by `prefix`, such as 'model.'; it is {prefix!r}."
        )
    return temperature


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    content: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content


def _renamed(of_site: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    projection = of_site["projection"]
    return {**of_site, "projection": {**projection, "name": projection["name"].removeprefix(prefix)}}
