r"""Critical attention scaling: what logits that grow with the log of the length make of tokens that are alike.

The model has :math:`n` unit tokens :math:`y_i`, any two of them with the inner product :math:`\rho`, and one layer of
attention with logits :math:`\gamma \log n \langle y_i, y_j \rangle`, whose values are the tokens.
Chen et al. 2026, arXiv:2510.05554.
"""

from __future__ import annotations

from torch import Tensor

from lightning_attn.functional.numbers import as_floating, refuse


def critical_gamma(similarity: Tensor | float) -> Tensor:
    r"""The scaling :math:`\gamma_c = 1 / (1 - \rho)`: with less, attention averages tokens; with more, it keeps them.

    Args:
        similarity: mean cosine :math:`\rho` of two tokens, in [−1, 1]: `token_similarity`.

    Returns:
        :math:`\gamma_c`, at least 1/2; infinite where all tokens point the same way, NaN where the similarity is.

    Raises:
        ValueError: if a similarity is no cosine.

    Source: Chen et al. 2026, arXiv:2510.05554.

    Example:
        >>> critical_gamma(0.5)
        tensor(2., dtype=torch.float64)
    """
    similarity = _as_cosine(similarity)
    return 1 / (1 - similarity)


def estimated_gamma(critical_scaling: Tensor | float, similarity: Tensor | float) -> Tensor:
    r"""The scaling :math:`\gamma` that a head has, as its self-weights tell it.

    Args:
        critical_scaling: :math:`\gamma / \gamma_c`, the statistic `critical_scaling`.
        similarity: mean cosine :math:`\rho` of two tokens that enter, in [−1, 1]; broadcasts.

    Returns:
        :math:`\gamma`: logits are as spread out as :math:`\gamma \log n` cosines. NaN where a number is
        NaN, or where the tokens are all one, so that weights do not depend on it.

    Raises:
        ValueError: if a similarity is no cosine.

    Source: Chen et al. 2026, arXiv:2510.05554.

    Example:
        >>> estimated_gamma(0.8, similarity=0.5)
        tensor(1.6000, dtype=torch.float64)
    """
    return as_floating(critical_scaling) * critical_gamma(similarity)


def predicted_self_weight(gamma: Tensor | float, similarity: Tensor | float, tokens: Tensor | float) -> Tensor:
    r"""The weight of a token on itself, :math:`A_{ii} = 1 / (1 + (n - 1) n^{-\gamma (1 - \rho)})`.

    At :math:`\gamma_c` it is :math:`n / (2 n - 1)`, and with growing length it goes to 0 below and to 1 above.

    Args:
        gamma: the scaling :math:`\gamma`.
        similarity: inner product :math:`\rho` of two tokens, at most 1 and at least :math:`-1 / (n - 1)`, the least
            that all pairs can have; broadcasts.
        tokens: their number :math:`n`, at least 2; broadcasts.

    Returns:
        :math:`A_{ii}`, in [0, 1].

    Raises:
        ValueError: if there are fewer tokens than two, or no tokens can be so alike.

    Source: Chen et al. 2026, arXiv:2510.05554.

    Example:
        >>> predicted_self_weight(critical_gamma(0.5), similarity=0.5, tokens=1024)
        tensor(0.5002, dtype=torch.float64)
    """
    similarity, tokens = _as_similarity_of(similarity, tokens)
    return (as_floating(gamma) * (1 - similarity) * tokens.log() - (tokens - 1).log()).sigmoid()


def predicted_similarity(gamma: Tensor | float, similarity: Tensor | float, tokens: Tensor | float) -> Tensor:
    r"""The cosine of two tokens after the layer, without a residual stream.

    Attention with :math:`A_{ii} = a` and equal weights on all others keeps the mean of the tokens, and shortens what
    sets them apart from it by the factor :math:`s = (n a - 1) / (n - 1)`. The cosine is then

    .. math:: \rho' = \frac{1 + (n - 1) \rho - s^2 (1 - \rho)}{1 + (n - 1) \rho + s^2 (1 - \rho) (n - 1)},

    which with growing length, for :math:`\rho > 0`, goes to 1 below :math:`\gamma_c`, to
    :math:`4 \rho / (1 + 3 \rho)` there, and to :math:`\rho` above.

    Args:
        gamma: the scaling :math:`\gamma`.
        similarity: inner product :math:`\rho` of two tokens, at most 1 and at least :math:`-1 / (n - 1)`, the least
            that all pairs can have; broadcasts.
        tokens: their number :math:`n`, at least 2; broadcasts.

    Returns:
        :math:`\rho'`; NaN where nothing is left of the tokens, whose mean is zero and whose differences are averaged
        out.

    Raises:
        ValueError: if there are fewer tokens than two, or no tokens can be so alike.

    Source: Chen et al. 2026, arXiv:2510.05554.

    Example:
        >>> predicted_similarity(critical_gamma(0.5), similarity=0.5, tokens=1024)
        tensor(0.8003, dtype=torch.float64)
    """
    self_weight = predicted_self_weight(gamma, similarity, tokens)
    similarity, tokens = as_floating(similarity), as_floating(tokens)
    of_mean = 1 + (tokens - 1) * similarity
    of_differences = ((tokens * self_weight - 1) / (tokens - 1)).square() * (1 - similarity)
    return (of_mean - of_differences) / (of_mean + of_differences * (tokens - 1))


def _as_cosine(similarity: Tensor | float) -> Tensor:
    similarity = as_floating(similarity)
    refuse("similarity", similarity, similarity.abs() > 1, "a cosine between −1 and 1")
    return similarity


def _as_similarity_of(similarity: Tensor | float, tokens: Tensor | float) -> tuple[Tensor, Tensor]:
    similarity, tokens = _as_cosine(similarity), as_floating(tokens)
    refuse("tokens", tokens, tokens < 2, "at least 2")
    refuse("similarity", similarity, (tokens - 1) * similarity < -1, "at least −1 / (tokens − 1)")
    return similarity, tokens
