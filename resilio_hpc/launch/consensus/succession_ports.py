"""Interfaces of an election: its effects, the listener for its result, and the agent beside a controller."""

from __future__ import annotations

from typing import Protocol

from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.vote import EpochRecord, Term, VoteRecord


class ElectionFiles(Protocol):
    """What an election asks of the run directory. No call blocks; results come back as events."""

    def scan_epochs(self) -> None:
        """Read the newest epoch record and its pulse → ``scanned`` or ``storage_failed``."""

    def claim_epoch(self, epoch: int) -> None:
        """Create the epoch's record → ``claimed`` or ``storage_failed``."""

    def claim_witness(self, witness: str) -> None:
        """Create the witness unless it exists; its holder → ``witness_claimed``, or ``storage_failed``."""

    def abandon(self, epoch: int, reason: str) -> None:
        """Write the verdict of a job without a controller, unless an epoch after ``epoch`` began → ``abandoned``."""


class SuccessionPorts(Protocol):
    """Effects of an election. No call blocks; results come back as events. Part of ``agent_ports.Ports``."""

    @property
    def files(self) -> ElectionFiles:
        """Return the run directory, as far as an election needs it."""

    def monotonic(self) -> float:
        """Return the seconds of a clock that does not jump."""

    def to_controller(self, message: m.ToController) -> None:
        """Queue a message to the node that this one follows or contacts."""

    def to_caller(self, node: str, message: m.ToAgent) -> None:
        """Queue a message to an agent that called this one."""

    def contact(self, node: str, endpoint: str) -> None:
        """Connect to another agent."""

    def keep_vote_record(self, vote_record: VoteRecord) -> None:
        """Write to this node's disk before any later message is sent."""


class LeadershipListener(Protocol):
    """Acts on the result of an election: the agent."""

    def follow(self, record: EpochRecord, connected: bool) -> None:
        """Follow a controller. ``connected``: this node is connected to it already."""

    def lead(self, term: Term) -> None:
        """Lead: this node won."""

    def step_down(self, reason: str) -> None:
        """Stop leading."""


class LivesIn(Protocol):
    """What the host of a controller needs of its agent (``agent_core``)."""

    def peer_said(self, message: m.NoLeader | m.Vote) -> None:
        """Take a message of an agent that called because of an election."""

    def taken_for_controller(self, message: m.Hello | m.Heartbeat) -> None:
        """Take a message of an agent that follows this node, though no controller runs here."""

    def stepped_down(self, epoch: int, since: float, outvoted: bool) -> None:
        """Take note that the controller has ended."""
