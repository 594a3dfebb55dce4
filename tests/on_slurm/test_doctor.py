"""``resilio doctor`` on the machines of a real Slurm: what is right there, and what is broken on purpose."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

import pytest

from resilio_hpc.devtools.devcluster import DevCluster
from tests.support.clusters import each_series
from tests.support.doctor.machines import COMMAND, Said
from tests.support.waiting import PATIENCE_S

pytestmark = each_series("22.05", "26.05", slow=["24.11"])


def doctor(cluster: DevCluster, *words: str, before: Sequence[str] = (), machine: str = "n1") -> Said:
    argv = [*before, *COMMAND, "--json", *words]
    ran = cluster.run(machine, argv, check=False, cwd="/shared", timeout_s=120)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return Said(ran.returncode, json.loads(ran.stdout[ran.stdout.index("{") :]))


def test_slurm_and_munge_answer_and_the_settings_of_a_rehearsal_are_named(cluster: DevCluster) -> None:
    """A dev cluster's own slurm.conf kills jobs after two seconds, which is wrong for a real one."""
    said = doctor(cluster, "slurm", "munge", "slurm-settings", "host-name", "run-directory", "--run-dir", "runs")
    assert said.code == 0
    assert said.one("slurm")["seen"] == f"Slurm {cluster.slurm_version}, slurmctld answers on ctl"
    assert (said.one("munge")["state"], said.one("host-name")["state"]) == ("ok", "ok")
    named = {one["about"]: one for one in said.all("slurm-settings")}
    assert named["KillWait"]["seen"].startswith("KillWait=2")
    assert {"KillWait", "ProctrackType"} <= set(named) <= {"KillWait", "ProctrackType", "UnkillableStepTimeout"}
    assert said.one("run-directory")["state"] == "notice"  # on this host's own disk, which all machines see


def test_a_munge_that_is_gone_is_named(cluster: DevCluster) -> None:
    hidden = ["unshare", "--mount", "sh", "-ec", 'mount -t tmpfs tmpfs /run/munge; exec "$@"', "sh"]
    said = doctor(cluster, "munge", "slurm-settings", before=hidden)
    assert said.code == 1
    assert (said.one("munge")["state"], said.one("slurm")["state"]) == ("failed", "failed")
    assert said.one("slurm-settings")["seen"] == "not tried, since this failed: slurm"


def test_a_slurmctld_that_is_gone_is_named(cluster: DevCluster) -> None:
    cluster.machines.kill_slurmctld()
    said = doctor(cluster, "slurm", "munge", "slurm-settings")
    assert (said.code, said.one("slurm")["state"], said.one("munge")["state"]) == (1, "failed", "ok")
    assert "slurmctld does not answer" in said.one("slurm")["seen"]


@pytest.mark.parametrize(
    ("flags", "missing"),
    [((), "--no-kill --kill-on-bad-exit=0 --wait=0"), (("--no-kill", "--kill-on-bad-exit=0", "--wait=0"), "")],
)
def test_a_step_without_the_survival_flags_is_named(cluster: DevCluster, flags: tuple[str, ...], missing: str) -> None:
    said = cluster.shared / "said.json"
    command = shlex.join(["srun", *flags, *COMMAND, "--json", "job"])
    job = cluster.submit(f"#!/bin/sh\n{command} > {said.name}\n", ["--nodes=1", "--no-kill"])
    cluster.wait_for_job(job, ["COMPLETED"], PATIENCE_S)
    found = Said(0, json.loads(said.read_text())).one("job")
    assert found["state"] == ("warning" if missing else "ok"), found
    assert missing in found["seen"]
    assert found["seen"].startswith(f"job {job}, 1 node, ")


def test_a_step_whose_srun_is_elsewhere_is_not_blamed(cluster: DevCluster) -> None:
    alloc = ["salloc", "--quiet", "--nodes=1", "--no-kill", "srun"]
    found = doctor(cluster, "job", before=alloc, machine="ctl").one("job")
    assert (found["state"], found["seen"].endswith("the flags of its srun are not seen from here")) == ("ok", True)
