"""Snapshot arenas: files in shared memory that hold a rank's state, whole, whatever kills the rank.

Each rank owns two files, ``rank<R>.slot0`` and ``rank<R>.slot1``, and writes to the one that does not hold its newest
snapshot. The last finished step, saved when ranks cannot go on, has a third file, ``slot2``: other ranks may need the
older snapshots. The first page of a file is its header; a state word there says ``empty``, ``writing`` or ``whole``.
It becomes ``whole`` last, after the header, so a rank that dies at any instant leaves its former snapshot.

A writer of a slot holds an exclusive flock on it, a reader from outside (``pin``) a shared one; the kernel
drops both with their holders. A slot may be a symbolic link to a file on disk, where shared memory was full.

This module needs neither torch nor h5py: the agent uses it.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.ckpt.format.manifest import Layout
from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.format.whole_snapshot import Header
from resilio_hpc.native import crc32c

STATE_AT = 2048
HUGE_AT, HUGE = 2056, b"HUGE\0\0\0\0"  # whether it is in huge pages; says nothing about its content
EMPTY, WRITING, WHOLE = b"EMPTY\0\0\0", b"WRITING\0", b"WHOLE\0\0\0"

_MAGIC = b"RESIL-AR"
_VERSION = 2  # 1 had blocks of 16 MiB
# magic, version, layout, step, sequence, rank, local rank, world size, local world size, round, table CRC,
# table offset, table size, whole size, run id
_FIELDS = struct.Struct("<8s2I q Q 6I 3Q 128s")
_CRC = struct.Struct("<I")
_NAME = re.compile(r"rank(\d{1,9})\.slot([012])")
LAST = 2
"""The slot of the last finished step."""
_LAYOUTS: tuple[Layout, ...] = ("own", "replicated")


@dataclass(frozen=True)
class HeldSnapshot:
    """A whole snapshot in an arena of this node."""

    rank: int
    local_rank: int
    world_size: int
    step: int
    path: Path
    size_bytes: int
    local_world_size: int = 1
    round: int = 0
    sequence: int = 0
    layout: Layout = "own"


def pack(header: Header) -> bytes:
    """Return the header page's fields with their checksum (the state word is apart)."""
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        _LAYOUTS.index(header.layout),
        header.step,
        header.sequence,
        header.rank,
        header.local_rank,
        header.world_size,
        header.local_world_size,
        header.round,
        header.table_crc32c,
        header.table_offset,
        header.table_size,
        header.size_bytes,
        header.run_id.encode("utf-8", "replace")[:128],
    )
    return fields + _CRC.pack(crc32c(fields))


def unpack(page: bytes) -> Header | None:
    """Return the header of a whole snapshot; None for anything else: empty, being written, torn, another version."""
    if len(page) < PAGE or page[STATE_AT : STATE_AT + 8] != WHOLE:
        return None
    fields = page[: _FIELDS.size]
    if _CRC.unpack_from(page, _FIELDS.size)[0] != crc32c(fields):
        return None
    (magic, version, layout, step, sequence, rank, local, world, local_world, round_, crc, at, size, whole, run) = (
        _FIELDS.unpack(fields)
    )
    if magic != _MAGIC or version != _VERSION or layout >= len(_LAYOUTS) or not PAGE <= at <= at + size <= whole:
        return None
    name = run.rstrip(b"\0").decode("utf-8", "replace")
    return Header(step, sequence, rank, local, world, local_world, round_, _LAYOUTS[layout], name, at, size, crc, whole)


def page(header: Header) -> bytes:
    """Return the first page of an arena that holds a whole snapshot."""
    return (pack(header).ljust(STATE_AT, b"\0") + WHOLE).ljust(PAGE, b"\0")


SLOTS = "rank*.slot*"


def slot_path(directory: Path, rank: int, slot: int) -> Path:
    """Return the path of slot 0, 1 or 2 (``LAST``) of a rank."""
    return directory / f"rank{rank}.slot{slot}"


def read_header(path: Path) -> Header | None:
    """Return the header of an arena file when it holds a whole snapshot, else None (also for a missing file)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return header_of(fd)
    except OSError:
        return None
    finally:
        os.close(fd)


def header_of(fd: int) -> Header | None:
    """Return the header of an open arena file when it holds a whole snapshot, else None."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size < PAGE:
        return None
    header = unpack(os.pread(fd, PAGE, 0))
    return header if header is not None and header.size_bytes <= found.st_size else None


