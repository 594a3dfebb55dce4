"""The Checkpointer, with which a training script saves and restores."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal

from resilio_hpc.ckpt.coordination import coordinator, world
from resilio_hpc.ckpt.coordination.find_coordinator import find_coordinator
from resilio_hpc.ckpt.coordination.turns import Turns
from resilio_hpc.ckpt.format.manifest import REPLICATED, Layout
from resilio_hpc.ckpt.format.restore_point import RestorePoint
from resilio_hpc.ckpt.handle import OpenSaves, SaveHandle
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.restore.committed_source import CommittedSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.device_copy import CUDA, Device
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot, StateChanged, copy_threads
from resilio_hpc.ckpt.state import tree
from resilio_hpc.ckpt.state.expected import expected_bytes, holds_optimizer
from resilio_hpc.ckpt.state.overlap import fence_before_steps
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.retention import Retention, is_number
from resilio_hpc.ckpt.tiers import bounded_io, local_disk
from resilio_hpc.core import errors
from resilio_hpc.core.directories import directory_path
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, SaveRefused, UsageError, os_error_text
from resilio_hpc.core.tiers import Tier
from resilio_hpc.native import why_portable


@functools.cache
def _tell_why_slower(why: str) -> None:
    """Say once in a process that Python does the work of the C extensions."""
    print(
        f"resilio: no C extensions ({why}): checkpoints are the same, but saves and restores take longer."
        " Install a wheel for this platform, or install again where there is a C compiler",
        file=sys.stderr,
        flush=True,
    )


class Checkpointer:
    """Saves and restores the state of this process, together with all processes of the run.

    A state is any nesting of dict, list and tuple with torch tensors, numpy arrays, plain values, and objects that have
    ``state_dict()`` and ``load_state_dict()``. All processes call ``save`` with the same steps. Threads wait for each
    other; a forked child makes a Checkpointer of its own (UsageError).
    """

    def __init__(
        self,
        remote: str | os.PathLike[str] | None = None,
        local: str | os.PathLike[str] | None = None,
        memory: bool = True,
        layout: Literal["replicated"] | None = None,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        keep_hours: float | None = None,
        keep_gb: float | None = None,
        overlap: bool = False,
        patience_s: float = 30.0,
        gb_per_s: float | None = None,
    ) -> None:
        """``remote``: directory for committed checkpoints, on the shared file system (default $RESILIO_CHECKPOINT_DIR).

        ``local``: directory on this node's own disk. Steps are written there first, which lets memory go, and restored
        from there where that is what was committed (default $RESILIO_LOCAL_CHECKPOINT_DIR; under resilio-launch its
        --local-checkpoints alone decides). Snapshots that do not fit into memory go there, too (default: the temporary
        directory). ``memory`` False: never keep snapshots in memory. ``layout``: None, every process's tensors are its
        own; REPLICATED. ``keep_last``, ``keep_every``, ``keep_hours``, ``keep_gb``: committed steps to keep (see
        ``retention.Retention``) when there is no launcher (which has its own settings).
        ``overlap``: ``save`` returns before parameters and optimizer state are copied, and the next step of any torch
        optimizer waits until they are (RES-13). Only for loops in which nothing else changes them meanwhile, and for
        optimizers that are in the state as objects; ``fence`` waits at any other place. ``patience_s``: without a
        launcher a save waits for the one before, so that every save is written; but no longer than this: then it fails
        and training goes on, because that file system may hang. ``gb_per_s``: without a launcher, which has an
        option of its own, this process writes no faster than so many 10^9 bytes a second to the shared file system.
        """
        if layout not in (None, REPLICATED):
            raise UsageError(f"layout is None or ckpt.REPLICATED, not {layout!r}")
        if gb_per_s is not None and not is_number(gb_per_s, above=0):
            raise UsageError(f"gb_per_s is a number of gigabytes per second, not {gb_per_s!r}")
        if not is_number(patience_s, above=0):
            raise UsageError(f"patience_s is a number of seconds above 0, not {patience_s!r}")
        self.directory = coordinator.checkpoint_directory(remote, os.environ)
        self._layout: Layout = layout or "own"
        retention = Retention(keep_last, keep_every, keep_hours, keep_gb)
        self._coordinator = coordinator.current() or find_coordinator(
            self.directory, os.environ, retention, patience_s, local, (gb_per_s or 0.0) * 1e9
        )
        self.place = self._coordinator.place
        world.check_place(self.place)
        self._local = None if local is None else directory_path(local, "local")
        self._memory = memory
        self._arenas: ArenaPair | None = None
        self._prefaulted = False
        self._structure: tuple[int, frozenset[Any]] | None = None
        self._warned: set[str] = set()
        self._pool = ThreadPoolExecutor(copy_threads(self.place.local_world_size), "resilio-copy")
        self._overlapped = overlap
        # during a step one thread is fast enough, and more would take cores from training
        self._copy_pool = ThreadPoolExecutor(1, "resilio-overlap") if overlap else self._pool
        self._finisher = ThreadPoolExecutor(1, "resilio-snapshot")
        self._pending: Future[None] | None = None
        self._taken: Snapshot | None = None
        self._fence_began: float | None = None
        self._saves = OpenSaves(self._warn)
        self._turns = Turns("Checkpointer")
        self._device: Device = CUDA
        self._patience = bounded_io.PATIENCE
        self._coordinator.on_stage(self._saves.reached)
        if why_portable and self.place.rank == 0:
            _tell_why_slower(why_portable)
        if self._coordinator.memory_step >= 0:
            self._map_ahead(self._coordinator.memory_step)

    # -- saving ----------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Any) -> SaveHandle:
        """Take a snapshot of ``state`` and see that it is committed in the background.

        The snapshot is complete on return, unless ``overlap`` was asked for. Never raises for memory or disks that are
        full or fail: then the handle's ``wait`` does. Raises UsageError for a value that a checkpoint cannot hold.
        """
        step = checkpoint_index.check_step(step)
        started = time.monotonic()
        with self._turns.turn():
            return self._save(step, state, started)

    def _save(self, step: int, state: Any, started: float) -> SaveHandle:
        world.check_place(self.place)
        self._settle()
        self._fence_began = None
        flattened = tree.flatten(state)
        self._check_structure(flattened)
        handle = SaveHandle(step)
        try:
            self._coordinator.before_save(step)
            pool = self._copy_pool if self._overlapped else self._pool
            taken = Snapshot(self._open_arenas(), step, flattened, pool, self._overlapped, self._device)
        except (OSError, CheckpointError) as error:
            self._not_saved(handle, error)
            return handle
        if taken.is_copied:
            self._finish(taken, handle, started)
        else:
            fence_before_steps(self)
            blocked_s = time.monotonic() - started
            self._taken = taken
            self._pending = self._finisher.submit(self._finish, taken, handle, started, blocked_s)
        return handle

    def _check_structure(self, flattened: tree.Flattened) -> None:
        """Read back the structure of a state that has not been saved before, as a check. Raises UsageError."""
        structure = len(flattened.leaves), flattened.kinds
        if structure != self._structure:
            tree.check_reads_back(flattened)
            self._structure = structure

    def fence(self) -> None:
        """Wait until nothing is copied from the state any more; return at once without ``overlap``.

        Torch's optimizers do this at the beginning of each step; other code that changes the state must call it. For
        copies from devices, their current streams wait and the host does not.
        """
        if self._turns.is_forked:
            return  # the parent's copies are in the parent's memory
        with self._turns.turn():
            self._fence()

    def _fence(self) -> None:
        if self._pending is None or self._pending.done():
            self._pending = self._taken = None
        elif self._taken is None or not self._taken.hold_devices():
            self._settle()

    def _settle(self) -> None:
        """Wait until the snapshot is complete."""
        pending = self._pending
        if pending is None:
            return
        if not pending.done():
            self._fence_began = time.monotonic()
            wait([pending])
        self._pending = self._taken = None

    def _finish(self, taken: Snapshot, handle: SaveHandle, started: float, blocked_s: float | None = None) -> None:
        """Report a snapshot. ``blocked_s``: for how long training has waited for it; None: since ``started``."""
        try:
            path, size = taken.finish()
            self._look_at_arenas()
            now = time.monotonic()
            if blocked_s is None:
                blocked_s = now - started
            elif self._fence_began is not None:
                blocked_s += now - self._fence_began
            self._saves.add(handle)
            self._coordinator.snapshot_taken(handle.step, path, size, blocked_s)
        except Exception as error:  # noqa: BLE001 - any error: all that wait for this save must hear of it
            if isinstance(error, StateChanged):
                self._overlapped = False
            self._not_saved(handle, error)

    def _not_saved(self, handle: SaveHandle, error: Exception) -> None:
        text = os_error_text(error, "a snapshot's arena") if isinstance(error, OSError) else str(error)
        self._warn(f"step {handle.step} is not saved: {text}")
        self._saves.forget(handle)
        handle.fail(text, refused=isinstance(error, SaveRefused))

    def _look_at_arenas(self) -> None:
        arenas = self._open_arenas()
        if arenas.on_disk and self._memory:
            self._warn(f"no room for two snapshots in shared memory ({arenas.why_on_disk}); one or both go to disk")
        if self._device.refusal:
            self._warn(f"{self._device.refusal}: copies from the device take longer, and saves wait for them")
        if not self._prefaulted:
            self._prefaulted = True
            arenas.prefault_beside()

    def _open_arenas(self) -> ArenaPair:
        if self._arenas is None:
            self._coordinator.await_arenas()
            place, directory = self.place, self._coordinator.arena_directory
            name = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
            spill = (self._local or Path(tempfile.gettempdir())) / f"resilio-arenas-{os.getuid()}-{name}"
            owner = Owner(
                place.rank,
                place.local_rank,
                place.world_size,
                place.local_world_size,
                place.round,
                self._layout,
                place.run_id,
            )
            self._arenas = ArenaPair(directory, owner, spill, not self._memory, self._device.lock_pages)
        return self._arenas

    def _warn(self, text: str) -> None:
        kind = text.partition(" is ")[2] or text  # the same trouble at every step is reported once
        if kind not in self._warned:
            self._warned.add(kind)
            print(f"resilio: rank {self.place.rank}: {text}", file=sys.stderr, flush=True)

    # -- restoring -------------------------------------------------------------------------------------------------

    def restore(self, state: Any = None, step: int | None = None) -> tuple[int, Any] | None:
        """Restore the newest good checkpoint, or the committed one of ``step``: (step, state), None if none exists.

        With ``state``, its tensors are filled in place, plain values replaced, and objects get their load_state_dict();
        without, everything comes back new (objects as their state_dict). Raises LayoutMismatch when the checkpoint does
        not fit, CorruptCheckpoint when every copy is bad (tensors of ``state`` may be overwritten then). Saves of this
        Checkpointer that are on their way are waited for.
        """
        started = time.monotonic()
        with self._turns.turn():
            world.check_place(self.place)
            self._settle()
            self._await_own_saves()
            return self._restore(state, step, started)

    def _await_own_saves(self) -> None:
        """Wait until each of this process's saves is committed, or has failed."""
        for handle in self._saves.all():
            with contextlib.suppress(CheckpointError):
                handle.wait()

    def _restore(self, state: Any, step: int | None, started: float) -> tuple[int, Any] | None:
        if step is not None:
            point = RestorePoint(Tier.COMMITTED, checkpoint_index.check_step(step))
            return self._restored(point, *self._read(point, state), started)
        failure: CorruptCheckpoint | OSError | None = None
        for point in self._restore_points():
            try:
                found, tier = self._read(point, state)
            except (CorruptCheckpoint, OSError) as error:
                if isinstance(error, OSError) and not errors.is_damage(error):
                    where = os_error_text(error, str(self.directory))
                    raise CheckpointError(f"step {point.step} cannot be read now, no fault of its: {where}") from error
                failure = error
                if point.source is Tier.MEMORY:
                    self._forget(point.step)
                self._coordinator.restore_failed(point, str(error))
            else:
                return self._restored(point, found, tier, started)
        if failure is not None:
            raise CorruptCheckpoint(f"no checkpoint could be restored; the last one tried: {failure}") from failure
        self._drop_after(-1)
        self._coordinator.restored(-1, None, time.monotonic() - started)
        self._prepare(state, True)
        return None

    def _restore_points(self) -> Sequence[RestorePoint]:
        try:
            return self._coordinator.restore_points()
        except OSError as error:
            where = os_error_text(error, str(self.directory))
            raise CheckpointError(f"it cannot be seen which checkpoints there are: {where}") from error

    def _read(self, point: RestorePoint, state: Any) -> tuple[Any, Tier]:
        """Return the state, and which tier it came from."""
        try:
            with self._source(point) as source:
                return restore(source, state, self._pool), source.tier
        except CorruptCheckpoint as error:
            if point.source is Tier.COMMITTED:
                checkpoint_index.note_damage(self.directory, point.step, str(error))
            raise

    def _source(self, point: RestorePoint) -> ArenaSource | CommittedSource:
        place = self.place
        if point.source is Tier.COMMITTED:
            try:
                manifest = checkpoint_index.manifest_of(self.directory, point.step)
            except FileNotFoundError as error:
                raise CorruptCheckpoint(f"step {point.step} is not in {self.directory}") from error
            where = checkpoint_index.step_directory(self.directory, point.step)
            return CommittedSource(
                where, manifest, place.rank, place.world_size, self._layout,
                alone=place.local_world_size == 1,
                local_rank=place.local_rank,
                copies=local_disk.copies_or_none(
                    self._coordinator.local_directory, self.directory, manifest, self._warn, self._patience
                ),
                cached=coordinator.is_read_ahead(self._coordinator.read_ahead, point.step),
                peers=self._coordinator.peer_disks,
            )  # fmt: skip
        arenas = self._open_arenas()
        path = arenas.held(point.step)
        if path is None:
            raise CorruptCheckpoint(f"this node holds no snapshot of step {point.step} of rank {place.rank}")
        return ArenaSource(path, memory=arenas.memory(point.step))

    def _restored(self, point: RestorePoint, state: Any, tier: Tier, started: float) -> tuple[int, Any]:
        self._drop_after(point.step)
        self._coordinator.restored(point.step, tier, time.monotonic() - started)
        self._prepare(state, holds_optimizer(state))
        return point.step, state

    def _prepare(self, state: Any, trains: bool) -> None:
        """Make arenas ready by the time of the first saves: one under the launcher, else both while it trains."""
        size = expected_bytes(state)
        if self._memory and size and (trains or self._coordinator.arena_directory is not None):
            size += size // 64 + (1 << 20)  # for tables, plain values and gaps
            with contextlib.suppress(OSError):  # the save that needs them will report it
                self._open_arenas().prefault_beside(size, 2 if self._coordinator.arena_directory is None else 1)

    def _map_ahead(self, step: int) -> None:
        """Map a snapshot while the model is built: from mapped memory, a restore is as fast as a copy."""
        try:
            arenas = self._open_arenas()
        except OSError:
            return  # the restore will report it

        def act() -> None:
            with contextlib.suppress(OSError):
                arenas.map_held(step)

        threading.Thread(target=act, name="resilio-map", daemon=True).start()

    def _forget(self, step: int) -> None:
        if self._arenas is not None and (path := self._arenas.held(step)) is not None:
            arena.mark_empty(path, step)

    def _drop_after(self, step: int) -> None:
        """Drop snapshots of later steps, of a life that was rolled back: they must not mix with those of this one."""
        if self._coordinator.arena_directory is None and self._arenas is None:
            return
        try:
            arenas = self._open_arenas()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return  # there is no room for an arena
            raise
        arenas.drop_after(step)

    def steps(self) -> list[int]:
        """Return every committed step; the one committed last comes last."""
        return checkpoint_index.committed_steps(self.directory)
