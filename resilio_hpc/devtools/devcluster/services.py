"""The daemons of a dev cluster's machines: how each is started, where it listens, its log."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
"""What daemons and commands on a machine start with."""


def own_path() -> str:
    """Return the PATH of a login: the caller's own commands, such as resilio-launch, and the system's."""
    own = str(Path(sys.executable).parent)
    return ENVIRONMENT["PATH"] if own in ENVIRONMENT["PATH"].split(":") else f"{own}:{ENVIRONMENT['PATH']}"


SLURMCTLD_PORT = 6817
SLURMD_PORT = 6818


@dataclass(frozen=True)
class Service:
    """A daemon: its start command (daemonises), process name, pid file and log, all inside the machine."""

    name: str
    argv: tuple[str, ...]
    pid_file: str
    log: str


MUNGED = Service(
    "munged",
    (
        "/usr/sbin/munged",
        "--key-file=/run/munge.key",
        "--socket=/run/munge/munge.socket.2",
        "--pid-file=/run/munge/munged.pid",
        "--log-file=/var/log/slurm/munged.log",
        "--seed-file=/run/munge/munged.seed",
        "--force",
    ),
    "/run/munge/munged.pid",
    "/var/log/slurm/munged.log",
)
SLURMCTLD = Service("slurmctld", ("/usr/sbin/slurmctld",), "/run/slurm/slurmctld.pid", "/var/log/slurm/slurmctld.log")
SLURMD = Service("slurmd", ("/usr/sbin/slurmd",), "/run/slurm/slurmd.pid", "/var/log/slurm/slurmd.log")
SLURMDBD = Service("slurmdbd", ("/usr/sbin/slurmdbd",), "/run/slurm/slurmdbd.pid", "/var/log/slurm/slurmdbd.log")

BY_NAME = {service.name: service for service in (MUNGED, SLURMCTLD, SLURMD, SLURMDBD)}


def last_complaint(program: str) -> str:
    """Return the last line that looks like an error in the daemon's log or on the console (read on the machine)."""
    service = BY_NAME.get(Path(program).name)
    paths = ([service.log] if service else []) + ["/var/log/slurm/console.log"]
    for path in paths:
        try:
            lines = Path(path).read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in reversed(lines):
            if any(word in line.lower() for word in ("error", "fatal", "cannot", "failed")):
                return line.strip()
    return f"see {paths[0]}"
