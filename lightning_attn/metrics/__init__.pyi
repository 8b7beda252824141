"""Attention's statistics as metrics of torchmetrics. Written by `make docs`."""

from typing import Any

from lightning_attn.functional.statistic_function import OverHeads
from lightning_attn.metrics.permutation import PermutationResponse as PermutationResponse
from lightning_attn.metrics.rollout import RolloutFirstTokenMass as RolloutFirstTokenMass
from lightning_attn.metrics.statistic_metric import AttentionStatistics as AttentionStatistics
from lightning_attn.metrics.statistic_metric import StateStatisticMetric, StatisticMetric

class AttentionAnySinkRate(StatisticMetric):
    r"""Share of sequences in which any key receives more than 0.3 from the queries that see it."""
    def __init__(
        self, num_heads: int, over_heads: OverHeads = "none", *, threshold: float = 0.3, **kwargs: Any
    ) -> None: ...

class AttentionDistance(StatisticMetric):
    r"""Mean distance :math:`\sum A_{ij} |i - j|` over that of uniform attention, :math:`\sum U_{ij} |i - j|`."""

class AttentionCentredStableRank(StatisticMetric):
    r"""Stable rank of what sets the head apart from uniform attention, :math:`\|A - U\|_F^2 / \|A - U\|_2^2`."""

class AttentionConsensusRate(StatisticMetric):
    r"""Mean over sequences of :math:`1 - |\lambda_2|`, with the second largest eigenvalue of the attention matrix."""

class AttentionCriticalScaling(StatisticMetric):
    r"""How sharply tokens tell themselves from others, in units of what as many tokens need."""

class AttentionDobrushin(StatisticMetric):
    r"""Mean over sequences of Dobrushin's coefficient :math:`\tau(A) = \frac12 \max_{i,k} \|A_i - A_k\|_1`."""

class AttentionDobrushinBound(StatisticMetric):
    r"""Mean over sequences of :math:`\max_i \sum_j A_{ij} - \sum_j \min_i A_{ij}`."""

class AttentionEffectiveRank(StatisticMetric):
    r"""Effective rank :math:`\exp(-\sum_k p_k \log p_k)` with :math:`p_k = \sigma_k / \sum_l \sigma_l`, over sequences."""

class AttentionEntropy(StatisticMetric):
    r"""Mean over rows of :math:`H_i / \log m_i`, with :math:`H_i = -\sum_j p_{ij} \log p_{ij}`."""

class AttentionEntropyFloor(StatisticMetric):
    r"""Mean over rows of the least entropy that their logits allow, over :math:`\log m_i`."""

class AttentionEntropyGrowth(StatisticMetric):
    r"""By how much entropy grows with the number of visible keys, :math:`d H / d \log m`."""

class AttentionEntropyWithoutSink(StatisticMetric):
    r"""The entropy without the key that receives most weight in its sequence and head; what is left is renormalised."""

class AttentionFreeEnergy(StatisticMetric):
    r"""Mean over rows of :math:`-\log \sum_j e^{z_{ij}}`, the least that cost minus entropy can be."""

class AttentionHiddenRowShare(StatisticMetric):
    r"""Share of rows without a visible key. Such rows are in no other statistic."""

class AttentionKLToUniform(StatisticMetric):
    r"""Mean over rows of :math:`\log m_i - H_i`, the divergence from uniform weights."""

class AttentionLargeLogitRatio(StatisticMetric):
    r"""Share of the visible logits that exceed a limit."""
    def __init__(
        self, num_heads: int, over_heads: OverHeads = "none", *, limit: float = 100.0, **kwargs: Any
    ) -> None: ...

class LeaderDistance(StateStatisticMetric):
    r"""Distance of the tokens that enter from the first of them, averaged over sequences."""

class LeaderDistanceOfOthers(StateStatisticMetric):
    r"""Distance of the other tokens that enter from the first of them, averaged over sequences."""

class AttentionLeaderMass(StatisticMetric):
    r"""Mean over sequences of :math:`\max_j \pi_j`, with the stationary distribution :math:`\pi = \pi A` of the tokens."""

class AttentionLeaderPosition(StatisticMetric):
    r"""Mean over sequences of how many tokens come before the one with the largest stationary mass."""

class AttentionLogitSpacing(StatisticMetric):
    r"""The distance between neighbouring numbers of the dtype of queries and keys, where the largest logits are."""

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

class AttentionParticipationRatio(StatisticMetric):
    r"""Participation ratio :math:`(\sum_k \sigma_k^2)^2 / \sum_k \sigma_k^4`, averaged over sequences."""

