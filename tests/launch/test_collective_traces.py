"""What communication libraries write after a collective failed, and how it comes to the run directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.launch.agent import collective_traces
from resilio_hpc.launch.agent.collective_traces import DUMP, keep, variables
from resilio_hpc.launch.workers.forking.load_time_variables import differing
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S


def test_nothing_that_the_user_has_set_is_changed(tmp_path: Path) -> None:
    assert variables(tmp_path, {})["NCCL_DEBUG_FILE"] == f"{tmp_path}/nccl-%h-%p.log"
    own = variables(tmp_path, {"NCCL_DEBUG": "WARN", "TORCH_FR_BUFFER_SIZE": "7"})
    assert not {"NCCL_DEBUG", "NCCL_DEBUG_FILE", "TORCH_FR_BUFFER_SIZE"} & own.keys()
    assert own["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_ranks_that_write_traces_are_still_forked(tmp_path: Path) -> None:
    assert differing({}, variables(tmp_path, {})) == []


def test_dumps_are_kept_whole_and_of_logs_the_end(tmp_path: Path) -> None:
    source, target = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    (source / f"{DUMP}0").write_bytes(b"d" * 50)
    (source / f"{DUMP}1").write_bytes(b"d" * 2 * collective_traces.MOST_LOG_BYTES)  # too large for what is left
    (source / "nccl-n1-7.log").write_bytes(b"x" * collective_traces.MOST_LOG_BYTES + b"the end")
    (source / "empty.log").touch()
    (source / "link.log").symlink_to("/etc/passwd")
    most = collective_traces.MOST_LOG_BYTES + 60
    assert keep(source, target, most) == (2, collective_traces.MOST_LOG_BYTES + 50)
    assert sorted(path.name for path in target.iterdir()) == ["nccl-n1-7.log", f"{DUMP}0"]
    assert (target / "nccl-n1-7.log").read_bytes().endswith(b"the end")
    assert not source.exists()


SCRIPT = """
import os, sys
from pathlib import Path
from resilio_hpc import train
run = train.attach()
print("traced", os.environ.get("NCCL_DEBUG"), flush=True)
for step in run.steps(0, 9):
    if "NCCL_DEBUG_FILE" in os.environ:
        log = os.environ["NCCL_DEBUG_FILE"].replace("%h", "n").replace("%p", str(os.getpid()))
        Path(log).write_text("NCCL INFO Bootstrap\\n")
        Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(run.rank)).write_bytes(b"a dump")
    if run.rank == 1 and run.round < 2 and step == 3 + run.round:
        text = ("Timed out waiting 1800000ms for send operation to complete", "no such key")[run.round]
        raise RuntimeError(text)
"""


@pytest.mark.slow
def test_the_round_after_a_failed_collective_is_traced_and_the_next_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    argv = [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--no-torch", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*argv, "--run-dir", "run", "train.py"],
        cwd=tmp_path, env=scrubbed(RESILIO_LOCAL_NODES="1"), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"traced {value}") for value in ("INFO", "None")] == [2, 4], done.stdout
    (told,) = [event.fields for event in read_ledger(tmp_path / "run" / "ledger") if event.kind == "traces"]
    assert (told["round"], told["files"]) == (1, 4)
    kept = Path(told["directory"])
    assert kept == tmp_path / "run" / "traces" / "1" / kept.name
    assert sorted(path.name for path in kept.glob(f"{DUMP}*")) == [f"{DUMP}0", f"{DUMP}1"]
    assert {path.read_text() for path in kept.glob("*.log")} == {"NCCL INFO Bootstrap\n"}
