"""What agents say to the controller, and to each other when they have none."""

from __future__ import annotations

from resilio_hpc.ckpt.format.manifest import ShardRecord
from resilio_hpc.core.tiers import Tier
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


class Hello(Struct, frozen=True):
    """An agent presents itself, or again after losing its controller. ``silent_s``: how long it heard none."""

    node: Node
    incarnation: str
    epoch: Count
    endpoint: Endpoint
    address: Address
    local_world_size: Slots
    committed: tuple[Count, ...] = ()  # committed steps that this agent knows
    topology: str = ""  # SLURM_TOPOLOGY_ADDR where Slurm gives it
    last: RoundState | None = None
    prepared: Counted = -1  # the highest round number that this agent ever heard of
    silent_s: Seconds = 0.0
    joiner: bool = False  # of another job than the run
    evicted: Slots = 0  # devices of the node that are out of use; local_world_size counts none of them
    disk_port: Port = 0  # where others may read this node's own disk; 0: nowhere

    def __post_init__(self) -> None:
        """Refuse a state from which no count can go on, where it is decoded."""
        if self.last is not None and not self.last.may_be_counted_on:
            raise ValueError("the last state's counts are out of bounds")


class Heartbeat(Struct, frozen=True):
    """Proof of life. ``sent`` is the agent's own clock and comes back in Beat, which renews its lease.

    ``echo`` is the stamp of the newest Beat that it got: until then at least it stood with its controller.
    """

    node: Node
    incarnation: str
    epoch: Count
    sent: Seconds
    round: Count
    echo: Stamp = NEVER
    step: Count = -1  # fewest steps completed by a local rank, -1 when unknown
    step_time: Seconds = 0.0
    ready: bool = True  # ranks would start at once: nothing has to be imported before
    copy_port: Port = 0  # where snapshots can be fetched; 0: nowhere
    attached: bool = False  # a local rank uses resilio_hpc.train: it tells of steps


class RanksStopped(Struct, frozen=True):
    """Every rank of earlier rounds and all their descendants are gone here; answer to Prepare.

    ``known``: the last life of whose start this agent knows, so that ``held`` belongs to that one or to one that led
    to it. ``completed``: the most steps that a rank of that round completed here.
    """

    node: Node
    epoch: Count
    round: Count
    held: tuple[Held, ...]
    known: Life = NO_LIFE
    completed: Count = -1


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
    """A local rank ended wrongly."""

    node: Node
    epoch: Count
    round: Count
    failure: RankFailure


class FirstStep(Struct, frozen=True):
    """Every local rank completed its first step of this round; ``time`` in Unix seconds, of the last of them.

    ``sources``: from which tiers how many of them were restored.
    ``restore_s``: how long the slowest of them took.
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
    """Every local rank exited as it should. ``stopped``: at an agreed stop, so training is not complete.

    ``snapshot``: the newest step of this round that all of them hold in memory; its SnapshotWhole may be late.
    ``attached``: any of them uses resilio_hpc.train."""

    node: Node
    epoch: Count
    round: Count
    stopped: bool
    step: Count
    snapshot: Count
    attached: bool = True


class SnapshotWhole(Struct, frozen=True):
    """Every local rank holds this step in memory. ``blocked_s``: how long training waited, in the slowest of them."""

    node: Node
    epoch: Count
    round: Count
    step: Count
    size_bytes: Count
    blocked_s: Seconds


class StepPersisted(Struct, frozen=True):
    """The node's file of this step is durable. ``record`` is what the manifest will say of it."""

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
    """The manifest of this step is durable, of snapshots that were taken in that round."""

    node: Node
    epoch: Count
    round: Count
    step: Count
    seconds: Seconds


class StopAnswer(Struct, frozen=True):
    """Answer to ProposeStop from all local ranks; ``attached`` 0 when the script does not use resilio_hpc.train."""

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
    """The agent's node goes ``within_s`` seconds, since its own job ends: the run shall go on without it."""

    node: Node
    epoch: Count
    within_s: Seconds


class Goodbye(Struct, frozen=True):
    """The agent leaves for good."""

    node: Node
    epoch: Count
    reason: str


class VotersUpdated(Struct, frozen=True):
    """The agent keeps the membership of this number."""

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
    """A vote: this agent follows no epoch older than ``epoch``. ``silent_s``: how long it heard no controller."""

    node: Node
    epoch: Count
    silent_s: Seconds


ToController = (
    Hello
    | Heartbeat
    | RanksStopped
    | StoreOpened
    | RanksStarted
    | RankFailed
    | FirstStep
    | RanksDone
    | SnapshotWhole
    | StepPersisted
    | PersistFailed
    | ManifestWritten
    | StopAnswer
    | Warned
    | Leaving
    | Goodbye
    | VotersUpdated
    | NoLeader
    | Vote
)
