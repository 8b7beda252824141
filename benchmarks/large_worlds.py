"""What a capture costs on more ranks than anybody has for a benchmark, on paper.

A hop from rank to rank takes a latency a, and then b bytes a second go through. With N ranks and B bytes an all-reduce
takes 2 (N − 1) a + 2 (N − 1) / N · B / b around a ring, which is as good as can be for large tensors, and
2 log₂(N) a + 2 B / b up and down a tree, which is what libraries choose for small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, log2
from typing import NamedTuple

from payload import bytes_of_names, formula
from table import header

from lightning_attn.statistics import resolve

LAYERS, HEADS = 48, 16
WORLDS = (8, 64, 1000)


class Network(NamedTuple):
    """Links between ranks: seconds of a hop, and bytes a second."""

    latency: float
    bandwidth: float


FAST, SLOW = Network(5e-6, 50e9), Network(20e-6, 10e9)

HEADER = header(
    "ranks", "way", "both collectives, 5 µs and 50 GB/s", "20 µs and 10 GB/s", "names at first, received by each rank"
)


def large_world_rows() -> Iterator[str]:
    """The table, for one model and the default set of statistics."""
    payload = formula(LAYERS, HEADS, resolve(None))
    names = bytes_of_names(LAYERS, HEADS)
    for ranks in WORLDS:
        for way, seconds_of in WAYS.items():
            fast, slow = (
                f"{1000 * sum(seconds_of(ranks, size, network) for size in payload):.2f} ms" for network in (FAST, SLOW)
            )
            yield f"| {ranks:,} | {way} | {fast} | {slow} | {ranks * names / 1000:,.0f} kB |"


def ring(ranks: int, size: int, network: Network) -> float:
    """Seconds of an all-reduce of so many bytes around a ring."""
    hops = 2 * (ranks - 1)
    return hops * network.latency + hops / ranks * size / network.bandwidth


def tree(ranks: int, size: int, network: Network) -> float:
    """Seconds of an all-reduce of so many bytes up and down a tree."""
    return 2 * ceil(log2(ranks)) * network.latency + 2 * size / network.bandwidth


WAYS: dict[str, Callable[[int, int, Network], float]] = {"ring": ring, "tree": tree}
