"""What a capture has to say to the owner of the model."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence

from torch import nn

from lightning_attn.capture.call import AttentionCall
from lightning_attn.capture.refusals import UnreadableError, UnreadablePieceError
from lightning_attn.capture.sites import SitePatterns


class AttentionWarning(UserWarning):
    """Something about the attention of a model, or about watching it, that its owner should know."""


class Messages:
    """What is to be said, each thing once: at once, or held back until it is known which rank is to say it."""

    def __init__(self) -> None:
        #: Whether several ranks may have the same to say.
        self.are_held_back = False
        #: What this rank has to say, by site and kind of fault.
        self.held: dict[tuple[str, str], str] = {}
        #: What was said, or is held back, on some rank.
        self.known: set[tuple[str, str]] = set()

    def say(self, site: str, kind: str, message: str) -> None:
        """Say something of a site, unless a message of that kind was said of it before."""
        if (site, kind) in self.known:
            return
        self.known.add((site, kind))
        if self.are_held_back:
            self.held[site, kind] = message
        else:
            warnings.warn(message, AttentionWarning, stacklevel=3)

    def share(self, of_ranks: Sequence[Sequence[tuple[str, str]]], rank: int) -> None:
        """Leave to the lowest rank that has it what several have to say.

        Args:
            of_ranks: what each rank holds back.
            rank: the number of this one.
        """
        lowest: dict[tuple[str, str], int] = {}
        for speaker, held in enumerate(of_ranks):
            for what in held:
                lowest.setdefault(what, speaker)
        self.known |= lowest.keys()
        self.held = {what: message for what, message in self.held.items() if lowest.get(what, rank) == rank}

    def release(self) -> None:
        """Say what was held back."""
        held, self.held = self.held, {}
        for message in held.values():
            warnings.warn(message, AttentionWarning, stacklevel=3)


class SiteFaults:
    """What went wrong at which site: said once for each, and remembered."""

    def __init__(self) -> None:
        #: Sites that are left alone from now on.
        self.quiet: set[str] = set()
        #: Sites whose attention is written out in pieces that cannot all be read, so that none of them is taken.
        self.in_pieces: set[str] = set()
        #: What is said of them.
        self.messages = Messages()

    @property
    def reported(self) -> bool:
        """Whether anything was said."""
        return bool(self.messages.known)

    def is_piece(self, call: AttentionCall) -> bool:
        """Whether a call is a piece of an attention that cannot be read whole; what a model tells of is no piece."""
        return call.site in self.in_pieces and call.logit_matrix is not None

    def report_following(self, error: Exception) -> None:
        """Say that the attention of this forward pass that is written out with softmax cannot be found."""
        self.messages.say(
            "",
            type(error).__qualname__,
            "Looking for attention that is written out with softmax failed, and is given up for the rest of this "
            f"forward pass; training goes on. Cause: {_cause(error)}. `strict=True` raises instead.",
        )

    def report_changed_weights(self, site: str, operation: str) -> None:
        """Say that what the values are multiplied with is not what the softmax gave."""
        self.messages.say(
            site,
            "changed",
            f"The attention at {site!r} changes its weights after the softmax (by {operation!r}: talking heads, "
            "differential attention, a decay). The statistics are those of the softmax itself, without values; or "
            "choose `sites` without it.",
        )

    def report_tracing(self, site: str) -> None:
        """Say that a site is not watched while a graph is made of what it computes."""
        self.messages.say(
            site,
            "tracing",
            f"What {site!r} computes while a graph is made of it (by `torch.jit.trace`, `torch.export`, `make_fx`, "
            "`torch.fx` or with fake tensors) is not watched, so that nothing of the watching gets into the graph. "
            "Run the model itself to see its attention, or trace it outside of what is watched.",
        )

    def report_pooled(self, site: str) -> None:
        """Say that a site's statistics are of several attentions that it computes one after the other."""
        self.messages.say(
            site,
            "pooled",
            f"The module {site!r} computes attention several times in one forward pass (over other tokens, other "
            "heads, or a part of the queries at a time). Its statistics pool all of them, head by head; a module "
            "of its own for each would tell them apart.",
        )

    def report(self, site: str, error: Exception) -> None:
        """Say what went wrong. A call that cannot be read is left out; a site that fails is left alone from then on."""
        if isinstance(error, UnreadablePieceError):
            self.in_pieces.add(site)
            message = f"The attention at {site!r} is not watched: {error}."
        elif isinstance(error, UnreadableError):
            message = f"A call of the attention at {site!r} is not watched: {error}."
        else:
            self.quiet.add(site)
            message = (
                f"Watching the attention at {site!r} failed and is given up for this site; training goes on. "
                f"Cause: {_cause(error)}. `strict=True` raises instead."
            )
        self.messages.say(site, type(error).__qualname__, message)


def _cause(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (in {frame.name}, line {frame.lineno} of {frame.filename})"


def warn_of_nothing(model: nn.Module, sites: SitePatterns) -> None:
    """Say aloud that no attention was seen, and what was looked for."""
    warnings.warn(
        f"No attention was seen at the sites {list(sites.patterns)} of {type(model).__name__}. What would have been: "
        "`scaled_dot_product_attention`, `torch.nn.MultiheadAttention`, `flex_attention`, attention written out with a "
        "softmax between two products, and the attention functions of Hugging Face. A kernel of another kind, or a "
        "module that `torch.jit` compiled whole, is seen where the model tells of it, with one line before its call: "
        "`lightning_attn.observe(query, key, value)`. Or what was watched computed no attention.",
        AttentionWarning,
        stacklevel=3,
    )


def warn_of_compiled(modules: Sequence[str]) -> None:
    """Say that a compiled model is not watched."""
    named = ", ".join(map(repr, modules[:3])) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
    warnings.warn(
        f"The model is compiled ({named}) and is not watched, as `compiled='skip'` asks. `compiled='eager'` runs it "
        "eagerly on the steps that are watched, and as compiled on all others, without compiling it again.",
        AttentionWarning,
        stacklevel=3,
    )
