"""Faults of disks, file systems, processors and memory in the kernel's log, by ``checks/kernel_lines.toml``."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError
from resilio_hpc.prolog_epilog.base.check import Fault, Former, OnFail, Thresholds
from resilio_hpc.prolog_epilog.base.probe import Probe
from resilio_hpc.prolog_epilog.checks.kernel_log import KernelLog, Line

TABLE = Path(__file__).with_name("kernel_lines.toml")
_LAST_BOOT = "BERT: Error records from previous boot"
_HARDWARE = "[Hardware Error]"
# a partition's or namespace's disk: sda1, nvme0n1p2, nvme0c1n1, mmcblk0p1
_DISK = re.compile(r"(nvme\d+|mmcblk\d+|(?:sd|vd|xvd|hd)[a-z]+)(?:[cnp]?\d+)*")


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    check: str
    pattern: str
    source: str
    unless: str = ""
    several: bool = False
    on_fail: OnFail | None = None


class _Devices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ignored: str
    remote: str


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    devices: _Devices
    line: list[_Row]


@dataclass(frozen=True)
class LineRule:
    """A row of the table, compiled; see there."""

    check: str
    pattern: re.Pattern[str]
    unless: re.Pattern[str] | None
    several: bool
    on_fail: OnFail | None

    def device_of(self, text: str) -> str | None:
        """Return the faulty device of a line, "" where it names none; None for another line."""
        found = self.pattern.search(text)
        if found is None or (self.unless is not None and self.unless.search(text)):
            return None
        return found.groupdict().get("device") or ""


@dataclass(frozen=True)
class LineTable:
    """``ignored`` and ``remote``: names of devices whose faults are not the node's."""

    rules: tuple[LineRule, ...]
    ignored: re.Pattern[str]
    remote: re.Pattern[str]


@functools.cache
def table(path: Path = TABLE) -> LineTable:
    """Read the table of lines. Raises UsageError where it is invalid."""
    try:
        read = msgspec.convert(tomllib.loads(path.read_text()), _Table)
        rules = tuple(
            LineRule(
                row.check, re.compile(row.pattern), re.compile(row.unless) if row.unless else None, row.several,
                row.on_fail,
            )
            for row in read.line
        )  # fmt: skip
        return LineTable(rules, re.compile(read.devices.ignored), re.compile(read.devices.remote))
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError, re.error) as error:
        raise UsageError(f"{path}: {error}") from error


def probe(check: str) -> Probe:
    """Return the check of this name: lines within its window and since it was cleared."""
    return Probe(functools.partial(_judged, check))


def _judged(check: str, log: KernelLog, limits: Thresholds, former: Former) -> tuple[Iterable[Fault], object]:
    return _faults(check, log, limits, list(_recent(log.lines, limits, former))), None


def _recent(lines: Iterable[Line], limits: Thresholds, former: Former) -> Iterator[Line]:
    oldest = max(former.now_s - limits.number("window_s"), former.cleared_s)
    return (line for line in lines if line.at_s > oldest)


@dataclass
class _Told:
    """The lines about one device."""

    texts: list[str]
    at_once: bool = False


def _faults(check: str, log: KernelLog, limits: Thresholds, lines: list[Line]) -> list[Fault]:
    known = table()
    rules = [rule for rule in known.rules if rule.check == check]
    told: dict[tuple[str, OnFail | None], _Told] = {}
    for line, old in zip(lines, _of_last_boot(lines), strict=True):
        found = next(((rule, name) for rule in rules if (name := rule.device_of(line.text)) is not None), None)
        if found is None:
            continue
        rule, name = found
        device = disk_of(name) if rule.check == "disk-errors" else name
        if known.ignored.match(name) or (rule.check == "disk-errors" and device in log.removable):
            continue
        on_fail: OnFail | None = "warn" if old or known.remote.match(name) else rule.on_fail
        of_device = told.setdefault((device, on_fail), _Told([]))
        of_device.texts.append(line.text)
        of_device.at_once |= not rule.several
    return [
        Fault(f"{len(of_device.texts)} times, last: {of_device.texts[-1]}", device, on_fail=on_fail)
        for (device, on_fail), of_device in told.items()
        if of_device.at_once or len(of_device.texts) > limits.number("most")
    ]


def disk_of(name: str) -> str:
    """Return the disk of a partition or namespace, as the driver names it: nvme0n1p2 → nvme0. Pure."""
    found = _DISK.fullmatch(name)
    return found[1] if found else name


def _of_last_boot(lines: Iterable[Line]) -> Iterator[bool]:
    """Yield, for each line, whether firmware reports it of the time before the last boot: it may be repaired since."""
    within = False
    for line in lines:
        within = _LAST_BOOT in line.text or (within and line.text.startswith(_HARDWARE))
        yield within
