"""A rank's state that is read from another rank's snapshot: its tensors, beside what is the rank's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from resilio_hpc.ckpt.format.source import Wanted
from resilio_hpc.ckpt.replication import borrowed_state
from resilio_hpc.ckpt.replication.borrowed_state import Borrowed
from resilio_hpc.ckpt.restore.arena_source import ArenaSource, Mappings
from resilio_hpc.ckpt.restore.whole_reader import copy_whole
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint


class BorrowedSource(ArenaSource):
    """The state of a rank without a snapshot. The holder's one is not overwritten until ``close``.

    ``view`` has the holder's bytes. What is the rank's own is small, and lies behind them (``slice``).
    """

    def __init__(self, borrowed: Borrowed, mappings: Mappings | None = None) -> None:
        """Raise CorruptCheckpoint where it is not there any more, or damaged."""
        holder = borrowed.holder
        try:
            self._lock = borrowed_state.locked(holder)
        except CheckpointError as error:
            raise CorruptCheckpoint(str(error)) from error
        try:
            super().__init__(holder.path, mappings)
            try:
                own = borrowed_state.own_of(borrowed, self._lock)
            except CheckpointError as error:
                super().close()
                raise CorruptCheckpoint(str(error)) from error
        except BaseException:
            os.close(self._lock)
            raise
        self._own = own.parts
        self.header, self.table, self.tensors, self.tree = own.header, own.table, own.table.tensors, own.tree

    def fill(self, wanted: Sequence[Wanted], pool: ThreadPoolExecutor) -> None:
        """See Source."""
        super().fill([each for each in wanted if each[0].offset < self._size], pool)
        for start, data in self._own:
            inside = [
                (msgspec.structs.replace(record, offset=record.offset - start), target)
                for record, target in wanted
                if record.offset >= self._size and start <= record.offset < start + len(data)
            ]
            copy_whole(self.step, memoryview(data), inside, pool)

    def slice(self, offset: int, size: int) -> memoryview:
        """See ArenaSource."""
        for start, data in self._own if offset >= self._size else ():
            if start <= offset and offset + size <= start + len(data):
                return memoryview(data)[offset - start :][:size]
        return super().slice(offset, size)

    def close(self) -> None:
        """Close, and let the holder go."""
        super().close()
        os.close(self._lock)
