"""The settings that a supervisor passes to an agent at its start: one JSON argument, without secrets."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, MutableMapping

import msgspec

from resilio_hpc.core.errors import LaunchError
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.process import own_address
from resilio_hpc.slurm.client.commands import CLOCKS_AGREE_S, clock_ahead_s

# Exit codes of agents (sysexits.h); srun's own failures have others. 0: it ended in order, whatever the run's verdict.
AGENT_FAILED = 70  # it ran and could not go on
AGENT_LIVES = 75  # another agent of the run runs on this node
LONGEST_START_S = 60.0  # most agents have started by then; if not, the node's clock may be ahead


@dataclasses.dataclass(frozen=True)
class Graces:
    """Graces in seconds.

    ``failure``: for ranks that handle SIGTERM, when another one failed. ``left_running``: for processes that ranks
    which ended well have left running.
    """

    failure: float = 0.0
    left_running: float = 0.0


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``expected``: the allocation's nodes in order; ``supervisor_pid`` > 0: die with that local process.

    ``node`` "": the settings hold for every node of a group; each agent finds its own (``on_this_node``).
    ``begins``: the epoch that the job's part took at its start; whatever another job takes after it ends that part
    (0 for ``join``: a joiner follows any part of the run).
    ``join``: the nodes belong to another job, ``own_job``, and ``job`` is the part of the run that they join.
    """

    options: LaunchOptions
    node: str
    job: str
    expected: tuple[str, ...]
    address: str
    begins: int = 0
    chained: bool = False
    end_time: float | None = None
    told_at: float = 0.0  # when the settings were made, by slurmctld's clock, as ``end_time`` is; 0: outside of Slurm
    supervisor_pid: int = 0
    join: bool = False  # the nodes join a run that another job began
    run_id: str = ""  # by it, an agent finds the directories of an earlier agent on the node
    cwd: str = ""  # where ranks start; "": where the agent does
    stop: str = ""  # "TERM" or "INT": the launch was told to end before this agent was started
    last_words: str = ""  # a file on this machine to which the agent writes how the run ended; "": none
    own_job: str = ""  # a joiner's job, whose time limit is ``end_time`` and whose nodes are ``expected``

    def to_json(self) -> str:
        """Return the settings as one line of JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> AgentSettings:
        """Return the settings of such a line.

        Raises msgspec.MsgspecError for anything that ``to_json`` did not write.
        """
        return msgspec.json.decode(text, type=cls)

    def on_this_node(self, environment: Mapping[str, str]) -> AgentSettings:
        """Return the same settings with the node named.

        Raises LaunchError where Slurm does not tell which one this is.
        """
        if self.node:
            return self
        node = environment.get("SLURMD_NODENAME", "")
        if not node:
            raise LaunchError("SLURMD_NODENAME is not set: an agent of a group of nodes is started by srun")
        return msgspec.structs.replace(self, node=node, address=self.address or node)

    def reachable(self, environment: MutableMapping[str, str]) -> AgentSettings:
        """Return the same settings with an address that other nodes reach, if there may be other nodes.

        Gloo, which goes by the node's name, is told the interface. Raises LaunchError.
        """
        others = [node for node in self.expected if node != self.node]
        if self.address != self.node or not (others or self.join):
            return self
        launcher = environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
        address = own_address.reachable(self.node, [launcher, *others] if launcher else others)
        if address != self.node and (interface := own_address.interface_of(address)):
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        return msgspec.structs.replace(self, address=address)

    def graces(self, environment: Mapping[str, str]) -> Graces:
        """Return how long ranks are waited for. Outside of Slurm, processes that they left running are not ended."""
        in_slurm = "SLURM_JOB_ID" in environment
        return Graces(self.options.failure_grace_s, self.options.stop_grace_s if in_slurm else 0.0)

    def with_what_is_installed(self) -> AgentSettings:
        """Return the settings without torch where this interpreter lacks it: ranks cannot use it then."""
        try:
            found = importlib.util.find_spec("torch")
        except (ImportError, ValueError):
            found = None
        if found is not None or not self.options.torch:
            return self
        return msgspec.structs.replace(self, options=dataclasses.replace(self.options, torch=False))

    def clock_ahead_s(self, now: float, ask: Callable[[], float] = clock_ahead_s) -> float:
        """Return by how many seconds this node's clock, which says ``now``, is ahead of slurmctld's.

        0 unless it looks wrong and Slurm, by ``ask``, says so too.
        """
        looks_right = -CLOCKS_AGREE_S <= now - self.told_at <= LONGEST_START_S
        return 0.0 if not self.told_at or looks_right else ask()
