"""The Checkpointer, with which a training script saves and restores."""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal

from resilio_hpc.ckpt.coordination import coordinator, world
from resilio_hpc.ckpt.coordination.find_coordinator import find_coordinator
from resilio_hpc.ckpt.coordination.turns import Turns
from resilio_hpc.ckpt.format.manifest import REPLICATED, Layout
from resilio_hpc.ckpt.format.restore_point import RestorePoint
from resilio_hpc.ckpt.handle import OpenSaves, SaveHandle, tell_why_slower
from resilio_hpc.ckpt.rank_arenas import RankArenas
from resilio_hpc.ckpt.restore_points import RestorePoints
from resilio_hpc.ckpt.snapshot.boundary_record import RecordWriter
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot, StateChanged, copy_threads
from resilio_hpc.ckpt.state import tree
from resilio_hpc.ckpt.state.expected import holds_optimizer
from resilio_hpc.ckpt.state.held_state import HeldState
from resilio_hpc.ckpt.state.overlap import fence_before_steps
from resilio_hpc.ckpt.state.parts_held import declared_group
from resilio_hpc.ckpt.state_saver import StateSaver
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.retention import Retention, is_number
from resilio_hpc.core import errors
from resilio_hpc.core.directories import directory_path
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, SaveRefused, UsageError, os_error_text
from resilio_hpc.core.standard_streams import say
from resilio_hpc.core.tiers import Tier
from resilio_hpc.native import why_portable


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
        local_keep: int = 1,
    ) -> None:
        """``remote``: directory for committed checkpoints, on the shared file system (default $RESILIO_CHECKPOINT_DIR).

        ``local``: directory on this node's own disk. Steps are written there first, which lets memory go, and restored
        from there where that is what was committed (default $RESILIO_LOCAL_CHECKPOINT_DIR; under resilio-launch its
        --local-checkpoints alone decides); ``local_keep`` committed ones stay there. Snapshots that do not fit into
        memory go there, too (default: the temporary directory). ``memory`` False: never keep snapshots in memory.
        ``layout``: None, every process's tensors are its own; REPLICATED. ``keep_last``, ``keep_every``,
        ``keep_hours``, ``keep_gb``: committed steps to keep (see ``retention.Retention``) when there is no launcher
        (which has its own settings).
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
        if type(local_keep) is not int or local_keep < 1:
            raise UsageError(f"local_keep is a whole number of steps, at least 1, not {local_keep!r}")
        if not is_number(patience_s, above=0):
            raise UsageError(f"patience_s is a number of seconds above 0, not {patience_s!r}")
        self.directory = coordinator.checkpoint_directory(remote, os.environ)
        self.layout: Layout = layout or "own"
        retention = Retention(keep_last, keep_every, keep_hours, keep_gb)
        self._coordinator = coordinator.current() or find_coordinator(
            self.directory, os.environ, retention, patience_s, local, (gb_per_s or 0.0) * 1e9, local_keep
        )
        world.check_place(self.place)
        spill = None if local is None else directory_path(local, "local")
        self._arenas = RankArenas(self._coordinator, self.layout, spill, memory, self._warn)
        self._points = RestorePoints(self._coordinator, self.directory, self.layout, self._arenas, self._warn)
        self._structure: tuple[int, frozenset[Any]] | None = None
        self._warned: set[str] = set()
        self._pool = ThreadPoolExecutor(copy_threads(self.place.local_world_size), "resilio-copy")
        self._alone = ThreadPoolExecutor(copy_threads(1), "resilio-alone")  # while other ranks wait for this one
        self._overlapped = overlap
        # during a step one thread is fast enough, and more would take cores from training
        self._copy_pool = ThreadPoolExecutor(1, "resilio-overlap") if overlap else self._pool
        self._finisher = ThreadPoolExecutor(1, "resilio-snapshot")
        self._pending: Future[None] | None = None
        self._taken: Snapshot | None = None
        self._fence_began: float | None = None
        self._saves = OpenSaves(self._warn)
        self._saver: StateSaver | None = None
        self._turns = Turns("Checkpointer")
        self._coordinator.on_stage(self._saves.reached)
        if why_portable and self.place.rank == 0:
            tell_why_slower(why_portable)
        self._arenas.map_ahead(self._coordinator.memory_step)

    @property
    def place(self) -> coordinator.Place:
        """Return the place of this process."""
        return self._coordinator.place

    # -- saving ----------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Any) -> SaveHandle:
        """Take a snapshot of ``state`` and see that it is committed in the background.

        The snapshot is complete on return, unless ``overlap`` was asked for. Never raises for memory or disks that are
        full or fail: then the handle's ``wait`` does. Raises UsageError for a value that a checkpoint cannot hold.
        """
        step, started = checkpoint_index.check_step(step), time.monotonic()
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
            taken = self._arenas.take(step, flattened, pool, self._overlapped)
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

    def saver(self, state: Any, replicas: Any = None) -> StateSaver:
        """Return the ``save`` of ``run.steps`` for ``state``, or for what the function ``state`` returns.

        Between saves it is known what the last finished step left, so that a failure costs the interrupted step only.
        ``replicas``: the ranks that hold the same tensors, this one among them, where neither the layout nor DTensors
        tell: their numbers, or a device mesh of one dimension. Raises UsageError.
        """
        self._arenas.group = "" if replicas is None else declared_group(replicas, self.place.rank)
        self._saver = StateSaver(self, state, self._arenas.group)
        return self._saver

    def save_held(self, held: HeldState) -> None:
        """Take a snapshot of a state that was held, unless there is one. Raises CheckpointError, OSError."""
        with self._turns.turn():
            world.check_place(self.place)
            self._settle()
            self._arenas.save_held(held, self._alone)

    def mark_boundary(self, held: HeldState) -> None:
        """Note what devices have done before a state that is held."""
        self._arenas.mark_boundary(held)

    def record_writer(self) -> RecordWriter | None:
        """Return where this rank records its boundaries; None without the launcher."""
        return self._arenas.record_writer()

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
        if self._pending is not None and not self._pending.done():
            self._fence_began = time.monotonic()
            wait([self._pending])
        self._pending = self._taken = None

    def _finish(self, taken: Snapshot, handle: SaveHandle, started: float, blocked_s: float | None = None) -> None:
        """Report a snapshot. ``blocked_s``: for how long training has waited for it; None: since ``started``."""
        try:
            path, size = taken.finish()
            self._arenas.look_after_save(handle.step)
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
        text = self._arenas.why_not_taken(handle.step, error)
        self._warn(f"step {handle.step} is not saved: {text}")
        self._saves.forget(handle)
        handle.fail(text, refused=isinstance(error, SaveRefused))

    def _warn(self, text: str) -> None:
        kind = text.partition(" is ")[2] or text  # the same trouble at every step is reported once
        if kind not in self._warned:
            self._warned.add(kind)
            say(f"rank {self.place.rank}: {text}")

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
            return self._restored(point, *self._points.read(point, state, self._pool), started)
        failure: CorruptCheckpoint | OSError | None = None
        for point in self._points.all():
            if self._saver is not None and (back := self._saver.put_back(point, state)) is not None:
                self._arenas.goes_on_from(back.step, back.part)
                return self._restored(point, back.state, Tier.MEMORY, started)
            try:
                pool = self._alone if point.source is Tier.MEMORY else self._pool
                found, tier = self._points.read(point, state, pool)
            except (CorruptCheckpoint, OSError) as error:
                if isinstance(error, OSError) and not errors.is_damage(error):
                    where = os_error_text(error, str(self.directory))
                    raise CheckpointError(f"step {point.step} cannot be read now, no fault of its: {where}") from error
                failure = error
                if point.source is Tier.MEMORY:
                    self._arenas.forget(point.step)
                self._coordinator.restore_failed(point, str(error))
            else:
                return self._restored(point, found, tier, started)
        if failure is not None:
            raise CorruptCheckpoint(f"no checkpoint could be restored; the last one tried: {failure}") from failure
        self._arenas.restored(-1, None)
        self._coordinator.restored(-1, None, time.monotonic() - started)
        self._arenas.prepare(state, True)
        return None

    def _restored(self, point: RestorePoint, state: Any, tier: Tier, started: float) -> tuple[int, Any]:
        self._arenas.restored(point.step, tier)
        self._coordinator.restored(point.step, tier, time.monotonic() - started)
        self._arenas.prepare(state, holds_optimizer(state))
        return point.step, state

    def steps(self) -> list[int]:
        """Return every committed step; the one committed last comes last."""
        return checkpoint_index.committed_steps(self.directory)
