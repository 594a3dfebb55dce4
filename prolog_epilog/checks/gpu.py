"""Judges GPUs by NVML's readings. Faults of one GPU carry its UUID and index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

from resilio_hpc.core.gpu_throttling import BY_HARDWARE
from resilio_hpc.prolog_epilog.base.check import (
    Absent,
    DeviceHistory,
    Doubt,
    Fault,
    OnFail,
    Thresholds,
    Unreadable,
    Value,
)
from resilio_hpc.prolog_epilog.checks.gpu_readings import Gpu, Gpus

Judge = Callable[..., Iterable[Fault]]
_GPUS = "GPUs"


def _of(gpu: Gpu, text: str, on_fail: OnFail | None = None) -> Fault:
    return Fault(f"GPU {gpu.slurm_index} ({gpu.name}): {text}", gpu.name, gpu.slurm_index, on_fail)


def _reads(*fields: str) -> Callable[[Judge], Judge]:
    """Make a judge of these fields also report where they could not be read."""

    def with_doubts(judge: Judge) -> Judge:
        @wraps(judge)
        def told(reading: Gpus, *rest: Any) -> Iterable[Fault]:
            yield from judge(reading, *rest)
            for gpu in reading.gpus:
                for text in dict.fromkeys(gpu.unread[field] for field in fields if field in gpu.unread):
                    yield Doubt(text, gpu.name, gpu.slurm_index)

        return told

    return with_doubts


def _unread(reading: Gpus, field: str) -> Mapping[str, Unreadable]:
    return {f"{gpu.name} {field}": Unreadable(gpu.unread[field]) for gpu in reading.gpus if field in gpu.unread}


def _present(reading: Gpus) -> list[Gpu]:
    """Return the GPUs that answer. Raises Absent where none does: that concerns gpu-driver and gpu-count."""
    present = [gpu for gpu in reading.gpus if not gpu.lost]
    if not present:
        raise Absent("no GPU answers")
    return present


def driver(reading: Gpus, limits: Thresholds) -> Iterable[Fault]:
    """Yield a fault where the driver does not answer."""
    if reading.trouble:
        yield Fault(f"{reading.expected} GPUs are expected, and NVML says: {reading.trouble}")


def count(reading: Gpus, limits: Thresholds, past: DeviceHistory) -> Iterable[Fault]:
    """Yield a fault unless as many answer as expected, and as the baseline has."""
    if reading.trouble:
        raise Absent("the driver does not answer")
    expected = max(reading.expected, int(past.normal.get(_GPUS, 0)))
    if len(reading.gpus) < expected:
        yield Fault(f"{len(reading.gpus)} of {expected} GPUs")


def number(reading: Gpus) -> Mapping[str, Value]:
    """Return how many GPUs answer."""
    return {} if reading.trouble else {_GPUS: len(reading.gpus)}


def lost(reading: Gpus, limits: Thresholds) -> Iterable[Fault]:
    """Yield GPUs that fell off the bus, or need a reset."""
    return [_of(gpu, gpu.lost) for gpu in reading.gpus if gpu.lost]


@_reads("ecc_uncorrected")
def ecc(reading: Gpus, limits: Thresholds) -> Iterable[Fault]:
    for gpu in _present(reading):
        if (gpu.ecc_uncorrected or 0) > limits.number("most"):
            yield _of(gpu, f"{gpu.ecc_uncorrected} uncorrected ECC errors since the driver was loaded")


@_reads("sram_uncorrected", "sram_corrected")
def sram_ecc(reading: Gpus, limits: Thresholds) -> Iterable[Fault]:
    for gpu in _present(reading):
        if (gpu.sram_uncorrected or 0) > limits.number("most_uncorrected"):
            yield _of(gpu, f"{gpu.sram_uncorrected} uncorrected SRAM errors in its life")
        elif (gpu.sram_corrected or 0) > limits.number("most_corrected"):
            yield _of(gpu, f"{gpu.sram_corrected} corrected SRAM errors in its life")


@_reads("remap_pending", "remap_failed")
def row_remap(reading: Gpus, limits: Thresholds) -> Iterable[Fault]:
    for gpu in _present(reading):
        if gpu.remap_failed:
            yield _of(gpu, "a memory row could not be remapped: replace it")
        elif gpu.remap_pending:
            yield _of(gpu, "a memory row waits for its remapping: reset it")


@_reads("retired_pending")
def retired_pages(reading: Gpus, limits: Thresholds) -> Iterable[Fault]:
    return [_of(gpu, "memory pages wait for their retirement: reset it") for gpu in _present(reading)
            if gpu.retired_pending]  # fmt: skip


@_reads("nvlinks")
def nvlink_down(reading: Gpus, limits: Thresholds, past: DeviceHistory) -> Iterable[Fault]:
    """Yield GPUs with fewer active links than the site's limit, or than before.

    Where only others of this node have more, it is a warning: bridges may join some of the GPUs. A node without NVLink
    has none active.
    """
    active = active_links(reading)
    most, wanted = max(active.values(), default=0), int(limits.number("active"))
    unread = any("nvlinks" in gpu.unread for gpu in reading.gpus)
    if most == 0 and wanted == 0 and not unread and not any(past.of(name) for name in active):
        raise Absent("no NVLink is active")
    for gpu in (one for one in _present(reading) if one.name in active):
        now, expected = active[gpu.name], wanted or past.expected(gpu.name, most)
        if now < expected:
            down = ", ".join(link for link, state in gpu.nvlinks.items() if not state)
            text = f"{now} of {expected} NVLinks active" + (f" (down: {down})" if down else "")
            yield _of(gpu, text, None if wanted else past.action(gpu.name, now))


def active_links(reading: Gpus) -> Mapping[str, Value]:
    """Return how many NVLinks of each GPU are active."""
    return {gpu.name: sum(gpu.nvlinks.values()) for gpu in _present(reading) if "nvlinks" not in gpu.unread}


def nvlink_errors(reading: Gpus) -> Mapping[str, int | Unreadable]:
    found: dict[str, int | Unreadable] = {f"{gpu.name} link-{name.replace(' ', '-')}": errors
             for gpu in _present(reading) for name, errors in gpu.nvlink_errors.items()}  # fmt: skip
    found |= _unread(reading, "nvlink_errors")
    if not found:
        raise Absent("no GPU counts NVLink errors")
    return found


@_reads("pcie_width", "pcie_most_width")
def pcie_width(reading: Gpus, limits: Thresholds) -> Iterable[Fault]:
    """Yield GPUs with fewer lanes than GPU and slot allow. The generation does not count, since idle GPUs lower it."""
    for gpu in _present(reading):
        expected = limits.number("width") or gpu.pcie_most_width
        if gpu.pcie_width is not None and expected and gpu.pcie_width < expected:
            yield _of(gpu, f"PCIe x{gpu.pcie_width} of x{expected:.0f}")


def pcie_replays(reading: Gpus) -> Mapping[str, int | Unreadable]:
    counts = {f"{gpu.name} replays": gpu.pcie_replays for gpu in _present(reading) if gpu.pcie_replays is not None}
    return {**counts, **_unread(reading, "pcie_replays")}


@_reads("throttle")
def throttle(reading: Gpus, limits: Thresholds) -> Iterable[Fault]:
    for gpu in _present(reading):
        reasons = [text for bit, text in BY_HARDWARE.items() if (gpu.throttle or 0) & bit]
        if reasons:
            yield _of(gpu, f"clocks are held down: {', '.join(reasons)}")


@_reads("temperature_c", "slowdown_c")
def temperature(reading: Gpus, limits: Thresholds) -> Iterable[Fault]:
    """Yield GPUs near the temperature at which they slow down by themselves, or above the site's own limit."""
    for gpu in _present(reading):
        own = limits.number("most_c")
        most = own or (gpu.slowdown_c - limits.number("margin_c") if gpu.slowdown_c is not None else None)
        if gpu.temperature_c is not None and most is not None and gpu.temperature_c >= most:
            yield _of(gpu, f"{gpu.temperature_c} °C")


