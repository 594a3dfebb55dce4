"""Messages from agents to the controller, and between agents that have none."""

from __future__ import annotations

from resilio_hpc.ckpt.format.manifest import ShardRecord
from resilio_hpc.core.tiers import Tier
from resilio_hpc.diagnose.hangs.rank_sight import RankSight, Text, Word
from resilio_hpc.launch.protocol.correctness_messages import ReplicasDigested, ResultJudged
from resilio_hpc.launch.protocol.disk_seen import DiskSeen
from resilio_hpc.launch.protocol.environment_seen import EnvironmentSeen
from resilio_hpc.launch.protocol.membership import NEVER, Membership
from resilio_hpc.launch.protocol.message_parts import (
    NO_LIFE,
    Address,
    Count,
    Counted,
    Endpoint,
    Held,
    Life,
    Node,
    Port,
    RankFailure,
    RoundState,
    Seconds,
    Slots,
    Stamp,
    Struct,
)
from resilio_hpc.launch.protocol.restart_messages import RankRestarted
from resilio_hpc.launch.protocol.time_message import RankTimes


class Hello(Struct, frozen=True):
    """An agent's introduction, also after it lost its controller. ``silent_s``: for how long it heard none."""

    node: Node
    incarnation: str
    epoch: Count
    endpoint: Endpoint
    address: Address
    local_world_size: Slots
    committed: tuple[Count, ...] = ()  # committed steps that this agent knows
    topology: str = ""  # SLURM_TOPOLOGY_ADDR where Slurm gives it
    last: RoundState | None = None
    prepared: Counted = -1  # the highest round number that this agent has heard of
    silent_s: Seconds = 0.0
    joiner: bool = False  # it belongs to another job than the run
    evicted: Slots = 0  # evicted devices of the node, which local_world_size does not count
    disk_port: Port = 0  # where others may read this node's own disk; 0 without one

    def __post_init__(self) -> None:
        """Refuse, when it is decoded, a state whose counters could overflow."""
        if self.last is not None and not self.last.may_be_counted_on:
            raise ValueError("the last state's counts are out of bounds")


class Heartbeat(Struct, frozen=True):
    """Sign of life. ``sent`` is the agent's clock; it comes back in Beat, which renews the lease.

    ``echo``: the stamp of the newest Beat that it got. At least until then it followed its controller.
    """

    node: Node
    incarnation: str
    epoch: Count
    sent: Seconds
    round: Count
    echo: Stamp = NEVER
    step: Count = -1  # fewest steps completed by a local rank, -1 when unknown
    step_time: Seconds = 0.0
    ready: bool = True  # ranks would start at once, since all imports are done
    copy_port: Port = 0  # where snapshots can be fetched; 0 without one
    attached: bool = False  # a local rank uses resilio_hpc.train, so it reports steps
    finishing: bool = False  # a local rank has done its last step, so no more are expected
    calls: Count = -1  # of communication libraries, begun and completed by its ranks; -1 where they are not seen
    section: Word = ""  # what a local rank does beside its steps, such as an evaluation
    memory_level: Count = 0  # of the node: 0 as usual, 1 warning, 2 critical
    memory: Text = ""  # what that is about
    unix: Seconds = 0.0  # the agent's Unix clock when it sent this; 0: not said
    echo_age_s: Seconds = 0.0  # for how long it had the Beat that ``echo`` names


class RanksStopped(Struct, frozen=True):
    """Answer to Prepare: every rank of earlier rounds and all its descendants are gone on this node.

    ``known``: the newest life whose start this agent knows; ``held`` belongs to it or to a life that led to it.
    ``completed``: the most steps that a rank of that round completed here. ``echoes``: its ranks here whose error reads
    like an echo of another one's end.
    """

    node: Node
    epoch: Count
    round: Count
    held: tuple[Held, ...]
    known: Life = NO_LIFE
    completed: Count = -1
    echoes: Count = 0


class StoreOpened(Struct, frozen=True):
    """The rendezvous store of a round listens at this port of the sender."""

    node: Node
    epoch: Count
    round: Count
    port: Port


class RanksStarted(Struct, frozen=True):
    """All local ranks of the round run."""

    node: Node
    epoch: Count
    round: Count
    seconds: Seconds
    mode: str


