"""What is known of tensors, for as long as they live."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

from torch import Tensor

_Note = TypeVar("_Note")


class Notes(Generic[_Note]):
    """A note for each of some tensors, which ends with the tensor.

    They are told apart as objects: the number that `id` gives is used again for another one.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Tensor], _Note]] = {}

    def __len__(self) -> int:
        return len(self._notes)

    def get(self, thing: object) -> _Note | None:
        """What is known of a tensor."""
        known = self._notes.get(id(thing))
        return known[1] if known is not None and known[0]() is thing else None

    def set(self, tensor: Tensor, note: _Note) -> None:
        """Know something of a tensor from now on."""
        key = id(tensor)

        def forget(reference: weakref.ref[Tensor]) -> None:
            known = self._notes.get(key)
            if known is not None and known[0] is reference:
                del self._notes[key]

        self._notes[key] = (weakref.ref(tensor, forget), note)

    def drop(self, tensor: Tensor) -> None:
        """Know nothing of a tensor any more."""
        self._notes.pop(id(tensor), None)

    def items(self) -> Iterator[tuple[Tensor, _Note]]:
        """The tensors that live, with what is known of each. Notes may be changed on the way."""
        for reference, note in list(self._notes.values()):
            tensor = reference()
            if tensor is not None:
                yield tensor, note
