"""How an agent finds its controller, and how agents elect a new one. Pure.

An agent without a controller connects to the first voter in the order of succession, then to the next, and sends
NoLeader. A node that has no controller itself and is called by a quorum becomes the candidate of a new epoch. It asks
for votes, and leads with a quorum of them. Each node keeps its vote on its own disk: one vote per epoch. It follows no
older epoch afterwards. An agent that has a controller takes no part, so one node with a bad link disturbs no other.

Elected epochs are even; votes make them unique. Claimed epochs are odd; files make them unique.

The run directory serves three purposes. A job's first epoch is claimed by creating its file. Agents that know no voter
find the controller's name there. The witness decides where exactly half of the votes are at hand.
"""

from __future__ import annotations

from resilio_hpc.launch.consensus.calls import TURN_S, Calls
from resilio_hpc.launch.consensus.candidate import Election, Won
from resilio_hpc.launch.consensus.epoch_scans import EpochScans
from resilio_hpc.launch.consensus.state import ElectionState
from resilio_hpc.launch.consensus.succession_ports import LeadershipListener, SuccessionPorts
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.vote import EpochRecord, Term, VoteRecord

SETTLE_S = 0.25  # long enough to connect again and hear an answer


class Succession:
    """One agent's view of who leads. Times are monotonic seconds; ``begins``: the epoch that this job's part took."""

    def __init__(
        self, node: str, job: str, endpoint: str, vote_record: VoteRecord, silence_limit_s: float,
        ports: SuccessionPorts, listener: LeadershipListener, begins: int = 0,
    ) -> None:  # fmt: skip
        self.following: EpochRecord | None = None
        self.state = ElectionState(node, vote_record, begins, ports)
        self._node = node
        self._job = job
        self._begins = begins
        self._endpoint = endpoint
        self._limit = silence_limit_s
        self._ports = ports
        self._listener = listener
        self._heard_before = self.state.heard  # when controllers before the present one were heard
        self._lost = True
        self._fresh_start = True
        self._closed = False  # the other end closed the connection: its process is gone
        self._led = 0  # the epoch in which this node leads
        self._outvoted = False  # the other half has the witness: this node claims nothing
        self._election = Election(self.state, ports)
        self._calls = Calls(self.state, ports)
        self._scans = EpochScans(self.state, ports)

    @property
    def in_contact(self) -> bool:
        """Return whether the controller that this node follows is taken to be alive."""
        return not self._lost

    @property
    def contacts(self) -> bool:
        """Return whether this node is connected to another one for an election."""
        return bool(self._calls.node)

    # -- the controller that we follow -------------------------------------------------------------------------

    def heard(self, epoch: int, now: float) -> None:
        """Take note that the controller of ``epoch`` spoke."""
        if self.following is not None and epoch == self.following.epoch and epoch >= self.state.vote_record.promised:
            # it counts as a vote, so a later process of this node must know it
            if epoch > self.state.vote_record.promised:
                self.state.promise(epoch, self.following.node)
            self._outvoted = self._outvoted and self.following.node == self._node
            self.state.heard = now
            self._lost = self._fresh_start = self._closed = False
            self._election.over()
            self._calls.hang_up()

    def lose(self, now: float, closed: bool = True, alive: bool = False) -> None:
        """Lose the controller: its connection ``closed``, or it is ``alive`` and leads no more."""
        if not self._lost:
            self._lost = True
            self._closed = closed
            self.state.lost_at = now
            self.state.patient_until = now + (SETTLE_S if closed else 0.0)
            self._calls.begin(self.following.node if self.following is not None and not alive else "", now)
            self._scans.begin(now)

    def stepped_down(self, epoch: int, since: float, now: float, outvoted: bool = False) -> None:
        """Take note that the controller of ``epoch`` leads no more and had no quorum since ``since``.

        ``outvoted``: it was this node's own, and the other half has the witness.
        """
        self._outvoted = self._outvoted or outvoted
        if epoch == self._led:
            self._led = 0
        if self.following is not None and epoch == self.following.epoch:
            self.state.heard = max(self._heard_before, min(self.state.heard, since))
        if self.following is not None and epoch >= self.following.epoch:
            self.lose(now, closed=False, alive=True)

    # -- time --------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Let time pass: check for silence, scan the run directory, go on with the election."""
        if not self._lost and now - self.state.heard > self._limit:
            self.lose(now, closed=False)
        if not self._lost:
            return
        self._scans.tick(now)
        if now >= self.state.patient_until and not self._leads and self._calls.due(now):
            self._seek(now)

    @property
    def _leads(self) -> bool:
        """Return whether this node is the controller that it follows, though it may not have heard from itself yet.

        Its connection to itself waits behind the handshakes of all others.
        """
        return self.following is not None and self.following.epoch == self._led >= self.state.vote_record.promised

    def _seek(self, now: float) -> None:
        """Become a candidate if possible, else call the next candidate."""
        if not self.state.knows_others or not self._lost:
            return  # the run directory names the first controller
        self._won(self._election.stand_if_possible(now), now)
        if self._lost and not self._election.stands and now >= self.state.patient_until:
            self._calls.further(now)

    # -- finding a controller ----------------------------------------------------------------------------------

    def answered(
        self, message: m.Candidate | m.RequestVote | m.Redirect | m.NotLeading | m.Welcome, now: float
    ) -> None:
        """Take an answer about who leads, from the node that this one contacted or follows."""
        if isinstance(message, m.NotLeading):
            self.stepped_down(message.epoch, now - message.silent_s, now)
            return
        self._calls.answered(now)
        if isinstance(message, m.RequestVote):
            self._asked_to_vote(message, now)
        elif isinstance(message, m.Redirect | m.Welcome) and not self.state.superseded:
            self._pointed_to(message, now)

    def _asked_to_vote(self, message: m.RequestVote, now: float) -> None:
        if not self._lost or self.state.superseded:
            return
        vote_record = self.state.vote_record
        granted = (message.epoch, message.node) == (vote_record.promised, vote_record.promised_to)
        if not granted and message.epoch > self.state.newest and message.version >= self.state.membership.version:
            self._election.withdraw()  # an earlier candidate has this vote
            self.state.promise(message.epoch, message.node)
            granted = True
        if granted:
            self.state.patient_until = now + SETTLE_S
            self._ports.to_controller(m.Vote(self._node, message.epoch, self.state.silent_s(now)))
        else:
            self._calls.refuse(now)

    def _pointed_to(self, message: m.Redirect | m.Welcome, now: float) -> None:
        known = self.following.epoch if self.following is not None else 0
        record = EpochRecord(message.epoch, message.node, message.endpoint, self._job)
        if message.epoch < self.state.vote_record.promised:
            if self._lost and message.node != self._calls.node:  # the node must learn of the promise
                self._calls.address(message.node, message.endpoint, now)
        elif self.state.claimed_after_update(message.epoch) and message.node != self._calls.node:
            self._tell_what_we_know(message.node, message.endpoint, now)
        elif message.epoch > known or (self._calls.node and isinstance(message, m.Redirect) and message.epoch == known):
            self._follow(record, now)  # once: each call gets an answer, and a connection costs a handshake

    # -- the election: see ``candidate`` --------------------------------------------------------------------------

    def peer_said(self, message: m.NoLeader | m.Vote, now: float) -> None:
        """Take a call or vote of another agent."""
        leads = self.following is not None and self.following.epoch == self._led  # though it may not have heard itself
        if isinstance(message, m.Vote):
            if leads and message.epoch == self._led:
                self._point_out(message.node)  # it came too late for the welcome that all voters get
            else:
                self._won(self._election.voted(message, now), now)
        elif self.following is None or (self._lost and not leads):
            self.state.update_voters(message.membership)
            self._won(self._election.leaderless_called(message, now), now)
        elif leads and self._led % 2 and message.membership.version > self.state.membership.version:
            self.state.update_voters(message.membership)
            self._listener.step_down("others know of later voters")
        elif message.newest > self.following.epoch and self.following.node == self._node:
            self._listener.step_down("a newer epoch was promised")  # an election brings an epoch that it may follow
        else:
            self._point_out(message.node)

    def _point_out(self, node: str) -> None:
        if self.following is not None:
            record = self.following
            self._ports.to_caller(node, m.Redirect(record.epoch, record.node, record.endpoint))

    def witness_claimed(self, witness: str, holder: str, now: float) -> None:
        """Take the holder of the witness that this node asked for."""
        self._won(self._election.witness_claimed(witness, holder, now), now)

    def _won(self, won: Won | None, now: float) -> None:
        """Lead if a quorum has voted for this node."""
        if won is not None:
            self._led = won.epoch
            self._listener.lead(self._term(won.epoch, won.witnessed, won.silent_s, won.supporters))
            self._follow(EpochRecord(won.epoch, self._node, self._endpoint, self._job), now)

    def _term(
        self, epoch: int, witnessed: bool = False, silent_s: float = 0.0, supporters: frozenset[str] = frozenset(),
        first: bool = False,
    ) -> Term:  # fmt: skip
        return Term(epoch, self._node, self._endpoint, self.state.membership, witnessed, silent_s, supporters, first)

    # -- the run directory -------------------------------------------------------------------------------------

    def scanned(self, record: EpochRecord | None, pulse: int | None, now: float) -> None:
        """Take the result of a scan: the newest epoch of any job, or None, and the pulse of its controller."""
        self._scans.over()
        if record is not None and record.epoch < self._begins:
            record = None  # a cached directory: this job's epoch was there before this process
        if record is not None:
            known = self.following.epoch if self.following else self._begins
            news = self._scans.is_news(record.epoch, pulse)
            ours = record.job == self._job or not self._job  # a joiner takes part in another job's run
            self.state.superseded = self.state.superseded or (not ours and record.epoch > self._begins)
            newer = (
                record.epoch > known and record.epoch >= self.state.vote_record.promised and not self.state.superseded
            )
            if ours and newer and record.node and not self._is_dead_self(record):
                if not self.state.claimed_after_update(record.epoch):
                    self._follow(record, now)
                    return
                if news:  # else it is dead, or knows already
                    self._tell_what_we_know(record.node, record.endpoint, now)
            moves = news and self._scans.moved(record.epoch, pulse, now)
            if ours and moves and record.epoch < self.state.vote_record.promised:
                self._tell_what_we_know(record.node, record.endpoint, now)
        if self._may_claim_first(record, now):
            self._scans.claim_next(max(self.state.newest, record.epoch if record else 0))

    def _tell_what_we_know(self, node: str, endpoint: str, now: float) -> None:
        """Tell a controller of a newer promise or later voters. It is elected anew, or steps down."""
        if self._lost and not self._election.stands and node not in (self._node, self._calls.node):
            self._calls.address(node, endpoint, now)

    def _may_claim_first(self, record: EpochRecord | None, now: float) -> bool:
        """Return whether this node may claim a job's first epoch by creating its file: normally the first node does."""
        if not self._lost or self.state.knows_others or self.state.superseded or self._outvoted:
            return False
        others = record is not None and record.job == self._job and record.node != self._node
        if others and not self._closed and not self._scans.still(now):
            return False  # of thousands of nodes, most go no further
        if self._node not in self.state.membership.nodes:
            return False
        candidates = [
            node for node in self.state.membership.voters.nodes if self.following is None or node != self.following.node
        ]
        turn = candidates.index(self._node) if self._node in candidates else len(candidates)
        return now >= self.state.lost_at + turn * TURN_S

    def claimed(self, epoch: int, won: bool, now: float) -> None:
        """Take the result of a claim. If won, this node leads, though no agent follows yet."""
        self._scans.over()
        self.state.newest = max(self.state.newest, epoch)
        if won and epoch > self.state.vote_record.promised and self._lost:
            self.state.promise(epoch, self._node)
            self._led = epoch
            self._listener.lead(self._term(epoch, first=True))
            self._follow(EpochRecord(epoch, self._node, self._endpoint, self._job), now)

    def newest_without_leader(self, now: float) -> int | None:
        """Return the newest epoch known, also from the run directory; None while its pulse moves, so others go on."""
        return None if self._scans.has_leader(now) else max(self.state.newest, self._scans.newest)

    def storage_failed(self, now: float) -> None:
        """Try again later: the run directory did not answer."""
        self._scans.failed(now)
        self._election.storage_failed()

    def _is_dead_self(self, record: EpochRecord) -> bool:
        """Return whether the record names this node, at its start: then it is of an earlier, dead process."""
        return self._fresh_start and record.node == self._node

    def _follow(self, record: EpochRecord, now: float) -> None:
        connected = self._calls.node == record.node and record.node != self._node
        patience = self._limit / 2 + (self.state.crowd_s if self._fresh_start else 0.0)
        if self.following is not None and record.epoch == self.following.epoch:
            # the node that named it may not know yet that it is gone
            patience = min(patience, TURN_S + self.state.crowd_s)
        if self.following is None or record.epoch != self.following.epoch:
            self._heard_before = self.state.heard
        self.following = record
        self.state.newest = max(self.state.newest, record.epoch)
        self._lost = True
        self.state.lost_at = now  # until it sends something
        self._closed = False
        self._election.withdraw()
        self._calls.start_over()
        self.state.patient_until = now + patience
        self._scans.follow(record.epoch, now, patience)
        self._listener.follow(record, connected)
