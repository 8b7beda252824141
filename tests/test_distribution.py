"""Two distributions claim the import name `lightning_attn`: only this one may be there."""

import importlib
import re
import shutil
from pathlib import Path

import pytest

import lightning_attn
from lightning_attn import _distribution
from lightning_attn._distribution import refuse_name_collision

OTHER_FOLDER = "lightning_attn-0.0.5.dist-info"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the installed package's folder, so that no test writes into the real one."""
    folder = tmp_path / "lightning_attn"
    folder.mkdir()
    module = shutil.copy(_distribution.__file__, folder)
    monkeypatch.setattr(_distribution, "__file__", module)
    return folder


@pytest.fixture
def other_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata of PyPI's `lightning-attn`, as pip writes it."""
    info = tmp_path / "site-packages" / OTHER_FOLDER
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-attn\nVersion: 0.0.5\n")
    monkeypatch.syspath_prepend(str(info.parent))


def assert_names_both_and_the_remedy(message: str) -> None:
    assert "'lightning-attention-monitor'" in message
    assert "'lightning-attn'" in message
    assert "same folder" in message
    commands = re.findall(r"^  python -m pip .*", message, re.MULTILINE)
    assert commands == [
        "  python -m pip uninstall --yes lightning-attn lightning-attention-monitor",
        "  python -m pip install lightning-attention-monitor",
    ]


def test_alone_it_imports(package: Path) -> None:
    refuse_name_collision()


@pytest.mark.usefixtures("other_distribution")
def test_the_other_distribution_is_refused(package: Path) -> None:
    with pytest.raises(ImportError) as error:
        refuse_name_collision()
    assert_names_both_and_the_remedy(str(error.value))
    assert "delete" not in str(error.value)


def test_what_an_uninstall_left_behind_is_refused(package: Path) -> None:
    (package / "ops").mkdir()
    with pytest.raises(ImportError) as error:
        refuse_name_collision()
    assert_names_both_and_the_remedy(str(error.value))
    assert f"delete {package}" in str(error.value)


def test_a_name_that_only_begins_alike_is_another_package(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lightning_attn_extras-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    refuse_name_collision()


def test_importing_the_package_runs_the_check(other_distribution: None) -> None:
    with pytest.raises(ImportError, match="only one of them"):
        importlib.reload(lightning_attn)
