"""NVMe controllers: their state in /sys, and what their own health log says (NVM Express Base Specification)."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from resilio_hpc.prolog_epilog.check import Absent, Fault, Limits, Unreadable
from resilio_hpc.prolog_epilog.node import Node

CLASS = "/sys/class/nvme"
LOG_BYTES = 512
_ADMIN = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD of linux/nvme_ioctl.h: _IOWR('N', 0x41, struct nvme_admin_cmd of 72 bytes)
_GET_LOG_PAGE, _HEALTH_LOG = 0x02, 0x02
_COMMAND = struct.Struct("<BBHIIIQQIIIIIIIIII")
_WARNINGS = (
    "spare blocks are used up",
    "temperature beyond its limits",
    "reliability is degraded",
    "it is read-only",
    "the volatile memory's backup failed",
    "its persistent memory region is read-only or unreliable",
)


@dataclass(frozen=True)
class HealthLog:
    """SMART / Health Information (log page 02h). ``spare`` and ``spare_least`` in percent, ``used`` beyond 100, too."""

    warnings: int
    temperature_c: int
    spare: int
    spare_least: int
    used: int
    media_errors: int


@dataclass(frozen=True)
class Controller:
    """``log`` is None where it may not be asked."""

    name: str
    state: str
    log: HealthLog | None


def fetch(node: Node) -> list[Controller]:
    """Raises Absent without an NVMe controller, Unreadable."""
    files = node.files
    found = []
    for name in files.names(CLASS, r"nvme\d+"):
        state = (files.optional(f"{CLASS}/{name}/state") or "").strip()
        log = _asked(node, name) if state in ("live", "") else None
        found.append(Controller(name, state, log))
    if not found:
        raise Absent("no NVMe disk")
    return found


def parse_log(data: bytes) -> HealthLog:
    """The page's fields, little-endian. Raises Unreadable. Pure."""
    if len(data) != LOG_BYTES or not any(data):
        raise Unreadable(f"a health log of {len(data)} bytes, all of them 0" if data else "an empty health log")
    (kelvin,) = struct.unpack_from("<H", data, 1)
    media = int.from_bytes(data[160:176], "little")
    return HealthLog(data[0], kelvin - 273, data[3], data[4], data[5], min(media, 2**62))


def _asked(node: Node, name: str) -> HealthLog | None:
    """The log, by ioctl(2); in a captured tree by reading a file. None where it may not be asked."""
    path = node.files.path(f"/dev/{name}")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM):
            return None
        raise Unreadable(f"/dev/{name}: {error.strerror}") from error
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return parse_log(os.read(fd, LOG_BYTES + 1))
        buffer = array.array("B", bytes(LOG_BYTES))
        address, _ = buffer.buffer_info()
        words = (LOG_BYTES // 4 - 1) << 16 | _HEALTH_LOG
        command = _COMMAND.pack(_GET_LOG_PAGE, 0, 0, 0xFFFFFFFF, 0, 0, 0, address, 0, LOG_BYTES, words, *[0] * 7)
        fcntl.ioctl(fd, _ADMIN, command)
        return parse_log(buffer.tobytes())
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.ENOTTY):
            return None
        raise Unreadable(f"/dev/{name}: {error.strerror}") from error
    finally:
        os.close(fd)


def _logs(controllers: list[Controller]) -> list[tuple[str, HealthLog]]:
    found = [(one.name, one.log) for one in controllers if one.log is not None]
    if not found:
        raise Absent("no NVMe disk may be asked for its health log")
    return found


def state(controllers: list[Controller], limits: Limits) -> Iterable[Fault]:
    for one in controllers:
        if one.state not in ("live", ""):
            yield Fault(f"{one.name} is {one.state}", one.name)


def warnings(controllers: list[Controller], limits: Limits) -> Iterable[Fault]:
    """Bits of the critical warning, each said."""
    for name, log in _logs(controllers):
        if log.warnings:
            said = [text for bit, text in enumerate(_WARNINGS) if log.warnings >> bit & 1] or [f"{log.warnings:#x}"]
            yield Fault(f"{name}: {', '.join(said)}", name)


def wear(controllers: list[Controller], limits: Limits) -> Iterable[Fault]:
    for name, log in _logs(controllers):
        if log.used >= limits.number("used_percent") or log.spare <= log.spare_least:
            text = f"{name}: {log.used} % of its life used, {log.spare} % spare blocks left"
            yield Fault(f"{text} (least: {log.spare_least} %)", name)


def media_errors(controllers: list[Controller]) -> Mapping[str, int]:
    return {f"{name} media-errors": log.media_errors for name, log in _logs(controllers)}
