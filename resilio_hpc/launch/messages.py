"""What agents and the controller say to each other. Plain data; every message carries the epoch it belongs to.

Words: a **round** is one life of all ranks (one rendezvous); an **epoch** is one controller's term. An **incarnation**
tells an agent process from its predecessor on the same node.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from resilio_hpc.core.wire import Codec
from resilio_hpc.launch.quorum import NEVER, Membership
from resilio_hpc.launch.roster import Entry, Roster


class Struct(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of what travels: immutable, tagged by its name, and strict."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node's place in a round. Its ranks are ``first_rank … first_rank + local_world_size - 1``."""

    node: str
    node_rank: int
    address: str
    local_world_size: int
    first_rank: int


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole snapshot in a node's memory."""

    rank: int
    step: int
    world_size: int


class RestorePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which copy all ranks of a round restore: ``source`` is "memory" or "committed"."""

    source: str
    step: int


class RankFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a rank ended wrongly. ``time``: Unix seconds; ``bad_copy``: with kind restore_failed, what not to restore.

    ``kind``: exit, signal, early_exit, restore_failed; or, not the rank's own doing: spawn, spawner_lost, store_lost,
    lease_ended.
    """

    node: str
    rank: int
    local_rank: int
    kind: str
    time: float
    exit_code: int | None = None
    signal: int | None = None
    message: str = ""
    traceback: str = ""
    bad_copy: RestorePoint | None = None


class RoundState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Soft state that agents keep for the controller and give back to the next one."""

    epoch: int
    round: int
    world: Roster  # the members in the order of their node ranks, each with the number of its ranks
    restarts: int
    without_progress: int
    committed: tuple[int, ...]
    lost: tuple[str, ...] = ()
    bad_copies: tuple[RestorePoint, ...] = ()
    left: tuple[str, ...] = ()
    steps_reported: bool = False
    losses: tuple[tuple[str, int], ...] = ()  # how often each node was lost

    @property
    def members(self) -> tuple[Member, ...]:
        """The members one by one."""
        return members_of(self.world)


@lru_cache(maxsize=16)
def members_of(world: Roster) -> tuple[Member, ...]:
    """A round's members from the form in which they travel."""
    members: list[Member] = []
    first_rank = 0
    for node_rank, (node, address, slots) in enumerate(world.entries()):
        members.append(Member(node, node_rank, address, slots, first_rank))
        first_rank += slots
    return tuple(members)


def world_of(members: Sequence[Member]) -> Roster:
    """The form in which a round's members travel."""
    return Roster.of([Entry(member.node, member.address, member.local_world_size) for member in members])


# agent → controller ---------------------------------------------------------------------------------------------


class Hello(Struct, frozen=True):
    """An agent presents itself, or again after losing its controller. ``silent_s``: how long it heard none."""

    node: str
    incarnation: str
    epoch: int
    endpoint: str
    address: str
    local_world_size: int
    committed: tuple[int, ...] = ()  # committed steps that this agent knows
    topology: str = ""  # SLURM_TOPOLOGY_ADDR where Slurm gives it
    last: RoundState | None = None
    prepared: int = -1  # the highest round number that this agent ever heard of
    silent_s: float = 0.0
    joiner: bool = False  # of another job than the run


class Heartbeat(Struct, frozen=True):
    """Proof of life. ``sent`` is the agent's own clock and comes back in Beat, which renews its lease.

    ``echo`` is the stamp of the newest Beat that it got: until then at least it stood with its controller.
    """

    node: str
    incarnation: str
    epoch: int
    sent: float
    round: int
    echo: float = NEVER
    step: int = -1  # fewest steps completed by a local rank, -1 when unknown
    step_time: float = 0.0
    ready: bool = True  # ranks would start at once: nothing has to be imported before


class RanksStopped(Struct, frozen=True):
    """Every rank of earlier rounds and all their descendants are gone here; answer to Prepare.

    ``known``: the last round of whose start this agent knows, so that ``held`` belongs to that round's life or to one
    that led to it. ``completed``: the most steps that a rank of that round completed here.
    """

    node: str
    epoch: int
    round: int
    held: tuple[Held, ...]
    known: int = -1
    completed: int = -1


class StoreReady(Struct, frozen=True):
    """The rendezvous store of a round listens at this port of the sender."""

    node: str
    epoch: int
    round: int
    port: int


class RanksStarted(Struct, frozen=True):
    """All local ranks of the round run."""

    node: str
    epoch: int
    round: int
    seconds: float
    mode: str


class RankFailed(Struct, frozen=True):
    """A local rank ended wrongly."""

    node: str
    epoch: int
    round: int
    failure: RankFailure


class FirstStep(Struct, frozen=True):
    """Every local rank completed its first step of this round; ``time`` in Unix seconds, of the last of them."""

    node: str
    epoch: int
    round: int
    step: int
    time: float
    restored: int = -1
    source: str = ""


class RanksDone(Struct, frozen=True):
    """Every local rank exited as it should. ``stopped``: at an agreed stop, so training is not complete."""

    node: str
    epoch: int
    round: int
    stopped: bool
    step: int = -1


class SnapshotWhole(Struct, frozen=True):
    """Every local rank holds this step in memory."""

    node: str
    epoch: int
    round: int
    step: int
    size_bytes: int
    blocked_s: float


