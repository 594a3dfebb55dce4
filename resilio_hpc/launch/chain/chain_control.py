"""``resilio chain stop`` and ``extend``: a user's orders for a chain, carried out.

The order is written to the run directory first (``chain_order``). From then on it holds, whatever happens to this
command or to slurmctld, since every job of the chain reads it. Then Slurm is asked and told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from resilio_hpc.core.errors import SlurmError, UsageError, os_error_text
from resilio_hpc.launch.chain import joining
from resilio_hpc.launch.chain.chain_status import ChainStatus
from resilio_hpc.launch.rundir import chain_order
from resilio_hpc.launch.rundir.chain_order import ChainOrder
from resilio_hpc.slurm.chain import chain
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.slurm_errors import Unanswered
from resilio_hpc.slurm.orders.reshape import foreign

Look = Callable[[], ChainStatus]


class Outcome(Struct, frozen=True):
    """The result of an order: done, nothing, would (dry run), or recorded.

    recorded: Slurm did not answer; the order holds all the same.
    """

    result: str
    said: tuple[str, ...]
    jobs: tuple[str, ...] = ()


def stop(run_path: Path, look: Look, by: str, now: float, dry_run: bool = False) -> Outcome:
    """End a chain: waiting jobs are cancelled, the running one saves and ends, no job is submitted any more.

    ``look``: returns the chain's status; ``now``: Unix seconds. Raises UsageError.
    """
    status = look()
    if status.phase == "complete":
        return Outcome("nothing", ("the run is complete: its chain has ended",))
    if status.phase in ("ended", "stopped") and not status.waiting:
        return Outcome("nothing", (f"no job of this chain runs or waits: it has {status.phase}",))
    if dry_run:
        return Outcome("would", tuple(_plan(status)), (*status.waiting, *status.running))
    _record(run_path, replace(status.order, stopped=True, by=by, time=now))
    status = look()  # a next job may have been submitted just before; after the order, none is
    if not status.answered:
        return Outcome("recorded", (
            "the order is recorded, and Slurm does not answer: the job that runs reads it and ends as soon as Slurm "
            "passes the stop on; a next job that starts ends at once. Repeat this command later to cancel what waits",
        ))  # fmt: skip
    said: list[str] = []
    result = "done"
    for job in reversed(status.waiting):
        result = _cancel(run_path, job, status, said, result)
    for job in status.running:
        said.append(_tell_running(job))
    return Outcome(result, tuple(said), (*status.waiting, *status.running))


def _plan(status: ChainStatus) -> list[str]:
    said = [f"job {job}, which waits, would be cancelled" for job in status.waiting]
    said += [f"job {job}, which runs, would save and end" for job in status.running]
    return [*said, "no further job would be submitted"]


def _cancel(run_path: Path, job: str, status: ChainStatus, said: list[str], result: str) -> str:
    """Cancel a waiting job, if it is of this run; one that starts meanwhile reads the order."""
    fields = commands.job_fields(job)
    why = foreign(fields, run_path, run_path.stat().st_uid)
    if why and not _requeued(fields, run_path, job, status):
        said.append(f"job {job} is left alone: {why}")
        return result if fields else "recorded"
    try:
        commands.cancel_waiting(job)
        said.append(f"job {job}, which waited, is cancelled")
    except SlurmError as error:
        if not isinstance(error, Unanswered) and commands.job_state(job) == "CANCELLED":
            said.append(f"job {job}, which waited, is cancelled")  # the running job had cancelled it before
            return result
        said.append(f"job {job} could not be cancelled ({error}): it ends when it starts")
        return "recorded"
    return result


def _requeued(fields: Mapping[str, str], run_path: Path, job: str, status: ChainStatus) -> bool:
    """Return whether it is a job of the run that waits to run again; the first job has its user's own script."""
    ours = fields.get("UserId", "").endswith(f"({run_path.stat().st_uid})")
    again = fields.get("Restarts", "0") not in ("", "0")
    return ours and again and any(part.job == job and part.part for part in status.parts)


