"""The coordinator of a Checkpointer under resilio-launch: the controller decides, the agent's saver writes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilio_hpc.ckpt.coordination import fresh_start
from resilio_hpc.ckpt.coordination.agent_link import AgentLink
from resilio_hpc.ckpt.coordination.coordinator import (
    ARRIVING,
    READ_AHEAD_VARIABLE,
    ROUND_OVER,
    OnStage,
    local_directory,
    peer_disks_file,
)
from resilio_hpc.ckpt.format.restore_point import RestorePoint
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.core import rank_link
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.standard_streams import say
from resilio_hpc.core.tiers import SnapshotRoom, Stage, Tier

EXIT_RESTORE_FAILED = 98
"""Exit code of a rank whose restore point turned out bad; the controller chooses another."""
_LOOK_S = 0.01


def parse_restore_point(text: str) -> RestorePoint | None:
    """Return the restore point in $RESILIO_RESTORE.

    It is "", "memory:<step>" ("arriving:<step>" while it is on its way), or "committed:<step>". Raises UsageError.
    """
    if not text:
        return None
    source, _, step = text.partition(":")
    if step.isdecimal() and source in (Tier.MEMORY, ARRIVING):
        return RestorePoint(Tier.MEMORY, int(step))
    if step.isdecimal() and source == Tier.COMMITTED:
        return RestorePoint(Tier.COMMITTED, int(step))
    raise UsageError(f"RESILIO_RESTORE={text!r} is not memory:STEP, {ARRIVING}:STEP or committed:STEP")


class AgentCoordinator:
    """Coordinator under resilio-launch: the controller decides, the agent's saver writes."""

    def __init__(self, link: AgentLink, environment: Mapping[str, str]) -> None:
        arenas = environment.get("RESILIO_ARENA_DIR")
        self.arena_directory = Path(arenas) if arenas else None
        self.local_directory = local_directory(None, environment)
        self.peer_disks = peer_disks_file(environment)
        begun = environment.get(READ_AHEAD_VARIABLE)
        self.read_ahead = Path(begun) if begun else None
        self._directory = environment.get("RESILIO_CHECKPOINT_DIR")
        self._link = link
        self._saved: set[int] = set()
        self._callbacks: list[OnStage] = []
        self._take_round(environment)
        link.subscribe(rank_link.SaveProgress, self._on_progress)
        link.on_close(self._on_close)
        link.on_enter(self._enter)

    def _take_round(self, environment: Mapping[str, str]) -> None:
        """Take this rank's place in a round, and what it restores."""
        self.place = self._link.place
        text = environment.get("RESILIO_RESTORE", "")
        self._point = parse_restore_point(text)
        self._arrives = self._point is not None and text.startswith(ARRIVING)
        in_memory = self._point is not None and self._point.source is Tier.MEMORY and not self._arrives
        self.memory_step = self._point.step if self._point is not None and in_memory else -1

    def _enter(self, environment: Mapping[str, str]) -> None:
        self._saved.clear()
        self._tell(-1, Stage.FAILED, ROUND_OVER)
        self._take_round(environment)

    def await_arenas(self) -> None:
        """Wait until the snapshot is whole. If it never will be, the agent says so, and all ranks are ended."""
        while self._arrives and self._link.usable:
            if self._is_here():
                self._arrives = False
            else:
                time.sleep(_LOOK_S)

    def _is_here(self) -> bool:
        if self.arena_directory is None or self._point is None:
            return True
        slots = (arena.slot_path(self.arena_directory, self.place.rank, number) for number in (0, 1, arena.LAST))
        held = (arena.read_header(path) for path in slots)
        return any(header is not None and header.step == self._point.step for header in held)

    def restore_points(self) -> Sequence[RestorePoint]:
        """Return the one that all ranks of this round restore; later on, what they saved and committed last.

        Raises CorruptCheckpoint when there is none because all are damaged.
        """
        if self.place.rank == 0 and self._directory:
            directory, point = Path(self._directory), self._point
            if point is None:
                fresh_start.check_not_all_damaged(directory)
            elif point.source is Tier.COMMITTED and (why := fresh_start.why_newest_is_gone(directory)):
                say(f"{why}: going on from step {point.step}")
        return [] if self._point is None else [self._point]

    def restored(self, step: int, source: Tier | None, seconds: float) -> None:
        """Tell the agent which step was restored."""
        self._link.send(rank_link.Restored(step, source, seconds))

    def restore_failed(self, point: RestorePoint, error: str) -> None:
        """Tell the agent and end this process: all ranks must restore the same other copy, so a new round begins.

        It ends at once and without clean-up: the other ranks may already be waiting for it in a collective.
        """
        self._link.send(rank_link.RestoreFailed(point.step, point.source, error[:2000]))
        say(f"rank {self.place.rank}: {point.source} copy of step {point.step}: {error}")
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(EXIT_RESTORE_FAILED)

    def before_save(self, step: int) -> None:
        """Do nothing: the two arenas are the only limit."""

    def snapshot_taken(self, step: int, arena: Path, size_bytes: int, blocked_s: float) -> None:
        """Tell the agent about the snapshot."""
        self._saved.add(step)
        self._link.send(rank_link.SnapshotTaken(step, str(arena), size_bytes, blocked_s))

    def snapshot_room(self, step: int, room: SnapshotRoom, why: str) -> None:
        """Tell the agent, which records it."""
        self._link.send(rank_link.SnapshotPlaced(step, room, why[:300]))

    def on_stage(self, callback: OnStage) -> None:
        """Call ``callback`` for the agent's Stage messages; the end of the agent or the round fails every open save."""
        self._callbacks.append(callback)
        if not self._link.usable:
            self._on_close()

    def _on_progress(self, stage: rank_link.SaveProgress) -> None:
        if stage.stage is Stage.COMMITTED and stage.step in self._saved:
            self._saved.discard(stage.step)
            self._point, self._arrives = RestorePoint(Tier.COMMITTED, stage.step), False
        self._tell(stage.step, stage.stage, stage.error)

    def _on_close(self) -> None:
        self._tell(-1, Stage.FAILED, "the agent of this node is gone")

    def _tell(self, step: int, stage: Stage, error: str) -> None:
        for callback in self._callbacks:
            callback(step, stage, error)
