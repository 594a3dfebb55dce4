"""Where agents run and how they are started: on this machine, or on nodes of the allocation through srun."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from resilio_hpc.core.compat import StrEnum
from resilio_hpc.core.errors import CommandError, UsageError
from resilio_hpc.launch.allocation import srun_groups
from resilio_hpc.launch.allocation.restart_policy import Attempts
from resilio_hpc.launch.config import slurm_variables
from resilio_hpc.launch.config.agent_settings import AgentSettings
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.process import bootstrap
from resilio_hpc.launch.process.output_relay import Outputs
from resilio_hpc.launch.rundir.run_claim import part_name
from resilio_hpc.slurm.client import commands, step_environment
from resilio_hpc.slurm.client.allocation import Allocation
from resilio_hpc.slurm.client.runner import run_here

# without these flags srun ends the whole step when one node or task dies (Slurm's manual, srun(1))
SURVIVAL_FLAGS = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
GROUP_VARIABLE = "RESILIO_SRUN_GROUP"  # nodes per srun, for rehearsals: 1 is one srun per node at any size


class Recipe(Struct, frozen=True):
    """How this job's agents are started. ``settings``: for any node; ``binds``: Slurm binds tasks to CPUs."""

    settings: AgentSettings
    allocation: Allocation | None
    by_srun: bool
    binds: bool = False
    clock_ahead_s: float = 0.0  # of slurmctld's clock, on this machine

    def argv(self, nodes: tuple[str, ...], stop: str = "") -> tuple[str, ...]:
        """Return the command that runs an agent on each of the nodes.

        ``stop``: how the launch was told to end, or "".
        """
        told_at = time.time() - self.clock_ahead_s if self.settings.end_time is not None else 0.0
        settings = msgspec.structs.replace(self.settings, stop=stop, told_at=told_at)
        if len(nodes) == 1:
            node = nodes[0]
            settings = msgspec.structs.replace(settings, node=node, address=settings.address or node)
        agent = (*bootstrap.command("launch.agent.agent"), settings.to_json())
        if not self.by_srun or self.allocation is None:
            return agent
        flags = step_environment.gpu_flags(os.environ, nodes[0])
        return (*srun_argv(nodes, self.allocation, self.binds), *flags, *agent)

    def environment(self, ours: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for that command."""
        return slurm_variables.for_agents(ours) if self.by_srun else dict(ours)


class Placement:
    """One process that runs the agent of one node, or the agents of a group of nodes through one srun."""

    def __init__(self, nodes: tuple[str, ...], recipe: Recipe, group: Placement | None = None) -> None:
        self.nodes = nodes
        self.covers_group = len(nodes) > 1
        self.recipe = recipe
        self.group = group  # the group from which its node was taken
        self.attempts = Attempts(recipe.settings.options.join_timeout_s)
        self.process: subprocess.Popen[bytes] | None = None
        self.left = False  # it ended in good order, or its node left the job: it is not started again

    @property
    def label(self) -> str:
        """Return the name for ledger and user."""
        return self.nodes[0] if len(self.nodes) == 1 else ",".join(self.nodes)

    @property
    def done(self) -> bool:
        """Return whether it has ended and will not be started again."""
        return self.process is None and (self.left or self.attempts.given_up)

    def due(self, now: float) -> bool:
        """Return whether it should be started now."""
        return self.process is None and not self.done and now >= self.attempts.next_start

    def start(self, now: float, outputs: Outputs, stop: str = "") -> None:
        """Start the agent (or the srun that runs it), in a session of its own. ``stop``: see ``Recipe.argv``."""
        self.attempts.started(now)
        self.process = subprocess.Popen(
            self.recipe.argv(self.nodes, stop), stdin=subprocess.DEVNULL, stdout=outputs.stdout, stderr=outputs.stderr,
            start_new_session=True, env=self.recipe.environment(os.environ),
        )  # fmt: skip

    def exit_code(self) -> int | None:
        """Return the exit code when the process has just ended, else None."""
        code = self.process.poll() if self.process is not None else None
        if code is not None:
            self.process = None
        return code

    def running_s(self, now: float) -> float:
        """Return how many seconds it has been running; 0 when it does not run."""
        return now - self.attempts.began if self.process is not None else 0.0

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill it for good."""
        self.left = True
        if self.process is not None:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


class SiteMode(StrEnum):
    """How agents are started."""

    BATCH = "batch"  # in the batch script, by the launcher's own sruns
    STEP = "step"  # srun has started the launcher on every node
    LOCAL = "local"  # on this machine, without Slurm


class Site(Struct, frozen=True):
    """Where this launch runs."""

    mode: SiteMode
    job: str
    nodes: tuple[str, ...]
    leads: bool  # this supervisor prints for the user and keeps the chain
    restarts: int = 0  # how often Slurm has requeued the job
    launch: int = 1  # which launch it is, of those of this run of the job in the same run directory

    @property
    def key(self) -> str:
        """Return the name of this launch's part of the run; that of a requeued job is another one."""
        return part_name(self.job, self.restarts, self.launch)


def site_of(options: LaunchOptions, allocation: Allocation | None) -> Site:
    """Return where agents run. Raises UsageError when the allocation is too small."""
    if allocation is None or options.standalone or options.local_nodes:
        count = max(1, options.local_nodes)
        host = socket.gethostname().split(".")[0]
        nodes = (host,) if count == 1 else tuple(f"local{index}" for index in range(count))
        site = Site(SiteMode.LOCAL, f"local-{os.getpid()}-{int(time.time())}", nodes, True)
    elif allocation.in_step:
        leads, restarts = allocation.task == 0, allocation.restart_count
        site = Site(SiteMode.STEP, allocation.job, allocation.nodes, leads, restarts, options.launch)
    else:
        site = Site(SiteMode.BATCH, allocation.job, allocation.nodes, True, allocation.restart_count, options.launch)
    wanted = options.min_nodes
    if len(site.nodes) < wanted:
        where = (
            "this machine is 1 node" if site.mode is SiteMode.LOCAL else f"job {site.job} has {len(site.nodes)} node(s)"
        )
        raise UsageError(f"--nnodes asks for {wanted} node(s), but {where}: ask for more, or lower --nnodes")
    return site


def joining_site(allocation: Allocation | None, local_nodes: int) -> Site:
    """Return where the agents of a joiner run: as any launch's, with their own names where one machine plays nodes."""
    if allocation is None or local_nodes:
        key = f"joiner-{os.getpid()}-{int(time.time())}"
        host = socket.gethostname().split(".")[0]
        return Site(SiteMode.LOCAL, key, tuple(f"j{os.getpid()}n{i}" for i in range(local_nodes)) or (host,), True)
    leads = not allocation.in_step or allocation.task == 0
    return Site(
        SiteMode.STEP if allocation.in_step else SiteMode.BATCH,
        allocation.job,
        allocation.nodes,
        leads,
        allocation.restart_count,
    )


def recipe_of(site: Site, allocation: Allocation | None, settings: AgentSettings, clock_ahead_s: float = 0.0) -> Recipe:
    """Return how this site's agents are started; ``settings``: what does not depend on the site."""
    settings = msgspec.structs.replace(
        settings,
        address="127.0.0.1" if site.mode is SiteMode.LOCAL else "",
        supervisor_pid=0 if site.mode is SiteMode.BATCH else os.getpid(),
    )
    if site.mode is not SiteMode.BATCH:
        return Recipe(settings, allocation, by_srun=False, clock_ahead_s=clock_ahead_s)
    binds = "task/none" not in commands.config_value("TaskPlugin")
    return Recipe(settings, allocation, by_srun=True, binds=binds, clock_ahead_s=clock_ahead_s)


def placements(site: Site, recipe: Recipe, environment: Mapping[str, str]) -> list[Placement]:
    """Return the agents that this supervisor starts."""
    allocation = recipe.allocation
    if site.mode is SiteMode.STEP and allocation is not None:
        return [Placement((allocation.node,), recipe)]
    if site.mode is not SiteMode.BATCH or allocation is None:
        return [Placement((node,), recipe) for node in site.nodes]
    size = _group_size(len(site.nodes), environment)
    if size == 1:
        return [Placement((node,), recipe) for node in site.nodes]
    groups = srun_groups.group_nodes(site.nodes, allocation.cpus_per_node, _domains(), size)
    return [Placement(group, recipe) for group in groups]


def _group_size(nodes: int, environment: Mapping[str, str]) -> int:
    text = environment.get(GROUP_VARIABLE, "")
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"{GROUP_VARIABLE}={text!r} in the environment is not a number of nodes")
        return int(text)
    return 1 if nodes <= srun_groups.SINGLE_UP_TO else srun_groups.GROUP_SIZE


