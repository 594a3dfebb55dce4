"""What a drill is: its acts, what the ledger must say, and what many drills have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Partitions whose jobs an urgent job takes the nodes from; the victims get SIGTERM and then this long.
GRACE_S = 15
PREEMPTION = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    f"PartitionName=cancelled Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime={GRACE_S} MaxTime=1-0 State=UP",
    f"PartitionName=requeued Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S} MaxTime=1-0 State=UP",
    "PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=1-0 State=UP",
)


HURTS = (
    *("kill_rank", "kill_agent", "kill_srun", "power_off", "partition", "split", "set_down", "requeue"),
    *("submit_urgent", "stop_rank", "abort_rank", "stop_agent"),
)
"""Acts after which training has to begin again."""
NODE_LOSS = ("power_off", "partition", "split", "stop_agent")
HELPERS = ("agent", "zygote", "store", "saver", "io_worker")  # processes of a node, as their titles name them
LOCAL = "/nvme/local"  # of drills with local checkpoints
HEARTBEAT_S = 5.0  # a node that is silent for so long is lost


@dataclass(frozen=True)
class Act:
    """One thing that is done: ``do`` names it (acts.py), ``to`` whom it meets.

    ``to`` is a role: leader (the controller's node), batch_host, follower and follower2 (members that are neither, as
    far as there are such), apart (half of the members without the leader), with_leader (the leader's half), or "".
    It is done ``after_s`` seconds after the act before it, and not before the ledger has the event ``on`` since then;
    the first one so long after training runs and has committed.
    ``jitter_s``: up to so much later, another part of it in each repeat.
    """

    do: str
    to: str = ""
    after_s: float = 0.0
    on: str = ""
    jitter_s: float = 0.0


@dataclass(frozen=True)
class Drill:
    """One drill. The run must end with ``verdict``, the right number, and what else is named here."""

    name: str
    acts: tuple[Act, ...] = ()  # the first once training runs and has committed; none: the script or Slurm strikes
    kinds: tuple[str, ...] = ()  # the ledger must hold a recovery of one of these kinds
    told: str = ""  # and this event
    hang: str = ""  # and a hang of this kind that was acted on
    blamed: int = -1  # with this rank to blame; -1: the one that was struck
    fault: str = ""  # and the first failure has this class, and is blamed on the rank ``blamed``
    moved: bool = False  # and its node is left to a spare
    traced: bool = False  # and the next round's libraries write what they do
    uncommitted: bool = False  # and a restart from a step of memory alone, which a node fetched from another one
    slow: str = ""  # and ranks that became slower, for this cause; of the rank or node that was struck
    nodes: int = 3  # of the allocation
    nnodes: str = "3"
    spares: int = 0
    steps: int = 1200  # at most: the script ends as soon as the drill has seen enough (enough.py)
    step_s: float = 0.1
    script_arguments: tuple[str, ...] = ()
    launch_arguments: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ("--no-kill",)
    time_limit: int = 30  # minutes
    verdict: str = "completed"
    jobs: int = 1  # this many jobs of the chain must have trained (or parts of a requeued one)
    world_size: int = 0  # at the end; 0: any
    steps_meanwhile: int = 0  # this many steps at least between the first act and the last
    shared_mount: str = "bind"
    torch: bool = False  # ranks need it
    gpus: int = 0  # fake ones of each node
    preemption: bool = False  # the cluster has the partitions of PREEMPTION
    srun: bool = False  # the other way in: one srun for all agents

    @property
    def full_name(self) -> str:
        """The name with the way in."""
        return f"srun: {self.name}" if self.srun else self.name

    @property
    def node_level(self) -> bool:
        """Whether nodes are lost last, by silence, and the run goes on in this job without waiting for others."""
        lost = [act.do for act in self.acts if act.do in HURTS]
        return lost[-1:] != [] and lost[-1] in NODE_LOSS and self.jobs == 1 and (self.spares > 0 or ":" in self.nnodes)


POWER = "power_off"
SPARE: dict[str, Any] = {"nodes": 4, "spares": 1, "world_size": 6}
SHRINK: dict[str, Any] = {"nnodes": "2:3"}
TWO_NODES: dict[str, Any] = {"nodes": 2, "nnodes": "1:2"}
CHAIN: dict[str, Any] = {"launch_arguments": ("--chain",), "jobs": 2}
SLOW: dict[str, Any] = {"steps": 4000}  # a test takes a while where four nodes share two processors
HANGS: dict[str, Any] = {"shared_mount": "fuse", "sbatch": ("--no-kill", "--chdir=/nvme")}
LOST = ("node_lost", "controller_lost", "agent_lost")
