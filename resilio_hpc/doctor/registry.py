"""All checks, a line each, in the order of the report."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from resilio_hpc.core.errors import UsageError
from resilio_hpc.doctor import (
    directories,
    gpus,
    installation,
    kernel,
    network,
    process_restore,
    recovery,
    shared_memory,
    slurm_site,
    transports,
)
from resilio_hpc.doctor.finding import DoctorCheck

RECOVERY = "loopback-recovery"

CHECKS: tuple[DoctorCheck, ...] = (
    DoctorCheck(
        "python", "installation", installation.interpreter, "Python, kernel, processor",
        "64-bit Python 3.10 or newer", needed=True,
        helps="a newer Python for the virtual environment",
    ),
    DoctorCheck(
        "extensions", "installation", installation.extensions, "the C extensions: imported, and one computes",
        "copies, checksums and large files are theirs", needed=True, budget_s=30,
        helps="install the package again, where a C compiler and Python's headers are",
    ),
    DoctorCheck(
        "packages", "installation", installation.packages,
        "msgspec, pyzmq, cryptography, numpy, h5py, rich, psutil, submitit, prometheus_client",
        "launches and checkpoints fail without the first five", needed=True, budget_s=60,
        helps="`pip install` of what it names",
    ),
    DoctorCheck(
        "torch", "installation", installation.torch, "torch, its CUDA and NCCL; where there are GPUs, whether it "
        "reaches them", "missing is a notice: `--no-torch` runs programs without", needed=True, budget_s=120,
        helps="the build of torch for your CUDA, or a newer driver",
    ),
    DoctorCheck(
        "gpus", "GPUs", gpus.gpus, "NVIDIA's driver, NVML, and the GPU checks of node health",
        "a rank on a bad GPU fails, or is slow", budget_s=30,
        helps="`resilio health explain`; `--evict-devices on`; for NVML `pip install 'resilio_hpc[gpu]'`",
    ),
    DoctorCheck(
        "shared-memory", "memory", shared_memory.shared_memory, "`/dev/shm`: in memory, writable, and its size",
        "snapshots are kept there, two for each rank", needed=True,
        helps="`mount -o remount,size=50% /dev/shm`; in a container `--shm-size`",
    ),
    DoctorCheck(
        "huge-pages", "memory", shared_memory.huge_pages, "huge pages for shared memory, allocated as snapshots are",
        "the first snapshots are faster", after=("extensions", "shared-memory"),
        helps="Linux 6.1, or `advise` in `/sys/kernel/mm/transparent_hugepage/shmem_enabled`",
    ),
    DoctorCheck(
        "cgroup", "memory", shared_memory.cgroup, "the cgroup's version and the memory that it leaves",
        "what is in `/dev/shm` counts against its limit",
        helps="more memory for the job: `--mem`",
    ),
    DoctorCheck(
        "io-uring", "kernel and limits", kernel.io_uring, "io_uring, opened as the writer of checkpoints does",
        "without it blocks are written one after the other", after=("extensions",),
        helps="`sysctl kernel.io_uring_disabled=0`; in a container its seccomp profile",
    ),
    DoctorCheck(
        "open-files", "kernel and limits", kernel.open_file_limit, "the limit on open files, by the launcher's own "
        "check", "too low a hard limit refuses a launch", needed=True,
        helps="`LimitNOFILE` of slurmd's service, limits.conf, `ulimit -Hn`",
    ),
    DoctorCheck(
        "limits", "kernel and limits", kernel.limits, "limits on processes, file size, address space, CPU time, "
        "locked memory", "ranks end, or fail to start",
        helps="slurmd's service, limits.conf, and the shell that submits: Slurm hands its limits on",
    ),
    DoctorCheck(
        "clock", "kernel and limits", kernel.clock, "whether the clock is synchronised, and agrees with slurmctld's",
        "time limits are slurmctld's, and munge refuses a difference of 300 s", budget_s=30,
        helps="chronyd or ntpd",
    ),
    DoctorCheck(
        "process-restore", "kernel and limits", process_restore.process_restore, "CRIU's version and its own check; "
        "with GPUs `cuda-checkpoint`", "whether `--process-images on` can be given", budget_s=20,
        helps="a CRIU that knows this kernel, and CAP_CHECKPOINT_RESTORE",
    ),
    DoctorCheck(
        "host-name", "network", network.host_name, "the address of this machine's name, and how long the look-up takes",
        "other nodes reach it by this name; a loopback address is the classic trap",
        helps="the machine's address in /etc/hosts or DNS, in the place of 127.0.1.1",
    ),
    DoctorCheck(
        "ports", "network", network.ports, "free ports to listen on, and how many there are",
        "controllers and torch's store listen on ports", needed=True,
        helps="a wider `net.ipv4.ip_local_port_range`",
    ),
    DoctorCheck(
        "loopback", "network", network.loopback, "a connection to 127.0.0.1, and to the address of this machine's name",
        "agents and ranks meet there", needed=True, after=("ports",),
        helps="`ip link set lo up`; the firewall; a right address of the name",
    ),
    DoctorCheck(
        "transports", "network", transports.transports, "how copies of snapshots go to other nodes: active RDMA "
        "ports, libfabric's providers, locked memory", "read by RDMA a lost node's state comes faster; over TCP it is "
        "encrypted",
        helps="libfabric with a provider for the hardware; no limit on locked memory; `--snapshot-transport`",
    ),
    DoctorCheck(
        "run-directory", "directories", directories.run_directory, "the run directory (`--run-dir`): owner, room, and "
        "what a run does there: rename, hard links, fsync, locks", "everything of a run is kept there", needed=True,
        budget_s=30,
        helps="another `--run-dir`; room; on NFS an export that keeps owners",
    ),
    DoctorCheck(
        "direct-io", "directories", directories.direct_io, "direct I/O there", "without it checkpoints go through the "
        "page cache", after=("extensions", "run-directory"), budget_s=30,
        helps="another file system for large checkpoints",
    ),
    DoctorCheck(
        "local-directory", "directories", directories.local_directory, "`RESILIO_LOCAL_DIR`, or /tmp: a private "
        "directory with a socket", "agents keep sockets and logs there", needed=True,
        helps="`RESILIO_LOCAL_DIR`, a short path on a disk of the node",
    ),
    DoctorCheck(
        "local-checkpoints", "directories", directories.local_checkpoints, "the directory of `--local-checkpoints`, "
        "if given", "steps are written there first", needed=True, after=("extensions",), budget_s=30,
        helps="a directory of yours on a disk of the node",
    ),
    DoctorCheck(
        "slurm", "Slurm", slurm_site.slurm, "Slurm's version, and whether slurmctld answers",
        "jobs and agents start by it", needed=True, budget_s=60,
        helps="`scontrol ping`; PATH; `SLURM_CONF`",
    ),
    DoctorCheck(
        "munge", "Slurm", slurm_site.munge, "a credential of munge, made and read", "no Slurm command works without it",
        needed=True,
        helps="start munged, with the cluster's key",
    ),
    DoctorCheck(
        "slurm-settings", "Slurm", slurm_site.settings, "the settings of slurm.conf in the table below",
        "some end runs, or chains, early", after=("slurm",), budget_s=60,
        helps="the table below",
    ),
    DoctorCheck(
        "job", "Slurm", slurm_site.job, "in a job: its nodes, its end, and the flags of its srun",
        "a step without the survival flags ends at the first loss", after=("slurm",), budget_s=60,
        helps="`srun --no-kill --kill-on-bad-exit=0 --wait=0`, or no srun",
    ),
    DoctorCheck(
        RECOVERY, "recovery", recovery.recovery, "a run of two ranks, of which one kills itself; the time until all "
        "train again", "the proof that it works", needed=True, budget_s=60,
        after=(
            "python", "extensions", "packages", "shared-memory", "open-files", "loopback", "ports", "local-directory",
        ),
        helps="what failed above; `--limit` on a slow machine",
    ),
)  # fmt: skip


def select(names: Sequence[str], quick: bool) -> list[DoctorCheck]:
    """Return the checks of these names, all without any; ``quick`` leaves the recovery out. Raises UsageError.

    What they come after is looked at, too.
    """
    known = {check.name: check for check in CHECKS}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(known)}"
            raise UsageError(f"no check is named {name!r}: {hint}")
    wanted = set(names) or {name for name in known if not (quick and name == RECOVERY)}
    while more := {one for name in wanted for one in known[name].after} - wanted:
        wanted |= more
    return [check for check in CHECKS if check.name in wanted]
