"""The fault drills as data: what is done to a run, when, and what must become of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from resilio_hpc.core.errors import UsageError

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
    *("submit_urgent", "stop_rank", "stop_agent"),
)
"""Acts after which training has to begin anew."""
NODE_LOSS = ("power_off", "partition", "split", "stop_agent")
HELPERS = ("agent", "zygote", "store", "saver", "io_worker")  # processes of a node, as their titles name them
HEARTBEAT_S = 5.0  # a node that is silent for so long is lost


@dataclass(frozen=True)
class Act:
    """One thing that is done: ``do`` names it (drill_acts.py), ``to`` whom it meets.

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
    slow: str = ""  # and ranks that became slower, for this cause; of the rank or node that was struck
    nodes: int = 3  # of the allocation
    nnodes: str = "3"
    spares: int = 0
    steps: int = 1200  # at most: the script ends as soon as the drill has seen enough (drill_enough.py)
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


def _both() -> list[Drill]:
    """Drills of both ways in."""
    hang = Act("hang_shared")
    release = Act("release_shared", after_s=60.0)
    return [
        Drill("rank SIGKILL", (Act("kill_rank", "follower"),), ("rank_killed",)),
        Drill("rank exception", (), ("rank_exception",), script_arguments=("--raise-at", "60")),
        Drill("rank exits 0 too early", (), ("early_exit",), script_arguments=("--exit-at", "60")),
        Drill("rank SIGSTOP", (Act("stop_rank", "follower"),), ("hang",), hang="absent"),
        *_hangs(),
        *_stopped_helpers(),
        *_errors(),
        Drill("agent SIGKILL", (Act("kill_agent", "follower"),), ("agent_lost",)),
        Drill("controller's agent SIGKILL", (Act("kill_agent", "leader"),), ("controller_lost",)),
        Drill("node power cut, with a spare", (Act(POWER, "follower"),), LOST, **SPARE),
        # between two saves: a node that is lost while its snapshot is copied has it committed alone
        Drill("node power cut, partner copies", (Act(POWER, "follower", after_s=1.0),), LOST, **SPARE, told="fetched",
              launch_arguments=("--partner-copies",), script_arguments=("--every", "40")),
        Drill("node power cut, no spare", (Act(POWER, "follower"),), LOST, **SHRINK, world_size=4),
        Drill("two nodes, the other loses power", (Act(POWER, "follower"),), LOST, **TWO_NODES, world_size=2),
        Drill("two nodes, the other is cut off", (Act("partition", "follower"),), LOST, **TWO_NODES, world_size=2),
        Drill("one node cut off", (Act("partition", "follower"),), LOST, **SPARE),
        Drill("cut in halves, controller with slurmctld", (Act("split", "apart"),), LOST,
              nodes=4, nnodes="2:4", world_size=4),
        Drill("cut in halves, controller apart", (Act("split", "with_leader"),), LOST,
              nodes=4, nnodes="2:4", world_size=4),
        Drill("healed cut, then another node is lost",
              (Act("partition", "follower"), Act("heal", "follower", after_s=8.0),
               Act(POWER, "follower2", after_s=1.0, on="agent_joined")), LOST, **SPARE),
        Drill("grow back with a healed node",
              (Act("partition", "follower"), Act("heal", "follower", after_s=8.0)), LOST, **SHRINK, world_size=6),
        Drill("healthy nodes are tested",
              (Act("test_nodes"), Act("end_slow", on="pause_ended")), told="paused", world_size=6, **SLOW),
        Drill("a slow node is tested and replaced",
              (Act("slow_node", "follower"), Act("test_nodes"), Act("end_slow", on="regroup")),
              told="regroup", **SPARE, **SLOW),
        Drill("slurmd dead for a moment",
              (Act("kill_slurmd", "follower"), Act("start_slurmd", "follower", after_s=5.0)), steps_meanwhile=20,
              world_size=6),
        Drill("slurmd dead for long",
              (Act("kill_slurmd", "follower"), Act("start_slurmd", "follower", after_s=24.0)), LOST, **SPARE),
        Drill("slurmctld dead for 20 s, a rank killed inside",
              (Act("save_job"), Act("kill_slurmctld"), Act("kill_rank", "follower", after_s=5.0),
               Act("start_slurmctld", after_s=15.0)),
              ("rank_killed",), steps_meanwhile=100, world_size=6),
        Drill("shared directory hangs for 60 s", (hang, release), **HANGS, steps_meanwhile=300, world_size=6),
        Drill("shared directory hangs for 60 s, a rank killed inside",
              (hang, Act("kill_rank", "follower", after_s=10.0), replace(release, after_s=50.0)), ("rank_killed",),
              **HANGS, steps_meanwhile=250, world_size=6),
        Drill("shared directory hangs for 60 s, controller's agent killed inside",
              (hang, Act("kill_agent", "leader", after_s=10.0), replace(release, after_s=50.0)), LOST,
              **HANGS, **SHRINK),  # fewer ranks restore from the run directory: they wait for it
        Drill("shared directory hangs on one node, its rank killed",
              (Act("hang_shared", "follower"), Act("kill_rank", "follower", after_s=3.0),
               Act("release_shared", "follower", after_s=20.0)), ("rank_killed",),
              **HANGS, steps_meanwhile=100, world_size=6),
        Drill("working directory hangs for 20 s, a rank killed inside",
              (hang, Act("kill_rank", "follower", after_s=3.0), Act("release_shared", after_s=17.0)), ("rank_killed",),
              shared_mount="fuse", steps_meanwhile=100, world_size=6),
        Drill("a joiner replaces a lost node",
              (Act("submit_joiner"), Act(POWER, "follower", after_s=1.0, on="spawner_ready")), LOST, world_size=6),
        Drill("grow back with a joiner",
              (Act(POWER, "follower"), Act("submit_joiner", after_s=1.0, on="recovered")), LOST,
              **SHRINK, world_size=6),
        Drill("preempted, cancel", (Act("submit_urgent"),), sbatch=("--no-kill", "--partition=cancelled"),
              preemption=True, **CHAIN),
        Drill("preempted, requeue", (Act("submit_urgent"),),
              sbatch=("--no-kill", "--partition=requeued", "--requeue"), preemption=True, jobs=2),
        Drill("scontrol requeue", (Act("requeue"),), sbatch=("--no-kill", "--requeue"), jobs=2),
        Drill("a node power cut ends the job", (Act(POWER, "follower"),), sbatch=("--no-requeue",),
              **CHAIN),
        Drill("NODE_FAIL of a job that Slurm ends", (Act("set_down", "follower"),), sbatch=("--no-requeue",),
              **CHAIN),
        Drill("an administrator sets a node down", (Act("set_down", "follower"),), LOST, **SPARE),
        Drill("time limit", time_limit=1, **CHAIN),
        Drill("scancel", (Act("scancel"),), verdict="cancelled", launch_arguments=("--chain",)),
        Drill("scancel -s KILL", (Act("scancel_kill"),), verdict="cancelled", launch_arguments=("--chain",)),
        Drill("two ranks killed, the second during recovery",
              (Act("kill_rank", "follower"), Act("kill_rank", "follower2", jitter_s=0.25)), ("rank_killed",)),
        Drill("an agent killed during a rank's recovery",
              (Act("kill_rank", "follower"), Act("kill_agent", "follower2", jitter_s=0.25)), LOST),
        Drill("the controller's agent killed during a rank's recovery",
              (Act("kill_rank", "follower"), Act("kill_agent", "leader", jitter_s=0.25)), LOST),
        Drill("a rank killed and another node's power cut", (Act("kill_rank", "follower"), Act(POWER, "follower2")),
              LOST, **SPARE),
        Drill("caching: rank SIGKILL", (Act("kill_rank", "follower"),), ("rank_killed",), shared_mount="caching"),
        Drill("caching: controller's agent SIGKILL", (Act("kill_agent", "leader"),), ("controller_lost",),
              shared_mount="caching"),
        Drill("caching: time limit", time_limit=1, shared_mount="caching", **CHAIN),
    ]  # fmt: skip


