"""What the statistics of one attention call cost, over one fused forward of the same call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dense_formulas import WITH_DENSE_FORMULA, check_dense_formulas, dense_formulas
from kinds import COMPARES_SEQUENCES, EIGENVALUE, ONE_PASS, SECOND_WALK, SINGULAR_VALUES
from random_calls import described, fused_forward, random_call, statistics_of
from table import Row, code, goal
from turns import Effort, Ratio, progress, ratios, seconds_of

from lightning_attn.capture.call import AttentionCall

SHARP = 50.0  # heads of a run that is lost: most weights are too small for float32, which must not make them slow
SPECTRAL_TOKENS = 2048

ONE_PASS_GOAL, SPECTRAL_GOAL = goal(3), goal(16)


def call_rows(effort: Effort) -> Iterator[Row]:
    check_dense_formulas()
    for tokens, sequences in ((1024, 4), (4096, 1)):
        for causal in (True, False):
            yield from one_pass_rows(random_call(sequences, tokens, causal), effort)
    yield sharp_row(effort)
    for causal in (True, False):
        yield from spectral_rows(random_call(1, SPECTRAL_TOKENS, causal), effort)


def one_pass_rows(call: AttentionCall, effort: Effort) -> Iterator[Row]:
    setting = described(call)
    progress(f"statistics of one call ({setting})")
    with_formula = f"the {len(WITH_DENSE_FORMULA)} one-pass statistics with a dense formula"
    ways: dict[str, Callable[[], object]] = {
        "one-pass statistics of a call": lambda: statistics_of(call, ONE_PASS),
        f"{with_formula}, in one pass": lambda: statistics_of(call, WITH_DENSE_FORMULA),
        f"{with_formula}, by dense formulas": lambda: dense_formulas(call),
        f"one-pass statistics and {code(SECOND_WALK)}": lambda: statistics_of(call, ONE_PASS + SECOND_WALK),
    }
    if call.sequences > 1:
        compared = f"one-pass statistics and {code(COMPARES_SEQUENCES)}"
        ways[compared] = lambda: statistics_of(call, ONE_PASS + COMPARES_SEQUENCES)
    for measured, ratio in _over_fused_forward(call, ways, effort).items():
        limits = [ONE_PASS_GOAL] if measured == "one-pass statistics of a call" else []
        yield ratio.row(measured, setting, "fused forward", *limits)


def sharp_row(effort: Effort) -> Row:
    call = random_call(4, 1024, is_causal=True, logit_std=SHARP)
    setting = f"{described(call)}, sharp (`logit_std` {SHARP:g})"
    progress(f"statistics of one call ({setting})")
    found = _over_fused_forward(call, {"one pass": lambda: statistics_of(call, ONE_PASS)}, effort)
    return found["one pass"].row("one-pass statistics of a call", setting, "fused forward", ONE_PASS_GOAL)


def spectral_rows(call: AttentionCall, effort: Effort) -> Iterator[Row]:
    setting = described(call)
    progress(f"spectral statistics of one call ({setting})")
    names: dict[str, Sequence[str]] = {"singular values": SINGULAR_VALUES}
    if call.visibility.causal_offset is None:
        names["eigenvalue"] = EIGENVALUE
    ways = {way: lambda names=names: statistics_of(call, names) for way, names in names.items()}
    for way, ratio in _over_fused_forward(call, ways, effort).items():
        limits = [SPECTRAL_GOAL] if way == "singular values" else []
        yield ratio.row(f"{code(names[way])} of a call", setting, "fused forward", *limits)


def _over_fused_forward(
    call: AttentionCall, others: dict[str, Callable[[], object]], effort: Effort
) -> dict[str, Ratio]:
    return ratios(
        lambda: seconds_of(lambda: fused_forward(call), effort.calls),
        {name: lambda other=other: seconds_of(other, effort.calls) for name, other in others.items()},
        effort.rounds,
    )
