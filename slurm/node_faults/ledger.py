"""Where faults are kept: a directory with one file per host that writes, to which lines are only ever added.

    <host>.jsonl      the newest, <host>.1.jsonl what was before it grew to MOST_BYTES

Each call writes its lines with one write(2), and begins with a newline where the last line is torn: a full disk or a
killed writer costs the lines that it could not write, and no others. Readers skip what is no such line.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core.errors import HealthError
from resilio_hpc.slurm.node_faults.fault import NodeFault, decode, encode

SYSTEM = Path("/var/lib/resilio/node-faults")
DIRECTORY_VARIABLE = "RESILIO_NODE_FAULTS"
OFF = "off"
BESIDE_RUNS = "resilio-node-faults"
MOST_BYTES = 4 << 20
_FILE = re.compile(r"[A-Za-z0-9._-]{1,128}\.jsonl")
_MOST_FILES = 20_000


def users_directory(environment: Mapping[str, str], run_path: Path) -> Path | None:
    """Return a user's own ledger.

    Where RESILIO_NODE_FAULTS says, else beside the run directory; None where it says off.
    """
    given = environment.get(DIRECTORY_VARIABLE, "")
    if given.lower() == OFF:
        return None
    beside = run_path.absolute().parent / f"{BESIDE_RUNS}-{os.geteuid()}"  # the run directories of a group lie together
    return Path(given).expanduser() if given else beside


@dataclass(frozen=True)
class Remembered:
    """All faults. ``problems``: files that were not trusted or could not be read, for people."""

    faults: tuple[NodeFault, ...] = ()
    problems: tuple[str, ...] = ()


class FaultLedger:
    """A ledger of faults. ``host``: this writer's; several processes of a host may write at a time.

    A file is put aside once it is larger than ``most_bytes``, and of each file at most twice as much is read.
    """

    def __init__(self, directory: Path, host: str = "", *, most_bytes: int = MOST_BYTES) -> None:
        self.directory = directory
        self._most_bytes = most_bytes
        self._host = re.sub(r"[^A-Za-z0-9._-]", "_", host or os.uname().nodename)[:100]

    def append(self, faults: Iterable[NodeFault]) -> int:
        """Append faults; return how many. Raises HealthError where they could not be stored."""
        lines = [encode(fault) for fault in faults]
        if not lines:
            return 0
        try:
            self._make_directory()
            self._write(b"".join(lines))
        except OSError as error:
            raise HealthError(f"faults of nodes could not be kept in {self.directory}: {error.strerror}") from error
        return len(lines)

    def read(self) -> Remembered:
        """Return the faults of all trusted writers. A missing directory holds none.

        Raises HealthError where it is neither this user's nor root's, others may write into it, or it cannot be read.
        """
        try:
            folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return Remembered()
        except OSError as error:
            raise HealthError(f"{self.directory} cannot be read: {error.strerror}") from error
        try:
            self._check(os.fstat(folder))
            return self._read_files(folder)
        except OSError as error:
            raise HealthError(f"{self.directory} cannot be read: {error.strerror}") from error
        finally:
            os.close(folder)

    def _check(self, status: os.stat_result) -> None:
        if status.st_uid not in (0, os.geteuid()):
            raise HealthError(f"{self.directory} belongs to user {status.st_uid}: nothing in it is believed")
        if status.st_mode & (0o002 if status.st_uid else 0o022):
            raise HealthError(f"{self.directory} may be written by others: nothing in it is believed")

    def _read_files(self, folder: int) -> Remembered:
        faults: list[NodeFault] = []
        problems: list[str] = []
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry, _ in zip(entries, range(_MOST_FILES), strict=False))
        for name in names:
            if not _FILE.fullmatch(name):
                continue
            try:
                content = _content(folder, name, 2 * self._most_bytes)
            except OSError as error:
                problems.append(f"{self.directory / name}: {error.strerror}")
                continue
            faults += [fault for line in content.split(b"\n") if line and (fault := decode(line)) is not None]
        return Remembered(tuple(faults), tuple(problems))

    def _make_directory(self) -> None:
        if not self.directory.is_dir():
            self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)

    def _write(self, data: bytes) -> None:
        path = self.directory / f"{self._host}.jsonl"
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path, flags, 0o644)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                data = b"\n" + data
            written = os.write(fd, data)
            if written != len(data):  # the disk is full now: the line is torn, and the next writer sees that
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(fd)
        finally:
            os.close(fd)
        if size + len(data) > self._most_bytes:  # a process that has it open still writes there, by its other name
            path.rename(self.directory / f"{self._host}.1.jsonl")


def _content(folder: int, name: str, most_bytes: int) -> bytes:
    """Return the end of a file that root or this user has written. Raises OSError."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o002:
            raise OSError(errno.EPERM, "not a file that only we or root can have written: not believed")
        file.seek(max(0, status.st_size - most_bytes))
        return file.read(most_bytes)
