"""Main memory and processors: space, huge pages, ECC errors (EDAC), processors that are off or too hot."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from resilio_hpc.prolog_epilog.base.check import Absent, DeviceHistory, Doubt, Fault, Thresholds, Unreadable, Value
from resilio_hpc.prolog_epilog.base.node import NodeView

_EDAC = "/sys/devices/system/edac/mc"
_CPU = "/sys/devices/system/cpu"
_TOTAL, _ONLINE = "GiB", "online"
_KERNELS_SHARE = 0.02  # of memory, by which kernels differ; a module of 2 TiB is 3 %
_FIELD = re.compile(r"^([\w()]+):\s+(\d{1,18})(?: kB)?\s*$", re.MULTILINE)


def fetch(node: NodeView) -> Mapping[str, int]:
    """Return /proc/meminfo in kB; huge pages as numbers."""
    return parse_meminfo(node.files.text("/proc/meminfo"))


def parse_meminfo(text: str) -> Mapping[str, int]:
    """Parse /proc/meminfo. Raises Unreadable without a plausible total. Pure."""
    fields = {name: int(value) for name, value in _FIELD.findall(text)}
    if fields.get("MemTotal", 0) <= 0 or "MemAvailable" not in fields:
        raise Unreadable(f"/proc/meminfo: {text[:60]!r}")
    return fields


def size(fields: Mapping[str, int], limits: Thresholds, past: DeviceHistory) -> Iterable[Fault]:
    """Yield a fault for less memory than the site's limit or the baseline: a module was lost.

    Kernels use some themselves.
    """
    expected, mib = limits.number("mib"), fields["MemTotal"] / 1024
    least = expected or past.normal.get(_TOTAL, 0) * 1024 * (1 - _KERNELS_SHARE)
    if least == 0:
        raise Absent("the site names no size (limits.mib), and there is no baseline")
    if mib < least:
        yield Fault(f"{mib:.0f} of {expected or past.normal[_TOTAL] * 1024:.0f} MiB")


def total(fields: Mapping[str, int]) -> Mapping[str, Value]:
    """Return main memory in whole GiB, in which nodes of one kind are the same."""
    return {_TOTAL: fields["MemTotal"] >> 20}


def pressure(fields: Mapping[str, int], limits: Thresholds) -> Iterable[Fault]:
    """Yield a fault where nearly all of it is in use; on a busy node a warning, since the job may need it."""
    used = 100 - 100 * fields["MemAvailable"] / fields["MemTotal"]
    if used >= limits.number("critical_percent"):
        yield Fault(f"critical: {used:.0f} % in use, {fields['MemAvailable'] / 1024:.0f} MiB available")
    elif used >= limits.number("warn_percent"):
        yield Fault(f"{used:.0f} % in use, {fields['MemAvailable'] / 1024:.0f} MiB available")


def free(fields: Mapping[str, int], limits: Thresholds) -> Iterable[Fault]:
    """Yield a fault where little of it is available while no job is here."""
    percent = 100 * fields["MemAvailable"] / fields["MemTotal"]
    if percent < limits.number("least_percent"):
        yield Fault(f"{percent:.0f} % available, and no job is here")


def huge_pages(fields: Mapping[str, int], limits: Thresholds) -> Iterable[Fault]:
    """Yield a fault unless there are as many as the site reserves, and none in use while no job is here."""
    total, unused = fields.get("HugePages_Total"), fields.get("HugePages_Free")
    if total is None or unused is None or (total == 0 and limits.number("total") == 0):
        raise Absent("no huge pages are reserved")
    if total < limits.number("total"):
        yield Fault(f"{total} of {limits.number('total'):.0f} huge pages")
    if total - unused > limits.number("most_used"):
        yield Fault(f"{total - unused} huge pages in use, and no job is here")


@dataclass(frozen=True)
class MemoryErrors:
    """Errors since the driver was loaded, by memory controller (mc0)."""

    corrected: Mapping[str, int | Unreadable]
    uncorrected: Mapping[str, int | Unreadable]


def fetch_errors(node: NodeView) -> MemoryErrors:
    """Read the error counts. Raises Absent without an EDAC driver, as in virtual machines."""
    files = node.files
    controllers = files.names(_EDAC, r"mc\d+")
    if not controllers:
        raise Absent("no EDAC driver counts memory errors")

    def counts(kind: str) -> dict[str, int | Unreadable]:
        return {name: files.number_or_why(f"{_EDAC}/{name}/{kind}") for name in controllers}

    return MemoryErrors(counts("ce_count"), counts("ue_count"))


def uncorrected(errors: MemoryErrors, limits: Thresholds) -> Iterable[Fault]:
    for name, count in errors.uncorrected.items():
        if isinstance(count, Unreadable):
            yield Doubt(str(count), name)
        elif count > limits.number("most"):
            yield Fault(f"{name}: {count} uncorrected memory errors since the node was started", name)


def corrected(errors: MemoryErrors) -> Mapping[str, int | Unreadable]:
    return {f"{name} corrected": count for name, count in errors.corrected.items()}


@dataclass(frozen=True)
class Processors:
    """``present`` and ``online`` as sets of numbers; ``throttles``: how often heat slowed each down.

    ``one_thread``: the site switched hyperthreads off (nosmt, /sys/devices/system/cpu/smt/control).
    """

    present: frozenset[int]
    online: frozenset[int]
    throttles: Mapping[str, int | Unreadable]
    one_thread: bool = False


def fetch_processors(node: NodeView) -> Processors:
    files = node.files
    throttles = {}
    for name in files.names(_CPU, r"cpu\d+"):
        path = f"{_CPU}/{name}/thermal_throttle/package_throttle_count"
        if files.exists(path):
            throttles[f"{name} throttles"] = files.number_or_why(path)
    return Processors(
        parse_cpu_list(files.text(f"{_CPU}/present")),
        parse_cpu_list(files.text(f"{_CPU}/online")),
        throttles,
        (files.optional(f"{_CPU}/smt/control") or "").strip() in ("off", "forceoff"),
    )


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse ``0-3,8``. Raises Unreadable. Pure."""
    found: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if not match:
            raise Unreadable(f"{_CPU}: no list of processors: {text[:60]!r}")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def online(found: Processors, limits: Thresholds, past: DeviceHistory) -> Iterable[Fault]:
    """Yield processors that are off: a fault where they were on before, else a warning.

    Where hyperthreads are switched off, half of them may be.
    """
    normal = past.normal.get(_ONLINE, len(found.present))
    expected = min(normal, -(-len(found.present) // 2)) if found.one_thread else normal
    missing = int(expected) - len(found.online)
    if missing > limits.number("off"):
        off = ", ".join(map(str, sorted(found.present - found.online)[:8]))
        text = f"{missing} of {expected:g} processors are off{f' ({off})' if off else ''}"
        yield Fault(text, on_fail=past.action(_ONLINE, len(found.online)))


def online_count(found: Processors) -> Mapping[str, Value]:
    """Return how many processors are on."""
    return {_ONLINE: len(found.online)}


def throttles(found: Processors) -> Mapping[str, int | Unreadable]:
    if not found.throttles:
        raise Absent("no processor counts its throttling")
    return found.throttles
