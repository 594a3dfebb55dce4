"""Copies a node's spool (ledger and logs, written to its own disk first) to the run directory, byte for byte.

Each file of the spool has its own file in the run directory, and every byte goes to the offset that it has in the
spool. So a byte that is written twice (by a child that was killed during its write, and by the next one) does no harm,
and no decision depends on what a caching file system says of a file's size.

A node's disk may be small, or memory. So what is safe in the run directory is given back: files of earlier rounds that
no process has open, and all but the end of a long log that is still written.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import time
from pathlib import Path

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import Untrusted

CHUNK_BYTES = 1 << 20
QUIET_S = 60.0  # a file of an earlier round that was not written for so long is removed
REMOVED_AT_ONCE = 16  # files of one pass: each waits until the shared file system has the bytes for good
HOLE_BYTES = 64 << 20  # of a file that is still written, freed at once
KEPT_BYTES = 16 << 20  # at its end, for a console that is behind
_PUNCH_HOLE_KEEP_SIZE = 3  # fallocate(2)
_libc = ctypes.CDLL(None)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


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
        self._freed: dict[Path, int] = {}  # the first bytes of a file that the spool no longer has

    def run(self) -> str:
        """Copy once. Return why something was left for the next pass, or ""."""
        problem = ""
        rounds: dict[Path, int] = {}
        for source in self._spool.glob("*/**/*"):
            try:
                if not source.is_file():
                    continue
                rounds[source] = _round(source.relative_to(self._spool))
                if source.stat().st_size > self._copied.get(source, -1):
                    self._copy(source)
            except (OSError, Untrusted) as error:
                problem = str(error)
        newest = max(rounds.values(), default=-1)
        earlier = [source for source, number in rounds.items() if 0 <= number < newest]
        removed = 0
        for source in earlier:
            with contextlib.suppress(OSError, Untrusted):  # it only takes room; the next pass tries again
                removed += self._remove(source)
            if removed == REMOVED_AT_ONCE:
                break
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
                read.seek(_next_data(read.fileno(), done))
                done = read.tell()
                while chunk := read.read(CHUNK_BYTES):
                    done += os.pwrite(write, chunk, done)
                    read.seek(done)
            self._free(source, write, done)
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

    def _free(self, source: Path, write: int, done: int) -> None:
        """Free the disk under all but the end of a long file, once the run directory has it for good."""
        end = (done - KEPT_BYTES) // CHUNK_BYTES * CHUNK_BYTES
        if _round(source.relative_to(self._spool)) < 0 or end - self._freed.get(source, 0) < HOLE_BYTES:
            return
        os.fsync(write)
        self._freed[source] = end  # a file system that cannot do it is not asked again for the same bytes
        with source.open("r+b") as file:
            _libc.fallocate(file.fileno(), _PUNCH_HOLE_KEEP_SIZE, 0, end)

    def _remove(self, source: Path) -> bool:
        """Remove a file of an earlier round that is copied and that no process has open. Return whether it is gone."""
        copied = self._copied.get(source)
        if time.time() - source.stat().st_mtime < QUIET_S or copied is None:
            return False
        with source.open("rb") as file:
            try:
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # refused while another process has it open
            except OSError:
                return False
            if os.fstat(file.fileno()).st_size != copied:
                return False
            target = trusted_files.open_file(self._files[source], os.O_WRONLY)
            try:
                os.fsync(target)
            finally:
                os.close(target)
            source.unlink()
        (self._notes / source.relative_to(self._spool)).unlink(missing_ok=True)
        for known in (self._files, self._copied, self._freed):
            known.pop(source, None)
        with contextlib.suppress(OSError):  # other files are in them
            for folder in source.relative_to(self._spool).parents[:-2]:
                (self._notes / folder).rmdir()
                (self._spool / folder).rmdir()
        return True


def _round(path: Path) -> int:
    """Return the round of a file of the spool, as in ``logs/7/n1/0.log``; -1 where it belongs to none."""
    parts = path.parts
    return int(parts[1]) if len(parts) > 2 and parts[1].isdecimal() else -1


def _next_data(file: int, start: int) -> int:
    """Return where the first byte from ``start`` on is that was not freed."""
    try:
        return os.lseek(file, start, os.SEEK_DATA)
    except OSError:  # nothing follows, or the file system does not know
        return start