class RankFailed(Struct, frozen=True):
    """A local rank failed. ``attached``: a rank of the node uses resilio_hpc.train."""

    node: Node
    epoch: Count
    round: Count
    failure: RankFailure
    attached: bool = False


class FirstStep(Struct, frozen=True):
    """Every local rank completed its first step of this round; ``time``: Unix seconds of the last of them.

    ``sources``: tier → how many ranks were restored from it. ``restore_s``: seconds that the slowest took.
    """

    node: Node
    epoch: Count
    round: Count
    step: Count
    time: Seconds
    restored: Count = -1
    sources: tuple[tuple[Tier, Slots], ...] = ()
    restore_s: Seconds = 0.0


class RanksDone(Struct, frozen=True):
    """Every local rank exited with 0. ``stopped``: at an agreed stop, so training is not complete.

    ``snapshot``: the newest step of this round that all of them hold in memory; its SnapshotWhole may come later.
    ``attached``: one of them uses resilio_hpc.train.
    """

    node: Node
    epoch: Count
    round: Count
    stopped: bool
    step: Count
    snapshot: Count
    attached: bool = True


class SnapshotWhole(Struct, frozen=True):
    """Every local rank holds this step in memory. ``blocked_s``: how long training waited in the slowest of them."""

    node: Node
    epoch: Count
    round: Count
    step: Count
    size_bytes: Count
    blocked_s: Seconds


class StepPersisted(Struct, frozen=True):
    """The node's file of this step is durable. ``record``: its entry for the manifest."""

    node: Node
    epoch: Count
    round: Count
    step: Count
    record: ShardRecord


class PersistFailed(Struct, frozen=True):
    """The node's file of this step, or its manifest, could not be written."""

    node: Node
    epoch: Count
    round: Count
    step: Count
    error: str


class ManifestWritten(Struct, frozen=True):
    """The manifest of this step is durable; its snapshots were taken in ``round``."""

    node: Node
    epoch: Count
    round: Count
    step: Count
    seconds: Seconds


class RanksSeen(Struct, frozen=True):
    """Answer to LookAtRanks: what the agent sees of its ranks from outside."""

    node: Node
    epoch: Count
    round: Count
    look: Count
    ranks: tuple[RankSight, ...]


class StopAnswer(Struct, frozen=True):
    """Answer to ProposeStop of all local ranks; ``attached``: 0 when the script does not use resilio_hpc.train."""

    node: Node
    epoch: Count
    round: Count
    target: Count
    accepted: bool
    step: Count
    attached: Count


class Warned(Struct, frozen=True):
    """The node got a warning: "USR2" (time limit near), "TERM" (end now) or "INT" (the user's Ctrl-C)."""

    node: Node
    epoch: Count
    signal: str


class Leaving(Struct, frozen=True):
    """The agent's node leaves within ``within_s`` seconds, since its own job ends: the run goes on without it."""

    node: Node
    epoch: Count
    within_s: Seconds


class Goodbye(Struct, frozen=True):
    """The agent leaves the run."""

    node: Node
    epoch: Count
    reason: str


class VotersUpdated(Struct, frozen=True):
    """The agent has stored the membership of this number."""

    node: Node
    epoch: Count
    number: Count


# agent → agent, to the listening socket of a node that may become controller -------------------------------------


class NoLeader(Struct, frozen=True):
    """This agent has no controller. ``newest``: the highest epoch that it followed or voted for."""

    node: Node
    newest: Counted
    membership: Membership
    silent_s: Seconds


class Vote(Struct, frozen=True):
    """A vote: this agent follows no epoch older than ``epoch``. ``silent_s``: for how long it heard no controller."""

    node: Node
    epoch: Count
    silent_s: Seconds


OfNode = EnvironmentSeen | DiskSeen
OfSteps = RankTimes | ReplicasDigested | ResultJudged | RankRestarted
OfRound = RanksStopped | StoreOpened | StopAnswer | RanksStarted | FirstStep | RanksDone | RanksSeen | OfSteps
ToController = (
    Hello | Heartbeat | RanksStopped | StoreOpened | RanksStarted | RankFailed | FirstStep | RanksDone
    | SnapshotWhole | StepPersisted | PersistFailed | ManifestWritten | StopAnswer | RanksSeen | OfNode | OfSteps
    | Warned | Leaving | Goodbye | VotersUpdated | NoLeader | Vote
)  # fmt: skip
