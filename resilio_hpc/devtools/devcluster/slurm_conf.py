"""The text of a dev cluster's configuration files: pure functions from a ClusterSpec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resilio_hpc.devtools.devcluster.spec import CONTROLLER, ClusterPaths, ClusterSpec

_SETTINGS = {
    "SlurmctldHost": CONTROLLER,
    "SlurmUser": "root",
    "AuthType": "auth/munge",
    "AuthInfo": "cred_expire=10",  # otherwise a requeued job waits 121 s
    "MpiDefault": "none",
    "StateSaveLocation": "/var/lib/slurm",
    "SlurmdSpoolDir": "/var/spool/slurmd",
    "SlurmctldPidFile": "/run/slurm/slurmctld.pid",
    "SlurmdPidFile": "/run/slurm/slurmd.pid",
    "SlurmctldLogFile": "/var/log/slurm/slurmctld.log",
    "SlurmdLogFile": "/var/log/slurm/slurmd.log",
    "SlurmctldDebug": "info",
    "SlurmdDebug": "info",
    "ReturnToService": "2",
    "ProctrackType": "proctrack/linuxproc",  # needs no cgroup, so none can be left behind
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "nohold_on_prolog_fail,bf_interval=2,sched_interval=2,sched_min_interval=0",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    "SlurmdParameters": "config_overrides",  # nodes may claim more than this host has
    "SlurmctldTimeout": "5",
    "InactiveLimit": "0",
    "KillWait": "2",
    "MinJobAge": "600",
    "MessageTimeout": "5",
    "BatchStartTimeout": "10",
    "UnkillableStepTimeout": "30",
    "Waittime": "0",
    "TreeWidth": "65533",  # slurmctld asks every node itself: a dead node delays no other's answer
    "GresTypes": "gpu",
}
_BEFORE_23 = {"TaskPlugin": "task/none", "JobAcctGatherType": "jobacct_gather/none"}
# each job's own /tmp and /dev/shm, gone with it (job_container.conf manual); it makes its mounts in the extern step
_PRIVATE_TMP = {"JobContainerType": "job_container/tmpfs", "PrologFlags": "Contain"}
_ACCOUNTING = {"AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageHost": CONTROLLER}


def render_slurm_conf(spec: ClusterSpec) -> str:
    """Return slurm.conf: settings for rehearsing failures, overridden by ``spec.conf``."""
    settings = {"ClusterName": spec.name, **_SETTINGS, "SlurmdTimeout": str(spec.slurmd_timeout_s)}
    if spec.series < "23":
        settings.update(_BEFORE_23)
    if spec.accounting:
        settings.update(_ACCOUNTING)
    if spec.private_tmp:
        settings.update(_PRIVATE_TMP)
    lines = [f"NodeName={names} {_hardware(spec, kind)}" for kind, names in _by_type(spec)]
    return _text(settings, lines, spec)


def _by_type(spec: ClusterSpec) -> list[tuple[str, str]]:
    """Return (type of GPU, host list) of neighbours with the same type."""
    runs: list[tuple[str, int, int]] = []
    for number, kind in enumerate(spec.gpu_types(), 1):
        if runs and runs[-1][0] == kind:
            runs[-1] = kind, runs[-1][1], number
        else:
            runs.append((kind, number, number))
    return [(kind, f"n[{first}-{last}]" if last > first else f"n{first}") for kind, first, last in runs]


def render_rootless_conf(spec: ClusterSpec, where: ClusterPaths, account: str, host: str, ports: Sequence[int]) -> str:
    """Return slurm.conf of a cluster without namespaces: its daemons share this host, each with its own port.

    ``ports``: slurmctld's and then one per node.
    """
    settings = {
        **{"ClusterName": spec.name, **_SETTINGS, "SlurmdTimeout": str(spec.slurmd_timeout_s)},
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": str(ports[0]),
        "SlurmUser": account,
        "SlurmdUser": account,
        "AuthInfo": f"socket={where.state}/munge.socket,cred_expire=10",
        "StateSaveLocation": f"{where.machine(CONTROLLER)}/state",
        "SlurmdSpoolDir": f"{where.state}/machines/%n/spool",
        "SlurmctldPidFile": f"{where.state}/slurmctld.pid",
        "SlurmdPidFile": f"{where.state}/slurmd.%n.pid",
        "SlurmctldLogFile": f"{where.log(CONTROLLER)}/slurmctld.log",
        "SlurmdLogFile": f"{where.state}/machines/%n/log/slurmd.log",
        **_BEFORE_23,
    }
    nodes = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} {_hardware(spec, kind)}"
        for node, port, kind in zip(spec.compute_nodes, ports[1:], spec.gpu_types(), strict=True)
    ]
    return _text(settings, nodes, spec)


def _hardware(spec: ClusterSpec, gpu_type: str) -> str:
    gres = f" Gres=gpu:{gpu_type}:{spec.gpus}" if spec.gpus else ""
    shape = f"CPUs={spec.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={spec.cpus} ThreadsPerCore=1"
    return f"{shape} RealMemory={spec.memory_mb}{gres} State=UNKNOWN"


def _text(settings: Mapping[str, str], node_lines: Sequence[str], spec: ClusterSpec) -> str:
    merged, extra_lines = _overlay(settings, spec.conf)
    partition = "PartitionName=main Nodes=ALL Default=YES DefaultTime=0:30:00 MaxTime=1-0 State=UP"
    return "\n".join([*(f"{key}={value}" for key, value in merged.items()), *node_lines, partition, *extra_lines, ""])


def _overlay(settings: Mapping[str, str], lines: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Replace settings by ``KEY=VALUE`` lines; NodeName/PartitionName/… lines are added instead."""
    merged = dict(settings)
    by_lower = {key.lower(): key for key in merged}
    added = []
    for line in lines:
        key, _, value = line.partition("=")
        key = key.strip()
        if key.lower() in ("nodename", "partitionname", "nodeset", "downnodes", "include"):
            added.append(line)
        else:
            merged[by_lower.setdefault(key.lower(), key)] = value.strip()
    return merged, added


