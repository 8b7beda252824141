"""What seeing attention costs by itself, before anything is computed of it."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from compiling import compiled_rows
from models import SIZES, Attention, LanguageModel, Size, WrittenOutAttention
from random_calls import described, random_call
from table import Row, goal, judged
from torch.overrides import TorchFunctionMode
from turns import Effort, progress, quartiles, ratios, seconds_of

from lightning_attn import observe
from lightning_attn.capture import Capture
from lightning_attn.capture.sites import SitePatterns

OBSERVE_CALLS = 100_000


class EmptyMode(TorchFunctionMode):
    """Lets every torch function run as it would: what torch itself takes for showing them, to whatever mode."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **({} if kwargs is None else kwargs))


def capture_rows(effort: Effort) -> Iterator[Row]:
    yield observe_row(effort)
    size = SIZES["demo"]
    # A capture hears every function that torch shows to modes, and follows a softmax to what it is multiplied with.
    yield from tracing_rows(size, Attention, "fused attention", effort)
    yield from tracing_rows(size, WrittenOutAttention, "attention written out with softmax", effort)
    yield from compiled_rows(effort)


def tracing_rows(size: Size, attention: type[Attention], kind: str, effort: Effort) -> Iterator[Row]:
    setting = f"demo LM with {kind}: {size}"
    progress(f"forward and backward of the {setting}, under a capture")
    torch.manual_seed(0)
    model, batch = LanguageModel(size, attention), size.random_batch()

    def plain() -> None:
        model(batch).backward()

    def under_empty_mode() -> None:
        with EmptyMode():
            plain()

    def under_capture() -> None:
        with Capture(model, lambda call: None, sites=SitePatterns(None), max_sequences=4) as capture:
            plain()
        if capture.count != size.layers:
            raise RuntimeError(f"{capture.count} calls were seen, not {size.layers}.")

    found = ratios(
        lambda: seconds_of(plain, effort.steps),
        {
            "empty mode": lambda: seconds_of(under_empty_mode, effort.steps),
            "capture": lambda: seconds_of(under_capture, effort.steps),
        },
        effort.rounds_of_short_steps,
    )
    yield found["empty mode"].row("forward and backward under an empty `TorchFunctionMode`", setting, "plain ones")
    yield found["capture"].row("forward and backward under a capture without statistics", setting, "plain ones")


def observe_row(effort: Effort) -> Row:
    """What a kernel that tells of itself pays for it on the steps that nobody watches."""
    call = random_call(1, 128, is_causal=True)
    progress("telling of attention when nobody watches")
    timer = timeit.Timer(lambda: observe(call.query, call.key, call.value, is_causal=True))
    nanoseconds = [1e9 * seconds / OBSERVE_CALLS for seconds in timer.repeat(effort.rounds, OBSERVE_CALLS)]
    low, middle, high = quartiles(nanoseconds)
    return Row(
        "`observe()` when nobody watches",
        described(call),
        "",
        f"{middle:.0f} ns",
        f"{low:.0f} – {high:.0f}",
        judged(middle, goal(1000)),
    )
