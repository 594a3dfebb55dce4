"""The errors that a failed command of Slurm means, by its exit and by the texts of 22.05 to 26.05."""

from __future__ import annotations

import re

from resilio_hpc.core.errors import CommandError, SlurmError

_SUBMIT_LIMIT = re.compile(
    r"AssocMaxSubmitJobLimit|AssocGrpSubmitJobsLimit|QOSMaxSubmitJobPerUserLimit|QOSGrpSubmitJobsLimit"
    r"|MaxSubmitJobsPerAccount|QOSMaxSubmitJobPerAccountLimit|Slurm temporarily unable to accept job"
    r"|Slurm job queue full"
)
# texts of Slurm's commands when slurmctld is away, starts, or is too busy
_AWAY = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted"
    r"|Connection (?:refused|reset|timed out)|Communication connection failure"
    r"|backup controller in standby|temporarily unavailable|Transport endpoint|Unexpected message received",
    re.IGNORECASE,
)
# ESLURM_ALREADY_DONE, and ESLURM_INVALID_JOB_ID once slurmctld has forgotten it
_ENDS = re.compile(r"already complet(?:ing|ed)|Invalid job id", re.IGNORECASE)
# their texts, too, where no slurm.conf is found, by a path or from slurmctld
_NOT_HERE = re.compile(
    r"Could not establish a configuration source|[Uu]nable to (?:process|open) (?:configuration|.*slurm\.conf)"
    r"|s_p_parse_file|resolve_ctls_from_dns_srv"
)


class Unanswered(SlurmError):
    """slurmctld did not answer: whether the order was carried out is unknown; it may be given again later."""


class Unreachable(Unanswered):
    """No Slurm command exists here, or it finds no configuration: nothing was carried out."""


class JobEnds(SlurmError):
    """The job of an order has ended, or Slurm is ending it."""


class SubmitLimit(SlurmError):
    """sbatch refused a job since too many are in the queue already (limits of the account, the QOS, MaxJobCount)."""


def refused(error: CommandError) -> SlurmError:
    """Return the error that a failed command means: Unanswered, Unreachable, JobEnds, or a refusal. Pure."""
    if (error.returncode is None and "cannot start" in str(error)) or _NOT_HERE.search(error.stderr):
        return Unreachable(f"Slurm cannot be reached from here: {error}")
    if _ENDS.search(error.stderr):
        return JobEnds(str(error))
    if (error.returncode is None and "no answer" in str(error)) or is_away(error.stderr):
        return Unanswered(str(error))
    return SlurmError(str(error))


def is_away(stderr: str) -> bool:
    """Return whether slurmctld did not answer, by what a command said. Pure."""
    return _AWAY.search(stderr) is not None


def limit_reached(stderr: str) -> str:
    """Return the limit on submitted jobs by which sbatch refused one (seen on 22.05, 24.11, 26.05), or "". Pure.

    These limits count pending jobs too, so a job cannot have its successor in the queue; other limits would only delay
    it.
    """
    found = _SUBMIT_LIMIT.search(stderr)
    return found.group(0) if found else ""


def sbatch_reason(error: CommandError) -> str:
    """Return sbatch's error in one line. Pure."""
    lines = [line.removeprefix("sbatch: error: ").strip() for line in error.stderr.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Batch job submission failed")] or lines
    failed = re.search(r"Batch job submission failed: (.*)", error.stderr)
    said = "; ".join(lines) or str(error)
    return said if failed is None or failed[1] in said else f"{said} ({failed[1]})"