def _tell_running(job: str) -> str:
    """Tell the running job.

    Its launcher reads the order within a second; where the batch host is lost, agents receive it.
    """
    holding = commands.holding(job)
    if holding is not None and holding.nodes and holding.batch_host not in holding.nodes:
        try:
            commands.cancel(job, "TERM")
            return f"job {job} has lost its batch host: its agents were told to save and end"
        except SlurmError as error:
            return f"job {job} has lost its batch host, and its agents could not be told to end: {error}"
    return f"job {job} saves and ends"


def extend(
    run_path: Path,
    look: Look,
    by: str,
    now: float,
    environment: Mapping[str, str],
    limit: int | None = None,
    dry_run: bool = False,
) -> Outcome:
    """Allow more jobs, lift a stop, and submit the next job where the chain has ended.

    ``limit``: jobs at most from now on, None: as it is. Raises UsageError, SlurmError; then nothing was changed, except
    for a submission whose answer was lost, which the next try finds.
    """
    status = look()
    _check(status, limit)
    order = ChainOrder(False, limit or status.order.limit, by, now)
    alive = [*status.running, *status.waiting]
    if alive and status.phase != "stopping" and not status.order.stopped:
        if dry_run:
            return Outcome("would", (_more(status, order),), tuple(alive))
        _record(run_path, order)
        return Outcome("done", (_more(status, order),), tuple(alive))
    model = _model(run_path)
    if dry_run:
        return Outcome(
            "would", (f"job {model}'s script would be submitted as job {status.last_link + 1} of the chain",)
        )
    _record(run_path, order)  # first, so that the new job does not find the stop
    try:
        for job in status.waiting:  # left over from the stop: it would take the run from the new job, and end
            commands.cancel_waiting(job)
        link = chain.submit_revived(_as_jobs_see_it(run_path), chain.read_links(run_path), model, environment)
    except SlurmError:
        _record(run_path, status.order)
        raise
    after = f" after job {status.running[0]}" if status.running else ""
    return Outcome("done", (f"job {link.job} carries the chain on{after}, as its link {link.number}",), (link.job,))


def _check(status: ChainStatus, limit: int | None) -> None:
    if status.phase == "complete":
        raise UsageError("this run is complete: there is nothing to carry on (another --run-dir starts a new run)")
    if not status.answered:
        raise SlurmError("Slurm does not answer, so it is unknown which jobs run: nothing was changed; try again later")
    count = status.last_link
    limit = limit or status.limit
    waits = any(part.link == count and part.state == "PENDING" for part in status.parts)
    if limit is not None and limit < count + (0 if waits else 1):
        raise UsageError(
            f"the chain has had {count} jobs, and {limit} are allowed: name --max with a greater number, or --no-limit"
        )


def _more(status: ChainStatus, order: ChainOrder) -> str:
    limit = order.limit_of(status.limit or chain_order.NO_LIMIT)
    allowed = "any number of jobs" if limit >= chain_order.NO_LIMIT else f"{limit} jobs"
    if status.running and not status.waiting:
        return f"{allowed} from now on; job {status.running[-1]} submits the next one within some seconds"
    return f"{allowed} from now on; job {status.waiting[-1]} waits already"


def _model(run_path: Path) -> str:
    """Return the newest job that has kept what the next job needs."""
    for link in reversed(chain.read_links(run_path)):
        if chain.kept_arguments(run_path, link.job) is not None:
            return link.job
    raise UsageError(
        f"{run_path} keeps no batch script of its chain: submit the job yourself, with --run-dir {run_path}"
    )


def _as_jobs_see_it(run_path: Path) -> Path:
    """Return the run directory's path as its jobs wrote it, if that path exists here."""
    record = joining.read_record(run_path)
    theirs = Path(record.options.run_dir) if record else run_path
    return theirs if theirs.is_dir() and theirs.samefile(run_path) else run_path


def _record(run_path: Path, order: ChainOrder) -> None:
    try:
        chain_order.write(run_path, order)
    except OSError as error:
        raise UsageError(f"the order cannot be recorded: {os_error_text(error, str(run_path))}") from None
