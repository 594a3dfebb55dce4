"""A job of ResilioExecutor for submitit's users: one job, whatever number of Slurm's jobs carried it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import typing as tp
from pathlib import Path

from submitit.core import core, utils

from resilio_hpc.core.errors import CommandError
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.commands import UNKNOWN
from resilio_hpc.slurm.client.runner import run_here
from resilio_hpc.slurm.client.slurm_errors import refused
from resilio_hpc.slurm.submit import submitit_states
from resilio_hpc.slurm.submit.submitit_states import RunEnd, chain_state

R = tp.TypeVar("R", covariant=True)
LOCAL_POLL_S = 0.05
INTERRUPTED = "INTERRUPTED"  # submitit's word for a local job whose process was killed


class ChainWatcher(core.InfoWatcher):
    """Asks Slurm for all jobs of all chains at once, with or without accounting."""

    def __init__(self, delay_s: int = 60) -> None:
        super().__init__(delay_s)
        self._chains: dict[str, tuple[Path, bool]] = {}

    def follow(self, job_id: str, run_directory: Path, chained: bool) -> None:
        """Note where the jobs after ``job_id`` are written down."""
        self._chains[job_id] = (run_directory, chained)
        self.register_job(job_id)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return one of Slurm's states for the whole chain."""
        return self.get_info(job_id, mode).get("State") or UNKNOWN

    def update(self) -> None:
        """Read the run directories, and ask Slurm once."""
        followed = {job: self._chains[job] for job in self._registered - self._finished if job in self._chains}
        if not followed:
            return
        self._num_calls += 1
        chains = {job: submitit_states.jobs_of(job, path) for job, (path, _) in followed.items()}
        answer = submitit_states.ask([link for links in chains.values() for link in links])
        absent = submitit_states.PURGED if answer.sure else UNKNOWN
        for job, (path, chained) in followed.items():
            verdict = submitit_states.read_verdict(path).verdict
            states = [answer.states.get(link, absent) for link in chains[job]]
            nodes = next((answer.nodes[link] for link in chains[job] if answer.states.get(link) == "RUNNING"), "")
            state = chain_state(states, verdict, chained)
            self._info_dict[job] = {"JobID": job, "State": state, "NodeList": nodes, "Links": ",".join(chains[job])}
        self._last_status_check = time.time()
        self._finished |= {job for job in followed if self.is_done(job, mode="cache")}


class ResilioJob(core.Job[R]):
    """A job. ``result()`` is the result that the last job of the chain stored; ``cancel()`` ends the chain."""

    watcher = ChainWatcher(delay_s=60)
    chained = True
    _one_of_several = False
    _cancelled = False

    def __init__(self, folder: Path | str, job_id: str, tasks: tp.Sequence[int] = (0,), chained: bool = True) -> None:
        self.chained = chained
        super().__init__(folder, job_id, tasks)
        for task in self._sub_jobs:
            task.chained, task._one_of_several = chained, True  # type: ignore[attr-defined]

    def _register_in_watcher(self) -> None:
        if not self._tasks[0]:
            self.watcher.follow(self.job_id, self.run_directory, self.chained)

    @property
    def run_directory(self) -> Path:
        """Return the directory of the run's ledger, logs and checkpoints: `resilio status` takes it."""
        return utils.JobPaths(self._paths._folder, job_id=self.job_id).folder / f"{self.job_id}_run"

    def links(self) -> list[str]:
        """Return the jobs of Slurm's that have carried this one so far, and the one that waits."""
        return submitit_states.jobs_of(self.job_id, self.run_directory)

    def verdict(self) -> RunEnd:
        """Return how the run, or its newest part, ended."""
        return submitit_states.read_verdict(self.run_directory)

    def done(self, force_check: bool = False) -> bool:
        """Return whether no part of the run is left to come.

        A result alone is no end: ranks may have to be restarted.
        """
        if self._sub_jobs:
            return all(task.done(force_check) for task in self._sub_jobs)
        _refresh(self.paths.folder, self.run_directory)
        return bool(self._ended_as()) or self.watcher.is_done(self.job_id, mode="force" if force_check else "standard")

    def _ended_as(self) -> str:
        """Return the state that the verdict of the run means; "" while a next part may come."""
        verdict = self.verdict().verdict
        if not verdict or (self.chained and verdict in submitit_states.CONTINUES):
            return ""
        return chain_state([], verdict, self.chained)

    @property
    def state(self) -> str:
        """Return one of Slurm's states for the whole chain, without a forced question to Slurm."""
        return self._as_cancelled(self._ended_as() or self.watcher.get_state(self.job_id, mode="standard"))

    def _as_cancelled(self, state: str) -> str:
        """Return CANCELLED for a job that was cancelled before it had really begun: it has not failed."""
        return "CANCELLED" if self._cancelled and state in ("FAILED", INTERRUPTED) else state

    def _mark_cancelled(self) -> None:
        for job in (self, *self._sub_jobs):
            job._cancelled = True  # type: ignore[attr-defined]

    def _get_outcome_and_result(self) -> tuple[str, tp.Any]:
        try:
            return super()._get_outcome_and_result()
        except utils.UncompletedJobError as error:
            words = self.verdict()
            if not words.verdict:
                raise
            why = "; ".join(part for part in (words.reason, words.failure) if part)
            raise utils.UncompletedJobError(
                f"the run ended with the verdict {words.verdict}: {why} (resilio ledger {self.run_directory})\n{error}"
            ) from None

    def stdout(self) -> str | None:
        """Return what all tasks wrote, in all jobs of the chain, each line with its rank; for one task its lines."""
        return self._get_logs_string("stdout")

    def stderr(self) -> str | None:
        """Return the same of stderr, and the launcher's own lines."""
        return self._get_logs_string("stderr")

    def _get_logs_string(self, name: str) -> str | None:
        paths = utils.JobPaths(self._paths._folder, job_id=self.job_id, task_id=0)
        try:
            text = getattr(paths, name).read_text(errors="replace")
        except FileNotFoundError:
            return None
        return lines_of(text, self.task_id or 0) if self._one_of_several else str(text)

    def cancel(self, check: bool = True) -> None:
        """End the chain: the running job, and the one that waits for it. Raises SlurmError where ``check``."""
        links = self.links()
        living = submitit_states.living(links, submitit_states.ask(links))
        try:
            if living:
                self._mark_cancelled()
                run_here(["scancel", *living], commands.TIMEOUT_S)
        except CommandError as error:
            if check:
                raise refused(error) from error

    def _interrupt(self, timeout: bool = False) -> None:
        """Send, for tests, what Slurm sends before the time limit, or at preemption."""
        links = self.links()
        commands.cancel(submitit_states.living(links, submitit_states.ask(links))[0], "USR2" if timeout else "TERM")


