"""Attention's statistics as functions of tensors. Written by `make docs`."""

from torch import Tensor

from lightning_attn.capture.call import AttentionCall
from lightning_attn.functional.attention import attention_call as attention_call
from lightning_attn.functional.balanced_transport import sinkhorn as sinkhorn
from lightning_attn.functional.composite_residual import rank_residual_composite as rank_residual_composite
from lightning_attn.functional.consensus import stationary_distribution as stationary_distribution
from lightning_attn.functional.critical_scaling import critical_gamma as critical_gamma
from lightning_attn.functional.critical_scaling import estimated_gamma as estimated_gamma
from lightning_attn.functional.critical_scaling import predicted_self_weight as predicted_self_weight
from lightning_attn.functional.critical_scaling import predicted_similarity as predicted_similarity
from lightning_attn.functional.floor import entropy_floor as entropy_floor
from lightning_attn.functional.marginals import key_marginal as key_marginal
from lightning_attn.functional.marginals import reference_key_marginal as reference_key_marginal
from lightning_attn.functional.permutation import permutation_response as permutation_response
from lightning_attn.functional.ranks import effective_rank as effective_rank
from lightning_attn.functional.ranks import participation_ratio as participation_ratio
from lightning_attn.functional.ranks import stable_rank as stable_rank
from lightning_attn.functional.rollout import attention_rollout as attention_rollout
from lightning_attn.functional.rollout import rollout_first_token_mass as rollout_first_token_mass
from lightning_attn.functional.rollout import uniform_rollout_first_token_mass as uniform_rollout_first_token_mass
from lightning_attn.functional.sinks import sink_importance as sink_importance
from lightning_attn.functional.sinks import uniform_sink_importance as uniform_sink_importance
from lightning_attn.functional.statistic_function import OverHeads
from lightning_attn.functional.statistic_function import attention_statistics as attention_statistics
from lightning_attn.functional.transport import free_energy as free_energy
from lightning_attn.functional.transport import transport_cost as transport_cost
from lightning_attn.functional.transport import transport_plan as transport_plan

