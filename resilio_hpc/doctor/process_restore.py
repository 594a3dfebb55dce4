"""Whether processes could be dumped and restored here: CRIU, and NVIDIA's cuda-checkpoint. No run uses them yet."""

from __future__ import annotations

import re
import shutil

from resilio_hpc.core.errors import CommandError
from resilio_hpc.core.process import run
from resilio_hpc.doctor.finding import DoctorFinding, DoctorView, not_here, notice, ok
from resilio_hpc.doctor.gpus import device_files

_LIMIT_S = 5.0
_WITH_CUDA = 4
"""The first version of CRIU with a plug-in for CUDA."""


def process_restore(view: DoctorView) -> DoctorFinding:
    """Ask CRIU for its version, and whether the kernel and this user's rights suffice."""
    criu = shutil.which("criu", path=view.environment.get("PATH"))
    if criu is None:
        return not_here("no criu")
    view.mark("criu")
    try:
        version = run([criu, "--version"], _LIMIT_S).stdout
    except CommandError as error:
        return _refused("of an unknown version", str(error))
    try:
        run([criu, "check"], _LIMIT_S)
    except CommandError as error:
        return _refused(_number(version), _reason(error))
    return ok(f"CRIU {_number(version)} passes its own check{_of_gpus(version, view)}; no run uses it yet")


def _number(version: str) -> str:
    found = re.search(r"\d+(\.\d+)*", version)
    return found.group() if found else "of an unknown version"


def _reason(error: CommandError) -> str:
    """Return the first of CRIU's own errors: what follows comes of it."""
    if error.returncode is None:
        return f"no answer within {_LIMIT_S:g} s"
    lines = [line for line in (error.stdout + error.stderr).splitlines() if "Error" in line and "exited" not in line]
    return re.sub(r"^Error \([^)]*\): ", "", lines[0]) if lines else str(error)


def _of_gpus(version: str, view: DoctorView) -> str:
    if not device_files():
        return ""
    major = _number(version).partition(".")[0]
    is_new = major.isdecimal() and int(major) >= _WITH_CUDA
    tool = shutil.which("cuda-checkpoint", path=view.environment.get("PATH"))
    return f", {'with' if is_new and tool else 'without'} CUDA (it takes CRIU {_WITH_CUDA} and cuda-checkpoint)"


def _refused(version: str, why: str) -> DoctorFinding:
    return notice(
        f"CRIU {version}, and its check fails: {why}",
        "Processes cannot be dumped and restored here. Runs need it not: they restore states, and logs of devices.",
        "nothing; for other uses a newer CRIU, and CAP_CHECKPOINT_RESTORE",
    )
