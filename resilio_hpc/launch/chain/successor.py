"""The next job of a chain: submitted at the start, or as soon as Slurm's limits and slurmctld allow it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch.allocation.placements import Site, SiteMode
from resilio_hpc.launch.chain.node_exclusion import avoid_faulty_nodes
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.process.announce import say
from resilio_hpc.slurm.chain import chain
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.slurm_errors import SubmitLimit, Unanswered

LATE_S = 300.0  # before the end of a job whose successor could not be submitted at its start
RETRY_S = 15.0
UNANSWERED_RETRY_S = 60.0  # each try may take TIMEOUT_S


class ChainSuccessor:
    """``job``: the next job, once there is one. ``late``: why it could not be submitted yet: a limit, or no answer.

    ``busy``: held while Slurm is asked. The supervisor abandons a call that takes too long, and calls again.
    """

    def __init__(
        self, options: LaunchOptions, site: Site, run_path: Path, ledger: Ledger, stopped: Callable[[], bool]
    ) -> None:
        """Take the launch's parts; ``stopped``: looks whether the user has stopped the chain."""
        self.job: str | None = None
        self.late = ""
        self.busy = threading.RLock()
        self._options = options
        self._site = site
        self._run_path = run_path
        self._ledger = ledger
        self._stopped = stopped
        self._unanswered = False
        self._next_try = 0.0

    def submit_first(self) -> None:
        """Submit it at the start of this job. Raises UsageError where Slurm refuses it for good."""
        try:
            self._submit()
        except SubmitLimit as error:
            self._refused(str(error))
            say(f"--chain: no further job may be in the queue ({error}): the next one is submitted near this one's end")
        except Unanswered as error:
            self._refused(str(error))
            self.late, self._unanswered = "Slurm does not answer", True
            say("--chain: Slurm does not answer: the next job is submitted as soon as it does")
        except SlurmError as error:
            raise UsageError(f"--chain: the next job could not be submitted: {error}") from error
        if chain.link_number(os.environ) == 1 and self.job and chain.waits_without_aging(commands.config()):
            say(
                "note: on this cluster a job that waits for another one gains no priority by age (PriorityFlags lacks "
                "ACCRUE_ALWAYS): each job of the chain may queue as long as the first did"
            )

    def keep_for_later(self) -> None:
        """In the last job of a chain, keep what one more job would need, in case the user allows it."""
        try:
            nodes = len(self._site.nodes)
            chain.describe_successor(self._run_path, self._site.job, nodes, self._options.program)
        except (SlurmError, OSError) as error:
            self._ledger.append("successor_refused", limit=f"not kept for later: {error}")

    def allow(self) -> None:
        """Submit it at the next tick: the user has allowed the chain one more job."""
        self.late, self._unanswered = "it may be one more now", True

    def _refused(self, why: str) -> None:
        self._ledger.append("successor_refused", limit=why)
        self.late = why

    def _submit(self) -> None:
        if self._stopped():
            self.late = ""
            return
        link = chain.submit_successor(self._run_path, self._site.job, len(self._site.nodes), self._options.program)
        self.job, self.late = link.job, ""
        self._ledger.append("successor", job=link.job, link=link.number)
        if self._stopped():  # while it was submitted: the user may not have seen the job
            self.cancel("cancelled")
        else:
            self.avoid_faulty_nodes()

    def avoid_faulty_nodes(self) -> None:
        """Keep which nodes of this run were found faulty, and let the next job avoid them."""
        site = self._site
        if site.leads and site.mode is not SiteMode.LOCAL:
            avoid_faulty_nodes(self._run_path, site.job, site.nodes, self.job, self._ledger.append)

    def tick(self, now: float, end_time: float | None) -> None:
        """Retry what was refused at the start: near the end (Unix seconds), or until Slurm answers."""
        near = end_time is not None and now >= end_time - LATE_S
        if self.late and now >= self._next_try and (near or self._unanswered):
            self.submit_late(now)

    def submit_late(self, now: float) -> None:
        """Retry, since the end is near."""
        if not self.late or not self._site.leads or not self.busy.acquire(blocking=False):
            return
        try:
            self._try_again(now)
        finally:
            self.busy.release()

    def _try_again(self, now: float) -> None:
        self._next_try = now + (UNANSWERED_RETRY_S if self._unanswered else RETRY_S)
        try:
            self._submit()
            say(f"--chain: the next job is {self.job}")
        except SlurmError as error:
            self._unanswered = isinstance(error, Unanswered)
            self._refused(str(error))

    def cancel(self, why: object) -> None:
        """Cancel the job, if it was submitted. ``why``: the verdict."""
        if self.job is None:
            return
        try:
            commands.cancel(self.job)
            self._ledger.append("successor_cancelled", job=self.job, verdict=why)
            self.job = None
        except SlurmError as error:
            say(f"job {self.job} could not be cancelled, it will end by itself: {error}")
