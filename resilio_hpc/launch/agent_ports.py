"""What an agent's decisions can do to the world: real in ``agent``, virtual in a simulator."""

from __future__ import annotations

from typing import Any, Protocol

from resilio_hpc.core import rank_link
from resilio_hpc.launch import messages as m
from resilio_hpc.launch.local_round import LocalRound
from resilio_hpc.launch.succession import EpochRecord


class Ports(Protocol):
    """What an agent can do to the world. None of it blocks; answers come back as events."""

    def unix(self) -> float:
        """Unix seconds, for what is written down."""

    def monotonic(self) -> float:
        """Seconds of a clock that does not jump."""

    def to_controller(self, message: m.ToController) -> None:
        """Queue a message to the controller that we follow."""

    def follow(self, record: EpochRecord) -> None:
        """Connect to a controller."""

    def become_controller(self, epoch: int) -> None:
        """Our claim won: be the controller of that epoch."""

    def scan_epochs(self) -> None:
        """Read the newest epoch record and its pulse → ``scanned`` or ``storage_failed``."""

    def claim_epoch(self, epoch: int) -> None:
        """Create the epoch's record → ``claimed`` or ``storage_failed``."""

    def stop_ranks(self, signal_first: bool, grace_s: float, keep_stores_from: int) -> None:
        """End all ranks and their descendants → ``all_stopped``; stores of older rounds end too."""

    def terminate_ranks(self) -> None:
        """SIGTERM to all ranks; nothing is forced."""

    def open_store(self, round_number: int) -> None:
        """Open the rendezvous store of a round → ``store_ready`` or ``store_died``."""

    def spawn(self, local: LocalRound, start: m.Start) -> None:
        """Start the ranks of a round → ``ranks_started`` or ``spawn_failed``."""

    def tell_rank(self, local_rank: int, message: rank_link.AgentMessage) -> None:
        """Send to an attached rank."""

    def persist(self, message: m.Persist, member: m.Member, world_size: int) -> None:
        """Write this node's file of a step → ``persisted`` or ``persist_failed``."""

    def commit(self, message: m.Commit) -> None:
        """Write the manifest of a step → ``commit_done`` or ``persist_failed``."""

    def held(self) -> tuple[m.Held, ...]:
        """Whole snapshots in this node's memory."""

    def forget_snapshots_after(self, step: int) -> None:
        """Drop the snapshots of later steps."""

    def record(self, kind: str, **fields: Any) -> None:
        """Write to the ledger."""

    def keep(self, state: m.RoundState) -> None:
        """Remember on this node, for a successor of this process."""

    def leave(self, verdict: str, exit_code: int) -> None:
        """End this process."""
