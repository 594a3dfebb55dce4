"""Changes a waiting job of the chain in place: nodes, time limit, excluded nodes, features.

Compare, then write, then look again. A job may start between the look and the write, and scontrol would then shrink or
shorten the *running* job. So ExcNodeList, changed or not, is in every order: slurmctld (22.05, 26.05) refuses the whole
order for a job that does not wait, before it carries out any of it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.hostlist import compress, expand
from resilio_hpc.slurm.client.order_writer import OrderWriter
from resilio_hpc.slurm.client.orders import check_nodes
from resilio_hpc.slurm.client.slurm_errors import Unanswered
from resilio_hpc.slurm.client.text_output import duration_s

_SUCCESSORS_SCRIPT = re.compile(r"(/.*)/batch-\d+\.sh(?: |$)")  # slurm/chain/chain.py
NOTHING = ("", "(null)", "N/A")


@dataclass(frozen=True)
class JobShape:
    """The shape that a waiting job should have; None: unchanged.

    ``exclude``: () for none; ``features``: "" for none.
    """

    nodes: int | None = None
    time_limit_s: float | None = None
    exclude: Sequence[str] | None = None
    features: str | None = None


@dataclass(frozen=True)
class Reshaped:
    """The outcome.

    ``result``: done, nothing (it has that shape), would (dry run), foreign, started, refused, unanswered.
    """

    job: str
    result: str
    why: str
    changes: Mapping[str, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Return whether the job waits in the requested shape."""
        return self.result in ("done", "nothing")


class JobUpdates(Protocol):
    """The method of an OrderWriter that is needed."""

    def update_job(self, job: str, changes: Mapping[str, str]) -> None:
        """Have Slurm change a job (``scontrol update``)."""


def reshape(
    job: str,
    shape: JobShape,
    run_path: Path,
    orders: JobUpdates | None = None,
    look: Callable[[str], Mapping[str, str]] = commands.job_fields,
    dry_run: bool = False,
) -> Reshaped:
    """Change a waiting job that the chain of ``run_path`` has submitted, and no other; never raises SlurmError.

    Raises UsageError for an impossible shape.
    """
    fields = look(job)
    why = foreign(fields, run_path, os.geteuid())
    if why:
        return Reshaped(job, "foreign" if fields else "unanswered", why)
    if state_of(fields) != "PENDING":
        return Reshaped(job, "started", f"job {job} does not wait any more: {state_of(fields)}")
    wanted = changes(fields, shape)
    if not wanted:
        return Reshaped(job, "nothing", f"job {job} has that shape")
    order = {**wanted, "ExcNodeList": wanted.get("ExcNodeList", value(fields, "ExcNodeList"))}
    if dry_run:
        return Reshaped(job, "would", f"job {job} would be changed: {words(wanted)}", wanted)
    try:
        (orders or OrderWriter()).update_job(job, order)
    except SlurmError as error:
        return _failed(job, error, wanted, look)
    return _look_again(job, shape, wanted, look(job))


def foreign(fields: Mapping[str, str], run_path: Path, user_id: int) -> str:
    """Return why a job may not be changed: another user's, or not of this run's chain; "" if it may."""
    if not fields:
        return "Slurm does not answer, or does not know the job"
    owner = fields.get("UserId", "")
    if not owner.endswith(f"({user_id})"):
        return f"job {fields.get('JobId', '?')} is another user's: {owner}"
    script = _SUCCESSORS_SCRIPT.match(fields.get("Command", ""))
    if script is None or not _same(script[1], run_path):
        return f"job {fields.get('JobId', '?')} was not submitted by the chain of {run_path}"
    return ""


def _same(directory: str, run_path: Path) -> bool:
    """Return whether both are one directory, however they are written."""
    try:
        return directory == str(run_path) or run_path.samefile(directory)
    except OSError:
        return False


