"""What an agent's decisions can do to the world: real in ``agent``, virtual in a simulator."""

from __future__ import annotations

from typing import Any, Protocol

from resilio_hpc.core import rank_link
from resilio_hpc.launch.config.agent_settings import Graces
from resilio_hpc.launch.consensus.succession_ports import SuccessionPorts
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.vote import EpochRecord, Term
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.rank_owner import StopHow

AT_ONCE = StopHow()


NO_GRACE = Graces()


class Ports(SuccessionPorts, Protocol):
    """What an agent can do to the world. None of it blocks; answers come back as events."""

    def unix(self) -> float:
        """Unix seconds, for what is written down."""

    def follow(self, record: EpochRecord) -> None:
        """Connect to a controller."""

    def become_controller(self, term: Term) -> None:
        """We were elected: be the controller of that epoch."""

    def step_down(self, reason: str) -> None:
        """Be it no more."""

    def stop_ranks(self, how: StopHow, keep_stores_from: int) -> None:
        """End all ranks and their descendants → ``all_stopped``; stores of older rounds end too."""

    def terminate_ranks(self) -> None:
        """SIGTERM to all ranks; nothing is forced."""

    def open_store(self, round_number: int) -> None:
        """Open the rendezvous store of a round → ``store_ready`` or ``store_died``."""

    def spawn(self, local: LocalRound, start: m.Start) -> None:
        """Start the ranks of a round → ``ranks_started`` or ``spawn_failed``.

        Have brought here what they restore from others' memory, or → ``copies_failed``.
        """

    def tell_rank(self, local_rank: int, message: rank_link.AgentMessage) -> None:
        """Send to an attached rank."""

    def persist(self, message: m.PersistStep, member: m.Member, world_size: int) -> None:
        """Write this node's file of a step → ``persisted`` or ``persist_failed``; keep copies of the partner's."""

    def commit(self, message: m.CommitStep) -> None:
        """Write the manifest of a step → ``commit_done`` or ``persist_failed``."""

    def held(self) -> tuple[m.Held, ...]:
        """Whole snapshots in this node's memory, and copies of others'."""

    def copy_port(self) -> int:
        """Where other nodes may fetch them; 0: nowhere."""

    def forget_snapshots_after(self, step: int, life: m.Life) -> None:
        """Drop the snapshots of later steps: that life goes on from this one."""

    def record(self, kind: str, **fields: Any) -> None:
        """Write to the ledger."""

    def keep(self, state: m.RoundState) -> None:
        """Remember on this node, for a successor of this process."""

    def leave(self, verdict: str, exit_code: int) -> None:
        """End this process."""
