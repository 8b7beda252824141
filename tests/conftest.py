"""Every test begins with the same random numbers and leaves no mode behind; those of several ranks share a pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from rank_pool import RankPool

# The models of the tests are too small to be shared between threads.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers_and_no_mode_left() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert torch._C._len_torch_function_stack() == 0, "a torch function mode was left on"
    left = {name: hooks for name, hooks in vars(torch.nn.modules.module).items() if "_hooks" in name and hooks}
    assert not any(name.startswith("_global") for name in left), f"a hook was left on: {left}"


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Runs functions on several ranks."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have all tests of several ranks run in one process, so that there is one pool."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))
