"""Checks of a command line that find mistakes before torch is imported or a rank is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from resilio_hpc.core import criu, extras, trusted_files
from resilio_hpc.core.errors import Untrusted, UsageError, os_error_text
from resilio_hpc.launch.cli import mpi_check
from resilio_hpc.launch.cli.program_check import check_command, check_module, check_script, hydra_notes
from resilio_hpc.launch.config.metrics_options import DEFAULT_ADDRESS, HIGHEST_PORT
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.gpus.devices import NodeDevices, local_world_size
from resilio_hpc.launch.resize.policy import resize_policy
from resilio_hpc.launch.workers.forking import open_files
from resilio_hpc.slurm.client.allocation import detect

_RANK_BYTES = 32 * 1024 * 1024  # private memory of a rank forked with torch loaded, before it computes anything


def check(options: LaunchOptions, environment: Mapping[str, str], cwd: Path, devices: NodeDevices) -> tuple[str, ...]:
    """Raise UsageError for the first mistake; return notes that are worth telling.

    ``devices``: of the machine where the command was given. They decide where that machine runs ranks, and are a hint
    where it does not (a login node): there, ``gpu`` is left to the agents.
    """
    check_program(options, environment, cwd)
    check_directory("--run-dir", Path(options.run_dir))
    check_run_directory(Path(options.run_dir))
    if options.output.log_dir:
        check_directory("--log-dir", Path(options.output.log_dir))
    if options.json and not options.dry_run:
        raise UsageError("--json belongs to --dry-run; a run's events are in RUN_DIR/ledger")
    if options.output.view and options.output.tee != "0":
        raise UsageError("--view and --tee both want the console: choose one")
    if options.chain and in_slurm(options, environment) and environment.get("SLURM_ARRAY_TASK_ID"):
        raise UsageError(
            "--chain: this job is a task of an array, and its next job would be a whole array again: "
            "leave out --chain, or submit one job per task (for i in …; do sbatch --export=ALL,TASK=$i …; done)"
        )
    if options.check_nodes != "never" and in_slurm(options, environment):
        allocation = detect(environment)
        if allocation is not None and allocation.in_step:
            raise UsageError(
                "--check-nodes: this is a task of srun, which cannot leave out nodes: give resilio-launch in the batch "
                "script itself, or run resilio check-nodes there first"
            )
    if options.stdin_rank >= 0 and not options.dry_run and os.isatty(0):
        raise UsageError("--stdin: the standard input is a terminal; give it from a file or a pipe: … --stdin 0 < FILE")
    if options.devices.evict_devices == "off" and (options.devices.min_devices, options.devices.device_unit) != (1, 1):
        raise UsageError("--min-devices and --device-unit are rules of --evict-devices: add --evict-devices on")
    if (options.resizing.resize_policy or options.resizing.resize_options) and not options.resizing.resize:
        raise UsageError("--resize-policy and --resize-options belong to --resize: add it")
    if options.resizing.resize:
        check_resize(options)
    check_metrics(options, runs_here(options, environment))
    if options.mpi and options.reentry.restart_policy == "failed":
        raise UsageError(
            "--restart-policy failed: the ranks of an MPI step end together; choose all, or leave out --mpi"
        )
    if options.reentry.spare_ranks and (why := _no_spare_ranks(options)):
        raise UsageError(f"--spare-ranks: {why}")
    if options.reentry.process_images == "on":
        check_process_images(options, environment, runs_here(options, environment))
    if options.mpi:
        mpi_check.check(options.mpi, in_slurm(options, environment))
    notes = check_ranks(options, devices) if runs_here(options, environment) else ()
    flags = (("--chain", options.chain), ("--resize", options.resizing.resize))
    without = tuple(flag for flag, given in flags if given and not in_slurm(options, environment))
    if options.kind == "script":
        notes += hydra_notes(options.script, options.script_args, cwd)
    return notes + tuple(f"{flag} has no effect outside of Slurm" for flag in without)


def _no_spare_ranks(options: LaunchOptions) -> str:
    """Return why no process could take another's place; "" where it may."""
    if options.reentry.restart_policy != "in-process":
        return "they enter a function as ranks that live do: leave out --restart-policy"
    if options.mpi:
        return "the ranks of an MPI step start together: leave out --mpi"
    if options.virtual_local_rank:
        return "each rank sees only its own GPU, and a spare one would see another's: leave out --virtual-local-rank"
    if options.kind == "command":
        return "they are for Python scripts, and this is a command"
    return ""


def check_process_images(options: LaunchOptions, environment: Mapping[str, str], here: bool) -> None:
    """Check that there are processes to dump, and that CRIU can. ``here``: this machine is one of the nodes."""
    if not options.reentry.spare_ranks:
        raise UsageError("--process-images: images are made of spare ranks: add --spare-ranks 1")
    if not here:
        return
    program = criu.find(environment)
    why = f"the check of CRIU fails: {said}" if program and (said := criu.why_not(program)) else ""
    if not program or why:
        raise UsageError(f"--process-images: {why or 'no criu in PATH'}: leave it out, or see resilio doctor")


