"""Children run this very package, and search no working directory where that is not needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import resilio_hpc
from tests.support.waiting import PATIENCE_S

ASK = (
    "import json; from resilio_hpc.launch.process import bootstrap; "
    "print(json.dumps(bootstrap.command('launch.agent.agent')))"
)
WHERE = "import resilio_hpc; print(resilio_hpc.__file__)"


def answer(words: list[str], cwd: Path, **environment: str) -> str:
    asked = subprocess.run(
        [sys.executable, *words], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True,
        check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    return asked.stdout.strip()


def copy_of_the_package(place: Path) -> Path:
    """Another checkout: enough of it to be asked."""
    source = Path(resilio_hpc.__file__).parent
    target = place / "resilio_hpc"
    for name in ("", "core/", "launch/", "launch/process/"):
        (target / name).mkdir(parents=True)
        shutil.copy(source / name / "__init__.py", target / name)
    for name in ("core/compat.py", "core/interpreter.py", "launch/process/bootstrap.py"):
        shutil.copy(source / name, target / name)
    return place


def test_an_installed_package_is_not_looked_for_in_the_working_directory(tmp_path: Path) -> None:
    assert '"-P", "-m", "resilio_hpc.launch.agent.agent"' in answer(["-c", ASK], tmp_path)
    assert answer(["-P", "-c", WHERE], tmp_path) == resilio_hpc.__file__


def test_another_checkout_is_not_mixed_with_the_installed_one(tmp_path: Path) -> None:
    checkout = copy_of_the_package(tmp_path / "checkout")
    assert '"-P"' not in answer(["-c", ASK], checkout)  # found there alone, through the working directory
    assert '"-P"' in answer(["-c", ASK], tmp_path, PYTHONPATH=str(checkout))
