"""The SlurmClient that works on every site, with Slurm's own commands: their JSON if possible, else their tables."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

from resilio_hpc.core.errors import CommandError, SlurmError
from resilio_hpc.slurm.client import job_json, node_json, text_output
from resilio_hpc.slurm.client.answers import Garbled
from resilio_hpc.slurm.client.commands import TIMEOUT_S
from resilio_hpc.slurm.client.model import Job, Node, Partition
from resilio_hpc.slurm.client.order_writer import OrderWriter
from resilio_hpc.slurm.client.orders import check_job, check_nodes
from resilio_hpc.slurm.client.runner import READING, Runner, run_here
from resilio_hpc.slurm.client.slurm_errors import Unanswered, refused
from resilio_hpc.slurm.client.update_count import parse_update_count

Record = TypeVar("Record")
_FIRST_SCONTROL_JSON = (23, 2)
# a command that knows no --json, or a Slurm that was built without it
_NO_JSON = re.compile(r"unrecognized option|invalid option|serializer|data_parser|openapi|plugin", re.IGNORECASE)
_NOT_THERE = re.compile(r"Node \S+ not found|Invalid job id|Invalid node name")


class CommandClient:
    """A client by Slurm's commands. ``use_json`` False: only their tables are read."""

    def __init__(
        self,
        run: Runner = run_here,
        timeout_s: float = TIMEOUT_S,
        use_json: bool = True,
    ) -> None:
        self.orders = OrderWriter(run, timeout_s)
        self._run = run
        self._timeout_s = timeout_s
        self._json = use_json
        self._version: tuple[int, int] | None = None

    def series(self) -> tuple[int, int]:
        """Return Slurm's series, such as (22, 5). Needs no slurmctld. Raises SlurmError."""
        if self._version is None:
            self._version = parse_series(self._ask(["sinfo", "-V"]))
        return self._version

    def nodes(self, names: Sequence[str] = ()) -> tuple[Node, ...]:
        """Return all nodes, or those of these names that Slurm knows.

        Tables have only nodes that are in a partition.
        """
        check_nodes(names)
        one = list(names) if len(names) == 1 else []  # of several names, scontrol refuses all when it does not know one
        if self.series() >= _FIRST_SCONTROL_JSON:
            question = ["scontrol", "-a", "show", "nodes", *one, "--json"]
        else:
            question = ["sinfo", "-a", "--json"]
        found = self._either(question, node_json.parse_nodes, lambda: self._node_table(one))
        wanted = set(names)
        return tuple(node for node in found if node.name in wanted) if names else found

    def partitions(self) -> tuple[Partition, ...]:
        """Return all partitions, hidden ones too."""
        return text_output.parse_partitions(self._ask(["scontrol", "-a", "-o", "show", "partitions"]))

    def jobs(self, numbers: Sequence[str] = ()) -> tuple[Job, ...]:
        """Return all jobs that slurmctld remembers, or those of these numbers."""
        one = [check_job(number) for number in numbers] if len(numbers) == 1 else []
        if self.series() >= _FIRST_SCONTROL_JSON:
            question = ["scontrol", "-a", "show", "jobs", *one, "--json"]
        else:
            question = ["squeue", "-a", "-t", "all", "--json"]
        found = self._either(question, job_json.parse_jobs, lambda: self._job_table(one))
        return tuple(job for job in found if is_one_of(job, numbers)) if numbers else found

    def node_updates(self) -> int | None:
        """Return the orders to nodes, of all users, since slurmctld started; None when it does not tell."""
        try:
            return parse_update_count(self._ask(["sdiag"]))
        except Unanswered:
            raise
        except SlurmError:  # not permitted to this account
            return None

    def _node_table(self, one: Sequence[str]) -> tuple[Node, ...]:
        mark = f"@{secrets.token_hex(6)};"
        columns = text_output.column_format(text_output.NODE_COLUMNS, mark)
        chosen = ["-n", *one] if one else []
        return text_output.parse_nodes(self._ask(["sinfo", "-a", "-h", "-N", *chosen, "-O", columns]), mark)

    def _job_table(self, one: Sequence[str]) -> tuple[Job, ...]:
        mark = f"@{secrets.token_hex(6)};"
        columns = text_output.column_format(text_output.JOB_COLUMNS, mark)
        chosen = ["-j", *one] if one else []
        return text_output.parse_jobs(self._ask(["squeue", "-a", "-h", "-t", "all", *chosen, "-O", columns]), mark)

    def _either(
        self,
        question: Sequence[str],
        parse: Callable[[str], tuple[Record, ...]],
        table: Callable[[], tuple[Record, ...]],
    ) -> tuple[Record, ...]:
        """Return the answer from JSON, else from a table. A Slurm without JSON is not asked for it again.

        An empty list in JSON is not trusted: 26.05 prints it, with exit code 0, when slurmctld is away.
        """
        try:
            if self._json:
                try:
                    found = parse(self._ask(question))
                    if found:
                        return found
                except _NoJson:
                    self._json = False
                except Garbled:  # this one answer: torn, or no JSON
                    pass
            return table()
        except _NotThere:
            return ()

    def _ask(self, argv: Sequence[str]) -> str:
        try:
            return self._run(argv, self._timeout_s, READING).stdout
        except CommandError as error:
            meant = refused(error)
            if not isinstance(meant, Unanswered) and _NOT_THERE.search(error.stderr + error.stdout):
                raise _NotThere(str(error)) from error
            if not isinstance(meant, Unanswered) and "--json" in argv and _NO_JSON.search(error.stderr):
                raise _NoJson(str(error)) from error
            raise meant from error


class _NoJson(SlurmError):
    """Raised when this Slurm prints no JSON."""


class _NotThere(SlurmError):
    """Raised when Slurm knows nothing of this name or number."""


def is_one_of(job: Job, numbers: Sequence[str]) -> bool:
    """Return whether a record is one of the requested jobs: by its own number, its array's, or ``42_7``. Pure."""
    return not {str(job.id), job.address, str(job.array_job_id)}.isdisjoint(numbers)


def parse_series(text: str) -> tuple[int, int]:
    """Return the series: ``slurm 26.05.5`` or ``slurm-wlm 22.05.8`` → (26, 5). Raises Garbled. Pure."""
    found = re.search(r"(\d{1,3})\.(\d{1,3})(?:\.|-|\b)", text)
    if found is None:
        raise Garbled(f"sinfo -V names no version: {text.strip()[:60]!r}")
    return int(found[1]), int(found[2])