def attention_any_sink_rate(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    threshold: float = 0.3,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Share of sequences in which any key receives more than 0.3 from the queries that see it."""

def attention_distance(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean distance :math:`\sum A_{ij} |i - j|` over that of uniform attention, :math:`\sum U_{ij} |i - j|`."""

def attention_centred_stable_rank(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Stable rank of what sets the head apart from uniform attention, :math:`\|A - U\|_F^2 / \|A - U\|_2^2`."""

def attention_consensus_rate(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over sequences of :math:`1 - |\lambda_2|`, with the second largest eigenvalue of the attention matrix."""

def attention_critical_scaling(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""How sharply tokens tell themselves from others, in units of what as many tokens need."""

def attention_dobrushin(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over sequences of Dobrushin's coefficient :math:`\tau(A) = \frac12 \max_{i,k} \|A_i - A_k\|_1`."""

def attention_dobrushin_bound(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over sequences of :math:`\max_i \sum_j A_{ij} - \sum_j \min_i A_{ij}`."""

def attention_effective_rank(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Effective rank :math:`\exp(-\sum_k p_k \log p_k)` with :math:`p_k = \sigma_k / \sum_l \sigma_l`, over sequences."""

def attention_entropy(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over rows of :math:`H_i / \log m_i`, with :math:`H_i = -\sum_j p_{ij} \log p_{ij}`."""

def attention_entropy_floor(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over rows of the least entropy that their logits allow, over :math:`\log m_i`."""

def attention_entropy_growth(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""By how much entropy grows with the number of visible keys, :math:`d H / d \log m`."""

def attention_entropy_without_sink(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""The entropy without the key that receives most weight in its sequence and head; what is left is renormalised."""

def attention_free_energy(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over rows of :math:`-\log \sum_j e^{z_{ij}}`, the least that cost minus entropy can be."""

def attention_hidden_row_share(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Share of rows without a visible key. Such rows are in no other statistic."""

def attention_kl_to_uniform(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over rows of :math:`\log m_i - H_i`, the divergence from uniform weights."""

def attention_large_logit_ratio(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    limit: float = 100.0,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Share of the visible logits that exceed a limit."""

def leader_distance(entering: Tensor, leaving: Tensor | None = None, token_mask: Tensor | None = None) -> Tensor:
    r"""Distance of the tokens that enter from the first of them, averaged over sequences."""

def leader_distance_of_others(
    entering: Tensor, leaving: Tensor | None = None, token_mask: Tensor | None = None
) -> Tensor:
    r"""Distance of the other tokens that enter from the first of them, averaged over sequences."""

def attention_leader_mass(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over sequences of :math:`\max_j \pi_j`, with the stationary distribution :math:`\pi = \pi A` of the tokens."""

def attention_leader_position(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over sequences of how many tokens come before the one with the largest stationary mass."""

def attention_logit_spacing(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""The distance between neighbouring numbers of the dtype of queries and keys, where the largest logits are."""

def attention_logit_std(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over rows of the standard deviation of the visible logits."""

def attention_marginal_gap(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Total variation distance of what keys receive from what the mask alone would give them."""

def massive_activation(entering: Tensor, leaving: Tensor | None = None, token_mask: Tensor | None = None) -> Tensor:
    r"""The largest entry of the states that enter over their median: the largest of all sequences."""

def massive_activation_rate(
    entering: Tensor,
    leaving: Tensor | None = None,
    token_mask: Tensor | None = None,
    *,
    magnitude: float = 100.0,
    ratio: float = 1000.0,
) -> Tensor:
    r"""Share of sequences whose entering states meet the criterion of Sun et al. for massive activations."""

def attention_max_logit(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""The largest visible logit: after scale, soft-cap and bias."""

def attention_max_weight(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over rows of :math:`\max_j p_{ij}`."""

def attention_non_finite_share(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Share of rows with a visible logit that is infinite or NaN. Such rows are in no other statistic."""

def attention_participation_ratio(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Participation ratio :math:`(\sum_k \sigma_k^2)^2 / \sum_k \sigma_k^4`, averaged over sequences."""

def attention_position_concentration(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Share of all weight that goes to the first five keys that any query of the sequence can see."""

def attention_positional_share(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Share of the pattern that the mean over sequences explains, corrected for the number of sequences."""

def attention_positional_share_without_sink(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""`PositionalShare` of the matrix without the first visible key, whose rows are renormalised."""

def rank_residual(entering: Tensor, leaving: Tensor | None = None, token_mask: Tensor | None = None) -> Tensor:
    r"""What is left of the states that enter without their mean, averaged over sequences."""

def attention_row_stochasticity_error(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over rows of :math:`|\sum_j A_{ij} - 1|`, with the weights as the model uses them."""

def attention_selectivity(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over rows of :math:`\operatorname{std}(z_i) / \sqrt{2 \log m_i}`, of the visible logits."""

def attention_self_weight(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean weight that a token gives to itself; absent where queries and keys are not the same tokens."""

def similarity_contraction(entering: Tensor, leaving: Tensor | None = None, token_mask: Tensor | None = None) -> Tensor:
    r"""By how much the mean cosine of two tokens is larger behind the module than before it, averaged over sequences."""

def attention_sink_logit_mass(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over rows of the share of the softmax that went to a learned sink logit, :math:`1 - \sum_j A_{ij}`."""

def attention_sink_position(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Position of the most important key, :math:`\arg\max_k \alpha_k`; 0 is the first key that is seen at all."""

def attention_sink_rate(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    threshold: float = 0.3,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Share of sequences in which the first visible key receives more than 0.3 from the queries that see it."""

def attention_sink_strength(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean weight on the first visible key, by the queries that can see it and are not it."""

def attention_sinkhorn_distance(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over rows of the total variation :math:`\frac12 \sum_j |A_{ij} - P_{ij}|` to the balanced plan."""

def attention_softmax_sensitivity(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over rows of :math:`1 - \sum_j p_{ij}^2`, the trace of the Jacobian of the row's softmax."""

def attention_spectral_gap(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Spectral gap :math:`1 - \sigma_2 / \sigma_1` of the singular values, averaged over sequences."""

def attention_stable_rank(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Stable rank :math:`\|A\|_F^2 / \|A\|_2^2`, averaged over sequences."""

def state_effective_rank(
    entering: Tensor, leaving: Tensor | None = None, token_mask: Tensor | None = None, *, tokens: int = 64
) -> Tensor:
    r"""Effective rank of centred states, :math:`\exp H(\sigma / \sum_k \sigma_k)`, averaged over sequences."""

def state_participation_ratio(
    entering: Tensor, leaving: Tensor | None = None, token_mask: Tensor | None = None, *, tokens: int = 64
) -> Tensor:
    r"""Participation ratio of centred states, :math:`(\sum_k \sigma_k^2)^2 / \sum_k \sigma_k^4`, over sequences."""

def state_stable_rank(
    entering: Tensor, leaving: Tensor | None = None, token_mask: Tensor | None = None, *, tokens: int = 64
) -> Tensor:
    r"""Stable rank of centred states, :math:`\sum_k \sigma_k^2 / \sigma_1^2`, averaged over sequences."""

def attention_toeplitz_share(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Share of the pattern that depends on :math:`i - j` alone, without the sink."""

def token_similarity(entering: Tensor, leaving: Tensor | None = None, token_mask: Tensor | None = None) -> Tensor:
    r"""Mean cosine of all pairs of different tokens that enter, averaged over sequences."""

def attention_transport_cost(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Mean over rows of :math:`\langle p_i, -z_i \rangle`, what the weights pay for the keys that they go to."""

def attention_uniform_position_concentration(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""What `PositionConcentration` would be of uniform attention under the same visibility."""

def attention_value_contraction(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Spread of the head's output over the spread of its values, :math:`\|A V - \mu\|_F / \|V - \nu\|_F`."""

def attention_value_weighted_sink(
    weights: Tensor | AttentionCall | None = None,
    mask: Tensor | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    self_attention: bool | None = None,
    validate_args: bool = True,
    over_heads: OverHeads = "none",
) -> Tensor:
    r"""Share of the first visible key where weights count by the length of what they bring."""
