"""The least entropy of logits of a given spread."""

from __future__ import annotations

import math

import pytest
import torch
from reference.logits import KNOWN_FLOORS

from lightning_attn.functional.floor import entropy_floor


@pytest.mark.parametrize(("keys", "spread", "expected"), KNOWN_FLOORS)
def test_known_values(keys: int, spread: float, expected: float) -> None:
    assert float(entropy_floor(spread, keys)) == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize("keys", [2, 3, 10, 1000])
@pytest.mark.parametrize("spread", [0.0, 1e-9, 0.5, 4.0, 30.0, 200.0])
def test_it_is_the_entropy_of_one_peak(keys: int, spread: float) -> None:
    lead = spread * math.sqrt(keys / (keys - 1))
    rest = (keys - 1) * math.exp(-lead)
    peak, other = 1 / (1 + rest), math.exp(-lead) / (1 + rest)
    entropy = peak * math.log1p(rest) + (keys - 1) * other * (math.log1p(rest) + lead)
    assert float(entropy_floor(spread, keys)) == pytest.approx(entropy, rel=1e-12)


@pytest.mark.parametrize("keys", [2, 3, 8, 64])
def test_no_logits_have_less_entropy(keys: int) -> None:
    logits = torch.randn(5000, keys, dtype=torch.float64) * 10 ** (3 * torch.rand(5000, 1).double() - 1)
    spread = torch.linalg.vector_norm(logits - logits.mean(-1, keepdim=True), dim=-1)
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    floor = entropy_floor(spread, keys)
    assert (floor <= entropy + 1e-13).all()
    if keys == 2:
        torch.testing.assert_close(floor, entropy, rtol=1e-9, atol=1e-13)


def test_equal_logits_and_a_single_key() -> None:
    keys = torch.tensor([1, 2, 3, 1024])
    torch.testing.assert_close(entropy_floor(0.0, keys), keys.double().log())
    assert float(entropy_floor(3.0, 1)) == 0
    assert float(entropy_floor(math.inf, 7)) == 0


@pytest.mark.parametrize(
    ("given", "computed"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2],
)
def test_shapes_and_precision(given: torch.dtype, computed: torch.dtype) -> None:
    floor = entropy_floor(torch.ones(3, 1, dtype=given), torch.tensor([4.0, 8.0], dtype=given))
    assert (floor.shape, floor.dtype) == ((3, 2), computed)


def test_what_is_absent_stays_absent() -> None:
    assert entropy_floor(torch.tensor([math.nan, 1.0]), 3).isnan().tolist() == [True, False]


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"`spread` must be 0 or more, got -1\."):
        entropy_floor(torch.tensor([0.0, -1.0]), 3)
    with pytest.raises(ValueError, match=r"`keys` must be 1 or more, got 0\."):
        entropy_floor(1.0, 0)
