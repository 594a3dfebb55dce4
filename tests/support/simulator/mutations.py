"""Bugs planted in the real code, to see that the simulator would find them. Each is one guard taken away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from resilio_hpc.ckpt.replication import lost_ranks
from resilio_hpc.launch.agent.decisions.agent_core import AgentCore
from resilio_hpc.launch.agent.decisions.node_ranks import NodeRanks
from resilio_hpc.launch.agent.kept_ranks import KeptRanks
from resilio_hpc.launch.consensus import connections
from resilio_hpc.launch.consensus.candidate import Election
from resilio_hpc.launch.consensus.state import ElectionState
from resilio_hpc.launch.controller.checkpoints import replica_placement
from resilio_hpc.launch.controller.checkpoints.checkpoint_phase import CheckpointPhase
from resilio_hpc.launch.controller.checkpoints.replica_placement import InMemory
from resilio_hpc.launch.controller.controller import Controller
from resilio_hpc.launch.controller.facts.run_state import LEASE_SHARE, RunState
from resilio_hpc.launch.controller.faults.failures import Failures
from resilio_hpc.launch.controller.members import voters
from resilio_hpc.launch.controller.members.presence import Presence
from resilio_hpc.launch.controller.rounds import Rounds
from resilio_hpc.launch.protocol import membership
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import Membership
from resilio_hpc.launch.workers import rank_reentry
from resilio_hpc.launch.workers.forking.spawner_messages import RankCommand
from resilio_hpc.launch.workers.rank_reentry import RankReentry
from tests.support.virtual_cluster.agent import VirtualAgent
from tests.support.virtual_cluster.copies import VirtualCopies
from tests.support.virtual_cluster.directory import Directory

Patch = pytest.MonkeyPatch


def votes_are_forgotten(patch: Patch) -> None:
    """A node may vote twice in an epoch, and follow who is older."""
    original = ElectionState._keep

    def keep(self: Any, vote_record: Any) -> None:
        original(
            self, type(vote_record)(vote_record.membership, self.vote_record.promised, self.vote_record.promised_to)
        )

    patch.setattr(ElectionState, "_keep", keep)


def a_ballot_dies_with_its_agent(patch: Patch) -> None:
    """What was promised is not kept on the node's disk."""
    patch.setattr(VirtualAgent, "keep_vote_record", lambda self, vote_record: None)


def leases_without_a_quorum(patch: Patch) -> None:
    """Every heartbeat renews a lease, whoever else is with the controller."""

    def lease_end(self: Any) -> float:
        return float(self.now() + LEASE_SHARE * self.config.heartbeat_timeout_s)

    patch.setattr(RunState, "lease_end", property(lease_end))


def leases_do_not_end(patch: Patch) -> None:
    """An agent without a controller lets its ranks run."""
    patch.setattr(NodeRanks, "end_lease", lambda self: None)


def orders_are_said_once(patch: Patch) -> None:
    """To the connection that was heard last, though nobody may listen there any more."""
    patch.setattr(connections, "_is_older", lambda name, known: False)
    patch.setattr(Rounds, "_say_again", lambda self: None)
    patch.setattr(CheckpointPhase, "tick", lambda self: None)


