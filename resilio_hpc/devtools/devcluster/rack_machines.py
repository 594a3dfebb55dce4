"""Machines in their own namespaces: their processes, and the failures that can be rehearsed on them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence

from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.core.process import run
from resilio_hpc.devtools.devcluster import control, shared_directory
from resilio_hpc.devtools.devcluster.messages import MachineState
from resilio_hpc.devtools.devcluster.processes import NodeProcess, init_of, processes_of, wait_until_stopped
from resilio_hpc.devtools.devcluster.services import ENVIRONMENT, own_path
from resilio_hpc.devtools.devcluster.spec import CONTROLLER, ClusterPaths, ClusterSpec

_POLL_S = 0.02
_START_TIMEOUT_S = 20.0


class RackMachines:
    """The machines of one rack: ``ClusterMachines``, with failures."""

    def __init__(self, spec: ClusterSpec, where: ClusterPaths) -> None:
        self._spec = spec
        self._layout = where

    def command(self, machine: str, argv: Sequence[str], *, user: str = "root", cwd: str = "") -> list[str]:
        """Return the host command that runs ``argv`` on a machine, in /shared unless ``cwd`` says otherwise."""
        namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--root"]
        enter = [
            "nsenter",
            "--target",
            str(self._init_pid(machine)),
            *namespaces,
            "--",
            "env",
            f"--chdir={cwd or '/shared'}",
        ]
        become = [] if user == "root" else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        return [*enter, "env", f"--chdir={cwd or '/shared'}", *become, *argv]

    def environment(self, extra: Mapping[str, str] | None = None, user: str = "root") -> dict[str, str]:
        """Return the environment of a command on a machine: a login's, with the caller's commands on its PATH."""
        home = {} if user == "root" else {"HOME": f"/shared/home/{user}", "USER": user}
        return {**ENVIRONMENT, "PATH": own_path(), **home, **(extra or {})}

    def states(self) -> dict[str, MachineState]:
        """Return power and network state of every machine."""
        return {machine.name: machine for machine in control.ask(self._layout, "status")}

    def pids(self, machine: str) -> list[NodeProcess]:
        """Return every process on a machine."""
        return processes_of(self._machine(machine).pid_namespace)

    # ---- failures

    def crash(self, machine: str) -> None:
        """Cut the power: every process is gone and no packet sent; /nvme and logs stay, memory and /tmp do not."""
        control.ask(self._layout, "crash", machine)

    def boot(self, machine: str, timeout_s: float = 20.0) -> None:
        """Power a machine on again; return when its services are started (Slurm may need a moment more)."""
        control.ask(self._layout, "boot", machine)
        self.wait_for_power_on(timeout_s, machine)

    def wait_for_power_on(self, timeout_s: float, machine: str = "") -> None:
        """Wait until a machine (default: every machine) is on and its services are started; raises SlurmError."""
        deadline = time.monotonic() + timeout_s
        while True:
            states = [state for state in control.ask(self._layout, "status") if machine in ("", state.name)]
            for state in states:
                if state.state in ("failed", "off"):
                    raise SlurmError(f"{state.name} did not start: {state.detail}")
            if all(state.state == "up" for state in states):
                return
            if time.monotonic() > deadline:
                waiting = ", ".join(state.name for state in states if state.state != "up")
                raise SlurmError(
                    f"{waiting} still starting after {timeout_s:g} s; logs in {self._layout.state}/machines"
                )
            time.sleep(_POLL_S)

    def partition(self, machine: str) -> None:
        """Pull the machine's network cable; it keeps running, cut off."""
        control.ask(self._layout, "partition", machine)

    def split(self, *machines: str) -> None:
        """Cut these machines off from all others, but not from each other: two halves of a cluster."""
        for machine in machines:
            control.ask(self._layout, "split", machine)

    def heal(self, machine: str) -> None:
        """Plug the machine's network cable in again, where all machines are."""
        control.ask(self._layout, "heal", machine)

    def hang_shared(self, *nodes: str) -> None:
        """Let /shared hang on these nodes (default: all) until ``release_shared``; accesses there wait.

        Raises UsageError unless the cluster was started with ``shared_mount`` fuse or caching.
        """
        self._signal_shared(nodes, signal.SIGSTOP)

    def release_shared(self, *nodes: str) -> None:
        """Let /shared answer again on these nodes (default: all)."""
        self._signal_shared(nodes, signal.SIGCONT)

    def kill_slurmd(self, node: str) -> None:
        """Send SIGKILL to the node's slurmd only; steps and their slurmstepd go on."""
        self._kill_service(node, "slurmd")

    def start_slurmd(self, node: str) -> None:
        """Start the node's slurmd again."""
        if node == CONTROLLER:
            raise UsageError("ctl runs no slurmd; give a compute node")
        self._start_service(node, "slurmd", ["-N", node])

    def kill_slurmctld(self) -> None:
        """Send SIGKILL to slurmctld; running jobs go on, commands fail."""
        self._kill_service(CONTROLLER, "slurmctld")

    def start_slurmctld(self) -> None:
        """Start slurmctld again on its saved state."""
        self._start_service(CONTROLLER, "slurmctld", [])

    # ---- inside

    def _machine(self, machine: str) -> MachineState:
        machines = self.states()
        if machine not in machines:
            raise UsageError(f"no machine {machine!r}; there are {', '.join(machines)}")
        return machines[machine]

    def _init_pid(self, machine: str) -> int:
        state = self._machine(machine)
        init = init_of(state.pid_namespace)
        if init is None:
            raise SlurmError(f"{machine} is {state.state}; power it on with: resilio devcluster boot {machine}")
        return init

    def _signal_shared(self, nodes: Sequence[str], number: signal.Signals) -> None:
        if self._spec.shared_mount == "bind":
            raise UsageError("this cluster's /shared cannot hang: start it with --shared-mount fuse (or caching)")
        for node in nodes or self._spec.compute_nodes:
            for process in self._service_pids(node, shared_directory.DAEMON):
                os.kill(process.host_pid, number)
                if number == signal.SIGSTOP:
                    wait_until_stopped(process.host_pid)

    def _service_pids(self, machine: str, program: str) -> list[NodeProcess]:
        return [process for process in self.pids(machine) if process.program == program]

    def _kill_service(self, machine: str, program: str) -> None:
        victims = self._service_pids(machine, program)
        if not victims:
            raise SlurmError(f"no {program} is running on {machine}")
        for process in victims:
            os.kill(process.host_pid, signal.SIGKILL)
        deadline = time.monotonic() + 5.0
        while self._service_pids(machine, program):
            if time.monotonic() > deadline:
                raise SlurmError(f"{program} on {machine} does not die")
            time.sleep(_POLL_S)

    def _start_service(self, machine: str, program: str, arguments: Sequence[str]) -> None:
        if self._service_pids(machine, program):
            raise SlurmError(f"{program} is already running on {machine}")
        log = "/var/log/slurm/console.log"  # the daemon keeps its output open: it must not hold this process's pipes
        start = ["setsid", "sh", "-c", f'exec "$@" </dev/null >>{log} 2>&1', "sh", f"/usr/sbin/{program}", *arguments]
        run(self.command(machine, start, cwd="/"), _START_TIMEOUT_S, env=self.environment())
