"""Every way in which a job of a chain can end, on a real Slurm, and what the next one makes of it (docs/chains.md).

The jobs run ``chain_probe.py``: the launcher's chain without agents, so that a cause takes seconds.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster_fixture import repair, skip_without_slurm, unique_name

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.demo.stage import binds
from resilio_hpc.launch import handover, link_lease, turns
from resilio_hpc.slurm import chain
from resilio_hpc.slurm.devcluster import DevCluster, image

pytestmark = pytest.mark.slurm
PROBE = Path(__file__).with_name("chain_probe.py")
PATIENCE_S = 120.0
PREEMPTION = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=high Nodes=ALL PriorityTier=10 MaxTime=1-0 PreemptMode=OFF State=UP",
    "PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=CANCEL MaxTime=1-0 State=UP",
)


@dataclass(frozen=True)
class ChainRun:
    """One chain on the cluster. ``first``: its first job."""

    cluster: DevCluster
    name: str
    first: str

    @property
    def path(self) -> Path:
        return self.cluster.shared / self.name

    @property
    def inside(self) -> str:
        """The run directory as the nodes see it."""
        return f"/shared/{self.name}"

    def said(self, part: str) -> dict[str, Any]:
        """What the probe of a part did; waits for it."""
        file = self.path / f"probe.{part}"
        wait_for(lambda: file.exists(), lambda: f"part {part} says nothing; {self.queue()} {self.output()}")
        found = json.loads(file.read_text())
        assert isinstance(found, dict)
        return found

    def end(self, part: str, verdict: str) -> None:
        """Let a part end with a verdict."""
        (self.path / f"end.{part}").write_text(verdict)

    def queue(self) -> str:
        return self.cluster.run("ctl", ["squeue", "-h", "-o", "%i %T %r %N"], check=False).stdout

    def output(self) -> str:
        return "".join(file.read_text()[-2000:] for file in self.cluster.shared.glob(f"{self.name}.*.txt"))

    def pending(self) -> list[str]:
        return self.cluster.run("ctl", ["squeue", "-h", "-t", "PD", "-o", "%i"]).stdout.split()


def wait_for(reached: Callable[[], bool], why_not: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, why_not()
        time.sleep(0.05)


@pytest.fixture(scope="module", params=["22.05", pytest.param("26.05", marks=pytest.mark.slow)])
def chain_cluster(request: pytest.FixtureRequest) -> Iterator[DevCluster]:
    """Four nodes with preemption; on the oldest Slurm with accounting, where that is installed."""
    skip_without_slurm()
    series = request.param
    if not image.is_built(series):
        pytest.skip(f"no cached root with Slurm {series}")
    accounting = series == "22.05" and shutil.which("slurmdbd") is not None and shutil.which("mariadbd") is not None
    limits = ("AccountingStorageEnforce=associations,limits,qos",) if accounting else ()
    name = unique_name(f"chains{series.replace('.', '')}")
    with DevCluster.start(
        name, nodes=4, slurm=series, accounting=accounting, binds=binds(), slurmd_timeout_s=5, timeout_s=150.0,
        conf=[*PREEMPTION, *limits],
    ) as running:  # fmt: skip
        if accounting:
            running.run("ctl", ["sacctmgr", "-i", "add", "account", "physics"])
            running.run("ctl", ["sacctmgr", "-i", "add", "user", "root", "account=physics"])
        yield running


@pytest.fixture
def begin(chain_cluster: DevCluster, request: pytest.FixtureRequest) -> Iterator[Callable[..., ChainRun]]:
    """Start a chain: ``begin(*sbatch_options)`` returns when its first job runs and has said so."""
    cluster = chain_cluster
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)

    def start(*options: str) -> ChainRun:
        script = cluster.shared / name / "my dir" / "a job.sh"
        script.parent.mkdir(parents=True)
        script.write_text(f'#!/bin/bash\n#SBATCH --no-kill --open-mode=append\n{command(name)} "$@"\n')
        argv = ["sbatch", "--parsable", "--nodes=1", "--exclusive", f"--output=/shared/{name}.%j.txt", *options]
        inside = f"/shared/{name}/my dir/a job.sh"
        job = cluster.run("ctl", [*argv, inside, "two words", "x"]).stdout.strip()
        run = ChainRun(cluster, name, job)
        assert run.said(job)["over"] is None
        return run

    yield start
    repair(cluster)


def command(name: str) -> str:
    return f"{sys.executable} {PROBE} /shared/{name}"


def slurm(run: ChainRun, *argv: str) -> None:
    run.cluster.run("ctl", list(argv))


def preempt(run: ChainRun) -> None:
    """A more important job takes all nodes for a moment."""
    slurm(run, "sbatch", "--partition=high", "--exclusive", "--nodes=4", "--output=/dev/null", "--wrap=sleep 1")


def lose_node(run: ChainRun) -> None:
    (node,) = run.said(run.first)["nodes"]
    slurm(run, "scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    run.cluster.run("ctl", ["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)  # it may be already


def time_out(run: ChainRun) -> None:
    run.cluster.end_at_time_limit(int(run.first), 1)


def hand_over(run: ChainRun) -> None:
    """As a survivor does whose batch host is lost."""
    program = (
        "from pathlib import Path; from resilio_hpc.launch.last_one_out import hand_over; "
        f"hand_over(Path({run.inside!r}), {run.first!r}, '', 'batch_host_lost')"
    )
    run.cluster.run("n4", [sys.executable, "-c", program], env={"SLURMD_NODENAME": "n4"})


# Waits of half a minute; benchmarks/faults.py drills the same causes with whole runs.
SLOW = ("time limit", "preempted", "node failure")


def marked(causes: Iterable[str]) -> list[object]:
    return [pytest.param(cause, marks=pytest.mark.slow if cause in SLOW else ()) for cause in causes]


# what happens to the first job → sbatch's options for it, and what the second one says of it ("": it goes on)
CAUSES: dict[str, tuple[Callable[[ChainRun], None], tuple[str, ...], str]] = {
    "scancel": (lambda run: slurm(run, "scancel", run.first), (), "was cancelled"),
    "scancel -s KILL": (lambda run: slurm(run, "scancel", "-s", "KILL", run.first), (), "was cancelled"),
    "scancel --batch -s KILL": (lambda run: slurm(run, "scancel", "--batch", "-s", "KILL", run.first), (), ""),
    "preempted, cancel mode": (preempt, ("--partition=low",), ""),
    "preempted, --no-requeue": (preempt, ("--no-requeue",), ""),
    "node failure, --no-requeue": (lose_node, ("--no-requeue",), ""),
    "time limit": (time_out, (), ""),
    "stopped before the time limit": (lambda run: run.end(run.first, "time_limit"), (), ""),
    "closed by a survivor": (hand_over, (), ""),
}  # fmt: skip


@pytest.mark.parametrize("cause", marked(CAUSES))
def test_the_next_job_knows_what_happened(cause: str, begin: Callable[..., ChainRun]) -> None:
    strike, options, ends = CAUSES[cause]
    run = begin(*options)
    following = run.said(run.first)["successor"]
    strike(run)
    said = run.said(following)
    if ends:
        assert ends in said["over"]
        assert said["successor"] is None
        return
    assert said["over"] is None
    assert said["successor"] not in (None, following)
    assert [turn.part for turn in turns.newest(run.path, 3)] == [following, run.first]
    assert said["argv"] == ["two words", "x"]


REQUEUES: dict[str, Callable[[ChainRun], None]] = {
    "scontrol requeue": lambda run: slurm(run, "scontrol", "requeue", run.first),
    "preempted": preempt,
    "node failure": lose_node,
}


@pytest.mark.parametrize("cause", marked(REQUEUES))
def test_a_requeued_job_goes_on_and_keeps_its_successor(cause: str, begin: Callable[..., ChainRun]) -> None:
    run = begin("--partition=main", "--requeue")
    following = run.said(run.first)["successor"]
    REQUEUES[cause](run)
    part = f"{run.first}r1"
    said = run.said(part)
    assert (said["over"], said["successor"]) == (None, following)
    assert run.pending() == [following]  # no second one, which would start in the same second
    run.end(part, "time_limit")
    assert run.said(following)["over"] is None
    assert [turn.part for turn in turns.newest(run.path, 3)] == [following, part, run.first]


def test_a_job_that_is_cancelled_while_it_waits_to_run_again_was_cancelled(begin: Callable[..., ChainRun]) -> None:
    run = begin("--requeue")
    following = run.said(run.first)["successor"]
    slurm(run, "scontrol", "requeuehold", run.first)
    wait_for(lambda: f"{run.first} PENDING" in run.queue(), run.queue)
    slurm(run, "scancel", run.first)
    assert "was cancelled" in run.said(following)["over"]


def test_two_jobs_that_follow_the_same_one_do_not_both_go_on(begin: Callable[..., ChainRun]) -> None:
    run = begin()
    following = run.said(run.first)["successor"]
    argv = ["sbatch", "--parsable", f"--dependency=afterany:{run.first}", "--nodes=1", "--output=/dev/null"]
    environment = {"RESILIO_PREDECESSOR": run.first, "RESILIO_LINK": "2"}
    twin = run.cluster.run("ctl", [*argv, f"--wrap={command(run.name)}"], env=environment).stdout.strip()
    run.end(run.first, "time_limit")
    said = {job: run.said(job)["over"] for job in (following, twin)}
    goes_on = [job for job, over in said.items() if over is None]
    assert len(goes_on) == 1, said
    assert f"job {goes_on[0]} carries this run on" in said[twin if goes_on == [following] else following]


def test_a_job_started_by_hand_ends_while_another_has_the_run(begin: Callable[..., ChainRun]) -> None:
    run = begin()
    argv = ["sbatch", "--parsable", "--nodes=1", "--output=/dev/null", f"--wrap={command(run.name)}"]
    second = run.cluster.run("ctl", argv).stdout.strip()
    assert f"job {run.first} carries this run on" in run.said(second)["over"]
    assert chain.read_links(run.path)[0].job == run.first


def test_a_survivor_closes_the_job_once_although_several_try_and_slurmctld_is_away(
    begin: Callable[..., ChainRun],
) -> None:
    run = begin()
    following = run.said(run.first)["successor"]
    run.cluster.wait_until_saved(int(run.first))
    run.cluster.kill_slurmctld()
    program = (
        "from pathlib import Path; from resilio_hpc.launch.last_one_out import hand_over; "
        f"print(hand_over(Path({run.inside!r}), {run.first!r}, 'needs_new_job', 'batch_host_lost'))"
    )
    survivors = {
        node: run.cluster.spawn(node, [sys.executable, "-c", program], env={"SLURMD_NODENAME": node})
        for node in ("n3", "n4")
    }
    wait_for(lambda: handover.read(run.path, run.first) is not None, run.output)
    run.cluster.start_slurmctld()
    for process in survivors.values():
        assert process.communicate(timeout=PATIENCE_S)[0].strip() == "True"
    record = handover.read(run.path, run.first)
    assert record is not None
    assert record.by in survivors
    assert record.carries_on
    assert run.said(following)["over"] is None


def test_where_no_further_job_may_be_queued_the_job_requeues_itself(
    chain_cluster: DevCluster, begin: Callable[..., ChainRun]
) -> None:
    if not chain_cluster.spec.accounting:
        pytest.skip("limits need accounting: apt-get install slurmdbd mariadb-server")

    def allow(jobs: int) -> None:
        chain_cluster.run("ctl", ["sacctmgr", "-i", "modify", "user", "root", "set", f"MaxSubmitJobs={jobs}"])

    allow(1)
    run = begin("--requeue")
    said = run.said(run.first)
    assert (said["over"], said["successor"], said["late"]) == (None, None, "AssocMaxSubmitJobLimit")
    run.end(run.first, "time_limit")
    part = f"{run.first}r1"
    assert run.said(part)["over"] is None
    assert run.pending() == []
    allow(-1)
    run.end(part, "time_limit")  # by now a successor may be submitted
    wait_for(lambda: len(chain.read_links(run.path)) == 2, run.output)
    following = chain.read_links(run.path)[-1].job
    assert run.said(following)["over"] is None


@pytest.mark.slow
def test_a_lost_batch_host_leaves_a_record_and_its_node_is_waited_for(begin: Callable[..., ChainRun]) -> None:
    run = begin("--nodes=2")
    following = run.said(run.first)["successor"]
    host, survivor = run.said(run.first)["nodes"]
    run.cluster.crash(host)
    program = (
        "from pathlib import Path; from resilio_hpc.launch.last_one_out import close_job; "
        f"print(close_job(Path({run.inside!r}), {run.first!r}, None, 'batch_host_lost'))"
    )
    closer = run.cluster.spawn(survivor, [sys.executable, "-c", program], env={"SLURMD_NODENAME": survivor})
    assert closer.communicate(timeout=PATIENCE_S)[0].strip() == "True"
    record = handover.read(run.path, run.first)
    assert record is not None
    assert (record.by, record.reason, record.carries_on) == (survivor, "batch_host_lost", True)
    wait_for(lambda: f"does not confirm that it has left {host}" in run.output(), run.output)
    run.cluster.boot(host)  # Slurm hears of it: nothing of the job runs there any more
    assert run.said(following)["over"] is None
    waited = next(event for event in read_ledger(run.path / "ledger") if event.kind == "waited_for_predecessor")
    assert waited.fields["seconds"] < link_lease.LINK_LEASE_S
