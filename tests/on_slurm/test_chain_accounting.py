"""A chain whose next job may not be queued, since accounting limits the number of jobs."""

from __future__ import annotations

from resilio_hpc.slurm.chain import chain
from tests.support.clusters import own_cluster
from tests.support.requirements import need_program
from tests.support.slurm.chain_runs import start, wait_for

LIMITS = ("AccountingStorageEnforce=associations,limits,qos",)


def test_where_no_further_job_may_be_queued_the_job_requeues_itself() -> None:
    need_program("slurmdbd", "mariadbd", package="slurmdbd mariadb-server")
    why = "limits need accounting, with a database"
    with own_cluster("limits", why=why, nodes=2, accounting=True, slurmd_timeout_s=5, conf=LIMITS) as cluster:
        cluster.run("ctl", ["sacctmgr", "-i", "add", "account", "physics"])
        cluster.run("ctl", ["sacctmgr", "-i", "add", "user", "root", "account=physics"])

        def allow(jobs: int) -> None:
            cluster.run("ctl", ["sacctmgr", "-i", "modify", "user", "root", "set", f"MaxSubmitJobs={jobs}"])

        allow(1)
        run = start(cluster, "limited", "--requeue")
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
