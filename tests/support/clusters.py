"""Dev clusters for tests: one of each Slurm series for the whole run of a worker, and own ones where a test says why.

A test gets the worker's cluster by the fixture ``cluster`` (tests/on_slurm/conftest.py) and gives it back clean: its
jobs are cancelled, a node that is not as it was is booted again, and what it wrote is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.devtools import devcluster
from resilio_hpc.devtools.demo.stage import binds
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, SLURM_SERIES
from resilio_hpc.drills import kind as drill_kind
from tests.support.environments import ROOT
from tests.support.requirements import need_slurm
from tests.support.waiting import PATIENCE_S, until

LOGS = ROOT / "test-logs"
"""Where a failed test leaves its cluster's logs, in a folder of its own."""

CONF = (
    *drill_kind.PREEMPTION,  # in "main" jobs are requeued, in "cancelled" they are cancelled, both for "urgent" ones
    "PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=CANCEL MaxTime=1-0 State=UP",
    "PartitionName=pair Nodes=n[2-3] PriorityTier=2 PreemptMode=OFF MaxTime=1:00:00 State=UP",
    "PartitionName=trio Nodes=n[1-3] PriorityTier=1 PreemptMode=OFF MaxTime=1-0 State=UP",
)
"""What the tests want of slurm.conf, together."""

_OF_A_NODE = {"slurmd", "munged"}
_KEPT = {"home"}  # in /shared
_RUN = {"munge", "munge.key", "slurm", "lock", "initctl"}


def unique_name(prefix: str) -> str:
    """A cluster name of this process's own: several test runs may share a machine."""
    return f"{prefix}-{os.getpid()}"


MIDDLE_SERIES = sorted(SLURM_SERIES)[1:-1]


