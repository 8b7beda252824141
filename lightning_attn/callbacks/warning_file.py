"""Early warnings as lines of JSON in a file, for other programs to read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any
from uuid import uuid4

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.utilities import rank_zero_warn

from lightning_attn.capture.report import AttentionWarning
from lightning_attn.warning.early_warning import EarlyWarning


class WarningFile:
    """A file that rank zero appends to; several runs may share it.

    Each line holds a warning's values by name, with ``time``, when it was written, and ``run``, which tells runs apart
    and begins with when the run began. Where it cannot be written this is said once, and training goes on.

    Args:
        path: where; anything that fsspec can open.
        run: which run; ``None`` for one that begins now.
    """

    def __init__(self, path: str, run: str | None) -> None:
        self.path = path
        self.run = run or f"{_now()} {uuid4().hex[:8]}"
        self._is_broken = False

    def resume(self, known: Sequence[EarlyWarning]) -> None:
        """Make the file say of this run what was known at its checkpoint.

        What came after the checkpoint will come again, and is taken out; what the file lacks, such as all of it where
        it is a new one, is put in.
        """
        with _Forgiving(self):
            text = self._read()
            lines = text.splitlines(keepends=True)
            if lines and not text.endswith("\n"):  # it was cut off when the run was killed
                lines[-1:] = [f"{lines[-1]}\n"] if _of(lines[-1]) else []
            wanted = {_key(warning.to_dict()) for warning in known}
            mine = [line for line in lines if _of(line).get("run") == self.run]
            surplus = {line for line in mine if _key(_of(line)) not in wanted}
            kept = "".join(line for line in lines if line not in surplus)
            if kept != text:
                self._replace(kept)
            written = {_key(_of(line)) for line in mine}
            self._append([warning for warning in known if _key(warning.to_dict()) not in written])

    def add(self, warnings: Sequence[EarlyWarning]) -> None:
        """Append a line for each."""
        with _Forgiving(self):
            self._append(warnings)

    def _append(self, warnings: Sequence[EarlyWarning]) -> None:
        if not warnings or self._is_broken:
            return
        filesystem = get_filesystem(self.path)
        filesystem.makedirs(self.path.rpartition("/")[0] or ".", exist_ok=True)
        origin = {"time": _now(), "run": self.run}
        with filesystem.open(self.path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps({**origin, **_plain(warning.to_dict())}) + "\n" for warning in warnings)

    def _read(self) -> str:
        filesystem = get_filesystem(self.path)
        if not filesystem.exists(self.path):
            return ""
        with filesystem.open(self.path, "r", encoding="utf-8") as file:
            return str(file.read())

    def _replace(self, text: str) -> None:
        filesystem = get_filesystem(self.path)
        partial = f"{self.path}.partial"  # so that nothing is lost if the run is killed now
        with filesystem.open(partial, "w", encoding="utf-8") as file:
            file.write(text)
        filesystem.mv(partial, self.path)

    def give_up(self, error: Exception) -> None:
        """Write no more, and say why."""
        self._is_broken = True
        rank_zero_warn(f"Early warnings are not written to {self.path!r}: {error}", category=AttentionWarning)


class _Forgiving:
    """Whatever becomes of a file, training goes on."""

    def __init__(self, file: WarningFile) -> None:
        self._file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self._file.give_up(error)
            return True
        return False


def _plain(said: dict[str, Any]) -> dict[str, Any]:
    """Values that JSON has: what is not finite has no number there."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in said.items()
    }


def _key(said: dict[str, Any]) -> str:
    """What a warning or its line says, without what tells when it was written, and in which run."""
    return json.dumps({name: value for name, value in _plain(said).items() if name not in ("time", "run")})


def _of(line: str) -> dict[str, Any]:
    """What a line says; nothing where it was cut off."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
