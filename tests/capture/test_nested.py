"""Nested tensors: which can be padded, and what is said of others."""

from __future__ import annotations

import pytest
import torch

from lightning_attn.capture.nested import padded
from lightning_attn.capture.refusals import UnreadableError


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ([(1, 2, 3, 4)], r"not \(B, heads, tokens, width\)"),
        ([(3,)], r"not \(B, heads, tokens, width\)"),
        ([], r"not \(B, heads, tokens, width\)"),
        ([(2, 3, 4), (1, 3, 4)], "differ from sequence to sequence"),
        ([(3, 4), (3, 5)], "differ from sequence to sequence"),
    ],
)
def test_what_cannot_be_padded_is_refused_with_a_way_out(shapes: list[tuple[int, ...]], reason: str) -> None:
    with pytest.raises(UnreadableError, match=f"{reason}.*Padded tensors with a mask"):
        padded([torch.zeros(shape) for shape in shapes])


def test_sequences_are_zero_behind_their_last_token() -> None:
    both = padded([torch.ones(3, 4), torch.ones(1, 4)])
    assert both.tensor.shape == (2, 1, 3, 4)
    assert both.is_token_BN.tolist() == [[True, True, True], [True, False, False]]
    assert torch.equal(both.tensor[:, 0, :, 0] == 1, both.is_token_BN)
