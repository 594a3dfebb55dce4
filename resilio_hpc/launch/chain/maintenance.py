"""Maintenance and a chain: the running job ends before its nodes are taken, the next one is made to fit before that.

A job whose limit reaches into a reservation waits until that is over. Where ten minutes or more are left before it, the
next job's time limit is shortened in place instead, and the job after it gets the full limit again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec.structs import replace

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.core.terminal import local_time
from resilio_hpc.launch.allocation import job_watch
from resilio_hpc.launch.allocation.job_watch import JobView
from resilio_hpc.launch.process.announce import say
from resilio_hpc.slurm.chain import chain
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.hostlist import expand
from resilio_hpc.slurm.client.reservations import Reservation, in_the_way, maintenance_of, reservations, time_that_fits
from resilio_hpc.slurm.client.text_output import duration_s
from resilio_hpc.slurm.orders.reshape import JobShape, reshape, value

LOOK_S = 600.0
Record = Callable[..., None]


class EndBeforeMaintenance:
    """``job_watch.ask`` for a job of a chain: its end is that of the job, or the next maintenance of its nodes.

    Slurm does not end a job when a maintenance begins; the reboot of its nodes does, when it is too late to save.
    """

    def __init__(
        self,
        own: str = "",
        ask: Callable[[str], JobView | None] = job_watch.ask,
        look: Callable[[], tuple[Reservation, ...]] = reservations,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._own, self._ask, self._look, self._clock = own, ask, look, clock
        self._known: tuple[Reservation, ...] = ()
        self._next_look = 0.0
        self._told = ""

    def __call__(self, job: str) -> JobView | None:
        """Return Slurm's view of the job; None without an answer."""
        view = self._ask(job)
        if view is None:
            return None
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            try:
                self._known = self._look()
            except SlurmError:
                pass  # the former answer holds
        one = maintenance_of(self._known, self._own, view.nodes, now)
        if one is None or one.begin >= (view.end_time or math.inf):
            return view
        if one.name != self._told:
            self._told = one.name
            say(f"maintenance {one.name} takes nodes of this job at {moment(one.begin)}: it stops before that")
        return replace(view, end_time=one.begin)


def fit_next_job(run_path: Path, job: str, record: Record, now: float) -> None:
    """Shorten ``job`` to fit before a reservation that keeps it from starting, or record until when it waits."""
    try:
        known = reservations()
        if not known:
            return
        fields = commands.job_fields(job)
        one, limit_s = _in_its_way(known, fields, now)
    except SlurmError:
        return  # without a change, the job just waits
    if one is None:
        return
    fits_s = time_that_fits(one, now)
    what = f"{'maintenance' if one.maintenance else 'reservation'} {one.name}"
    if fits_s is None:
        record("maintenance", job=job, reservation=one.name, begin=one.begin, end=one.end, time_limit_s=None)
        say(f"--chain: the next job, {job}, waits until {what} is over, at {moment(one.end)}")
        return
    chain.note_time_limit(run_path, job, fields.get("TimeLimit", ""))
    done = reshape(job, JobShape(time_limit_s=fits_s), run_path)
    record("maintenance", job=job, reservation=one.name, begin=one.begin, end=one.end,
           time_limit_s=fits_s if done.fits else None, result=done.result)  # fmt: skip
    if done.fits:
        say(
            f"--chain: {what} begins at {moment(one.begin)}: the next job, {job}, may run for {fits_s / 60:.0f} "
            f"minutes instead of {limit_s / 60:.0f}, so that it can start before it"
        )
    else:
        say(f"--chain: the next job, {job}, waits until {what} is over, at {moment(one.end)}: {done.why}")


def _in_its_way(
    known: tuple[Reservation, ...], fields: Mapping[str, str], now: float
) -> tuple[Reservation | None, float]:
    """Return the reservation that keeps the job from starting, and the job's time limit in seconds."""
    limit_s = duration_s(fields.get("TimeLimit", "")) or math.inf
    needed = fields.get("NumNodes", "").partition("-")[0]
    if not needed.isdecimal():
        return None, limit_s
    names = fields.get("Partition", "").split(",")
    excluded = set(expand(value(fields, "ExcNodeList")))
    nodes = {node for one in CommandClient().partitions() if one.name in names for node in one.nodes} - excluded
    return in_the_way(known, value(fields, "Reservation"), sorted(nodes), int(needed), now, limit_s), limit_s


def moment(unix: float) -> str:
    """Return the local time as text."""
    return local_time(unix, "%Y-%m-%d %H:%M")
