"""Space of the file systems that a run uses, and the traffic of their disks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from resilio_hpc.metrics.sheet import Sheet


class StorageSource:
    """Reads them. ``places``: the file systems' labels, and a directory of each."""

    def __init__(self, places: Mapping[str, Path], sysfs: Path = Path("/sys")) -> None:
        self._places = dict(places)
        self._sysfs = sysfs
        self._disks: dict[str, str] = {}  # label → the kernel's name of its disk

    def space(self, label: str) -> Sheet:
        """Return the space of one place, whose file system may hang."""
        sheet, path = Sheet(), self._places[label]
        try:
            found = os.statvfs(path)
            device = path.stat().st_dev
        except OSError:
            return sheet
        sheet.put("storage_size_bytes", found.f_blocks * found.f_frsize, label)
        sheet.put("storage_free_bytes", found.f_bavail * found.f_frsize, label)
        if found.f_files:  # some file systems count none
            sheet.put("storage_free_inodes", found.f_favail, label)
        self._disks[label] = self._disk(device)
        return sheet

    def traffic(self) -> Sheet:
        """Return the traffic of the disks behind the places, as far as they are disks of this node."""
        sheet = Sheet()
        wanted = {name for name in self._disks.values() if name}
        counters = psutil.disk_io_counters(perdisk=True) if wanted else {}
        for name in sorted(wanted & counters.keys()):
            disk = counters[name]
            sheet.put("disk_read_bytes_total", disk.read_bytes, name)
            sheet.put("disk_written_bytes_total", disk.write_bytes, name)
            sheet.put("disk_reads_total", disk.read_count, name)
            sheet.put("disk_writes_total", disk.write_count, name)
            sheet.put("disk_read_seconds_total", disk.read_time / 1000, name)
            sheet.put("disk_write_seconds_total", disk.write_time / 1000, name)
            sheet.put("disk_busy_seconds_total", disk.busy_time / 1000, name)
        return sheet

    def reads(self) -> dict[str, Callable[[], Sheet]]:
        """Return what to read, each by itself: one that hangs leaves the others."""
        spaces = {f"storage {label}": (lambda label=label: self.space(label)) for label in self._places}
        return {**spaces, "disks": self.traffic}

    def _disk(self, device: int) -> str:
        """Return the kernel's name of a device; "" where it is no disk of this node, as with NFS, Lustre and tmpfs."""
        link = self._sysfs / f"dev/block/{os.major(device)}:{os.minor(device)}"
        try:
            return link.readlink().name if os.major(device) else ""
        except OSError:
            return ""
