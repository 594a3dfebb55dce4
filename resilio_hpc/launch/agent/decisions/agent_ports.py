"""What an agent's decisions do to the outside: the real one is in ``agent``, the virtual one in the simulator."""

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


class ServicePorts(Protocol):
    """What an agent's decisions do on its own node. No call blocks; answers come back as events."""

    def stop_ranks(self, how: StopHow, keep_stores_from: int) -> None:
        """End all ranks and their descendants → ``all_stopped``; stores of older rounds end too."""

    def save_last_step(self, local: LocalRound, worth: m.LastStep, ahead: bool = False) -> bool:
        """Have the step saved that the ranks finished last → ``last_step_saved``; False: they cannot do so.

        ``ahead``: the round may go on.
        """

    def keep_ranks(self, local: LocalRound) -> bool:
        """Have ranks leave their round that can enter the next one in their processes → ``ranks_left``; False: none."""

    def judge(self, cause: m.Cause | None) -> None:
        """Take what ended the last round, None where that is not known: the console shows no echoes of it."""

    def terminate_ranks(self) -> None:
        """Send SIGTERM to all ranks; no rank is killed."""

    def strike(self, message: m.DrillStrike) -> None:
        """Send a signal to a rank or to this agent: a drill that a user has ordered."""

    def look_at_ranks(self, message: m.LookAtRanks) -> None:
        """Look at all ranks of this node from outside → ``ranks_seen``."""

    def probe(self, message: m.BeginProbe | m.EndProbe) -> None:
        """Start or end this node's checker for a test of nodes; the checker answers to the test's coordinator."""

    def calls(self) -> int:
        """Return how many calls of communication libraries were begun and completed here; -1 where none are seen."""

    def memory(self) -> tuple[int, str]:
        """Return the worst memory level of this node (0: as usual, 1: warning, 2: critical), and what it is about."""

    def open_store(self, round_number: int) -> None:
        """Open the rendezvous store of a round → ``store_ready`` or ``store_died``."""

    def spawn(self, local: LocalRound, start: m.Start) -> None:
        """Start the ranks of a round → ``ranks_started`` or ``spawn_failed``.

        Before that, fetch what they restore from other nodes' memory, or → ``copies_failed``.
        """

    def restart_rank(self, local: LocalRound, local_rank: int) -> None:
        """Start one rank of the round again; the others go on → ``RankEnds.restarted`` or ``spawn_failed``."""

    def tell_rank(self, local_rank: int, message: rank_link.AgentMessage) -> None:
        """Send a message to an attached rank."""

    def persist(self, message: m.PersistStep, member: m.Member, world_size: int) -> None:
        """Write this node's file of a step → ``persisted`` or ``persist_failed``; keep copies of the partner's."""

    def keep_copies(self, message: m.KeepCopies, world_size: int) -> None:
        """Keep replica copies of the partner's snapshots, where ranks hold the same tensors."""

    def commit(self, message: m.CommitStep) -> None:
        """Write the manifest of a step → ``commit_done`` or ``persist_failed``."""

    def held(self) -> tuple[m.Held, ...]:
        """Return the whole snapshots in this node's memory, its own and copies of its partner's."""

    def copy_port(self) -> int:
        """Return the port at which other nodes may fetch copies; 0 without one."""

    def forget_snapshots_after(self, step: int, life: m.Life) -> None:
        """Drop the snapshots of later steps: that life goes on from ``step``."""


class Ports(SuccessionPorts, Protocol):
    """What an agent's decisions can do to the outside. No call blocks; answers come back as events."""

    @property
    def services(self) -> ServicePorts:
        """Return what runs on this node for its ranks."""

    def unix(self) -> float:
        """Return Unix seconds, for what is written down."""

    def follow(self, record: EpochRecord) -> None:
        """Connect to a controller."""

    def become_controller(self, term: Term) -> None:
        """Become the controller of the epoch that this node was elected for."""

    def step_down(self, reason: str) -> None:
        """End the controller of this process."""

    def record(self, kind: str, **fields: Any) -> None:
        """Write to the ledger."""

    def keep(self, state: m.RoundState) -> None:
        """Keep the state on this node, for a restarted agent."""

    def leave(self, verdict: str, exit_code: int) -> None:
        """End this process with the verdict of the run."""
