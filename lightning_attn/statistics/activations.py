"""Single entries of hidden states that are larger than all others by orders of magnitude."""

from __future__ import annotations

from typing import ClassVar

import torch

from lightning_attn.statistics.registry import register
from lightning_attn.statistics.state_statistic import StateStatistic, mean_where_defined
from lightning_attn.statistics.states.tokens import Tokens
from lightning_attn.statistics.statistic import Maximum, Range, Ratio


@register
class MassiveActivation(StateStatistic):
    r"""The largest entry of the states that enter over their median: the largest of all sequences.

    :math:`\max |h| / \operatorname{median} |h|` over all tokens and dimensions of a sequence. The criterion of Sun et
    al. wants :math:`\max |h| > 100` besides, which depends on the scale of the model. The ratio says as well how far a
    site is from it, and how it grows. With an even number of entries the median is the lower one.
    """

    name = "massive_activation"
    lens = "Sinks"
    range = Range(1, None)
    uniform = "any"
    example = 2.0
    reading = "Above 1000: massive activations, common in trained decoders that have sinks, and hard on low precision."
    source = "Sun et al. 2024, arXiv:2402.17762"
    over_heads = "max"
    joined_by = "max"

    @classmethod
    def result(cls, entering: Tokens, leaving: Tokens | None) -> Maximum:
        """The ratio of each sequence whose median is not zero."""
        ratio_B = entering.largest_B / entering.median_magnitude_B
        return Maximum(torch.where(entering.finite_B & ratio_B.isfinite(), ratio_B, -torch.inf))


@register
class MassiveActivationRate(StateStatistic):
    r"""Share of sequences whose entering states meet the criterion of Sun et al. for massive activations.

    :math:`\max |h| > 100` and :math:`\max |h| \ge 1000 \operatorname{median} |h|`, over all tokens and dimensions of a
    sequence. A median of zero fulfils the second part; with an even number of entries it is the lower one.
    """

    name = "massive_activation_rate"
    lens = "Sinks"
    range = Range(0, 1)
    uniform = "any"
    example = 0.0
    reading = "1: every sequence has massive activations, as in trained decoders that have sinks; depends on the scale."
    source = "Sun et al. 2024, arXiv:2402.17762"
    by_default = False
    parameters = ("magnitude", "ratio")

    #: What the largest entry must exceed.
    magnitude: ClassVar[float] = 100.0
    #: How many times the median it must be at least.
    ratio: ClassVar[float] = 1000.0

    @classmethod
    def result(cls, entering: Tokens, leaving: Tokens | None) -> Ratio:
        """1 for each sequence that meets it."""
        largest_B = entering.largest_B
        median_B = entering.median_magnitude_B.to(largest_B.dtype)
        is_massive_B = (largest_B > cls.magnitude) & (largest_B >= cls.ratio * median_B)
        return mean_where_defined(is_massive_B.float(), entering.finite_B)
