"""The stage of the demo: a Slurm dev cluster, or this machine alone without root or Slurm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import resilio_hpc
from resilio_hpc.core import process_title
from resilio_hpc.core.errors import SlurmError
from resilio_hpc.core.ledger import Event, read_ledger
from resilio_hpc.devtools.demo.scenario import Scenario
from resilio_hpc.devtools.devcluster import DevCluster, RackMachines

PROJECT = Path(resilio_hpc.__file__).resolve().parents[1]
EXAMPLE = Path(__file__).parent / "examples" / "train_gpt.py"


class DemoStage(Protocol):
    """A place where a launch can be started and hurt."""

    slurm_version: str
    directory: Path  # the path in this process

    def visible(self, path: Path) -> str:
        """Return the job's path for a path of ``directory``."""

    def begin(self, name: str, launch: list[str], chained: bool) -> None:
        """Start a launch; its console output goes to ``directory/name.txt``."""

    def running(self) -> bool:
        """Return whether it, or a successor of it, still runs."""

    def kill_rank(self, node: str, pid: int) -> None:
        """Send SIGKILL to a rank; ``pid``: the node's own number for it."""

    def kill_agent(self, node: str) -> None:
        """Send SIGKILL to a node's agent."""

    def cut_power(self, node: str) -> bool:
        """Cut the power; return False where that is impossible."""

    def repair(self, node: str) -> None:
        """Power a node on again."""

    def close(self) -> None:
        """End everything, leave nothing."""


class SlurmStage:
    """The demo on a dev cluster."""

    def __init__(self, cluster: DevCluster[RackMachines], scenario: Scenario) -> None:
        self._cluster = cluster
        self._scenario = scenario
        self.slurm_version = self._cluster.slurm_version
        self.directory = self._cluster.shared

    def visible(self, path: Path) -> str:
        """Return the path in the job, whose /shared is ``directory``."""
        return str(Path("/shared") / path.relative_to(self.directory))

    def begin(self, name: str, launch: list[str], chained: bool) -> None:
        """Submit a batch job."""
        minutes = self._scenario.time_limit if chained else 60
        script = (
            "#!/bin/bash\n"
            f"#SBATCH --job-name={name} --nodes={self._scenario.nodes} --no-kill --time={minutes}\n"
            f"#SBATCH --output=/shared/{name}.txt --open-mode=append\n"
            f"exec {' '.join(launch)}\n"
        )
        self._cluster.submit(script)

    def running(self) -> bool:
        """Return whether one of the demo's jobs is in the queue."""
        try:
            return bool(self._cluster.run("ctl", ["squeue", "-h", "-o", "%i"], timeout_s=10.0).stdout.strip())
        except SlurmError:
            return True

    def kill_rank(self, node: str, pid: int) -> None:
        """Send SIGKILL to the pid that the node itself uses."""
        for process in self._cluster.machines.pids(node):
            if process.pid == pid:
                os.kill(process.host_pid, signal.SIGKILL)

    def kill_agent(self, node: str) -> None:
        """Send SIGKILL to the agent process."""
        for process in self._cluster.machines.pids(node):
            if process_title.is_agent(process.argv):
                os.kill(process.host_pid, signal.SIGKILL)

    def repair(self, node: str) -> None:
        """Power the node on again."""
        self._cluster.machines.boot(node)

    def cut_power(self, node: str) -> bool:
        """Kill everything on the node, without a packet sent."""
        self._cluster.machines.crash(node)
        return True

    def close(self) -> None:
        """Take the cluster down."""
        self._cluster.down()


class LocalStage:
    """This machine plays all nodes. Without Slurm, there are no power cuts, and time limits are only announced."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        self.slurm_version = ""
        self.directory = directory
        self._scenario = scenario
        self._launch: subprocess.Popen[bytes] | None = None
        self._agents: dict[str, int] = {}

    def visible(self, path: Path) -> str:
        """Return the path as it is."""
        return str(path)

    def begin(self, name: str, launch: list[str], chained: bool) -> None:
        """Start the launcher as a process."""
        environment = {**os.environ, "RESILIO_LOCAL_NODES": str(self._scenario.nodes)}
        with (self.directory / f"{name}.txt").open("ab") as output:
            self._launch = subprocess.Popen(
                launch, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )

    def running(self) -> bool:
        """Whether the launcher runs."""
        return self._launch is not None and self._launch.poll() is None

    def kill_rank(self, node: str, pid: int) -> None:
        """End a rank with SIGKILL."""
        os.kill(pid, signal.SIGKILL)

    def kill_agent(self, node: str) -> None:
        """Send SIGKILL to the agent that the ledger names."""
        os.kill(self._agents[node], signal.SIGKILL)

    def note(self, events: list[Event]) -> None:
        """Take the agents' process ids from events."""
        for event in events:
            if event.kind == "agent":
                self._agents[str(event.fields["node"])] = int(event.fields["pid"])

    def warn(self) -> None:
        """Do what Slurm's --signal=USR2 does."""
        if self._launch is not None:
            self._launch.send_signal(signal.SIGUSR2)

    def repair(self, node: str) -> None:
        """Repair nothing: this machine has no nodes."""

    def cut_power(self, node: str) -> bool:
        """Return False: it needs namespaces."""
        return False

    def close(self) -> None:
        """End the launcher."""
        if self._launch is not None and self._launch.poll() is None:
            self._launch.send_signal(signal.SIGTERM)
            try:
                self._launch.wait(30.0)
            except subprocess.TimeoutExpired:
                os.killpg(self._launch.pid, signal.SIGKILL)
                self._launch.wait()


def binds() -> list[Path]:
    """Return the host's paths that nodes need: the project, the virtual environment, the interpreter behind it."""
    wanted = [PROJECT, Path(sys.prefix)]
    return [path for path in wanted if not any(path != other and path.is_relative_to(other) for other in wanted)]


def why_no_slurm() -> str:
    """Return why a dev cluster cannot be started here; "" when it can."""
    if os.geteuid() != 0:
        return "not root"
    missing = [name for name in ("slurmctld", "slurmd", "munged", "ip") if shutil.which(name, path=path()) is None]
    return f"{', '.join(missing)} not installed" if missing else ""


def path() -> str:
    """Return PATH with the system directories, which a user's may lack."""
    return os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"


def events_of(run_directory: Path) -> list[Event]:
    """Return the ledger so far; empty before it exists."""
    directory = run_directory / "ledger"
    return read_ledger(directory) if directory.is_dir() else []
