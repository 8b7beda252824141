"""How alike the tokens of a sequence are: where attention has made them one, nothing is left to tell apart."""

from __future__ import annotations

import torch

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.state_statistic import StateStatistic, mean_where_defined
from lightning_attn.statistics.states.tokens import Tokens
from lightning_attn.statistics.statistic import Range, Ratio


@register
class TokenSimilarity(StateStatistic):
    r"""Mean cosine of all pairs of different tokens that enter, averaged over sequences.

    :math:`\bar\rho = \frac{n r^2 - 1}{n - 1}` with :math:`r = \|\frac1n \sum_i x_i / \|x_i\|\|`, which is exact and
    takes :math:`O(n d)`. A token whose state is zero has no direction and is in no pair.
    """

    name = "token_similarity"
    lens = "Consensus"
    range = Range("−1 / (n − 1)", 1)
    uniform = "any"
    example = 0.985075
    reading = "1: all tokens that enter point the same way. Watch the trend: trained language models are far from 0."
    source = "Rodríguez Abella et al. 2025, PMLR 267; Chen et al. 2026, arXiv:2510.05554"

    @classmethod
    def result(cls, entering: Tokens, leaving: Tokens | None) -> Ratio:
        """The similarity of each sequence with two tokens."""
        return mean_where_defined(entering.similarity_B, entering.has_pairs_B)


@register
class SimilarityContraction(StateStatistic):
    r"""By how much the mean cosine of two tokens is larger behind the module than before it, averaged over sequences.

    :math:`\bar\rho_\text{out} - \bar\rho_\text{in}`, before the output is added to the residual stream. It is a
    difference, since the ratio has no bounds where tokens are orthogonal, nor has that of
    :math:`1 - \bar\rho` where they are one.
    """

    name = "similarity_contraction"
    lens = "Consensus"
    range = Range(-2, 2)
    uniform = "1 − token_similarity; causal: any"
    example = 0.0
    reading = "Above 0: attention alone brings tokens together; below 0: it tells them apart."
    source = "Chen et al. 2026, arXiv:2510.05554"
    needs_leaving = True

    @classmethod
    def result(cls, entering: Tokens, leaving: Tokens | None) -> Ratio:
        """The difference for each sequence with two tokens on both sides."""
        if leaving is None:
            return mean_where_defined(entering.similarity_B, torch.zeros_like(entering.has_pairs_B))
        leaving_B = leaving.similarity_B.to(entering.similarity_B.device)
        defined_B = entering.has_pairs_B & leaving.has_pairs_B.to(entering.has_pairs_B.device)
        return mean_where_defined(leaving_B - entering.similarity_B, defined_B)


@register
class LeaderDistance(StateStatistic):
    r"""Distance of the tokens that enter from the first of them, averaged over sequences.

    :math:`1 - \frac1n \sum_j \cos(x_1, x_j)`, where :math:`x_1` is the first token that is no padding, and
    :math:`j = 1` is in the sum.
    """

    name = "leader_distance"
    lens = "Consensus"
    range = Range(0, 2)
    uniform = "any; orthogonal tokens: 1 − 1/n"
    example = 0.0146922
    reading = "Falling to 0 in the last layers: all tokens have followed the first one, as causal attention alone does."
    source = "Rodríguez Abella et al. 2025, PMLR 267"

    @classmethod
    def result(cls, entering: Tokens, leaving: Tokens | None) -> Ratio:
        """The distance in each sequence with two tokens, whose first one is not zero."""
        cosine_B = entering.leader_cosine_B
        return mean_where_defined((1 - cosine_B).clamp(min=0), entering.has_pairs_B)


@register
class LeaderDistanceOfOthers(StateStatistic):
    r"""Distance of the other tokens that enter from the first of them, averaged over sequences.

    :math:`1 - \frac1{n - 1} \sum_{j \ge 2} \cos(x_1, x_j)`: `LeaderDistance` without the first token's distance to
    itself, which is :math:`n / (n - 1)` times that, so that short sequences compare with long ones.
    """

    name = "leader_distance_of_others"
    lens = "Consensus"
    range = Range(0, 2)
    uniform = "any; orthogonal tokens: 1"
    example = 0.0149254
    reading = "As `leader_distance`, at any length: 1 where tokens have nothing to do with the first one."
    source = "Rodríguez Abella et al. 2025, PMLR 267"
    by_default = False

    @classmethod
    def result(cls, entering: Tokens, leaving: Tokens | None) -> Ratio:
        """The distance in each sequence with two tokens, whose first one is not zero."""
        cosine_B = entering.others_leader_cosine_B
        return mean_where_defined((1 - cosine_B).clamp(min=0), entering.has_pairs_B)


@register
class RankResidual(StateStatistic):
    r"""What is left of the states that enter without their mean, averaged over sequences.

    :math:`\|X - 1 \bar x^T\|_F / \|X\|_F` with :math:`\bar x` the mean token. The differences are squared, rather than
    squares subtracted, so that a collapse is seen down to the resolution of the states.
    """

    name = "rank_residual"
    lens = "Rank"
    range = Range(0, 1)
    uniform = "any"
    example = 0.121211
    reading = (
        "0: rank collapse, every token has the same state. Read it beside `token_similarity`, which ignores norms."
    )
    source = "Dong et al. 2021, arXiv:2103.03404"

    @classmethod
    def result(cls, entering: Tokens, leaving: Tokens | None) -> Ratio:
        """The share of each sequence with two tokens that are not both zero."""
        residual_B = (entering.deviation_square_sum_B / entering.square_sum_B).sqrt().clamp(max=1)
        return mean_where_defined(residual_B, entering.finite_B & (entering.count_B >= 2))
