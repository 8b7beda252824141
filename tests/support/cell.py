"""A cell of the support matrix: a model, a way of running it, and what must be seen of its attention."""

from __future__ import annotations

import copy
import fnmatch
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import reference
import torch
from support.truth import Attention, Tape
from torch import Tensor, nn

from lightning_attn import AttentionObserver, AttentionWarning, Recording, Snapshot, record

#: What the model of a cell is given: the arguments of its forward pass.
Arguments = dict[str, Any]

#: Statistics that are held against their float64 references in every cell.
STATISTICS = (
    *("entropy", "entropy_without_sink", "kl_to_uniform", "max_logit", "logit_std", "max_weight", "sink_strength"),
    *("self_weight", "marginal_gap", "hidden_row_share", "attention_distance"),
)


@dataclass(frozen=True)
class Seen:
    """Every call is seen, and is what the model computed."""

    #: What a reader of the page should know beside that.
    note: str = ""
    #: Whether the values of all calls are seen too, so that ``A V`` is held against the output of the model. Otherwise
    #: it is of those whose truth has an output, and the others come without values.
    with_values: bool = True
    #: What is said meanwhile (a pattern), where something has to be.
    warning: str | None = None


@dataclass(frozen=True)
class Refused:
    """Nothing is seen, and this is said: a pattern of the message, and what the page tells of the way out."""

    warning: str
    note: str


@dataclass(frozen=True)
class NoAttention:
    """There is no attention over tokens here, and nothing is seen."""

    note: str


@dataclass(frozen=True)
class Cell:
    """A model, a way of running it, and what must be seen.

    Args:
        family: whose model it is: a table of the page.
        model: its name.
        way: how it computes attention: ``"sdpa"``, ``"eager"``, …
        case: how it is run: ``"train"``, ``"eval, left padding"``, …
        make: makes the model, with attention dropout off, so that its output can be held against ``A V``.
        arguments: makes what the forward pass is given. It may run the model, to fill a cache; that is not watched.
        truth: what is to be seen, in the order of calls, from what the modules were given and gave.
        sites: the names of its sites, as patterns that `sites` would take.
        outcome: what becomes of it.
        training: whether the model is in training mode and losses have gradients.
    """

    family: str
    model: str
    way: str
    case: str
    make: Callable[[], nn.Module]
    arguments: Callable[[nn.Module], Arguments]
    truth: Callable[[nn.Module, Tape, Arguments], list[Attention]] = field(repr=False)
    sites: tuple[str, ...] = ()
    outcome: Seen | Refused | NoAttention = field(default_factory=Seen)
    training: bool = False
    #: Whether the truth listens to the modules: with nested tensors `nn.TransformerEncoder` bears no hooks.
    listened: bool = True
    #: What the model computes its attention in. Tolerances are a few of its rounding errors, where they show.
    precision: torch.dtype = torch.float32

    def __str__(self) -> str:
        return "-".join(part.replace(" ", "_") for part in (self.model, self.way, self.case) if part)


def cells_of(cells: list[Cell]) -> pytest.MarkDecorator:
    """Parametrise a test by cells."""
    return pytest.mark.parametrize("cell", cells, ids=str)


