"""Checkpoints without our launcher: each process writes its own shard file, rank 0 commits.

The processes meet only in the checkpoint directory. A save waits for the one before it, so that every save is written,
by all processes alike. But it does not wait for ever: while the file system hangs, training goes on, and what it saves
then fails. Where one process has given a step up that others wrote, those learn it from its next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from resilio_hpc.ckpt import catalogue, saver
from resilio_hpc.ckpt.coordinator import OnStage, Place, RestorePoint
from resilio_hpc.ckpt.records import ShardRecord
from resilio_hpc.ckpt.retention import Retention
from resilio_hpc.ckpt.saver_messages import Commit, Local, Persist, Persisted, Progress, SaverFailed
from resilio_hpc.core.durable import make_directory, write_atomic
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, os_error_text

_POLL_S = 0.02
_LOOK_S = 1.0
_SESSION_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
)


class _Shard(msgspec.Struct, frozen=True):
    """A process's note to rank 0: my shard is durable. ``session`` tells this run from one that died here before."""

    session: str
    record: ShardRecord | None = None
    error: str = ""


class LocalCoordinator:
    """Coordinator of one process; ``world_size`` of them share the checkpoint directory."""

    arena_directory: Path | None = None

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        retention: Retention,
        patience_s: float = 30.0,
        peers_timeout_s: float = 600.0,
        local: Path | None = None,
    ) -> None:
        """``patience_s``: how long a save waits for the one before. Longer makes sure that every save is written, also
        to a slow disk; shorter lets training go on sooner when the file system hangs. ``peers_timeout_s``: how long the
        background waits for the other processes' parts. ``local``: on the node's own disk, to be written first."""
        self.place = Place.read(environment)
        self.local_directory = local
        self._local_failed = False
        self._directory = directory
        self._retention = retention
        self._session = session(environment, self.place)
        self._callbacks: list[OnStage] = []
        self._patience_s = patience_s
        self._peers_timeout_s = peers_timeout_s
        self._busy: threading.Thread | None = None
        self._busy_with = -1
        self._out_of_patience = False

    def restore_points(self) -> Sequence[RestorePoint]:
        """Every committed step, newest first. Raises CorruptCheckpoint when there are only damaged ones."""
        catalogue.check_not_all_damaged(self._directory)
        steps = catalogue.committed_steps(self._directory)
        for step, why in catalogue.damaged_steps(self._directory).items():
            if self.place.rank == 0:
                print(f"resilio: step {step} is damaged and not restored: {why}", file=sys.stderr)
        return [RestorePoint("committed", step) for step in reversed(steps)]

    def restored(self, step: int, source: str, seconds: float) -> None:
        """Nobody to tell."""

    def restore_failed(self, point: RestorePoint, error: str) -> None:
        """Alone, the next older step may be tried. Among others it may not: they could have restored this one."""
        if self.place.world_size > 1:
            raise CorruptCheckpoint(
                f"step {point.step}: {error}; to go on from an older step in all processes alike, "
                f"remove {catalogue.step_directory(self._directory, point.step)}"
            )
        print(f"resilio: step {point.step} is damaged, trying an older one: {error}", file=sys.stderr)

    def before_save(self, step: int) -> None:
        """Wait for the save before. Raises CheckpointError when it takes too long: at once where one save has already
        waited in vain for the same."""
        if self._busy is None:
            return
        self._busy.join(0 if self._out_of_patience else self._patience_s)
        self._out_of_patience = self._busy.is_alive()
        if self._out_of_patience:
            raise CheckpointError(
                f"step {self._busy_with} is still being written to {self._directory}, {self._patience_s:g} s later; "
                "training goes on without this one (does that file system hang? if it is only slow, save more rarely, "
                "or give Checkpointer a larger patience_s)"
            )

    def snapshot_taken(self, step: int, arena: Path, size_bytes: int, blocked_s: float) -> None:
        """Write it in the background."""
        self._busy_with = step
        self._busy = threading.Thread(target=self._write, args=(step, arena), name="resilio-saver")
        self._busy.start()

    def on_stage(self, callback: OnStage) -> None:
        """See Coordinator."""
        self._callbacks.append(callback)

    def _write(self, step: int, arena: Path) -> None:
        try:
            with contextlib.suppress(OSError):  # what a run that died here noted about this step
                self._note_path(step, self.place.rank).unlink()
            self._persist(step, arena)
            if self.place.rank == 0:
                self._commit(step)
            else:
                self._await_commit(step)
        except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits for this save must hear of it
            text = os_error_text(error, str(self._directory)) if isinstance(error, OSError) else str(error)
            self._note_failure(step, text)
            self._tell(step, "failed", text or type(error).__name__)
        else:
            self._tell(step, "committed", "")

    def _tell(self, step: int, stage: str, error: str) -> None:
        for callback in self._callbacks:
            callback(step, stage, error)

    def _persist(self, step: int, arena: Path) -> None:
        rank, world = self.place.rank, self.place.world_size
        local, holder = str(self.local_directory or ""), f"process-{self.place.local_rank}"
        request = Persist(step, 0, self.place.round, world, rank, [str(arena)], str(self._directory), local, holder)
        answer = saver.serve(request, self._heard)
        if isinstance(answer, SaverFailed):
            raise CheckpointError(answer.error)
        assert isinstance(answer, Persisted)
        write_atomic(self._note_path(step, rank), msgspec.json.encode(_Shard(self._session, answer.record)))

    def _heard(self, progress: Progress) -> None:
        if isinstance(progress, Local):
            self._tell(progress.step, "local", "")
        elif not self._local_failed:
            self._local_failed = True
            print(f"resilio: rank {self.place.rank}: {progress.error}", file=sys.stderr, flush=True)

    def _note_failure(self, step: int, error: str) -> None:
        """So that the peers need not wait for us until their time is over."""
        if self.place.world_size > 1:
            with contextlib.suppress(OSError):
                path = self._note_path(step, self.place.rank)
                make_directory(path.parent)
                write_atomic(path, msgspec.json.encode(_Shard(self._session, error=error)))

    def _commit(self, step: int) -> None:
        shards = [self._shard_of(rank, step) for rank in range(self.place.world_size)]
        world = self.place.world_size
        request = Commit(step, 0, self.place.round, world, str(self._directory), shards, self._retention)
        answer = saver.serve(request)
        if isinstance(answer, SaverFailed):
            raise CheckpointError(answer.error)

    def _shard_of(self, rank: int, step: int) -> ShardRecord:
        """Wait until that rank's part is durable."""
        deadline, look = time.monotonic() + self._peers_timeout_s, time.monotonic() + _LOOK_S
        while (note := self._read_note(step, rank)) is None:
            now = time.monotonic()
            if now > deadline:
                raise CheckpointError(f"rank {rank} has not written its part within {self._peers_timeout_s:g} s")
            if now > look:
                look = now + _LOOK_S
                staged = catalogue.staged_steps(self._directory, 0, self.place.round)
                if any(other > step and self._read_note(other, rank) for other in staged):
                    raise CheckpointError(f"rank {rank} went on without it")
            time.sleep(_POLL_S)
        if note.record is None:
            raise CheckpointError(f"rank {rank}: {note.error}")
        return note.record

    def _await_commit(self, step: int) -> None:
        """Rank 0's commit renames the staging directory away; then the step is there. Its next save removes it."""
        staging = self._note_path(step, 0).parent
        deadline = time.monotonic() + self._peers_timeout_s
        while staging.is_dir():
            if time.monotonic() > deadline:
                raise CheckpointError(f"rank 0 has not committed within {self._peers_timeout_s:g} s")
            note = self._read_note(step, 0)
            if note is not None and note.error:
                raise CheckpointError(f"rank 0: {note.error}")
            time.sleep(_POLL_S)
        if not catalogue.step_directory(self._directory, step).is_dir():
            raise CheckpointError("rank 0 did not commit it")

    def _note_path(self, step: int, rank: int) -> Path:
        staging = catalogue.staging_directory(self._directory, step, 0, self.place.round)
        return staging / f".shard-{rank}.json"

    def _read_note(self, step: int, rank: int) -> _Shard | None:
        try:
            note = msgspec.json.decode(self._note_path(step, rank).read_bytes(), type=_Shard)
        except (OSError, msgspec.MsgspecError):
            return None
        return note if note.session == self._session else None


def session(environment: Mapping[str, str], place: Place) -> str:
    """A name that all processes of this start of the run share, and no other start has (as far as can be known)."""
    parts = [environment.get(name, "") for name in _SESSION_VARIABLES]
    if place.local_world_size == place.world_size:  # one node: all have the same parent, torchrun or mpirun
        parts.append(str(os.getppid() if place.world_size > 1 else os.getpid()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
