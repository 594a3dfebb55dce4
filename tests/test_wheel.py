"""What a user installs: the links of the checkout become real modules in the wheel, with the extensions and tables.

A plain install has no torch, so commands that do not need it answer without it, and the others name the extra.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.environments import ROOT
from tests.support.waiting import PATIENCE_S

ROOMS = ("autoparallel", "core", "native", "slurm", "ckpt", "prolog_epilog")
FILES = ("sbatch_templates", "examples", "setup.py", "setup.cfg", "pyproject.toml", "LICENSE")
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


EXTRAS = ("torch", "mpi4py", "submitit", "safetensors", "pynvml")
WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r})); sys.path.insert(0, {{!r}}); "
RUN = "from resilio_hpc.cli.main import main; sys.exit(main(sys.argv[1:]))"
SAVE = """
import numpy
from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer
run = train.attach()
checkpoint = Checkpointer(run.checkpoint_dir)
state = {"w": numpy.zeros(1000)}
start, _ = checkpoint.restore(state) or (0, None)
for step in run.steps(start, 20, save=lambda done: checkpoint.save(done, state), every=10):
    state["w"] += step
"""


class Plain:
    """The unpacked wheel in a process that finds none of the optional packages."""

    def __init__(self, unpacked: Path, cwd: Path) -> None:
        self._program = WITHOUT.format(str(unpacked)) + RUN
        self._cwd = cwd

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", self._program, *words]
        return subprocess.run(argv, cwd=self._cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.fixture
def plain(unpacked: Path, tmp_path: Path) -> Plain:
    return Plain(unpacked, tmp_path)


def test_without_torch_a_run_is_launched_shown_and_its_checkpoint_read(plain: Plain, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAVE)
    launched = plain.run("launch", "--nproc-per-node", "2", "--run-dir", "run", "train.py")
    assert launched.returncode == 0, launched.stderr
    assert "completed" in plain.run("status", "run").stdout
    assert "step 20" in plain.run("ledger", "run").stdout
    verified = plain.run("ckpt", "verify", "run")
    assert (verified.returncode, "20" in verified.stdout) == (0, True), verified.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "model", "llama3-70b"), "70,553,706,496 parameters"),
        (("plan", "search", "llama3-8b", "--gpu", "h100", "--gpus", "16", "--global-batch", "64"), "llama3-8b"),
        (("submit", "--dry-run", "--template", "single-node", "--", "train.py"), "#SBATCH"),
        (("install-hooks", "--help"), "usage"),
        (("drain", "--help"), "usage"),
        (("health", "explain", "gpu-xid"), "gpu-xid"),
    ],
)
def test_without_torch_commands_answer(plain: Plain, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "train.py").write_text(SAVE)
    done = plain.run(*words)
    assert (done.returncode, said in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("demo", "--local", "--quick"),
        ("check-nodes", "--local", "2"),
        ("plan", "profile", "--device", "cpu", "--out", "p.h5"),
        ("plan", "profile-comm", "--backend", "gloo", "--here", "2", "--out", "p.h5"),
        ("plan", "model", "--module", "train.py:example"),
    ],
)
def test_commands_that_need_torch_name_the_extra(plain: Plain, words: tuple[str, ...]) -> None:
    done = plain.run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("needs torch: pip install 'resilio_hpc[torch]'\n")
    assert done.stderr.count("\n") == 1
