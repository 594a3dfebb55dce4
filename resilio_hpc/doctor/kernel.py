"""Settings of the kernel and limits of this user: io_uring, open files, processes, the clock."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from resilio_hpc.core.errors import UsageError
from resilio_hpc.doctor.finding import DoctorFinding, DoctorView, failed, not_here, notice, ok, warning
from resilio_hpc.launch.gpus.devices import local_world_size, read_devices
from resilio_hpc.launch.workers.forking import open_files

if TYPE_CHECKING:
    from resilio_hpc.prolog_epilog.checks.clock import ClockState

_MANY_FILES = 4096
_FEW_PROCESSES = 1024
_SOME_LOCKED_BYTES = 64 << 20
_NONE = resource.RLIM_INFINITY


def io_uring(view: DoctorView) -> DoctorFinding:
    """Open a ring, as the writer of checkpoints does."""
    from resilio_hpc.native import direct_io, why_portable

    if why_portable:
        return not_here("the C extensions would use it")
    if direct_io.is_concurrent():
        return ok("allowed")
    try:
        disabled = int(Path("/proc/sys/kernel/io_uring_disabled").read_text())
    except (OSError, ValueError):
        disabled = 0
    why = f"kernel.io_uring_disabled is {disabled}" if disabled else "the kernel or a seccomp filter refuses it"
    return notice(
        f"not allowed: {why}",
        "Blocks of checkpoints are written and read one after the other, which is slower.",
        "as root: sysctl kernel.io_uring_disabled=0; in a container: allow io_uring_setup in its seccomp profile",
    )


def open_file_limit(view: DoctorView) -> DoctorFinding:
    """Compare the limit on open files with the need of an agent, by the launcher's own check."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = local_world_size("auto", read_devices(view.environment))
    seen = f"{_number(soft)}, and up to {_number(hard)}"
    todo = "raise the hard limit: LimitNOFILE of slurmd's service, /etc/security/limits.conf (nofile), ulimit -Hn"
    try:
        open_files.check(ranks)
    except UsageError as error:
        return failed(f"{seen}: {error}", "resilio-launch refuses to start.", todo)
    if hard != _NONE and hard < _MANY_FILES:
        return warning(seen, "The controller of a large run needs one for each node, and more.", todo)
    return ok(seen)


def limits(view: DoctorView) -> DoctorFinding:
    """Read the other limits that end ranks, or keep them from starting."""
    here = [one for one in (_processes(), _file_size(), _address_space(), _cpu_time(), _locked()) if one]
    if not here:
        return ok("none is in the way (processes, file size, address space, CPU time, locked memory)")
    return warning(
        "; ".join(seen for seen, _ in here),
        " ".join(means for _, means in here),
        "raise them for jobs: slurmd's service (LimitNPROC …), limits.conf; Slurm hands on those of the shell that "
        "submits (PropagateResourceLimits)",
    )


def _processes() -> tuple[str, str] | None:
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() == 0 or soft == _NONE or soft >= _FEW_PROCESSES:
        return None
    return f"{soft} processes (ulimit -u)", "Threads count too: ranks fail to start."


def _file_size() -> tuple[str, str] | None:
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if soft == _NONE else (f"files up to {soft >> 20} MiB (ulimit -f)", "Larger checkpoints fail.")


def _address_space() -> tuple[str, str] | None:
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if soft == _NONE else (f"{soft >> 20} MiB of address space (ulimit -v)", "CUDA alone maps far more.")


def _cpu_time() -> tuple[str, str] | None:
    soft = resource.getrlimit(resource.RLIMIT_CPU)[0]
    return None if soft == _NONE else (f"{soft} s of CPU time (ulimit -t)", "The kernel ends each rank then.")


def _locked() -> tuple[str, str] | None:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft == _NONE or soft >= _SOME_LOCKED_BYTES or not _has_rdma():
        return None
    return f"{soft >> 10} KiB of locked memory (ulimit -l)", "NCCL, UCX and MPI cannot register memory for InfiniBand."


def _has_rdma() -> bool:
    try:
        return any(Path("/sys/class/infiniband").iterdir())
    except OSError:
        return False


def clock(view: DoctorView) -> DoctorFinding:
    """Ask the kernel whether the clock is disciplined (adjtimex), and slurmctld what time it is."""
    from resilio_hpc.prolog_epilog.base.node import NodeView
    from resilio_hpc.prolog_epilog.checks import clock as node_clock

    return clock_finding(node_clock.fetch(NodeView(mark=view.mark)), _ahead_of_slurm(view))


def clock_finding(found: ClockState, ahead: float) -> DoctorFinding:
    """Judge the clock. ``ahead``: seconds by which it is ahead of slurmctld's. Pure."""
    todo = "start chronyd or ntpd; in a container or a virtual machine: on its host"
    if ahead:
        return warning(
            f"this clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} slurmctld's",
            "Time limits are slurmctld's; munge refuses clocks that differ by 300 s.",
            todo,
        )
    if not found.synchronised:
        return notice(
            "not synchronised, as the kernel knows (adjtimex)",
            "Times in ledgers of several nodes cannot be compared; munge refuses clocks that differ by 300 s.",
            todo,
        )
    return ok(f"synchronised, right to {max(found.most_error_s, 1e-6):.2g} s")


def _ahead_of_slurm(view: DoctorView) -> float:
    if not view.has_slurm:
        return 0.0
    from resilio_hpc.slurm.client import commands

    view.mark("scontrol show config")
    return commands.clock_ahead_s()


def _number(limit: int) -> str:
    return "unlimited" if limit == _NONE else str(limit)
