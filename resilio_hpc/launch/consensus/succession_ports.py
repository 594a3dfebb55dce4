"""What an election can do to the world, and whom it tells how it ended."""

from __future__ import annotations

from typing import Protocol

from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.vote import Ballot, EpochRecord, Term


class SuccessionPorts(Protocol):
    """None of it blocks; answers come back as events. Part of ``agent_ports.Ports``."""

    def monotonic(self) -> float:
        """Seconds of a clock that does not jump."""

    def to_controller(self, message: m.ToController) -> None:
        """Queue a message to the node that we follow or court."""

    def to_orphan(self, node: str, message: m.ToAgent) -> None:
        """Queue a message to an agent that called this one."""

    def court(self, node: str, endpoint: str) -> None:
        """Connect to another agent."""

    def scan_epochs(self) -> None:
        """Read the newest epoch record and its pulse → ``scanned`` or ``storage_failed``."""

    def claim_epoch(self, epoch: int) -> None:
        """Create the epoch's record → ``claimed`` or ``storage_failed``."""

    def claim_witness(self, witness: str) -> None:
        """Create the witness unless it is there, tell whose it is → ``witness_claimed`` or ``storage_failed``."""

    def abandon(self, epoch: int, reason: str) -> None:
        """Write the verdict of a job in which nobody leads, unless an epoch after ``epoch`` began → ``abandoned``."""

    def keep_ballot(self, ballot: Ballot) -> None:
        """Write to this node's disk, before anything else is said."""


class Chief(Protocol):
    """Who acts on an election's end: the agent."""

    def follow(self, record: EpochRecord, connected: bool) -> None:
        """A controller is known; ``connected``: we are connected to it already."""

    def lead(self, term: Term) -> None:
        """This node won."""

    def step_down(self, reason: str) -> None:
        """This node leads no more."""
