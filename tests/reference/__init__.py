"""Every statistic once more: dense, in float64, one row after the other, from the formulas alone.

A statistic is a function of one head of one sequence that gives a list of numbers: one for each row that counts, or one
for the whole matrix, or none. The value of a head is their mean over all sequences (`max_logit`: the largest). Those
that pool sequences in another way are functions of a head's sequences that give its value, or NaN. Each file but
`core` has the formulas of some lenses.

Nothing of `lightning_attn` but the fields of a call is used here.
"""

import importlib
import pkgutil

from reference.core import AS_EXACT_AS_LOGITS, OF_SEQUENCES, STATISTICS, TOLERANCES, Head, Tolerance, head_values, heads

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"reference.{_module.name}")

from reference.lenses import deviations, second_eigenvalue  # noqa: E402
from reference.undecided import SHARES, contrast, is_undecided  # noqa: E402

__all__ = [
    "AS_EXACT_AS_LOGITS",
    "OF_SEQUENCES",
    "SHARES",
    "STATISTICS",
    "TOLERANCES",
    "Head",
    "Tolerance",
    "contrast",
    "deviations",
    "head_values",
    "heads",
    "is_undecided",
    "second_eigenvalue",
]
