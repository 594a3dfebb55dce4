"""The dev cluster as tests, the demo and the commands use it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from resilio_hpc.core.errors import CommandError, ResilioError, SlurmError, UsageError
from resilio_hpc.core.process import Completed, run
from resilio_hpc.slurm.devcluster import control, image, requirements, slurm_conf
from resilio_hpc.slurm.devcluster.control import NodeProcess
from resilio_hpc.slurm.devcluster.interpreter import host_python
from resilio_hpc.slurm.devcluster.messages import ClusterStatus, MachineState, MachineStatus
from resilio_hpc.slurm.devcluster.services import ENVIRONMENT
from resilio_hpc.slurm.devcluster.spec import (
    CONTROLLER,
    USER,
    USER_ID,
    ClusterSpec,
    Layout,
    base_directory,
    layout,
    validate,
)

_POLL_S = 0.02
_COMMAND_TIMEOUT_S = 20.0


class DevCluster:
    """A running dev cluster. ``with DevCluster.start(nodes=4) as cluster:`` ends it again at the end of the block."""

    def __init__(self, spec: ClusterSpec, where: Layout) -> None:
        self.spec = spec
        self.layout = where

    @classmethod
    def start(
        cls,
        name: str = "dev",
        *,
        nodes: int = 4,
        cpus: int = 8,
        gpus: int = 0,
        slurm: str = "22.05",
        accounting: bool = False,
        binds: Sequence[str | os.PathLike[str]] = (),
        slurmd_timeout_s: int = 5,
        conf: Sequence[str] = (),
        timeout_s: float = 60.0,
    ) -> DevCluster:
        """Start a cluster and return when all its nodes are idle.

        ``conf`` are ``KEY=VALUE`` lines laid over slurm.conf; ``binds`` are host paths shown at the same path on every
        machine. Raises UsageError (impossible request, name taken, packages missing) or SlurmError (did not start, or
        not idle within ``timeout_s``; then nothing of it is left running).
        """
        spec = validate(
            ClusterSpec(
                name=name,
                nodes=nodes,
                cpus=cpus,
                gpus=gpus,
                series=slurm,
                root=str(image.root_of(slurm)),
                accounting=accounting,
                binds=tuple(os.path.realpath(path) for path in binds),
                slurmd_timeout_s=slurmd_timeout_s,
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
            _write_files(spec, where)
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
        """The running cluster called ``name``; raises SlurmError if it is not up."""
        where = layout(name)
        control.ask(where, "status")
        return cls(msgspec.json.decode(where.spec.read_bytes(), type=ClusterSpec), where)

    def __enter__(self) -> DevCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the compute nodes, n1…nN."""
        return self.spec.compute_nodes

    @property
    def shared(self) -> Path:
        """Where the nodes' /shared (the parallel file system) lies on the host."""
        return self.layout.shared

    @property
    def slurm_version(self) -> str:
        """The exact Slurm version, such as 22.05.8."""
        return self.spec.slurm_version

    def nvme(self, node: str) -> Path:
        """Where the node's /nvme lies on the host."""
        return self.layout.nvme(node)

    def log_directory(self, machine: str) -> Path:
        """Where the machine's /var/log/slurm lies on the host."""
        return self.layout.log(machine)

    # ---- commands on machines

    def command(self, machine: str, argv: Sequence[str], *, user: str = "root", cwd: str = "/shared") -> list[str]:
        """The host command that runs ``argv`` on a machine."""
        namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--root"]
        enter = ["nsenter", "--target", str(self._init_pid(machine)), *namespaces, "--", "env", f"--chdir={cwd}"]
        become = [] if user == "root" else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        return [*enter, *become, *argv]

    def environment(self, extra: Mapping[str, str] | None = None, user: str = "root") -> dict[str, str]:
        """Environment of a command on a machine: a login's, and nothing of the host's."""
        home = {} if user == "root" else {"HOME": f"/shared/home/{user}", "USER": user}
        return {**ENVIRONMENT, **home, **(extra or {})}

    def run(
        self,
        machine: str,
        argv: Sequence[str],
        timeout_s: float = _COMMAND_TIMEOUT_S,
        *,
        check: bool = True,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str = "/shared",
        stdin: str = "",
    ) -> Completed:
        """Run a command on a machine (``ctl`` is the login node); raises CommandError as core.process.run does."""
        command = self.command(machine, argv, user=user, cwd=cwd)
        try:
            return run(command, timeout_s, check=check, env=self.environment(env, user), stdin=stdin)
        except CommandError as error:
            why = f"on {machine}: exit code {error.returncode}"
            if error.returncode is None:
                why = f"on {machine}: no answer within {timeout_s:g} s"
            raise CommandError(argv, error.returncode, error.stdout, error.stderr, why=why) from None

    def spawn(
        self,
        machine: str,
        argv: Sequence[str],
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str = "/shared",
    ) -> subprocess.Popen[str]:
        """Start a command on a machine in the background, its output in pipes; the caller waits for it or kills it."""
        return subprocess.Popen(
            self.command(machine, argv, user=user, cwd=cwd),
            env=self.environment(env, user),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def submit(
        self, script: str, options: Sequence[str] = (), *, user: str = "root", env: Mapping[str, str] | None = None
    ) -> int:
        """Submit a batch script's text from the login node, in /shared; returns the job id."""
        argv = ["sbatch", "--parsable", *options]
        done = self.run(CONTROLLER, argv, user=user, env=env, stdin=script)
        return int(done.stdout.split(";")[0])

    def job_state(self, job: int) -> str:
        """The job's state as slurmctld knows it (RUNNING, TIMEOUT, …)."""
        done = self.run(CONTROLLER, ["scontrol", "--oneliner", "show", "job", str(job)])
        fields = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
        return fields["JobState"]

    def wait_for_job(self, job: int, states: Sequence[str], timeout_s: float) -> str:
        """Wait until the job is in one of ``states`` and return it; raises SlurmError with the last state seen."""
        deadline = time.monotonic() + timeout_s
        while (state := self.job_state(job)) not in states:
            if time.monotonic() > deadline:
                raise SlurmError(f"job {job} is {state}, not {'/'.join(states)}, after {timeout_s:g} s")
            time.sleep(0.05)
        return state

    # ---- state

    def machines(self) -> dict[str, MachineState]:
        """Power and network state of every machine."""
        return {machine.name: machine for machine in control.ask(self.layout, "status")}

    def node_states(self) -> dict[str, str]:
        """Slurm's state of every node, such as ``idle`` or ``down*``."""
        done = self.run(CONTROLLER, ["sinfo", "--noheader", "--Node", "--format=%N %T"])
        return dict(line.split() for line in done.stdout.splitlines())

    def wait_for_node(self, node: str, states: Sequence[str], timeout_s: float) -> str:
        """Wait until Slurm gives the node one of ``states`` and return it; raises SlurmError otherwise."""
        deadline = time.monotonic() + timeout_s
        while (state := self.node_states().get(node, "unknown")) not in states:
            if time.monotonic() > deadline:
                raise SlurmError(f"node {node} is {state}, not {'/'.join(states)}, after {timeout_s:g} s")
            time.sleep(_POLL_S)
        return state

    def wait_for_idle(self, nodes: Sequence[str] = (), timeout_s: float = 30.0) -> None:
        """Wait until these nodes (default: all) are idle; raises SlurmError otherwise."""
        wanted = set(nodes or self.nodes)
        deadline = time.monotonic() + timeout_s
        states: dict[str, str] = {}
        while True:
            try:
                states = self.node_states()
            except CommandError as error:  # slurmctld may still be starting
                states = {"slurmctld": str(error)}
            busy = {node: states.get(node, "unknown") for node in wanted if states.get(node) != "idle"}
            if not busy:
                return
            if time.monotonic() > deadline:
                listed = ", ".join(f"{node} {state}" for node, state in sorted(busy.items()))
                raise SlurmError(f"not idle after {timeout_s:g} s: {listed}; logs in {self.layout.state}/machines")
            time.sleep(_POLL_S)

    def status(self) -> ClusterStatus:
        """Everything about the cluster in one struct; asks slurmctld, and says so when it does not answer."""
        problem, slurm_states = "", {}
        try:
            slurm_states = self.node_states()
        except ResilioError as error:
            problem = str(error)
        fields = msgspec.structs.asdict
        machines = [
            MachineStatus(**fields(machine), slurm_state=slurm_states.get(machine.name, ""))
            for machine in self.machines().values()
        ]
        return ClusterStatus(
            name=self.name,
            slurm=self.spec.series,
            slurm_version=self.slurm_version,
            shared=str(self.shared),
            problem=problem,
            machines=machines,
        )

    def pids(self, machine: str) -> list[NodeProcess]:
        """Every process on a machine."""
        return control.processes_of(self._machine(machine).pid_namespace)

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

    def heal(self, machine: str) -> None:
        """Plug the machine's network cable in again."""
        control.ask(self.layout, "heal", machine)

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

    def start_slurmctld(self) -> None:
        """Start slurmctld again on its saved state."""
        self._start_service(CONTROLLER, "slurmctld", [])

    def down(self, timeout_s: float = 20.0) -> None:
        """End the cluster and remove everything of it. Also sweeps what a killed start left."""
        remove(self.name, timeout_s)

    # ---- inside

    def _machine(self, machine: str) -> MachineState:
        machines = self.machines()
        if machine not in machines:
            raise UsageError(f"no machine {machine!r}; there are {', '.join(machines)}")
        return machines[machine]

    def _init_pid(self, machine: str) -> int:
        state = self._machine(machine)
        inits = (
            [p.host_pid for p in control.processes_of(state.pid_namespace) if p.pid == 1] if state.pid_namespace else []
        )
        if not inits:
            raise SlurmError(f"{machine} is {state.state}; power it on with: resilio devcluster boot {machine}")
        return inits[0]

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


def names() -> list[str]:
    """Names of all clusters that have state on this host, running or not."""
    base = base_directory()
    return sorted(entry.name for entry in base.iterdir() if (entry / "lock").exists()) if base.is_dir() else []


def remove(name: str, timeout_s: float = 20.0) -> bool:
    """End a cluster, running, half started or dead, and remove all its files; False if there was nothing."""
    where = layout(name)
    if not where.state.is_dir():
        return False
    try:
        control.ask(where, "stop")
    except SlurmError:
        pass  # no rack: only files are left, or a start is under way, for which we wait below
    with control.claimed(where, timeout_s):
        control.sweep(where)
        where.lock.unlink()
        where.state.rmdir()
    try:
        where.state.parent.rmdir()
    except OSError:
        pass  # other clusters are there
    return True


def _complete(spec: ClusterSpec) -> ClusterSpec:
    """Add what depends on this host: the Slurm installation, its exact version, the Python to show."""
    version = run(["chroot", spec.root, "/usr/sbin/slurmctld", "-V"], 10.0).stdout.split()[-1]
    python = host_python(spec.root)
    binds = tuple(dict.fromkeys([*python.paths, *python.libraries, *spec.binds]))
    return msgspec.structs.replace(spec, slurm_version=version, binds=binds)


def _write_files(spec: ClusterSpec, where: Layout) -> None:
    for machine in spec.machines:
        for directory in (
            where.nvme(machine),
            where.log(machine),
            where.spool(machine),
            where.machine(machine) / "state",
        ):
            directory.mkdir(parents=True)
        where.nvme(machine).chmod(0o1777)
    where.shared.mkdir()
    where.shared.chmod(0o1777)
    home = where.shared / "home" / USER
    home.mkdir(parents=True)
    if not spec.rootless:
        os.chown(home, USER_ID, USER_ID)
    where.etc.mkdir()
    for name, text, mode in (
        ("slurm.conf", slurm_conf.render_slurm_conf(spec), 0o644),
        ("gres.conf", slurm_conf.render_gres_conf(spec), 0o644),
        ("cgroup.conf", slurm_conf.render_cgroup_conf(spec), 0o644),
        ("slurmdbd.conf", slurm_conf.render_slurmdbd_conf(), 0o600),
        ("hosts", slurm_conf.render_hosts(spec), 0o644),
    ):
        (where.etc / name).write_text(text)
        (where.etc / name).chmod(mode)
    where.munge_key.touch(0o400)
    where.munge_key.write_bytes(os.urandom(1024))
    where.spec.write_bytes(msgspec.json.format(msgspec.json.encode(spec)))