def lines_of(text: str, rank: int) -> str:
    """Return a rank's lines of the launcher's output, without their mark. Pure."""
    return "".join(re.findall(rf"^\[rank {rank}\] (.*\n?)", text, re.MULTILINE))


def _refresh(*directories: Path) -> None:
    """Let an NFS client look again (it does when a directory changes), as submitit does."""
    for directory in directories:
        try:
            directory.chmod(directory.stat().st_mode)
        except OSError:
            pass


class LocalResilioJob(ResilioJob[R]):
    """A run on this machine. Its process is noted beside its pickle, so that other processes know it, too."""

    _process: subprocess.Popen[bytes] | None = None
    _results_timeout_s = 0  # there is no other machine's cache to wait for

    def __init__(self, folder: Path | str, job_id: str, tasks: tp.Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks, chained=False)

    def belongs_to(self, process: subprocess.Popen[bytes]) -> None:
        """Take note of the launcher of this job."""
        for job in (self, *self._sub_jobs):
            job._process = process  # type: ignore[attr-defined]
        self._record.write_text(f"{process.pid} {_started(process.pid)}\n")

    @property
    def _record(self) -> Path:
        return utils.JobPaths(self._paths._folder, job_id=self.job_id).folder / f"{self.job_id}_process"

    def _register_in_watcher(self) -> None:
        pass

    @property
    def state(self) -> str:
        """Return RUNNING, COMPLETED, FAILED, CANCELLED, INTERRUPTED or UNKNOWN.

        INTERRUPTED: the launcher was killed; UNKNOWN: it has not begun.
        """
        pid, code = self._seen()
        if pid:
            return "RUNNING"
        verdict = self.verdict().verdict
        if verdict:
            return self._as_cancelled(chain_state([], verdict, chained=False))
        if pid is None:
            return UNKNOWN
        return self._as_cancelled("FAILED" if code is not None and code > 0 else INTERRUPTED)

    def _seen(self) -> tuple[int | None, int | None]:
        """Return the launcher (0 once it has ended, None before it began) and its exit code, if it is a child."""
        if self._process is not None:
            code = self._process.poll()
            return (self._process.pid if code is None else 0), code
        try:
            pid, started = self._record.read_text().split()
        except (OSError, ValueError):
            return None, None
        return (int(pid) if _started(int(pid)) == started else 0), None

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """Return the state alone."""
        return {"JobID": self.job_id, "State": self.state}

    def done(self, force_check: bool = False) -> bool:
        """Return whether the launcher has ended, teardown included."""
        return self.state not in ("RUNNING", UNKNOWN)

    def wait(self) -> None:
        """Wait for the end, and look for it more often than one asks Slurm."""
        while not self.done():
            time.sleep(LOCAL_POLL_S)

    def cancel(self, check: bool = True) -> None:
        """Do as Ctrl-C: all ranks stop in good order."""
        if self._interrupt_with(signal.SIGINT):
            self._mark_cancelled()

    def _interrupt(self, timeout: bool = False) -> None:
        self._interrupt_with(signal.SIGUSR2 if timeout else signal.SIGTERM)

    def _interrupt_with(self, number: signal.Signals) -> bool:
        """Return whether there was a launcher to signal."""
        pid, _ = self._seen()
        if not pid:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    def __del__(self) -> None:
        if getattr(self, "_cancel_at_deletion", False):  # missing where __init__ failed
            self.cancel(check=False)

    def __getstate__(self) -> dict[str, tp.Any]:
        return {**self.__dict__, "_process": None}


def _started(pid: int) -> str:
    """Return a process's start time, in clock ticks since boot, which identifies it; "" for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]
