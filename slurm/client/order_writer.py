"""Orders to Slurm through its command line, or, in a dry run, only a list of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from resilio_hpc.core.errors import CommandError, SlurmError
from resilio_hpc.slurm.client import orders
from resilio_hpc.slurm.client.commands import TIMEOUT_S, SubmitLimit, limit_reached, refused
from resilio_hpc.slurm.client.runner import Runner, run_here

DRY_RUN_JOB = "0"  # what submit returns in a dry run: no job has this number


class OrderWriter:
    """The half of a SlurmClient that changes things; every back end writes in this way.

    ``dry_run``: gets each command line instead of Slurm.
    """

    def __init__(
        self,
        run: Runner = run_here,
        timeout_s: float = TIMEOUT_S,
        dry_run: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._dry_run = dry_run

    def drain(self, nodes: Sequence[str], reason: str) -> None:
        """Let no new job start there, whatever reason is there."""
        self._order(orders.drain(nodes, reason))

    def reword(self, nodes: Sequence[str], reason: str) -> None:
        """Another reason for drained nodes."""
        self._order(orders.reword(nodes, reason))

    def undrain(self, nodes: Sequence[str]) -> None:
        """End a drain; a node that is DOWN stays so."""
        self._order(orders.undrain(nodes))

    def resume(self, nodes: Sequence[str]) -> None:
        """Back into service, also from DOWN."""
        self._order(orders.resume(nodes))

    def set_weight(self, nodes: Sequence[str], weight: int) -> None:
        """Slurm fills nodes of a low weight first."""
        self._order(orders.weight(nodes, weight))

    def set_features(self, nodes: Sequence[str], available: Sequence[str], active: Sequence[str] | None = None) -> None:
        """Set the features that jobs may ask for, and which of them the nodes have now."""
        self._order(orders.features(nodes, available, active))

    def comment_nodes(self, nodes: Sequence[str], comment: str) -> None:
        """Set the nodes' Comment."""
        self._order(orders.comment_nodes(nodes, comment))

    def submit(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        """sbatch; returns the job's number, DRY_RUN_JOB in a dry run. Raises SubmitLimit too."""
        text = self._order(orders.submit(arguments), environment or {})
        if self._dry_run is not None:
            return DRY_RUN_JOB
        number = text.strip().splitlines()[-1:] or [""]
        if not number[0].split(";")[0].isdecimal():
            raise SlurmError(f"sbatch named no job: {text.strip()!r}")
        return number[0].split(";")[0]

    def update_job(self, job: str, changes: Mapping[str, str]) -> None:
        """``scontrol update JobId=…`` by scontrol's names."""
        self._order(orders.update_job(job, changes))

    def comment_job(self, job: str, comment: str) -> None:
        """Set the job's Comment."""
        self._order(orders.update_job(job, {"Comment": comment}))

    def cancel(self, job: str, signal: str | None = None) -> None:
        """Cancel a job, or send its steps a signal."""
        self._order(orders.cancel(job, signal))

    def requeue(self, job: str) -> None:
        """End a job's present run and queue it again."""
        self._order(orders.requeue(job))

    def _order(self, argv: Sequence[str], extra: Mapping[str, str] | None = None) -> str:
        if self._dry_run is not None:
            self._dry_run(argv)
            return ""
        try:
            return self._run(argv, self._timeout_s, extra or {}).stdout
        except CommandError as error:
            limit = limit_reached(error.stderr) if argv[0] == "sbatch" else ""
            raise (SubmitLimit(limit) if limit else refused(error)) from error
