"""Temperatures of attention: dividing the queries of every head by a number that changes while the model trains."""

from __future__ import annotations

from lightning_attn.temperature.attention_temperature import AttentionTemperature
from lightning_attn.temperature.control import HoldEntropy, HoldLogitScale, TemperatureControl
from lightning_attn.temperature.loading import load_temperatures
from lightning_attn.temperature.schedules import (
    ConstantTemperature,
    CosineTemperature,
    ExponentialTemperature,
    FunctionTemperature,
    HighToLow,
    LinearTemperature,
    LogLength,
    PiecewiseTemperature,
    SSMax,
    TemperatureSchedule,
)

__all__ = [
    "AttentionTemperature",
    "ConstantTemperature",
    "CosineTemperature",
    "ExponentialTemperature",
    "FunctionTemperature",
    "HighToLow",
    "HoldEntropy",
    "HoldLogitScale",
    "LinearTemperature",
    "LogLength",
    "PiecewiseTemperature",
    "SSMax",
    "TemperatureControl",
    "TemperatureSchedule",
    "load_temperatures",
]
