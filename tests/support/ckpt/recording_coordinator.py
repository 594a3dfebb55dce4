"""A coordinator as under the launcher: arenas have names, and no process writes them. It keeps what it gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from resilio_hpc.ckpt.coordination.coordinator import Place
from resilio_hpc.ckpt.format.restore_point import RestorePoint
from resilio_hpc.core.tiers import SnapshotRoom, Stage, Tier


class RecordingCoordinator:
    """``taken``: steps of snapshots; ``rooms``: step and room of each change; ``failed``: what was not restored."""

    local_directory = peer_disks = read_ahead = None
    memory_step = -1

    def __init__(self, arenas: Path, place: Place) -> None:
        self.place = place
        self.arena_directory = arenas
        self.taken: list[int] = []
        self.rooms: list[tuple[int, str]] = []
        self.failed: list[RestorePoint] = []
        self.callbacks: list[Any] = []
        self._points: list[RestorePoint] = []

    def restores(self, *points: RestorePoint) -> None:
        """What the next life is to restore, the first that can be."""
        self._points = [*points]

    def await_arenas(self) -> None:
        pass

    def restore_points(self) -> list[RestorePoint]:
        return self._points

    def restored(self, step: int, source: Tier | None, seconds: float) -> None:
        pass

    def restore_failed(self, point: RestorePoint, error: str) -> None:
        self.failed.append(point)

    def before_save(self, step: int) -> None:
        pass

    def snapshot_taken(self, step: int, arena: Path, size_bytes: int, blocked_s: float) -> None:
        self.taken.append(step)

    def snapshot_room(self, step: int, room: SnapshotRoom, why: str) -> None:
        self.rooms.append((step, str(room)))

    def on_stage(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def reached(self, step: int, stage: Stage) -> None:
        """As the agent tells it."""
        for callback in self.callbacks:
            callback(step, stage, "")
