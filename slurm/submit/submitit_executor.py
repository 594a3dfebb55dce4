"""submitit's executor "resilio": functions and commands that survive lost ranks, nodes and time limits.

    executor = submitit.AutoExecutor(folder="jobs", cluster="resilio")
    executor.update_parameters(nodes=2, tasks_per_node=8, gpus_per_node=8, timeout_min=600, resilio_spares=1)
    job = executor.submit(train, 0.1)
    job.result()

The interface is submitit's; what a job runs on is resilio-launch. submitit pickles the user's function into the user's
own folder, and runs what it finds there: that is its contract (docs/security.md).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import typing as tp
import uuid
from pathlib import Path

from submitit.core import core, logger, utils
from submitit.local.debug import DebugExecutor

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.hostlist import compress
from resilio_hpc.slurm.node_faults.exclusion import Exclusion
from resilio_hpc.slurm.node_faults.ledger import DIRECTORY_VARIABLE, users_directory
from resilio_hpc.slurm.submit import limits, new_job, submission, submitit_parameters, template_files
from resilio_hpc.slurm.submit.submitit_job import LocalResilioJob, ResilioJob
from resilio_hpc.slurm.submit.submitit_parameters import ParameterError
from resilio_hpc.slurm.submit.template import FilledTemplate

CLUSTERS = ("slurm", "local", "debug")
TEMPLATE = "submitit"


class ResilioExecutor(core.PicklingExecutor):
    """``cluster``: ``slurm``; ``local``: this machine, which plays all nodes; ``debug``: in this process.

    ``max_num_timeout``: how often a job may reach its time limit (or be preempted) and go on in another one.
    A wrong parameter raises ParameterError, which is a ValueError.
    """

    job_class = ResilioJob

    def __init__(
        self, folder: Path | str, max_num_timeout: int = 3, max_pickle_size_gb: float = 1.0, cluster: str = ""
    ) -> None:
        super().__init__(folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        self._asked_for: tp.Mapping[str, str] = {}
        self.cluster = cluster or ("slurm" if shutil.which("sbatch") else "local")
        if self.cluster not in CLUSTERS:
            raise ParameterError(f"cluster={cluster!r}: it is one of {', '.join(CLUSTERS)}")
        if self.cluster == "slurm" and shutil.which("sbatch") is None:
            raise ParameterError("there is no sbatch on PATH: no Slurm here (cluster='local' runs on this machine)")

    @classmethod
    def affinity(cls) -> int:
        """Return submitit's preference for this executor: used when it is asked for, never by itself."""
        return 0

    @classmethod
    def _equivalence_dict(cls) -> core.EquivalenceDict:
        return tp.cast(core.EquivalenceDict, submitit_parameters.EQUIVALENT)

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return set(submitit_parameters.VALID)

    def _convert_parameters(self, params: dict[str, tp.Any]) -> dict[str, tp.Any]:
        return submitit_parameters.converted(params)

    def _internal_update_parameters(self, **kwargs: tp.Any) -> None:
        together = {**self.parameters, **kwargs}
        with submitit_parameters.as_value_error():
            submitit_parameters.checked(together)
        super()._internal_update_parameters(**kwargs)

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[tp.Any]]:
        if self.cluster == "debug":
            return DebugExecutor(self.folder)._internal_process_submissions(delayed_submissions)
        if self.cluster == "local":
            return [self._start_here(delayed) for delayed in delayed_submissions]
        if len(delayed_submissions) > 1 and not submitit_parameters.shape(self.parameters).chain:
            return self._submit_array(delayed_submissions)
        return super()._internal_process_submissions(delayed_submissions)

    # -- Slurm ---------------------------------------------------------------------------------------------------

    def _submit_command(self, command: str) -> core.Job[tp.Any]:
        number = self._sbatch(count=1)
        wanted = submitit_parameters.shape(self.parameters)
        return ResilioJob(self.folder, number, range(wanted.tasks), chained=wanted.chain)

    def _submit_array(self, delayed_submissions: tp.Sequence[utils.DelayedSubmission]) -> list[core.Job[tp.Any]]:
        pickles = [self._dump(delayed) for delayed in delayed_submissions]
        number = self._sbatch(count=len(pickles))
        tasks = range(submitit_parameters.shape(self.parameters).tasks)
        jobs: list[core.Job[tp.Any]] = []
        for task, path in enumerate(pickles):
            job: ResilioJob[tp.Any] = ResilioJob(self.folder, f"{number}_{task}", tasks, chained=False)
            job.paths.move_temporary_file(path, "submitted_pickle")
            jobs.append(job)
        return jobs

    def _sbatch(self, count: int) -> str:
        """Submit the script and keep it; return the job's number."""
        with submitit_parameters.as_value_error():
            template = template_files.load(self.parameters.get("template", TEMPLATE))
        logs = utils.JobPaths.get_first_id_independent_folder(self.folder)
        logs.mkdir(parents=True, exist_ok=True)
        here = submission.launcher_directory(os.environ)

        def script(**more: str) -> FilledTemplate:
            return submitit_parameters.job_script(
                template, {**self.parameters, **more}, self.folder, logs, self.max_num_timeout + 1, count, here
            )

        with submitit_parameters.as_value_error():
            job = script()
        self._warn_of_waiting_for_ever(job)
        environment = {**submission.own_environment(os.environ), **_memory(os.environ, logs)}
        avoids = self._avoided(job, environment)
        try:
            number = new_job.submit(job, avoids, lambda nodes: script(exclude=nodes), environment, _note).job
        except SlurmError as error:
            raise utils.FailedSubmissionError(str(error)) from error
        first = f"{number}_0" if count > 1 else number
        paths = utils.JobPaths(self.folder, job_id=first)
        if (paths.folder / f"{first}_run").exists():  # Slurm's numbers began anew
            commands.cancel(number)
            raise utils.FailedSubmissionError(
                f"{paths.folder} holds what another job {first} left, of which this one would give the results: "
                "take another folder"
            )
        paths.submission_file.parent.mkdir(parents=True, exist_ok=True)
        paths.submission_file.write_text(job.script)
        return number

    def _warn_of_waiting_for_ever(self, job: FilledTemplate) -> None:
        """Warn once for the same request, however many jobs make it."""
        if job.options == self._asked_for:
            return
        self._asked_for = job.options
        site = limits.asked(CommandClient(), job.options)
        own = set(submitit_parameters.converted(self.parameters)) | {"nodes", "ntasks_per_node"}
        if site is not None and (why := limits.never_starts(job.options, own, site)):
            _note(f"this job can never start: {why}")

    def _avoided(self, job: FilledTemplate, environment: tp.Mapping[str, str]) -> Exclusion:
        if self.parameters.get("any_node", False):
            return Exclusion()
        avoids = new_job.avoided(job, environment, Path.cwd(), CommandClient())
        if avoids.why:
            named = f"{compress(avoids.nodes)} avoided: " if avoids.nodes else ""
            _note(f"{named}{printable(avoids.why, 600)}")
        return avoids

    def _dump(self, delayed: utils.DelayedSubmission) -> Path:
        folder = utils.JobPaths.get_first_id_independent_folder(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{uuid.uuid4().hex}.pkl"
        delayed.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
        delayed.dump(path)
        return path

    # -- this machine --------------------------------------------------------------------------------------------

    def _start_here(self, delayed: utils.DelayedSubmission) -> core.Job[tp.Any]:
        """Start resilio-launch in the background; there is no time limit, so no next job."""
        wanted = submitit_parameters.shape(self.parameters)
        job: LocalResilioJob[tp.Any] = LocalResilioJob(
            self.folder, f"local-{uuid.uuid4().hex[:8]}", range(wanted.tasks)
        )
        job.paths.move_temporary_file(self._dump(delayed), "submitted_pickle")
        flags = [f"--nproc-per-node={wanted.tasks_per_node}", f"--spares={wanted.spares}"]
        if not knows_torch(job.paths.submitted_pickle, sys.modules):
            flags.append("--no-torch")
        argv = [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", *flags, f"--run-dir={job.run_directory}"]
        argv += submitit_parameters.launch_arguments(self.parameters, self.folder)
        environment = {
            **submission.own_environment(os.environ),
            "RESILIO_LOCAL_NODES": str(wanted.nodes + wanted.spares),
            "RESILIO_SUBMITIT_JOB": job.job_id,
            "SUBMITIT_EXECUTOR": self.name(),
        }
        one_file = bool(self.parameters.get("stderr_to_stdout", False))
        with job.paths.stdout.open("ab") as stdout, job.paths.stderr.open("ab") as stderr:
            process = subprocess.Popen(
                submitit_parameters.local_command(self.parameters, argv),
                stdin=subprocess.DEVNULL, stdout=stdout, stderr=stdout if one_file else stderr, env=environment,
                start_new_session=True,
            )  # fmt: skip
        job.belongs_to(process)
        return job

    # -- what submitit's base class asks for and nothing here uses ---------------------------------------------------

    def _num_tasks(self) -> int:
        return submitit_parameters.shape(self.parameters).tasks

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        raise NotImplementedError("the script is made by _sbatch")

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        raise NotImplementedError("the script is submitted by _sbatch")

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        raise NotImplementedError("the script is submitted by _sbatch")


def knows_torch(pickle: Path, loaded: tp.Container[str]) -> bool:
    """Return whether a function uses torch, or its user has it ``loaded``: else ranks need not wait for its import.

    A function that imports torch itself does so later, without harm.
    """
    return "torch" in loaded or b"torch" in pickle.read_bytes()


def _memory(environment: tp.Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variable that lets all jobs of a folder share one ledger of faulty nodes.

    The folders of jobs may differ (%j).
    """
    directory = users_directory(environment, folder / "runs")
    return {} if directory is None else {DIRECTORY_VARIABLE: str(directory)}


def _note(text: str) -> None:
    logger.get_logger().warning(f"resilio: {text}")
