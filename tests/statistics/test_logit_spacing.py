"""How far apart numbers are where logits are: known by hand, and as numpy knows it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_attn import AttentionCall
from lightning_attn.capture import Visibility
from lightning_attn.functional import attention_logit_spacing
from lightning_attn.metrics import AttentionLogitSpacing
from lightning_attn.snapshot import Snapshot
from lightning_attn.statistics import known_statistics, measure, resolve
from lightning_attn.statistics.logit_spacing import spacing_at
from lightning_attn.tensorboard import heat_map

#: The distance from 1 to the next number: of 8, 11, 24 and 53 binary digits.
EPSILON = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23, torch.float64: 2.0**-52}

of_each_type = pytest.mark.parametrize("dtype", EPSILON, ids=str)


def of_logits(logits: Tensor, dtype: torch.dtype, mask: Tensor | None = None) -> AttentionCall:
    """One sequence and head with such logits, (N, M), as queries that each have a channel of their own, and keys."""
    queries, keys = logits.shape
    query = torch.eye(queries, dtype=dtype)[None, None]
    visibility = Visibility(mask=None if mask is None else mask[None, None])
    key = logits.mT.to(dtype)[None, None]
    return AttentionCall("attention", query, key, None, 1.0, visibility, self_attention=queries == keys)


def spacing(call: AttentionCall) -> float:
    (value,) = measure(call, resolve("logit_spacing"))["logit_spacing"].or_nan.tolist()
    return float(value)


KNOWN = [
    (torch.bfloat16, 0.0, 0.0),
    (torch.bfloat16, 1.0, 2.0**-7),
    (torch.bfloat16, 100.0, 0.5),
    (torch.bfloat16, 127.5, 0.5),
    (torch.bfloat16, 128.0, 1.0),
    (torch.bfloat16, 512.0, 4.0),
    (torch.bfloat16, 1e38, 2.0**119),
    (torch.float16, 1023.5, 0.5),
    (torch.float16, 1024.0, 1.0),
    (torch.float16, 4096.0, 4.0),
    (torch.float16, 65504.0, 32.0),
    (torch.float32, 128.0, 2.0**-16),
    (torch.float32, 8388607.0, 0.5),
    (torch.float32, 8388608.0, 1.0),
    (torch.float64, 128.0, 2.0**-45),
]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("dtype", "logit", "expected"), KNOWN, ids=str)
def test_known_by_hand(dtype: torch.dtype, logit: float, expected: float, sign: int) -> None:
    logits = torch.tensor([[sign * logit] * 3, [0.0] * 3, [logit / 2, 0.0, logit / 2]])
    assert spacing(of_logits(logits, dtype)) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_it_is_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    sizes = (10 ** torch.linspace(-3, 4, 300)).to(dtype)
    following = torch.nextafter(sizes, torch.full_like(sizes, math.inf))
    assert spacing_at(sizes.float(), dtype).tolist() == (following.double() - sizes.double()).tolist()


def test_of_numbers_below_the_normal_ones() -> None:
    sizes = np.array([6e-8, 1e-6, 6e-5, 7e-5, 2e-4], dtype=np.float16)
    assert spacing_at(torch.from_numpy(sizes).float(), torch.float16).tolist() == np.spacing(sizes).tolist()
    assert spacing_at(torch.tensor([1e-9]), torch.float16).tolist() == [0], "it is rounded to 0"


def test_logits_are_rounded_to_the_type_first() -> None:
    assert spacing_at(torch.tensor([127.7, 127.8, 128.2]), torch.bfloat16).tolist() == [0.5, 1.0, 1.0]


def test_products_beyond_the_largest_number_have_an_infinite_spacing() -> None:
    query = torch.full((1, 1, 1, 1), 300.0, dtype=torch.float16)
    assert attention_logit_spacing(query=query, key=query, scale=1.0).tolist() == [math.inf]
    assert attention_logit_spacing(query=query.bfloat16(), key=query.bfloat16(), scale=1.0).tolist() == [512.0]


@pytest.mark.parametrize("smallest", [-1e3, -9984.0])
def test_logits_that_get_no_weight_do_not_count(smallest: float) -> None:
    """-9984 is the -1e4 of bfloat16, which penalties of padding often are."""
    assert spacing(of_logits(torch.tensor([[1.0, smallest, 0.0]]), torch.bfloat16)) == 2.0**-7


def test_only_visible_logits_of_rows_that_are_there_count() -> None:
    logits = torch.tensor([[1.0, 600.0], [600.0, 1.0], [math.inf, 600.0], [600.0, 600.0]])
    visible = torch.tensor([[True, False], [False, True], [True, True], [False, False]])
    assert spacing(of_logits(logits, torch.bfloat16, visible)) == 2.0**-7
    assert math.isnan(spacing(of_logits(logits[2:], torch.bfloat16, visible[2:])))


def test_scale_soft_cap_and_bias_are_in_it() -> None:
    call = of_logits(torch.tensor([[640.0, 0.0, 0.0]]), torch.bfloat16)
    bias = torch.tensor([-300.0, 0.0, 0.0])[None, None, None]
    assert spacing(replace(call, scale=0.125)) == 0.5
    assert spacing(replace(call, soft_cap=50.0)) == 0.25
    assert spacing(replace(call, visibility=Visibility(bias=bias))) == 2.0


def test_heads_and_blocks_of_rows() -> None:
    call = of_logits(torch.diag(torch.tensor([3.0, 700.0, 90.0, 1.0])), torch.bfloat16)
    call = replace(call, query=call.query.repeat(2, 3, 1, 1), key=call.key.repeat(2, 3, 1, 1))
    call.key[0, 1] /= 4
    call.key[1, 1] /= 8
    for block_bytes in (4, 100, 2**20):
        sums = measure(call, resolve("logit_spacing"), block_bytes=block_bytes)["logit_spacing"]
        assert sums.or_nan.tolist() == [4.0, 1.0, 4.0]


@of_each_type
def test_function_and_metric_go_by_the_type_of_the_queries(dtype: torch.dtype) -> None:
    tokens = torch.full((1, 2, 3, 1), 16.0, dtype=dtype)
    metric = AttentionLogitSpacing(num_heads=2).half()  # what it holds is in double precision in any case
    metric.update(query=tokens, key=tokens, scale=1.0)
    metric.update(query=tokens / 2, key=tokens, scale=1.0)
    expected = [256 * EPSILON[dtype]] * 2
    assert attention_logit_spacing(query=tokens, key=tokens, scale=1.0).tolist() == expected
    assert metric.compute().tolist() == expected


def test_an_infinite_value_leaves_the_other_heads_their_colours() -> None:
    values = torch.tensor([[0.5, 1.0, math.inf, math.nan]], dtype=torch.float64)
    finite = torch.tensor([[0.5, 1.0, 1.0, math.nan]], dtype=torch.float64)
    pictures = [heat_map(Snapshot(0, {"site": 4}, ("logit_spacing",), v), "logit_spacing") for v in (values, finite)]
    first_cells = slice(0, pictures[0].shape[1] // 3)
    assert (pictures[0][:, first_cells] == pictures[1][:, first_cells]).all()


def test_it_is_computed_where_somebody_asks_for_it() -> None:
    statistic = known_statistics()["logit_spacing"]
    assert not statistic.by_default and statistic.joined_by == statistic.over_heads == "max"