def check(cell: Cell) -> None:
    """Hold a cell against the truth: sites, logits, visibility, weights, ``A V``, statistics; nothing may change."""
    torch.manual_seed(0)
    model = cell.make().train(cell.training)
    plain, listened, watched, observed = (copy.deepcopy(model) for _ in range(4))

    expected = _run(plain, cell)
    tape = Tape()
    arguments = _run(listened, cell, tape.running(listened) if cell.listened else None).arguments
    recording = Recording()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        given = _arguments(watched, cell)
        with record(watched) as recording:
            result = _run(watched, cell, arguments=given)
    messages = [str(warning.message) for warning in said if issubclass(warning.category, AttentionWarning)]

    _check_undisturbed(expected, result)
    _check_nothing_left(plain, watched)
    if not isinstance(cell.outcome, Seen):
        assert recording.calls == [], f"{cell}: taken for attention: {recording.calls}"
        _check_messages(
            messages, cell.outcome.warning if isinstance(cell.outcome, Refused) else "No attention was seen"
        )
        assert _snapshot(observed, cell).sites == ()
        return
    with torch.no_grad():
        truths = cell.truth(listened, tape, arguments)
    _check_messages(_without_pooled(messages, truths), cell.outcome.warning)
    assert [call.site for call in recording.calls] == [truth.site for truth in truths]
    for pattern in cell.sites:
        assert fnmatch.filter(recording.sites, pattern), f"no site is called {pattern!r}"
    for call, truth in zip(recording.calls, truths, strict=True):
        assert any(fnmatch.fnmatchcase(call.site, pattern) for pattern in cell.sites), f"{call.site!r} is not listed"
        _check_call(call, truth, cell.outcome.with_values, _tolerance(cell.precision))
    _check_statistics(observed, cell, truths)


@dataclass(frozen=True)
class _Run:
    """What a run of a model left: its output, gradients and the state of the random numbers."""

    arguments: Arguments
    output: list[Tensor]
    gradients: list[Tensor | None]
    random_state: Tensor


def _arguments(model: nn.Module, cell: Cell) -> Arguments:
    torch.manual_seed(1)
    with torch.no_grad():
        return cell.arguments(model)


def _run(model: nn.Module, cell: Cell, context: Any = None, arguments: Arguments | None = None) -> _Run:
    with nullcontext() if context is None else context:
        arguments = _arguments(model, cell) if arguments is None else arguments
        torch.manual_seed(2)
        with torch.set_grad_enabled(cell.training):
            output = _tensors(model(**arguments))
            if cell.training:
                sum((tensor.float().square().mean() for tensor in output), torch.zeros(())).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return _Run(arguments, [tensor.detach() for tensor in output], gradients, torch.get_rng_state())


