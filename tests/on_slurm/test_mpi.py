"""MPI programs under ``--mpi=pmix`` on a real Slurm: every fault once, and the result is right in every bit."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from resilio_hpc.core import process_title
from resilio_hpc.core.ledger import Event
from resilio_hpc.devtools.demo.stage import events_of
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.processes import NodeProcess
from resilio_hpc.drills.acts import last
from resilio_hpc.drills.drill import progressed
from resilio_hpc.drills.judge import rounds_overlap
from tests.support.waiting import until

PMIX = sorted(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so"))
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(not PMIX, reason="no libpmix.so for Slurm's pmix plugin (apt-get install libpmix-dev)"),
    pytest.mark.skipif(shutil.which("mpiexec") is None, reason="no MPI (apt-get install openmpi-bin)"),
]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "mpi_jacobi.py"
SIZE, STEPS = 48, 150
LONG = 600  # steps of a run that is struck in its middle, however quick the machine is


def digest(steps: int) -> str:
    """The plate after so many steps, computed by one process without MPI."""
    cells = np.zeros((SIZE + 2, SIZE + 2))
    cells[0, 1:-1] = 1.0
    for _ in range(steps):
        cells[1:-1, 1:-1] = 0.25 * ((cells[:-2, 1:-1] + cells[2:, 1:-1]) + (cells[1:-1, :-2] + cells[1:-1, 2:]))
    return hashlib.sha256(cells[1:-1, 1:-1].tobytes()).hexdigest()


class MpiRun:
    """One job that solves on three nodes with two ranks each, and what becomes of it."""

    def __init__(self, cluster: DevCluster, name: str) -> None:
        self.cluster = cluster
        self.name = f"mpi-{name}"
        self.directory = cluster.shared / self.name
        self.job = 0

    def submit(self, *arguments: str, nodes: int = 3, minutes: int = 10, launch: str = "", steps: int = STEPS) -> None:
        launcher = Path(sys.executable).with_name("resilio-launch")
        self.job = self.cluster.submit(
            f"#!/bin/bash\n#SBATCH --nodes={nodes} --no-kill --time={minutes} --job-name=mpi\n"
            f"#SBATCH --output=/shared/{self.name}.txt --open-mode=append\n"
            f"export OMPI_MCA_mpi_yield_when_idle=1\n"  # more ranks than processors: what waits lets others run
            f"exec {launcher} --mpi=pmix --nproc-per-node=2 --run-dir=/shared/{self.name} {launch} {PROGRAM} "
            f"--size={SIZE} --steps={steps} --every=10 --step-seconds=0.02 --result=/shared/{self.name}.result "
            f"{' '.join(arguments)}\n"
        )

    def events(self) -> list[Event]:
        return events_of(self.directory)

    def until(self, reached: Callable[[list[Event]], bool], what: str) -> list[Event]:
        until(lambda: reached(self.events()), what, self.output, alive=self.in_queue, poll_s=0.1)
        return self.events()

    def in_queue(self) -> bool:
        return bool(self.cluster.run("ctl", ["squeue", "-h", "-o", "%i"], timeout_s=20.0).stdout.strip())

    def output(self) -> str:
        path = self.cluster.shared / f"{self.name}.txt"
        return path.read_text()[-6000:] if path.exists() else ""

    def kill(self, node: str, wanted: Callable[[NodeProcess], bool], number: int = signal.SIGKILL) -> None:
        found = [process for process in self.cluster.machines.pids(node) if wanted(process)]
        assert found, f"nothing to kill on {node}"
        for process in found:
            os.kill(process.host_pid, number)

    def judge(self, verdict: str = "completed", steps: int = STEPS) -> list[Event]:
        """Wait for the end; the verdict and the result must be right."""
        until(lambda: not self.in_queue(), "the end of the job", self.output, poll_s=0.1)
        events = self.events()
        assert json.loads((self.directory / "verdict.json").read_text())["verdict"] == verdict, self.output()
        assert rounds_overlap(events) == ""
        if verdict == "completed":
            result = json.loads((self.cluster.shared / f"{self.name}.result").read_text())
            assert result["sha256"] == digest(steps)
        return events


def recoveries(events: list[Event]) -> list[str]:
    return [str(event.fields["kind"]) for event in events if event.kind == "recovered"]


def modes(events: list[Event]) -> set[str]:
    return {str(event.fields["mode"]) for event in events if event.kind == "ranks"}


def is_agent(process: NodeProcess) -> bool:
    return process_title.is_agent(process.argv)


def is_srun_of_the_step(process: NodeProcess) -> bool:
    return process.program == "srun" and "--job-name=resilio-mpi" in process.argv


def is_task(process: NodeProcess) -> bool:
    return tuple(process.argv[:2]) == ("resilio", "mpi_task")


@pytest.mark.slow
def test_an_undisturbed_run_is_right(cluster: DevCluster) -> None:
    run = MpiRun(cluster, "plain")
    run.submit()
    events = run.judge()
    assert recoveries(events) == [] and modes(events) == {"mpi"}


def strike_rank(run: MpiRun, events: list[Event], number: int = signal.SIGKILL) -> int:
    """Send a signal to a rank of n2, and return which."""
    ranks = [event for event in events if event.kind == "ranks" and event.fields["node"] == "n2"][-1]
    rank, pid = (int(value) for value in next(iter(ranks.fields["pids"].items())))
    run.kill("n2", lambda process: process.pid == pid, number)
    return rank


def strike_leader(run: MpiRun, events: list[Event]) -> None:
    run.kill(str(last(events, "controller").fields["node"]), is_agent)


STRIKES: dict[str, tuple[Callable[[MpiRun, list[Event]], object], str]] = {
    "rank": (strike_rank, "rank_killed"),
    "task": (lambda run, _: run.kill("n2", is_task), "rank_exception"),
    "agent": (lambda run, _: run.kill("n2", is_agent), "agent_lost"),
    "leader": (strike_leader, "controller_lost"),
    "srun": (lambda run, _: run.kill("n1", is_srun_of_the_step), "spawn"),
}


@pytest.mark.parametrize(
    "what", [what if what == "rank" else pytest.param(what, marks=pytest.mark.slow) for what in STRIKES]
)
def test_a_run_comes_over_sigkill_of_its(what: str, cluster: DevCluster) -> None:
    strike, kind = STRIKES[what]
    run = MpiRun(cluster, what)
    run.submit(steps=LONG)
    strike(run, run.until(progressed, "in the middle of the run"))
    events = run.judge(steps=LONG)
    assert recoveries(events) == [kind]
    assert modes(events) == {"mpi"}


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_blamed_and_the_run_goes_on(cluster: DevCluster) -> None:
    run = MpiRun(cluster, "stopped")
    run.submit(steps=LONG)
    rank = strike_rank(run, run.until(progressed, "in the middle of the run"), signal.SIGSTOP)
    events = run.judge(steps=LONG)
    assert recoveries(events) == ["hang"]
    (hang,) = [event.fields for event in events if event.kind == "hang"]
    assert (hang["kind"], hang["ranks"], hang["nodes"], hang["acted"]) == ("absent", [rank], ["n2"], True)
    assert hang["evidence"].startswith(f"rank {rank} is stopped (SIGSTOP)")


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_node_whose_power_was_cut(cluster: DevCluster) -> None:
    run = MpiRun(cluster, "power")
    run.submit(nodes=4, launch="--nnodes=3 --spares=1")
    members = last(run.until(progressed, "in the middle of the run"), "round").fields["members"]
    others = {"n1", str(last(run.events(), "controller").fields["node"])}  # the batch host's and the controller's
    victim = next(node for node in members if node not in others)
    cluster.machines.crash(victim)
    events = run.judge()
    assert recoveries(events) == ["node_lost"]
    (spare,) = {"n1", "n2", "n3", "n4"} - set(members)
    assert last(events, "round").fields["members"] == [spare if node == victim else node for node in members]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "message"),
    [("--abort-at=60", "called MPI_Abort with error code 5"), ("--raise-at=60", "RuntimeError: planted in step 60")],
    ids=["aborts", "raises"],
)
def test_the_rank_that(argument: str, message: str, cluster: DevCluster) -> None:
    """… ends the world is the one that is blamed, and the run goes on."""
    run = MpiRun(cluster, argument.strip("-")[:5])
    run.submit(argument)
    events = run.judge()
    recovered = last(events, "recovered").fields
    assert (recovered["kind"], recovered["rank"]) == ("rank_exception", 1)
    failures = {int(e.fields["rank"]): e.fields["message"] for e in events if e.kind == "rank_failed"}
    assert failures[1] == message


@pytest.mark.slow
def test_a_chain_carries_a_run_through_the_time_limit(cluster: DevCluster) -> None:
    run = MpiRun(cluster, "chain")
    run.submit("--step-seconds=0.08", minutes=1, launch="--chain", steps=900)  # 72 s at least: longer than the limit
    events = run.judge(steps=900)
    assert len({event.fields["job"] for event in events if event.kind == "launch"}) > 1
    assert recoveries(events) == []


@pytest.mark.slow
def test_scancel_ends_a_run_at_a_step_that_all_ranks_saved(cluster: DevCluster) -> None:
    run = MpiRun(cluster, "cancel")
    run.submit(launch="--chain", steps=5000)
    run.until(progressed, "in the middle of the run")
    cluster.run("ctl", ["scancel", str(run.job)])
    events = run.judge(verdict="cancelled")
    agreed = int(last(events, "stop_agreed").fields["step"])
    assert agreed in [event.fields["step"] for event in events if event.kind == "committed"]


def test_the_type_of_pmi_is_checked_before_anything_starts(cluster: DevCluster) -> None:
    launcher = Path(sys.executable).with_name("resilio-launch")
    script = f"#!/bin/bash\n#SBATCH --output=/shared/mpi-typo.txt\n{launcher} --mpi=pmx {PROGRAM}\n"
    cluster.submit(script)
    run = MpiRun(cluster, "typo")
    until(lambda: not run.in_queue(), "the end of the job", run.output)
    assert "--mpi=pmx: this Slurm has pmix, " in run.output()


@pytest.mark.slow
def test_the_ready_job_script(cluster: DevCluster) -> None:
    run = MpiRun(cluster, "template")
    environment = {"RANKS_PER_NODE": "2"}
    options = ["--parsable", "--nodes=4", "--time=30", "--chdir=/shared", f"--output=/shared/{run.name}.txt"]
    program = [str(PROGRAM), f"--size={SIZE}", "--steps=40", f"--result=/shared/{run.name}.result"]
    done = cluster.run(
        "ctl", ["sbatch", *options, str(ROOT / "sbatch_templates" / "mpi.sbatch"), *program], env=environment
    )
    run.directory = cluster.shared / "resilio-runs" / done.stdout.strip()
    events = run.judge(steps=40)
    assert last(events, "round").fields["world_size"] == 6  # of four nodes one is a spare
    assert modes(events) == {"mpi"}
