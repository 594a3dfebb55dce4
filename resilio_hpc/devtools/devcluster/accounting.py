"""MariaDB and slurmdbd on the controller; runs in the controller's init before slurmctld starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from resilio_hpc.devtools.devcluster import services
from resilio_hpc.devtools.devcluster.spec import CONTROLLER

_DATA = Path("/var/lib/slurm/mariadb")  # on the controller's disk: accounting survives a power cut
_SOCKET = Path("/run/mysqld/mysqld.sock")
_SERVER = (
    "/usr/sbin/mariadbd",
    "--no-defaults",
    "--user=root",
    f"--datadir={_DATA}",
    f"--socket={_SOCKET}",
    "--skip-networking",
    "--innodb-buffer-pool-size=32M",
    "--innodb-log-file-size=8M",
    "--innodb-flush-log-at-trx-commit=2",
    "--skip-log-bin",
)
_INSTALL = (
    "/usr/bin/mariadb-install-db",
    "--no-defaults",
    "--user=root",
    f"--datadir={_DATA}",
    "--skip-test-db",
    "--auth-root-authentication-method=socket",  # slurmdbd is root there, and needs no password
    "--innodb-log-file-size=8M",
    "--innodb-buffer-pool-size=32M",
)
_TIMEOUT_S = 30.0


def start(cluster: str, run: Callable[[tuple[str, ...]], None], background: Callable[[tuple[str, ...]], int]) -> None:
    """Start both and register ``cluster``; ``run`` waits for its command, ``background`` does not."""
    _SOCKET.parent.mkdir(mode=0o700)
    if not (_DATA / "mysql").is_dir():
        run(_INSTALL)
    background(_SERVER)
    _wait_for(_SOCKET.exists, "mariadbd")
    run(services.SLURMDBD.argv)
    try:
        run(
            ("/usr/bin/timeout", str(_TIMEOUT_S), "/bin/sh", "-c", _REGISTER, "sh", cluster, services.SLURMDBD.pid_file)
        )
    except OSError:
        raise OSError(f"slurmdbd does not answer: {services.last_complaint('slurmdbd')}") from None


# sacctmgr fails until slurmdbd has made its tables; adding a cluster that is known already prints so and fails
_REGISTER = """
until sacctmgr --noheader list cluster >/dev/null 2>&1; do kill -0 "$(cat "$2")" || exit 1; sleep 0.05; done
sacctmgr --noheader list cluster format=cluster | grep -qw -- "$1" || sacctmgr --immediate add cluster "$1"
"""


def _wait_for(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not ready():
        if time.monotonic() > deadline:
            raise OSError(f"{what} on {CONTROLLER} is not ready after {_TIMEOUT_S:g} s")
        time.sleep(0.01)
