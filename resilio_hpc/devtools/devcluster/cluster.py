"""The dev cluster for tests, the demo and the commands: run, submit, wait."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from typing_extensions import Self

from resilio_hpc.core.errors import CommandError, ResilioError, SlurmError
from resilio_hpc.core.process import Completed, run
from resilio_hpc.devtools.devcluster import files
from resilio_hpc.devtools.devcluster.machines import ClusterMachines
from resilio_hpc.devtools.devcluster.messages import ClusterStatus, MachineStatus
from resilio_hpc.devtools.devcluster.spec import CONTROLLER, ClusterPaths, ClusterSpec

Kind = TypeVar("Kind", bound=ClusterMachines, covariant=True)
_POLL_S = 0.1  # each look is a command of Slurm
_COMMAND_TIMEOUT_S = 20.0


class DevCluster(Generic[Kind]):
    """A running dev cluster. ``with devcluster.start(nodes=4) as cluster:`` ends it again at the end of the block."""

    def __init__(self, spec: ClusterSpec, where: ClusterPaths, machines: Kind) -> None:
        self.spec = spec
        self.layout = where
        self.machines = machines

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.down()

    def down(self, timeout_s: float = 20.0) -> None:
        """End the cluster and remove everything of it, including what a killed start left."""
        files.remove(self.name, timeout_s)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the names of the compute nodes, n1…nN."""
        return self.spec.compute_nodes

    @property
    def shared(self) -> Path:
        """Return where the nodes' shared directory (/shared; the parallel file system) lies on the host."""
        return self.layout.shared

    @property
    def slurm_version(self) -> str:
        """Return the exact Slurm version, such as 22.05.8."""
        return self.spec.slurm_version

    def run(
        self,
        machine: str,
        argv: Sequence[str],
        timeout_s: float = _COMMAND_TIMEOUT_S,
        *,
        check: bool = True,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        stdin: str = "",
    ) -> Completed:
        """Run a command on a machine (``ctl`` is the login node); raises CommandError as core.process.run does."""
        command = self.machines.command(machine, argv, user=user, cwd=cwd)
        try:
            return run(command, timeout_s, check=check, env=self.machines.environment(env, user), stdin=stdin)
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
        cwd: str = "",
    ) -> subprocess.Popen[str]:
        """Start a command on a machine in the background, its output in pipes; the caller waits for it or kills it."""
        return subprocess.Popen(
            self.machines.command(machine, argv, user=user, cwd=cwd),
            env=self.machines.environment(env, user),
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

    def end_at_time_limit(self, job: int, after_s: int) -> None:
        """Move a running job's time limit to ``after_s`` seconds from now, as root.

        slurmctld looks for expired jobs every 30 s only (compiled in), counted from its start.
        """
        self.run(CONTROLLER, ["scontrol", "update", f"JobId={job}", f"EndTime=now+{after_s}"])

    def job_state(self, job: int) -> str:
        """Return the job's state as slurmctld knows it (RUNNING, TIMEOUT, …)."""
        done = self.run(CONTROLLER, ["scontrol", "--oneliner", "show", "job", str(job)])
        fields = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
        return fields["JobState"]

    def wait_for_job(self, job: int, states: Sequence[str], timeout_s: float) -> str:
        """Wait until the job is in one of ``states`` and return it; raises SlurmError with the last state seen."""
        deadline = time.monotonic() + timeout_s
        while (state := self.job_state(job)) not in states:
            if time.monotonic() > deadline:
                raise SlurmError(f"job {job} is {state}, not {'/'.join(states)}, after {timeout_s:g} s")
            time.sleep(_POLL_S)
        return state

    def wait_until_saved(self, job: int, timeout_s: float = 20.0) -> None:
        """Wait until slurmctld has the job on disk: it saves up to 5 s late, and a kill loses what is not saved."""
        saved = self.layout.machine(CONTROLLER) / "state" / "job_state"
        asked = time.time()
        self.run(CONTROLLER, ["scontrol", "update", f"JobId={job}", "AdminComment=saved"])
        deadline = time.monotonic() + timeout_s
        while not saved.exists() or saved.stat().st_mtime <= asked:
            if time.monotonic() > deadline:
                raise SlurmError(f"slurmctld has not saved job {job} within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def node_states(self) -> dict[str, str]:
        """Return Slurm's state of every node, such as ``idle`` or ``down*``."""
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
        """Return everything about the cluster; asks slurmctld, and says so when it does not answer."""
        problem, slurm_states = "", {}
        try:
            slurm_states = self.node_states()
        except ResilioError as error:
            problem = str(error)
        fields = msgspec.structs.asdict
        machines = [
            MachineStatus(**fields(machine), slurm_state=slurm_states.get(machine.name, ""))
            for machine in self.machines.states().values()
        ]
        return ClusterStatus(
            name=self.name,
            slurm=self.spec.series,
            slurm_version=self.slurm_version,
            shared=str(self.shared),
            problem=problem,
            machines=machines,
        )
