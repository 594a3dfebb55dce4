"""Reads all sources of a sample, each with a time limit: one that hangs in the kernel leaves the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait

from resilio_hpc.core import bounded
from resilio_hpc.metrics.sheet import Sheet

LIMIT_S = 2.0


class Sources:
    """Named reads. One that has not answered is not asked again before it does."""

    def __init__(self, reads: Mapping[str, Callable[[], Sheet]], limit_s: float = LIMIT_S) -> None:
        self._reads = reads
        self._limit_s = limit_s
        self._pending: dict[str, Future[Sheet]] = {}
        self._stuck: set[str] = set()  # at the last call
        self._noted: set[str] = set()
        self.notes: list[str] = []
        """What went wrong since the last call, each once."""

    def read(self) -> Sheet:
        """Return what all sources said in time."""
        self.notes = []
        for name, read in self._reads.items():
            if name not in self._pending:
                self._pending[name] = bounded.begin(read)
        wait(self._pending.values(), self._limit_s)
        sheet = Sheet()
        for name, future in list(self._pending.items()):
            done = future.done()
            sheet.put("source_stuck", int(not done), name)
            if not done:
                if name in self._stuck:  # once, it may only have been the first import of a library
                    self._note(f"{name} does not answer: its disk, file system or driver hangs")
                self._stuck.add(name)
                continue
            self._stuck.discard(name)
            del self._pending[name]
            error = future.exception()
            if error is not None:
                self._note(f"{name}: {type(error).__name__}: {error}")
            else:
                sheet.update(future.result())
        return sheet

    def _note(self, text: str) -> None:
        if text not in self._noted and len(self._noted) < 100:
            self._noted.add(text)
            self.notes.append(text[:300])