class Persisted(Struct, frozen=True):
    """The node's file of this step is durable. ``record`` is the checkpoint engine's own description of it."""

    node: str
    epoch: int
    round: int
    step: int
    record: dict[str, Any]


class PersistFailed(Struct, frozen=True):
    """The node's file of this step, or its manifest, could not be written."""

    node: str
    epoch: int
    round: int
    step: int
    error: str


class Committed(Struct, frozen=True):
    """The manifest of this step is durable."""

    node: str
    epoch: int
    step: int
    seconds: float


class StopAnswer(Struct, frozen=True):
    """Answer to ProposeStop from all local ranks; ``attached`` 0 when the script does not use resilio_hpc.train."""

    node: str
    epoch: int
    round: int
    target: int
    accepted: bool
    step: int
    attached: int


class Warned(Struct, frozen=True):
    """The node got a warning: "USR2" (time limit near), "TERM" (end now) or "INT" (the user's Ctrl-C)."""

    node: str
    epoch: int
    signal: str


class Leaving(Struct, frozen=True):
    """The agent's node goes ``within_s`` seconds, since its own job ends: the run shall go on without it."""

    node: str
    epoch: int
    within_s: float


class Goodbye(Struct, frozen=True):
    """The agent leaves for good."""

    node: str
    epoch: int
    reason: str


class Enrolled(Struct, frozen=True):
    """The agent keeps the membership of this number."""

    node: str
    epoch: int
    number: int


# agent → agent, to the listening socket of a node that may become controller -------------------------------------


class Orphan(Struct, frozen=True):
    """I have no controller: stand! ``newest``: the highest epoch that this agent followed or promised."""

    node: str
    newest: int
    membership: Membership
    silent_s: float


class Vote(Struct, frozen=True):
    """I follow nobody older than ``epoch`` from now on, and grant it to you. ``silent_s``: without a controller."""

    node: str
    epoch: int
    silent_s: float


# controller → agent ---------------------------------------------------------------------------------------------


class Beat(Struct, frozen=True):
    """Answer to Heartbeat. ``lease_s``: how long after ``sent`` the ranks may run; ``stamp``: to be echoed."""

    epoch: int
    sent: float
    lease_s: float
    stamp: float


class Welcome(Struct, frozen=True):
    """Answer to Hello, and the word of a new controller to those who voted for it."""

    epoch: int
    node: str
    endpoint: str


class Enrol(Struct, frozen=True):
    """Keep this membership."""

    epoch: int
    membership: Membership


class Prepare(Struct, frozen=True):
    """Stop every rank of earlier rounds; with ``open_store``, open the store of this round as well."""

    epoch: int
    round: int
    open_store: bool


class Start(Struct, frozen=True):
    """Start the ranks of a round. An agent that is not among the members waits as a spare."""

    epoch: int
    state: RoundState
    master_address: str
    master_port: int
    restore: RestorePoint | None = None


class Persist(Struct, frozen=True):
    """Write the node's file of this step."""

    epoch: int
    round: int
    step: int


class Commit(Struct, frozen=True):
    """Write the manifest of this step from all nodes' records."""

    epoch: int
    round: int
    step: int
    world_size: int
    records: tuple[dict[str, Any], ...]


class StageReached(Struct, frozen=True):
    """A checkpoint reached "committed", or "failed"."""

    epoch: int
    step: int
    stage: str
    error: str = ""


class ProposeStop(Struct, frozen=True):
    """Ask all ranks to stop after ``target`` steps."""

    epoch: int
    round: int
    target: int


class ConfirmStop(Struct, frozen=True):
    """Every rank accepted ``target``."""

    epoch: int
    round: int
    target: int


class TerminateRanks(Struct, frozen=True):
    """Send SIGTERM to ranks that do not use resilio_hpc.train; they get ``grace_s`` to end by themselves."""

    epoch: int
    round: int
    grace_s: float


class Standing(Struct, frozen=True):
    """Answer to Orphan: I have no controller either, and gather the others."""

    epoch: int


class Canvass(Struct, frozen=True):
    """I stand for ``epoch``, and know of this version of the membership: may I have your vote?"""

    epoch: int
    node: str
    version: tuple[int, int]


class Redirect(Struct, frozen=True):
    """There is a controller: this one."""

    epoch: int
    node: str
    endpoint: str


class NotLeading(Struct, frozen=True):
    """You took me for your controller; I am none (any more)."""

    epoch: int


class End(Struct, frozen=True):
    """The run (or this job's part of it) is over; stop everything and exit with ``exit_code``."""

    epoch: int
    verdict: str
    exit_code: int


ToController = (
    Hello
    | Heartbeat
    | RanksStopped
    | StoreReady
    | RanksStarted
    | RankFailed
    | FirstStep
    | RanksDone
    | SnapshotWhole
    | Persisted
    | PersistFailed
    | Committed
    | StopAnswer
    | Warned
    | Leaving
    | Goodbye
    | Enrolled
    | Orphan
    | Vote
)
ToAgent = (
    Beat
    | Welcome
    | Prepare
    | Start
    | Persist
    | Commit
    | StageReached
    | ProposeStop
    | ConfirmStop
    | TerminateRanks
    | End
    | Enrol
    | Standing
    | Canvass
    | Redirect
    | NotLeading
)

to_controller: Codec[ToController] = Codec(ToController)
to_agent: Codec[ToAgent] = Codec(ToAgent)
