"""Batches of which each rank gets a part, and a model for which it makes no difference who got which.

The loss is a sum over sequences, divided so that the mean over ranks, which is what they take of gradients, is the mean
over the whole batch however uneven its parts are. In double precision ranks then train as one process does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_attn.joined_ranks import JoinedRanks

VOCABULARY, WIDTH, HEADS, LENGTH = 16, 16, 2, 64
SEQUENCES = 8

#: How many sequences of every batch each rank gets.
EVEN = {2: (4, 4), 4: (2, 2, 2, 2)}
UNEVEN = {2: (6, 2), 4: (3, 2, 0, 3)}


class Attention(nn.Module):
    """Causal, or bidirectional with padding."""

    def __init__(self, is_causal: bool, dropout: float) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.dropout = dropout
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, real: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            3 * query,
            key,
            value,
            attn_mask=None if self.is_causal else real[:, None, None],
            is_causal=self.is_causal,
            dropout_p=self.dropout,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, is_causal: bool, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(is_causal, dropout)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor, real: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden), real)
        return hidden + self.feed_forward(hidden)


class Transformer(nn.Module):
    """A causal block and a bidirectional one by turns, so that every statistic has a value somewhere."""

    def __init__(self, blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(number % 2 == 0, dropout) for number in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, recompute: bool | None = None) -> Tensor:
        """The logits of the next tokens; blocks are recomputed in the backward pass if `recompute` is not None."""
        hidden, real = self.embedding(tokens), is_real(tokens)
        for block in self.blocks:
            if recompute is None:
                hidden = block(hidden, real)
            else:
                hidden = checkpoint(block, hidden, real, use_reentrant=recompute)
        return self.head(hidden)


def is_real(tokens: Tensor) -> Tensor:
    """Sequences of 5 tokens and more; the others are padding."""
    return torch.arange(LENGTH) < 5 + 4 * tokens[:, :1]


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Such that its mean over ranks is the mean over the sequences of all of them."""
    of_tokens = functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return of_tokens.sum() * JoinedRanks.of(None).size / (SEQUENCES * LENGTH)


def batch(number: int) -> Tensor:
    """One of the batches, whole."""
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(number))


def parts(tokens: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The parts of a batch, one rank's after the other's."""
    return [tokens[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


class SharesBatches(pl.LightningModule):
    """Trains on a part of each batch.

    Args:
        sizes: how many sequences of every batch each rank gets; on a single rank, into what parts it divides it.
        blocks: how many.
        dropout: of attention weights.
        recompute: whether activation checkpoints are reentrant; ``None`` for none.
        head: whether there is a head that is not used.
        batches: how many.
    """

    def __init__(
        self,
        sizes: tuple[int, ...] = (SEQUENCES,),
        blocks: int = 2,
        dropout: float = 0.0,
        recompute: bool | None = None,
        head: bool = False,
        batches: int = 2,
    ) -> None:
        super().__init__()
        torch.manual_seed(1)  # the same model on every rank
        self.transformer = Transformer(blocks, dropout).double()
        self.unused = nn.Linear(WIDTH, 2).double() if head else None
        self.sizes = sizes
        self.recompute = recompute
        self.batches = batches
        self.losses: list[float] = []
        self.gradients: list[list[Tensor]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        return loss_of(self.transformer(tokens, self.recompute), tokens)

    def training_step(self, pieces: list[Tensor], batch_idx: int) -> Tensor:
        loss = torch.stack([self(piece) for piece in pieces]).sum()
        self.losses.append(loss.item())
        return loss

    def on_after_backward(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
        self.gradients.append([gradient.clone() for gradient in local])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        pieces = [parts(batch(number), self.sizes) for number in range(self.batches)]
        if JoinedRanks.of(None).are_several:
            pieces = [[of_batch[self.global_rank]] for of_batch in pieces]
        return DataLoader(pieces, batch_size=None)  # type: ignore[arg-type]
