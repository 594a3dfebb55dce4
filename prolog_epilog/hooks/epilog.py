"""After a job: removes its processes and its user's files, and keeps what a successor reads.

The decision is one function over the observations. Slurm is not asked, since it would get the same question from all
nodes of a large job at once.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from resilio_hpc.core.errors import UsageError
from resilio_hpc.prolog_epilog.base.check import Thresholds


@dataclass(frozen=True)
class EndedJob:
    """A job that has ended here."""

    id: str
    user: int


@dataclass(frozen=True)
class Policy:
    """Settings. ``clean``: places where a user's files are removed.

    ``cached``: burst buffers, where entries with names as in ``keep`` stay for ``keep_hours``, no more than
    ``keep_count`` of a user; other entries there are removed as in ``clean``.
    """

    clean: tuple[str, ...]
    cached: tuple[str, ...]
    keep: tuple[str, ...]
    keep_hours: float
    keep_count: int
    keep_in_memory: tuple[str, ...]
    keep_in_memory_minutes: float
    grace_s: float
    least_user: int

    @classmethod
    def of(cls, limits: Thresholds) -> Policy:
        """Return the settings of ``[settings.epilog]``."""
        return cls(
            tuple(limits.texts("clean")),
            tuple(limits.texts("burst_buffer")),
            tuple(limits.texts("keep")),
            limits.number("keep_hours"),
            int(limits.number("keep_count")),
            tuple(limits.texts("keep_in_memory")),
            limits.number("keep_in_memory_minutes"),
            limits.number("grace_s"),
            int(limits.number("least_user")),
        )


@dataclass(frozen=True)
class Running:
    """A process. ``job``: by its environment, "" without; for a slurmstepd, that of its step."""

    pid: int
    started: int
    user: int
    job: str
    name: str
    parent: int


@dataclass(frozen=True)
class LeftEntry:
    """A file or folder directly in a place. ``age_s``: since it was last changed."""

    place: str
    name: str
    user: int
    age_s: float


@dataclass(frozen=True)
class CleanupPlan:
    """What is to be removed, and why files stay."""

    kill: tuple[Running, ...] = ()
    remove: tuple[LeftEntry, ...] = ()
    kept: tuple[LeftEntry, ...] = ()
    why: str = ""


def job_of(environment: Mapping[str, str]) -> EndedJob:
    """Return the job from Slurm's variables for an epilog. Raises UsageError."""
    job, user = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_UID", "")
    if not job.isdecimal() or not user.isdecimal():
        raise UsageError("SLURM_JOB_ID and SLURM_JOB_UID are not set: Slurm's Epilog calls this")
    return EndedJob(job, int(user))


def decide(job: EndedJob, running: Sequence[Running], entries: Iterable[LeftEntry], policy: Policy) -> CleanupPlan:
    """Return the plan. In doubt nothing is removed: no process that may be another job's, no file of a present user.

    Pure.
    """
    if job.user < policy.least_user:
        return CleanupPlan(why=f"user {job.user} is one of the system's")
    steps = {one.pid for one in running if one.name == "slurmstepd"}
    own = [one for one in running if one.user == job.user and one.pid not in steps]
    kill = tuple(one for one in own if one.job == job.id)
    others = [one for one in own if one.job != job.id]
    parents = {one.parent for one in running}
    # a step of another job that has no process yet may be this user's
    unknown = [one for one in running if one.name == "slurmstepd" and one.job != job.id and one.pid not in parents]
    mine = [entry for entry in entries if entry.user == job.user]
    if others or unknown:
        who = others[0] if others else unknown[0]
        name = f"{who.name} of job {who.job}" if who.job else who.name
        why = f"user {job.user} may still be here: process {who.pid} ({name})"
        return CleanupPlan(kill, (), tuple(mine), why)
    kept = _kept(mine, policy)
    return CleanupPlan(kill, tuple(entry for entry in mine if entry not in kept), tuple(kept))


def _kept(entries: Sequence[LeftEntry], policy: Policy) -> list[LeftEntry]:
    """Return what a successor of the job may read: checkpoints on the node's disk, snapshots in its memory."""
    cached = [
        entry
        for entry in entries
        if entry.place in policy.cached and _named(entry, policy.keep) and entry.age_s < policy.keep_hours * 3600
    ]
    cached.sort(key=lambda entry: entry.age_s)
    memory = [
        entry
        for entry in entries
        if entry.place not in policy.cached
        and _named(entry, policy.keep_in_memory)
        and entry.age_s < policy.keep_in_memory_minutes * 60
    ]
    return cached[: policy.keep_count] + memory


def _named(entry: LeftEntry, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in patterns)


class CleanupDone(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the plan. ``failed``: why some of it is left."""

    job: str
    killed: int = 0
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    why: str = ""


def would_be(job: EndedJob, plan: CleanupPlan) -> CleanupDone:
    """Return the outcome of ``carry_out`` if nothing went wrong. Pure."""
    remove = tuple(f"{one.place}/{one.name}" for one in plan.remove)
    kept = tuple(f"{one.place}/{one.name}" for one in plan.kept)
    return CleanupDone(job=job.id, killed=len(plan.kill), removed=remove, kept=kept, why=plan.why)
