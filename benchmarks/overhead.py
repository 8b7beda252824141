"""What watching attention costs: training steps, the statistics of one call, seeing calls at all, and memory.

    python benchmarks/overhead.py --output table.md
    python benchmarks/overhead.py --quick --only call,memory

Everything is measured in one process and given as a ratio, so that the table means the same on another machine. What is
compared takes turns: each block of measurements stands between two blocks of its baseline and is divided by their mean,
which cancels a machine that slowly becomes faster or slower. A ratio is the median over rounds of such turns.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from capturing import capture_rows
from dense_formulas import WITH_DENSE_FORMULA
from kinds import COMPARES_SEQUENCES, OF_STATES, ONE_PASS, SECOND_WALK, SPECTRAL
from machine import machine
from memory import memory_rows
from named_statistics import named_rows
from one_call import call_rows
from table import HEADER, Row, code, counted
from training_steps import training_rows
from turns import QUICK, THOROUGH, Effort

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


def parts(names: str) -> list[str]:
    chosen = names.split(",")
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(PARTS)}")
    return chosen


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what watching attention costs, as a Markdown table.")
    parser.add_argument("--quick", action="store_true", help="repeat little: to see that it runs, not to be quoted")
    parser.add_argument(
        "--only", type=parts, default=list(PARTS), metavar="PART,…", help=f"some of {','.join(PARTS)}; all by default"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table to a file too")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    effort = QUICK if given.quick else THOROUGH
    # Each of dozens of short runs would introduce itself.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.pytorch")
    rows = [row for part, rows_of in PARTS.items() if part in given.only for row in rows_of(effort)]
    text = "\n".join([machine(), "", HEADER, *map(str, rows), "", legend(effort)])
    print(text)
    if given.output is not None:
        given.output.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
