"""State of an election on one node, shared by follower and candidate: leader, voters, votes. Pure."""

from __future__ import annotations

import msgspec

from resilio_hpc.launch.consensus.succession_ports import SuccessionPorts
from resilio_hpc.launch.protocol.membership import Membership
from resilio_hpc.launch.protocol.vote import VoteRecord

HANDSHAKES_PER_S = 500  # handshakes that one node completes; waits grow with the number of nodes


class ElectionState:
    """What one node knows. ``begins``: the epoch that this job's part took. Times are monotonic seconds.

    ``newest``: the newest epoch that is known. ``heard``: when a controller last spoke. ``lost_at``: when it was lost.
    ``patient_until``: no other node is called before. ``superseded``: a later job of the run has begun, so no node of
    this job may lead.
    """

    def __init__(self, node: str, vote_record: VoteRecord, begins: int, ports: SuccessionPorts) -> None:
        self.node = node
        self.vote_record = vote_record
        self.newest = max(vote_record.promised, vote_record.membership.epoch, begins)
        self.heard = self.lost_at = self.patient_until = ports.monotonic()
        self.superseded = False
        self._ports = ports

    @property
    def membership(self) -> Membership:
        """Return the newest voters known."""
        return self.vote_record.membership

    @property
    def knows_others(self) -> bool:
        """Return whether this node has an address of another voter, or knows that it is the only one."""
        voters = self.membership.voters
        if not self.membership.epoch:
            return False
        return len(voters.nodes) == 1 or any(entry.number for entry in voters.entries() if entry.node != self.node)

    def claimed_after_update(self, epoch: int) -> bool:
        """Return whether ``epoch`` was claimed after voters were set: its controller may count former voters."""
        return epoch % 2 == 1 and 0 < self.membership.epoch < epoch

    @property
    def crowd_s(self) -> float:
        """Return how long it takes until all voters have connected to one of them."""
        return len(self.membership.voters.nodes) / HANDSHAKES_PER_S

    @property
    def repeat_s(self) -> float:
        """Return after how long an unanswered message is sent again. Sooner, it only lengthens the queue."""
        return self.crowd_s / 2

    def silent_s(self, now: float) -> float:
        """Return how long no controller was heard."""
        return now - self.heard

    def update_voters(self, membership: Membership) -> bool:
        """Keep a membership that is not older than the present one. Return False for an older one."""
        if membership.version > self.membership.version:
            self._keep(msgspec.structs.replace(self.vote_record, membership=membership))
        return membership.version >= self.membership.version

    def promise(self, epoch: int, node: str) -> None:
        """Vote for ``node`` in ``epoch``: this node follows no older epoch afterwards."""
        self.newest = max(self.newest, epoch)
        self._keep(msgspec.structs.replace(self.vote_record, promised=epoch, promised_to=node))

    def _keep(self, vote_record: VoteRecord) -> None:
        if vote_record != self.vote_record:
            self.vote_record = vote_record
            self._ports.keep_vote_record(vote_record)
