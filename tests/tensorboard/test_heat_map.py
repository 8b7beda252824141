"""The pictures of heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_attn import Snapshot
from lightning_attn.tensorboard import heat_map
from lightning_attn.tensorboard.heat_map import _short


def snapshot(values: list[list[float]], statistic: str = "entropy") -> Snapshot:
    matrix = torch.tensor(values, dtype=torch.float64)
    heads = {f"blocks.{site}": matrix.shape[1] for site in range(len(matrix))}
    return Snapshot(3, heads, (statistic,), matrix.flatten()[None])


def colours(picture: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(map(int, colour)) for colour in picture.reshape(-1, 3)}


def test_each_head_has_the_colour_of_its_value_and_absent_ones_are_grey() -> None:
    picture = heat_map(snapshot([[0.0, 1.0], [0.5, float("nan")]]), "entropy")
    assert picture.dtype == np.uint8
    assert {(68, 1, 84), (253, 231, 36), (225, 225, 225)} <= colours(picture)


def test_known_ranges_keep_their_colours_from_step_to_step() -> None:
    """A head at 0.5 looks the same beside heads at 1 and alone."""

    def first_cell(values: list[list[float]], statistic: str) -> list[int]:
        top_of_cells = heat_map(snapshot(values, statistic), statistic)[35]
        return top_of_cells[int((top_of_cells != 255).any(-1).argmax()) + 1].tolist()

    assert first_cell([[0.5, 1.0]], "entropy") == first_cell([[0.5, 0.5]], "entropy")
    assert first_cell([[0.5, 1.0]], "max_logit") != first_cell([[0.5, 0.5]], "max_logit")


def test_by_the_logarithm_colours_tell_one_from_many_everywhere() -> None:
    def cells(*values: float) -> set[tuple[int, ...]]:
        picture = heat_map(snapshot([[*values]], "temperature"), "temperature", spans=(1.0, 10.0))
        dark, bright = (68, 1, 84), (253, 231, 36)
        return {dark, bright} & colours(picture[36:38, : picture.shape[1] - 100])

    assert cells(1.0, 1.0) == {(68, 1, 84)}
    assert cells(200.0, 200.0) == {(253, 231, 36)}
    assert cells(1.0, 10.0) == {(68, 1, 84), (253, 231, 36)}
    assert cells(3.0, 3.0) == set()
    heat_map(snapshot([[float("nan"), 0.5]], "temperature"), "temperature", spans=(1.0, 10.0))


@pytest.mark.parametrize(("sites", "heads"), [(1, 1), (3, 4), (48, 64), (1, 200)])
def test_any_number_of_sites_and_heads(sites: int, heads: int) -> None:
    picture = heat_map(snapshot(torch.randn(sites, heads).tolist(), "max_logit"), "max_logit")
    assert picture.shape[0] > 24 * sites
    assert picture.shape[1] > 20 * heads


def test_a_statistic_of_sites_has_one_column_and_no_numbers_of_heads() -> None:
    nan = float("nan")
    values = [[0.1, nan, nan, nan], [0.9, nan, nan, nan]]
    of_sites, of_heads = (heat_map(snapshot(values, name), name) for name in ("token_similarity", "entropy"))
    cells, others = (picture[34 : 34 + 2 * 24] for picture in (of_sites, of_heads))
    assert (225, 225, 225) not in colours(cells)
    assert (225, 225, 225) in colours(others)
    below = of_sites[34 + 2 * 24 :, : of_sites.shape[1] // 2]
    assert colours(below) == {(255, 255, 255)}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (0.004, "0.00"), (0.457, "0.46"), (1.0, "1.0"), (-3.14, "-3.1"), (42.4, "42"), (1234.5, "1234"),
     (98765.0, "1e5"), (-2.5e12, "-2e12")],
)  # fmt: skip
def test_numbers_fit_their_cell(value: float, text: str) -> None:
    assert _short(value) == text
