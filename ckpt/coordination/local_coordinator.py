"""Checkpoints without resilio-launch: each process writes its own shard file, rank 0 commits.

The processes meet only in the checkpoint directory. A save waits for the one before it, so that all processes write
every save. The wait is bounded: while the file system hangs, training goes on, and its saves fail. Where one process
has given up a step that others wrote, the others learn it from its next one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from weakref import WeakSet

from resilio_hpc.ckpt.coordination import fresh_start, world
from resilio_hpc.ckpt.coordination.coordinator import OnStage
from resilio_hpc.ckpt.format.manifest import Manifest
from resilio_hpc.ckpt.format.restore_point import RestorePoint
from resilio_hpc.ckpt.saver import detached_savers, saver_process
from resilio_hpc.ckpt.saver.local_saver import ALONE_STALL_S, Save
from resilio_hpc.ckpt.saver.messages import Committed, Local, Progress, SaverFailed
from resilio_hpc.ckpt.saver.saver_process import Asked
from resilio_hpc.ckpt.store import checkpoint_index, writers
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.core.errors import CorruptCheckpoint, SaveRefused, WireError
from resilio_hpc.core.standard_streams import say
from resilio_hpc.core.tiers import SnapshotRoom, Stage, Tier
from resilio_hpc.events.event_text import words

_all: WeakSet[LocalCoordinator] = WeakSet()


def await_saves(directory: Path) -> None:
    """Wait until this process's saves to that directory are committed, or have failed."""
    for one in list(_all):
        if one._directory == directory and one._busy is not None:
            one._busy.join()


