"""What a user installs: the links of the checkout become real modules in the wheel, with the extensions and tables.

Without a compiler it installs, too, and checkpoints are the same. All wheels for others are made by scripts/wheels.py.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from resilio_hpc.native import intercept
from tests.support.environments import ROOT
from tests.support.waiting import PATIENCE_S

ROOMS = ("autoparallel", "core", "native", "slurm", "ckpt", "prolog_epilog")
FILES = ("sbatch_templates", "examples", "setup.py", "setup.cfg", "pyproject.toml", "LICENSE")
SOURCES = ("resilio_hpc", *ROOMS, *FILES)
DATA = {".toml", ".csv", ".conf", ".in", ".sh", ".typed", ".yml", ".json"}


def files_below(folder: Path) -> set[str]:
    """Modules and data files of the package, as paths inside the wheel."""
    found = set()
    for room in [folder, *(entry for entry in folder.iterdir() if entry.is_symlink())]:
        files = (path for path in room.resolve().rglob("*") if path.suffix in DATA | {".py"})
        found |= {str("resilio_hpc" / room.relative_to(folder) / path.relative_to(room.resolve())) for path in files}
    return found


def built(copy: Path, extra: dict[str, str]) -> Path:
    """A wheel of a copy of the sources. A copy, since building in place could pick up an older build."""
    skip = shutil.ignore_patterns("__pycache__", "*.so")
    for source in (ROOT / name for name in SOURCES):
        if source.is_dir():
            shutil.copytree(source, copy / source.name, symlinks=True, ignore=skip)
        else:
            shutil.copy(source, copy / source.name)
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    environment = {**os.environ, **extra}
    made = subprocess.run(
        argv, cwd=copy, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert made.returncode == 0, made.stderr
    (wheel,) = (copy / "dist").glob("resilio_hpc-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(copy / "unpacked")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel."""
    return built(tmp_path_factory.mktemp("sources"), {"CFLAGS": "-O0"})  # how fast they are is not the subject


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    """The wheel, unpacked."""
    return wheel.parents[1] / "unpacked"


@pytest.fixture(scope="module", params=["fails", "is missing"])
def portable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a machine whose compiler fails, or that has none, unpacked."""
    empty = tmp_path_factory.mktemp("programs")
    ways = {"fails": {"CC": "/bin/false"}, "is missing": {"CC": "cc", "PATH": str(empty)}}
    return built(tmp_path_factory.mktemp("sources"), ways[request.param]).parents[1] / "unpacked"


def test_the_wheel_holds_every_module_and_table(unpacked: Path) -> None:
    packed = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*")}
    assert files_below(ROOT / "resilio_hpc") - packed == set()


def test_the_wheel_holds_every_job_script(unpacked: Path) -> None:
    packed = (unpacked / "resilio_hpc" / "slurm" / "sbatch_templates").iterdir()
    assert {path.name for path in packed} == {path.name for path in (ROOT / "sbatch_templates").iterdir()}


def test_the_wheel_holds_the_scripts_of_the_demo(unpacked: Path) -> None:
    packed = (unpacked / "resilio_hpc" / "devtools" / "demo" / "examples").glob("*.py")
    assert {path.name for path in packed} == {path.name for path in (ROOT / "examples").glob("*.py")}


def test_the_wheel_puts_nothing_beside_the_package(unpacked: Path) -> None:
    assert {entry.name.partition("-")[0] for entry in unpacked.iterdir()} == {"resilio_hpc"}


def test_the_wheel_works_without_the_checkout(unpacked: Path) -> None:
    sources = {source.stem for source in (ROOT / "native").glob("*.c")} - {"fabric"}  # needs the headers of libfabric
    extensions = [f"resilio_hpc.native._{name}" for name in sources]
    assert extensions
    program = f"import {', '.join(['resilio_hpc.core.process', *extensions])}; print(resilio_hpc.__file__)"
    argv = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(unpacked)!r}); {program}"]
    ran = subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ran.stdout.strip() == str(unpacked / "resilio_hpc" / "__init__.py"), ran.stderr


def test_one_wheel_serves_this_python_and_all_later_ones(wheel: Path, unpacked: Path) -> None:
    assert wheel.name.split("-")[2:4] == ["cp311", "abi3"]
    extensions = [path.name for path in (unpacked / "resilio_hpc" / "native").glob("*.so")]
    assert extensions
    assert [name for name in extensions if not name.endswith(".abi3.so")] == []
    libraries = {
        path.name.partition(".")[0] for path in (unpacked / "resilio_hpc" / "native" / "intercept").glob("*.so")
    }
    assert libraries == set(intercept.FAMILIES)


def check(installed: Path, *words: str | Path) -> str:
    """Have an installation write a checkpoint, and read others'. What it says."""
    argv = [sys.executable, ROOT / "scripts" / "wheel_check.py", *words]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    ran = subprocess.run(
        argv, cwd="/", env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("no C extensions") == ("--portable" in words), ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_without_a_compiler_it_installs_and_checkpoints_are_the_same(
    unpacked: Path, portable: Path, tmp_path: Path
) -> None:
    assert list(portable.rglob("*.so")) == []
    check(unpacked, "--save", tmp_path / "built")
    assert "checksums by Python" in check(
        portable, "--portable", "--save", tmp_path / "p", "--restore", tmp_path / "built"
    )
    check(unpacked, "--restore", tmp_path / "p")
