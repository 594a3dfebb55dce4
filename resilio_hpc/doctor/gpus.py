"""NVIDIA GPUs: the driver, NVML, and what speaks against a GPU before ranks start on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from resilio_hpc.core.errors import CommandError
from resilio_hpc.core.process import run
from resilio_hpc.doctor.finding import DoctorFinding, DoctorState, DoctorView, failed, not_here, ok, warning

if TYPE_CHECKING:
    from resilio_hpc.prolog_epilog.base.check import Fault
    from resilio_hpc.prolog_epilog.base.node import NodeView
    from resilio_hpc.prolog_epilog.base.table import Table

_SMI_S = 8.0


def device_files(root: Path = Path("/")) -> int:
    """Return the number of NVIDIA's device files."""
    try:
        names = os.listdir(root / "dev")  # noqa: PTH208 - names alone
    except OSError:
        return 0
    return sum(1 for name in names if name.startswith("nvidia") and name[6:].isdecimal())


def driver_version(root: Path = Path("/")) -> str:
    """Return the version of NVIDIA's driver by its own file; "" without one."""
    try:
        words = (root / "proc/driver/nvidia/version").read_text(errors="replace").split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def gpus(view: DoctorView) -> DoctorFinding | list[DoctorFinding]:
    """Ask NVML, else nvidia-smi, and judge by the checks of node health."""
    from resilio_hpc.prolog_epilog.base import table
    from resilio_hpc.prolog_epilog.base.node import NodeView

    tables = table.load()
    return findings_of(NodeView(settings=tables.settings, mark=view.mark), tables)


def findings_of(node: NodeView, tables: Table) -> DoctorFinding | list[DoctorFinding]:
    """Return what is to be said of a node's GPUs."""
    from resilio_hpc.prolog_epilog.base.check import Absent, Doubt, Former, Thresholds, Unreadable
    from resilio_hpc.prolog_epilog.checks import gpu_readings, registry
    from resilio_hpc.prolog_epilog.run.health_run import only_idle

    files, driver = device_files(node.root), driver_version(node.root)
    try:
        reading = gpu_readings.fetch(node)
    except (Absent, Unreadable) as error:
        return _by_command(node, files, driver, str(error))
    seen = f"{len(reading.gpus)} NVIDIA GPUs, driver {driver or 'unknown'}"
    if reading.trouble:
        return failed(
            f"{seen}: {reading.trouble}",
            "Ranks that train on GPUs fail.",
            "look at nvidia-smi and dmesg; load the driver again, or boot the node",
        )
    found: list[DoctorFinding] = []
    for check in tables.checks.values():
        if check.source != "gpus" or not check.enabled or only_idle(check):
            continue
        try:
            faults, _ = registry.PROBES[check.id].remembers(reading, Thresholds(check.limits), Former(None, 0.0))
            found += [_against(check.id, one) for one in faults if not isinstance(one, Doubt)]
        except (Absent, Unreadable):  # this kind of GPU has nothing of it
            continue
    return found or ok(f"{seen}, nothing speaks against them")


def _against(check: str, fault: Fault) -> DoctorFinding:
    return DoctorFinding(
        DoctorState.WARNING,
        f"{fault.evidence} ({fault.device})" if fault.device and fault.device not in fault.evidence else fault.evidence,
        "Ranks on this GPU may fail, or be slow.",
        f"resilio health explain {check} says more; --evict-devices on keeps ranks away from bad GPUs",
        check,
    )


def _by_command(node: NodeView, files: int, driver: str, why: str) -> DoctorFinding:
    """Ask nvidia-smi, where NVML cannot be asked from here."""
    if not files and not driver:
        return not_here("no NVIDIA GPU")
    node.mark("nvidia-smi")
    try:
        found = run(["nvidia-smi", "--list-gpus"], _SMI_S).stdout.count("GPU ")
    except CommandError as error:
        return failed(
            f"{files} device files, driver {driver or 'not loaded'}, and it does not answer: {error}",
            "Ranks that train on GPUs fail.",
            "look at dmesg; load the driver again, or boot the node",
        )
    return warning(
        f"{found} NVIDIA GPUs, driver {driver or 'unknown'}; {why}",
        "A bad GPU is not seen before ranks start on it, and --evict-devices has no evidence.",
        "pip install 'resilio_hpc[gpu]'",
    )
