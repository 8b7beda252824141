"""Attention's statistics as metrics of torchmetrics. Written by `make docs`."""

from typing import Any

from lightning_attn.functional.statistic_function import OverHeads
from lightning_attn.metrics.statistic_metric import AttentionStatistics as AttentionStatistics
from lightning_attn.metrics.statistic_metric import StateStatisticMetric, StatisticMetric

class AttentionAnySinkRate(StatisticMetric):
    r"""Share of sequences in which any key receives more than 0.3 from the queries that see it."""
    def __init__(
        self, num_heads: int, over_heads: OverHeads = "none", *, threshold: float = 0.3, **kwargs: Any
    ) -> None: ...

class AttentionDistance(StatisticMetric):
    r"""Mean distance :math:`\sum A_{ij} |i - j|` over that of uniform attention, :math:`\sum U_{ij} |i - j|`."""

class AttentionConsensusRate(StatisticMetric):
    r"""Mean over sequences of :math:`1 - |\lambda_2|`, with the second largest eigenvalue of the attention matrix."""

class AttentionEntropy(StatisticMetric):
    r"""Mean over rows of :math:`H_i / \log m_i`, with :math:`H_i = -\sum_j p_{ij} \log p_{ij}`."""

class AttentionEntropyWithoutSink(StatisticMetric):
    r"""The entropy without the key that receives most weight in its sequence and head; what is left is renormalised."""

class AttentionHiddenRowShare(StatisticMetric):
    r"""Share of rows without a visible key. Such rows are in no other statistic."""

class AttentionKLToUniform(StatisticMetric):
    r"""Mean over rows of :math:`\log m_i - H_i`, the divergence from uniform weights."""

class LeaderDistance(StateStatisticMetric):
    r"""Distance of the tokens that enter from the first of them, averaged over sequences."""

class AttentionLogitStd(StatisticMetric):
    r"""Mean over rows of the standard deviation of the visible logits."""

class AttentionMarginalGap(StatisticMetric):
    r"""Total variation distance of what keys receive from what the mask alone would give them."""

class MassiveActivation(StateStatisticMetric):
    r"""The largest entry of the states that enter over their median: the largest of all sequences."""

class MassiveActivationRate(StateStatisticMetric):
    r"""Share of sequences whose entering states meet the criterion of Sun et al. for massive activations."""
    def __init__(self, *, magnitude: float = 100.0, ratio: float = 1000.0, **kwargs: Any) -> None: ...

class AttentionMaxLogit(StatisticMetric):
    r"""The largest visible logit: after scale, soft-cap and bias."""

class AttentionMaxWeight(StatisticMetric):
    r"""Mean over rows of :math:`\max_j p_{ij}`."""

class AttentionNonFiniteShare(StatisticMetric):
    r"""Share of rows with a visible logit that is infinite or NaN. Such rows are in no other statistic."""

class AttentionPositionConcentration(StatisticMetric):
    r"""Share of all weight that goes to the first five keys that any query of the sequence can see."""

class AttentionPositionalShare(StatisticMetric):
    r"""Share of the pattern that the mean over sequences explains, corrected for the number of sequences."""

class AttentionPositionalShareWithoutSink(StatisticMetric):
    r"""`PositionalShare` of the matrix without the first visible key, whose rows are renormalised."""

class RankResidual(StateStatisticMetric):
    r"""What is left of the states that enter without their mean, averaged over sequences."""

class AttentionSelfWeight(StatisticMetric):
    r"""Mean weight that a token gives to itself; absent where queries and keys are not the same tokens."""

class SimilarityContraction(StateStatisticMetric):
    r"""By how much the mean cosine of two tokens is larger behind the module than before it, averaged over sequences."""

class AttentionSinkPosition(StatisticMetric):
    r"""Position of the most important key, :math:`\arg\max_k \alpha_k`; 0 is the first key that is seen at all."""

class AttentionSinkRate(StatisticMetric):
    r"""Share of sequences in which the first visible key receives more than 0.3 from the queries that see it."""
    def __init__(
        self, num_heads: int, over_heads: OverHeads = "none", *, threshold: float = 0.3, **kwargs: Any
    ) -> None: ...

class AttentionSinkStrength(StatisticMetric):
    r"""Mean weight on the first visible key, by the queries that can see it and are not it."""

class AttentionSpectralGap(StatisticMetric):
    r"""Spectral gap :math:`1 - \sigma_2 / \sigma_1` of the singular values, averaged over sequences."""

class AttentionStableRank(StatisticMetric):
    r"""Stable rank :math:`\|A\|_F^2 / \|A\|_2^2`, averaged over sequences."""

class AttentionToeplitzShare(StatisticMetric):
    r"""Share of the pattern that depends on :math:`i - j` alone, without the sink."""

class TokenSimilarity(StateStatisticMetric):
    r"""Mean cosine of all pairs of different tokens that enter, averaged over sequences."""

class AttentionUniformPositionConcentration(StatisticMetric):
    r"""What `PositionConcentration` would be of uniform attention under the same visibility."""

class AttentionValueContraction(StatisticMetric):
    r"""Spread of the head's output over the spread of its values, :math:`\|A V - \mu\|_F / \|V - \nu\|_F`."""

class AttentionValueWeightedSink(StatisticMetric):
    r"""Share of the first visible key where weights count by the length of what they bring."""
