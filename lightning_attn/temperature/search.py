"""Looking for what makes the queries, or the keys, of a site that was met."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_attn.capture.capture import Capture
from lightning_attn.capture.met import Met
from lightning_attn.capture.sites import SitePatterns
from lightning_attn.temperature import layouts
from lightning_attn.temperature.agreement import Finding
from lightning_attn.temperature.lockstep import Lockstep
from lightning_attn.temperature.projection import QueryProjection
from lightning_attn.temperature.proof import NotNowError, ReadElsewhereError, Replay, prove
from lightning_attn.temperature.refusals import NOT_WRITABLE, refusal, refusal_of_site
from lightning_attn.temperature.sharded import unsharded

#: Makes the context in which a module runs again, as of its precision.
Surrounding: TypeAlias = Callable[[], AbstractContextManager[object]]
#: Makes guesses; see `lightning_attn.temperature.layouts.guesses`.
Guesses: TypeAlias = Callable[[nn.Module, dict[nn.Module, str], int, int | None, int | None], Iterator[QueryProjection]]


def search(met: Met, model: nn.Module, surrounding: Surrounding, guesses: Guesses = layouts.guesses) -> Finding:
    """Look for what makes the queries of a site.

    Args:
        met: the site's module, as it was met.
        model: the model.
        surrounding: makes the context in which the module runs again.
        guesses: what may make them.
    """
    names = paths_of(model)
    tried: list[QueryProjection] = []

    def guessed(heads: int, width: int | None, value_width: int | None) -> Iterator[QueryProjection]:
        for guess in guesses(met.module, names, heads, width, value_width):
            tried.append(guess)
            yield guess

    lockstep = Lockstep(met.module)  # before weights are whole, when they tell which ranks hold them
    try:
        with surrounding(), unsharded(met.module, model):
            proven = prove(guessed, Replay(met), lockstep)
            # What may make queries and may not be touched tells more than that nothing was proven.
            reasons = [refusal(one, model) for one in (tried if proven is None else [proven.projection])]
    except NotNowError as error:
        return Finding(reason=str(error), is_for_later=True)
    except ReadElsewhereError as error:
        return Finding(reason=str(error))
    except Exception as error:
        return Finding(reason=f"running it again failed: {type(error).__name__}: {error}")
    reason = "; ".join(dict.fromkeys(filter(None, reasons)))
    if proven is None or reason:
        return Finding(reason=reason or refusal_of_site(met.module))
    if proven.projection.rows is not None and not proven.projection.parameters:
        return Finding(reason=NOT_WRITABLE)
    return Finding(
        proven.projection.to_dict(),
        proven.bias_std,
        is_soft_capped=proven.is_soft_capped,
        largest_bias=proven.largest_bias,
    )


def met_in(model: nn.Module, patterns: SitePatterns, run: Callable[[], Any]) -> dict[str, Met]:
    """The modules that compute attention while a model runs.

    Args:
        model: the model.
        patterns: which of its sites.
        run: runs it forward, in training mode or not.
    """
    met: dict[str, Met] = {}
    capture = Capture(
        model,
        lambda call: None,
        sites=patterns,
        max_sequences=1,
        receive_module=lambda one: met.update({one.site: one}),
    )
    with capture, _layers_one_by_one():
        run()
    return met


@contextmanager
def _layers_one_by_one() -> Iterator[None]:
    """Keep a `torch.nn.TransformerEncoderLayer` from computing its attention without running the module of it."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


def paths_of(model: nn.Module) -> dict[nn.Module, str]:
    """The names of a model's modules as they are, wrappers and all: by these they are found again."""
    return {module: name for name, module in model.named_modules()}