def _tensors(value: Any) -> list[Tensor]:
    """Every floating-point tensor of a model's output, whatever it is packed into."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return list(value.unbind())
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (tuple, list)) else []


def _check_undisturbed(expected: _Run, watched: _Run) -> None:
    """Output, gradients and random numbers are the same bit for bit."""
    assert expected.output
    for theirs, ours in zip(expected.output, watched.output, strict=True):
        assert torch.equal(theirs, ours) or torch.equal(theirs.nan_to_num(), ours.nan_to_num())
    for theirs_gradient, ours_gradient in zip(expected.gradients, watched.gradients, strict=True):
        assert (theirs_gradient is None) == (ours_gradient is None)
        assert theirs_gradient is None or ours_gradient is None or torch.equal(theirs_gradient, ours_gradient)
    assert torch.equal(expected.random_state, watched.random_state)


def _check_nothing_left(plain: nn.Module, watched: nn.Module) -> None:
    """No module has a hook, another class, or another attribute than where nobody watched (`generate` leaves some)."""
    for (name, theirs), (_, ours) in zip(plain.named_modules(), watched.named_modules(), strict=True):
        assert type(theirs) is type(ours)
        assert vars(theirs).keys() == vars(ours).keys(), f"{name} has other attributes than where nobody watched"
        for hooks in (key for key in vars(theirs) if key.endswith("_hooks")):
            assert len(vars(theirs)[hooks]) == len(vars(ours)[hooks]), f"{name} has a hook left: {hooks}"


def _check_messages(messages: list[str], pattern: str | None) -> None:
    if pattern is None:
        assert messages == []
    else:
        assert messages, "nothing was said"
        for message in messages:
            assert re.search(pattern, message), f"{message!r} does not say {pattern!r}"


def _without_pooled(messages: list[str], truths: list[Attention]) -> list[str]:
    """What is said but for sites that attend several times in one forward pass, each of which has to have done so."""
    told = [re.search(r"The module '(.*)' computes attention several times in one forward pass", m) for m in messages]
    for match in filter(None, told):
        assert sum(truth.site == match[1] for truth in truths) > 1, f"{match[1]!r} attends only once"
    return [message for message, match in zip(messages, told, strict=True) if match is None]


def _tolerance(precision: torch.dtype) -> float:
    """1e-5, or two roundings up and two down of numbers that are computed in less than single precision."""
    return max(1e-5, 4 * torch.finfo(precision).eps)


def _check_call(call: Any, truth: Attention, with_values: bool, tolerance: float) -> None:
    # Queries and keys are taken as they are, so that nothing but what the model writes down is rounded.
    of_logits = 1e-5 if call.logit_matrix is None else tolerance
    assert tuple(call.logits()[0].shape) == tuple(truth.logits_BHNM.shape)
    logits_BHNM, visible_BHNM = call.logits()
    sees_a_key_BHN1 = truth.visible_BHNM.any(-1, keepdim=True)
    # Where a row sees nothing the model may hide it in whatever way.
    assert torch.equal(visible_BHNM & sees_a_key_BHN1, truth.visible_BHNM), f"{call.site}: other keys are visible"
    scale = truth.logits_BHNM.masked_fill(~truth.visible_BHNM, 0.0).abs().max().clamp(min=1.0)
    difference = (logits_BHNM.double() - truth.logits_BHNM).masked_fill(~truth.visible_BHNM, 0.0).abs().max()
    assert difference < of_logits * scale, f"{call.site}: logits are off by {difference:.2g}"
    weights_BHNM = call.weights().double().masked_fill(~sees_a_key_BHN1, 0.0)
    assert (weights_BHNM - truth.weights_BHNM()).abs().max() < (1e-5 if of_logits == 1e-5 else of_logits * scale)
    assert (call.sink_logits is None) == (truth.sink_logits_H is None)
    if with_values:
        assert truth.output_BNX is not None, "the output of the model is what the values are held against"
    assert (call.value is not None) == (truth.output_BNX is not None)
    if truth.output_BNX is not None:
        output_BNX = call.output().transpose(1, 2).flatten(2)
        theirs_BNX = truth.output_BNX.reshape(output_BNX.shape)
        largest = 1.0 if tolerance == 1e-5 else call.value.abs().max().clamp(min=1.0)
        # What a row without a visible key becomes depends on the kernel.
        hidden_BN1 = ~sees_a_key_BHN1.any(1)
        assert (output_BNX - theirs_BNX).masked_fill(hidden_BN1, 0.0).abs().max() < tolerance * largest
        assert theirs_BNX.abs().max() > 1e-4, "a test that cannot fail"


def _snapshot(model: nn.Module, cell: Cell) -> Snapshot:
    """The statistics of one run; where nothing is refused, a fault is raised."""
    is_strict = isinstance(cell.outcome, Seen) and cell.outcome.warning is None
    observer = AttentionObserver(model, statistics=list(STATISTICS), max_sequences=None, strict=is_strict)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        given = _arguments(model, cell)
        with observer:
            _run(model, cell, arguments=given)
        return observer.snapshot()


def _check_statistics(model: nn.Module, cell: Cell, truths: list[Attention]) -> None:
    """The numbers that the owner of the model gets."""
    snapshot = _snapshot(model, cell)
    assert snapshot.sites == tuple(dict.fromkeys(truth.site for truth in truths))
    for site in snapshot.sites:
        calls = [truth.heads() for truth in truths if truth.site == site]
        heads = [[sequence for call in calls for sequence in call[head]] for head in range(len(calls[0]))]
        if all(truth.is_of_loop for truth in truths if truth.site == site):
            heads = [head for call in calls for head in call]
        for statistic in STATISTICS:
            values = [np.nan if value is None else value for value in snapshot[site, statistic]]
            np.testing.assert_allclose(
                values,
                reference.head_values(statistic, heads),
                rtol=max(2e-4, _tolerance(cell.precision)),
                atol=max(2e-5, _tolerance(cell.precision)),
                err_msg=f"{site} {statistic}",
            )
