"""Naming the module that computes attention, without a hook on it."""

from __future__ import annotations

import difflib
import fnmatch
import re
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from types import FrameType

from torch import Tensor, nn

#: Name of the model itself, which `named_modules` calls by the empty string.
ROOT = "(root)"

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|module|_forward_module|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?:\.|$)"
)


def canonical_name(name: str) -> str:
    """The name a module has in the model as the user wrote it, without the layers that wrappers put around it.

    Example:
        >>> canonical_name("module._orig_mod.blocks.0._checkpoint_wrapped_module.attention")
        'blocks.0.attention'
    """
    return _WRAPPERS.sub("", name).rstrip(".") or ROOT


class SiteNames:
    """The canonical name of every module of a model, and which of them is computing right now.

    The modules that are computing are read off the call stack. A hook would have to be put on every module and taken
    off again whatever happens, would switch off the fast path of `torch.nn.TransformerEncoder`, and would miss modules
    whose `forward` is called by name.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"`model` must be a torch.nn.Module, got {model!r}.")
        self._names = {module: canonical_name(name) for name, module in model.named_modules()}
        self._running: dict[nn.Module, tuple[int, _Running]] = {}
        self._numbers = count(1)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.values())

    def computing(self) -> tuple[nn.Module, ...]:
        """The modules of the model that are computing for the caller, from the innermost outwards."""
        return tuple(dict.fromkeys(module for module in _computing_modules(sys._getframe(1)) if module in self._names))

    def __getitem__(self, module: nn.Module) -> str:
        return self._names[module]

    def site_of(self, modules: Sequence[nn.Module]) -> nn.Module | None:
        """The site that an attention belongs to.

        It is the innermost module that computes it; one without parameters of its own or below, which only wraps the
        attention function, stands for the module that called it.

        Args:
            modules: the modules that compute it, from the innermost outwards.

        Returns:
            The module, or ``None`` where no module of the model is computing.
        """
        for module in modules:
            if next(module.parameters(), None) is not None:
                return module
        return modules[0] if modules else None

    def forward_number(self, module: nn.Module) -> int:
        """A number that tells the forward passes of a module apart: the one that is running for the caller.

        It goes by the frame in which the module was called and the tensors it was called with, for both are there again
        as long as the same call lasts. A frame alone is made anew at the same place in memory.
        """
        frames = (frame for frame in _frames(sys._getframe(1)) if _owner(frame) is module)
        outermost = deque(frames, maxlen=1).pop()
        running = _Running(id(outermost), [weakref.ref(tensor) for tensor in _argument_tensors(outermost)])
        known = self._running.get(module)
        if known is None or not known[1].is_same(running):
            known = self._running[module] = (next(self._numbers), running)
        return known[0]

    def heads_in_batch(self, module: nn.Module, sequences: int, queries: int, keys: int) -> int:
        """How many heads a module has put into the batch beside each other, (B, N, L) having become (B H, N, D).

        It is told by the tokens that the module was called with: as many as there are queries, or keys, so that what
        the batch has more of than sequences are heads, and not windows of a sequence.

        Args:
            module: a module that is running.
            sequences: the size of the batch.
            queries: their number.
            keys: their number.
        """
        given = [tensor for tensor in _argument_tensors(self._frame_of(module)) if tensor.is_floating_point()]
        for tokens in (queries, keys):
            for batch in (batch for tensor in given for batch in _sequences_of(tensor, tokens)):
                return sequences // batch if sequences % batch == 0 else 1
        return 1

    def attends_to_others(self, module: nn.Module, keys: int) -> bool:
        """Whether a module was called with tokens for its keys that are not those of its queries.

        Args:
            module: a module that is running.
            keys: their number.
        """
        frame = self._frame_of(module)
        others = (frame.f_locals.get(name) for name in _OTHER_TOKENS)
        own = next(iter(_argument_tensors(frame)), None)
        return any(
            isinstance(other, Tensor) and other is not own and other.dim() == 3 and keys in other.shape[:2]
            for other in others
        )

    @staticmethod
    def _frame_of(module: nn.Module) -> FrameType:
        """The innermost frame in which a module's `forward` runs, or what stands for it."""
        frames = [frame for frame in _frames(sys._getframe(1)) if _owner(frame) is module]
        return next((frame for frame in frames if frame.f_code.co_name == "forward"), frames[-1])


