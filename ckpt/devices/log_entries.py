"""What a command log holds, and the file in which it outlives its process.

The file is only added to, or replaced as a whole. Each entry has a length and a checksum, so an entry that a killed
process has not finished ends the file. It is meant for memory (tmpfs): nothing is synced.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.standard_streams import say
from resilio_hpc.native import crc32c

COMMAND_BYTES = 128
"""About what a command takes without its data."""

Argument = int | float | str


class DeviceCommand(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One command.

    ``writes``: buffers that get all of their content; a buffer of which a part changes is in ``reads``, too.
    ``draws``: its results differ from time to time, so they are recorded, and put in its place when it is done again.
    """

    number: int
    name: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    arguments: tuple[Argument, ...] = ()
    data: bytes = b""
    allocates: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    draws: bool = False
    result: bytes | None = None

    @property
    def size_bytes(self) -> int:
        """Return about how much memory it takes."""
        return COMMAND_BYTES + len(self.data) + len(self.result or b"")


class Captured(msgspec.Struct, frozen=True, array_like=True):
    """A buffer's content. ``about``: what it takes to allocate it."""

    buffer: int
    about: tuple[Argument, ...]
    data: bytes


class Capture(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The live buffers at a position."""

    position: int
    buffers: tuple[Captured, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Return how much memory it takes."""
        return sum(COMMAND_BYTES + len(one.data) for one in self.buffers)


class Marked(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A position that can be asked for, and the buffers that are live there."""

    position: int
    live: tuple[int, ...]


Entry = DeviceCommand | Capture | Marked


class Keeps(Protocol):
    """Where a log is kept besides this process's memory."""

    def append(self, entry: Entry) -> None:
        """Keep one more entry."""
        ...

    def replace(self, entries: Iterable[Entry]) -> None:
        """Keep these in place of all."""
        ...


_FRAME = struct.Struct("<II")
_decoder = msgspec.msgpack.Decoder(DeviceCommand | Capture | Marked)
_encode = msgspec.msgpack.Encoder().encode


def _framed(entry: Entry) -> bytes:
    data = _encode(entry)
    return _FRAME.pack(len(data), crc32c(data)) + data


def read_entries(path: Path) -> list[Entry]:
    """Return the entries of a file, up to the first that is not whole; none where there is no file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    with os.fdopen(file, "rb") as opened:
        data = opened.read()
    found: list[Entry] = []
    at = 0
    while at + _FRAME.size <= len(data):
        size, checksum = _FRAME.unpack_from(data, at)
        content = data[at + _FRAME.size : at + _FRAME.size + size]
        if len(content) < size or crc32c(content) != checksum:
            break
        try:
            found.append(_decoder.decode(content))
        except (msgspec.MsgspecError, ValueError):
            break
        at += _FRAME.size + size
    return found


class LogFile:
    """``Keeps`` in a file of this user's, which is made with the first entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        self._has_failed = False

    def append(self, entry: Entry) -> None:
        """See Keeps."""
        if self._has_failed:
            return
        if self._file < 0:
            self.replace((entry,))
            return
        data = memoryview(_framed(entry))
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._fail(error)

    def replace(self, entries: Iterable[Entry]) -> None:
        """See Keeps."""
        if self._has_failed:
            return
        try:
            write_atomic(self.path, b"".join(map(_framed, entries)), 0o600, durable=False)
            self.close()
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Go on without the file. One that lacks entries would tell of a state that never was."""
        self._has_failed = True
        self.close()
        self.path.unlink(missing_ok=True)
        say(f"{self.path}: a killed rank's device cannot be rebuilt: {error}")

    def close(self) -> None:
        """Close the file, which stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
