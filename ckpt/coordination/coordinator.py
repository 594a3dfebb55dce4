"""Decisions about checkpoints: which copy to restore, when a snapshot goes to disk, how a save ended.

Under resilio-launch the controller decides (``agent_coordinator``); without it, this process and its peers do
(``local_coordinator.LocalCoordinator``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from resilio_hpc.ckpt.format.restore_point import RestorePoint
from resilio_hpc.ckpt.store.urls import checkpoints_path
from resilio_hpc.core.directories import directory_path
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.rank_link import STANDBY_VARIABLE
from resilio_hpc.core.tiers import SnapshotRoom, Stage, Tier

ROUND_OVER = "its ranks could not go on"
"""Why saves of a round fail that is over; the snapshots may become durable with the next one."""
OnStage = Callable[[int, Stage, str], None]
"""Called with (step, stage, error): stage LOCAL, COMMITTED or FAILED; step -1: every step still waited for."""


@dataclass(frozen=True)
class Place:
    """This process among the others of its run."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    round: int
    run_id: str

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Place:
        """Return the place by torchrun's variables, or those of srun or mpirun; a world of one without them.

        A standby process has no rank yet: its rank and local rank are below 0.
        """

        def number(names: Sequence[str], default: int) -> int:
            for name in names:
                if environment.get(name, "").isdigit():
                    return int(environment[name])
            return default

        standby = environment.get(STANDBY_VARIABLE)
        return cls(
            -1 if standby else number(("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"), 0),
            int(standby)
            if standby
            else number(("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"), 0),
            number(("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"), 1),
            number(("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"), 1),
            number(("RESILIO_ROUND", "TORCHELASTIC_RESTART_COUNT"), 0),
            environment.get("RESILIO_RUN_ID", ""),
        )


class Coordinator(Protocol):
    """The interface of a Checkpointer to its coordinator.

    Calls are short and raise no I/O errors, unless they say so.
    """

    place: Place
    arena_directory: Path | None
    """Where this node's arenas lie; None: the Checkpointer keeps its own, which end with the process."""
    local_directory: Path | None
    """On the node's own disk: steps are written there first, and read from there; None: nowhere."""
    peer_disks: Path | None
    """What other nodes' disks have, before the shared file system is read: see ``peer_disks``."""
    read_ahead: Path | None
    """See ``is_read_ahead``."""
    memory_step: int
    """The step in this node's memory that is to be restored, which is made ready while the model is built; or -1."""

    def await_arenas(self) -> None:
        """Wait until no other process fills these arenas: a lost node's snapshots arrive while ranks initialise."""
        ...

    def restore_points(self) -> Sequence[RestorePoint]:
        """Return the copies to try, in order; empty: begin from nothing. Raises CheckpointError."""
        ...

    def restored(self, step: int, source: Tier | None, seconds: float) -> None:
        """Take note that the state of ``step`` is in place (-1: there was nothing to restore)."""
        ...

    def restore_failed(self, point: RestorePoint, error: str) -> None:
        """Take note that a copy is bad. Return if the next point may be tried; else the process may be ended."""
        ...

    def before_save(self, step: int) -> None:
        """Begin a save of ``step`` (may wait for an earlier one).

        Raises CheckpointError when it must not be made; SaveRefused when it may be made later.
        """
        ...

    def snapshot_taken(self, step: int, arena: Path, size_bytes: int, blocked_s: float) -> None:
        """Make the snapshot of ``step``, whole in ``arena``, durable in the background."""
        ...

    def snapshot_room(self, step: int, room: SnapshotRoom, why: str) -> None:
        """Take note that from ``step`` on this rank's snapshots have more room, or less."""
        ...

    def on_stage(self, callback: OnStage) -> None:
        """Call ``callback``, from any thread, whenever a step reaches a stage."""
        ...


LOCAL_VARIABLE = "RESILIO_LOCAL_CHECKPOINT_DIR"
PEER_DISKS_VARIABLE = "RESILIO_PEER_DISKS"
READ_AHEAD_VARIABLE = "RESILIO_READ_AHEAD"
ARRIVING = "arriving"
"""What $RESILIO_RESTORE says in the place of ``memory`` when the snapshot is on its way from another node's."""

_current: Coordinator | None = None


def use(coordinator: Coordinator | None) -> None:
    """Set the coordinator of every Checkpointer made from now on (None: each finds its own)."""
    global _current
    _current = coordinator


def current() -> Coordinator | None:
    """Return the coordinator given to ``use``."""
    return _current


def checkpoint_directory(remote: str | os.PathLike[str] | None, environment: Mapping[str, str]) -> Path:
    """Return ``remote`` or $RESILIO_CHECKPOINT_DIR. Raises UsageError when both are missing, or it is not usable."""
    if remote:
        return checkpoints_path(remote, "the directory of checkpoints")
    chosen = environment.get("RESILIO_CHECKPOINT_DIR")
    if not chosen:
        raise UsageError("where should checkpoints go? give Checkpointer(remote=…) or set RESILIO_CHECKPOINT_DIR")
    return checkpoints_path(chosen, "RESILIO_CHECKPOINT_DIR")


def local_directory(local: str | os.PathLike[str] | None, environment: Mapping[str, str]) -> Path | None:
    """Return ``local`` or $RESILIO_LOCAL_CHECKPOINT_DIR, None without both. Raises UsageError when it is not usable."""
    if local:
        return directory_path(local, "local")
    chosen = environment.get(LOCAL_VARIABLE)
    return directory_path(chosen, LOCAL_VARIABLE) if chosen else None


def peer_disks_file(environment: Mapping[str, str]) -> Path | None:
    """Return the agent's file about other nodes' disks, if there is one: see ``peer_disks``."""
    known = environment.get(PEER_DISKS_VARIABLE)
    return Path(known) if known else None


def is_read_ahead(begun: Path | None, step: int) -> bool:
    """Return whether that step is, or was, read into the page cache (``read_ahead``).

    ``begun``: the file that names it.
    """
    try:
        return begun is not None and begun.read_bytes() == b"%d" % step
    except OSError:
        return False