#: What libraries call the tokens that cross-attention reads its keys from, as an argument beside those of the queries.
_OTHER_TOKENS = ("key_value_states", "encoder_hidden_states", "context", "memory")


def _sequences_of(states: Tensor, tokens: int) -> Iterator[int]:
    """How many sequences hidden states hold, if each is of so many tokens; pictures have theirs in several axes."""
    if states.dim() == 3 and states.shape[1] == tokens:
        yield states.shape[0]
    elif states.dim() == 3 and states.shape[0] == tokens and states.shape[1] > 1:  # tokens come first, if not of one
        yield states.shape[1]
    elif states.dim() > 3 and tokens in (prod(states.shape[1:-1]), prod(states.shape[2:])):
        yield states.shape[0]


@dataclass(frozen=True)
class _Running:
    """A call of a module that has not returned."""

    frame: int
    arguments: list[weakref.ref[Tensor]]

    def is_same(self, other: _Running) -> bool:
        if self.frame != other.frame or len(self.arguments) != len(other.arguments):
            return False
        pairs = [(mine(), theirs()) for mine, theirs in zip(self.arguments, other.arguments, strict=True)]
        return all(mine is not None and mine is theirs for mine, theirs in pairs)


def _argument_tensors(frame: FrameType) -> list[Tensor]:
    code = frame.f_code
    number = code.co_argcount + code.co_kwonlyargcount + 2  # and what *args and **kwargs are called
    found: list[Tensor] = []
    for name in code.co_varnames[:number]:
        argument = frame.f_locals.get(name)
        parts = (
            argument.values()
            if isinstance(argument, dict)
            else argument
            if isinstance(argument, tuple)
            else (argument,)
        )
        found += [part for part in parts if isinstance(part, Tensor)]
    return found


def _computing_modules(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose methods are on the call stack, from the innermost outwards."""
    owners = (_owner(frame) for frame in _frames(frame))
    return (owner for owner in owners if owner is not None)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _owner(frame: FrameType) -> nn.Module | None:
    """The module whose method runs in a frame."""
    code = frame.f_code
    if code.co_argcount and code.co_varnames[0] == "self":
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
    return None


class SitePatterns:
    """Glob patterns that choose sites by their canonical names.

    Args:
        patterns: one pattern or several, such as ``"blocks.*.attention"``; ``None`` chooses every site.

    Raises:
        ValueError: if there is no pattern, or one that is not a non-empty string.
    """

    def __init__(self, patterns: str | Sequence[str] | None) -> None:
        self.patterns: tuple[str, ...] = ("*",) if patterns is None else _as_patterns(patterns)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.patterns)!r})"

    def match(self, site: str) -> bool:
        """Whether a site is chosen."""
        return any(fnmatch.fnmatchcase(site, pattern) for pattern in self.patterns)

    def check(self, names: Iterable[str]) -> None:
        """Refuse patterns that can choose nothing.

        Args:
            names: canonical names of the model's modules.

        Raises:
            ValueError: if a pattern matches none of them, with the nearest names.
        """
        names = list(names)
        for pattern in self.patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
                hint = f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
                raise ValueError(
                    f"`sites` holds the pattern {pattern!r}, which matches none of the model's {len(names)} modules."
                    f"{hint} Patterns are globs over the names of `model.named_modules()`."
                )


def _as_patterns(patterns: str | Sequence[str]) -> tuple[str, ...]:
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns) if isinstance(patterns, Iterable) else ()
    if not given or not all(isinstance(pattern, str) and pattern for pattern in given):
        raise ValueError(f"`sites` must be a glob pattern or a non-empty list of them, got {patterns!r}.")
    return given
