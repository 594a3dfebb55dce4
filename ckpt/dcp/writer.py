"""A storage writer for ``torch.distributed.checkpoint``: one shard file per process, committed by the coordinator.

The processes meet in the collectives of torch alone. Each copies its part into an arena, checksummed, and writes its
file from there; the record of the file goes to the coordinator with the results, and ``finish`` commits. When a process
fails, ``finish`` is not called, and nothing is committed.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from resilio_hpc.ckpt.coordination import world
from resilio_hpc.ckpt.coordination.coordinator import local_directory, peer_disks_file
from resilio_hpc.ckpt.dcp import state as dcp_state
from resilio_hpc.ckpt.format.manifest import ShardRecord, Writer
from resilio_hpc.ckpt.saver import saver
from resilio_hpc.ckpt.saver.messages import LocalFailed, Persist, Progress
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot, copy_threads
from resilio_hpc.ckpt.state.tree import Flattened
from resilio_hpc.ckpt.store import checkpoint_index, writers
from resilio_hpc.ckpt.store.commit import commit_step, open_staging
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.store.staging import staging_directory
from resilio_hpc.ckpt.store.urls import checkpoints_path
from resilio_hpc.ckpt.tiers.peer_disks import this_node
from resilio_hpc.core.errors import CheckpointError, UsageError
from resilio_hpc.core.standard_streams import say


class ResilioWriter(StorageWriter):
    """Storage for ``dcp.save`` and ``dcp.async_save``: commits ``directory/step-<step>``, as ``Checkpointer`` does.

    All processes give the same arguments. A step that is there already is replaced, once the new one is whole.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        step: int,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        keep_hours: float | None = None,
        keep_gb: float | None = None,
        local: str | os.PathLike[str] | None = None,
    ) -> None:
        """``directory``: of the checkpoints, on the shared file system.

        ``keep_last`` and so on: committed steps to keep (see ``retention.Retention``).

        ``local``: directory on this node's own disk: files are written there first, and read from there by
        ``ResilioReader`` (default $RESILIO_LOCAL_CHECKPOINT_DIR). The copy of the state goes there when memory has no
        room for it (default: the temporary directory). Raises UsageError for a step that is no whole number from 0 on,
        and for such settings.
        """
        self.directory = checkpoints_path(directory, "the directory of checkpoints")
        self.step = checkpoint_index.check_step(step)
        self._retention = Retention(keep_last, keep_every, keep_hours, keep_gb)
        self._local = local_directory(local, os.environ)
        self._rank = 0
        self._plan: SavePlan | None = None

    @property
    def checkpoint_id(self) -> str:
        """Return the directory of the step, as torch's logs name a checkpoint."""
        return str(checkpoint_index.step_directory(self.directory, self.step))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a path."""
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Reset for a save; ``checkpoint_id``: another directory of checkpoints, instead of the one given at first."""
        if checkpoint_id:
            self.directory = checkpoints_path(checkpoint_id, "checkpoint_id")
        self._plan = None

    def storage_meta(self) -> StorageMeta:
        """Return what planners may need to know."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """``kwargs``: the rank in the process group. Raises UsageError where processes would not meet."""
        if not kwargs.get("use_collectives", True):
            raise UsageError("a step is committed for all processes together: save with use_collectives=True")
        self._rank = int(kwargs.get("rank") or 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keep all that this process has, whichever process writes it."""
        if plan.usable:
            self._plan = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make a new staging directory, before any process writes. Raises CheckpointError, OSError."""
        with _commits:
            open_staging(self.directory, self.step, *_life(), self._me())
        return plans

    def _me(self) -> Writer:
        known = world.group()
        if known is None or known.world_size == 1:
            return writers.this_process(writers.process_job())
        return writers.this_process(world.session(os.environ, world.place_of(*known[1:], os.environ)))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's file; it is durable when the future is ready, whose one result is its record.

        Raises UsageError for what a checkpoint cannot hold, OSError for a disk that is full or fails.
        """
        record = self._write(dcp_state.flattened(self._plan, plan, planner))
        future: Future[list[WriteResult]] = Future()
        said = msgspec.json.encode((self.step, record))
        future.set_result([WriteResult(MetadataIndex(record.file), record.size_bytes, said)])
        return future

    def _write(self, state: Flattened) -> ShardRecord:
        known = world.group()
        place = world.place_of(self._rank, known.world_size if known else 1, os.environ)
        owner = Owner(
            self._rank, place.local_rank, place.world_size, place.local_world_size, place.round, "own", place.run_id
        )
        staging = staging_directory(self.directory, self.step, *_life())
        writers.make_staging(staging, None)
        spill = self._local or Path(tempfile.gettempdir()).absolute()
        with (
            _arenas(owner, spill) as arenas,
            ThreadPoolExecutor(copy_threads(place.local_world_size), "resilio-copy") as pool,
        ):
            path, _ = Snapshot(arenas, self.step, state, pool).finish()
            request = Persist(
                self.step, *_life(), place.world_size, self._rank, [str(path)], str(self.directory),
                str(self._local or ""), f"process-{place.local_rank}", verify=self._retention.needs_verified_writes,
            )  # fmt: skip
            record = saver.persist(request, self._heard, None).record
        # a node's own disk is found by its agent's name
        return msgspec.structs.replace(record, node=record.node and this_node(peer_disks_file(os.environ)))

    def _heard(self, progress: Progress) -> None:
        if isinstance(progress, LocalFailed):
            say(f"rank {self._rank}: {progress.error}")

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the files of all processes. Raises CheckpointError, OSError; then nothing is committed."""
        try:
            said = [msgspec.json.decode(result[0].storage_data, type=tuple[int, ShardRecord]) for result in results]
        except (IndexError, TypeError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"step {self.step}: a process did not say what it has written: {error}") from error
        if mixed := sorted({step for step, _ in said} - {self.step}):
            raise CheckpointError(
                f"step {self.step}: a process has written step {mixed[0]}: saves of one process group do not overlap; "
                "wait for one async_save before the next, or give each a process_group of its own"
            )
        shards = [msgspec.structs.replace(record, checks=msgspec.UNSET) for _, record in said]
        me = None if _life()[0] else self._me()
        try:
            with _commits:
                others = commit_step(
                    self.directory, self.step, *_life(), len(shards), "own", shards, self._retention, writer=me
                )
        finally:
            writers.end(staging_directory(self.directory, self.step, *_life()))
        if others and others not in _told:
            _told.add(others)
            say(others)
        checkpoint_index.remove_recycled_at_exit(self.directory)
        metadata.storage_meta = self.storage_meta()


def _life() -> tuple[int, int]:
    """Return epoch and round of this life of the run: the launcher's, else 0."""
    found = [os.environ.get(name, "") for name in ("RESILIO_EPOCH", "RESILIO_ROUND")]
    epoch, round_ = (int(text) if text.isdigit() else 0 for text in found)
    return epoch, round_


_told: set[str] = set()
_idle: dict[Path, ArenaPair] = {}
_idle_lock = threading.Lock()
_commits = threading.Lock()  # so that no save removes what another one is about to commit


def _forget_all() -> None:
    """Forget the arenas, in a forked child: its parent uses that memory."""
    global _idle_lock, _commits
    _idle_lock, _commits = threading.Lock(), threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget_all)


@contextmanager
def _arenas(owner: Owner, local: Path) -> Iterator[ArenaPair]:
    """Give an arena without a name, kept for the next save: existing memory halves the time of a copy."""
    with _idle_lock:
        pair = _idle.pop(local, None)
    if pair is None:
        pair = ArenaPair(None, owner, local / f"resilio-arenas-{os.getuid()}")
    pair.owner = owner
    yield pair
    pair.drop_after(-1)  # the next save then has the same slot
    if pair.on_disk:
        why = f"no room for the state in shared memory ({pair.why_on_disk})"
        say(f"rank {owner.rank}: {why}; it went to {local}")
        return
    with _idle_lock:
        _idle.setdefault(local, pair)