def _hangs() -> list[Drill]:
    """Ranks that live and do not go on."""
    waits = {"launch_arguments": ("--hang-timeout", "5")}  # they might still go on by themselves
    absent = {"hang": "absent", "blamed": 1, **waits}
    return [
        Drill("deadlock of two groups", (), ("hang",), hang="deadlock", script_arguments=("--hang", "deadlock")),
        Drill("mismatched collective", (), ("hang",), hang="mismatch", blamed=1,
              script_arguments=("--hang", "mismatch")),
        Drill("endless loop", (), ("hang",), script_arguments=("--hang", "loop"), **absent),
        Drill("Python's lock held for ever", (), ("hang",), script_arguments=("--hang", "lock"), **absent),
        Drill("rank sleeps for ever", (), ("hang",), script_arguments=("--hang", "sleep"), **absent),
        Drill("rank sleeps before init_process_group", (), ("hang",),
              script_arguments=("--hang-before-start", "sleep"), **absent),
        Drill("rank stopped before init_process_group", (), ("hang",), hang="absent", blamed=1,
              script_arguments=("--hang-before-start", "stop")),
        # it is reported, and no rank is restarted: another one would wait there, too
        Drill("a rank reads from a shared directory that hangs for 15 s",
              (Act("hang_shared"), Act("release_shared", after_s=15.0)), **HANGS, told="hang", world_size=6,
              script_arguments=("--reads",)),
    ]  # fmt: skip


