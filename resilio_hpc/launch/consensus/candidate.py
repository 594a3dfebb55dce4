"""An election on the side of a candidate: the agents that call it, their votes, and the quorum. Pure."""

from __future__ import annotations

from msgspec import Struct, field

from resilio_hpc.launch.consensus.state import ElectionState
from resilio_hpc.launch.consensus.succession_ports import SuccessionPorts
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import NEVER, has_quorum, has_tie, silence_of_quorum, witnesses_needed

FRESH_S = 1.0  # a caller that has not called for so long is not counted
TIE_S = 0.5  # with exactly half: how long to wait for one more
WIN_WITHIN_S = 3.0  # a candidate that has not won by then becomes one anew
LOST_TIE_S = 1.0  # the other half has a witness: a scan finds its controller meanwhile


class Candidacy(Struct):
    """This node's candidacy. ``votes``: node → seconds without a controller; ``asked``: node → when, monotonic."""

    epoch: int
    since: float
    votes: dict[str, float]
    asked_witness: bool = False
    witnesses: set[str] = field(default_factory=set)
    asked: dict[str, float] = field(default_factory=dict)


class Won(Struct, frozen=True):
    """A quorum has voted for this node. ``silent_s``: for how long the voters had heard no controller."""

    epoch: int
    witnessed: bool
    silent_s: float
    supporters: frozenset[str]


class Election:
    """The agents without a controller that call this node, and its candidacy. Times are monotonic seconds."""

    def __init__(self, state: ElectionState, ports: SuccessionPorts) -> None:
        self._node = state.node
        self._state = state
        self._ports = ports
        self._leaderless: dict[str, tuple[m.NoLeader, float]] = {}
        self._candidacy: Candidacy | None = None

    @property
    def stands(self) -> bool:
        """Return whether this node is a candidate."""
        return self._candidacy is not None

    def withdraw(self) -> None:
        """End the candidacy: another node leads, or gets this node's vote."""
        self._candidacy = None

    def over(self) -> None:
        """End the election: there is a controller. Agents that called before learn of it, or call again."""
        self._candidacy = None
        self._leaderless.clear()

    def leaderless_called(self, message: m.NoLeader, now: float) -> Won | None:
        """Take the call of a node that has no controller and takes this one for the next candidate."""
        self._leaderless[message.node] = (message, now)
        candidacy = self._candidacy
        if candidacy is None:
            self._ports.to_caller(message.node, m.Candidate(self._state.newest))
            if self._may_be_enough(len(self._leaderless) + 1):
                return self.stand_if_possible(now)
        elif message.node not in candidacy.votes:
            self._request_vote(candidacy, message.node, now)
        return None

    def voted(self, message: m.Vote, now: float) -> Won | None:
        """Take a vote: the promise of another node to follow the holder of this epoch."""
        if self._candidacy is not None and message.epoch == self._candidacy.epoch:
            self._candidacy.votes[message.node] = message.silent_s
            return self._count(now)
        return None

    def _may_be_enough(self, count: int) -> bool:
        """Return whether so many may be a quorum. A full count takes time with thousands of nodes."""
        return 2 * count >= len(self._state.membership.voters.nodes)

    def stand_if_possible(self, now: float) -> Won | None:
        """Become a candidate when a quorum calls, or exactly half of the voters; ask them for their votes."""
        state = self._state
        if now < state.patient_until and self._candidacy is None:
            return None
        fresh_s = FRESH_S + state.crowd_s
        self._leaderless = {node: (word, at) for node, (word, at) in self._leaderless.items() if now - at < fresh_s}
        if self._candidacy is not None and now - self._candidacy.since > WIN_WITHIN_S + state.crowd_s:
            self._candidacy = None
        membership = state.membership
        if now < state.patient_until or self._node not in membership.nodes or state.superseded:
            return None
        if self._candidacy is None:
            if not self._may_be_enough(len(self._leaderless) + 1):
                return None
            supporters = {*self._leaderless, self._node}
            waited = now - state.lost_at >= TIE_S
            if not has_quorum(membership, supporters) and not (waited and has_tie(membership, supporters)):
                return None
            self._candidacy = self._stand(now)
        for node in sorted(self._leaderless.keys() - self._candidacy.votes.keys()):
            self._request_vote(self._candidacy, node, now)
        return self._count(now)

    def _stand(self, now: float) -> Candidacy:
        known = max([self._state.newest, *(word.newest for word, _ in self._leaderless.values())])
        epoch = known + 2 - known % 2
        self._state.promise(epoch, self._node)
        return Candidacy(epoch, now, {self._node: self._state.silent_s(now)})

    def _request_vote(self, candidacy: Candidacy, node: str, now: float) -> None:
        if now - candidacy.asked.get(node, NEVER) < self._state.repeat_s:
            return
        candidacy.asked[node] = now
        version = self._state.membership.version
        self._ports.to_caller(node, m.RequestVote(candidacy.epoch, self._node, version))

    def _count(self, now: float) -> Won | None:
        candidacy, membership = self._candidacy, self._state.membership
        if candidacy is None or not self._may_be_enough(len(candidacy.votes)):
            return None
        if has_quorum(membership, candidacy.votes):
            return self._win(candidacy, False)
        if not candidacy.asked_witness and self._all_have_voted(now):
            needed = witnesses_needed(membership, candidacy.votes)
            missing = [name for name in needed if name not in candidacy.witnesses]
            if missing:
                candidacy.asked_witness = True
                self._ports.files.claim_witness(missing[0])
            elif needed:
                return self._win(candidacy, True)
        return None

    def _all_have_voted(self, now: float) -> bool:
        """Return whether every caller has voted, or had the time to."""
        candidacy = self._candidacy
        assert candidacy is not None
        return self._leaderless.keys() <= candidacy.votes.keys() or now - candidacy.since >= TIE_S

    def witness_claimed(self, witness: str, holder: str, now: float) -> Won | None:
        """Take the witness's holder. The witness counts for this node if its holder has voted for this node."""
        candidacy = self._candidacy
        if candidacy is None:
            return None
        candidacy.asked_witness = False
        if holder in candidacy.votes:
            candidacy.witnesses.add(witness)
            return self._count(now)
        self._candidacy = None
        self._state.patient_until = now + LOST_TIE_S
        return None

    def storage_failed(self) -> None:
        """Ask for the witness again: the run directory did not answer."""
        if self._candidacy is not None:
            self._candidacy.asked_witness = False

    def _win(self, candidacy: Candidacy, witnessed: bool) -> Won:
        silence = silence_of_quorum(self._state.membership, candidacy.votes, witnessed)
        self._candidacy = None
        return Won(candidacy.epoch, witnessed, silence, frozenset(candidacy.votes))
