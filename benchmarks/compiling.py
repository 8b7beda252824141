"""What a capture step of a compiled model costs, and that it leaves what was compiled as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from models import SIZES, LanguageModel, Size
from table import Row, goal, judged
from torch import Tensor
from torch._dynamo.utils import counters
from turns import Effort, Ratio, progress, ratios, seconds_of

from lightning_attn import AttentionObserver


def compiled_rows(effort: Effort) -> Iterator[Row]:
    for name, size in SIZES.items():
        setting = f"{name} LM by `torch.compile(model)`: {size}"
        progress(f"training steps of the {setting}")
        if name == "demo":
            yield from _rows(size, setting, effort.rounds_of_short_steps, effort.steps)
        else:
            yield from _rows(size, setting, effort.rounds, max(2, effort.steps // 4))


def _rows(size: Size, setting: str, rounds: int, steps: int) -> Iterator[Row]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = LanguageModel(size), size.random_batch()
    compiled: Callable[[Tensor], Tensor] = torch.compile(model)
    optimizer = model.configure_optimizers()
    observer = AttentionObserver(model, max_sequences=4)

    def step(forward: Callable[[Tensor], Tensor]) -> None:
        optimizer.zero_grad()
        forward(batch).backward()
        optimizer.step()

    def watched(tokens_BN: Tensor) -> Tensor:
        with observer:
            return compiled(tokens_BN)

    def capture_step() -> None:
        step(watched)
        if len(observer.snapshot().sites) != size.layers:
            raise RuntimeError("Not every site of the compiled model was seen.")

    def eager_seconds() -> float:
        return seconds_of(lambda: step(model), steps)

    def compiled_seconds() -> float:
        return seconds_of(lambda: step(compiled), steps)

    compiled_seconds()  # compiles
    graphs = _compiled_graphs()
    # What happens before and after cannot take turns, but each of them can with eager steps.
    before = ratios(eager_seconds, {"compiled": compiled_seconds}, rounds)["compiled"]
    capture = ratios(compiled_seconds, {"capture": lambda: seconds_of(capture_step, steps)}, rounds)["capture"]
    after = ratios(eager_seconds, {"compiled": compiled_seconds}, rounds)["compiled"]
    recompiles = _compiled_graphs() - graphs

    yield before.row("compiled plain step", setting, "eager plain step")
    yield capture.row("capture step of a compiled model, all statistics", setting, "compiled plain step")
    unchanged = Ratio(
        *(ratio / before.value for ratio in (after.value, after.low, after.high)), capture.baseline_seconds
    )
    yield unchanged.row("compiled plain step after captures", setting, "before them")
    yield Row("recompiles by captures", setting, "", str(recompiles), "", judged(recompiles, goal(0)))


def _compiled_graphs() -> int:
    """How many graphs torch compiled so far in this process; it has no public counter of them."""
    return counters["stats"]["unique_graphs"]
