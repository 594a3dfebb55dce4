"""A plain install has no torch: commands that do not need it answer without it, and the others name the extra."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

EXTRAS = ("torch", "mpi4py", "submitit", "safetensors", "pynvml", "prometheus_client")
PROGRAM = (
    f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r})); "
    "from resilio_hpc.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
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
    """The package in a process that finds none of the optional packages."""

    def __init__(self, cwd: Path) -> None:
        self._cwd = cwd

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", PROGRAM, *words]
        return subprocess.run(argv, cwd=self._cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.fixture
def plain(tmp_path: Path) -> Plain:
    return Plain(tmp_path)


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


@pytest.mark.parametrize("words", [("--metrics-port", "0"), ("--metrics-textfile", ".")])
def test_prometheus_needs_its_extra(plain: Plain, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(SAVE)
    done = plain.run("launch", *words, "train.py")
    assert done.returncode == 2
    assert f"{words[0]} needs prometheus_client: pip install 'resilio_hpc[metrics]'\n" in done.stderr
