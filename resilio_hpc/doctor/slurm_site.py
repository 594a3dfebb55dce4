"""Slurm as this machine sees it: its version and daemon, munge, the settings that matter, the job."""

from __future__ import annotations

import re
import shutil
import time

from resilio_hpc.core.errors import CommandError, SlurmError, UsageError
from resilio_hpc.doctor import slurm_settings
from resilio_hpc.doctor.finding import DoctorFinding, DoctorState, DoctorView, failed, not_here, notice, ok, warning
from resilio_hpc.slurm.chain.chain import waits_without_aging
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.allocation import detect
from resilio_hpc.slurm.client.runner import run_here

_MUNGE_S = 5.0
_TESTED = ((22, 5), (26, 5))


def slurm(view: DoctorView) -> DoctorFinding:
    """Ask for the version, and slurmctld for its configuration."""
    from resilio_hpc.slurm.client.command_client import parse_series

    view.mark("sinfo -V")
    version = commands.version()
    if not version and not view.has_slurm:
        there = "Slurm's commands are here, but no configuration" if shutil.which("srun") else "no Slurm"
        return not_here(f"{there}: launches run on this machine alone")
    if not version:
        there = "do not work" if shutil.which("srun") else "are not on the PATH"
        return failed(
            f"Slurm's commands {there}",
            "A launch in a job starts its agents with srun, and asks squeue and scontrol.",
            "put the directory of srun into PATH; sinfo -V says what else is wrong",
        )
    view.mark("scontrol show config")
    try:
        told = run_here(["scontrol", "show", "config"], commands.TIMEOUT_S).stdout
    except CommandError as error:
        return failed(
            f"Slurm {version}; slurmctld does not answer: {_last_line(error)}",
            "No job or step starts meanwhile. Runs that are under way go on.",
            "look at scontrol ping, and at munge below; SLURM_CONF names the configuration",
        )
    controller = re.search(r"^SlurmctldHost\S*\s*=\s*(\S+)", told, re.MULTILINE)
    seen = f"Slurm {version}, slurmctld answers" + (f" on {controller[1]}" if controller else "")
    if not _TESTED[0] <= parse_series(version) <= _TESTED[1]:
        return notice(
            f"{seen}; tested are 22.05 to 26.05",
            "An answer of Slurm that is not understood counts as unknown, and nothing is decided on it.",
            "try a drill first: docs/devcluster.md",
        )
    return ok(seen)


def _last_line(error: CommandError) -> str:
    lines = [line.strip() for line in error.stderr.splitlines() if line.strip()]
    return lines[-1].removeprefix("scontrol: error: ") if lines else str(error)


def munge(view: DoctorView) -> DoctorFinding:
    """Let munge make a credential, and read it again."""
    text = ""
    if view.slurm_conf is not None:
        view.mark(str(view.slurm_conf))
        text = view.slurm_conf.read_text(errors="replace")
    kind = re.search(r"^\s*AuthType\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    if kind and kind[1].lower() != "auth/munge":
        return not_here(f"not used: AuthType={kind[1]}")
    if shutil.which("munge") is None:
        if view.has_slurm:
            return notice(
                "its commands are not on the PATH, so it was not asked",
                "Slurm's commands authenticate with it.",
                "if Slurm answers above, nothing; else install munge",
            )
        return not_here("no munge")
    view.mark("munge")
    try:
        credential = run_here(["munge", "-n"], _MUNGE_S).stdout
        run_here(["unmunge", "-n"], _MUNGE_S, stdin=credential)
    except CommandError as error:
        if not view.has_slurm:
            return not_here("munged does not run, and no Slurm needs it here")
        return failed(
            f"it does not answer: {error}",
            "Without it no Slurm command works: no job, no step, no drain.",
            "start munged on this machine (systemctl start munge), with the cluster's key and a right clock",
        )
    return ok("munged answers")


def settings(view: DoctorView) -> DoctorFinding | list[DoctorFinding]:
    """Judge the settings of the table, the priority of waiting jobs, and whether this node's slurm.conf is the same."""
    view.mark("scontrol show config")
    config = commands.config()
    if not config:
        return failed(
            "slurmctld does not tell its configuration",
            "It was there a moment ago.",
            "look at scontrol ping, and ask again",
        )
    found = slurm_settings.judge(config)
    if waits_without_aging(config):
        found.append(
            DoctorFinding(
                DoctorState.NOTICE,
                f"PriorityFlags={config.get('PriorityFlags', '')}",
                "The next job of a chain, which waits from the start, gains no priority by age.",
                "in slurm.conf: add ACCRUE_ALWAYS to PriorityFlags",
                "PriorityFlags",
            )
        )
    if config.get("HASH_VAL", "").startswith("Different"):
        found.append(
            DoctorFinding(
                DoctorState.WARNING,
                f"HASH_VAL={config['HASH_VAL']}",
                "This machine's slurm.conf is not the controller's.",
                "copy the controller's slurm.conf here, then scontrol reconfigure",
                "slurm.conf",
            )
        )
    return found or ok(f"{len(slurm_settings.table()) + 2} settings are as runs need them")


def job(view: DoctorView) -> DoctorFinding:
    """Look at the job as the launcher does: its nodes, its end, the flags of its srun."""
    from resilio_hpc.launch.allocation.placements import missing_survival_flags, our_srun

    if not view.in_job:
        return not_here("not in a job of Slurm's")
    number = view.environment["SLURM_JOB_ID"]
    try:
        allocation = detect(view.environment)
    except UsageError as error:
        return failed(str(error), "resilio-launch refuses to start here.", "as it says")
    assert allocation is not None
    view.mark(f"squeue for job {number}")
    try:
        end = commands.job_end_time(number)
    except SlurmError:
        end = None
    left = f", {max(0.0, end - time.time()) / 60:.0f} minutes left" if end else ""
    seen = f"job {number}, {len(allocation.nodes)} node{'s' * (len(allocation.nodes) != 1)}{left}"
    srun = our_srun(view.environment) if allocation.in_step else None  # None: on another machine, too
    missing = missing_survival_flags(srun) if srun else []
    if missing:
        return warning(
            f"{seen}; a task of srun without {' '.join(missing)}",
            "Slurm ends the whole step at the first loss.",
            f"srun {' '.join(missing)} …; or resilio-launch in the batch script, without srun",
        )
    return ok(f"{seen}; the flags of its srun are not seen from here" if allocation.in_step and not srun else seen)
