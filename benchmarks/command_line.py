"""What the commands that print tables have in common: which parts are measured, how thoroughly, and where tables go."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from functools import partial
from pathlib import Path

from turns import QUICK, THOROUGH


def parser(description: str, parts: Collection[str]) -> argparse.ArgumentParser:
    """Takes ``--quick``, ``--only`` and ``--output``; a command adds what it alone needs.

    Args:
        description: what is measured.
        parts: what there is to choose from.
    """
    taking = argparse.ArgumentParser(description=description)
    taking.add_argument(
        "--quick",
        dest="effort",
        action="store_const",
        const=QUICK,
        default=THOROUGH,
        help="repeat little: to see that it runs, not to be quoted",
    )
    taking.add_argument(
        "--only",
        type=partial(_chosen, parts),
        default=list(parts),
        metavar="PART,…",
        help=f"some of {','.join(parts)}; all by default",
    )
    taking.add_argument("--output", type=Path, metavar="FILE", help="write the tables to a file too")
    return taking


def publish(text: str, output: Path | None) -> None:
    """Print tables, and write them to a file where one is given."""
    print(text)
    if output is not None:
        output.write_text(f"{text}\n", encoding="utf-8")


def _chosen(parts: Collection[str], names: str) -> list[str]:
    chosen = names.split(",")
    unknown = [name for name in chosen if name not in parts]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(parts)}")
    return chosen
