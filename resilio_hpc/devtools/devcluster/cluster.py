"""The dev cluster as tests, the demo and the commands use it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.core.process import run
from resilio_hpc.devtools.devcluster import control, files, image, requirements, shared_directory, slurm_conf
from resilio_hpc.devtools.devcluster.commands import SlurmCommands
from resilio_hpc.devtools.devcluster.interpreter import host_python
from resilio_hpc.devtools.devcluster.messages import MachineState
from resilio_hpc.devtools.devcluster.processes import NodeProcess, init_of, processes_of, wait_until_stopped
from resilio_hpc.devtools.devcluster.services import ENVIRONMENT
from resilio_hpc.devtools.devcluster.spec import (
    CONTROLLER,
    HOST_SERIES,
    ClusterSpec,
    layout,
    validate,
)

_POLL_S = 0.02


class DevCluster(SlurmCommands):
    """A running dev cluster. ``with DevCluster.start(nodes=4) as cluster:`` ends it again at the end of the block."""

    @classmethod
    def start(
        cls,
        name: str = "dev",
        *,
        nodes: int = 4,
        cpus: int = 8,
        gpus: int = 0,
        gpu_type: str = "fake",
        slurm: str = HOST_SERIES,
        accounting: bool = False,
        binds: Sequence[str | os.PathLike[str]] = (),
        slurmd_timeout_s: int = 10,
        shared_mount: str = "bind",
        private_tmp: bool = False,
        conf: Sequence[str] = (),
        timeout_s: float = 60.0,
    ) -> DevCluster:
        """Start a cluster and return when all its nodes are idle.

        ``conf`` are ``KEY=VALUE`` lines laid over slurm.conf; ``binds`` are host paths shown at the same path on every
        machine; ``gpu_type`` is what Slurm calls the fake GPUs; ``shared_mount`` is how nodes see /shared
        (shared_directory.py); ``private_tmp`` gives each
        job a /tmp and a /dev/shm of its own (job_container/tmpfs). Raises UsageError (impossible request,
        name taken, packages missing) or SlurmError (did not start, or not idle within ``timeout_s``; then nothing of it
        is left running).
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
        return cls._start(spec, timeout_s)

    @classmethod
    def _start(cls, spec: ClusterSpec, timeout_s: float) -> DevCluster:
        where = layout(spec.name)
        requirements.check(spec)
        image.ensure(spec.series)
        with control.claimed(where) as lock:
            control.sweep(where)
            spec = _complete(spec)
            files.write_files(spec, where, slurm_conf.render_slurm_conf(spec))
            cluster = cls(spec, where)
            with control.start_rack(where, lock) as leash:
                try:
                    cluster._wait_for_power_on(timeout_s)
                    cluster.wait_for_idle(spec.compute_nodes, timeout_s)
                except BaseException:
                    leash.close()
                    raise
                leash.sendall(b"keep\n")
        return cluster

    @classmethod
    def find(cls, name: str = "dev") -> DevCluster:
        """Return the running cluster called ``name``; raises SlurmError if it is not up."""
        where = layout(name)
        control.ask(where, "status")
        return cls(msgspec.json.decode(where.spec.read_bytes(), type=ClusterSpec), where)

    def __enter__(self) -> DevCluster:
        return self

    def nvme(self, node: str) -> Path:
        """Where the node's /nvme lies on the host."""
        return self.layout.nvme(node)

    def log_directory(self, machine: str) -> Path:
        """Where the machine's /var/log/slurm lies on the host."""
        return self.layout.log(machine)

    # ---- commands on machines

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
        """Environment of a command on a machine: a login's, and nothing of the host's."""
        home = {} if user == "root" else {"HOME": f"/shared/home/{user}", "USER": user}
        return {**ENVIRONMENT, **home, **(extra or {})}

    # ---- state

    def machines(self) -> dict[str, MachineState]:
        """Power and network state of every machine."""
        return {machine.name: machine for machine in control.ask(self.layout, "status")}

    def pids(self, machine: str) -> list[NodeProcess]:
        """Every process on a machine."""
        return processes_of(self._machine(machine).pid_namespace)

    # ---- failures

    def crash(self, machine: str) -> None:
        """Power cut: every process gone and no packet sent; /nvme and logs stay, memory and /tmp do not."""
        control.ask(self.layout, "crash", machine)

    def boot(self, machine: str, timeout_s: float = 20.0) -> None:
        """Power a machine on again; returns when its services are started (Slurm may need a moment more)."""
        control.ask(self.layout, "boot", machine)
        self._wait_for_power_on(timeout_s, machine)

    def partition(self, machine: str) -> None:
        """Pull the machine's network cable; it keeps running, cut off."""
        control.ask(self.layout, "partition", machine)

    def split(self, *machines: str) -> None:
        """Cut these machines off from all others, but not from each other: two halves of a cluster."""
        for machine in machines:
            control.ask(self.layout, "split", machine)

    def heal(self, machine: str) -> None:
        """Plug the machine's network cable in again, where all machines are."""
        control.ask(self.layout, "heal", machine)

    def hang_shared(self, *nodes: str) -> None:
        """Let /shared hang on these nodes (default: all) until ``release_shared``; what touches it there waits.

        Raises UsageError unless the cluster was started with ``shared_mount`` fuse or caching.
        """
        self._signal_shared(nodes, signal.SIGSTOP)

    def release_shared(self, *nodes: str) -> None:
        """Let /shared answer again on these nodes (default: all)."""
        self._signal_shared(nodes, signal.SIGCONT)

    def kill_slurmd(self, node: str) -> None:
        """SIGKILL the node's slurmd only; steps and their slurmstepd go on."""
        self._kill_service(node, "slurmd")

    def start_slurmd(self, node: str) -> None:
        """Start the node's slurmd again."""
        if node == CONTROLLER:
            raise UsageError("ctl runs no slurmd; give a compute node")
        self._start_service(node, "slurmd", ["-N", node])

    def kill_slurmctld(self) -> None:
        """SIGKILL slurmctld; running jobs go on, commands fail."""
        self._kill_service(CONTROLLER, "slurmctld")

    def wait_until_saved(self, job: int, timeout_s: float = 20.0) -> None:
        """Wait until slurmctld has the job on disk: it saves up to 5 s late, and a kill loses what it had not."""
        saved = self.layout.machine(CONTROLLER) / "state" / "job_state"
        asked = time.time()
        self.run(CONTROLLER, ["scontrol", "update", f"JobId={job}", "AdminComment=saved"])
        deadline = time.monotonic() + timeout_s
        while not saved.exists() or saved.stat().st_mtime <= asked:
            if time.monotonic() > deadline:
                raise SlurmError(f"slurmctld has not saved job {job} within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def start_slurmctld(self) -> None:
        """Start slurmctld again on its saved state."""
        self._start_service(CONTROLLER, "slurmctld", [])

    def down(self, timeout_s: float = 20.0) -> None:
        """End the cluster and remove everything of it. Also sweeps what a killed start left."""
        files.remove(self.name, timeout_s)

    # ---- inside

    def _machine(self, machine: str) -> MachineState:
        machines = self.machines()
        if machine not in machines:
            raise UsageError(f"no machine {machine!r}; there are {', '.join(machines)}")
        return machines[machine]

    def _init_pid(self, machine: str) -> int:
        state = self._machine(machine)
        init = init_of(state.pid_namespace)
        if init is None:
            raise SlurmError(f"{machine} is {state.state}; power it on with: resilio devcluster boot {machine}")
        return init

    def _wait_for_power_on(self, timeout_s: float, machine: str = "") -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            states = [state for state in control.ask(self.layout, "status") if machine in ("", state.name)]
            for state in states:
                if state.state in ("failed", "off"):
                    raise SlurmError(f"{state.name} did not start: {state.detail}")
            if all(state.state == "up" for state in states):
                return
            if time.monotonic() > deadline:
                waiting = ", ".join(state.name for state in states if state.state != "up")
                raise SlurmError(
                    f"{waiting} still starting after {timeout_s:g} s; logs in {self.layout.state}/machines"
                )
            time.sleep(_POLL_S)

    def _signal_shared(self, nodes: Sequence[str], number: signal.Signals) -> None:
        if self.spec.shared_mount == "bind":
            raise UsageError("this cluster's /shared cannot hang: start it with --shared-mount fuse (or caching)")
        for node in nodes or self.nodes:
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
        log = "/var/log/slurm/console.log"  # the daemon keeps its output open: it must not hold our pipes
        start = ["setsid", "sh", "-c", f'exec "$@" </dev/null >>{log} 2>&1', "sh", f"/usr/sbin/{program}", *arguments]
        self.run(machine, start, cwd="/")


def _complete(spec: ClusterSpec) -> ClusterSpec:
    """Add what depends on this host: the Slurm installation, its exact version, the Python to show."""
    version = run(["chroot", spec.root, "/usr/sbin/slurmctld", "-V"], 10.0).stdout.split()[-1]
    python = host_python(spec.root)
    binds = tuple(dict.fromkeys([*python.paths, *python.libraries, *spec.binds]))
    return msgspec.structs.replace(spec, slurm_version=version, binds=binds)
