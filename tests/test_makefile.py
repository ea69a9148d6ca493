"""`make` on a machine that cannot fetch what it needs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pip = pytest.importorskip("pip")
ROOT = Path(__file__).resolve().parents[1]


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``make`` in a checkout with an environment that holds pip alone, and no index to ask."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    (packages,) = (folder / ".venv/lib").glob("python3*/site-packages")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    told = ("PIP_", "MAKE")  # Of the make that runs the tests, this one would be a part.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    environment |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        ["make", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_without_an_index_one_line_says_what_is_missing_and_what_to_do(tmp_path: Path) -> None:
    done = make(tmp_path, "demo")
    said, failed = done.stderr.splitlines()
    assert (done.returncode, failed.startswith("make: ***")) == (2, True)
    assert said.startswith(
        "cannot get setuptools>=77: no package index in reach has it. Connect to the network"
    )
    assert "PIP_FIND_LINKS=FOLDER" in said
    assert "No matching distribution" in (tmp_path / ".venv/pip.log").read_text()
    assert not (tmp_path / ".venv/installed").exists(), "the next make tries again"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_any_other_failure_is_told_in_pips_words(tmp_path: Path) -> None:
    done = make(tmp_path, "install", "BIN=broken")
    assert done.returncode == 2
    assert "broken/python" in done.stderr
