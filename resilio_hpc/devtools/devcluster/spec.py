"""The parts of a dev cluster and the places of its files: pure data, decided before anything starts."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import msgspec

from resilio_hpc.core.errors import UsageError

CONTROLLER = "ctl"
SLURM_SERIES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
"""Slurm series → the Debian suite whose packages provide it: the oldest, which is this host's own, to the newest."""
HOST_SERIES = min(SLURM_SERIES)
NEWEST_SERIES = max(SLURM_SERIES)

USER = "user"
USER_ID = 20001
"""The ordinary (non-root) account that every node has."""

SHARED_MOUNTS = ("bind", "fuse", "caching")
"""How nodes see /shared: see shared_directory.py."""

MAX_NODES = 200


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One dev cluster: ``nodes`` compute nodes n1…nN and the controller ``ctl``."""

    name: str
    nodes: int = 4
    cpus: int = 8
    memory_mb: int = 32000
    gpus: int = 0
    gpu_type: str = "h100"
    series: str = HOST_SERIES
    root: str = "/"
    slurm_version: str = ""
    accounting: bool = False
    rootless: bool = False
    shared_mount: str = "bind"
    private_tmp: bool = False
    slurmd_timeout_s: int = 10
    conf: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()

    @property
    def compute_nodes(self) -> tuple[str, ...]:
        return tuple(f"n{i}" for i in range(1, self.nodes + 1))

    def gpu_types(self) -> tuple[str, ...]:
        """Return the type of each compute node's GPUs: those of ``gpu_type`` in order, the last for the rest."""
        given = self.gpu_type.split(",")
        return tuple(given[min(place, len(given) - 1)] for place in range(self.nodes))

    @property
    def machines(self) -> tuple[str, ...]:
        """Return the controller and the compute nodes."""
        return (CONTROLLER, *self.compute_nodes)

    def address(self, machine: str) -> str:
        """Return the IPv4 address of a machine: a /24 that follows from the cluster's name."""
        digest = hashlib.sha256(self.name.encode()).digest()
        host = 10 if machine == CONTROLLER else 10 + int(machine[1:])
        return f"10.{64 + digest[0] % 64}.{digest[1]}.{host}"

    def gpu_path(self, index: int) -> str:
        return f"/dev/fakegpu{index}"


class ClusterPaths:
    """Paths of one cluster's state on the host."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.lock = state / "lock"
        self.spec = state / "spec.json"
        self.control = state / "control"
        self.etc = state / "etc"
        self.munge_key = state / "munge.key"
        self.shared = state / "shared"
        self.rack_log = state / "rack.log"

    def machine(self, name: str) -> Path:
        return self.state / "machines" / name

    def nvme(self, name: str) -> Path:
        return self.machine(name) / "nvme"

    def log(self, name: str) -> Path:
        return self.machine(name) / "log"

    def spool(self, name: str) -> Path:
        return self.machine(name) / "spool"


ROOTS = Path("/var/lib/resilio-devcluster")


def base_directory() -> Path:
    """Return where the clusters' state lies: ``$RESILIO_DEVCLUSTER_DIR``, else /var/lib (root) or the user's own."""
    given = os.environ.get("RESILIO_DEVCLUSTER_DIR")
    if given:
        return Path(given)
    if os.geteuid() == 0:
        return ROOTS
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "resilio-devcluster"


def layout(name: str) -> ClusterPaths:
    """Return the layout of the cluster called ``name``."""
    return ClusterPaths(base_directory() / name)


def validate(spec: ClusterSpec) -> ClusterSpec:
    """Return ``spec`` if it can be built; raises UsageError naming what is wrong otherwise."""
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", spec.name):
        raise UsageError(f"cluster name {spec.name!r}: use up to 32 lower-case letters, digits and '-', letter first")
    if not 1 <= spec.nodes <= MAX_NODES:
        raise UsageError(f"{spec.nodes} nodes: a dev cluster has 1 to {MAX_NODES}")
    if spec.cpus < 1 or spec.memory_mb < 1 or not 0 <= spec.gpus <= 64:
        raise UsageError("CPUs and memory must be at least 1, GPUs 0 to 64")
    if not all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name) for name in spec.gpu_type.split(",")):
        raise UsageError(f"--gpu-type {spec.gpu_type!r}: up to 64 letters, digits, '-', '_' and '.'")
    if spec.slurmd_timeout_s < 1:
        raise UsageError(f"--slurmd-timeout {spec.slurmd_timeout_s}: at least 1 s")
    if spec.series not in SLURM_SERIES:
        raise UsageError(f"Slurm {spec.series}: choose from {', '.join(SLURM_SERIES)}")
    if spec.shared_mount not in SHARED_MOUNTS:
        raise UsageError(f"--shared-mount {spec.shared_mount}: choose from {', '.join(SHARED_MOUNTS)}")
    if spec.rootless and spec.shared_mount != "bind":
        raise UsageError("a --rootless cluster has no mounts of its own: --shared-mount needs root")
    if spec.rootless and spec.private_tmp:
        raise UsageError("a --rootless cluster has no mounts of its own: --private-tmp needs root")
    if spec.rootless and (spec.series != HOST_SERIES or spec.accounting or spec.binds):
        raise UsageError("a --rootless cluster runs this host's own Slurm, without accounting and without --bind")
    for line in spec.conf:
        if "=" not in line or "\n" in line:
            raise UsageError(f"--conf {line!r}: give KEY=VALUE")
    for path in spec.binds:
        if not Path(path).is_absolute() or not Path(path).exists():
            raise UsageError(f"--bind {path}: not an existing absolute path")
        if spec.private_tmp and Path(path).is_relative_to("/tmp"):
            raise UsageError(f"--private-tmp hides {path}, since each job sees a /tmp of its own: use another place")
    return spec
