"""What the controller knows of the run: facts that its parts share, and what follows from them. No decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from resilio_hpc.ckpt.format.own_copy import OwnCopy
from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.config.planned_layouts import PlannedLayout
from resilio_hpc.launch.controller.facts.recovery import Recovery
from resilio_hpc.launch.controller.facts.repeated_failure import Repeatable
from resilio_hpc.launch.controller.facts.state import (
    WITH_RANKS,
    Clock,
    ControllerConfig,
    Finish,
    KnownAgent,
    Phase,
    check_transition,
)
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import NEVER, Membership
from resilio_hpc.launch.protocol.vote import Term

# of the time after which another node may be elected: ranks are gone by then, however the clocks differ
LEASE_SHARE = 0.8
MOST_ON_DISK = 8  # copies of a node that are remembered


class NodeDisk(Struct, frozen=True):
    """What the own disk of a node holds of committed steps, as far as one agent of it has told or written."""

    incarnation: str
    copies: tuple[OwnCopy, ...]


@dataclass(eq=False)
class RunState:
    """The state of one controller. Each part writes the facts of its own subject and reads all others."""

    config: ControllerConfig
    term: Term
    clock: Clock

    # the current round
    phase: Phase = Phase.GATHERING
    phase_began: float = field(init=False)  # monotonic
    round: int = -1
    members: tuple[m.Member, ...] = field(default=(), init=False)  # in the order of their node ranks
    restarts: int = 0
    restarted_at: float = NEVER  # when a rank was last started again alone, monotonic
    without_progress: int = 0  # restarts since the durable step last advanced, or the one that ranks went on from
    went_on_from: int = -1  # the newest step that a round has gone on from
    saves_fail: bool = False  # the last one did
    last_life: m.Life = m.NO_LIFE  # the last one whose ranks were started, in this epoch or an earlier one
    has_prepared: bool = False  # a round was prepared in this epoch, so what earlier epochs left has no use any more
    has_started: bool = False  # all ranks of a node were started in this epoch
    attached: bool = False  # a rank of this epoch uses resilio_hpc.train, so its steps will be reported
    steps_reported: bool = False  # a step of this run was reported, in this epoch or an earlier one

    # the nodes
    agents: dict[str, KnownAgent] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)  # nodes that were silent for too long
    losses: dict[str, int] = field(default_factory=dict)  # how often each node was lost
    left: set[str] = field(default_factory=set)  # nodes that said Goodbye
    unfit: dict[str, str] = field(default_factory=dict)  # nodes where no ranks can run, each with why
    suspects: set[str] = field(default_factory=set)  # nodes whose fault ended a round: spares stand in for them
    drilled: dict[str, float] = field(default_factory=dict)  # nodes that a user has struck on purpose: when, monotonic
    flagged: set[str] = field(default_factory=set)  # nodes that a test found bad or slow

    # the controller's own term
    began: float = field(init=False)  # monotonic
    membership: Membership = field(init=False)  # the voters
    voters_changed: bool = True  # a node came or left, or another one is expected
    voters_known: bool = False  # a quorum has kept a membership of this epoch on disk
    # the latest time at which a quorum was with the controller for certain, as of the last tick
    supported_since: float = NEVER
    suspended: bool = False  # another job of the run may lead by now
    informed: bool = False  # the run directory has reported what it knows
    may_prepare: bool = False  # the run directory has reported, or it hangs and a round may start without it
    recorded: bool = False  # older epochs cannot commit any more, and what they committed is known

    # checkpoints
    committed_steps: set[int] = field(default_factory=set)  # not known to be bad
    bad_copies: set[m.RestorePoint] = field(default_factory=set)
    verified_steps: set[int] = field(default_factory=set)  # committed, and replicas were equal afterwards
    not_after: int | None = None  # newer steps may be corrupt, and the next round restores none of them
    disks: dict[str, NodeDisk] = field(default_factory=dict)  # what nodes' own disks hold
    save_s: float = 0.0  # seconds that a save takes, as measured
    last_save_s: float | None = None  # seconds that the newest one took

    # failures, stops and the end
    recovery: Recovery | None = None  # the one that is open
    cause: m.Cause | None = None  # what ended the round before the present one
    trace: bool = False  # a collective failed, so the next round's communication libraries write what they do
    in_doubt: set[str] = field(default_factory=set)  # nodes for whose sake all are tested before ranks restart
    broke_before: Repeatable | None = None  # what ended the round before, where it may repeat
    collective_s: float = 0.0  # how long ranks may wait in a collective, as measured
    pausing: bool = False  # ranks were asked to pause, for a test of the nodes
    stopping: bool = False  # the ranks are being stopped for the end of this job's part
    waiting_verdict: Finish | None = None  # decided in this phase; waits for a quorum
    _member_nodes: frozenset[str] = field(default=frozenset(), init=False)
    _world_size: int = field(default=0, init=False)
    # of --layout auto: the layout of the newest round that started, and the newest step in memory of another one
    started_layout: PlannedLayout | None = None
    old_layout_until: int = -1

    def __post_init__(self) -> None:
        self.began = self.phase_began = self.now()
        self.membership = self.term.membership

    # -- time and term -----------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return monotonic seconds."""
        return self.clock.monotonic()

    def unix(self) -> float:
        """Return Unix seconds."""
        return self.clock.unix()

    @property
    def epoch(self) -> int:
        """Return the controller's epoch."""
        return self.term.epoch

    @property
    def node(self) -> str:
        """Return the controller's own node."""
        return self.term.node

    @property
    def lease_end(self) -> float:
        """Return until when ranks may run at all, on this node's clock."""
        return self.supported_since + LEASE_SHARE * self.config.heartbeat_timeout_s

    @property
    def leads(self) -> bool:
        """Return whether a quorum is with the controller, so that its leases are valid; else it decides nothing."""
        return self.lease_end > self.now() and not self.suspended

    @property
    def lease_s(self) -> float:
        """Return for how many seconds ranks may run from now on."""
        return 0.0 if self.suspended else max(0.0, self.lease_end - self.now())

    @property
    def former_silent_s(self) -> float:
        """Return for how long the former controller was silent at the election, at most the heartbeat timeout."""
        return min(self.term.silent_s, self.config.heartbeat_timeout_s)

    @property
    def former_leases_end(self) -> float:
        """Return from when on no rank runs on a lease of an earlier controller, on any node."""
        return self.began + self.config.heartbeat_timeout_s - self.former_silent_s

    @property
    def absent_may_train(self) -> bool:
        """Return whether a voter that has not come to this epoch may have ranks, of a start that is not known here."""
        voters = self.term.membership
        if voters.epoch == 0 or self.now() >= self.former_leases_end:
            return False  # no controller ever led, or the last one ended long ago
        return bool(voters.nodes - self.agents.keys() - self.left)

    # -- nodes and ranks ---------------------------------------------------------------------------------------

    def set_members(self, members: tuple[m.Member, ...]) -> None:
        """Set which nodes take part."""
        self.members = members
        self._member_nodes = frozenset(member.node for member in members)
        self._world_size = sum(member.local_world_size for member in members)

    def is_member(self, node: str) -> bool:
        """Return whether the node takes part in the current round."""
        return node in self._member_nodes

    @property
    def world_size(self) -> int:
        """Return the number of ranks in the current round."""
        return self._world_size

    @property
    def max_step(self) -> int:
        """Return the furthest step that a node has reported in this round; -1 without one."""
        return max((agent.step for agent in self.agents.values()), default=-1)

    @property
    def accounted(self) -> set[str]:
        """Return the nodes that are here, or lost, or left."""
        return self.agents.keys() | self.lost | self.left

    @property
    def usable(self) -> list[str]:
        """Return the nodes that could take part in a round: they stay, and have devices for a rank.

        Unfit ones are among them only where there are too few others.
        """
        there = [node for node, agent in self.agents.items() if node not in self.lost and agent.leaves_at is None]
        able = [node for node in there if self.agents[node].hello.local_world_size and node not in self.unfit]
        fit = [node for node in able if node not in self.flagged] if self.flagged else able
        return fit if self.config.shape.trim(len(fit)) else able

    # -- phases ------------------------------------------------------------------------------------------------

    @property
    def with_ranks(self) -> bool:
        """Return whether ranks have been started in this round."""
        return self.phase in WITH_RANKS

    def enter(self, phase: Phase) -> None:
        """Enter a phase. Decisions of the phase before are void."""
        check_transition(self.phase, phase)
        self.phase = phase
        self.waiting_verdict = None
        self.phase_began = self.now()

    # -- checkpoints -------------------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """Return the newest committed step that is not known to be bad; -1 without one."""
        return max(self.committed_steps, default=-1)

    def note_copies(self, node: str, copies: Iterable[OwnCopy]) -> None:
        """Take note of copies on a node's own disk. What an agent process before this one told counts no more."""
        agent = self.agents.get(node)
        if agent is not None:
            known = {*copies, *(self.disk_of(node) or ())}
            newest = sorted(known, key=lambda copy: copy.step, reverse=True)[:MOST_ON_DISK]
            self.disks[node] = NodeDisk(agent.hello.incarnation, tuple(newest))

    def disk_of(self, node: str) -> tuple[OwnCopy, ...] | None:
        """Return the copies on the own disk of a node that is here; None: not told yet."""
        disk = self.disks.get(node)
        return disk.copies if disk is not None and disk.incarnation == self.agents[node].hello.incarnation else None

    def goes_on_from(self, step: int) -> int:
        """Take note of the step that a round's ranks went on from, and return it.

        A newer one than before is progress: it becomes durable, unless failures come faster than it can be written.
        """
        if step > max(self.committed, self.went_on_from):
            self.went_on_from = step
            self.without_progress = self.without_progress if self.saves_fail else 0
        return step

    def learn(self, committed: Iterable[int] = (), bad_copies: Iterable[m.RestorePoint] = ()) -> None:
        """Take note of committed steps and bad copies that other nodes know of."""
        self.bad_copies |= set(bad_copies)
        self.committed_steps |= set(committed)
        self.committed_steps -= {copy.step for copy in self.bad_copies if copy.source is Tier.COMMITTED}

    @property
    def layout(self) -> PlannedLayout | None:
        """Return the planned layout of the round's members; None where nothing was planned."""
        plan = self.config.plan
        return plan.of(self.world_size, plan.gpu_among([each.node for each in self.members])) if self.members else None

    # -- for the next controller -------------------------------------------------------------------------------

    def round_state(self) -> m.RoundState:
        """Return the soft state that agents keep for the next controller."""
        return m.RoundState(
            self.epoch, self.round, m.world_of(self.members), self.restarts, self.without_progress,
            tuple(sorted(self.committed_steps)), tuple(sorted(self.lost)), tuple(self.bad_copies),
            tuple(sorted(self.left)), self.steps_reported, tuple(sorted(self.losses.items())),
            self.broke_before.to_text() if self.broke_before is not None else "", tuple(sorted(self.suspects)),
            tuple(sorted(self.flagged)), tuple(sorted(self.verified_steps)), self.old_layout_until,
        )  # fmt: skip

    def adopt(self, last: m.RoundState) -> None:
        """Take over the soft state of an earlier controller."""
        self.round = max(self.round, last.round)
        self.set_members(last.members)
        self.restarts = last.restarts
        self.without_progress = last.without_progress
        self.lost |= set(last.lost)
        self.losses |= dict(last.losses)
        self.left |= set(last.left) - self.agents.keys()
        self.flagged |= set(last.flagged)
        self.verified_steps |= set(last.verified)
        self.learn(last.committed, last.bad_copies)
        self.last_life = max(self.last_life, last.life)
        self.steps_reported = self.steps_reported or last.steps_reported
        self.broke_before = Repeatable.from_text(last.broken_by)
        self.suspects |= set(last.suspects)
        self.started_layout, self.old_layout_until = self.layout, last.old_layout_until