def _domains() -> list[srun_groups.Group]:
    try:
        return srun_groups.parse_topology(run_here(["scontrol", "show", "topology"], commands.TIMEOUT_S).stdout)
    except CommandError:  # most clusters have none
        return []


def srun_argv(nodes: tuple[str, ...], allocation: Allocation, binds: bool) -> tuple[str, ...]:
    """Return the command of one step with one task per node, which sees the whole node. ``binds``: as in Recipe.

    Pure.

    The nodes of a group have the same number of CPUs.
    """
    cpus = dict(zip(allocation.nodes, allocation.cpus_per_node, strict=False)).get(nodes[0], 0)
    return (
        "srun", *SURVIVAL_FLAGS, "--overlap", "--export=ALL", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}", "--chdir=/",  # the working directory may hang
        *((f"--cpus-per-task={cpus}",) if cpus else ()), *(("--cpu-bind=none",) if binds else ()), "--mpi=none",
        "--unbuffered", "--job-name=resilio-agent",
    )  # fmt: skip


def missing_survival_flags(srun_command: list[str]) -> list[str]:
    """Return the flags that a step needs to survive the loss of a node, and this srun command line lacks. Pure."""
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
    """Return the command line of the srun that started this step, where it runs on this node; else None."""
    job = environment.get("SLURM_JOB_ID", "")
    for pid in os.listdir("/proc"):  # noqa: PTH208 - names alone
        if not pid.isdigit():
            continue
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().decode(errors="replace").split("\0")[:-1]
            if not words or os.path.basename(words[0]) != "srun":  # noqa: PTH119
                continue
            with open(f"/proc/{pid}/environ", "rb") as file:
                if f"SLURM_JOB_ID={job}".encode() in file.read().split(b"\0"):
                    return words
        except OSError:
            continue
    return None
