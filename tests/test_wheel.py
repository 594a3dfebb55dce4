"""What a user installs: the links of the checkout become real modules in the wheel, with the extensions and tables."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.environments import ROOT
from tests.support.waiting import PATIENCE_S

ROOMS = ("autoparallel", "core", "native", "slurm", "ckpt", "prolog_epilog")
FILES = ("sbatch_templates", "setup.py", "setup.cfg", "pyproject.toml", "LICENSE")
SOURCES = ("resilio_hpc", *ROOMS, *FILES)
DATA = {".toml", ".csv", ".conf", ".in", ".sh", ".typed"}


def files_below(folder: Path) -> set[str]:
    """Modules and data files of the package, as paths inside the wheel."""
    found = set()
    for room in [folder, *(entry for entry in folder.iterdir() if entry.is_symlink())]:
        files = (path for path in room.resolve().rglob("*") if path.suffix in DATA | {".py"})
        found |= {str("resilio_hpc" / room.relative_to(folder) / path.relative_to(room.resolve())) for path in files}
    return found


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the sources, unpacked. A copy, since building in place could pick up an older build."""
    copy = tmp_path_factory.mktemp("sources")
    skip = shutil.ignore_patterns("__pycache__", "*.so")
    for source in (ROOT / name for name in SOURCES):
        if source.is_dir():
            shutil.copytree(source, copy / source.name, symlinks=True, ignore=skip)
        else:
            shutil.copy(source, copy / source.name)
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    built = subprocess.run(argv, cwd=copy, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = (copy / "dist").glob("resilio_hpc-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(copy / "unpacked")
    return copy / "unpacked"


def test_the_wheel_holds_every_module_and_table(unpacked: Path) -> None:
    packed = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*")}
    assert files_below(ROOT / "resilio_hpc") - packed == set()


def test_the_wheel_holds_every_job_script(unpacked: Path) -> None:
    packed = (unpacked / "resilio_hpc" / "slurm" / "sbatch_templates").iterdir()
    assert {path.name for path in packed} == {path.name for path in (ROOT / "sbatch_templates").iterdir()}


def test_the_wheel_puts_nothing_beside_the_package(unpacked: Path) -> None:
    assert {entry.name.partition("-")[0] for entry in unpacked.iterdir()} == {"resilio_hpc"}


def test_the_wheel_works_without_the_checkout(unpacked: Path) -> None:
    extensions = [f"resilio_hpc.native._{source.stem}" for source in (ROOT / "native").glob("*.c")]
    assert extensions
    program = f"import {', '.join(['resilio_hpc.core.process', *extensions])}; print(resilio_hpc.__file__)"
    argv = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(unpacked)!r}); {program}"]
    ran = subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ran.stdout.strip() == str(unpacked / "resilio_hpc" / "__init__.py"), ran.stderr
