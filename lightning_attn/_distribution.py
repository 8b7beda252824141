"""Keeps the import name ``lightning_attn`` to one distribution.

PyPI's ``lightning-attn``, a linear-attention kernel, installs a package of the same import name. Whichever of the two
is installed last overwrites the other's ``__init__.py``, and uninstalling either one takes that file from both.
"""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_OURS = "lightning-attention-monitor"
_THEIRS = "lightning-attn"
_THEIR_FOLDER = "ops"  # this package must never have a folder of that name


def refuse_name_collision() -> None:
    """Raise if the other ``lightning_attn`` is installed too, or has left its code in this package's folder.

    Raises:
        ImportError: It names both distributions and the commands that put it right.
    """
    package = Path(__file__).parent
    left_behind = (package / _THEIR_FOLDER).is_dir()
    if _is_installed(_THEIRS):
        found = f"'{_THEIRS}' (a linear-attention kernel) is installed as well"
    elif left_behind:
        found = f"'{_THEIRS}' (a linear-attention kernel) has left {package / _THEIR_FOLDER} behind"
    else:
        return

    remedy = [f"python -m pip uninstall --yes {_THEIRS} {_OURS}", f"python -m pip install {_OURS}"]
    if left_behind:
        remedy.insert(1, f"(then delete {package}, if that folder is still there)")
    raise ImportError(
        f"'lightning_attn' is the import name of '{_OURS}' (this package, which watches attention in Lightning), but "
        f"{found}. Both install into the same folder and overwrite each other's files, so an environment can hold "
        "only one of them. To keep this one:\n  " + "\n  ".join(remedy)
    )


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
