"""Messages from the controller, or from a node that may become it, to agents."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from resilio_hpc.ckpt.format.manifest import ShardRecord
from resilio_hpc.ckpt.format.restore_point import RestorePoint
from resilio_hpc.core.tiers import Stage, Tier
from resilio_hpc.launch.protocol.drill_messages import DrillStrike
from resilio_hpc.launch.protocol.membership import Membership
from resilio_hpc.launch.protocol.message_parts import (
    NO_LIFE,
    Address,
    Cause,
    Code,
    Count,
    Endpoint,
    Life,
    MissingSnapshot,
    Node,
    Partner,
    Port,
    RoundState,
    Seconds,
    Struct,
)
from resilio_hpc.launch.protocol.restart_messages import RestartRank


class Beat(Struct, frozen=True):
    """Answer to Heartbeat.

    ``lease_s``: seconds after ``sent`` for which ranks may run; ``stamp``: the agent echoes it.
    """

    epoch: Count
    sent: Seconds
    lease_s: Seconds
    stamp: Seconds


class Welcome(Struct, frozen=True):
    """Answer to Hello; also how an elected controller introduces itself to its voters."""

    epoch: Count
    node: Node
    endpoint: Endpoint


class UpdateVoters(Struct, frozen=True):
    """Set the voters: keep this membership."""

    epoch: Count
    membership: Membership


LastStep = Literal["none", "shared", "all"]
"""Where the state of a rank is lost, or their number changes: if ranks have the same tensors; else: all.

none: unknown."""


class Prepare(Struct, frozen=True):
    """Stop every rank of earlier rounds; with ``open_store``, open the store of this round as well.

    ``cause``: what ended the round before, where that is certain already; ``last_step``: whether it helps that ranks
    save the step that they finished last.
    """

    epoch: Count
    round: Count
    open_store: bool
    cause: Cause | None = None
    last_step: LastStep = "none"


class Start(Struct, frozen=True):
    """Start the ranks of a round. An agent that is not among the members waits as a spare.

    ``follows``: the last life of the ranks before. An agent that knows nothing of its start missed its decisions, and
    holds snapshots of a life from which this one does not go on. ``fetches``: where the restore point is in memory, the
    ranks whose snapshots have to be fetched to their nodes. ``disk_ports``: where it is in files, of each member where
    others may read its own disk. ``cause``: what ended the round before, now that all its ranks' failures are known.
    ``collective_s``: how long a rank may wait in a collective, 0 where that is not known.
    ``trace``: a collective failed there, so communication libraries write what they do.
    """

    epoch: Count
    state: RoundState
    master_address: Address
    master_port: Port
    restore: RestorePoint | None = None
    follows: Life = NO_LIFE
    fetches: tuple[MissingSnapshot, ...] = ()
    disk_ports: tuple[Port, ...] = ()
    cause: Cause | None = None
    collective_s: Seconds = 0.0
    trace: bool = False

    def restore_of(self, rank: int) -> RestorePoint | None:
        """Return what one rank restores, after its snapshot has been fetched."""
        if self.restore is not None and any(fetch.rank == rank and not fetch.endpoint for fetch in self.fetches):
            return RestorePoint(Tier.COMMITTED, self.restore.step)
        return self.restore

    def arrives(self, rank: int) -> bool:
        """Return whether its snapshot comes from another node's memory."""
        return any(fetch.rank == rank and fetch.endpoint for fetch in self.fetches)


class PersistStep(Struct, frozen=True):
    """Write the node's file of this step, and copy the partner's snapshots of it."""

    epoch: Count
    round: Count
    step: Count
    partner: Partner | None = None


class KeepCopies(Struct, frozen=True):
    """Keep replica copies of this partner's snapshots, of each new step; its replicator has just started."""

    epoch: Count
    round: Count
    partner: Partner


