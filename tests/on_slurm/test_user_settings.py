"""Whatever a user has set for Slurm's commands, our questions have the same answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, NEWEST_SERIES
from tests.slurm.test_runner import ROWS
from tests.support.clusters import each_series
from tests.support.environments import ROOT
from tests.support.requirements import need_readable_checkout

pytestmark = each_series(HOST_SERIES, slow=[NEWEST_SERIES])
ASK = """
import dataclasses, json, sys
import msgspec
from resilio_hpc.launch.allocation import job_watch
from resilio_hpc.launch.chain import preemption
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.runs import of_job
from resilio_hpc.slurm.submit import submitit_states
from resilio_hpc.slurm.client.command_client import CommandClient
job, held = sys.argv[1:]
client, tables = CommandClient(), CommandClient(use_json=False)
told = {
    "end": commands.job_end_time(job), "watch": job_watch.ask(job), "holding": commands.holding(job),
    "nodes": commands.job_nodes(job), "state": commands.job_state(job), "waiting": commands.job_state(held),
    "node states": commands.node_states(["n1", "n2", "n3"]), "version": commands.version(),
    "cluster": commands.config_value("ClusterName"), "submitit": submitit_states.ask([job, held]),
    "successors": of_job._of_successors(job), "preemption": preemption.preemption(commands.job_fields(job)),
    "client": sorted(one.name for one in client.nodes()), "tables": sorted(one.name for one in tables.nodes()),
    "jobs": [sorted(str(one.id) for one in each.jobs([job])) for each in (client, tables)],
}
def plain(one):
    return dataclasses.asdict(one) if dataclasses.is_dataclass(one) else msgspec.to_builtins(one)
print(json.dumps(told, default=plain))
"""
SET = {
    "SQUEUE_PARTITION": "low", "SQUEUE_USERS": "root", "SQUEUE_STATES": "SUSPENDED", "SQUEUE_NAMES": "other",
    "SQUEUE_ACCOUNT": "nobody", "SQUEUE_QOS": "high", "SQUEUE_SORT": "-i", "SQUEUE_FORMAT": "%i %j",
    "SQUEUE_FORMAT2": "jobid,name", "SINFO_PARTITION": "pair", "SINFO_FORMAT": "%N", "SACCT_FORMAT": "jobid",
    "SLURM_BITSTR_LEN": "1", "SLURM_CLUSTERS": "other", "SLURM_TIME_FORMAT": "relative", "LC_ALL": "de_DE.UTF-8",
    "SLURM_JSON": "compact", "TZ": "Asia/Tokyo",
}  # fmt: skip
"""Those with a value that matters; all others of the manual pages are 1."""


def test_a_users_settings_change_no_answer(cluster: DevCluster) -> None:
    need_readable_checkout()
    script = "#!/bin/sh\nsleep 600\n"
    job = cluster.submit(script, ["--nodes=2", "--time=30", "--job-name=mine"], user="user")
    held = cluster.submit(script, ["--hold"], user="user")
    cluster.wait_for_job(job, ["RUNNING"], 60.0)

    # In another image than the host's, an interpreter below a private /root is root's alone.
    runs = cluster.run("ctl", [sys.executable, "-c", "import resilio_hpc"], 60.0, check=False, user="user",
                       env={"PYTHONPATH": str(ROOT)})  # fmt: skip
    user = "user" if runs.returncode == 0 else "root"

    def told(settings: Mapping[str, str]) -> dict[str, Any]:
        argv = [sys.executable, "-c", ASK, str(job), str(held)]
        done = cluster.run("ctl", argv, 60.0, user=user, env={"PYTHONPATH": str(ROOT), **settings})
        answers: dict[str, Any] = json.loads(done.stdout)
        return answers

    plain = told({})
    assert plain["end"] > 1.7e9 and plain["holding"]["state"] == "RUNNING" and len(plain["watch"]["nodes"]) == 2
    assert (plain["waiting"], plain["submitit"]["states"][str(held)]) == ("PENDING", "PENDING")
    assert plain["tables"] == plain["client"] == ["n1", "n2", "n3", "n4", "n5"]
    ours = {"SLURM_CONF", "SLURM_CONF_OUT", "SLURMD_DEBUG"}
    assert told({name: "1" for _, _, *names in ROWS for name in names if name not in ours} | SET) == plain
    assert told({"SLURM_TIME_FORMAT": "%d %b %H:%M", "TZ": "America/New_York"}) == plain
