"""A plain torchrun script in real jobs: no line of it knows of this package, and it ends with the same bits."""

from __future__ import annotations

import sys

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.devtools.devcluster import DevCluster
from tests.support.frameworks.plain_script import COMMAND, EVERY, STRIKE_AT, begun, ends, undisturbed_end
from tests.support.waiting import until

SRUN = "srun --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1"
JOB = """#!/bin/bash
#SBATCH --chdir=/shared/{name} --output=/shared/{name}/output.txt --open-mode=append --no-kill --time=30
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
exec {srun} {python} -m resilio_hpc.cli.resilio_launch --run-dir /shared/{name}/run --nproc-per-node 1 {command}
"""


class PlainJob:
    """A job of two ranks, one of which is struck after some steps of its first life."""

    def __init__(self, cluster: DevCluster, name: str, how: str, *options: str, srun: str = "", sbatch: str) -> None:
        self.cluster, self.folder = cluster, cluster.shared / name
        self.folder.mkdir()
        command = " ".join([*options, *STRIKE_AT, how, *COMMAND])
        script = JOB.format(name=name, srun=srun, python=sys.executable, command=command)
        self.job = cluster.submit(script, sbatch.split())

    def said(self) -> str:
        output = self.folder / "output.txt"
        return output.read_text() if output.exists() else ""

    def events(self, kind: str) -> list[dict[str, object]]:
        ledger = self.folder / "run" / "ledger"
        return [one.fields for one in read_ledger(ledger) if one.kind == kind] if ledger.exists() else []

    def until_struck(self) -> None:
        until((self.folder / "struck").exists, "a step is under way", self.said, poll_s=0.1)

    def went_on(self, undisturbed: list[str]) -> None:
        until(lambda: self.events("verdict")[-1:], "the verdict", self.said, poll_s=0.2)
        until(lambda: (self.folder / "end" / "1").exists(), "the end of training", self.said, poll_s=0.2)
        until(lambda: not self.cluster.run("ctl", ["squeue", "-h"]).stdout, "an empty queue", self.said, poll_s=0.2)
        assert self.events("verdict")[-1]["verdict"] == "completed", self.said()
        assert begun(self.said()) == [0, EVERY]
        assert ends(self.folder) == undisturbed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return undisturbed_end(tmp_path_factory.mktemp("undisturbed"))


def test_a_killed_rank_of_a_step_of_srun(cluster: DevCluster, undisturbed: list[str]) -> None:
    job = PlainJob(cluster, "plain-srun", "kill", srun=SRUN, sbatch="--nodes=2")
    job.went_on(undisturbed)
    assert job.events("launch")[0]["mode"] == "step"


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_lost_node(cluster: DevCluster, undisturbed: list[str]) -> None:
    job = PlainJob(cluster, "plain-spare", "wait", "--spares", "1", sbatch="--nodes=3")
    job.until_struck()
    lost = list(job.events("round")[0]["members"])[1]  # type: ignore[call-overload]
    cluster.machines.crash(lost)
    job.went_on(undisturbed)
    assert lost not in job.events("round")[-1]["members"]  # type: ignore[operator]


@pytest.mark.slow
def test_a_chain_goes_on_after_the_time_limit(cluster: DevCluster, undisturbed: list[str]) -> None:
    job = PlainJob(cluster, "plain-chain", "wait", "--chain", sbatch="--nodes=2")
    job.until_struck()
    cluster.end_at_time_limit(job.job, after_s=20)
    job.went_on(undisturbed)
    assert [event["job"] for event in job.events("launch")] == [str(job.job), str(job.job + 1)]


@pytest.mark.slow
def test_a_preempted_job_goes_on_when_it_is_requeued(cluster: DevCluster, undisturbed: list[str]) -> None:
    job = PlainJob(cluster, "plain-preempted", "wait", sbatch="--nodes=2 --requeue --partition=main")
    job.until_struck()
    urgent = ["--partition=urgent", "--exclusive", f"--nodes={len(cluster.nodes)}", "--output=/dev/null"]
    cluster.submit("#!/bin/sh\nsleep 2\n", urgent)
    job.went_on(undisturbed)
    assert {event["job"] for event in job.events("launch")} == {str(job.job)}
