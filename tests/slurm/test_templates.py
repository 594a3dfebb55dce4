"""The ready job scripts, on a real Slurm: sized by sbatch's options and the environment, otherwise as they are."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.demo.stage import events_of
from resilio_hpc.slurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "sbatch_templates"
EXAMPLES = ROOT / "examples"
GPT = (str(EXAMPLES / "train_gpt.py"), "--steps", "40", "--every", "10", "--layers", "1", "--width", "32")
PATIENCE_S = 180.0


class Submitted:
    """One job from a template, in a directory of its own; ended, unless it never does."""

    def __init__(
        self,
        cluster: DevCluster,
        template: str,
        options: Sequence[str],
        program: Sequence[str],
        name: str = "",
        **settings: str,
    ) -> None:
        self.cluster = cluster
        self.directory = cluster.shared / f"template-{name or Path(template).stem}"
        self.directory.mkdir()
        inside = f"/shared/{self.directory.name}"
        path = f"{Path(sys.executable).parent}:{cluster.environment()['PATH']}"
        environment = {"PATH": path, "RANKS_PER_NODE": "1", **settings}
        argv = ["sbatch", "--parsable", f"--chdir={inside}", "--gpus-per-node=1", *options, str(TEMPLATES / template)]
        done = cluster.run("ctl", [*argv, *program], env=environment)
        self.job = int(done.stdout)

    def wait(self) -> None:
        """Until nothing is left in the queue."""
        deadline = time.monotonic() + PATIENCE_S
        while self.cluster.run("ctl", ["squeue", "-h"]).stdout.strip():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("*.out")))

    def run_directory(self) -> Path:
        return next((self.directory / "resilio-runs").iterdir())

    def verdict(self) -> str:
        self.wait()
        assert self.run_directory().is_dir(), self.output()
        return str(json.loads((self.run_directory() / "verdict.json").read_text())["verdict"])

    def fields(self, kind: str) -> Fields:
        return Fields(next(event.fields for event in events_of(self.run_directory()) if event.kind == kind))


def test_every_template_is_run_here() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [path.name for path in TEMPLATES.glob("*.sbatch") if f'"{path.name}"' not in text] == []


def test_a_torchrun_script(repaired_cluster: DevCluster) -> None:
    program = [str(EXAMPLES / "train_plain.py"), "--steps", "40", "--checkpoint", "/shared/template-torchrun/plain.pt"]
    submitted = Submitted(repaired_cluster, "torchrun.sbatch", ["--nodes=2"], program)
    assert submitted.verdict() == "completed", submitted.output()
    assert submitted.fields("round").data["world_size"] == 2
    assert "[rank 0] 2 ranks, from step 0" in submitted.output()


def test_a_step_of_srun(repaired_cluster: DevCluster) -> None:
    submitted = Submitted(repaired_cluster, "srun.sbatch", ["--nodes=2"], GPT)
    assert submitted.verdict() == "completed", submitted.output()
    assert submitted.fields("launch").data["mode"] == "step"
    assert submitted.fields("round").data["world_size"] == 2
    assert "this srun lacks" not in submitted.output()


def test_a_chain_with_a_spare_whose_next_job_is_the_same_again(repaired_cluster: DevCluster) -> None:
    submitted = Submitted(repaired_cluster, "train.sbatch", ["--nodes=2", "--time=30"], GPT, SPARES="1")
    successor = _successor(submitted)
    command = repaired_cluster.run("ctl", ["squeue", "-h", "-j", successor, "-o", "%o|%D|%b|%l"]).stdout.strip()
    assert command.split(".sh ", 1)[1] == f"{' '.join(GPT)}|2|gres:gpu:1|30:00"
    assert submitted.verdict() == "completed", submitted.output()
    assert submitted.fields("round").data["members"] == submitted.fields("launch").data["nodes"][:1]
    assert submitted.fields("successor_cancelled").data["job"] == successor


def _successor(submitted: Submitted) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for path in submitted.directory.glob("resilio-runs/*/chain.json"):
            return str(json.loads(path.read_text())["links"][-1]["job"])
        assert time.monotonic() < deadline, submitted.output()
        time.sleep(0.05)


def test_fewer_nodes_than_asked_for(repaired_cluster: DevCluster) -> None:
    options, program = ["--nodes=3"], [*GPT, "--step-seconds", "0.1", "--steps", "60"]
    submitted = Submitted(repaired_cluster, "elastic.sbatch", options, program, MIN_NODES="1", NODE_UNIT="2")
    assert submitted.verdict() == "completed", submitted.output()
    assert submitted.fields("round").data["world_size"] == 2  # of 3: the unit is 2


def test_warnings_before_the_time_limit_reach_the_agents_and_nobody_dies_of_them(
    repaired_cluster: DevCluster,
) -> None:
    """What ``sbatch --signal=USR2@t`` (all steps) and ``--signal=B:USR1@t`` (the batch script) send."""
    program = [*GPT, "--step-seconds", "0.1", "--steps", "50"]
    submitted = Submitted(repaired_cluster, "elastic.sbatch", ["--nodes=2"], program, MIN_NODES="1", name="warned")
    _wait_for(submitted, "committed")
    repaired_cluster.run("ctl", ["scancel", "--signal=USR2", str(submitted.job)])
    repaired_cluster.run("ctl", ["scancel", "--batch", "--signal=USR1", str(submitted.job)])
    assert submitted.verdict() == "completed", submitted.output()
    events = events_of(submitted.run_directory())
    assert {e.fields.get("to") for e in events if e.kind == "signal"} == {None, "agents"}
    assert [e.fields["signal"] for e in events if e.kind == "warned"][:1] == ["USR2"]
    assert [e.kind for e in events if e.kind in ("rank_failed", "spawner_died", "saver_died", "agent_ended")] == []


def test_a_job_from_python(repaired_cluster: DevCluster) -> None:
    example = [sys.executable, str(EXAMPLES / "submit_with_submitit.py")]
    options = ["--nodes=2", "--ranks-per-node=1", "--cpus-per-node=2", "--folder=/shared/template-submitit"]
    path = f"{Path(sys.executable).parent}:{repaired_cluster.environment()['PATH']}"
    done = repaired_cluster.run("ctl", [*example, *options, *GPT], PATIENCE_S, env={"PATH": path})
    assert "exit codes [0, 0]" in done.stdout
    run = repaired_cluster.shared / "template-submitit" / "run"
    assert json.loads((run / "verdict.json").read_text())["verdict"] == "completed"
    assert "lacks" not in "".join(log.read_text() for log in run.parent.glob("*.err"))


def _wait_for(submitted: Submitted, kind: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for path in submitted.directory.glob("resilio-runs/*"):
            if any(event.kind == kind for event in events_of(path)):
                return
        assert time.monotonic() < deadline, submitted.output()
        time.sleep(0.05)