class AttentionPositionConcentration(StatisticMetric):
    r"""Share of all weight that goes to the first five keys that any query of the sequence can see."""

class AttentionPositionalShare(StatisticMetric):
    r"""Share of the pattern that the mean over sequences explains, corrected for the number of sequences."""

class AttentionPositionalShareWithoutSink(StatisticMetric):
    r"""`PositionalShare` of the matrix without the first visible key, whose rows are renormalised."""

class RankResidual(StateStatisticMetric):
    r"""What is left of the states that enter without their mean, averaged over sequences."""

class AttentionRowStochasticityError(StatisticMetric):
    r"""Mean over rows of :math:`|\sum_j A_{ij} - 1|`, with the weights as the model uses them."""

class AttentionSelectivity(StatisticMetric):
    r"""Mean over rows of :math:`\operatorname{std}(z_i) / \sqrt{2 \log m_i}`, of the visible logits."""

class AttentionSelfWeight(StatisticMetric):
    r"""Mean weight that a token gives to itself; absent where queries and keys are not the same tokens."""

class SimilarityContraction(StateStatisticMetric):
    r"""By how much the mean cosine of two tokens is larger behind the module than before it, averaged over sequences."""

class AttentionSinkLogitMass(StatisticMetric):
    r"""Mean over rows of the share of the softmax that went to a learned sink logit, :math:`1 - \sum_j A_{ij}`."""

class AttentionSinkPosition(StatisticMetric):
    r"""Position of the most important key, :math:`\arg\max_k \alpha_k`; 0 is the first key that is seen at all."""

class AttentionSinkRate(StatisticMetric):
    r"""Share of sequences in which the first visible key receives more than 0.3 from the queries that see it."""
    def __init__(
        self, num_heads: int, over_heads: OverHeads = "none", *, threshold: float = 0.3, **kwargs: Any
    ) -> None: ...

class AttentionSinkStrength(StatisticMetric):
    r"""Mean weight on the first visible key, by the queries that can see it and are not it."""

class AttentionSinkhornDistance(StatisticMetric):
    r"""Mean over rows of the total variation :math:`\frac12 \sum_j |A_{ij} - P_{ij}|` to the balanced plan."""

class AttentionSoftmaxSensitivity(StatisticMetric):
    r"""Mean over rows of :math:`1 - \sum_j p_{ij}^2`, the trace of the Jacobian of the row's softmax."""

class AttentionSpectralGap(StatisticMetric):
    r"""Spectral gap :math:`1 - \sigma_2 / \sigma_1` of the singular values, averaged over sequences."""

class AttentionStableRank(StatisticMetric):
    r"""Stable rank :math:`\|A\|_F^2 / \|A\|_2^2`, averaged over sequences."""

class StateEffectiveRank(StateStatisticMetric):
    r"""Effective rank of centred states, :math:`\exp H(\sigma / \sum_k \sigma_k)`, averaged over sequences."""
    def __init__(self, *, tokens: int = 64, **kwargs: Any) -> None: ...

class StateParticipationRatio(StateStatisticMetric):
    r"""Participation ratio of centred states, :math:`(\sum_k \sigma_k^2)^2 / \sum_k \sigma_k^4`, over sequences."""
    def __init__(self, *, tokens: int = 64, **kwargs: Any) -> None: ...

class StateStableRank(StateStatisticMetric):
    r"""Stable rank of centred states, :math:`\sum_k \sigma_k^2 / \sigma_1^2`, averaged over sequences."""
    def __init__(self, *, tokens: int = 64, **kwargs: Any) -> None: ...

class AttentionToeplitzShare(StatisticMetric):
    r"""Share of the pattern that depends on :math:`i - j` alone, without the sink."""

class TokenSimilarity(StateStatisticMetric):
    r"""Mean cosine of all pairs of different tokens that enter, averaged over sequences."""

class AttentionTransportCost(StatisticMetric):
    r"""Mean over rows of :math:`\langle p_i, -z_i \rangle`, what the weights pay for the keys that they go to."""

class AttentionUniformPositionConcentration(StatisticMetric):
    r"""What `PositionConcentration` would be of uniform attention under the same visibility."""

class AttentionValueContraction(StatisticMetric):
    r"""Spread of the head's output over the spread of its values, :math:`\|A V - \mu\|_F / \|V - \nu\|_F`."""

class AttentionValueWeightedSink(StatisticMetric):
    r"""Share of the first visible key where weights count by the length of what they bring."""
