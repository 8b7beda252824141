"""What watching attention costs: training steps, the statistics of one call, seeing calls at all, and memory.

    python benchmarks/overhead.py --output table.md
    python benchmarks/overhead.py --quick --only call,memory

Everything is measured in one process and given as a ratio, so that the table means the same on another machine. What is
compared takes turns: each block of measurements stands between two blocks of its baseline and is divided by their mean,
which cancels a machine that slowly becomes faster or slower. A ratio is the median over rounds of such turns.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator

from capturing import capture_rows
from command_line import parser, publish
from dense_formulas import WITH_DENSE_FORMULA
from kinds import COMPARES_SEQUENCES, OF_STATES, ONE_PASS, SECOND_WALK, SPECTRAL
from machine import machine
from memory import memory_rows
from named_statistics import named_rows
from one_call import call_rows
from table import HEADER, Row, code, counted
from training_steps import training_rows
from turns import Effort

PARTS: dict[str, Callable[[Effort], Iterator[Row]]] = {
    "training": training_rows,
    "call": call_rows,
    "named": named_rows,
    "capture": capture_rows,
    "memory": memory_rows,
}


def legend(effort: Effort) -> str:
    kinds = {
        "One-pass": ONE_PASS,
        "With a dense formula": WITH_DENSE_FORMULA,
        "In one pass too, but comparing sequences": COMPARES_SEQUENCES,
        "In a second walk over the rows": SECOND_WALK,
        "Spectral, of one sequence": SPECTRAL,
        "Of hidden states": OF_STATES,
    }
    rounds = f"{counted(effort.rounds, 'round')}, and of {effort.rounds_of_short_steps} where short steps are compared"
    return " ".join([f"Medians of {rounds}.", *(f"*{kind}*: {code(names)}." for kind, names in kinds.items())])


def main() -> None:
    given = parser("Measure what watching attention costs, as a Markdown table.", PARTS).parse_args()
    # Each of dozens of short runs would introduce itself.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.pytorch")
    rows = [row for part, rows_of in PARTS.items() if part in given.only for row in rows_of(given.effort)]
    publish("\n".join([machine(), "", HEADER, *map(str, rows), "", legend(given.effort)]), given.output)


if __name__ == "__main__":
    main()