class LocalCoordinator:
    """Coordinator of one process; ``world_size`` of them share the checkpoint directory."""

    arena_directory: Path | None = None
    peer_disks: Path | None = None
    read_ahead: Path | None = None
    memory_step = -1

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        retention: Retention,
        patience_s: float = 30.0,
        peers_timeout_s: float = 600.0,
        local: Path | None = None,
        bytes_per_s: float = 0.0,
        alone_stall_s: float = ALONE_STALL_S,
        local_keep: int = 1,
    ) -> None:
        """``patience_s``: how long a save waits for the one before.

        Longer makes sure that every save is written, also to a slow disk; shorter lets training go on sooner when the
        file system hangs. ``peers_timeout_s``: how long the background waits for the other processes' parts. ``local``:
        on the node's own disk, to be written first; ``local_keep`` committed steps stay there. ``bytes_per_s``: to the
        shared file system, at most; 0: as fast as can be. ``alone_stall_s``: after the death of this process, without
        a sign of the others, they are dead, too.
        """
        self.place = world.find_place(environment)
        self.local_directory, self._local_keep = local, local_keep
        self._local_failed = False
        self._told: set[str] = set()
        self._directory = directory
        self._retention = retention
        self._session = world.session(environment, self.place)
        job = self._session if self.place.world_size > 1 else writers.process_job()
        self._writer = writers.this_process(job)
        self._callbacks: list[OnStage] = []
        self._patience_s = patience_s
        self._peers_timeout_s = peers_timeout_s
        self._bytes_per_s, self._alone_stall_s = bytes_per_s, alone_stall_s
        self._busy: threading.Thread | None = None
        _all.add(self)
        self._busy_with = -1
        self._out_of_patience = False

    def await_arenas(self) -> None:
        """Do nothing: the arenas belong to this process alone."""

    def restore_points(self) -> Sequence[RestorePoint]:
        """Return every committed step, newest first. Raises CorruptCheckpoint when there are only damaged ones.

        It waits for saves of this process. A run that was killed may still be writing its last one: see
        ``detached_savers``.
        """
        await_saves(self._directory)
        detached_savers.wait_for_orphans(self._directory, say=self.place.rank == 0)
        found, damaged = checkpoint_index.survey(self._directory)
        if not found:
            fresh_start.check_not_all_damaged(self._directory)
        if self.place.rank == 0:
            self._report(found, damaged)
        return [RestorePoint(Tier.COMMITTED, manifest.step) for manifest in reversed(found)]

    def _report(self, found: Sequence[Manifest], damaged: Mapping[int, str]) -> None:
        """Tell the user what is wrong with the directory: see ``checkpoint_index.survey``."""
        for step, why in damaged.items():
            say(f"step {step} is damaged and not restored: {why}")
        if why := fresh_start.why_newest_is_gone(self._directory, [*(one.step for one in found), *damaged]):
            say(f"{why}: going on from step {found[-1].step}")
        for manifest in reversed(found):
            writer = manifest.writer
            if writer and writers.is_another(writer, self._writer) and writers.is_alive(writer):
                self._say_once("others", writers.words(self._directory, writer))

    def restored(self, step: int, source: Tier | None, seconds: float) -> None:
        """Start the saver: a process that restores is likely to save. There is no agent to tell."""
        if self._busy is None or not self._busy.is_alive():
            saver_process.start()

    def restore_failed(self, point: RestorePoint, error: str) -> None:
        """Return if the next older step may be tried.

        Only a world of one may: other processes could have restored this one.
        """
        if self.place.world_size > 1:
            raise CorruptCheckpoint(
                f"step {point.step}: {error}; to go on from an older step in all processes alike, "
                f"remove {checkpoint_index.step_directory(self._directory, point.step)}"
            )
        say(f"step {point.step} is damaged, trying an older one: {error}")

    def before_save(self, step: int) -> None:
        """Wait for the save before.

        Raises SaveRefused when it takes too long; at once where another save has already waited in vain for the same.
        """
        if self._busy is not None:
            self._busy.join(0 if self._out_of_patience else self._patience_s)
            self._out_of_patience = self._busy.is_alive()
        if self._out_of_patience:
            raise SaveRefused(
                f"step {self._busy_with} is still being written to {self._directory}, {self._patience_s:g} s later; "
                "training goes on without this one (does that file system hang? if it is only slow, save more rarely, "
                "or give Checkpointer a larger patience_s)"
            )
        saver_process.start()  # while the snapshot is copied

    def snapshot_taken(self, step: int, arena: Path, size_bytes: int, blocked_s: float) -> None:
        """Order the snapshot to be written; on return the writing does not need this process any more."""
        place = self.place
        request = Save(
            step,
            place.round,
            place.rank,
            place.world_size,
            str(self._directory),
            self._session,
            self._retention,
            self._peers_timeout_s,
            str(self.local_directory or ""),
            f"process-{place.local_rank}",
            self._bytes_per_s,
            self._alone_stall_s,
            self._writer,
            self._local_keep,
        )
        asked = saver_process.ask(request, arena)
        busy = threading.Thread(target=self._hear, args=(step, asked), name="resilio-saver")
        try:
            busy.start()
        except RuntimeError:  # no thread can be started, and no caller would get its result
            asked.cancel()
            raise
        self._busy, self._busy_with = busy, step

    def snapshot_room(self, step: int, room: SnapshotRoom, why: str) -> None:
        """Do nothing: the process has said it on standard error."""

    def on_stage(self, callback: OnStage) -> None:
        """See Coordinator."""
        self._callbacks.append(callback)

    def _hear(self, step: int, asked: Asked) -> None:
        try:
            said = asked(self._heard)
        except WireError as error:
            said = SaverFailed(step, str(error))
        if isinstance(said, SaverFailed):
            self._tell(step, Stage.FAILED, said.error)
        else:
            if isinstance(said, Committed):
                self._say_of(said)
            self._tell(step, Stage.COMMITTED, "")

    def _say_of(self, said: Committed) -> None:
        if said.short:
            say(said.short)
        if said.differs:
            self._say_once("differs", words("replicas_differ", {"place": said.differs}))
        if said.others:
            self._say_once("others", said.others)

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            say(text)

    def _heard(self, progress: Progress) -> None:
        if isinstance(progress, Local):
            self._tell(progress.step, Stage.LOCAL, "")
        elif not self._local_failed:
            self._local_failed = True
            say(f"rank {self.place.rank}: {progress.error}")

    def _tell(self, step: int, stage: Stage, error: str) -> None:
        for callback in self._callbacks:
            callback(step, stage, error)
