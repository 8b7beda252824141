"""A file of JSON lines that a run appends to, for other programs to read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import Any
from uuid import uuid4

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.utilities import rank_zero_warn

from lightning_attn.capture.report import AttentionWarning

#: What a line says.
Said = dict[str, Any]


class RunFile:
    """A file that rank zero appends to; several runs may share it.

    Each line holds values by name, with ``time``, when it was written, and ``run``, which tells runs apart and begins
    with when the run began. Where it cannot be written this is said once, and training goes on.

    Args:
        path: where; anything that fsspec can open.
        run: which run; ``None`` for one that begins now.
        subject: what is written, for the message where it cannot be.
    """

    def __init__(self, path: str, run: str | None, subject: str) -> None:
        self.path = path
        self.run = run or f"{_now()} {uuid4().hex[:8]}"
        self._subject = subject
        self._is_broken = False

    def add(self, lines: Iterable[Said]) -> None:
        """Append lines."""
        with _Forgiving(self):
            self._append(lines)

    def resume(self, is_kept: Callable[[Said], bool], known: Iterable[Said] = ()) -> None:
        """Make the file say of this run what was known at its checkpoint.

        Args:
            is_kept: whether a line of this run was written before the checkpoint. What came after it will come again.
            known: lines to be put in where the file lacks them, such as all of them where it is a new one.
        """
        with _Forgiving(self):
            text = self._read()
            lines = text.splitlines(keepends=True)
            if lines and not text.endswith("\n"):  # it was cut off when the run was killed
                lines[-1:] = [f"{lines[-1]}\n"] if _of(lines[-1]) else []
            mine = [line for line in lines if _of(line).get("run") == self.run]
            surplus = {line for line in mine if not is_kept(_of(line))}
            kept = "".join(line for line in lines if line not in surplus)
            if kept != text:
                self._replace(kept)
            written = {content(_of(line)) for line in mine}
            self._append(line for line in known if content(line) not in written)

    def give_up(self, error: Exception) -> None:
        """Write no more, and say why."""
        self._is_broken = True
        rank_zero_warn(f"{self._subject} are not written to {self.path!r}: {error}", category=AttentionWarning)

    def _append(self, lines: Iterable[Said]) -> None:
        new = list(lines)
        if not new or self._is_broken:
            return
        filesystem = get_filesystem(self.path)
        filesystem.makedirs(self.path.rpartition("/")[0] or ".", exist_ok=True)
        origin = {"time": _now(), "run": self.run}
        with filesystem.open(self.path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps({**origin, **_plain(line)}) + "\n" for line in new)

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


class _Forgiving:
    """Whatever becomes of a file, training goes on."""

    def __init__(self, file: RunFile) -> None:
        self._file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self._file.give_up(error)
            return True
        return False


def content(said: Said) -> str:
    """What a line says, without what tells when it was written, and in which run."""
    return json.dumps({name: value for name, value in _plain(said).items() if name not in ("time", "run")})


def file_path(folder: str, name: str) -> str:
    """Where a file is that has but a name, or says itself where it is."""
    return name if "://" in name or os.path.isabs(name) else f"{folder.rstrip('/')}/{name}"


def checked_name(file: Any) -> str | None:
    """The name or path of a file; ``None`` for none.

    Raises:
        ValueError: if it is neither.
    """
    file = os.fspath(file) if isinstance(file, os.PathLike) else file
    if file is not None and not (isinstance(file, str) and file):
        raise ValueError(f"`file` must be the name of a file, or None for none, got {file!r}.")
    return file


def _plain(said: Said) -> Said:
    """Values that JSON has: what is not finite has no number there."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in said.items()
    }


def _of(line: str) -> Said:
    """What a line says; nothing where it was cut off."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
