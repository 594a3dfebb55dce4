"""The mounts of a node, from proc(5) mountinfo, which is read without a touch of any file system."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from resilio_hpc.prolog_epilog.base.check import Unreadable

MOUNTINFO = "/proc/self/mountinfo"
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """A mount. ``device``: what is mounted, such as /dev/nvme0n1 or 10.0.0.1:/export."""

    path: str
    type: str
    device: str
    read_only: bool

    def __str__(self) -> str:
        return f"{self.path} ({self.device}, {self.type})"


def parse_mountinfo(text: str) -> list[Mount]:
    """Return the mounts in the kernel's order: of two at one place the later one is visible. Raises Unreadable.

    Pure.
    """
    found = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        first, last = before.split(" "), after.split(" ")
        if not separator or len(first) < 6 or len(last) < 3:
            raise Unreadable(f"{MOUNTINFO}: not a mount: {line[:80]!r}")
        options = {*first[5].split(","), *last[2].split(",")}
        found.append(Mount(plain(first[4]), last[0], plain(last[1]), "ro" in options))
    return found


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that a path lies on. Pure."""
    best: Mount | None = None
    for mount in mounts:
        below = mount.path if mount.path.endswith("/") else f"{mount.path}/"
        if (path == mount.path or path.startswith(below)) and (best is None or len(mount.path) >= len(best.path)):
            best = mount
    return best


def culprit(touched: str, mounts: Sequence[Mount]) -> str:
    """Return what blocks the child: a path with its mount, or the call that was noted. Pure."""
    if not touched:
        return "starting the check"
    if not touched.startswith("/"):
        return touched
    mount = mount_of(touched, mounts)
    return touched if mount is None else f"{touched} on {mount}"


def plain(text: str) -> str:
    """Return text in which proc(5) and fstab(5) write spaces and similar characters as octal numbers. Pure."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)
