"""A process that holds one rendezvous store (torch's TCPStore) and never forks.

Forked from the zygote, or executed (``main``) where there is nothing to fork from. It answers on the spawner's socket
and then closes it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from datetime import timedelta

from resilio_hpc.core import process_title
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.workers.forking.spawner_messages import StoreDied, StoreReady, from_spawner

CONNECT_TIMEOUT = timedelta(seconds=30)  # for a connection to itself, under the name that the ranks will use


def hold(link: socket.socket, round: int, host: str) -> int:
    """Open the store on a free port, report it, and wait to be killed. Return 1 where it could not be opened."""
    process_title.show("store", os.environ.get(process_tree.TOKEN_VARIABLE, ""), "round", str(round))
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        socket.getaddrinfo(host, None)  # torch would repeat a failing look-up until its own time-out
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
    except Exception as error:  # noqa: BLE001 - torch raises many types; the agent hears of each
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        link.send(from_spawner.encode(StoreDied(round, f"no store on {host}: {why}")))
        return 1
    link.send(from_spawner.encode(StoreReady(round, store.port)))
    process_tree.outlive_warnings()
    for number in (signal.SIGTERM, signal.SIGINT):  # from Slurm or the terminal, to the whole step or group
        signal.signal(number, signal.SIG_IGN)
    link.close()  # otherwise the agent would not see the spawner's end of file
    while True:
        signal.pause()


def free_port(round: int, host: str) -> StoreReady | StoreDied:
    """Find a free port for rank 0, where the launcher holds no store."""
    try:
        with socket.create_server((host, 0)) as free:
            return StoreReady(round, free.getsockname()[1])
    except OSError as error:
        return StoreDied(round, f"no free port on {host}: {error.strerror}")


def main() -> None:
    """Entry point of an executed store host; arguments: socket, parent, round, host."""
    fd, parent, round, host = sys.argv[1:]
    process_tree.die_with_parent(int(parent), signal.SIGKILL)
    os.set_inheritable(int(fd), False)
    sys.exit(hold(socket.socket(fileno=int(fd)), int(round), host))