def half_is_enough(patch: Patch) -> None:
    """Exactly half of the votes is a quorum without the witness."""
    patch.setattr(membership, "_needed", lambda group, witnessed: max(1, len(group) // 2))


def everybody_gets_the_witness(patch: Patch) -> None:
    """The witness is not created exclusively."""
    patch.setattr(Directory, "claim_witness", lambda self, witness, node: node)


def memberships_change_at_once(patch: Patch) -> None:
    """No joint membership: the old voters are not asked."""
    original = voters.next_membership

    def at_once(last: Any, epoch: int, wanted: Any, settled: bool) -> Membership:
        joint = original(last, epoch, wanted, settled)
        return Membership(joint.epoch, joint.number, joint.voters, witness=joint.witness)

    patch.setattr(voters, "next_membership", at_once)


def old_epochs_are_obeyed(patch: Patch) -> None:
    """Orders of a controller are taken though another one was elected with our vote."""
    patch.setattr(AgentCore, "_may_follow", lambda self: self._succession.following is not None)


def lost_before_the_lease_ends(patch: Patch) -> None:
    """A new controller goes on at once without the nodes that did not come to it."""

    def absent(self: Any, now: float) -> dict[str, float]:
        run = self._run
        return {x.node: run.began for x in run.members if x.node not in run.accounted}

    patch.setattr(Failures, "_absent_members", absent)


def no_commit_fence(patch: Patch) -> None:
    """A controller that was replaced may still commit."""
    patch.setattr(VirtualAgent, "is_fenced", lambda self, epoch: False)


def snapshots_of_other_lives_count(patch: Patch) -> None:
    """A node keeps snapshots of steps that are computed anew."""

    def begin(self: Any, step: int, life: m.Life) -> None:
        self.copies.begin(life, step)

    patch.setattr(VirtualAgent, "forget_snapshots_after", begin)


def copies_of_other_lives_count(patch: Patch) -> None:
    """A node keeps copies of its partner's snapshots of steps that are computed anew."""

    def begin(self: Any, life: m.Life, step: int) -> None:
        self.life = life

    patch.setattr(VirtualCopies, "begin", begin)


def who_missed_a_start_keeps_its_snapshots(patch: Patch) -> None:
    """A node that comes back keeps snapshots of a life that the others have left."""
    original = NodeRanks.start

    def start(self: Any, message: m.Start) -> None:
        known = self.state.life if self.state is not None else m.NO_LIFE
        original(self, msgspec.structs.replace(message, follows=known))

    patch.setattr(NodeRanks, "start", start)


def the_wall_clock_is_trusted(patch: Patch) -> None:
    """Durations are taken from a clock that may be set."""
    patch.setattr(VirtualAgent, "monotonic", VirtualAgent.unix)


def votes_are_counted_as_they_come(patch: Patch) -> None:
    """A vote that arrives twice counts twice."""
    original = Election.voted

    def voted(self: Any, message: m.Vote, now: float) -> Any:
        votes = self._candidacy.votes if self._candidacy is not None else {}
        others = [node for node in self._state.membership.nodes if node not in votes]
        again = message.node in votes and message.epoch == self._candidacy.epoch and others
        return original(self, msgspec.structs.replace(message, node=min(others)) if again else message, now)

    patch.setattr(Election, "voted", voted)


def words_of_older_rounds_count(patch: Patch) -> None:
    """What was said about a round before is taken for the present one."""
    original = Controller._dispatch

    def dispatch(self: Any, agent: Any, message: Any) -> None:
        current = self.run.round
        late = 0 <= getattr(message, "round", -1) < current
        original(self, agent, msgspec.structs.replace(message, round=current) if late else message)

    patch.setattr(Controller, "_dispatch", dispatch)


def echoes_of_the_future(patch: Patch) -> None:
    """A heartbeat counts from its arrival, though it may have been long on its way."""
    original = Presence.heartbeat

    def heartbeat(self: Any, agent: Any, beat: m.Heartbeat) -> None:
        original(self, agent, msgspec.structs.replace(beat, echo=self._run.now()))

    patch.setattr(Presence, "heartbeat", heartbeat)


def late_snapshots_are_not_awaited(patch: Patch) -> None:
    """What a node holds is known only from a message that others may overtake."""
    original = CheckpointPhase.awaits
    patch.setattr(CheckpointPhase, "awaits", lambda self, step: original(self, -1))


def orders_come_in_order(patch: Patch) -> None:
    """What a node is to write is said once, though it may not have heard of the round yet."""
    original = Rounds.started

    def started(self: Any, agent: Any, message: m.RanksStarted) -> None:
        checkpoints = self._checkpoints
        checkpoints.order_again = lambda node: None
        original(self, agent, message)
        del checkpoints.order_again

    patch.setattr(Rounds, "started", started)
    patch.setattr(CheckpointPhase, "tick", lambda self: None)


def ranks_are_kept_that_have_not_left(patch: Patch) -> None:
    """Ranks that were asked to leave their round are kept, whether or not they have left it."""
    original = NodeRanks.ranks_left

    def ranks_left(self: Any, kept: frozenset[int]) -> None:
        asked = [rank.local_rank for rank in self.local.ranks.values() if KeptRanks._may_leave(rank)]
        original(self, frozenset(asked))

    patch.setattr(NodeRanks, "ranks_left", ranks_left)


def ranks_that_were_kept_once_are_kept_again(patch: Patch) -> None:
    """Which ranks wait for a round is not forgotten when it has begun."""
    original = NodeRanks.start_when_leased

    def start_when_leased(self: Any) -> None:
        kept = self.kept
        original(self)
        self.kept = kept

    patch.setattr(NodeRanks, "start_when_leased", start_when_leased)


def kept_ranks_enter_the_round_before(patch: Patch) -> None:
    """A process that lives on has the variables of the round that it has left."""
    original = RankReentry.enter

    def enter(self: Any, command: RankCommand) -> bool:
        before = self._commands.get(command.local_rank, command)
        return original(self, msgspec.structs.replace(command, env=before.env | _restore_in(command.env)))

    patch.setattr(RankReentry, "enter", enter)


def _restore_in(env: dict[str, str]) -> dict[str, str]:
    return {"RESILIO_RESTORE": env["RESILIO_RESTORE"]}


def kept_ranks_that_do_not_enter_live_on(patch: Patch) -> None:
    """A process that cannot enter the round for which it was kept is not ended."""
    patch.setattr(RankReentry, "end_others", lambda self: None)


def training_begins_anew_where_it_has_been(patch: Patch) -> None:
    """A process that lives on begins training from the beginning, with what it has trained before."""
    original = rank_reentry._may_go_on

    def may_go_on(before: RankCommand, after: RankCommand) -> bool:
        return original(before, msgspec.structs.replace(after, env=after.env | {"RESILIO_RESTORE": "memory:0"}))

    patch.setattr(rank_reentry, "_may_go_on", may_go_on)


def records_of_other_steps_count(patch: Patch) -> None:
    """A lost rank's snapshot is made of another one's, and of the newest record that it has left, of whatever step."""
    original = lost_ranks.record_of

    def record_of(records: Any, step: int, round_number: int, world_size: int) -> Any:
        newest = max((record.step for record in records), default=step)
        return original(records, newest, round_number, world_size)

    patch.setattr(lost_ranks, "record_of", record_of)


def last_saves_differ_by_a_step(patch: Patch) -> None:
    """A step counts as held by all ranks where some hold the one before."""

    def whole(self: InMemory) -> set[int]:
        def ranks(step: int) -> set[int]:
            return self.own[step] | self.elsewhere[step].keys()

        steps = [*self.own, *self.elsewhere]
        return {step for step in steps if len(ranks(step) | ranks(step - 1)) == self.world_size}

    patch.setattr(InMemory, "whole", property(whole))


def last_saves_of_other_lives_count(patch: Patch) -> None:
    """What a node holds counts, though it missed the life that the others have left."""
    original = replica_placement.in_memory

    def in_memory(run: RunState) -> InMemory:
        for agent in run.agents.values():
            agent.known = run.last_life
        return original(run)

    patch.setattr(replica_placement, "in_memory", in_memory)


ALL: tuple[Callable[[Patch], None], ...] = (
    votes_are_forgotten, a_ballot_dies_with_its_agent, leases_without_a_quorum, leases_do_not_end, half_is_enough,
    orders_are_said_once, everybody_gets_the_witness, memberships_change_at_once, old_epochs_are_obeyed,
    lost_before_the_lease_ends, no_commit_fence,
    snapshots_of_other_lives_count, copies_of_other_lives_count, who_missed_a_start_keeps_its_snapshots,
    the_wall_clock_is_trusted,
    votes_are_counted_as_they_come, words_of_older_rounds_count, echoes_of_the_future,
    late_snapshots_are_not_awaited, orders_come_in_order,
    ranks_are_kept_that_have_not_left, ranks_that_were_kept_once_are_kept_again, kept_ranks_enter_the_round_before,
    kept_ranks_that_do_not_enter_live_on, training_begins_anew_where_it_has_been, records_of_other_steps_count,
    last_saves_differ_by_a_step, last_saves_of_other_lives_count,
)  # fmt: skip
MUTATIONS = {plant.__name__: plant for plant in ALL}
