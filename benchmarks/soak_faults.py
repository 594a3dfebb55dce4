"""The kinds of faults of a soak, and how often each is drawn."""

from __future__ import annotations

from dataclasses import dataclass

from resilio_hpc.drills.kind import Act


@dataclass(frozen=True)
class SoakFault:
    """A kind of fault. ``weight``: how often, of all weights; ``simulated``: what the goodput simulator calls it."""

    name: str
    weight: float
    acts: tuple[Act, ...]
    simulated: str = ""


def _again(act: str, to: str, undo: str, after_s: float) -> tuple[Act, Act]:
    return Act(act, to), Act(undo, to, after_s=after_s)


STRIKES = (
    SoakFault("a rank killed", 5, (Act("kill_rank", "follower"),), "process"),
    SoakFault("a rank of the controller's node killed", 2, (Act("kill_rank", "leader"),), "process"),
    SoakFault("two ranks killed, a moment apart", 2,
           (Act("kill_rank", "follower"), Act("kill_rank", "follower2", jitter_s=0.5)), "process"),
    SoakFault("a rank stopped", 2, (Act("stop_rank", "follower"),), "hang"),
    SoakFault("an agent killed", 2, (Act("kill_agent", "follower"),), "process"),
    SoakFault("the controller's agent killed", 2, (Act("kill_agent", "leader"),), "process"),
    SoakFault("an agent stopped for 15 s", 1, _again("stop_agent", "follower", "continue_agent", 15.0), "node"),
    SoakFault("the controller's agent stopped for 15 s", 1,
           _again("stop_agent", "leader", "continue_agent", 15.0), "node"),
    SoakFault("a node loses power", 2, _again("power_off", "follower", "boot", 8.0), "node"),
    SoakFault("the controller's node loses power", 1, _again("power_off", "leader", "boot", 8.0), "node"),
    SoakFault("a rank killed, then another node loses power", 1,
           (Act("kill_rank", "follower"), Act("power_off", "follower2", jitter_s=0.5),
            Act("boot", "follower2", after_s=8.0)), "node"),
    SoakFault("a node is cut off for 8 s", 1, _again("partition", "follower", "heal", 8.0), "node"),
    SoakFault("the controller's node is cut off for 8 s", 1, _again("partition", "leader", "heal", 8.0), "node"),
    SoakFault("slurmd dead for 5 s", 1, _again("kill_slurmd", "follower", "start_slurmd", 5.0)),
    SoakFault("slurmctld dead for 10 s", 1, _again("kill_slurmctld", "", "start_slurmctld", 10.0)),
    SoakFault("saver stopped", 1, (Act("stop_saver", "follower"),)),
    SoakFault("I/O worker stopped", 1, (Act("stop_io_worker", "leader"),)),
    SoakFault("zygote stopped, a rank killed", 1,
           (Act("stop_zygote", "follower"), Act("kill_rank", "follower", after_s=0.5)), "process"),
    SoakFault("store stopped, a rank killed", 1,
           (Act("stop_store", "leader"), Act("kill_rank", "follower", after_s=0.5)), "process"),
    SoakFault("shared directory hangs for 10 s on a node", 1,
              _again("hang_shared", "follower", "release_shared", 10.0)),
    SoakFault("shared directory hangs for 10 s on all nodes", 1, _again("hang_shared", "", "release_shared", 10.0)),
)  # fmt: skip