def check_run_directory(path: Path) -> None:
    """Check that only its user can change an existing run directory."""
    try:
        if path.is_dir():
            trusted_files.run_directory(path)
    except Untrusted as error:
        raise Untrusted(f"--run-dir: {error}") from None
    except OSError as error:
        raise UsageError(f"--run-dir: {os_error_text(error, str(path))}") from None


def check_resize(options: LaunchOptions) -> None:
    """Check that the run may have another size, and that the policy can be read."""
    if options.min_nodes == options.max_nodes:
        raise UsageError(
            f"--resize: with --nnodes {options.max_nodes} there is nothing to resize: write --nnodes MIN:MAX, "
            "where MAX may be more than this job has"
        )
    resize_policy(Path(options.resizing.resize_policy) if options.resizing.resize_policy else None)


def check_metrics(options: LaunchOptions, here: bool) -> None:
    """Check where samples are to be read. ``here``: this machine is one of the nodes."""
    metrics = options.metrics
    if metrics.address != DEFAULT_ADDRESS and metrics.port is None:
        raise UsageError("--metrics-address belongs to --metrics-port: add it")
    if metrics.port is not None and metrics.port > HIGHEST_PORT:
        raise UsageError(f"--metrics-port: {metrics.port} is no port, the highest is {HIGHEST_PORT}")
    if not metrics.exposed:
        return
    if metrics.interval_s == 0:
        raise UsageError("--metrics-interval 0 takes no samples: leave out --metrics-port and --metrics-textfile")
    extras.require("prometheus_client", "--metrics-textfile" if metrics.port is None else "--metrics-port")
    if metrics.textfile and here and not os.access(metrics.textfile, os.W_OK | os.X_OK):
        raise UsageError(
            f"--metrics-textfile {metrics.textfile}: no directory that this user may write to; it is the one that "
            "node_exporter reads (--collector.textfile.directory)"
        )


def runs_here(options: LaunchOptions, environment: Mapping[str, str]) -> bool:
    """Return whether ranks run on this machine: always outside of Slurm; inside, if it is a node of the allocation."""
    return not in_slurm(options, environment) or "SLURMD_NODENAME" in environment


def in_slurm(options: LaunchOptions, environment: Mapping[str, str]) -> bool:
    """Return whether the launch is to use an allocation."""
    return bool(environment.get("SLURM_JOB_ID")) and not (options.standalone or options.local_nodes)


def check_program(options: LaunchOptions, environment: Mapping[str, str], cwd: Path) -> None:
    """Check that the script, module or command exists and can be run."""
    if options.kind == "command":
        check_command(options.script, environment, cwd)
    elif options.kind == "module":
        check_module(options.script, cwd)
    else:
        check_script(options.script, options.script_args, cwd)


def check_directory(flag: str, directory: Path) -> None:
    """Check that ``directory`` can be written to, or created."""
    existing = directory
    try:
        while not existing.exists():
            if existing.is_symlink():
                raise UsageError(f"{flag} {directory}: {existing} is a link to nowhere")
            existing = existing.parent
        if not existing.is_dir():
            raise UsageError(f"{flag} {directory}: {existing} is a file, not a directory")
        read_only = bool(os.statvfs(existing).f_flag & os.ST_RDONLY)
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {directory}: {getattr(error, 'strerror', error)}") from None
    if read_only or not os.access(existing, os.W_OK | os.X_OK):
        why = "is on a read-only file system" if read_only else "is not writable for this user"
        raise UsageError(f"{flag} {directory}: {existing} {why}; choose another with {flag} DIR")


def check_ranks(options: LaunchOptions, devices: NodeDevices) -> tuple[str, ...]:
    """Check the ranks against the devices of this node."""
    asked = options.nproc_per_node
    ranks = local_world_size(asked, devices)
    notes: list[str] = []
    if asked == "auto" and not (devices.gpus or devices.xpus):
        notes.append(f"--nproc-per-node auto: no GPU here, so one rank per usable CPU: {ranks}")
    if 0 < devices.gpus < ranks and asked != "cpu":
        if options.virtual_local_rank:
            raise UsageError(f"--virtual-local-rank: {ranks} ranks per node, but only {devices.gpus} GPUs are visible")
        notes.append(
            f"{ranks} ranks per node, but {devices.gpus} visible GPUs: the last {ranks - devices.gpus} have none"
        )
    if options.virtual_local_rank and devices.gpus == 0:
        raise UsageError("--virtual-local-rank gives each rank a GPU of its own, but no GPU is visible here")
    beyond = [rank for rank in options.output.local_ranks_filter if rank >= ranks]
    if beyond:
        raise UsageError(f"--local-ranks-filter: there is no local rank {beyond[0]}, they are 0 to {ranks - 1}")
    needed = ranks * (options.local_nodes or 1) * _RANK_BYTES
    if devices.memory_bytes and needed > devices.memory_bytes:
        raise UsageError(
            f"--nproc-per-node {asked}: {ranks} ranks need at least {needed >> 30} GiB before they compute anything, "
            f"but this node has {devices.memory_bytes >> 30} GiB free"
        )
    open_files.check(ranks)
    if options.cpu_bind == "ranks" and ranks > devices.cpus:
        raise UsageError(f"--cpu-bind ranks: {ranks} ranks cannot share {devices.cpus} CPUs; leave it out")
    return tuple(notes)
