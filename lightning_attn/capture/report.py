"""What a capture has to say to the owner of the model."""

from __future__ import annotations

import traceback
import warnings

from torch import nn

from lightning_attn.capture.reader import UnreadableError
from lightning_attn.capture.sites import SitePatterns


class AttentionWarning(UserWarning):
    """Something about the attention of a model, or about watching it, that its owner should know."""


class SiteFaults:
    """What went wrong at which site: said once for each, and remembered."""

    def __init__(self) -> None:
        #: Sites that are left alone from now on.
        self.quiet: set[str] = set()
        #: What was said: of which site, and of what kind of fault.
        self.reported: set[tuple[str, type[Exception]]] = set()

    def report_following(self, error: Exception) -> None:
        """Say that the attention of this forward pass that is written out with softmax cannot be found."""
        if ("", type(error)) in self.reported:
            return
        self.reported.add(("", type(error)))
        warnings.warn(
            "Looking for attention that is written out with softmax failed, and is given up for the rest of this "
            f"forward pass; training goes on. Cause: {_cause(error)}. `strict=True` raises instead.",
            AttentionWarning,
            stacklevel=2,
        )

    def report(self, site: str, error: Exception) -> None:
        """Say what went wrong. A call that cannot be read is left out; a site that fails is left alone from then on."""
        if isinstance(error, UnreadableError):
            message = f"A call of the attention at {site!r} is not watched: {error}."
        else:
            self.quiet.add(site)
            message = (
                f"Watching the attention at {site!r} failed and is given up for this site; training goes on. "
                f"Cause: {_cause(error)}. `strict=True` raises instead."
            )
        if (site, type(error)) not in self.reported:
            self.reported.add((site, type(error)))
            warnings.warn(message, AttentionWarning, stacklevel=2)


def _cause(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (in {frame.name}, line {frame.lineno} of {frame.filename})"


def warn_of_nothing(model: nn.Module, sites: SitePatterns) -> None:
    """Say aloud that no attention was seen, and what was looked for."""
    warnings.warn(
        "No attention was seen. Looked for calls of `torch.nn.functional.scaled_dot_product_attention` and of "
        "`torch.nn.functional.multi_head_attention_forward` (`torch.nn.MultiheadAttention`, "
        f"`torch.nn.TransformerEncoderLayer`) made by {type(model).__name__} at the sites {list(sites.patterns)}. "
        "Not seen: attention written out with softmax, and other kernels (flash-attn, xformers, flex_attention); "
        "or what was watched computed none.",
        AttentionWarning,
        stacklevel=3,
    )