def changes(fields: Mapping[str, str], shape: JobShape) -> dict[str, str]:
    """Return the differences, by scontrol's names. Raises UsageError. Pure."""
    found: dict[str, str] = {}
    if shape.nodes is not None:
        found |= _size(fields, shape.nodes)
    if shape.time_limit_s is not None:
        if not shape.time_limit_s >= 60 or math.isinf(shape.time_limit_s):
            raise UsageError(f"a time limit is a minute at least, not {shape.time_limit_s:g} s")
        minutes = int(shape.time_limit_s // 60)
        if duration_s(fields.get("TimeLimit", "")) != minutes * 60:
            found["TimeLimit"] = str(minutes)
    if shape.exclude is not None:
        check_nodes(shape.exclude)
        if sorted(shape.exclude) != sorted(expand(value(fields, "ExcNodeList"))):
            found["ExcNodeList"] = compress(list(shape.exclude))
    if shape.features is not None and shape.features != value(fields, "Features"):
        found["Features"] = shape.features
    return found


def _size(fields: Mapping[str, str], nodes: int) -> dict[str, str]:
    """Return nodes, with the tasks and CPUs for them: 22.05 leaves those unchanged (BadConstraints)."""
    if nodes < 1:
        raise UsageError(f"a job has one node at least, not {nodes}")
    if value(fields, "TresPerJob"):
        raise UsageError(
            f"this job asks for {fields['TresPerJob']} in all: with another number of nodes it would not be the same "
            "per node (ask per node, --gpus-per-node)"
        )
    least, _, most = fields.get("NumNodes", "").partition("-")
    if not least.isdecimal() or (int(least), most or least) == (nodes, str(nodes)):
        return {}
    before = max(1, int(least))
    found = {"NumNodes": f"{nodes}-{nodes}"}  # "4" alone would only be the minimum
    per_node = fields.get("NtasksPerN:B:S:C", "0").split(":")[0]
    for name in ("NumTasks", "NumCPUs"):
        count = fields.get(name, "").partition("-")[0]
        if count.isdecimal() and int(count):
            found[name] = str(max(nodes, math.ceil(int(count) * nodes / before)))
    if per_node.isdecimal() and int(per_node):
        found["NumTasks"] = str(int(per_node) * nodes)
    return found


def _failed(
    job: str, error: SlurmError, wanted: Mapping[str, str], look: Callable[[str], Mapping[str, str]]
) -> Reshaped:
    if isinstance(error, Unanswered):
        return Reshaped(job, "unanswered", f"it is not known whether job {job} was changed: {error}", wanted)
    state = state_of(look(job))
    if state not in ("PENDING", commands.UNKNOWN):
        return Reshaped(job, "started", f"job {job} started first, and is as it was: {state}", wanted)
    return Reshaped(job, "refused", str(error), wanted)


def _look_again(job: str, shape: JobShape, wanted: Mapping[str, str], after: Mapping[str, str]) -> Reshaped:
    """Look again: slurmctld took the order, but a site's plug-in, or another user, may have changed the result."""
    left = changes(after, shape) if state_of(after) == "PENDING" else {}
    if left:
        return Reshaped(job, "refused", f"Slurm took the order, and yet job {job} still lacks {words(left)}", wanted)
    return Reshaped(job, "done", f"job {job}: {words(wanted)}", wanted)


def state_of(fields: Mapping[str, str]) -> str:
    """Return the job's state in scontrol's fields, UNKNOWN without. Pure."""
    return (fields.get("JobState", "").split() or [commands.UNKNOWN])[0]


def value(fields: Mapping[str, str], name: str) -> str:
    """Return a field, "" where scontrol says that it has none. Pure."""
    text = fields.get(name, "")
    return "" if text in NOTHING else text


def words(wanted: Mapping[str, str]) -> str:
    """Return ``NumNodes=2-2 TimeLimit=30``. Pure."""
    return " ".join(f"{name}={text}" for name, text in wanted.items())