class CommitStep(Struct, frozen=True):
    """Write the manifest of this step from all nodes' records. ``verified``: a step that must not be removed for it."""

    epoch: Count
    round: Count
    step: Count
    world_size: Count
    records: tuple[ShardRecord, ...]
    verified: Count = -1


class StageReached(Struct, frozen=True):
    """A save reached COMMITTED, or FAILED."""

    epoch: Count
    step: Count
    stage: Stage
    error: str = ""


class ProposeStop(Struct, frozen=True):
    """Ask all ranks to stop, or to pause, after ``target`` steps."""

    epoch: Count
    round: Count
    target: Count


class ConfirmStop(Struct, frozen=True):
    """Every rank accepted ``target``: stop there."""

    epoch: Count
    round: Count
    target: Count


class PauseRanks(Struct, frozen=True):
    """Every rank accepted ``target``: wait there, at most ``limit_s`` seconds. Heartbeats tell when all ranks do."""

    epoch: Count
    round: Count
    target: Count
    limit_s: Seconds


class ResumeRanks(Struct, frozen=True):
    """End a pause, or the wait for one."""

    epoch: Count
    round: Count


class SaveAtStep(Struct, frozen=True):
    """Let ranks save when they have finished ``step`` steps, and go on; those that are past it do nothing."""

    epoch: Count
    round: Count
    step: Count


class BeginProbe(Struct, frozen=True):
    """Start a checker on this node, which does what the coordinator of a test orders (``diagnose.messages``).

    ``settings``: of the checker, as JSON. After ``limit_s`` seconds it is killed, whatever it does.
    """

    epoch: Count
    test: Count
    settings: Annotated[str, Meta(max_length=8192)]
    limit_s: Seconds


class EndProbe(Struct, frozen=True):
    """End this node's checker."""

    epoch: Count
    test: Count


class LookAtRanks(Struct, frozen=True):
    """Ask what can be seen of the ranks from outside: the run does no steps. ``look``: counts the questions.

    ``stacks``: Python ranks write theirs first, which interrupts their system calls. ``sampled``: ranks whose native
    stacks are sampled from outside, for people to read.
    """

    epoch: Count
    round: Count
    look: Count
    stacks: bool = False
    sampled: tuple[Count, ...] = ()


class TerminateRanks(Struct, frozen=True):
    """Send SIGTERM to ranks that do not use resilio_hpc.train; they have ``grace_s`` to end by themselves."""

    epoch: Count
    round: Count
    grace_s: Seconds


class Candidate(Struct, frozen=True):
    """Answer to NoLeader: this node has no controller either, and may become a candidate."""

    epoch: Count


class RequestVote(Struct, frozen=True):
    """Ask for a vote in ``epoch``. ``version``: the membership that the candidate knows."""

    epoch: Count
    node: Node
    version: tuple[Count, Count]


class Redirect(Struct, frozen=True):
    """Name the controller."""

    epoch: Count
    node: Node
    endpoint: Endpoint


class NotLeading(Struct, frozen=True):
    """Answer to an agent of another epoch: this node does not lead, and has had no quorum for ``silent_s`` seconds."""

    epoch: Count
    silent_s: Seconds = 0.0


class End(Struct, frozen=True):
    """The run, or this job's part of it, has ended: stop everything and exit with ``exit_code``.

    ``cause``: what ended the last round, where it failed.
    """

    epoch: Count
    verdict: str
    exit_code: Code
    cause: Cause | None = None


ToAgent = (
    Beat
    | Welcome
    | Prepare
    | Start
    | PersistStep
    | KeepCopies
    | CommitStep
    | StageReached
    | ProposeStop
    | ConfirmStop
    | TerminateRanks
    | PauseRanks
    | ResumeRanks
    | SaveAtStep
    | RestartRank
    | DrillStrike
    | BeginProbe
    | EndProbe
    | LookAtRanks
    | End
    | UpdateVoters
    | Candidate
    | RequestVote
    | Redirect
    | NotLeading
)
