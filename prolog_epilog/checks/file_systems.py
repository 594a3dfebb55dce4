"""File systems: room, inodes, read-only, latency, and whether they are mounted at all."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.prolog_epilog.base.check import Absent, DeviceHistory, Doubt, Fault, Thresholds, Unreadable, Value
from resilio_hpc.prolog_epilog.base.mounts import MOUNTINFO, Mount, mount_of, parse_mountinfo, plain
from resilio_hpc.prolog_epilog.base.node import NodeView

# Full is another check's; and a user, or root on a squashed export, may not write everywhere.
_NOT_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class FileSystem:
    """One file system, as statvfs(2) tells, and how long it took to answer. ``inodes`` is 0 where it has no limit.

    ``refused``: why a file could not be written there; "" where it could, or was not tried.
    """

    path: str
    type: str
    network: bool
    read_only: bool
    size_bytes: int
    free_bytes: int
    inodes: int
    free_inodes: int
    seconds: float
    refused: str = ""

    @property
    def identity(self) -> str:
        """What the past is remembered by: another file system at the same place has a past of its own."""
        return f"{self.path} {self.type}"


def targets(node: NodeView) -> list[str]:
    """Return the paths of the site's settings and network mounts; each file system once. Touches none of them."""
    settings = node.settings["file-systems"]
    return choose(parse_mountinfo(node.files.text(MOUNTINFO)), settings.texts("paths"), settings.texts("types"))


def choose(mounts: Sequence[Mount], paths: Iterable[str], types: Sequence[str]) -> list[str]:
    """One path for each file system that is meant. Pure."""
    chosen: dict[str, str] = {}
    for path in paths:
        mount = mount_of(path, mounts)
        if mount is not None:
            chosen.setdefault(mount.path, path)
    for mount in mounts:
        if is_network(mount, types):
            chosen.setdefault(mount.path, mount.path)
    return list(chosen.values())


def is_network(mount: Mount, types: Sequence[str]) -> bool:
    """Return whether a type of file system is a network's. Pure."""
    return any(fnmatch.fnmatchcase(mount.type, pattern) for pattern in types)


def fetch(node: NodeView) -> FileSystem:
    """Look at the target's file system, and write a file where the settings say so. May hang: that is measured."""
    settings = node.settings["file-systems"]
    mounts = parse_mountinfo(node.files.text(MOUNTINFO))
    mount = mount_of(node.target, mounts)
    if mount is None:
        raise Absent(f"{node.target} is not mounted")
    path = node.files.path(node.target)
    began = time.monotonic()
    try:
        seen = os.statvfs(path)
        with contextlib.suppress(PermissionError), os.scandir(path) as names:
            next(names, None)
        refused = _written(path) if node.target in settings.texts("write") else ""
    except FileNotFoundError as error:
        raise Absent(f"{node.target} is not there") from error
    except OSError as error:
        if isinstance(error, PermissionError) and mount.type.startswith("fuse"):
            raise Absent(f"{node.target} is a user's own") from error  # FUSE shuts out root, too
        raise Unreadable(f"{node.target}: {error.strerror}") from error
    return FileSystem(
        path=node.target,
        type=mount.type,
        network=is_network(mount, settings.texts("types")),
        read_only=mount.read_only,
        size_bytes=seen.f_blocks * seen.f_frsize,
        free_bytes=seen.f_bavail * seen.f_frsize,
        inodes=seen.f_files,
        free_inodes=seen.f_favail,
        seconds=time.monotonic() - began,
        refused=refused,
    )


def _written(path: Path) -> str:
    """Write, sync and remove a file; "" or why it cannot be written."""
    try:
        fd, name = tempfile.mkstemp(prefix=".resilio-health-", dir=path)
    except OSError as error:
        return _why(error)
    try:
        os.write(fd, b"resilio\n")
        os.fsync(fd)
    except OSError as error:
        return _why(error)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            Path(name).unlink()
    return ""


def _why(error: OSError) -> str:
    return "" if error.errno in _NOT_OURS else error.strerror or str(error.errno)


def space(found: FileSystem, limits: Thresholds) -> Iterable[Fault]:
    """Too little room. Pseudo file systems have no size, and images that are read-only are full by nature."""
    if found.size_bytes <= 0 or found.read_only:
        return
    percent = 100 * found.free_bytes / found.size_bytes
    least = limits.number("network_free_percent" if found.network else "free_percent")
    mib = found.free_bytes / 2**20
    full = percent < least or (not found.network and mib < limits.number("free_mib"))
    if full:
        yield Fault(f"{found.path} has {percent:.1f} % ({mib:.0f} MiB) free", found.path)


