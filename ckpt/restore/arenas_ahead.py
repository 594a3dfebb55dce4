"""Maps what a node's ranks hold in memory, in a process that waits for the place of one that is lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.restore.arena_source import Mappings
from resilio_hpc.ckpt.snapshot import arena

_LOOK_S = 1.0
_MOST_BYTES = 64 << 30  # whose page tables take 128 MiB


class ArenasAhead:
    """The arenas in ``directory``, mapped until ``has_rank``: what is restored then is copied from mapped memory."""

    def __init__(self, directory: Path, has_rank: Callable[[], bool], look_s: float = _LOOK_S) -> None:
        self._directory, self._has_rank, self._look_s = directory, has_rank, look_s
        self._mappings = Mappings()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._map, name="resilio-map", daemon=True)
        self._thread.start()

    def _map(self) -> None:
        while not (self._over.is_set() or self._has_rank()):
            room = _MOST_BYTES
            for path in sorted(self._directory.glob(arena.SLOTS)):
                if self._over.is_set() or self._has_rank():
                    return
                room -= self._map_one(path, room)
            self._mappings.let_go()
            self._over.wait(self._look_s)

    def _map_one(self, path: Path, room: int) -> int:
        """Map one. Return its size, 0 where it is not mapped: that it cannot be read is reported by a restore."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return 0
        try:
            found = os.fstat(descriptor)
            if not PAGE <= found.st_size <= min(room, found.st_blocks * 512 + found.st_size // 16):
                return 0  # its owner is still making it: to map it would take memory that its owner may not want
            self._mappings.view(descriptor, path, found.st_size)
        except OSError:
            return 0
        finally:
            os.close(descriptor)
        return found.st_size

    def take(self) -> Mappings:
        """End the mapping. Return what is mapped."""
        self._over.set()
        self._thread.join()
        return self._mappings
