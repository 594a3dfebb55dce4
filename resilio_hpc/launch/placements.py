"""Where agents run and how one is started: on this machine, or on a node of the allocation through srun."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.agent_settings import AgentSettings
from resilio_hpc.launch.options import LaunchOptions
from resilio_hpc.slurm import commands
from resilio_hpc.slurm.allocation import Allocation

# Without these flags srun ends the whole step when one node or task dies (Slurm's manual, srun(1)).
SURVIVAL_FLAGS = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
RESTART_WINDOW_S = 60.0
MAX_RESTARTS_IN_WINDOW = 6


@dataclass
class Placement:
    """One node's agent process, started again when it dies."""

    settings: AgentSettings
    argv: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None
    given_up: bool = False
    starts: list[float] = field(default_factory=list)
    next_start: float = 0.0

    @property
    def node(self) -> str:
        """The node's name."""
        return self.settings.node

    def start(self, now: float) -> None:
        """Start the agent (or the srun that runs it), in a session of its own."""
        self.starts.append(now)
        self.process = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL, start_new_session=True)

    def ended(self, now: float) -> int | None:
        """The exit code when the process has just ended, and plan a restart with growing delays; else None."""
        if self.process is None:
            return None
        code = self.process.poll()
        if code is None:
            return None
        self.process = None
        recent = [start for start in self.starts if now - start < RESTART_WINDOW_S]
        if len(recent) >= MAX_RESTARTS_IN_WINDOW:
            self.given_up = True
        self.next_start = now + 0.05 * 2 ** max(0, len(recent) - 1)
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End it for good."""
        self.given_up = True
        if self.process is not None:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@dataclass(frozen=True)
class Site:
    """Where this launch runs: ``mode`` is "batch" (we start srun), "step" (srun started us) or "local"."""

    mode: str
    job: str
    nodes: tuple[str, ...]
    leads: bool  # this supervisor speaks to the user and keeps the chain
    restarts: int = 0  # how often Slurm has requeued the job

    @property
    def key(self) -> str:
        """The name of this job's part of the run: a requeued job is another part."""
        return f"{self.job}r{self.restarts}" if self.restarts else self.job


def site_of(options: LaunchOptions, allocation: Allocation | None) -> Site:
    """Where agents run. Raises UsageError when the allocation is too small for what was asked."""
    if allocation is None or options.standalone or options.local_nodes:
        count = max(1, options.local_nodes)
        host = socket.gethostname().split(".")[0]
        nodes = (host,) if count == 1 else tuple(f"local{index}" for index in range(count))
        site = Site("local", f"local-{os.getpid()}-{int(time.time())}", nodes, True)
    elif allocation.in_step:
        site = Site("step", allocation.job, allocation.nodes, allocation.task == 0, allocation.restart_count)
    else:
        site = Site("batch", allocation.job, allocation.nodes, True, allocation.restart_count)
    wanted = options.min_nodes
    if len(site.nodes) < wanted:
        where = "this machine is 1 node" if site.mode == "local" else f"job {site.job} has {len(site.nodes)} node(s)"
        raise UsageError(f"--nnodes asks for {wanted} node(s), but {where}: ask for more, or lower --nnodes")
    return site


def placements(
    options: LaunchOptions, site: Site, allocation: Allocation | None, chained: bool, end_time: float | None
) -> list[Placement]:
    """The agents that this supervisor starts."""
    here = allocation.node if allocation is not None and site.mode == "step" else None
    made = []
    binds = site.mode == "batch" and "task/none" not in commands.config_value("TaskPlugin")
    for index, node in enumerate(site.nodes):
        if here is not None and node != here:
            continue
        settings = AgentSettings(
            options=options,
            node=node,
            job=site.key,
            expected=site.nodes,
            address="127.0.0.1" if site.mode == "local" else node,
            chained=chained,
            end_time=end_time,
            supervisor_pid=0 if site.mode == "batch" else os.getpid(),
        )
        command: tuple[str, ...] = (sys.executable, "-m", "resilio_hpc.launch.agent", settings.to_json())
        if site.mode == "batch" and allocation is not None:
            command = (*srun_argv(node, allocation, index, binds), *command)
        made.append(Placement(settings, command))
    return made


def srun_argv(node: str, allocation: Allocation, index: int, binds: bool) -> tuple[str, ...]:
    """One step of one task that sees the whole of its node. ``binds``: this Slurm binds tasks to CPUs. Pure."""
    cpus = allocation.cpus_per_node[index] if index < len(allocation.cpus_per_node) else 0
    return (
        "srun", *SURVIVAL_FLAGS, "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}",
        *((f"--cpus-per-task={cpus}",) if cpus else ()), *(("--cpu-bind=none",) if binds else ()), "--mpi=none",
        "--unbuffered", "--job-name=resilio-agent",
    )  # fmt: skip


def missing_survival_flags(srun_command: list[str]) -> list[str]:
    """Which of the flags that let a step survive the loss of a node an srun command line lacks. Pure."""
    words = srun_command[1:]
    text = " ".join(words)
    missing = []
    if not any(word in ("-k", "--no-kill") for word in words):
        missing.append("--no-kill")
    if not any(form in text for form in ("--kill-on-bad-exit=0", "-K0", "--kill-on-bad-exit 0", "-K 0")):
        missing.append("--kill-on-bad-exit=0")
    if not any(form in text for form in ("--wait=0", "-W0", "--wait 0", "-W 0")):
        missing.append("--wait=0")
    return missing


def our_srun(environment: Mapping[str, str]) -> list[str] | None:
    """The command line of the srun that started our step, where it runs on this node; None otherwise."""
    job = environment.get("SLURM_JOB_ID", "")
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/cmdline", "rb") as file:
                words = file.read().decode(errors="replace").split("\0")[:-1]
            if not words or os.path.basename(words[0]) != "srun":  # noqa: PTH119
                continue
            with open(f"/proc/{entry.name}/environ", "rb") as file:
                if f"SLURM_JOB_ID={job}".encode() in file.read().split(b"\0"):
                    return words
        except OSError:
            continue
    return None
