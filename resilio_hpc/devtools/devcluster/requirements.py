"""The commands that a dev cluster needs, and the Debian packages that hold them."""

from __future__ import annotations

import os
import shutil

from resilio_hpc.core.errors import UsageError
from resilio_hpc.devtools.devcluster.spec import ClusterSpec

_SLURM = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "munged": "munge",
}
_NAMESPACES = {"ip": "iproute2", "nsenter": "util-linux", "setpriv": "util-linux"}
_SHARED_MOUNT = {"bindfs": "bindfs"}  # runs from this host's root, whichever Slurm the nodes have
_ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}

SLURM_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "slurm-wlm-basic-plugins")
ACCOUNTING_PACKAGES = ("slurmdbd", "mariadb-server")

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def missing_packages(commands: dict[str, str], root: str = "/") -> list[str]:
    """Return packages whose commands cannot be found below ``root``."""
    path = os.pathsep.join(root.rstrip("/") + part for part in SEARCH_PATH.split(":"))
    return sorted({package for command, package in commands.items() if shutil.which(command, path=path) is None})


def check(spec: ClusterSpec) -> None:
    """Raise UsageError with the command that installs them, unless everything that ``spec`` needs is installed."""
    wanted = {} if spec.rootless else dict(_NAMESPACES)
    if spec.root == "/":
        wanted |= _SLURM
        if spec.accounting:
            wanted |= _ACCOUNTING
    missing = missing_packages(wanted)
    if spec.shared_mount != "bind":
        missing += missing_packages(_SHARED_MOUNT)
    if "slurmd" in missing:
        missing.append("slurm-wlm-basic-plugins")
    if missing:
        raise UsageError(
            f"Debian packages missing: apt-get install --no-install-recommends {' '.join(sorted(missing))}"
        )
    if not spec.rootless and os.geteuid() != 0:
        raise UsageError("a dev cluster with namespaces needs root; without root use --rootless")
