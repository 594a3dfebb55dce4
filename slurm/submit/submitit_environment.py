"""submitit.JobEnvironment() for a function that runs under resilio-launch, registered with submitit."""

from __future__ import annotations

import os
import signal
import types
import typing as tp

from submitit.core import job_environment, logger, utils

from resilio_hpc.core.durable import sync_directory
from resilio_hpc.slurm.client.hostlist import expand

TERMINATED = 143


class ResilioJobEnvironment(job_environment.JobEnvironment):
    """The environment: all jobs of a chain are one job to submitit, the first.

    Ranks may change places between rounds.
    """

    _env: tp.ClassVar[dict[str, str]] = {
        "job_id": "RESILIO_SUBMITIT_JOB",
        "num_tasks": "WORLD_SIZE",
        "num_nodes": "GROUP_WORLD_SIZE",
        "node": "GROUP_RANK",
        "global_rank": "RANK",
        "local_rank": "RESILIO_LOCAL_RANK",
        "array_job_id": "SLURM_ARRAY_JOB_ID",
        "array_task_id": "SLURM_ARRAY_TASK_ID",
    }

    @property
    def hostnames(self) -> tp.Sequence[str]:
        """Return the nodes of the allocation at its start, spares included."""
        return expand(os.environ.get("SLURM_JOB_NODELIST", "")) or [self.hostname]

    def _handle_signals(self, paths: utils.JobPaths, submission: utils.DelayedSubmission) -> None:
        """Save a Checkpointable function when told to end. The launcher does all else of a stop.

        SIGTERM comes to ranks that do not use resilio_hpc.train before the time limit, at preemption, and when the
        ranks are restarted since another one failed. submitit's own handler would requeue the job.
        """
        if self.global_rank == 0 and hasattr(submission.function, "checkpoint"):
            signal.signal(signal.SIGTERM, _Saver(paths, submission))

    def _requeue(self, countdown: int) -> None:
        """End this rank, for a user's own handlers; the launcher starts all ranks again. Raises SystemExit.

        The job keeps its nodes. A next job comes at the time limit, as often as ``max_num_timeout`` says.
        """
        logger.get_logger().info(f"the ranks of job {self.job_id} start again")
        raise SystemExit(TERMINATED)


class _Saver:
    """Replaces the waiting function by the result of its ``checkpoint``, and ends the process."""

    def __init__(self, paths: utils.JobPaths, submission: utils.DelayedSubmission) -> None:
        self._paths = paths
        self._submission = submission

    def __call__(self, number: int, frame: types.FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the first
        log = logger.get_logger()
        log.info("told to end: calling the function's checkpoint method")
        successor = self._submission._checkpoint_function()
        if successor is None:
            log.info("it returned None: the next life starts where this one did")
        else:
            successor.set_timeout(self._submission._timeout_min, self._submission._timeout_countdown)
            save(successor, self._paths)
        raise SystemExit(TERMINATED)


def save(submission: utils.DelayedSubmission, paths: utils.JobPaths) -> None:
    """Replace what the next life of the ranks runs: the old one or the new one exists, whatever dies meanwhile."""
    target = paths.submitted_pickle
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    submission.dump(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.rename(target)
    sync_directory(target.parent)
