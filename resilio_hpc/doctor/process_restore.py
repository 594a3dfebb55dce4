"""Whether processes can be dumped and restored here: CRIU, and NVIDIA's cuda-checkpoint (``--process-images``)."""

from __future__ import annotations

import shutil

from resilio_hpc.core import criu
from resilio_hpc.core.errors import CommandError
from resilio_hpc.doctor.finding import DoctorFinding, DoctorView, not_here, notice, ok
from resilio_hpc.doctor.gpus import device_files

_WITH_CUDA = 4
"""The first version of CRIU with a plug-in for CUDA."""
_UNKNOWN = "of an unknown version"


def process_restore(view: DoctorView) -> DoctorFinding:
    """Ask CRIU for its version, and whether the kernel and this user's rights suffice."""
    program = criu.find(view.environment)
    if not program:
        return not_here("no criu")
    view.mark("criu")
    try:
        version = criu.version(program) or _UNKNOWN
    except CommandError as error:
        return _refused(_UNKNOWN, str(error))
    if why := criu.why_not(program):
        return _refused(version, why)
    return ok(f"CRIU {version} passes its own check{_of_gpus(version, view)}, for --process-images on")


def _of_gpus(version: str, view: DoctorView) -> str:
    if not device_files():
        return ""
    major = version.partition(".")[0]
    is_new = major.isdecimal() and int(major) >= _WITH_CUDA
    tool = shutil.which("cuda-checkpoint", path=view.environment.get("PATH"))
    return f", {'with' if is_new and tool else 'without'} CUDA (it takes CRIU {_WITH_CUDA} and cuda-checkpoint)"


def _refused(version: str, why: str) -> DoctorFinding:
    return notice(
        f"CRIU {version}, and its check fails: {why}",
        "Processes cannot be dumped and restored here: spare ranks wait in memory, and --process-images is refused.",
        "nothing, or a newer CRIU, and CAP_CHECKPOINT_RESTORE for it",
    )