def each_series(*quick: str, slow: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Run a test, or each test of a module, on these Slurm series."""
    series = [*quick, *(pytest.param(one, marks=pytest.mark.slow) for one in slow)]
    return pytest.mark.parametrize("cluster", series, indirect=True)


@contextlib.contextmanager
def own_cluster(name: str, *, why: str, slurm: str = HOST_SERIES, **options: Any) -> Iterator[DevCluster]:
    """Start a cluster for one test, since the shared one lacks what ``why`` names; leave its logs if the test fails."""
    need_slurm(slurm)
    assert why
    with devcluster.start(
        unique_name(name), slurm=slurm, **{"timeout_s": PATIENCE_S, "binds": binds(), **options}
    ) as running:
        try:
            yield running
        except BaseException as error:
            if not isinstance(error, pytest.skip.Exception):
                where = save_logs(running, os.environ.get("PYTEST_CURRENT_TEST", name).split(" ")[0], {})
                error.add_note(f"the cluster's logs are in {where}")
            raise


class ClusterPool:
    """The clusters of one worker, by series; each starts when it is first wanted."""

    def __init__(self) -> None:
        self._running: dict[str, DevCluster] = {}
        self.log_sizes: dict[Path, int] = {}  # of the cluster that was taken last, at that moment

    def take(self, series: str) -> DevCluster:
        """Five idle nodes n1…n5 with two fake GPUs each."""
        if series not in self._running:
            self._running[series] = devcluster.start(
                unique_name(f"pool{series.replace('.', '')}"), nodes=5, gpus=2, gpu_type="h100", slurm=series,
                slurmd_timeout_s=5, binds=binds(), conf=CONF, timeout_s=PATIENCE_S,
            )  # fmt: skip
        cluster = self._running[series]
        self.log_sizes = {path: path.stat().st_size for path in _logs_of(cluster)}
        return cluster

    def give_back(self, cluster: DevCluster) -> None:
        """Make the cluster as it was. One that does not come to rest is ended, and the error is raised."""
        try:
            clean(cluster)
        except BaseException:
            self._running.pop(cluster.spec.series, None)
            cluster.down()
            raise

    def close(self) -> None:
        """End them all."""
        while self._running:
            self._running.popitem()[1].down()


def clean(cluster: DevCluster) -> None:
    """Bring jobs, machines, daemons, nodes' settings and files to what they were. Raises where it cannot."""
    _start_slurmctld(cluster)
    _cancel_all(cluster)
    for node, machine in cluster.machines.states().items():
        if machine.state == "up" and not machine.link_up:
            cluster.machines.heal(node)
        if machine.state != "up":
            cluster.machines.boot(node)
    _wait_for_jobs(cluster)
    for node in cluster.nodes:
        if what_is_left(cluster, node):
            cluster.machines.crash(node)
            cluster.machines.boot(node)
    _remove_files(cluster)
    _reset_slurm(cluster)


def what_is_left(cluster: DevCluster, node: str) -> list[str]:
    """Processes and files on a running node that a test left there; a missing daemon counts."""
    processes = cluster.machines.pids(node)
    programs = {process.program for process in processes}
    left = [f"no {daemon}" for daemon in ("slurmd", "munged") if daemon not in programs]
    left += [process.program for process in processes if process.pid != 1 and process.program not in _OF_A_NODE]
    inits = [process.host_pid for process in processes if process.pid == 1]
    root = Path(f"/proc/{inits[0]}/root") if inits else Path("/nonexistent")
    for folder, usual in (("tmp", set()), ("dev/shm", set()), ("var/tmp", set()), ("run", _RUN)):
        left += [f"/{folder}/{path.name}" for path in (root / folder).iterdir() if path.name not in usual]
    return left


def _start_slurmctld(cluster: DevCluster) -> None:
    if not any(process.program == "slurmctld" for process in cluster.machines.pids("ctl")):
        cluster.machines.start_slurmctld()


def _cancel_all(cluster: DevCluster) -> None:
    def none_is_left() -> bool:
        asked = cluster.run("ctl", ["squeue", "--noheader", "--format=%A"], check=False)
        jobs = sorted(set(asked.stdout.split()))
        if asked.returncode != 0:  # a slurmctld that was killed has just been started
            return False
        return not jobs or cluster.run("ctl", ["scancel", "--full", *jobs], check=False).returncode == 0

    until(none_is_left, "all jobs cancelled", cluster.status, poll_s=0.1)


def _wait_for_jobs(cluster: DevCluster) -> None:
    """Until all have ended, or for ten seconds: slurmctld asks a node that was booted meanwhile only after a minute."""
    given_up_at = time.monotonic() + 10.0
    queue = ["squeue", "--noheader"]
    while time.monotonic() < given_up_at and cluster.run("ctl", queue, check=False).stdout.strip():
        time.sleep(0.2)


def _reset_slurm(cluster: DevCluster) -> None:
    """Nodes in service with their first settings, and no reservations."""
    shown = cluster.run("ctl", ["scontrol", "--oneliner", "show", "reservations"]).stdout
    for line in shown.splitlines():
        if line.startswith("ReservationName="):
            cluster.run("ctl", ["scontrol", "delete", line.split()[0]])
    began = time.monotonic()
    while True:
        waited_s = time.monotonic() - began
        shown = cluster.run("ctl", ["scontrol", "--oneliner", "show", "nodes"]).stdout
        nodes = {line.partition("=")[2].split()[0]: line for line in shown.splitlines() if line.startswith("NodeName=")}
        for name, line in nodes.items():
            _reset_node(cluster, name, line, completes_no_more=waited_s > 5.0)
        try:
            cluster.wait_for_idle(timeout_s=2.0)
            return
        except ResilioError:
            if waited_s > PATIENCE_S:
                raise


def _reset_node(cluster: DevCluster, name: str, line: str, completes_no_more: bool) -> None:
    state = line.partition(" State=")[2].split()[0]
    orders = []
    if "DRAIN" in state or "DOWN" in state or "FAIL" in state:
        orders.append(["State=RESUME"])
    elif "COMPLETING" in state and completes_no_more:
        orders += [["State=DOWN", "Reason=rebooted"], ["State=RESUME"]]
    if " Weight=1 " not in line:
        orders.append(["Weight=1"])
    if " AvailableFeatures=(null) " not in line:
        orders.append(["AvailableFeatures=", "ActiveFeatures="])
    if " Comment=" in line:
        orders.append(["Comment="])
    for order in orders:  # a node may have come back by itself since: then there is nothing to resume
        cluster.run("ctl", ["scontrol", "update", f"NodeName={name}", *order], check=False)


def _remove_files(cluster: DevCluster) -> None:
    for folder in (cluster.shared, *(cluster.layout.nvme(node) for node in cluster.nodes)):
        for path in folder.iterdir():
            if path.name in _KEPT and folder == cluster.shared:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _logs_of(cluster: DevCluster) -> list[Path]:
    return [path for machine in ("ctl", *cluster.nodes) for path in cluster.layout.log(machine).glob("*.log")]


def save_logs(cluster: DevCluster, test: str, sizes: dict[Path, int]) -> Path:
    """Copy the daemons' logs beyond ``sizes``, what Slurm says now, and the text files of /shared; the folder."""
    where = LOGS / "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in test)[-150:]
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    for path in _logs_of(cluster):
        with path.open("rb") as file:
            file.seek(sizes.get(path, 0))
            (where / f"{path.parent.parent.name}-{path.name}").write_bytes(file.read(8 << 20))
    questions = (["squeue"], ["sinfo", "-N", "-l"], ["scontrol", "show", "job"], ["scontrol", "show", "node"])
    answers = [cluster.run("ctl", question, check=False) for question in questions]
    (where / "slurm.txt").write_text("\n".join(answer.stdout + answer.stderr for answer in answers))
    (where / "processes.txt").write_text(
        "\n".join(
            f"{name} {p.pid} {' '.join(p.argv)}"
            for name in cluster.machines.states()
            for p in cluster.machines.pids(name)
        )
    )
    for path in cluster.shared.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20 and path.suffix != ".h5":
            target = where / "shared" / path.relative_to(cluster.shared)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return where