def render_gres_conf(spec: ClusterSpec) -> str:
    """Return gres.conf: every node has the same fake GPU devices, by the names of their types."""
    if not spec.gpus:
        return ""
    last = f"[0-{spec.gpus - 1}]" if spec.gpus > 1 else "0"
    # gres/gpu needs character devices; without root only existing ones can serve, and the consoles always exist
    device = "/dev/tty" if spec.rootless else "/dev/fakegpu"
    runs = _by_type(spec)
    if len(runs) == 1:
        return f"Name=gpu Type={runs[0][0]} File={device}{last}\n"
    return "".join(f"NodeName={names} Name=gpu Type={kind} File={device}{last}\n" for kind, names in runs)


def render_cgroup_conf(spec: ClusterSpec) -> str:
    """Return cgroup.conf: no cgroups. 22.05 has no such setting; it accepts an empty mount (node.py)."""
    return "CgroupPlugin=cgroup/v1\n" if spec.series < "23" else "CgroupPlugin=disabled\n"


def render_job_container_conf(spec: ClusterSpec) -> str:
    """Return job_container.conf: the place of jobs' own /tmp.

    In 22.05, without ``Dirs``, their /dev/shm is private too.
    """
    if not spec.private_tmp:
        return ""
    dirs = "" if spec.series < "23" else "Dirs=/tmp,/dev/shm\n"
    return f"AutoBasePath=true\nBasePath=/run/job-tmp\n{dirs}"


def render_slurmdbd_conf() -> str:
    """Return slurmdbd.conf: its database is on the controller, behind a Unix socket."""
    return "\n".join(
        [
            "AuthType=auth/munge",
            f"DbdHost={CONTROLLER}",
            "SlurmUser=root",
            "StorageType=accounting_storage/mysql",
            "StorageHost=localhost",
            "StorageUser=root",
            "StorageLoc=slurm_acct_db",
            "LogFile=/var/log/slurm/slurmdbd.log",
            "PidFile=/run/slurm/slurmdbd.pid",
            "DebugLevel=info",
            "",
        ]
    )


def render_hosts(spec: ClusterSpec) -> str:
    """Return /etc/hosts of every node.

    torch's sockets are IPv6 ones and ask for the names of IPv4 addresses in that form. Without a name they log a
    warning for each rank. These names are others than the nodes', which must lead to IPv4 addresses only.
    """
    addresses = {"127.0.0.1": "localhost", **{spec.address(machine): machine for machine in spec.machines}}
    plain = "".join(f"{address} {name}\n" for address, name in addresses.items())
    return plain + "".join(f"::ffff:{address} {name}.mapped\n" for address, name in addresses.items())
