"""``resilio chain`` on a real Slurm: what a person orders of a chain happens, also while slurmctld is away."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from resilio_hpc.core.process import Completed
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, NEWEST_SERIES
from resilio_hpc.launch.rundir import chain_order, run_claim, run_directory
from resilio_hpc.slurm.chain import chain
from tests.support.clusters import each_series
from tests.support.environments import ROOT
from tests.support.slurm.chain_runs import ChainRun, wait_for

pytestmark = each_series(HOST_SERIES, slow=[NEWEST_SERIES])
Begin = Callable[..., ChainRun]


def resilio(run: ChainRun, *words: str) -> Completed:
    argv = [sys.executable, "-m", "resilio_hpc.cli.main", "chain", *words]
    return run.cluster.run("ctl", argv, 60.0, check=False, env={"PYTHONPATH": str(ROOT)})


def status(run: ChainRun) -> dict[str, Any]:
    found = json.loads(resilio(run, "status", "--json", run.inside).stdout)
    assert isinstance(found, dict)
    return found


def in_queue(run: ChainRun) -> str:
    return run.cluster.run("ctl", ["squeue", "-h"]).stdout


def test_stopped_and_revived(begin: Begin) -> None:
    run = begin()
    following = run.said(run.first)["successor"]
    before = status(run)
    assert (before["phase"], before["running"], before["waiting"]) == ("running", [run.first], [following])
    assert before["parts"][1]["why"] == f"waits for the end of job {run.first}"
    assert before["parts"][1]["start_expected"] > before["parts"][0]["began"]

    assert "would be cancelled" in resilio(run, "stop", "--dry-run", run.first).stdout
    assert run.pending() == [following]
    assert resilio(run, "stop", run.first).returncode == 0  # by its number: the next one's script tells the directory
    wait_for(lambda: not in_queue(run), run.queue)
    stopped = status(run)
    assert (stopped["phase"], [part["job"] for part in stopped["parts"]]) == ("stopped", [run.first, following])
    assert stopped["parts"][0]["why"] == "cancelled"
    assert run.cluster.job_state(following) == "CANCELLED"
    assert resilio(run, "stop", run.inside).stdout.startswith("no job of this chain")

    assert resilio(run, "extend", run.inside, "--max", "2").returncode == 2  # it has had two
    done = resilio(run, "extend", "--json", run.inside)
    assert done.returncode == 0, done.stderr
    (third,) = json.loads(done.stdout)["jobs"]
    said = run.said(third)
    assert said["over"] is None
    assert said["argv"] == ["two words", "x"]
    assert [(turn.part, turn.link) for turn in run_claim.newest(run.path, 3)] == [(third, 3), (run.first, 1)]
    run.end(third, "time_limit")
    assert run.said(said["successor"])["over"] is None  # and the chain goes on as ever


def test_a_stop_while_slurmctld_is_away_holds(begin: Begin) -> None:
    run = begin()
    following = run.said(run.first)["successor"]
    run.cluster.wait_until_saved(int(run.first))
    run.cluster.machines.kill_slurmctld()
    try:
        refused = resilio(run, "extend", run.inside)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "nothing was changed" in refused.stderr
        assert not chain_order.read(run.path).stopped
        told = resilio(run, "stop", run.inside)
        assert (told.returncode, "recorded" in told.stdout) == (3, True)
        wait_for(lambda: run_directory.read_verdict(run.path, run.first) is not None, run.output)
    finally:
        run.cluster.machines.start_slurmctld()
    wait_for(lambda: not in_queue(run), run.queue)
    assert [turn.part for turn in run_claim.newest(run.path, 3)] == [run.first]
    if run.cluster.job_state(following) != "CANCELLED":  # it started before the one before it could cancel it
        assert run.said(following)["over"] is not None


def test_a_requeued_job_obeys_and_one_that_is_started_by_hand_lifts_a_stop(begin: Begin) -> None:
    run = begin("--requeue")
    following = run.said(run.first)["successor"]
    run.cluster.run("ctl", ["scontrol", "requeuehold", run.first])
    wait_for(lambda: f"{run.first} PENDING" in run.queue(), run.queue)
    chain_order.write(run.path, chain_order.ChainOrder(stopped=True, by="me"))
    run.cluster.run("ctl", ["scontrol", "release", run.first])
    for part in (f"{run.first}r1", following):
        assert "the chain was stopped by me" in run.said(part)["over"]
    argv = ["sbatch", "--parsable", "--nodes=1", "--output=/dev/null", f"--wrap={run.command}"]
    by_hand = run.cluster.run("ctl", argv).stdout.strip()
    assert run.said(by_hand)["over"] is None
    assert not chain_order.read(run.path).stopped
    assert chain.read_links(run.path)[-1].job == run.said(by_hand)["successor"]


def test_a_waiting_successor_is_reshaped_and_what_runs_is_not(begin: Begin, cluster: DevCluster) -> None:
    run = begin("--ntasks-per-node=2", "--nodes=2")
    following = run.said(run.first)["successor"]
    program = (
        "import sys; from pathlib import Path; from resilio_hpc.slurm.orders import reshape as r; "
        "print(r.reshape(sys.argv[1], r.JobShape(nodes=int(sys.argv[2]), time_limit_s=600.0, exclude=['n4']), "
        f"Path({run.inside!r}), look=(lambda job: dict(r.commands.job_fields(job), JobState='PENDING'))).result)"
    )

    def reshaped(job: str, nodes: int) -> str:
        argv = [sys.executable, "-c", program, job, str(nodes)]
        return cluster.run("ctl", argv, 60.0, env={"PYTHONPATH": str(ROOT)}).stdout.strip()

    assert [reshaped(following, nodes) for nodes in (3, 1, 1)] == ["done", "done", "nothing"]
    run.end(run.first, "time_limit")
    assert len(run.said(following)["nodes"]) == 1  # 22.05 would have found no nodes for its former tasks
    third = run.said(following)["successor"]
    argv = ["squeue", "-h", "-j", f"{following},{third}", "-o", "%D|%l|%x|%T"]
    before = cluster.run("ctl", argv).stdout
    assert before.splitlines()[0].startswith("1|10:00|n4|")
    assert reshaped(following, 2) == "refused"  # it runs by now: the order itself does not touch it
    assert cluster.run("ctl", argv).stdout == before


def test_a_successor_is_made_to_fit_before_a_maintenance_or_waits_for_its_end(begin: Begin) -> None:
    run = begin("--time=60")
    following = run.said(run.first)["successor"]

    def limit(job: str) -> str:
        return run.cluster.run("ctl", ["squeue", "-h", "-j", job, "-o", "%l"]).stdout.strip()

    def reserve(begin: str) -> None:
        what = ["reservationname=fix", f"starttime={begin}", "duration=60", "flags=maint,ignore_jobs", "nodes=ALL"]
        run.cluster.run("ctl", ["scontrol", "create", "reservation", *what, "user=root"])

    def lift() -> None:
        run.cluster.run("ctl", ["scontrol", "delete", "reservationname=fix"])

    reserve("now+30minutes")
    try:
        run.end(run.first, "time_limit")
        third = run.said(following)["successor"]
        minutes, _, seconds = limit(following).partition(":")
        assert (20 <= int(minutes) < 30, seconds) == (True, "00")
        assert limit(third) == "1:00:00"  # for once, not for ever
        lift()
        reserve("now+5minutes")  # too little is left
        run.end(following, "time_limit")
        wait_for(lambda: f"the next job, {third}, waits until maintenance fix is over" in run.output(), run.output)
        wait_for(lambda: run.cluster.job_state(following) != "RUNNING", run.queue)
        assert limit(third) == "1:00:00"
        assert not (run.path / f"probe.{third}").exists()
    finally:
        lift()
    assert run.said(third)["over"] is None
