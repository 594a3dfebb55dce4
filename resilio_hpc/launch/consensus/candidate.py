"""An election, as seen by a node that may win it: who calls, who votes, whether they are a quorum. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from resilio_hpc.launch.consensus.state import ElectionState
from resilio_hpc.launch.consensus.succession_ports import SuccessionPorts
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import NEVER, has_quorum, has_tie, silence_of_quorum, witnesses_needed

FRESH_S = 1.0  # an orphan that has not called for so long is not counted
TIE_S = 0.5  # with exactly half: how long to wait for one more
WIN_WITHIN_S = 3.0  # a candidate that has not won by then stands anew
LOST_TIE_S = 1.0  # the other half has a witness: time for a scan to tell who leads there


@dataclass
class Candidacy:
    """An election in which this node stands. ``votes``: node → seconds without a controller; ``asked``: node → when."""

    epoch: int
    since: float
    votes: dict[str, float]
    asked_witness: bool = False
    witnesses: set[str] = field(default_factory=set)
    asked: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Won:
    """A quorum has voted for this node. ``silent_s``: for how long the voters had heard no controller."""

    epoch: int
    witnessed: bool
    silent_s: float
    supporters: frozenset[str]


class Election:
    """The orphans that call this node, and its candidacy. Times are monotonic seconds."""

    def __init__(self, state: ElectionState, ports: SuccessionPorts) -> None:
        self._node = state.node
        self._state = state
        self._ports = ports
        self._orphans: dict[str, tuple[m.Orphan, float]] = {}
        self._candidacy: Candidacy | None = None

    @property
    def stands(self) -> bool:
        """Whether this node is a candidate."""
        return self._candidacy is not None

    def withdraw(self) -> None:
        """Somebody else leads, or is voted for."""
        self._candidacy = None

    def over(self) -> None:
        """There is a controller; whoever called before has heard of it, or calls again."""
        self._candidacy = None
        self._orphans.clear()

    def orphan_called(self, message: m.Orphan, now: float) -> Won | None:
        """Another node has no controller, and thinks that this one may become it."""
        self._orphans[message.node] = (message, now)
        candidacy = self._candidacy
        if candidacy is None:
            self._ports.to_orphan(message.node, m.Standing(self._state.newest))
            if self._may_be_enough(len(self._orphans) + 1):
                return self.stand_if_possible(now)
        elif message.node not in candidacy.votes:
            self._canvass(candidacy, message.node, now)
        return None

    def voted(self, message: m.Vote, now: float) -> Won | None:
        """Another node has promised to follow whoever has this epoch."""
        if self._candidacy is not None and message.epoch == self._candidacy.epoch:
            self._candidacy.votes[message.node] = message.silent_s
            return self._count(now)
        return None

    def _may_be_enough(self, count: int) -> bool:
        """Whether it is worth while to count properly, which takes time among thousands."""
        return 2 * count >= len(self._state.membership.voters.nodes)

    def stand_if_possible(self, now: float) -> Won | None:
        """Stand when a quorum calls, or half of the voters and nobody more; ask them for their votes."""
        state = self._state
        if now < state.patient_until and self._candidacy is None:
            return None
        fresh_s = FRESH_S + state.crowd_s
        self._orphans = {node: (word, at) for node, (word, at) in self._orphans.items() if now - at < fresh_s}
        if self._candidacy is not None and now - self._candidacy.since > WIN_WITHIN_S + state.crowd_s:
            self._candidacy = None
        membership = state.membership
        if now < state.patient_until or self._node not in membership.nodes or state.superseded:
            return None
        if self._candidacy is None:
            if not self._may_be_enough(len(self._orphans) + 1):
                return None
            supporters = {*self._orphans, self._node}
            waited = now - state.lost_at >= TIE_S
            if not has_quorum(membership, supporters) and not (waited and has_tie(membership, supporters)):
                return None
            self._candidacy = self._stand(now)
        for node in sorted(self._orphans.keys() - self._candidacy.votes.keys()):
            self._canvass(self._candidacy, node, now)
        return self._count(now)

    def _stand(self, now: float) -> Candidacy:
        known = max([self._state.newest, *(word.newest for word, _ in self._orphans.values())])
        epoch = known + 2 - known % 2
        self._state.promise(epoch, self._node)
        return Candidacy(epoch, now, {self._node: self._state.silent_s(now)})

    def _canvass(self, candidacy: Candidacy, node: str, now: float) -> None:
        if now - candidacy.asked.get(node, NEVER) < self._state.repeat_s:
            return
        candidacy.asked[node] = now
        version = self._state.membership.version
        self._ports.to_orphan(node, m.Canvass(candidacy.epoch, self._node, version))

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
                self._ports.claim_witness(missing[0])
            elif needed:
                return self._win(candidacy, True)
        return None

    def _all_have_voted(self, now: float) -> bool:
        """Whether to wait for no more votes."""
        candidacy = self._candidacy
        assert candidacy is not None
        return self._orphans.keys() <= candidacy.votes.keys() or now - candidacy.since >= TIE_S

    def witness_claimed(self, witness: str, holder: str, now: float) -> Won | None:
        """Whose the witness is. It is on our side if its holder has voted for us."""
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
        """The run directory did not answer: the witness is asked for again."""
        if self._candidacy is not None:
            self._candidacy.asked_witness = False

    def _win(self, candidacy: Candidacy, witnessed: bool) -> Won:
        silence = silence_of_quorum(self._state.membership, candidacy.votes, witnessed)
        self._candidacy = None
        return Won(candidacy.epoch, witnessed, silence, frozenset(candidacy.votes))
