"""NVIDIA GPUs: the driver, NVML, and what speaks against a GPU before ranks start on it."""

from __future__ import annotations

import os
from pathlib import Path

from resilio_hpc.core.errors import CommandError
from resilio_hpc.core.process import run
from resilio_hpc.doctor.finding import DoctorFinding, DoctorView, failed, not_here, ok, warning

_SMI_S = 8.0


def device_files(root: Path = Path("/")) -> int:
    """Return the number of NVIDIA's device files."""
    names = os.listdir(root / "dev")  # noqa: PTH208 - names alone
    return sum(1 for name in names if name.startswith("nvidia") and name[6:].isdecimal())


def driver_version(root: Path = Path("/")) -> str:
    """Return the version of NVIDIA's driver by its own file; "" without one."""
    try:
        words = (root / "proc/driver/nvidia/version").read_text(errors="replace").split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def gpus(view: DoctorView) -> DoctorFinding | list[DoctorFinding]:
    """Ask NVML (else nvidia-smi), and judge by the checks that run before ranks start."""
    from resilio_hpc.launch.gpus import device_evidence
    from resilio_hpc.prolog_epilog.base import table
    from resilio_hpc.prolog_epilog.base.check import Absent, Unreadable
    from resilio_hpc.prolog_epilog.base.node import NodeView

    files, driver = device_files(), driver_version()
    tables = table.load()
    try:
        said = device_evidence.from_nvml(
            NodeView(settings=tables.settings, mark=view.mark), device_evidence.device_checks(tables), ()
        )
    except Absent:
        return not_here("no NVIDIA GPU")
    except Unreadable as error:
        return _by_command(view, files, driver, str(error))
    seen = f"{len(said.identities)} NVIDIA GPUs, driver {driver or 'unknown'}"
    if said.note:
        return failed(
            f"{seen}: {said.note}",
            "Ranks that train on GPUs fail.",
            "look at nvidia-smi and dmesg; load the driver again, or boot the node",
        )
    if said.evidence:
        return [
            DoctorFinding(
                warning("", "", "").state,
                f"{one.text} ({one.device})" if one.device else one.text,
                "Ranks on this GPU fail, or are slow.",
                f"resilio health explain {one.check}; --evict-devices on keeps ranks away from it",
                one.check,
            )
            for one in said.evidence
        ]
    return ok(f"{seen}, nothing speaks against them")


def _by_command(view: DoctorView, files: int, driver: str, why: str) -> DoctorFinding:
    """Ask nvidia-smi, where NVML cannot be asked from here."""
    if not files and not driver:
        return not_here("no NVIDIA GPU")
    view.mark("nvidia-smi")
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
