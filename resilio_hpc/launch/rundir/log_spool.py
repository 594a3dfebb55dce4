"""Copies a node's spool (ledger and logs, written to its own disk first) to the run directory, byte for byte.

Each file of the spool has its own file in the run directory, and every byte goes to the offset that it has in the
spool. So a byte that is written twice (by a child that was killed during its write, and by the next one) does no harm,
and no decision depends on what a caching file system says of a file's size.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import Untrusted

CHUNK_BYTES = 1 << 20


class Drain:
    """Copies what was appended to files under ``spool/{ledger,logs}`` to the same names below ``target``.

    If a name exists there when a file is first copied, it belongs to an earlier spool: of an agent that ended in order
    and was started again, or of a node that lost its disk. The file then goes on under the next free name
    (``7-n1.part2.jsonl``). That name is noted next to the spool, and lives as long.
    """

    def __init__(self, spool: Path, target: Path) -> None:
        self._spool = spool
        self._notes = spool.with_name(f"{spool.name}-names")
        self._target = target
        self._files: dict[Path, Path] = {}  # file of the spool → its copy
        self._copied: dict[Path, int] = {}  # bytes that are known to have arrived

    def run(self) -> str:
        """Copy once. Return why something was left for the next pass, or ""."""
        problem = ""
        for source in self._spool.glob("*/**/*"):
            try:
                if source.is_file() and source.stat().st_size > self._copied.get(source, -1):
                    self._copy(source)
            except (OSError, Untrusted) as error:
                problem = str(error)
        return problem

    def _copy(self, source: Path) -> None:
        if source not in self._files:
            self._files[source] = self._noted(source) or self._claim(source)
        write = trusted_files.open_file(self._files[source], os.O_WRONLY | os.O_CREAT)
        try:
            # asked after the open, when NFS is fresh; a value that is too small does no harm
            there = os.fstat(write).st_size
            done = min(there, self._copied.get(source, there))
            with source.open("rb") as read:
                read.seek(done)
                while chunk := read.read(CHUNK_BYTES):
                    done += os.pwrite(write, chunk, done)
                    read.seek(done)
        finally:
            os.close(write)  # NFS reports a failed write here
        self._copied[source] = done

    def _noted(self, source: Path) -> Path | None:
        """Return where an earlier child has begun to copy this file; None: nowhere."""
        try:
            name = (self._notes / source.relative_to(self._spool)).read_text()
        except FileNotFoundError:
            return None
        target = (self._target / source.relative_to(self._spool)).with_name(name)
        longer = target.exists() and target.stat().st_size > source.stat().st_size
        return None if longer else target  # longer: in a power cut this disk lost what had been copied

    def _claim(self, source: Path) -> Path:
        """Return a name that was not used before."""
        wanted = self._target / source.relative_to(self._spool)
        if not self._target.is_dir():
            raise FileNotFoundError(f"{self._target} was removed")
        trusted_files.make_directory(wanted.parent)
        for number in itertools.count(1):
            target = wanted if number == 1 else wanted.with_name(f"{wanted.stem}.part{number}{wanted.suffix}")
            try:
                os.close(trusted_files.open_file(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            note = self._notes / source.relative_to(self._spool)
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(note, target.name.encode(), durable=False)
            return target
        raise AssertionError("unreachable")
