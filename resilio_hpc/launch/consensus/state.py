"""What an agent knows of who leads and who votes. One state: to look for a controller, and to stand for one. Pure."""

from __future__ import annotations

import msgspec

from resilio_hpc.launch.consensus.succession_ports import SuccessionPorts
from resilio_hpc.launch.protocol.membership import Membership
from resilio_hpc.launch.protocol.vote import Ballot

HANDSHAKES_PER_S = 500  # that a node is sure to manage: with thousands, everything takes longer


class ElectionState:
    """``begins``: the epoch that our part of the run took. Times are monotonic seconds.

    ``newest``: the newest epoch that is known. ``heard``: when a controller last spoke. ``lost_at``: when it was lost.
    ``patient_until``: no other node is called before. ``superseded``: a later job of the run has begun, so no node of
    this one may lead any more.
    """

    def __init__(self, node: str, ballot: Ballot, begins: int, ports: SuccessionPorts) -> None:
        self.node = node
        self.ballot = ballot
        self.newest = max(ballot.promised, ballot.membership.epoch, begins)
        self.heard = self.lost_at = self.patient_until = ports.monotonic()
        self.superseded = False
        self._ports = ports

    @property
    def membership(self) -> Membership:
        """The newest voters known."""
        return self.ballot.membership

    @property
    def crowd_s(self) -> float:
        """How long it takes until all voters have connected to one of them."""
        return len(self.membership.voters.nodes) / HANDSHAKES_PER_S

    @property
    def repeat_s(self) -> float:
        """After how long what had no answer is said again: sooner, it would only be one more in a long queue."""
        return self.crowd_s / 2

    def silent_s(self, now: float) -> float:
        """How long no controller was heard."""
        return now - self.heard

    def enrol(self, membership: Membership) -> bool:
        """Keep a membership that is newer than ours. False: ours is newer."""
        if membership.version > self.membership.version:
            self._keep(msgspec.structs.replace(self.ballot, membership=membership))
        return membership.version >= self.membership.version

    def promise(self, epoch: int, node: str) -> None:
        """Vote for ``node`` in ``epoch``: nothing older is followed afterwards."""
        self.newest = max(self.newest, epoch)
        self._keep(msgspec.structs.replace(self.ballot, promised=epoch, promised_to=node))

    def _keep(self, ballot: Ballot) -> None:
        if ballot != self.ballot:
            self.ballot = ballot
            self._ports.keep_ballot(ballot)
