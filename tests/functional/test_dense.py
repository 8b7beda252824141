"""What functions of dense tensors take, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from lightning_attn.functional.dense import broadcast, check_visibility, checked, present_rows, visible_keys


@pytest.mark.parametrize(
    ("sizes", "shape", "fits"),
    [
        ((2, 3), "(…, N, M)", True),
        ((4, 5, 2, 3), "(…, N, M)", True),
        ((3,), "(…, N, M)", False),
        ((), "(…, N, M)", False),
        ((7, 3, 3), "(…, N, N)", True),
        ((3, 2), "(…, N, N)", False),
        ((3, 3), "(B, N, N)", False),
        ((2, 2, 3, 3), "(B, H, N, N) or (B, N, N)", True),
        ((2, 3, 3), "(B, H, N, N) or (B, N, N)", True),
        ((2, 3, 4), "(B, H, N, N) or (B, N, N)", False),
        ((1, 2, 2, 3, 3), "(B, H, N, N) or (B, N, N)", False),
    ],
)
def test_a_shape_says_what_is_taken(sizes: tuple[int, ...], shape: str, fits: bool) -> None:
    tensor = torch.zeros(sizes)
    if fits:
        assert checked("tensor", tensor, shape).shape == tensor.shape
    else:
        with pytest.raises(ValueError) as raised:
            checked("tensor", tensor, shape)
        assert str(raised.value) == (
            f"`tensor` must be floating-point, of shape {shape}, got torch.float32 of shape {sizes}."
        )


def test_half_precision_is_computed_in_full() -> None:
    types = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float32}
    for given, computed in {**types, torch.float64: torch.float64}.items():
        assert checked("tensor", torch.zeros(2, 2, dtype=given)).dtype == computed


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(ValueError, match=r"`weights` must be floating-point, .* got \[\[1\.0\]\]"):
        checked("weights", [[1.0]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`mask` must be boolean and broadcast to \(2, 2\), got True"):
        visible_keys(torch.zeros(2, 2), True)  # type: ignore[arg-type]


def test_numbers_broadcast_like_masks() -> None:
    assert broadcast("mass", torch.ones(3), (2, 3), "floating-point").shape == (2, 3)
    for wrong in (torch.ones(3).bool(), torch.ones(2), torch.ones(1, 2, 3)):
        with pytest.raises(ValueError, match=r"`mass` must be floating-point and broadcast to \(2, 3\), got torch\."):
            broadcast("mass", wrong, (2, 3), "floating-point")


@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_are_seen_where_mask_and_order_allow(is_causal: bool) -> None:
    weights, mask = torch.zeros(2, 3, 4), torch.rand(2, 1, 4) < 0.5
    for given in (None, mask):
        expected = [
            [
                [(given is None or bool(given[b, 0, j])) and (not is_causal or j <= i) for j in range(4)]
                for i in range(3)
            ]
            for b in range(2)
        ]
        assert visible_keys(weights, given, is_causal=is_causal).tolist() == expected


def test_rows_are_present_where_they_have_a_distribution() -> None:
    weights = torch.full((4, 4), 0.25)
    weights[1, 2], weights[2, 3] = torch.nan, torch.inf
    visible = torch.ones(4, 4, dtype=torch.bool)
    visible[3] = False
    assert present_rows(weights, visible, is_self_attention=False).tolist() == [True, False, False, False]
    visible[:, 3] = False  # the infinite weight is hidden; the last token is padding
    visible[3, :2] = True
    assert present_rows(weights, visible, is_self_attention=False).tolist() == [True, False, True, True]
    assert present_rows(weights, visible, is_self_attention=True).tolist() == [True, False, True, False]


@pytest.mark.parametrize("visible", [(3,), (0, 3), (3.0, 3), [3, 3], None, torch.ones(3, 3), torch.ones(3).bool()])
def test_what_gives_no_visibility_is_refused(visible: object) -> None:
    check_visibility("visible", (1, 3))
    check_visibility("visible", torch.ones(2, 3, 4).bool())
    with pytest.raises(ValueError, match=r"`visible` must be a boolean tensor of shape \(…, N, M\), or a tuple"):
        check_visibility("visible", visible)  # type: ignore[arg-type]
