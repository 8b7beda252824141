"""Pictures, layouts and tables for TensorBoard."""

from torch.utils.tensorboard import SummaryWriter

from lightning_attn.tensorboard.heat_map import heat_map
from lightning_attn.tensorboard.layout import Layout, scalar_layout
from lightning_attn.tensorboard.text import statistics_table, transitions_table

__all__ = ["Layout", "SummaryWriter", "heat_map", "scalar_layout", "statistics_table", "transitions_table"]
