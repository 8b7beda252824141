"""Pictures of snapshots for TensorBoard."""

from torch.utils.tensorboard import SummaryWriter

from lightning_attn.tensorboard.heat_map import heat_map

__all__ = ["SummaryWriter", "heat_map"]
