"""File systems: space, inodes, read-only, latency, and whether they are mounted at all."""

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

# a full disk is another check's; and a user, or root on a squashed export, may not write everywhere
_NOT_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class FileSystem:
    """One file system by statvfs(2), and how long the call took. ``inodes``: 0 where it has no limit.

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
        """Return the key of its past: another file system at the same place has its own past."""
        return f"{self.path} {self.type}"


def targets(node: NodeView) -> list[str]:
    """Return the paths of the site's settings and network mounts; each file system once. Touches none of them."""
    settings = node.settings["file-systems"]
    return choose(parse_mountinfo(node.files.text(MOUNTINFO)), settings.texts("paths"), settings.texts("types"))


def choose(mounts: Sequence[Mount], paths: Iterable[str], types: Sequence[str]) -> list[str]:
    """Return one path for each selected file system. Pure."""
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
    """Read the target's file system, and write a file where the settings say so. It may hang, which is measured."""
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
            raise Absent(f"{node.target} is a user's own") from error  # FUSE excludes root, too
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
    """Write, sync and remove a file; return "" or why that failed."""
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
    """Yield file systems with too little space.

    Pseudo file systems have no size, and read-only images are always full.
    """
    if found.size_bytes <= 0 or found.read_only:
        return
    percent = 100 * found.free_bytes / found.size_bytes
    least = limits.number("network_free_percent" if found.network else "free_percent")
    mib = found.free_bytes / 2**20
    full = percent < least or (not found.network and mib < limits.number("free_mib"))
    if full:
        yield Fault(f"{found.path} has {percent:.1f} % ({mib:.0f} MiB) free", found.path)


def inodes(found: FileSystem, limits: Thresholds) -> Iterable[Fault]:
    """Yield file systems with too few inodes; those without a fixed number say 0 of 0."""
    if found.inodes > 0 and not found.network and not found.read_only:
        percent = 100 * found.free_inodes / found.inodes
        if percent < limits.number("free_percent"):
            yield Fault(f"{found.path} has {percent:.1f} % ({found.free_inodes}) inodes free", found.path)


def writable(found: FileSystem, limits: Thresholds, past: DeviceHistory) -> Iterable[Fault]:
    """Yield file systems that are read-only now, and were writable before.

    One that was never writable is meant to be so: software, images, exports. A file that cannot be written although the
    mount allows it is a fault, except on an export that never accepted one.
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
    """Return whether it is mounted for writing, and accepted a file where one was tried."""
    return {found.identity: not found.read_only and not found.refused}


def latency(found: FileSystem, limits: Thresholds) -> Iterable[Fault]:
    """Yield file systems that are slow, but within the time budget."""
    if found.seconds > limits.number("slow_s"):
        yield Fault(f"{found.path} took {found.seconds:.1f} s to answer", found.path)


@dataclass(frozen=True)
class MountTable:
    """The mounts, and those that /etc/fstab asks for. ``real``: the target of a path with links.

    ``trouble``: invalid lines of /etc/fstab.
    """

    mounts: tuple[Mount, ...]
    wanted: tuple[str, ...]
    trouble: tuple[str, ...] = ()
    real: Callable[[str], str] = str

    def has(self, path: str) -> bool:
        """Return whether something is mounted there; links are followed only if it is not found at once."""
        mounted = {mount.path for mount in self.mounts}
        return path in mounted or self.real(path) in mounted


def fetch_mount_table(node: NodeView) -> MountTable:
    mounts = parse_mountinfo(node.files.text(MOUNTINFO))
    wanted, trouble = parse_fstab(node.files.optional("/etc/fstab") or "")
    return MountTable(tuple(mounts), tuple(wanted), tuple(trouble), node.files.real)


_NOT_MOUNTED = ("swap", "ignore")  # types that mount(8) does not mount; "none" is the type of a bind mount


def parse_fstab(text: str) -> tuple[list[str], list[str]]:
    """Return the mount points that must exist after boot, and the errors of invalid lines. Pure."""
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
    """Return ``//a//b/`` as mount(8) and the kernel write it. Pure."""
    return re.sub("/+", "/", path).rstrip("/") or "/"


def present(table: MountTable, limits: Thresholds, past: DeviceHistory) -> Iterable[Fault]:
    """Yield missing mounts, unless they were missing when the baseline was taken.

    The types need not be those of fstab: autofs stands for what it mounts.
    """
    yield from map(Doubt, table.trouble)
    named = [tidy(path) for path in limits.texts("expected")]
    for path in dict.fromkeys([*table.wanted, *named]):
        meant = path in named or past.normal.get(path) is not False
        if meant and not table.has(path):
            yield Fault(f"{path} is not mounted", path)


def mounted_paths(table: MountTable) -> Mapping[str, Value]:
    """Return which mount points of /etc/fstab are in use."""
    return {path: table.has(path) for path in table.wanted}
