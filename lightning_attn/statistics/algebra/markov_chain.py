"""The distribution that attention leaves as it is, taking its weights for the transitions of a Markov chain.

Shape suffixes as in `lightning_attn.statistics.rows.row_block`, and V: probes. A token is a state where its row has
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

#: Chains of at most so many states are solved; longer ones are iterated.
SOLVED_SIZE = 256
#: A transition of less than this beside the others of its row is none. Single precision holds little less beside one.
NOTHING = 1e-30
#: A chain is iterated so often, at most; less often where its matrix is computed anew each time.
_STEPS = 200
_STEPS_UNWRITTEN = 20
#: It has converged if it brings some random values of the states as close together as this, beside where they began.
_CLOSE = 1e-4
_PROBES = 8

#: Gives the blocks of rows of the matrices, (B, H, R, M), anew each time; a block may have leading keys only.
Walk = Callable[[], Iterable[Tensor]]


def stationary_of(matrix_BHNN: Tensor) -> Tensor:
    r"""The distribution :math:`\pi = \pi P` of dense weights, with :math:`P` the rows over their sums.

    Args:
        matrix_BHNN: weights, zero where a key is hidden. A row without weights is no state.

    Returns:
        (B, H, N) of the same type; zero for what is no state. NaN where it is not unique, where a state has a
        transition to what is none, and where an iteration has not converged.
    """
    given_BHNN = matrix_BHNN
    if matrix_BHNN.shape[-1] <= SOLVED_SIZE:
        matrix_BHNN = matrix_BHNN.cpu().double()
    mass_BHN = matrix_BHNN.sum(-1)
    is_state_BHN = (mass_BHN > 0) & mass_BHN.isfinite()
    share_BHN = torch.where(is_state_BHN, 1 / mass_BHN, 0.0)
    chain_BHNN = torch.where(is_state_BHN[..., None], matrix_BHNN * share_BHN[..., None], 0.0)
    if matrix_BHNN.shape[-1] <= SOLVED_SIZE:
        return solved(chain_BHNN, is_state_BHN).to(given_BHNN)
    own_BHNN = chain_BHNN.diagonal(dim1=-2, dim2=-1) >= NOTHING
    is_closed_BHN = is_state_BHN & ((chain_BHNN >= NOTHING).sum(-1) <= own_BHNN)
    looks_ahead_BH = (chain_BHNN.triu(1) >= NOTHING).any(-1).any(-1)
    of_triangle_BHN = of_triangular(is_closed_BHN)
    if not bool(looks_ahead_BH.any()):
        return where_within(of_triangle_BHN, is_state_BHN, chain_BHNN.sum(-2)).to(matrix_BHNN)
    iterated_BHN = iterated(lambda: [chain_BHNN], steps_for(is_written=True))
    found_BHN = torch.where(looks_ahead_BH[..., None], iterated_BHN, of_triangle_BHN.to(iterated_BHN))
    return where_within(found_BHN, is_state_BHN, chain_BHNN.sum(-2))


def where_within(distribution_BHN: Tensor, is_state_BHN: Tensor, received_BHN: Tensor) -> Tensor:
    """A distribution, NaN where states have transitions to what is no state, given what each receives from all."""
    leaves_BH1 = (~is_state_BHN & (received_BHN >= NOTHING)).any(-1, keepdim=True)
    return torch.where(leaves_BH1, torch.nan, distribution_BHN)


def of_triangular(is_closed_BHN: Tensor) -> Tensor:
    """The distribution of causal chains, which end in the token that has no transition: NaN if there are several."""
    return torch.where(is_closed_BHN.sum(-1, keepdim=True) == 1, is_closed_BHN.float(), torch.nan)


def solved(chain_BHNN: Tensor, is_state_BHN: Tensor) -> Tensor:
    r"""The distribution of small chains, by elimination of one state after the other (Grassmann, Taksar, Heyman 1985).

    It adds, multiplies and divides numbers that are not negative, so that every probability is as exact as the
    transitions, however slowly the chain mixes. A state that no transition leaves, among those that are left, belongs
    to a closed class, and what enters it leaves the rest; a second one says that the distribution is not unique.

    Args:
        chain_BHNN: transition probabilities in double precision; rows of states sum to one.
        is_state_BHN: which of them are states.

    Returns:
        (B, H, N); NaN where it is not unique, and where a state has a transition to what is none.
    """
    matrix_BHNN = torch.where(chain_BHNN >= NOTHING, chain_BHNN, 0.0)
    received_BHN = matrix_BHNN.sum(-2)
    leaving_BHN = torch.zeros_like(received_BHN)  # to closed classes among the states that were eliminated
    out_BHN = torch.zeros_like(received_BHN)
    for last in reversed(range(matrix_BHNN.shape[-1])):
        row_BHN, into_BHN = matrix_BHNN[..., last, :last], matrix_BHNN[..., :last, last]
        out_BH1 = row_BHN.sum(-1, keepdim=True) + leaving_BHN[..., last, None]
        out_BHN[..., last] = out_BH1[..., 0]
        divisor_BH1 = torch.where(out_BH1 > 0, out_BH1, 1.0)
        matrix_BHNN[..., :last, :last].addcmul_(into_BHN[..., None], (row_BHN / divisor_BH1)[..., None, :])
        of_leaving_BH1 = torch.where(out_BH1 > 0, leaving_BHN[..., last, None] / divisor_BH1, 1.0)
        leaving_BHN[..., :last] += into_BHN * of_leaving_BH1
    is_closed_BHN = is_state_BHN & (out_BHN == 0)
    divisor_BHN = torch.where(out_BHN > 0, out_BHN, 1.0)
    distribution_BHN = is_closed_BHN.double()
    for state in range(matrix_BHNN.shape[-1]):
        known_BHN = distribution_BHN[..., : state + 1]
        from_before_BH = (known_BHN[..., :state] * matrix_BHNN[..., :state, state]).sum(-1)
        known_BHN[..., state] += from_before_BH / divisor_BHN[..., state]
        known_BHN /= known_BHN.sum(-1, keepdim=True).clamp(min=NOTHING)  # they may grow beyond all numbers
    is_unique_BH1 = is_closed_BHN.sum(-1, keepdim=True) == 1
    return where_within(torch.where(is_unique_BH1, distribution_BHN, torch.nan), is_state_BHN, received_BHN)


def iterated(walk: Walk, steps: int) -> Tensor:
    r"""The distribution of long chains, by powers of their matrix.

    Some random values of the states, :math:`x`, become the same, :math:`P^t x \to (\pi x) 1`, if the distribution is
    unique and the chain is not periodic: this tells whether :math:`t` steps are enough.

    Args:
        walk: the weights. Rows are divided by their sums.
        steps: how many, at most.

    Returns:
        (B, H, N); NaN where that has not happened.
    """
    mass_BHN = torch.cat([weights_BHRM.sum(-1) for weights_BHRM in walk()], dim=-1)
    is_state_BHN = mass_BHN > 0
    share_BHN = torch.where(is_state_BHN, 1 / mass_BHN, 0.0)
    distribution_BHN = is_state_BHN / is_state_BHN.sum(-1, keepdim=True).clamp(min=1).to(share_BHN)
    generator = torch.Generator().manual_seed(0)
    probes_NV = torch.randn(mass_BHN.shape[-1], _PROBES, generator=generator).to(mass_BHN)
    probes_BHNV = probes_NV.expand(*mass_BHN.shape, _PROBES)
    first_BHV = _spread(probes_BHNV, is_state_BHN)
    for _ in range(steps):
        distribution_BHN, probes_BHNV = _step(walk, share_BHN, distribution_BHN, probes_BHNV)
        is_settled_BH = (_spread(probes_BHNV, is_state_BHN) <= _CLOSE * first_BHV).all(-1)
        if bool(is_settled_BH.all()):
            break
    distribution_BHN = distribution_BHN / distribution_BHN.sum(-1, keepdim=True)
    return torch.where(is_settled_BH[..., None], distribution_BHN, torch.nan)


def steps_for(is_written: bool) -> int:
    """How often a chain may be iterated, whose matrix is written down or computed anew for each step."""
    return _STEPS if is_written else _STEPS_UNWRITTEN


def _step(walk: Walk, share_BHN: Tensor, left_BHN: Tensor, right_BHNV: Tensor) -> tuple[Tensor, Tensor]:
    """``x P`` and ``P X`` in one walk."""
    product_BHN, images = torch.zeros_like(left_BHN), []
    start = 0
    for weights_BHRM in walk():
        rows, keys = slice(start, start + weights_BHRM.shape[2]), weights_BHRM.shape[3]
        parts_BH1R = (left_BHN * share_BHN)[..., None, rows]
        product_BHN[..., :keys] += (parts_BH1R @ weights_BHRM)[..., 0, :]
        images.append((weights_BHRM @ right_BHNV[..., :keys, :]) * share_BHN[..., rows, None])
        start = rows.stop
    return product_BHN, torch.cat(images, dim=-2)


def _spread(probes_BHNV: Tensor, is_state_BHN: Tensor) -> Tensor:
    """The largest minus the smallest value of a state, (B, H, V)."""
    is_state_BHN1 = is_state_BHN[..., None]
    largest_BHV = torch.where(is_state_BHN1, probes_BHNV, -torch.inf).amax(-2)
    return largest_BHV - torch.where(is_state_BHN1, probes_BHNV, torch.inf).amin(-2)
