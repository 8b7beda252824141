"""Statistics do not depend on how the matrix is cut into blocks of rows, and no block is large."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_attn import AttentionCall
from lightning_attn.capture import Visibility
from lightning_attn.statistics import RowStatistic, known_statistics, measure, resolve
from lightning_attn.statistics.rows.row_pass import WRITTEN_BYTES, passes

B, K, GROUP, N = 2, 2, 2, 18
ONE_ROW, ONE_BLOCK = 4, 2**30
OF_ROWS = {name: statistic for name, statistic in known_statistics().items() if issubclass(statistic, RowStatistic)}
NOT_SPECTRAL = [name for name, statistic in OF_ROWS.items() if not statistic.is_spectral]


def a_call(visibility: Visibility, keys: int = N, **fields: Any) -> AttentionCall:
    query = torch.randn(B, K * GROUP, N, 8)
    key = torch.randn(B, K, keys, 8)
    return AttentionCall("attention", query, key, None, 1.0, visibility, self_attention=keys == N, **fields)


def values(call: AttentionCall, block_bytes: int | None = None) -> dict[str, Tensor]:
    return {name: sums.or_nan for name, sums in measure(call, resolve("all"), block_bytes=block_bytes).items()}


def _masks(*shape: int) -> Tensor:
    mask = torch.rand(shape) < 0.7
    mask[..., 5, :] = False
    return mask


CALLS = {
    "everything": lambda: a_call(Visibility()),
    "causal": lambda: a_call(Visibility(0)),
    "fewer keys, causal": lambda: a_call(Visibility(0), keys=N - 6),
    "more keys, causal to the last": lambda: a_call(Visibility(13), keys=N + 13),
    "fewer keys, causal to the last": lambda: a_call(Visibility(-6), keys=N - 6),
    "a mask for each head": lambda: a_call(Visibility(mask=_masks(B, K * GROUP, N, N))),
    "a mask for each sequence, causal": lambda: a_call(Visibility(0, mask=_masks(B, 1, N, N))),
    "padding, causal": lambda: a_call(Visibility(0, mask=torch.arange(N) >= torch.tensor([0, 5]).view(B, 1, 1, 1))),
    "mask of rows": lambda: a_call(Visibility(mask=(torch.arange(N) % 5 > 0).view(1, 1, N, 1))),
    "bias for each head, causal": lambda: a_call(Visibility(0, bias=torch.randn(1, K * GROUP, N, N))),
    "bias of keys": lambda: a_call(Visibility(bias=torch.where(torch.rand(B, 1, 1, N) < 0.2, -1e4, 0.5))),
    "mask and bias": lambda: a_call(Visibility(mask=_masks(1, 1, N, N), bias=torch.randn(B, 1, 1, N))),
    "sink logits, soft cap": lambda: a_call(Visibility(0), sink_logits=torch.randn(K * GROUP), soft_cap=5.0),
    "long, causal": lambda: long_call(Visibility(0)),
    "long": lambda: long_call(Visibility()),
}


def long_call(visibility: Visibility) -> AttentionCall:
    """Too long for the spectrum to be computed at once."""
    return AttentionCall("attention", torch.randn(1, 2, 130, 8), torch.randn(1, 1, 130, 8), None, 1.0, visibility, True)


@pytest.mark.parametrize("block_bytes", [ONE_ROW, 800, 8000])
@pytest.mark.parametrize("name", CALLS)
def test_blocks_of_any_size_give_the_same(name: str, block_bytes: int) -> None:
    call = CALLS[name]()
    whole, in_blocks = values(call, ONE_BLOCK), values(call, block_bytes)
    for statistic, expected in whole.items():
        tolerance = 2e-6 if statistic in NOT_SPECTRAL else 1e-4
        torch.testing.assert_close(
            in_blocks[statistic],
            expected,
            rtol=tolerance,
            atol=2e-7,
            equal_nan=True,
            msg=lambda m, s=statistic: f"{s}: {m}",
        )


@pytest.mark.parametrize("name", CALLS)
def test_heads_and_sequences_do_not_meet(name: str) -> None:
    """Heads that are measured alone have the values they have among others; so have sequences, whose sums add."""
    call = CALLS[name]()
    together = measure(call, resolve("all"))
    for head in range(call.key.shape[1]):
        of_group = slice(head * call.group, (head + 1) * call.group)
        alone = measure(call.select(key_heads=slice(head, head + 1)), resolve("all"))
        for statistic, sums in alone.items():
            torch.testing.assert_close(
                tuple(sums), tuple(s[of_group] for s in together[statistic]), rtol=1e-4, atol=1e-6
            )
    apart = [measure(call.select(slice(b, b + 1)), resolve("all")) for b in range(call.sequences)]
    for statistic, sums in together.items():
        if known_statistics()[statistic].compares_sequences:
            continue
        of_sequences = [torch.stack(parts) for parts in zip(*(found[statistic] for found in apart), strict=True)]
        added = tuple(part.amax(0) if len(sums) == 1 else part.sum(0) for part in of_sequences)
        torch.testing.assert_close(tuple(sums), added, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_statistic_is_the_same_alone_and_among_others(name: str) -> None:
    """What a block computes when it is first asked does not depend on who asks, and after whom."""
    query, key, value = torch.randn(B, K * GROUP, N, 8), torch.randn(B, K, N, 8), torch.randn(B, K, N, 8)
    call = AttentionCall("attention", query, key, value, 1.0, Visibility(0), self_attention=True)
    alone, among_others = measure(call, resolve(name)), measure(call, resolve("all"))
    torch.testing.assert_close(tuple(alone[name]), tuple(among_others[name]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("whole_matrices", [False, True])
@pytest.mark.parametrize("block_bytes", [ONE_ROW, 1000, 4000, 20_000, ONE_BLOCK])
def test_passes_cover_every_row_of_every_head_once(block_bytes: int, whole_matrices: bool) -> None:
    # A query holds the number of its sequence and head, so that logits tell where they come from.
    query = torch.arange(B * K * GROUP, dtype=torch.float32).view(B, K * GROUP, 1, 1).expand(-1, -1, N, -1)
    call = AttentionCall("attention", query, torch.ones(B, K, N, 1), None, 1.0, Visibility(), True)
    met = torch.zeros(B * K * GROUP, N, dtype=torch.long)
    for row_pass in passes(call, block_bytes, whole_matrices=whole_matrices):
        for rows in row_pass.blocks():
            numbers = rows.row_max_BHR.long()
            assert (numbers[0, :, 0] % (K * GROUP) == row_pass.first_head + torch.arange(numbers.shape[1])).all()
            met[numbers.flatten(0, 1)[:, 0], rows.start : rows.stop] += 1
    assert (met == 1).all()


class _Allocations(TorchDispatchMode):
    """The memory of tensors that are made while it is on: the largest of them, and most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.most = 0
        self._now: dict[int, list[int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._saw(tensor)
        return result

    def _saw(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # Views share a storage, which lives until the last of them is gone.
        entry = self._now.setdefault(storage._cdata, [storage.nbytes(), 0])
        entry[1] += 1
        weakref.finalize(tensor, self._gone, storage._cdata)
        self.largest = max(self.largest, storage.nbytes())
        self.most = max(self.most, sum(size for size, _ in self._now.values()))

    def _gone(self, storage: int) -> None:
        entry = self._now[storage]
        entry[1] -= 1
        if not entry[1]:
            del self._now[storage]


@contextmanager
def allocations() -> Iterator[_Allocations]:
    with torch.no_grad(), _Allocations() as counted:
        yield counted


def long_attention(n: int, visibility: Visibility, sequences: int = 1) -> AttentionCall:
    query, key, value = torch.randn(3, sequences, 1, n, 16)
    return AttentionCall("attention", query, key, value, 0.25, visibility, self_attention=True)


def test_memory_is_bounded_at_a_length_of_4096() -> None:
    n, block_bytes = 4096, 2**20
    left_padding = (torch.arange(n) >= 100)[None, None, None]
    with allocations() as counted:
        measure(long_attention(n, Visibility(0, mask=left_padding)), resolve("all"), block_bytes=block_bytes)
    # A full matrix has 64 MiB. A pass has three blocks, and a few short-lived tensors of that size beside them; the
    # subspace of the spectral statistics has some hundred vectors twice.
    subspace = 4 * n * 128
    assert counted.largest <= max(block_bytes, subspace)
    assert counted.most <= 10 * block_bytes + 4 * subspace


def test_memory_hardly_grows_with_the_length() -> None:
    most = []
    for n in (1024, 4096):
        with allocations() as counted:
            measure(long_attention(n, Visibility(0)), resolve(NOT_SPECTRAL), block_bytes=2**20)
        most.append(counted.most)
    its_own = 2 * 4 * 16 * 4096  # queries and keys in float32
    assert most[1] <= 1.2 * most[0] + its_own


def test_memory_is_bounded_where_sequences_are_compared() -> None:
    """All sequences of a head are in a pass, and beside the three blocks there is one in which diagonals are added."""
    block_bytes, n, sequences = 2**20, 2048, 4
    call = long_attention(n, Visibility(0), sequences)
    with allocations() as counted:
        measure(call, resolve(NOT_SPECTRAL), block_bytes=block_bytes)
    its_own = 6 * 4 * 16 * n * sequences  # queries, keys and values in float32, and the latter in float64
    assert counted.largest <= max(1.1 * block_bytes, its_own)
    assert counted.most <= 10 * block_bytes + its_own


@pytest.mark.parametrize("visibility", [Visibility(), Visibility(0)], ids=["everything", "causal"])
def test_weights_of_one_head_at_a_time_are_written_down(visibility: Visibility) -> None:
    """A group of four heads that would be four times as large together."""
    n, block_bytes = 1500, 2**20
    query, key = torch.randn(1, 4, n, 16), torch.randn(1, 1, n, 16)
    call = AttentionCall("attention", query, key, None, 0.25, visibility, self_attention=True)
    with allocations() as counted:
        measure(call, resolve(["stable_rank", "spectral_gap", "consensus_rate"]), block_bytes=block_bytes)
    assert 4 * 4 * n * n > WRITTEN_BYTES
    subspace = 4 * n * 8 * 30
    assert counted.largest <= max(block_bytes, subspace)
    assert counted.most <= WRITTEN_BYTES + 10 * block_bytes + 4 * subspace
