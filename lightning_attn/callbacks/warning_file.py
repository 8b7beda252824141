"""Early warnings as lines of JSON in a file, for other programs to read."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_attn.callbacks.run_file import RunFile, content
from lightning_attn.warning.early_warning import EarlyWarning


class WarningFile:
    """The warnings of a run, each a line with its values by name; see `RunFile`.

    Args:
        path: where; anything that fsspec can open.
        run: which run; ``None`` for one that begins now.
    """

    def __init__(self, path: str, run: str | None) -> None:
        self._file = RunFile(path, run, "Early warnings")

    @property
    def path(self) -> str:
        """Where it is."""
        return self._file.path

    @property
    def run(self) -> str:
        """Which run it is of."""
        return self._file.run

    def resume(self, known: Sequence[EarlyWarning]) -> None:
        """Make the file say of this run what was known at its checkpoint."""
        lines = [warning.to_dict() for warning in known]
        wanted = set(map(content, lines))
        self._file.resume(lambda line: content(line) in wanted, lines)

    def add(self, warnings: Sequence[EarlyWarning]) -> None:
        """Append a line for each."""
        self._file.add(warning.to_dict() for warning in warnings)
