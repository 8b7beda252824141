"""Refusals: each says why and names a way out, and what was a piece of an attention stays one."""

from __future__ import annotations

import pytest
import torch

from lightning_attn.capture import refusals
from lightning_attn.capture.axes import KEY, LEFT, QUERY, RIGHT
from lightning_attn.capture.refusals import (
    DRAWN_WEIGHTS,
    SEVERAL_AXES,
    Refusal,
    UnreadableError,
    UnreadablePieceError,
)
from lightning_attn.capture.softmax.trail import Logits, Softmax

NAMED = {name: refusal for name, refusal in vars(refusals).items() if isinstance(refusal, Refusal)}


def softmax() -> Softmax:
    return Softmax(torch.zeros(2, 3), (QUERY, KEY), Logits((LEFT, RIGHT)), modules=(), version=0)


@pytest.mark.parametrize("name", NAMED)
def test_every_refusal_says_why_and_names_a_way_out(name: str) -> None:
    message = str(NAMED[name].error())
    assert message.startswith(NAMED[name].reason + ". ")
    assert "`sites` without it" in message
    assert not message.endswith(".")  # the warning that it becomes a part of ends the sentence


def test_no_two_refusals_have_the_same_reason() -> None:
    assert len({refusal.reason for refusal in NAMED.values()}) == len(NAMED)


def test_a_piece_is_refused_as_one() -> None:
    assert type(SEVERAL_AXES.error()) is UnreadablePieceError
    assert type(DRAWN_WEIGHTS.error()) is UnreadableError


def test_what_was_a_piece_stays_one_when_it_is_refused_for_another_reason() -> None:
    piece, whole = softmax(), softmax()
    piece.refuse(SEVERAL_AXES)
    for refused in (piece, whole):
        refused.refuse(DRAWN_WEIGHTS)
        assert refused.refusal is not None and refused.refusal.reason == DRAWN_WEIGHTS.reason
    assert piece.refusal is not None and piece.refusal.is_piece
    assert whole.refusal == DRAWN_WEIGHTS


def test_a_softmax_that_is_let_go_holds_no_tensor() -> None:
    held = softmax()
    held.history = Logits((LEFT, RIGHT), shift=torch.zeros(2, 1))
    held.let_go()
    assert held.logits.numel() == 0 and held.history.shift is None and held.history.masks == ()
