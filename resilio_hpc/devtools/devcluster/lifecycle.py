"""Starts a dev cluster, and finds one that runs."""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Sequence

import msgspec

from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.core.process import run
from resilio_hpc.devtools.devcluster import control, files, image, processes, requirements, slurm_conf
from resilio_hpc.devtools.devcluster.cluster import DevCluster
from resilio_hpc.devtools.devcluster.host_machines import HostMachines, free_ports, is_up
from resilio_hpc.devtools.devcluster.interpreter import host_python
from resilio_hpc.devtools.devcluster.machines import ClusterMachines
from resilio_hpc.devtools.devcluster.rack_machines import RackMachines
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, ClusterSpec, layout, validate


def start(
    name: str = "dev",
    *,
    nodes: int = 4,
    cpus: int = 8,
    gpus: int = 0,
    gpu_type: str = "h100",
    slurm: str = HOST_SERIES,
    accounting: bool = False,
    binds: Sequence[str | os.PathLike[str]] = (),
    slurmd_timeout_s: int = 10,
    shared_mount: str = "bind",
    private_tmp: bool = False,
    conf: Sequence[str] = (),
    timeout_s: float = 60.0,
) -> DevCluster[RackMachines]:
    """Start a cluster and return when all its nodes are idle.

    ``conf`` are ``KEY=VALUE`` lines laid over slurm.conf; ``binds`` are host paths shown at the same path on every
    machine; ``gpu_type`` is what Slurm calls the fake GPUs; ``shared_mount`` is how nodes see /shared
    (shared_directory.py); ``private_tmp`` gives each job a /tmp and a /dev/shm of its own (job_container/tmpfs).
    Raises UsageError (impossible request, name taken, packages missing) or SlurmError (did not start, or not idle
    within ``timeout_s``; then nothing of it is left running).
    """
    spec = validate(
        ClusterSpec(
            name=name,
            nodes=nodes,
            cpus=cpus,
            gpus=gpus,
            gpu_type=gpu_type,
            series=slurm,
            root=str(image.root_of(slurm)),
            accounting=accounting,
            binds=tuple(os.path.realpath(path) for path in binds),
            slurmd_timeout_s=slurmd_timeout_s,
            shared_mount=shared_mount,
            private_tmp=private_tmp,
            conf=tuple(conf),
        )
    )
    where = layout(spec.name)
    requirements.check(spec)
    image.ensure(spec.series)
    with control.claimed(where) as lock:
        control.sweep(where)
        spec = _complete(spec)
        files.write_files(spec, where, slurm_conf.render_slurm_conf(spec))
        cluster = DevCluster(spec, where, RackMachines(spec, where))
        with control.start_rack(where, lock) as leash:
            try:
                cluster.machines.wait_for_power_on(timeout_s)
                cluster.wait_for_idle(spec.compute_nodes, timeout_s)
            except BaseException:
                leash.close()
                raise
            leash.sendall(b"keep\n")
    return cluster


def _complete(spec: ClusterSpec) -> ClusterSpec:
    """Return the spec with this host's facts: the Slurm installation, its exact version, the Python to show."""
    version = run(["chroot", spec.root, "/usr/sbin/slurmctld", "-V"], 10.0).stdout.split()[-1]
    python = host_python(spec.root)
    binds = tuple(dict.fromkeys([*python.paths, *python.libraries, *spec.binds]))
    return msgspec.structs.replace(spec, slurm_version=version, binds=binds)


def start_rootless(
    name: str = "dev",
    *,
    nodes: int = 4,
    cpus: int = 8,
    gpus: int = 0,
    gpu_type: str = "h100",
    slurmd_timeout_s: int = 10,
    conf: Sequence[str] = (),
    timeout_s: float = 60.0,
) -> DevCluster[HostMachines]:
    """Start a cluster without root and return when all its nodes are idle; arguments and errors as ``start``."""
    spec = validate(
        ClusterSpec(
            name=name,
            nodes=nodes,
            cpus=cpus,
            gpus=gpus,
            gpu_type=gpu_type,
            slurmd_timeout_s=slurmd_timeout_s,
            conf=tuple(conf),
            rootless=True,
        )
    )
    where = layout(spec.name)
    requirements.check(spec)
    with control.claimed(where) as _:
        if is_up(where):
            raise UsageError(
                f"dev cluster {spec.name} is already up; end it with: resilio devcluster down --name {spec.name}"
            )
        processes.kill_rootless(where)
        control.sweep(where)
        environment = {"PATH": requirements.SEARCH_PATH}
        version = run(["slurmctld", "-V"], 10.0, env=environment).stdout.split()[-1]
        spec = msgspec.structs.replace(spec, slurm_version=version)
        account = pwd.getpwuid(os.getuid()).pw_name
        ports = free_ports(spec.nodes + 1)
        text = slurm_conf.render_rootless_conf(spec, where, account, socket.gethostname().split(".")[0], ports)
        files.write_files(spec, where, text)
        cluster = DevCluster(spec, where, HostMachines(spec, where))
        try:
            cluster.machines.start_daemons()
            cluster.wait_for_idle(timeout_s=timeout_s)
        except BaseException:
            processes.kill_rootless(where)
            raise
        where.control.touch()  # tells that the start was finished
    return cluster


def find(name: str = "dev") -> DevCluster[ClusterMachines]:
    """Return the running cluster called ``name``; raises SlurmError if it is not up."""
    where = layout(name)
    try:
        spec = msgspec.json.decode(where.spec.read_bytes(), type=ClusterSpec)
    except (OSError, msgspec.MsgspecError):
        raise SlurmError(f"dev cluster {name} is not up; start it with: resilio devcluster up --name {name}") from None
    if not spec.rootless:
        control.ask(where, "status")
        return DevCluster(spec, where, RackMachines(spec, where))
    if not is_up(where):
        raise SlurmError(f"dev cluster {name} is not up; start it with: resilio devcluster up --rootless")
    return DevCluster(spec, where, HostMachines(spec, where))
