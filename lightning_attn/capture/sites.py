"""Naming the module that computes attention, without a hook on it."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Sequence

from torch import Size, nn

from lightning_attn.capture.call_stack import argument_tensors, computing_modules, frames, module_of
from lightning_attn.capture.module_tree import modules_of, parameters_of
from lightning_attn.capture.running import states_among
from lightning_attn.capture.wrappers import canonical_names


class SiteNames:
    """The canonical name of every module of a model, and which of them is computing right now.

    The modules that are computing are read off the call stack.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"`model` must be a torch.nn.Module, got {model!r}.")
        self._names = canonical_names(model)
        #: The modules whose parameters are parts of one flat parameter, as `FullyShardedDataParallel` may have it.
        self._flattened = {
            part.module
            for parameter in parameters_of(model)
            for parts in ("_param_infos", "_shared_param_infos")
            for part in getattr(parameter, parts, ())
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.values())

    def is_of_model(self, module: nn.Module) -> bool:
        """Whether a module is one of the model's."""
        return module in self._names

    def computing(self) -> tuple[nn.Module, ...]:
        """The modules of the model that are computing for the caller, from the innermost outwards."""
        return tuple(dict.fromkeys(module for module in computing_modules() if module in self._names))

    def owner_of(self, parameter: object) -> tuple[nn.Module, ...]:
        """The module of the model that a parameter belongs to; none, where there is none."""
        return tuple(
            module for module in self._names if any(own is parameter for own in module.parameters(recurse=False))
        )[:1]

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
            if any(part in self._flattened or _has_parameters(part) for part in modules_of(module)):
                return module
        return modules[0] if modules else None

    def given(self) -> list[Size]:
        """The shapes of the hidden states that the innermost module was given that was given any."""
        for frame in frames():
            if module_of(frame) in self._names:
                states = states_among(argument_tensors(frame))
                if states:
                    return states
        return []


def _has_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters of its own."""
    return any(parameter is not None for parameter in module._parameters.values())


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
        names = list(dict.fromkeys(names))  # wrappers share theirs with what they wrap
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
