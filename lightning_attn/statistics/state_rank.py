"""How many directions the hidden states of a fixed number of tokens use.

Ranks grow with the number of tokens they are taken of, so that those of different lengths could not be compared.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.state_statistic import StateStatistic, mean_where_defined
from lightning_attn.statistics.states.state_spectrum import centred_energies
from lightning_attn.statistics.states.tokens import Tokens
from lightning_attn.statistics.statistic import Range, Ratio


class StateRank(StateStatistic):
    r"""A rank of :math:`X - 1 \bar x^\top`, with the states of evenly spaced tokens that enter for the rows of X.

    Absent where a sequence has fewer tokens than are looked at. It is 0 where all of them are equal, as the rank of the
    zero matrix is: there the collapse is complete, and a number that is missing would not say so.
    """

    #: How many tokens of each sequence are looked at, at least 2; the first is one of them.
    tokens: ClassVar[int] = 64
    parameters = ("tokens",)
    range = Range(0, "tokens − 1")
    uniform = "any"
    by_default = False

    @classmethod
    def result(cls, entering: Tokens, leaving: Tokens | None) -> Ratio:
        """The rank for each sequence that has so many tokens."""
        if cls.tokens < 2:
            raise ValueError(f"`tokens` must be at least 2, got {cls.tokens}.")
        energies_BT = entering.shared(centred_energies, cls.tokens)
        rank_B = torch.where(energies_BT[:, -1] > 0, cls.rank(energies_BT), 0.0)
        return mean_where_defined(rank_B, entering.finite_B & (entering.count_B >= cls.tokens))

    @classmethod
    @abstractmethod
    def rank(cls, energies_BT: Tensor) -> Tensor:
        """The rank of matrices with these squared singular values, the largest of which is 1; anything without one."""


@register
class StateStableRank(StateRank):
    r"""Stable rank of centred states, :math:`\sum_k \sigma_k^2 / \sigma_1^2`, averaged over sequences.

    :math:`\sigma_k` are the singular values of :math:`X - 1 \bar x^\top`, with the states of as many evenly spaced
    tokens as are looked at, the first among them, for the rows of X. Absent of sequences that have fewer tokens.
    """

    name = "state_stable_rank"
    lens = "Rank"
    example = 63.0
    reading = (
        "1: the tokens differ along one direction, as where one has a massive activation; 0: they are equal. "
        "Of 64 tokens, so that lengths can be compared; `rank_residual` tells how much they differ."
    )
    source = "Rudelson & Vershynin 2007, arXiv:math/0503442; Dong et al. 2021, arXiv:2103.03404"

    @classmethod
    def rank(cls, energies_BT: Tensor) -> Tensor:
        """Their sum."""
        return energies_BT.sum(-1)


@register
class StateEffectiveRank(StateRank):
    r"""Effective rank of centred states, :math:`\exp H(\sigma / \sum_k \sigma_k)`, averaged over sequences.

    :math:`\sigma_k` are the singular values of :math:`X - 1 \bar x^\top`, with the states of as many evenly spaced
    tokens as are looked at, the first among them, for the rows of X. Absent of sequences that have fewer tokens.
    """

    name = "state_effective_rank"
    lens = "Rank"
    example = 63.0
    reading = (
        "How many directions the tokens differ along, weak ones included; near a collapse these are the states' own "
        "rounding. 0: they are equal. Of 64 tokens, so that lengths can be compared."
    )
    source = "Roy & Vetterli 2007 (EUSIPCO)"

    @classmethod
    def rank(cls, energies_BT: Tensor) -> Tensor:
        """The exponential of the entropy of their roots."""
        singular_BT = energies_BT.sqrt()
        entropy_B: Tensor = torch.special.entr(singular_BT / singular_BT.sum(-1, keepdim=True)).sum(-1)
        return entropy_B.exp()


@register
class StateParticipationRatio(StateRank):
    r"""Participation ratio of centred states, :math:`(\sum_k \sigma_k^2)^2 / \sum_k \sigma_k^4`, over sequences.

    :math:`\sigma_k` are the singular values of :math:`X - 1 \bar x^\top`, with the states of as many evenly spaced
    tokens as are looked at, the first among them, for the rows of X. Absent of sequences that have fewer tokens.
    """

    name = "state_participation_ratio"
    lens = "Rank"
    example = 63.0
    reading = (
        "How many directions carry the variance of the tokens: the dimension of their cloud. 0: they are equal. "
        "Of 64 tokens, so that lengths can be compared."
    )
    source = "Gao et al. 2017, bioRxiv 214262"

    @classmethod
    def rank(cls, energies_BT: Tensor) -> Tensor:
        """The square of their sum over the sum of their squares."""
        return energies_BT.sum(-1).square() / energies_BT.square().sum(-1)