def inodes(found: FileSystem, limits: Thresholds) -> Iterable[Fault]:
    """Too few inodes; file systems without a fixed number say 0 of 0."""
    if found.inodes > 0 and not found.network and not found.read_only:
        percent = 100 * found.free_inodes / found.inodes
        if percent < limits.number("free_percent"):
            yield Fault(f"{found.path} has {percent:.1f} % ({found.free_inodes}) inodes free", found.path)


def writable(found: FileSystem, limits: Thresholds, past: DeviceHistory) -> Iterable[Fault]:
    """Read-only now, and writable before.

    What was never writable is meant so: software, images, exports. A file that cannot be written although the mount
    would allow it is a fault, but for an export that never took one.
    """
    if found.path in limits.texts("may_be_read_only"):
        return
    writable_before = past.of(found.identity)
    if found.read_only:
        if writable_before:
            yield Fault(f"{found.path} became read-only", found.path)
    elif found.refused and past.normal.get(found.identity) is not False:
        never = found.refused == os.strerror(errno.EROFS) and not writable_before
        yield Fault(
            f"{found.path}: a file cannot be written: {found.refused}", found.path, on_fail="warn" if never else None
        )


def takes_files(found: FileSystem) -> Mapping[str, Value]:
    """Whether it is mounted for writing, and took a file where we tried."""
    return {found.identity: not found.read_only and not found.refused}


def latency(found: FileSystem, limits: Thresholds) -> Iterable[Fault]:
    """Slow, and yet within the budget."""
    if found.seconds > limits.number("slow_s"):
        yield Fault(f"{found.path} took {found.seconds:.1f} s to answer", found.path)


@dataclass(frozen=True)
class MountTable:
    """What is mounted, and what /etc/fstab says should be. ``real``: where a path leads that goes through links.

    ``trouble``: lines of /etc/fstab that are none.
    """

    mounts: tuple[Mount, ...]
    wanted: tuple[str, ...]
    trouble: tuple[str, ...] = ()
    real: Callable[[str], str] = str

    def has(self, path: str) -> bool:
        """Whether something is mounted there; links are followed only where it is not at once."""
        mounted = {mount.path for mount in self.mounts}
        return path in mounted or self.real(path) in mounted


def fetch_mount_table(node: NodeView) -> MountTable:
    mounts = parse_mountinfo(node.files.text(MOUNTINFO))
    wanted, trouble = parse_fstab(node.files.optional("/etc/fstab") or "")
    return MountTable(tuple(mounts), tuple(wanted), tuple(trouble), node.files.real)


_NOT_MOUNTED = ("swap", "ignore")  # types that no mount(8) mounts; "none" is the type of a bind mount


def parse_fstab(text: str) -> tuple[list[str], list[str]]:
    """Mount points that must be there after boot, and what is wrong with lines that are none. Pure."""
    wanted, trouble = [], []
    for line in text.splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 3:
            trouble.append(f"/etc/fstab: not a line of fstab(5): {line[:80]!r}")
            continue
        options = words[3].split(",") if len(words) > 3 else []
        if words[1].startswith("/") and words[2] not in _NOT_MOUNTED and not {"noauto", "nofail"} & set(options):
            wanted.append(tidy(plain(words[1])))
    return wanted, trouble


def tidy(path: str) -> str:
    """``//a//b/`` as mount(8) and the kernel write it. Pure."""
    return re.sub("/+", "/", path).rstrip("/") or "/"


def present(table: MountTable, limits: Thresholds, past: DeviceHistory) -> Iterable[Fault]:
    """Yield what should be mounted and is not, unless it was not when the baseline was taken.

    The types need not be those of fstab: autofs stands in for what it mounts.
    """
    yield from map(Doubt, table.trouble)
    named = [tidy(path) for path in limits.texts("expected")]
    for path in dict.fromkeys([*table.wanted, *named]):
        meant = path in named or past.normal.get(path) is not False
        if meant and not table.has(path):
            yield Fault(f"{path} is not mounted", path)


def mounted_paths(table: MountTable) -> Mapping[str, Value]:
    """Which mount points of /etc/fstab are in use."""
    return {path: table.has(path) for path in table.wanted}
