"""A slow node of a dev cluster: what probes compute there is stopped and continued all the time, as a throttled CPU."""

from __future__ import annotations

import os
import signal
import threading

from resilio_hpc.devtools.devcluster import DevCluster, RackMachines

STOPPED_S, WORKING_S = 0.1, 0.03


class ProbeThrottle:
    """Slows the probers of one node, from now on until ``end``."""

    def __init__(self, cluster: DevCluster[RackMachines], node: str) -> None:
        self._cluster, self._node = cluster, node
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():  # each order is a new process
            pids = [p.host_pid for p in self._cluster.machines.pids(self._node) if _probes(p.argv)]
            self._signal(pids, signal.SIGSTOP)
            self._over.wait(STOPPED_S)
            self._signal(pids, signal.SIGCONT)
            self._over.wait(WORKING_S)

    @staticmethod
    def _signal(pids: list[int], number: int) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def end(self) -> None:
        """Let them run again."""
        self._over.set()
        self._thread.join(10.0)


def _probes(argv: tuple[str, ...]) -> bool:
    return any("diagnose.prober" in word for word in argv)
