"""The kernel's log, and what its lines say of hardware that is not a GPU's."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from resilio_hpc.prolog_epilog.check import Fault, Former, Limits, Unreadable
from resilio_hpc.prolog_epilog.node import Node
from resilio_hpc.prolog_epilog.node_files import NodeFiles

KMSG = "/dev/kmsg"
_HEAD = re.compile(r"(\d{1,4}),(\d{1,20}),(\d{1,20}),[^;]*;(.*)", re.DOTALL)
_MOST_RECORDS = 100_000
_RECORD_BYTES = 16384


@dataclass(frozen=True)
class Line:
    """One message. ``at_s``: seconds since boot; ``kernel``: it is the kernel's own, not a program's."""

    at_s: float
    text: str
    kernel: bool


def parse(record: str) -> Line | None:
    """A record of /dev/kmsg (Linux: Documentation/ABI/testing/dev-kmsg); None for what is none. Pure.

    Programs may write there, too, if they are root: their facility is not 0, and nobody may forge the kernel's.
    """
    found = _HEAD.match(record)
    if not found:
        return None
    text = found[4].split("\n", 1)[0]
    return Line(int(found[3]) / 1e6, text, int(found[1]) >> 3 == 0)


@dataclass(frozen=True)
class KernelLog:
    """``gpus``: PCI address, as Xids name it → UUID and number of the device file, as the driver tells in /proc."""

    lines: tuple[Line, ...]
    gpus: Mapping[str, tuple[str, int]] = field(default_factory=dict)


def fetch(node: Node) -> KernelLog:
    """Raises Unreadable, as where only root may read."""
    return KernelLog(tuple(_lines(node)), driver_gpus(node.files))


def driver_gpus(files: NodeFiles) -> dict[str, tuple[str, int]]:
    found = {}
    for name in files.names("/proc/driver/nvidia/gpus"):
        text = files.optional(f"/proc/driver/nvidia/gpus/{name}/information") or ""
        uuid = re.search(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)", text, re.MULTILINE)
        minor = re.search(r"^Device Minor:\s*(\d{1,4})\s*$", text, re.MULTILINE)
        if uuid and minor:
            found[name.lower().split(".")[0]] = (uuid[1], int(minor[1]))
    return found


def _lines(node: Node) -> list[Line]:
    """The kernel's own lines, as far back as it remembers."""
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
    """Each read gives one record; EPIPE where it was overwritten before we read it."""
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


_DISK = re.compile(
    r"I/O error, dev (?P<device>[\w.-]+), sector "
    r"|(?P<device2>nvme\d+)[\w ]*: (?:controller is down|Removing after probe failure|I/O \d+ .*timeout, reset)"
)
_FILE_SYSTEM = re.compile(
    r"EXT4-fs error \(device (?P<device>[\w-]+)\)"
    r"|XFS \((?P<device2>[\w-]+)\): .*(?:[Cc]orruption|Shutting down filesystem)"
    r"|BTRFS.* error \(device (?P<device3>[\w-]+).*\)|(?P<device4>[\w-]+): .*[Rr]emounting filesystem read-only"
)
_HARDWARE = re.compile(r"\[Hardware Error\]:.*(?:[Uu]ncorrect|fatal|Fatal|UE |panic)|Machine check: .*[Ff]atal")
_LOCKUP = re.compile(r"watchdog: BUG: soft lockup|rcu: INFO: rcu_\w+ (?:self-)?detected stall|NMI watchdog: .*LOCKUP")


def recent(lines: Iterable[Line], limits: Limits, former: Former) -> Iterator[Line]:
    """Those within the limit's window and after what was cleared. Pure."""
    oldest = max(former.now_s - limits.number("window_s"), former.cleared_s)
    return (line for line in lines if line.at_s > oldest)


def disk_errors(log: KernelLog, limits: Limits, former: Former) -> tuple[Iterable[Fault], object]:
    """Several I/O errors of one disk; a single one may be a medium that was mended by the write after it."""
    return _by_device(_DISK, recent(log.lines, limits, former), limits.number("most")), None


def file_system_errors(log: KernelLog, limits: Limits, former: Former) -> tuple[Iterable[Fault], object]:
    """A file system that says it is damaged."""
    return _by_device(_FILE_SYSTEM, recent(log.lines, limits, former), 0), None


def hardware_errors(log: KernelLog, limits: Limits, former: Former) -> tuple[Iterable[Fault], object]:
    """Machine checks that were not corrected."""
    return _first(_HARDWARE, recent(log.lines, limits, former)), None


def lockups(log: KernelLog, limits: Limits, former: Former) -> tuple[Iterable[Fault], object]:
    """A processor that did nothing but one thing for too long."""
    return _first(_LOCKUP, recent(log.lines, limits, former)), None


def _by_device(pattern: re.Pattern[str], lines: Iterable[Line], most: float) -> list[Fault]:
    found: dict[str, list[str]] = {}
    for line in lines:
        match = pattern.search(line.text)
        if match:
            device = next((v for k, v in match.groupdict().items() if k.startswith("device") and v), "?")
            found.setdefault(device, []).append(line.text)
    return [Fault(f"{len(texts)} times, last: {texts[-1]}", device) for device, texts in found.items()
            if len(texts) > most]  # fmt: skip


def _first(pattern: re.Pattern[str], lines: Iterable[Line]) -> list[Fault]:
    found = [line.text for line in lines if pattern.search(line.text)]
    return [Fault(f"{len(found)} times, last: {found[-1]}")] if found else []
