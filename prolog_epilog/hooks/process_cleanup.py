"""What an epilog sees, and how it carries out its plan.

A child that has become the job's user removes files, so that no trick with names or links makes root remove anything
that this user could not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from resilio_hpc.prolog_epilog.base.check import Unreadable
from resilio_hpc.prolog_epilog.base.isolated import Child, Ended, Mark, gather
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles
from resilio_hpc.prolog_epilog.base.processes import parse_stat
from resilio_hpc.prolog_epilog.hooks.epilog import CleanupDone, CleanupPlan, EndedJob, LeftEntry, Policy, Running

_UID = re.compile(r"^Uid:\s+(\d+)", re.MULTILINE)
_STEP = re.compile(r"slurmstepd: \[(\d+)\.")
NOBODY = 65534


def see_processes(files: NodeFiles) -> list[Running]:
    """Return all processes, with their jobs; needs root for others' environments. Raises Unreadable."""
    found = []
    for pid in files.names("/proc", r"\d+"):
        stat_text, status = files.optional(f"/proc/{pid}/stat"), files.optional(f"/proc/{pid}/status")
        user = _UID.search(status or "")
        if stat_text and user:
            process = parse_stat(stat_text)
            job = _job_of_process(files, pid, process.name)
            found.append(Running(process.pid, process.started, int(user[1]), job, process.name, process.parent))
    return found


def _job_of_process(files: NodeFiles, pid: str, name: str) -> str:
    try:
        if name == "slurmstepd":
            title = _STEP.match(files.optional(f"/proc/{pid}/cmdline") or "")
            return title[1] if title else ""
        words = (files.optional(f"/proc/{pid}/environ") or "").split("\0")
    except Unreadable:  # not readable, so it counts as no job's, and stays
        return ""
    return next((word.partition("=")[2] for word in words if word.startswith("SLURM_JOB_ID=")), "")


def see_entries(files: NodeFiles, places: Iterable[str], now: float) -> list[LeftEntry]:
    """Return the entries directly in the places; a missing place has none."""
    found = []
    for place in places:
        for name in files.names(place):
            with contextlib.suppress(OSError):
                status = os.lstat(files.path(f"{place}/{name}"))
                found.append(
                    LeftEntry(place, name, status.st_uid, max(0.0, now - _changed(files, place, name, status)))
                )
    return found


def _changed(files: NodeFiles, place: str, name: str, status: os.stat_result) -> float:
    """Return the latest time of a change, of the entry or, for a folder, of its direct entries."""
    latest = status.st_mtime
    if stat.S_ISDIR(status.st_mode):
        with contextlib.suppress(OSError):
            folder = files.path(f"{place}/{name}")
            latest = max([latest, *(os.lstat(one).st_mtime for one in folder.iterdir())])
    return latest


def carry_out(
    job: EndedJob, plan: CleanupPlan, policy: Policy, files: NodeFiles, budget_s: float = 10.0
) -> CleanupDone:
    """Carry out the plan: kill first, since processes make files. Bounded, whatever hangs."""
    killed = end(plan.kill, policy.grace_s)
    removed, failed = remove(plan.remove, job.user, files, budget_s)
    kept = tuple(f"{one.place}/{one.name}" for one in plan.kept)
    return CleanupDone(job=job.id, killed=killed, removed=removed, kept=kept, failed=failed, why=plan.why)


def end(processes: Sequence[Running], grace_s: float) -> int:
    """Send SIGTERM, then SIGKILL; through pidfds, so that a reused pid does no harm. Return the number killed."""
    held = [fd for fd in map(_held, processes) if fd is not None]
    try:
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 1.0)):
            for fd in held:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, number)
            if _all_ended(held, wait_s):
                break
    finally:
        for fd in held:
            os.close(fd)
    return len(held)


def _held(process: Running) -> int | None:
    """Return a descriptor of this process; None if it has ended."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return None
    try:
        if parse_stat(Path(f"/proc/{process.pid}/stat").read_text(errors="replace")).started == process.started:
            return fd
    except (OSError, Unreadable):
        pass
    os.close(fd)
    return None


def _all_ended(held: Sequence[int], timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    for fd in held:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            return False
    return True


def remove(
    entries: Sequence[LeftEntry], user: int, files: NodeFiles, budget_s: float
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (removed, what failed and why); one child for each place removes as the user."""
    removed: list[str] = []
    failed: list[str] = []
    children: list[Child] = []
    for place in dict.fromkeys(entry.place for entry in entries):
        names = [entry.name for entry in entries if entry.place == place]
        children.append(Child(_removal(files.path(place), names, user), budget_s))

    def each(_: Child, ended: Ended) -> None:
        if ended.answer is None:
            failed.append(f"{ended.touched or 'a place'}: not removed in {budget_s:g} s")
            return
        for path, why in msgspec.json.decode(ended.answer, type=list[tuple[str, str]]):
            (failed if why else removed).append(f"{path}: {why}" if why else path)

    gather(children, each)
    return tuple(sorted(removed)), tuple(sorted(failed))


def _removal(place: Path, names: Sequence[str], user: int) -> Callable[[Mark], bytes]:
    def work(mark: Mark) -> bytes:
        if os.geteuid() == 0:
            become(user)
        return msgspec.json.encode([(str(place / name), _removed(place / name, mark)) for name in names])

    return work


def become(user: int, group: int = NOBODY) -> None:
    """Give up root's rights for those of a user, for the rest of this process."""
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)


def _removed(path: Path, mark: Mark) -> str:
    """Return why it still exists; "" if it is gone."""
    mark(str(path))
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        return "" if error.errno == errno.ENOENT else error.strerror or str(error.errno)
    return ""