@_reads("memory_used", "mig")
def residual_memory(reading: Gpus, limits: Thresholds) -> Iterable[Fault]:
    """Yield GPUs with memory in use while no job is here. Under MIG the instances use it, so it tells nothing."""
    for gpu in _present(reading):
        if gpu.memory_used is not None and not gpu.mig and gpu.memory_used > limits.number("most_mib") * 2**20:
            yield _of(gpu, f"{gpu.memory_used / 2**20:.0f} MiB in use, and no job is here")


@_reads("processes")
def processes(reading: Gpus, limits: Thresholds) -> Iterable[Fault]:
    for gpu in _present(reading):
        if gpu.processes:
            pids = ", ".join(map(str, gpu.processes[:5]))
            yield _of(gpu, f"{len(gpu.processes)} processes ({pids}), and no job is here")


@_reads("memory_used", "memory_total")
def headroom(reading: Gpus, limits: Thresholds) -> Iterable[Fault]:
    for gpu in _present(reading):
        if gpu.memory_used is not None and gpu.memory_total:
            free = 100 * (gpu.memory_total - gpu.memory_used) / gpu.memory_total
            if free < limits.number("least_percent"):
                yield _of(gpu, f"{free:.1f} % of its memory is left")


@_reads("mig", "mig_pending")
def mig(reading: Gpus, limits: Thresholds) -> Iterable[Fault]:
    """Yield GPUs in another mode than the site's, or with one that waits for a reset."""
    wanted = {"on": 1, "off": 0}.get(limits.text("mode"))
    for gpu in _present(reading):
        if gpu.mig is None:
            continue
        if gpu.mig_pending is not None and gpu.mig_pending != gpu.mig:
            yield _of(gpu, "its MIG mode changes with the next reset")
        elif wanted is not None and gpu.mig != wanted:
            yield _of(gpu, f"MIG is {'on' if gpu.mig else 'off'}")


@_reads("persistence")
def persistence(reading: Gpus, limits: Thresholds) -> Iterable[Fault]:
    for gpu in _present(reading):
        if gpu.persistence == 0:
            yield _of(gpu, "persistence mode is off: counters are lost, and starts are slow")


def index_of(reading: Gpus, name: str) -> int:
    """Return Slurm's index of the GPU with this name; -1 without one."""
    return next((gpu.slurm_index for gpu in reading.gpus if gpu.name == name), -1)
