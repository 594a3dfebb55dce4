"""Every way in which a job of a chain can end, on a real Slurm, and what the next one makes of it (docs/chains.md).

The jobs run ``chain_probe.py``: the launcher's chain without agents, so that a cause takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, NEWEST_SERIES
from resilio_hpc.launch.chain import handover
from resilio_hpc.launch.protocol.job_lease import JOB_LEASE_S
from resilio_hpc.launch.rundir import run_claim
from resilio_hpc.slurm.chain import chain
from tests.support.clusters import each_series
from tests.support.slurm.chain_runs import ChainRun, command, wait_for


def slurm(run: ChainRun, *argv: str) -> None:
    run.cluster.run("ctl", list(argv))


def preempt(run: ChainRun) -> None:
    """A more important job takes all nodes for a moment."""
    slurm(
        run,
        "sbatch",
        "--partition=urgent",
        "--exclusive",
        f"--nodes={len(run.cluster.nodes)}",
        "--output=/dev/null",
        "--wrap=sleep 1",
    )


def lose_node(run: ChainRun) -> None:
    (node,) = run.said(run.first)["nodes"]
    slurm(run, "scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    run.cluster.run("ctl", ["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)  # it may be already


def time_out(run: ChainRun) -> None:
    run.cluster.end_at_time_limit(int(run.first), 1)


def hand_over(run: ChainRun) -> None:
    """As a survivor does whose batch host is lost."""
    program = (
        "from pathlib import Path; from resilio_hpc.launch.chain.orphaned_job import hand_over; "
        f"hand_over(Path({run.inside!r}), {run.first!r}, '', 'batch_host_lost')"
    )
    run.cluster.run("n4", [sys.executable, "-c", program], env={"SLURMD_NODENAME": "n4"})


pytestmark = each_series(HOST_SERIES, slow=[NEWEST_SERIES])


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
    assert [turn.part for turn in run_claim.newest(run.path, 3)] == [following, run.first]
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
    assert [turn.part for turn in run_claim.newest(run.path, 3)] == [following, part, run.first]


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
    run.cluster.machines.kill_slurmctld()
    program = (
        "from pathlib import Path; from resilio_hpc.launch.chain.orphaned_job import hand_over; "
        f"print(hand_over(Path({run.inside!r}), {run.first!r}, 'needs_new_job', 'batch_host_lost'))"
    )
    survivors = {
        node: run.cluster.spawn(node, [sys.executable, "-c", program], env={"SLURMD_NODENAME": node})
        for node in ("n3", "n4")
    }
    wait_for(lambda: handover.read(run.path, run.first) is not None, run.output)
    run.cluster.machines.start_slurmctld()
    for process in survivors.values():
        assert process.communicate(timeout=300.0)[0].strip() == "True"
    record = handover.read(run.path, run.first)
    assert record is not None
    assert record.by in survivors
    assert record.carries_on
    assert run.said(following)["over"] is None


@pytest.mark.slow
def test_a_lost_batch_host_leaves_a_record_and_its_node_is_waited_for(begin: Callable[..., ChainRun]) -> None:
    run = begin("--nodes=2")
    following = run.said(run.first)["successor"]
    host, survivor = run.said(run.first)["nodes"]
    run.cluster.machines.crash(host)
    program = (
        "from pathlib import Path; from resilio_hpc.launch.chain.orphaned_job import close_job; "
        f"print(close_job(Path({run.inside!r}), {run.first!r}, None, 'batch_host_lost'))"
    )
    closer = run.cluster.spawn(survivor, [sys.executable, "-c", program], env={"SLURMD_NODENAME": survivor})
    assert closer.communicate(timeout=300.0)[0].strip() == "True"
    record = handover.read(run.path, run.first)
    assert record is not None
    assert (record.by, record.reason, record.carries_on) == (survivor, "batch_host_lost", True)
    wait_for(lambda: f"does not confirm that it has left {host}" in run.output(), run.output)
    run.cluster.machines.boot(host)  # Slurm hears of it: nothing of the job runs there any more
    assert run.said(following)["over"] is None
    waited = next(event for event in read_ledger(run.path / "ledger") if event.kind == "waited_for_predecessor")
    assert waited.fields["seconds"] < JOB_LEASE_S
