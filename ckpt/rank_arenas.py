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

from resilio_hpc.ckpt import reduced_snapshot
from resilio_hpc.ckpt.coordination.coordinator import Coordinator
from resilio_hpc.ckpt.devices.interface import CopiesOut
from resilio_hpc.ckpt.devices.registry import DEVICES
from resilio_hpc.ckpt.format.manifest import REPLICATED, Layout
from resilio_hpc.ckpt.replication import lost_ranks
from resilio_hpc.ckpt.replication.borrowed_state import Borrowed
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.restore.arenas_ahead import ArenasAhead
from resilio_hpc.ckpt.restore.borrowed_source import BorrowedSource
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_slot import NO_ROOM
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.boundary_record import BoundaryRecord, RecordWriter, keep_record
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.expected import expected_bytes
from resilio_hpc.ckpt.state.held_state import HeldState
from resilio_hpc.ckpt.state.tree import Flattened
from resilio_hpc.core.errors import CorruptCheckpoint, SaveRefused, os_error_text
from resilio_hpc.core.tiers import SnapshotRoom, Stage, Tier

NEEDS_ROOM = "needs-room"
_RESTART_S = 5.0  # for scripts whose steps are not known here


class RankArenas:
    """The arenas of this rank, where its coordinator wants them, or in files that end with the process."""

    def __init__(
        self, coordinator: Coordinator, layout: Layout, spill: Path | None, memory: bool, warn: Callable[[str], None]
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
        self._room = SnapshotRoom.MEMORY
        self._reduced = ""  # why the newest snapshot leaves something out
        self._durable_step = self._restored_step = self._began_in_memory = -1
        self._ahead: ArenasAhead | None = None
        self._trains = threading.Event()  # a step was done since the last restore
        coordinator.on_stage(self._on_stage)
        self.pair: ArenaPair | None = None
        """Once they are open."""
        self.device: CopiesOut = DEVICES
        """What copies from devices into them."""
        self.group = ""
        """The ranks that have the same tensors, where the script says so."""

    def open(self) -> ArenaPair:
        """Return the arenas. Raises OSError."""
        place, directory = self._coordinator.place, self._coordinator.arena_directory
        owner = Owner(
            place.rank, place.local_rank, place.world_size, place.local_world_size, place.round, self._layout,
            place.run_id,
        )  # fmt: skip
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

    def take(self, step: int, state: Flattened, pool: ThreadPoolExecutor, overlapped: bool) -> Snapshot:
        """Take a snapshot; where there is no room, one without what other ranks of the node have.

        Rank 0's tensors are what goes to disk: where it has no room, the others give theirs back. Raises OSError,
        CheckpointError.
        """
        arenas, place, self._reduced = self.open(), self._coordinator.place, ""
        shares = self._layout == REPLICATED and place.local_world_size > 1
        directory = self._coordinator.arena_directory if shares else None
        needed = None if directory is None else directory / f"rank0.{NEEDS_ROOM}"
        try:
            if needed is not None and place.rank > 0 and needed.exists():
                arenas.give_room()
                raise OSError(errno.ENOSPC, "rank 0 needs the room", str(directory))
            taken = Snapshot(arenas, step, state, pool, overlapped, self.device, group=self.group)
        except (OSError, SaveRefused) as error:
            if directory is None or needed is None:
                raise
            reduced_snapshot.say_without(directory, place.rank, place.round, step)
            if not isinstance(error, OSError) or error.errno not in NO_ROOM:
                raise
            if place.rank == 0:
                needed.touch(0o600)
                raise
            reduced = reduced_snapshot.take(arenas, step, state, pool, self.device, directory)
            if reduced is None:
                raise
            self._reduced = os_error_text(error, "its arena")
            return reduced
        if needed is not None and place.rank == 0:
            needed.unlink(missing_ok=True)
        return taken

    def look_after_save(self, step: int) -> None:
        """Warn of what makes saves slow; after the first one, make the other arena as large."""
        arenas = self.open()
        if self._reduced:
            if self._tell(step, SnapshotRoom.REDUCED, self._reduced):
                self._warn(
                    f"from step {step} on its snapshots leave out what other ranks of this node have in theirs "
                    f"({self._reduced})"
                )
        elif arenas.only_one:
            if self._tell(step, SnapshotRoom.ONE, arenas.only_one):
                self._warn(
                    f"from step {step} on there is room for one snapshot alone ({arenas.only_one}); a kill in the "
                    "middle of a save costs the steps since the last commit"
                )
        elif arenas.on_disk and self._memory:
            self._tell(step, SnapshotRoom.DISK, arenas.why_on_disk)
            self._warn(f"no room for two snapshots in shared memory ({arenas.why_on_disk}); one or both go to disk")
        else:
            self._tell(step, SnapshotRoom.MEMORY, "")
        if self.device.refusal:
            self._warn(f"{self.device.refusal}: copies from the device take longer, and saves wait for them")
        if not self._prefaulted:
            self._prefaulted = True
            arenas.prefault_beside()

    def why_not_taken(self, step: int, error: Exception) -> str:
        """Return why there is no snapshot of ``step``, in words. Take note where there was no room for it."""
        if not isinstance(error, OSError):
            return str(error)
        text = os_error_text(error, "a snapshot's arena")
        self._tell(step, SnapshotRoom.NONE, text)
        return text

    def _tell(self, step: int, room: SnapshotRoom, why: str) -> bool:
        """Tell the coordinator where snapshots have room, when that changes; return whether it has changed."""
        changed, self._room = room is not self._room, room
        if changed:
            self._coordinator.snapshot_room(step, room, why)
        return changed

    def _on_stage(self, step: int, stage: Stage, error: str) -> None:
        if stage is Stage.COMMITTED:
            self._durable_step = step

    def mark_boundary(self, held: HeldState) -> None:
        """Note which work of devices a state that is held comes after."""
        if held.step > self._restored_step:
            self._trains.set()
        watched = held.watched
        if watched.places is None:
            places = [self.device.place(tensor) for tensor in (*watched.tensors, *watched.small)]
            watched.places = [place for place in dict.fromkeys(places) if place is not None]
        held.boundaries = {where: self.device.boundary(where) for where in watched.places}

    def save_held(self, held: HeldState, pool: ThreadPoolExecutor) -> None:
        """Take a snapshot of a state that was held, unless there is one. Raises CheckpointError, OSError.

        What this round began with lies in memory as it was: a new snapshot would take the place of one of which ranks
        that have not come as far still need the tensors.
        """
        if held.step == self._began_in_memory:
            return
        pair = self.open()
        pair.durable_step = self._durable_step
        if not pair.has(held.step):
            with self.device.beside(held.boundaries):
                state, group = held.flattened(), self.group
                Snapshot(pair, held.step, state, pool, device=self.device, is_last=True, group=group).finish()

    def record_writer(self) -> RecordWriter | None:
        """Return where this rank records its boundaries; None without the launcher."""
        place, directory = self._coordinator.place, self._coordinator.arena_directory
        if directory is None:
            return None
        return RecordWriter(directory, place.rank, place.world_size, place.round)

    def restored(self, step: int, tier: Tier | None) -> None:
        """Take note of the step that training goes on from (-1: none); what is later is of a life that is over."""
        self._restored_step, self._began_in_memory = step, step if tier is Tier.MEMORY else -1
        self._trains.clear()
        self._ahead = None
        self._durable_step = step if tier is Tier.COMMITTED else min(step, self._durable_step)
        self.drop_after(step)

    def prepare(self, state: Any, trains: bool) -> None:
        """Make arenas ready by the time of the first saves: one under the launcher, else both while it trains.

        After a restart it begins with the first step, or soon: ranks that restore meanwhile need the processors.
        """
        size = expected_bytes(state)
        if self._memory and size and (trains or self._coordinator.arena_directory is not None):
            size += size // 64 + (1 << 20)  # for tables, plain values and gaps
            slots = 2 if self._coordinator.arena_directory is None else 1
            wait_s = _RESTART_S if self._coordinator.place.round > 0 else 0.0
            with contextlib.suppress(OSError):  # the save that needs them will report it
                self.open().prefault_beside(size, slots, lambda: self._trains.wait(wait_s))

    def map_ahead(self, step: int) -> None:
        """Map a snapshot while the model is built (-1: none): from mapped memory, a restore is as fast as a copy.

        A process that has no rank yet maps what others hold, until it has one.
        """
        directory = self._coordinator.arena_directory
        if directory is not None and self._coordinator.place.rank < 0:
            self._ahead = ArenasAhead(directory, lambda: self._coordinator.place.rank >= 0)
        if step < 0:
            return
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
        place, directory = self._coordinator.place, self._coordinator.arena_directory
        mapped = None if self._ahead is None else self._ahead.take()
        if path is not None:
            if directory is None or self._layout != REPLICATED:
                return ArenaSource(path, mapped, memory=arenas.memory(step))
            return reduced_snapshot.CompletedSource(path, arenas.memory(step), directory)
        found: Borrowed | arena.HeldSnapshot | None = None
        if directory is not None:
            found = lost_ranks.borrowed(directory, place.rank, step, place.world_size)
            if found is None and self._layout == REPLICATED:
                found = lost_ranks.of_another_world(directory, place.local_rank, step)
        if found is None or directory is None:
            raise CorruptCheckpoint(f"this node holds no snapshot of step {step} of rank {place.rank}")
        if isinstance(found, arena.HeldSnapshot):
            return reduced_snapshot.CompletedSource(found.path, memoryview(b""), directory)
        self._keep(found.rank, found.record)
        return BorrowedSource(found, mapped)

    def goes_on_from(self, step: int, part: bytes) -> None:
        """Take note that training goes on from a state that this process has held; ``part``: see ``PutBack``."""
        place, directory = self._coordinator.place, self._coordinator.arena_directory
        if part and directory is not None:
            found = lost_ranks.record_at(directory, place.local_rank, step, part)
            if found is not None:
                self._keep(*found)

    def _keep(self, rank: int, record: BoundaryRecord) -> None:
        """Keep the record of a step of which another rank has the snapshot: the boundaries that follow replace it.

        ``rank``: the number that this rank had then.
        """
        directory = self._coordinator.arena_directory
        if directory is not None:
            with contextlib.suppress(OSError):  # no room: the next save brings the rank's own snapshot
                keep_record(directory, rank, record)

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
