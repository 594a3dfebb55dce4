"""What ranks need of the agent that owns them, and how they are stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from resilio_hpc.core import rank_link
from resilio_hpc.diagnose.hangs.rank_sight import RankSight
from resilio_hpc.diagnose.slow.rank_facts import NodeFacts, RankWindow
from resilio_hpc.launch.protocol.messages import End
from resilio_hpc.launch.workers.forking import spawner_messages as sm
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.rank_evidence import NO_EVIDENCE, RankEvidence


class StopHow(Struct, frozen=True):
    """``grace_s``: from SIGTERM to SIGKILL, 0: SIGKILL at once.

    ``for_good``: no other round follows, so all ranks get the grace; else only those that handle SIGTERM. ``well``: the
    ranks have ended well; what they left running gets the grace to end, and is not killed. ``keep``: local ranks that
    have left the round, and wait for the next one in their processes.
    """

    grace_s: float = 0.0
    for_good: bool = False
    well: bool = False
    keep: frozenset[int] = frozenset()


class Timekeeper(Protocol):
    """Receives how ranks spend their time."""

    def passed(self, round_number: int, window: int, ranks: tuple[RankWindow, ...], facts: NodeFacts) -> None:
        """Take a window that has ended."""


class TakesEnds(Protocol):
    """Receives the ends of ranks; ``error``: message and traceback; times are Unix seconds."""

    def exited(
        self, local: LocalRound | None, local_rank: int, how: tuple[int | None, int | None], at: float,
        error: tuple[str, str], evidence: RankEvidence = NO_EVIDENCE,
    ) -> None:  # fmt: skip
        """Take note that a rank ended. ``how``: exit code or signal."""

    def restarted(self, local: LocalRound | None, local_rank: int, at: float) -> None:
        """Take note that a rank runs again, whose failure has not ended the round."""

    def raised(
        self, local: LocalRound, local_rank: int, at: float, error: tuple[str, str], evidence: RankEvidence
    ) -> None:
        """Take note that a rank's function ended with an error, and its process waits for the next round."""


class RankEvents(Protocol):
    """Receives the events of ranks: the agent's core. Times are Unix seconds."""

    ready: bool
    slots: int

    @property
    def local(self) -> LocalRound | None:
        """Return the round whose ranks run here."""

    @property
    def times(self) -> Timekeeper:
        """Return what hears how the ranks spend their time."""

    @property
    def ends(self) -> TakesEnds:
        """Return what hears of the ranks' ends."""

    @property
    def ending(self) -> End | None:
        """Return how the run ended, once it has."""

    def rank_said(self, round_number: int, local_rank: int, message: rank_link.RankMessage) -> None:
        """Take a rank's message."""

    def ranks_started(self, round_number: int, seconds: float, mode: str) -> None:
        """Take note that all local ranks run."""

    def spawn_failed(self, local_rank: int, error: str, at: float) -> None:
        """Take note that a rank could not be started."""

    def store_ready(self, round_number: int, port: int) -> None:
        """Take note that the rendezvous store of a round is open."""

    def store_died(self, round_number: int, error: str, at: float) -> None:
        """Take note that the rendezvous store of a round is gone."""

    def all_stopped(self) -> None:
        """Take note that every rank and all its descendants are gone."""

    def ranks_seen(self, number: int, ranks: tuple[RankSight, ...]) -> None:
        """Take what is seen of the ranks from outside, in answer to look ``number``."""

    def spawner_died(self, at: float) -> None:
        """Take note that the spawner is gone, and its ranks and stores with it."""

    def give_up(self, reason: str) -> None:
        """Leave the run: this node cannot run ranks."""


class Surroundings(Protocol):
    """The node's devices, and what the ranks' libraries write."""

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables for all ranks of the node: the devices they may use, what their libraries write."""

    def rank_failed(self, local_rank: int, said: tuple[str, str], log: Path | None) -> None:
        """Take note that a rank ended by itself. ``said``: its message and traceback; ``log``: its standard error."""


class AnySpawner(Protocol):
    """Starts ranks: by fork (``spawner``), or through srun (``mpi.spawner``)."""

    def start(self) -> None:
        """Prepare to start ranks."""

    def filenos(self) -> Iterator[int]:
        """Return the descriptors to poll."""

    def events(self) -> list[sm.SpawnerEvent]:
        """Return what happened since the last call."""

    def spawn(self, command: sm.RankCommand) -> None:
        """Start a rank."""

    def open_store(self, round: int, host: str) -> None:
        """Open the rendezvous store of a round."""

    def stop(
        self,
        signal: int,
        grace_s: float,
        keep_stores_from: int | None,
        *,
        heeded_only: bool = False,
        spare: bool = False,
        keep: tuple[int, ...] = (),
    ) -> None:
        """End every rank with all its descendants, but for ``keep``, pids of ranks that live on."""

    def kill(self) -> object:
        """End everything at once."""

    def release(self) -> list[int]:
        """End, and leave running what ranks left; return the pids of those processes."""
