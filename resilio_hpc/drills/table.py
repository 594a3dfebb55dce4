"""The fault drills as data: what is done to a run, when, and what must become of it."""

from __future__ import annotations

from dataclasses import replace

from resilio_hpc.core.errors import UsageError
from resilio_hpc.drills.kind import CHAIN, HANGS, LOST, POWER, SHRINK, SLOW, SPARE, TWO_NODES, Act, Drill
from resilio_hpc.drills.rank_faults import errors, hangs, hardware, slow_ranks, stopped_helpers


def _ranks_and_agents() -> list[Drill]:
    """Ranks and agents that are killed, end wrongly or hang."""
    return [
        Drill("rank SIGKILL", (Act("kill_rank", "follower"),), ("rank_killed",)),
        Drill("rank SIGABRT", (Act("abort_rank", "follower"),), ("rank_killed", "rank_exception")),
        Drill("rank exception", (), ("rank_exception",), script_arguments=("--raise-at", "60")),
        Drill("rank exits 0 too early", (), ("early_exit",), script_arguments=("--exit-at", "60")),
        Drill("rank SIGSTOP", (Act("stop_rank", "follower"),), ("hang",), hang="absent"),
        *hangs(),
        *stopped_helpers(),
        *errors(),
        *hardware(),
        Drill("agent SIGKILL", (Act("kill_agent", "follower"),), ("agent_lost",)),
        Drill("controller's agent SIGKILL", (Act("kill_agent", "leader"),), ("controller_lost",)),
    ]  # fmt: skip


def _nodes() -> list[Drill]:
    """Nodes that lose power or are cut off."""
    return [
        Drill("node power cut, with a spare", (Act(POWER, "follower"),), LOST, **SPARE),
        # between two saves: a node that is lost while its snapshot is copied has it committed alone
        Drill("node power cut, partner copies", (Act(POWER, "follower", after_s=1.0),), LOST, **SPARE, told="fetched",
              launch_arguments=("--partner-copies",), script_arguments=("--every", "40")),
        # commits are slow, so that memory holds a newer step than the run directory
        Drill("node power cut, replicas in other nodes' memory", (Act(POWER, "follower", after_s=2.0),), LOST, **SPARE,
              told="fetched", uncommitted=True, launch_arguments=("--checkpoint-gb-per-s", "0.001"),
              script_arguments=("--every", "20", "--elements", "1500000")),
        Drill("node power cut, no spare", (Act(POWER, "follower"),), LOST, **SHRINK, world_size=4),
        Drill("two nodes, the other loses power", (Act(POWER, "follower"),), LOST, **TWO_NODES, world_size=2),
        Drill("two nodes, the other is cut off", (Act("partition", "follower"),), LOST, **TWO_NODES, world_size=2),
        Drill("network cut for 2 s", (Act("lose_packets", "follower"), Act("heal", "follower", after_s=2.0)),
              world_size=6),
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
    ]  # fmt: skip


def _tested_nodes() -> list[Drill]:
    """Nodes that are tested while ranks pause."""
    return [
        Drill("healthy nodes are tested",
              (Act("test_nodes"), Act("end_slow", on="pause_ended")), told="paused", world_size=6, **SLOW),
        Drill("a slow node is tested and replaced",
              (Act("slow_node", "follower"), Act("test_nodes"), Act("end_slow", on="regroup")),
              told="regroup", **SPARE, **SLOW),
    ]  # fmt: skip


def _slurm() -> list[Drill]:
    """Slurm's daemons die."""
    return [
        Drill("slurmd dead for a moment",
              (Act("kill_slurmd", "follower"), Act("start_slurmd", "follower", after_s=5.0)), steps_meanwhile=20,
              world_size=6),
        Drill("slurmd dead for long",
              (Act("kill_slurmd", "follower"), Act("start_slurmd", "follower", after_s=24.0)), LOST, **SPARE),
        Drill("slurmctld dead for 20 s, a rank killed inside",
              (Act("save_job"), Act("kill_slurmctld"), Act("kill_rank", "follower", after_s=5.0),
               Act("start_slurmctld", after_s=15.0)),
              ("rank_killed",), steps_meanwhile=100, world_size=6),
    ]  # fmt: skip


def _shared_directory() -> list[Drill]:
    """Shared directories that hang."""
    hang = Act("hang_shared")
    release = Act("release_shared", after_s=60.0)
    return [
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
    ]  # fmt: skip


def _joiners() -> list[Drill]:
    """Nodes of another job join."""
    return [
        Drill("a joiner replaces a lost node",
              (Act("submit_joiner"), Act(POWER, "follower", after_s=1.0, on="spawner_ready")), LOST, world_size=6),
        Drill("grow back with a joiner",
              (Act(POWER, "follower"), Act("submit_joiner", after_s=1.0, on="recovered")), LOST,
              **SHRINK, world_size=6),
    ]  # fmt: skip


def _ends_of_jobs() -> list[Drill]:
    """Jobs that Slurm, a user or an administrator ends."""
    return [
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
    ]  # fmt: skip


def _during_recovery() -> list[Drill]:
    """Second faults, during a recovery."""
    return [
        Drill("two ranks killed, the second during recovery",
              (Act("kill_rank", "follower"), Act("kill_rank", "follower2", jitter_s=0.25)), ("rank_killed",)),
        Drill("an agent killed during a rank's recovery",
              (Act("kill_rank", "follower"), Act("kill_agent", "follower2", jitter_s=0.25)), LOST),
        Drill("the controller's agent killed during a rank's recovery",
              (Act("kill_rank", "follower"), Act("kill_agent", "leader", jitter_s=0.25)), LOST),
        Drill("a rank killed and another node's power cut", (Act("kill_rank", "follower"), Act(POWER, "follower2")),
              LOST, **SPARE),
    ]  # fmt: skip


def _caching() -> list[Drill]:
    """Shared directories whose clients cache."""
    return [
        Drill("caching: rank SIGKILL", (Act("kill_rank", "follower"),), ("rank_killed",), shared_mount="caching"),
        Drill("caching: controller's agent SIGKILL", (Act("kill_agent", "leader"),), ("controller_lost",),
              shared_mount="caching"),
        Drill("caching: time limit", time_limit=1, shared_mount="caching", **CHAIN),
    ]  # fmt: skip


def _both() -> list[Drill]:
    """Drills of both ways in."""
    return [
        *_ranks_and_agents(), *_nodes(), *_tested_nodes(), *_slurm(), *_shared_directory(),
        *_joiners(), *_ends_of_jobs(), *_during_recovery(), *_caching(),
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
    batch = [*_both(), *slow_ranks(), *_batch_only()]
    plain_srun = [replace(drill, srun=True) for drill in (*_both(), *_srun_only())]
    return (*batch, *plain_srun)


DRILLS = _ways_in()


def drill_named(full_name: str) -> Drill:
    """Return the drill of this full name. Raises UsageError."""
    found = next((drill for drill in DRILLS if drill.full_name == full_name), None)
    if found is None:
        raise UsageError(f"no drill {full_name!r}; benchmarks/faults.py --list shows them")
    return found
