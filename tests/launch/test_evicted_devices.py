"""Per-device eviction from end to end: a GPU goes bad between two rounds, and training goes on without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.launch.rundir.run_directory import read_verdict
from resilio_hpc.prolog_epilog.base import reports
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

GOOD, BAD = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"
SCRIPT = """
import os, sys, time
from pathlib import Path
import numpy as np
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer
from resilio_hpc.prolog_epilog.run.cached_verdict import VerdictCache
from resilio_hpc.prolog_epilog.base.check import Fault, NodeVerdict, Result
from resilio_hpc.prolog_epilog.base.node import boot_id, uptime_s

run = train.attach()
state = {"w": np.zeros(4)}
checkpoint = Checkpointer(run.checkpoint_dir, layout=REPLICATED)
start, _ = checkpoint.restore(state) or (0, None)
sees, hidden = os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("RESILIO_EVICTED_DEVICES", "")
print("world", run.world_size, "begins at", start, "sees", sees, "not", hidden, flush=True)

def break_down():
    how, bad = sys.argv[2], os.environ["BAD_GPU"]
    if how == "verdict":
        fault = Fault("GPU 1: 3 uncorrected ECC errors", bad, 1)
        result = Result(check="gpu-ecc", status="fail", on_fail="evict", severity="fatal", faults=(fault,))
        now = uptime_s()
        verdict = NodeVerdict(node="n1", boot=boot_id(), uptime_s=now, unix_s=time.time(), results=(result,), gpus=2)
        VerdictCache(Path(os.environ["RESILIO_HEALTH_DIRECTORY"])).write(verdict)
        sys.exit(7)
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered" if how == "ecc" else "no such data set")

committed = os.path.join(os.environ["RESILIO_RUN_DIR"], "checkpoints", "latest")
for step in run.steps(start, int(sys.argv[1]), save=lambda done: checkpoint.save(done, state), every=5):
    if sees.endswith(os.environ["BAD_GPU"]) and step >= start + 10:
        # Both ranks wait: a rank that went on would overwrite the snapshot that its peer waits for.
        while not os.path.lexists(committed):
            time.sleep(0.01)
        if run.rank == 1:
            break_down()
    time.sleep(0.02)
"""
LAUNCHER = (sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--no-torch")
LAUNCH = (*LAUNCHER, "--run-dir", "run", "--nproc-per-node", "2")


def spool_of(folder: Path) -> Path:
    """Where a node daemon takes reports."""
    spool = folder / "spool"
    if not spool.exists():
        spool.mkdir()
        spool.chmod(reports.MODE)
    return spool


def launch(folder: Path, *arguments: str, nodes: int = 0) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    own = {"CUDA_VISIBLE_DEVICES": f"{GOOD},{BAD}", "BAD_GPU": BAD,
           "RESILIO_HEALTH_DIRECTORY": str(folder / "health" / "here"),
           "RESILIO_REPORT_SPOOL": str(spool_of(folder))} | (
               {"RESILIO_LOCAL_NODES": str(nodes)} if nodes else {})  # fmt: skip
    return subprocess.run(
        [*LAUNCH, *arguments], cwd=folder, env=scrubbed(**own), capture_output=True, text=True, timeout=PATIENCE_S
    )


def entries(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event.fields for event in read_ledger(folder / "run" / "ledger") if event.kind == kind]


def status(folder: Path) -> str:
    command = [sys.executable, "-m", "resilio_hpc.cli.main", "status", str(folder / "run")]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S).stdout


def test_a_gpu_that_a_verdict_names_is_hidden_and_the_node_goes_on_with_the_other(tmp_path: Path) -> None:
    done = launch(tmp_path, "--evict-devices", "on", "train.py", "20", "verdict")
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert f"world 2 begins at 0 sees {GOOD},{BAD} not \n" in done.stdout
    assert f"sees {GOOD} not {BAD}\n" in done.stdout
    assert [entry["world_size"] for entry in entries(tmp_path, "round")][-1] == 1
    (evicted,) = entries(tmp_path, "device_evicted")
    assert (evicted["device"], evicted["index"], evicted["check"], evicted["source"]) == (BAD, 1, "gpu-ecc", "verdict")
    assert (evicted["slots"], evicted["of"], evicted["acted"]) == (1, 2, True)
    line = f"GPU 1 ({BAD}) is out of use (gpu-ecc: GPU 1: 3 uncorrected ECC errors); 1 of 2 ranks go on with the others"
    assert line in done.stdout + done.stderr
    verdict = read_verdict(tmp_path / "run")
    assert verdict is not None and verdict["verdict"] == "completed"
    assert f"GPU 1 ({BAD}), gpu-ecc" in status(tmp_path)
    assert list(spool_of(tmp_path).iterdir()) == [], "root knows of its own verdict"


@pytest.mark.slow
def test_errors_of_its_device_in_two_rounds_take_a_gpu_out_of_use_without_any_verdict(tmp_path: Path) -> None:
    done = launch(tmp_path, "--evict-devices", "on", "--max-restarts", "9", "train.py", "25", "ecc")
    assert done.returncode == 0, done.stdout + done.stderr
    (evicted,) = entries(tmp_path, "device_evicted")
    assert (evicted["entry"], evicted["check"], evicted["source"]) == (BAD, "rank-failures", "ranks")
    assert "in 2 rounds: uncorrectable error in a GPU's memory: " in evicted["evidence"]
    assert len([entry for entry in entries(tmp_path, "rank_failed") if entry["rank"] == 1]) >= 2
    assert f"sees {GOOD} not " in done.stdout
    (report,) = spool_of(tmp_path).iterdir()
    said = msgspec.json.decode(report.read_bytes(), type=reports.Report)
    assert BAD in said.why and "rank-failures: ranks on it failed in 2 rounds" in said.why


@pytest.mark.slow
def test_to_observe_says_what_would_be_done_and_hides_nothing(tmp_path: Path) -> None:
    done = launch(tmp_path, "--evict-devices", "observe", "--min-devices", "2", "train.py", "25", "verdict")
    assert done.returncode == 0, "each restart brings ten steps of progress"
    (evicted,) = entries(tmp_path, "device_evicted")
    assert (evicted["device"], evicted["slots"], evicted["acted"]) == (BAD, 0, False)
    assert "would be out of use" in done.stdout + done.stderr
    assert {entry["world_size"] for entry in entries(tmp_path, "round")} == {2}
    assert "out of use" not in status(tmp_path)
