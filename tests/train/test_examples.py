"""The examples without our launcher: they run, repeat bit for bit, and go on where they were killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.core import process
from tests.support.environments import ROOT, SUPPORT, scrubbed
from tests.support.waiting import PATIENCE_S

EXAMPLES = ROOT / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
GPT = [str(EXAMPLES / "train_gpt.py"), "--steps", "10", "--every", "3", "--log-every", "1"]
GPT += ["--layers", "2", "--width", "32", "--batch", "4", "--sequence", "32"]


def environment(directory: Path) -> dict[str, str]:
    own = scrubbed()
    # A name server that does not answer would hold every connection up for seconds.
    own |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1 attempts:1"}
    return {**own, "RESILIO_CHECKPOINT_DIR": str(directory / "checkpoints")}


def run(argv: list[str], directory: Path) -> list[str]:
    """One run under torchrun, to its end; the lines printed."""
    launcher = subprocess.Popen(
        [*TORCHRUN, *argv],
        cwd=directory,
        env=environment(directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, error = launcher.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        launcher.terminate()  # not killed: torchrun has to end its ranks
        out, error = launcher.communicate()
    assert launcher.returncode == 0, error[-3000:]
    return out.splitlines()


@pytest.fixture(scope="module")
def quick_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Two runs of the plain script and two of the recovery script, one after the other, all forked from one process:
    (the lines that the plain script printed, the directory of the recovery script)."""
    plain, tiny = (tmp_path_factory.mktemp(name) for name in ("plain", "tiny"))
    first = [str(plain), str(EXAMPLES / "train_plain.py"), "--checkpoint", str(plain / "plain.pt"), "--every", "5"]
    second = [str(tiny), str(EXAMPLES / "train_tiny.py"), "--out", str(tiny), "--shm", str(tiny / "shm")]
    second += ["--step-seconds", "0.01", "--every", "4", "--state-mb", "1"]
    runs = [[*first, "--steps", "10"], [*first, "--steps", "15"], [*second, "--steps", "6"], [*second, "--steps", "8"]]
    argv = [sys.executable, str(SUPPORT / "train" / "forked_ranks.py"), json.dumps(runs)]
    lines = process.run(argv, timeout_s=PATIENCE_S, env=environment(plain), cwd=plain).stdout.splitlines()
    return lines[: lines.index(f"== {tiny}")], tiny


def result(directory: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((directory / "hash.json").read_text())
    return content


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    lines = run([*GPT, "--hash-file", "hash.json"], directory)
    assert [line.split()[1] for line in lines] == [str(step) for step in range(1, 11)]
    return directory


@pytest.mark.slow
def test_the_gpt_repeats_bit_for_bit(undisturbed: Path, tmp_path: Path) -> None:
    run([*GPT, "--hash-file", "hash.json"], tmp_path)
    assert result(tmp_path) == result(undisturbed)
    assert result(tmp_path)["step"] == 10


@pytest.mark.slow
def test_the_gpt_killed_and_restored_ends_with_the_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    first = subprocess.Popen(
        [*TORCHRUN, *GPT, "--step-seconds", "0.2"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert first.stdout is not None
    while not (line := first.stdout.readline()).startswith("step 7 "):
        assert line, "it ended early"
    first.terminate()  # torchrun ends its ranks
    first.communicate(timeout=PATIENCE_S)
    lines = run([*GPT, "--hash-file", "hash.json"], tmp_path)
    restored = int(lines[0].split()[1]) - 1
    assert restored in (3, 6), "it goes on from a committed step"
    assert result(tmp_path) == result(undisturbed)


def test_the_plain_script_goes_on_from_its_own_checkpoint(quick_runs: tuple[list[str], Path]) -> None:
    lines, _ = quick_runs
    assert [line for line in lines if "ranks" in line] == ["2 ranks, from step 0", "2 ranks, from step 10"]


def test_the_recovery_script_stamps_every_step_and_goes_on(quick_runs: tuple[list[str], Path]) -> None:
    _, directory = quick_runs
    phases = ["start", "imported", "init", "built", "restored"]
    for rank in (0, 1):
        stamps = [line.split() for line in (directory / f"steps-rank{rank}").read_text().splitlines()]
        assert [what for what, _, _ in stamps] == [*phases, *"123456", *phases, *"78"]
        times = [float(when) for _, when, _ in stamps]
        assert times == sorted(times)
        assert {number for _, _, number in stamps} == {"0"}
