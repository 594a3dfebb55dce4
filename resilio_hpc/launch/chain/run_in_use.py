"""Whether another launch has the run directory: then this one is refused in one line, before it changes anything.

Jobs of a chain are distinguished by Slurm's answer (``judge``). The other cases are here: launches without Slurm, on
this machine or another one, and several launches in the same run of a job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.allocation.placements import Site, SiteMode
from resilio_hpc.launch.chain.continuation_policy import ALIVE
from resilio_hpc.launch.chain.fencing import last_pulse
from resilio_hpc.launch.process.announce import say
from resilio_hpc.launch.rundir import holder, run_directory
from resilio_hpc.launch.rundir.run_claim import Turn, run_of
from resilio_hpc.slurm.client import commands

Ask = Callable[[str], commands.Holding | None]


def is_of_slurm(turn: Turn) -> bool:
    """Return whether a job had the turn; else a launch outside of Slurm had it. Pure."""
    return turn.job.isdecimal()


def is_same_run(turn: Turn, site: Site) -> bool:
    """Return whether another launch in this run of the job had the turn. Pure."""
    return turn.job == site.job and run_of(turn.part) == site.restarts


def judged_by_slurm(turn: Turn, site: Site) -> bool:
    """Return whether both are jobs, or two runs of one, so that Slurm knows which of them is over. Pure."""
    return site.mode is not SiteMode.LOCAL and is_of_slurm(turn) and not is_same_run(turn, site)


def refuse_if_held(
    run_path: Path, last: Turn, site: Site, lease_s: float = holder.LEASE_S, ask: Ask = commands.holding
) -> None:
    """Return when the launch with the newest turn is over. Raises UsageError while it runs.

    ``lease_s``: for how long a pulse must stand still where no other sign is known.
    """
    if judged_by_slurm(last, site) or run_directory.read_verdict(run_path, last.part) is not None:
        return
    alive = holder.lives(last.holder, holder.kernel_here())
    if alive is None and is_of_slurm(last) and last.job != site.job:
        held = ask(last.job)
        alive = True if held is not None and held.state in ALIVE else None
    if alive is None and last.holder.kernel:  # an older version wrote no pulse
        alive = holder.watch(lambda: _signs(run_path, last), lease_s, lambda limit_s: _tell(last, limit_s))
    if alive:
        raise UsageError(in_use(run_path, last))


def in_use(run_path: Path, last: Turn) -> str:
    """Return which launch has the run directory, and what to do. Pure."""
    who = last.holder
    job = f"job {last.job}, " if is_of_slurm(last) else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.time))
    end = f"scancel {last.job}" if job else f"kill {who.pid} there"
    return (
        f"{run_path} is in use: {job}process {who.pid or '?'} on {who.host or '?'} has had it since {since}; "
        f"end that one first ({end}), or give this one another --run-dir"
    )


def _signs(run_path: Path, last: Turn) -> object:
    """Return values that change while the launch or its controller runs."""
    try:
        beat = holder.pulse_file(run_path, last.number).read_bytes()
    except OSError:
        beat = b""
    return beat, last_pulse(run_path)


def _tell(last: Turn, lease_s: float) -> None:
    say(
        f"process {last.holder.pid} on {last.holder.host} had this run and left no verdict: waiting for up to "
        f"{lease_s:.0f} s to see whether it still lives"
    )
