"""Drills one after the other on dev clusters: each on a cluster made for it, or all on one that is there."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import resilio_hpc
from resilio_hpc.core.errors import ResilioError, UsageError
from resilio_hpc.devtools import devcluster
from resilio_hpc.devtools.demo.stage import why_no_slurm
from resilio_hpc.devtools.devcluster import DevCluster, RackMachines
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES
from resilio_hpc.drills.drill import DrillResult, DrillRun, cluster_for
from resilio_hpc.drills.drill_words import slug, words_of
from resilio_hpc.drills.evidence import keep_evidence, new_folder, write_record
from resilio_hpc.drills.kind import Drill

HEALTH = "/run/resilio/health"  # where a drill of a GPU has put a verdict
REST_S = 60.0  # for a cluster to come to rest after a drill
COMPLETES_S = 5.0  # of it, for a job to complete


@dataclass(frozen=True)
class DrillOrder:
    """What is asked for. ``cluster``: the name of one that is there; "": each drill has one made for it."""

    drills: tuple[Drill, ...]
    repeats: int = 1
    cluster: str = ""
    slurm: str = HOST_SERIES
    torch: bool = True
    evidence: Path = Path("resilio-drills")


@dataclass(frozen=True)
class DoneDrill:
    """A drill that was done. ``evidence``: the folder of what it left."""

    result: DrillResult
    repeat: int
    evidence: Path

    def as_record(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**asdict(self.result), "repeat": self.repeat, "evidence": str(self.evidence)}


def check(order: DrillOrder) -> None:
    """Raise UsageError where the drills cannot be done here."""
    why = why_no_slurm()
    if why:
        raise UsageError(f"no dev cluster can be made here ({why}): resilio drill run NAME --run RUN_DIR needs none")
    if order.cluster:
        cluster = _existing(order.cluster)
        for drill in order.drills:
            _fits(cluster, drill)


def perform(order: DrillOrder, say: Callable[[str], None], done: Callable[[DoneDrill], None]) -> None:
    """Do all drills; ``done`` hears of each at once, ``say`` of what happens meanwhile. Raises ResilioError."""
    for repeat in range(order.repeats):
        for drill in order.drills:
            say(f"{drill.full_name}: {words_of(drill).does}")
            done(_one(order, drill, repeat, say))


def _one(order: DrillOrder, drill: Drill, repeat: int, say: Callable[[str], None]) -> DoneDrill:
    folder = new_folder(order.evidence, slug(drill.full_name))
    name = f"drill-{slug(drill.full_name)}-{os.getpid()}-{repeat}"
    with _cluster(order, drill) as cluster:
        say(f"  Slurm {cluster.slurm_version}, {len(cluster.nodes)} nodes")
        run = DrillRun(cluster, drill, name, repeat, order.torch, lambda text: say(f"  {text}"))
        began = time.time()
        result = run.run()
        keep_evidence(cluster, folder, only=name)
        found = DoneDrill(result, repeat, folder)
        write_record(folder, {
            **found.as_record(), "time": began, "slurm": cluster.slurm_version, "torch": order.torch,
            "version": resilio_hpc.__version__, "drill": asdict(drill), "run": f"shared/{name}",
            "acts_at": run.acts_at,
        })  # fmt: skip
    return found


@contextlib.contextmanager
def _cluster(order: DrillOrder, drill: Drill) -> Iterator[DevCluster[RackMachines]]:
    if not order.cluster:
        with cluster_for(drill, f"drill-{os.getpid()}", order.slurm) as made:
            yield made
        return
    cluster = _existing(order.cluster)
    _check_idle(cluster)
    before = {path for folder in _folders(cluster) for path in folder.iterdir()}
    try:
        yield cluster
    finally:
        _restore(cluster)
        _remove(path for folder in _folders(cluster) for path in folder.iterdir() if path not in before)


def _existing(name: str) -> DevCluster[RackMachines]:
    cluster = devcluster.find(name)
    if not isinstance(cluster.machines, RackMachines):
        raise UsageError(f"{name} is --rootless: its nodes are no machines that can be hurt")
    return DevCluster(cluster.spec, cluster.layout, cluster.machines)


def _fits(cluster: DevCluster[RackMachines], drill: Drill) -> None:
    spec, wrong = cluster.spec, ""
    if len(cluster.nodes) < drill.nodes:
        wrong = f"{drill.nodes} nodes (it has {len(cluster.nodes)})"
    elif drill.shared_mount != "bind" and spec.shared_mount != drill.shared_mount:
        wrong = f"--shared-mount {drill.shared_mount}"
    elif spec.gpus < drill.gpus:
        wrong = f"--gpus {drill.gpus}"
    elif drill.preemption:
        wrong = "partitions that preempt"
    elif drill.slow:
        wrong = "control groups of its own"
    if wrong:
        raise UsageError(f"{slug(drill.full_name)} needs {wrong}, which {cluster.name} lacks: leave --cluster out")


def _check_idle(cluster: DevCluster[RackMachines]) -> None:
    jobs = cluster.run("ctl", ["squeue", "-h", "-o", "%i"]).stdout.split()
    if jobs:
        raise UsageError(
            f"{cluster.name} has jobs ({', '.join(jobs[:5])}): drills cut power and networks, so end them first"
        )
    cluster.wait_for_idle(timeout_s=REST_S)


def _folders(cluster: DevCluster[RackMachines]) -> Sequence[Path]:
    return [cluster.shared, *(cluster.layout.nvme(node) for node in cluster.nodes)]


def _remove(paths: Iterator[Path]) -> None:
    for path in list(paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _restore(cluster: DevCluster[RackMachines]) -> None:
    """Bring machines, networks and daemons to what they were; raises SlurmError where nodes do not come to rest."""
    machines = cluster.machines
    for name, machine in machines.states().items():
        if machine.state == "up" and not machine.link_up:
            machines.heal(name)
        if machine.state != "up":
            machines.boot(name)
    for node in cluster.nodes:
        cluster.run(node, ["rm", "-rf", HEALTH], check=False)
    if cluster.spec.shared_mount != "bind":
        machines.release_shared()
    if not any(process.program == "slurmctld" for process in machines.pids("ctl")):
        machines.start_slurmctld()
    for node in cluster.nodes:
        if not any(process.program == "slurmd" for process in machines.pids(node)):
            machines.start_slurmd(node)
    deadline = time.monotonic() + REST_S
    while True:
        waited_s = REST_S - (deadline - time.monotonic())
        with contextlib.suppress(ResilioError):  # slurmctld may still be starting
            cluster.run("ctl", ["scancel", "--full", "--user=root"], check=False)
            for node, state in cluster.node_states().items():
                _resume(cluster, node, state, waited_s)
        try:
            cluster.wait_for_idle(timeout_s=2.0)
            return
        except ResilioError:
            if time.monotonic() > deadline:
                raise


def _resume(cluster: DevCluster[RackMachines], node: str, state: str, waited_s: float) -> None:
    """Put a node back into service. slurmctld asks a node that was booted in a job only after a minute."""
    orders: list[list[str]] = []
    if state.startswith(("down", "drain")):
        orders.append(["State=RESUME"])
    elif state.startswith("completing") and waited_s > COMPLETES_S:
        orders += [["State=DOWN", "Reason=rebooted"], ["State=RESUME"]]
    for order in orders:
        cluster.run("ctl", ["scontrol", "update", f"NodeName={node}", *order], check=False)