def scan(directory: Path) -> list[HeldSnapshot]:
    """Return every whole snapshot in the arenas of this node, by rank, newest last. Reads headers only."""
    held = []
    for path in _slots(directory):
        header = read_header(path)
        if header is not None:
            held.append(
                HeldSnapshot(
                    header.rank,
                    header.local_rank,
                    header.world_size,
                    header.step,
                    path,
                    header.size_bytes,
                    header.local_world_size,
                    header.round,
                    header.sequence,
                    header.layout,
                )
            )
    return sorted(held, key=lambda snapshot: (snapshot.rank, snapshot.sequence))


class Pin:
    """Snapshots that are not overwritten until ``release`` or the end of this process.

    ``paths``: the arena files of all ranks of this node, in the order of the ranks.
    """

    def __init__(self, paths: list[Path], fds: list[int]) -> None:
        self.paths = paths
        self._fds = fds

    def release(self) -> None:
        """Let the slots be overwritten again, unless another process keeps them. A second call does nothing."""
        while self._fds:
            os.close(self._fds.pop())


def pin(directory: Path, step: int) -> Pin | None:
    """Keep the snapshots of ``step`` from being overwritten.

    None, and nothing is pinned, when some rank no longer holds it. Snapshots of different rounds are never mixed.
    """
    rounds: dict[tuple[int, int, int], dict[int, HeldSnapshot]] = defaultdict(dict)
    for held in scan(directory):
        if held.step == step:
            rounds[held.round, held.world_size, held.local_world_size][held.local_rank] = held
    for (_, _, local_world_size), by_local_rank in sorted(rounds.items(), reverse=True):
        if set(by_local_rank) == set(range(local_world_size)):
            kept = pin_these(sorted(by_local_rank.values(), key=lambda held: held.rank))
            if kept is not None:
                return kept
    return None


def pin_these(chosen: Sequence[HeldSnapshot]) -> Pin | None:
    """Keep snapshots from being overwritten; None, and nothing is pinned, where one is gone."""
    fds = [fd for held in chosen if (fd := lock_snapshot(held)) is not None]
    if len(fds) == len(chosen):
        return Pin([held.path for held in chosen], fds)
    for fd in fds:
        os.close(fd)
    return None


def invalidate(directory: Path, step: int) -> None:
    """Mark every snapshot of ``step`` as empty, since the copy is bad."""
    for held in scan(directory):
        if held.step == step:
            mark_empty(held.path, step)


def mark_empty(path: Path, step: int) -> None:
    """Mark one arena as empty if it holds ``step`` and no process is writing to it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: a pinned snapshot may turn out to be bad as well
        header = header_of(fd)
        if header is not None and header.step == step:
            os.pwrite(fd, EMPTY, STATE_AT)
    except OSError:
        pass  # a writer has it, so that step is gone already
    finally:
        os.close(fd)


def remove(directory: Path) -> None:
    """Remove all arenas of a directory, those on disk too, and the directory when nothing else is in it."""
    remove_slots(directory)
    try:
        directory.rmdir()
    except OSError:
        pass


def remove_slots(directory: Path, keep: Collection[int] = ()) -> None:
    """Remove the arenas of all ranks but those to keep."""
    for path in _slots(directory):
        name = _NAME.fullmatch(path.name)
        if name is not None and int(name[1]) in keep:
            continue
        if path.is_symlink():
            target = path.readlink()
            if _NAME.fullmatch(target.name):
                target.unlink(missing_ok=True)
                try:
                    target.parent.rmdir()
                except OSError:
                    pass  # other ranks' arenas are still in it
        path.unlink(missing_ok=True)


def _slots(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))
    except OSError:
        return []


def lock_snapshot(held: HeldSnapshot) -> int | None:
    """Return a file descriptor that keeps this snapshot; None when it is being overwritten."""
    try:
        fd = os.open(held.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        header = header_of(fd)
    except OSError:
        header = None
    if header is None or header.step != held.step or header.sequence != held.sequence:
        os.close(fd)
        return None
    return fd
