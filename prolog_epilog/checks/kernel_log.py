"""The kernel's log, and the data that names the devices in it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from resilio_hpc.prolog_epilog.base.check import Unreadable
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles

KMSG = "/dev/kmsg"
_HEAD = re.compile(r"(\d{1,4}),(\d{1,20}),(\d{1,20}),[^;]*;(.*)", re.DOTALL)
_MOST_RECORDS = 100_000
_RECORD_BYTES = 16384
_FIRST_USER, _NOBODY = 1000, 65534


@dataclass(frozen=True)
class Line:
    """One message. ``at_s``: seconds since boot; ``kernel``: it is the kernel's own, not a program's."""

    at_s: float
    text: str
    kernel: bool


def parse(record: str) -> Line | None:
    """Parse a record of /dev/kmsg (Linux: Documentation/ABI/testing/dev-kmsg); None for anything else. Pure.

    Programs of root may write there too: their facility is not 0, and none can forge the kernel's.
    """
    found = _HEAD.match(record)
    if not found:
        return None
    text = found[4].split("\n", 1)[0]
    return Line(int(found[3]) / 1e6, text, int(found[1]) >> 3 == 0)


@dataclass(frozen=True)
class KernelLog:
    """The log. ``gpus``: PCI address, as in Xids → UUID and number of the device file, by the driver in /proc.

    ``removable``: disks with removable media, as a BMC's virtual stick. ``users``: whose programs are on the node now.
    """

    lines: tuple[Line, ...]
    gpus: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    removable: frozenset[str] = frozenset()
    users: frozenset[int] = frozenset()


def fetch(node: NodeView) -> KernelLog:
    """Read the kernel's log. Raises Unreadable, for instance where only root may read."""
    return KernelLog(tuple(_lines(node)), driver_gpus(node.files), _removable(node.files), _users(node.files))


def _removable(files: NodeFiles) -> frozenset[str]:
    names = files.names("/sys/block")
    return frozenset(name for name in names if (files.optional(f"/sys/block/{name}/removable") or "").strip() == "1")


def _users(files: NodeFiles) -> frozenset[int]:
    """Return the owners of processes, without the system's own."""
    owners = set()
    for pid in files.names("/proc", r"\d+"):
        with contextlib.suppress(OSError):  # it has ended
            owners.add(files.path(f"/proc/{pid}").stat().st_uid)
    return frozenset(owner for owner in owners if _FIRST_USER <= owner != _NOBODY)


def driver_gpus(files: NodeFiles) -> dict[str, tuple[str, int]]:
    found = {}
    for name in files.names("/proc/driver/nvidia/gpus"):
        text = files.optional(f"/proc/driver/nvidia/gpus/{name}/information") or ""
        uuid = re.search(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)", text, re.MULTILINE)
        minor = re.search(r"^Device Minor:\s*(\d{1,4})\s*$", text, re.MULTILINE)
        if uuid and minor:
            found[name.lower().split(".")[0]] = (uuid[1], int(minor[1]))
    return found


def _lines(node: NodeView) -> list[Line]:
    """Return the kernel's own lines, as far back as it keeps them."""
    path = node.files.path(KMSG)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise Unreadable(f"{KMSG} is not there") from error
    except OSError as error:
        raise Unreadable(f"{KMSG}: {error.strerror}") from error
    try:
        records = _captured(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else _records(fd)
        lines = [parse(record) for record in records]
    except OSError as error:
        raise Unreadable(f"{KMSG}: {error.strerror}") from error
    finally:
        os.close(fd)
    if lines and not any(lines):
        raise Unreadable(f"{KMSG}: no line is one of the kernel's log")
    return [line for line in lines if line is not None and line.kernel]


def _records(fd: int) -> Iterator[str]:
    """Yield one record per read; EPIPE means that it was overwritten before the read."""
    for _ in range(_MOST_RECORDS):
        try:
            record = os.read(fd, _RECORD_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EINVAL):
                continue
            raise
        if not record:
            return
        yield record.decode(errors="replace")


def _captured(fd: int) -> Iterator[str]:
    with open(fd, encoding="utf-8", errors="replace", closefd=False) as file:
        for line in file:
            if not line.startswith(" "):  # fields that belong to the record above
                yield line.rstrip("\n")
