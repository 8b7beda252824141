"""One call of a torch function, with what is known of its operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from lightning_attn.capture.softmax.trail import Followed, Logits, SomeFollowed

#: The plain name of an operation that has another one.
_SYNONYMS = {
    "radd": "add",
    "iadd": "add",
    "isub": "sub",
    "subtract": "sub",
    "rmul": "mul",
    "imul": "mul",
    "multiply": "mul",
    "truediv": "div",
    "itruediv": "div",
    "true_divide": "div",
    "divide": "div",
    "concat": "cat",
    "concatenate": "cat",
    "amax": "max",
    "special_logsumexp": "logsumexp",
    "special_softmax": "softmax",
    "special_log_softmax": "log_softmax",
}


@dataclass(frozen=True)
class Operation:
    """One call of a torch function, with what is known of its operands.

    Args:
        name: what it is called, as a function, as a method, as an operator or in place.
        function: the function.
        args, kwargs: what it got.
        operands: the tensors among that.
        known: what is known of each.
        result: what it gave.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Tensor]
    known: list[Followed | None]
    result: object

    @property
    def plain_name(self) -> str:
        """What all operations go by that do the same."""
        return _SYNONYMS.get(self.name, self.name)

    @cached_property
    def results(self) -> list[Tensor]:
        """The tensors that it gave, or that it wrote into."""
        return self.operands[:1] if self.name == "setitem" else tensors_among((self.result,), {})

    def first(self, kind: type[SomeFollowed]) -> tuple[Tensor, SomeFollowed] | None:
        """The first operand that is of a kind."""
        for operand, followed in zip(self.operands, self.known, strict=True):
            if isinstance(followed, kind):
                return operand, followed
        return None

    def logits(self) -> tuple[Tensor, Logits | None]:
        """The first operand that descends from a product, and how."""
        return self.first(Logits) or (self.operands[0], None)

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by its place or its name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def axis(self) -> int | None:
        """The one axis that the operation runs along."""
        axis = self.argument(1, "dim", self.kwargs.get("axis"))
        if isinstance(axis, (tuple, list)) and len(axis) == 1:
            axis = axis[0]
        return axis if isinstance(axis, int) and not isinstance(axis, bool) else None


def tensors_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among some arguments, also one level down in lists."""
    found: list[Tensor] = []
    for argument in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, (tuple, list)):
            found += [part for part in argument if isinstance(part, Tensor)]
    return found


def name_of(function: Callable[..., Any]) -> str:
    """What an operation is called, as a function, as a method, as an operator, in place, or as one of its overloads."""
    name = str(getattr(function, "__name__", ""))
    return (name.partition(".")[0] if "." in name else name).strip("_")
