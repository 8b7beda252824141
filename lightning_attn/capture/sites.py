"""Naming the module that computes attention, without a hook on it."""

from __future__ import annotations

import difflib
import fnmatch
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType

from torch import nn

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

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.values())

    def current(self) -> tuple[str, nn.Module] | None:
        """The site whose attention is being computed by the caller.

        It is the innermost module of the model that is computing; a module without parameters of its own or below (one
        that only wraps the attention function) stands for the module that called it.

        Returns:
            Its canonical name and the module, or ``None`` where no module of the model is computing.
        """
        innermost: nn.Module | None = None
        for module in _computing_modules(sys._getframe(1)):
            if module not in self._names:
                continue
            if next(module.parameters(), None) is not None:
                return self._names[module], module
            innermost = innermost or module
        return None if innermost is None else (self._names[innermost], innermost)


def _computing_modules(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose methods are on the call stack, from the innermost outwards."""
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                yield owner
        frame = frame.f_back


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
