"""The arenas of a Checkpointer: opened with their first use, made large ahead of it, emptied of lives that are over."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from resilio_hpc.ckpt.coordination.coordinator import Coordinator
from resilio_hpc.ckpt.coordination.turns import Turns
from resilio_hpc.ckpt.format.manifest import Layout
from resilio_hpc.ckpt.replication import lost_ranks
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.restore.borrowed_source import BorrowedSource
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.boundary_record import RecordWriter
from resilio_hpc.ckpt.snapshot.device_copy import CUDA, Device
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.expected import expected_bytes
from resilio_hpc.ckpt.state.held_state import HeldState
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint


class RankArenas:
    """The arenas of this rank, where its coordinator wants them, or in files that end with the process."""

    def __init__(
        self,
        coordinator: Coordinator,
        layout: Layout,
        spill: Path | None,
        memory: bool,
        warn: Callable[[str], None],
    ) -> None:
        """Open none yet.

        ``spill``: where those lie that do not fit into memory (None: in the temporary directory), or all of them where
        ``memory`` is False. ``warn``: called for what a user should know of them.
        """
        self._coordinator = coordinator
        self._layout = layout
        self._spill = spill
        self._memory = memory
        self._warn = warn
        self._prefaulted = False
        self._own_part: tuple[int, bytes] | None = None  # of the step that training goes on from: what no other has
        self.pair: ArenaPair | None = None
        """Once they are open."""
        self.device: Device = CUDA
        """What copies from devices into them."""

    def open(self) -> ArenaPair:
        """Return the arenas. Raises OSError."""
        place, directory = self._coordinator.place, self._coordinator.arena_directory
        owner = Owner(
            place.rank,
            place.local_rank,
            place.world_size,
            place.local_world_size,
            place.round,
            self._layout,
            place.run_id,
        )
        if self.pair is not None and self.pair.owner != owner:  # this process has entered another round
            self._coordinator.await_arenas()
            if not self.pair.pass_to(owner):
                self.pair.close()
                self.pair = None
        if self.pair is None:
            self._coordinator.await_arenas()
            name = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
            spill = (self._spill or Path(tempfile.gettempdir())) / f"resilio-arenas-{os.getuid()}-{name}"
            self.pair = ArenaPair(directory, owner, spill, not self._memory, self.device.lock_pages)
        return self.pair

    def look_after_save(self) -> None:
        """Warn of what makes saves slow; after the first one, make the other arena as large."""
        arenas = self.open()
        if arenas.on_disk and self._memory:
            self._warn(f"no room for two snapshots in shared memory ({arenas.why_on_disk}); one or both go to disk")
        if self.device.refusal:
            self._warn(f"{self.device.refusal}: copies from the device take longer, and saves wait for them")
        if not self._prefaulted:
            self._prefaulted = True
            arenas.prefault_beside()

    def mark_boundary(self, held: HeldState) -> None:
        """Note which work of devices a state that is held comes after."""
        watched = held.watched
        if watched.places is None:
            places = [self.device.place(tensor) for tensor in (*watched.tensors, *watched.small)]
            watched.places = [place for place in dict.fromkeys(places) if place is not None]
        held.boundaries = {where: self.device.boundary(where) for where in watched.places}

    def save_held(self, held: HeldState, pool: ThreadPoolExecutor) -> None:
        """Take a snapshot of a state that was held, unless there is one. Raises CheckpointError, OSError."""
        pair = self.open()
        if not pair.has(held.step):
            with self.device.beside(held.boundaries):
                Snapshot(pair, held.step, held.flattened(), pool, device=self.device, is_last=True).finish()

    def record_writer(self) -> RecordWriter | None:
        """Return where this rank records its boundaries; None without the launcher."""
        place, directory = self._coordinator.place, self._coordinator.arena_directory
        if directory is None:
            return None
        return RecordWriter(directory, place.rank, place.world_size, place.round)

    def prepare(self, state: Any, trains: bool) -> None:
        """Make arenas ready by the time of the first saves: one under the launcher, else both while it trains."""
        size = expected_bytes(state)
        if self._memory and size and (trains or self._coordinator.arena_directory is not None):
            size += size // 64 + (1 << 20)  # for tables, plain values and gaps
            with contextlib.suppress(OSError):  # the save that needs them will report it
                self.open().prefault_beside(size, 2 if self._coordinator.arena_directory is None else 1)

    def map_ahead(self, step: int) -> None:
        """Map a snapshot while the model is built: from mapped memory, a restore is as fast as a copy."""
        try:
            arenas = self.open()
        except OSError:
            return  # the restore will report it

        def act() -> None:
            with contextlib.suppress(OSError):
                arenas.map_held(step)

        threading.Thread(target=act, name="resilio-map", daemon=True).start()

    def source(self, step: int) -> ArenaSource:
        """Return the snapshot of a step, to be restored. Raises CorruptCheckpoint where there is none, OSError."""
        arenas = self.open()
        path = arenas.held(step)
        if path is not None:
            return ArenaSource(path, memory=arenas.memory(step))
        place, directory = self._coordinator.place, self._coordinator.arena_directory
        found = lost_ranks.borrowed(directory, place.rank, step, place.world_size) if directory is not None else None
        if found is None:
            raise CorruptCheckpoint(f"this node holds no snapshot of step {step} of rank {place.rank}")
        self._own_part = (step, found.record.part)
        return BorrowedSource(found)

    def goes_on_from(self, step: int, part: bytes) -> None:
        """Take note that training goes on from a state that this process has held; ``part``: see ``PutBack``."""
        self._own_part = (step, part) if part else None

    def take_own(self, finished: int, turns: Turns) -> None:
        """Where training has gone on from a step of which another rank has the snapshot, take this rank's own one.

        In a thread beside training: without it, the loss of that snapshot would cost the step. ``finished``: steps that
        are. The first one is awaited: until then, ranks that restore need the processors.
        """
        if self._own_part is None or finished <= self._own_part[0]:
            return
        (step, part), self._own_part = self._own_part, None
        place, directory = self._coordinator.place, self._coordinator.arena_directory
        if directory is None or self.open().held(step) is not None:
            return

        def act() -> None:
            with contextlib.suppress(CheckpointError, OSError), turns.turn():  # else the next save brings one
                arenas = self.open()
                found = lost_ranks.lent_to(directory, place.rank, step, place.world_size, part)
                if found is not None and arenas.newest_step < step:
                    lost_ranks.make(arenas, found)

        threading.Thread(target=act, name="resilio-own-snapshot", daemon=True).start()

    def forget(self, step: int) -> None:
        """Drop a snapshot that is damaged."""
        if self.pair is not None and (path := self.pair.held(step)) is not None:
            arena.mark_empty(path, step)

    def drop_after(self, step: int) -> None:
        """Drop snapshots of later steps, of a life that was rolled back: they must not mix with those of this one."""
        if self._coordinator.arena_directory is None and self.pair is None:
            return
        try:
            arenas = self.open()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return  # there is no room for an arena
            raise
        arenas.drop_after(step)
