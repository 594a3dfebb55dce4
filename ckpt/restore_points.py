"""The copies of a state that a Checkpointer may restore, and reading one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from resilio_hpc.ckpt.coordination import coordinator
from resilio_hpc.ckpt.coordination.coordinator import Coordinator
from resilio_hpc.ckpt.format.manifest import Layout
from resilio_hpc.ckpt.format.restore_point import RestorePoint
from resilio_hpc.ckpt.rank_arenas import RankArenas
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.restore.committed_source import CommittedSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.tiers import bounded_io, local_disk
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, os_error_text
from resilio_hpc.core.tiers import Tier


class RestorePoints:
    """Reads this rank's part of a snapshot in ``arenas``, or of a step that is committed in ``directory``."""

    def __init__(
        self,
        coordinator: Coordinator,
        directory: Path,
        layout: Layout,
        arenas: RankArenas,
        warn: Callable[[str], None],
    ) -> None:
        """``warn``: called where a copy on the node's own disk cannot be used."""
        self._coordinator = coordinator
        self._directory = directory
        self._layout = layout
        self._arenas = arenas
        self._warn = warn
        self.patience = bounded_io.PATIENCE
        """With the node's own disk."""

    def all(self) -> Sequence[RestorePoint]:
        """Return those that the coordinator names, the best first. Raises CheckpointError."""
        try:
            return self._coordinator.restore_points()
        except OSError as error:
            where = os_error_text(error, str(self._directory))
            raise CheckpointError(f"it cannot be seen which checkpoints there are: {where}") from error

    def read(self, point: RestorePoint, state: Any, pool: ThreadPoolExecutor) -> tuple[Any, Tier]:
        """Return the state, and which tier it came from. Raises the errors of ``restore``."""
        try:
            with self._source(point) as source:
                return restore(source, state, pool), source.tier
        except CorruptCheckpoint as error:
            if point.source is Tier.COMMITTED:
                checkpoint_index.note_damage(self._directory, point.step, str(error))
            raise

    def _source(self, point: RestorePoint) -> ArenaSource | CommittedSource:
        if point.source is not Tier.COMMITTED:
            return self._arenas.source(point.step)
        place = self._coordinator.place
        try:
            manifest = checkpoint_index.manifest_of(self._directory, point.step)
        except FileNotFoundError as error:
            raise CorruptCheckpoint(f"step {point.step} is not in {self._directory}") from error
        where = checkpoint_index.step_directory(self._directory, point.step)
        return CommittedSource(
            where, manifest, place.rank, place.world_size, self._layout,
            alone=place.local_world_size == 1,
            local_rank=place.local_rank,
            copies=local_disk.copies_or_none(
                self._coordinator.local_directory, self._directory, manifest, self._warn, self.patience
            ),
            cached=coordinator.is_read_ahead(self._coordinator.read_ahead, point.step),
            peers=self._coordinator.peer_disks,
        )  # fmt: skip