def _stopped_helpers() -> list[Drill]:
    """Stop a process of the launcher's own (SIGSTOP), or hang its disk, while it is needed."""
    told = {"told": "helper_stopped", "world_size": 6}

    def twice(helper: str, to: str) -> tuple[Act, Act]:
        return Act(f"stop_{helper}", to), Act(f"stop_{helper}", to, on="helper_stopped")

    return [
        # it is continued; the second time it is killed, while all ranks wait for their last checkpoint
        Drill("saver stopped, twice", twice("saver", "follower"), **told),
        Drill("I/O worker stopped, twice", twice("io_worker", "leader"), **told),
        Drill("zygote stopped, a rank killed meanwhile",
              (Act("stop_zygote", "follower"), Act("kill_rank", "follower", after_s=0.5)),
              ("rank_killed", "rank_exception"), **told),  # its peers may report first
        Drill("rendezvous store stopped, a rank killed meanwhile",
              (Act("stop_store", "leader"), Act("kill_rank", "follower", after_s=0.5)), ("rank_killed",), world_size=6),
        Drill("agent stopped", (Act("stop_agent", "follower"),), LOST, **SPARE),
        Drill("controller's agent stopped", (Act("stop_agent", "leader"),), LOST, **SHRINK),
        Drill("shared directory hangs at the last checkpoint",
              (Act("hang_shared", "follower", after_s=0.2), Act("release_shared", "follower", after_s=20.0)), **HANGS,
              world_size=6, steps=120),
    ]  # fmt: skip


def _errors() -> list[Drill]:
    """Errors of GPUs and NCCL: whose fault, and what follows."""
    failed = ("rank_exception",)
    return [
        Drill("GPU out of memory", (), failed, fault="oom_gpu", blamed=1, script_arguments=("--fail", "gpu-memory")),
        Drill("GPU memory held by another process", (), failed, fault="oom_gpu", blamed=1,
              script_arguments=("--fail", "gpu-memory-of-others")),
        Drill("GPU with an uncorrectable error, with a spare", (), failed, fault="gpu_hardware", blamed=1, moved=True,
              script_arguments=("--fail", "gpu-sick"), **SPARE),
        Drill("NCCL error", (), failed, fault="unknown", blamed=1, traced=True, script_arguments=("--fail", "nccl")),
        Drill("NCCL watchdog ends a rank", (), ("rank_killed",), fault="unknown", blamed=1, traced=True,
              script_arguments=("--fail", "nccl-watchdog")),
        Drill("the same mistake in each life", fault="user_code", blamed=1, verdict="no_progress",
              script_arguments=("--fail", "bug")),
    ]  # fmt: skip


def _slow() -> list[Drill]:
    """Ranks that train, but slower; the report must name the right rank and cause."""
    learned_s = 60.0  # what is usual must be known
    work = ("--work-seconds", "0.02", "--every", "50")
    small: dict[str, Any] = {"nodes": 2, "nnodes": "2", "steps": 6000, "step_s": 0.05}
    return [
        Drill("rank throttled by its control group", (Act("throttle_rank", "follower", after_s=learned_s),), **small,
              slow="cpu_throttled", script_arguments=work),
        Drill("slow network card", (Act("slow_link", "follower", after_s=learned_s),), **small,
              launch_arguments=("--heartbeat-timeout", "20"), slow="link",
              script_arguments=(*work, "--elements", "400000")),
        Drill("slow data loader", (Act("slow_loader", "follower", after_s=learned_s),), **small,
              slow="data_loader", script_arguments=(*work, "--loader", "/nvme/loader.slow")),
    ]  # fmt: skip


def _batch_only() -> list[Drill]:
    """Where agents have an srun each, the run outlives the batch host and any srun."""
    return [
        Drill("srun SIGKILL", (Act("kill_srun", "follower"),), LOST),
        Drill(
            "a lost node boots again", (Act(POWER, "follower"), Act("boot", "follower", after_s=6.0)), LOST, **SHRINK
        ),
        Drill("batch host power cut", (Act(POWER, "batch_host"),), LOST, **SHRINK),  # it surely takes part
        Drill("two nodes, the controller's loses power", (Act(POWER, "leader"),), LOST, **TWO_NODES, world_size=2),
        Drill("two nodes, the controller's is cut off", (Act("partition", "leader"),), LOST, **TWO_NODES, world_size=2),
        Drill("caching: controller's power cut", (Act(POWER, "leader"),), LOST, shared_mount="caching", **SPARE),
    ]


def _srun_only() -> list[Drill]:
    """Where one srun holds all agents, its loss ends the job, and the next one of the chain carries on."""
    return [
        Drill("srun SIGKILL, chain", (Act("kill_srun"),), **CHAIN),
        Drill(
            "a lost node boots again, chain",  # srun ends its step when the node comes back ("Connection reset")
            (Act(POWER, "follower"), Act("boot", "follower", after_s=6.0)),
            LOST,
            **SHRINK,
            launch_arguments=("--chain",),
        ),
        Drill("batch host power cut, chain", (Act(POWER, "batch_host"),), **CHAIN),
    ]


def _ways_in() -> tuple[Drill, ...]:
    batch = [*_both(), *_slow(), *_batch_only()]
    plain_srun = [replace(drill, srun=True) for drill in (*_both(), *_srun_only())]
    return (*batch, *plain_srun)


DRILLS = _ways_in()


def drill_named(full_name: str) -> Drill:
    """Return the drill of this full name. Raises UsageError."""
    found = next((drill for drill in DRILLS if drill.full_name == full_name), None)
    if found is None:
        raise UsageError(f"no drill {full_name!r}; benchmarks/faults.py --list shows them")
    return found
