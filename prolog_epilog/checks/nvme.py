"""NVMe controllers: their state in /sys, and their own health log (NVM Express Base Specification)."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from resilio_hpc.prolog_epilog.base.check import Absent, Doubt, Fault, Former, OnFail, Thresholds, Unreadable, Value
from resilio_hpc.prolog_epilog.base.node import NodeView

CLASS = "/sys/class/nvme"
LOG_BYTES = 512
_DISKS = "disks"
_NOT_LIVE = ("new", "resetting", "connecting", "reconnecting", "deleting", "deleting (no IO)", "dead")
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
    """SMART / Health Information (log page 02h). ``spare`` and ``spare_least`` in percent; ``used`` may exceed 100."""

    warnings: int
    temperature_c: int
    spare: int
    spare_least: int
    used: int
    media_errors: int


@dataclass(frozen=True)
class NvmeController:
    """A controller. ``log``: None where it may not be read.

    ``remote``: a disk of a server, by TCP, RDMA or Fibre Channel.
    """

    name: str
    state: str
    log: HealthLog | Unreadable | None
    remote: bool = False

    @property
    def on_fail(self) -> OnFail | None:
        """Return the action for it: a server's disk is no part of the node, since it fails for all nodes at once."""
        return "warn" if self.remote else None


def fetch(node: NodeView) -> list[NvmeController]:
    """Read the controllers. Raises Absent without an NVMe controller, Unreadable."""
    files = node.files
    found = []
    for name in files.names(CLASS, r"nvme\d+"):
        try:
            state = (files.optional(f"{CLASS}/{name}/state") or "").strip()
        except Unreadable as error:
            found.append(NvmeController(name, str(error), None))
            continue
        remote = (files.optional(f"{CLASS}/{name}/transport") or "pcie").strip() not in ("pcie", "apple-nvme")
        found.append(NvmeController(name, state, _log(node, name) if state in ("live", "") else None, remote))
    if not found:
        raise Absent("no NVMe disk")
    return found


def parse_log(data: bytes) -> HealthLog:
    """Return the page's fields, little-endian. Raises Unreadable. Pure."""
    if len(data) != LOG_BYTES or len(set(data)) == 1:
        raise Unreadable(f"a health log of {len(data)} bytes, all of them {data[0]}" if data else "an empty health log")
    (kelvin,) = struct.unpack_from("<H", data, 1)
    media = int.from_bytes(data[160:176], "little")
    return HealthLog(data[0], kelvin - 273, data[3], data[4], data[5], min(media, 2**62))


def _log(node: NodeView, name: str) -> HealthLog | Unreadable | None:
    """Return the log, or why it cannot be read, so that the other disks are read all the same."""
    try:
        return _asked(node, name)
    except Unreadable as error:
        return error


def _asked(node: NodeView, name: str) -> HealthLog | None:
    """Return the log, by ioctl(2); in a captured tree from a file. None where it may not be read."""
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


def _logs(controllers: list[NvmeController]) -> list[tuple[NvmeController, HealthLog]]:
    """Return the controllers with a log. Raises Absent where no log may be read."""
    if all(one.log is None for one in controllers):
        raise Absent("no NVMe disk may be asked for its health log")
    return [(one, one.log) for one in controllers if isinstance(one.log, HealthLog)]


def _doubts(controllers: list[NvmeController]) -> Iterable[Doubt]:
    return [Doubt(f"{one.name}: {one.log}", one.name) for one in controllers if isinstance(one.log, Unreadable)]


def state(controllers: list[NvmeController], limits: Thresholds, former: Former) -> tuple[Iterable[Fault], object]:
    """Return faults of controllers that are dead, or not live for a while; a reset, of some seconds, is a warning.

    Also of fewer disks than the baseline has.
    """
    kept = former.kept if isinstance(former.kept, dict) else {}
    waited = {
        name: former.now_s - at for name, at in kept.items() if isinstance(at, int | float) and at <= former.now_s
    }
    since: dict[str, float] = {}
    faults: list[Fault] = []
    for one in controllers:
        if one.state in ("live", ""):
            continue
        if one.state not in _NOT_LIVE:
            faults.append(Doubt(f"{one.name}: not the state of a controller: {one.state[:40]!r}", one.name))
            continue
        seconds = waited.get(one.name, 0.0)
        since[one.name] = former.now_s - seconds
        lasting = one.state == "dead" or (one.name in waited and seconds >= limits.number("longest_s"))
        text = f"{one.name} is {one.state}" + (f", for {seconds:.0f} s" if seconds else "")
        faults.append(Fault(text, one.name, on_fail=one.on_fail if lasting else "warn"))
    there, normal = local_disks(controllers)[_DISKS], (former.normal or {}).get(_DISKS, 0)
    if there < normal:
        faults.append(Fault(f"{there} of {normal} NVMe disks"))
    return faults, since


def local_disks(controllers: list[NvmeController]) -> Mapping[str, Value]:
    """Return how many disks the node has of its own."""
    return {_DISKS: sum(not one.remote for one in controllers)}


def warnings(controllers: list[NvmeController], limits: Thresholds) -> Iterable[Fault]:
    """Yield each bit of the critical warning."""
    yield from _doubts(controllers)
    for one, log in _logs(controllers):
        if log.warnings:
            said = [text for bit, text in enumerate(_WARNINGS) if log.warnings >> bit & 1] or [f"{log.warnings:#x}"]
            yield Fault(f"{one.name}: {', '.join(said)}", one.name, on_fail=one.on_fail)


def wear(controllers: list[NvmeController], limits: Thresholds) -> Iterable[Fault]:
    """Yield disks at the end of their life. A threshold of 0: the disk counts no spare blocks, as virtual ones."""
    yield from _doubts(controllers)
    for one, log in _logs(controllers):
        spent = log.spare_least > 0 and log.spare <= log.spare_least
        if log.used >= limits.number("used_percent") or spent:
            text = f"{one.name}: {log.used} % of its life used, {log.spare} % spare blocks left"
            yield Fault(f"{text} (least: {log.spare_least} %)", one.name)


def media_errors(controllers: list[NvmeController]) -> Mapping[str, int | Unreadable]:
    counts: dict[str, int | Unreadable] = {
        f"{one.name} media-errors": log.media_errors for one, log in _logs(controllers)
    }
    return counts | {f"{one.device} log": Unreadable(one.evidence) for one in _doubts(controllers)}
