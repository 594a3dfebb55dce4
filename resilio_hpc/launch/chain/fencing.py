"""Two jobs of a run never train at once: the new one waits for the old one's lease, the old one stops when it ends.

A part that ended with a verdict has told its ranks to stop: an agent that missed it stops when its own lease ends, a
heartbeat timeout later at most. One that ended without may still have nodes that run: cut off from Slurm, which counts
its job as over, but not from each other. The new part

1. takes a later epoch, so that an old controller that reads the run directory steps down (every part does so, and tells
   its agents which: none of them follows or claims what another job's part took later);
2. asks Slurm which of the old part's nodes are not known to be free of it; nodes of other jobs that had joined are not;
3. waits until those are, or until the old controller's pulse has stood still for as long as the old lease holds.

The old controller keeps ``JobLease``: it goes on only while it can write its pulse, or Slurm says that its job runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import LaunchError
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.events.phrases import names
from resilio_hpc.launch.protocol.job_lease import JOB_LEASE_S
from resilio_hpc.launch.protocol.vote import EpochRecord
from resilio_hpc.launch.rundir import run_directory
from resilio_hpc.launch.rundir.run_claim import Turn
from resilio_hpc.slurm.client import commands

LIMIT_S = 900.0  # if a pulse still moves then, a longer wait does not help
POLL_S = 1.0
EPOCHS = 1000  # more than one part of a run ever uses
NOWHERE = "127.0.0.1:9"  # the endpoint of an epoch without a leader
# Slurm's states of a node on which processes of an ended job may still run; a node that is powered down runs none
UNCONFIRMED = ("DOWN", "NOT_RESPONDING", "COMPLETING", "FAIL", "UNKNOWN", "REBOOT", "POWERING_DOWN")
OFF = ("POWERED_DOWN", "POWER_DOWN")


def unconfirmed_nodes(nodes: Sequence[str], states: Mapping[str, str] | None) -> tuple[str, ...]:
    """Return the nodes that Slurm does not confirm to be free of an ended job.

    ``states``: None without an answer. Pure.
    """
    if states is None:
        return tuple(nodes)
    return tuple(node for node in nodes if not _is_free(states.get(node, "UNKNOWN")))


def _is_free(state: str) -> bool:
    words = state.upper().replace("*", "+NOT_RESPONDING").split("+")
    return any(word in OFF for word in words) or not any(word.startswith(UNCONFIRMED) for word in words)


class PredecessorWait:
    """The wait as a pure decision. ``look`` returns "go", "wait", or "alive" when it has lasted too long.

    ``ended``: there is a verdict, so that part has no leader any more.
    """

    def __init__(
        self, heartbeat_timeout_s: float, now: float, ended: bool = False, lease_s: float = JOB_LEASE_S
    ) -> None:
        self._ended = ended
        self._began = self._moved = now
        # ranks of nodes that Slurm has cleared, and this job's own that were orphaned, stop within it
        self._short_s = heartbeat_timeout_s
        self._long_s = lease_s + heartbeat_timeout_s
        self._pulse: object = None

    def look(self, now: float, unconfirmed: Sequence[str], pulse: object, runs: bool = False) -> str:
        """Decide. ``pulse``: a value that changes when the old controller writes its status.

        ``runs``: Slurm says that its job runs, so that it may lead without a pulse.
        """
        if self._ended:
            return "wait" if unconfirmed and now - self._began < self._short_s else "go"
        if runs:
            return "alive" if now - self._began >= LIMIT_S else "wait"
        if pulse != self._pulse:
            self._pulse, self._moved = pulse, now
        still_s = now - self._moved
        if now - self._began >= self._short_s and still_s >= self._short_s and not unconfirmed:
            return "go"
        if still_s >= self._long_s:
            return "go"
        return "alive" if now - self._began >= LIMIT_S else "wait"


class Seen(Struct, frozen=True):
    """The result of one look.

    Slurm's states of the nodes, the pulse of the run directory's last controller, the nodes that took part under it,
    and whether Slurm says that the job runs.
    """

    states: Mapping[str, str] | None
    pulse: object
    agents: tuple[str, ...] = ()
    runs: bool = False


def look_at(run_path: Path, before: Turn) -> Seen:
    """Ask Slurm and the run directory."""
    holding = commands.holding(before.job)
    runs = holding is not None and holding.state == "RUNNING"
    return Seen(commands.node_states(before.nodes), last_pulse(run_path), last_agents(run_path), runs)


def last_pulse(run_path: Path) -> tuple[object, object] | None:
    """Return (epoch, counter) of the controller that wrote its status last; None without one, or without an answer."""
    status = trusted_files.read_object(run_path / "status.json") or {}
    return (status["epoch"], status["pulse"]) if {"epoch", "pulse"} <= status.keys() else None


def last_heard(run_path: Path) -> float | None:
    """Return when the newest controller wrote its status, Unix seconds; None without one."""
    return Fields(trusted_files.read_object(run_path / "status.json") or {}).number("time")


def last_agents(run_path: Path) -> tuple[str, ...]:
    """Return the nodes that were with that controller."""
    return tuple(Fields(trusted_files.read_object(run_path / "status.json") or {}).inner("agents").data)


def wait_for_predecessor(
    run_path: Path,
    before: Turn,
    heartbeat_timeout_s: float,
    say: Callable[[str], None],
    ended: bool = False,
    other_job: bool = True,
    look: Callable[[Path, Turn], Seen] = look_at,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Wait, after this part's epoch is taken, until no rank of ``before`` can train; return the seconds it took.

    ``ended``: it has a verdict; ``other_job``: it was no earlier run of this job. Raises LaunchError when its
    controller still writes after LIMIT_S.
    """
    began = clock()
    wait = PredecessorWait(heartbeat_timeout_s, began, ended)
    told = False
    while True:
        seen = look(run_path, before)
        guests = tuple(node for node in seen.agents if node not in before.nodes)  # Slurm counts them to their own jobs
        unconfirmed = (*unconfirmed_nodes(before.nodes, seen.states), *guests)
        answer = wait.look(clock(), unconfirmed, seen.pulse, seen.runs and other_job)
        if answer == "go":
            return clock() - began
        if answer == "alive":
            raise LaunchError(
                f"{before.part} still runs, or its controller still writes to {run_path}, after {LIMIT_S:.0f} s: "
                f"end its processes on {', '.join(before.nodes)}, then start this job again"
            )
        if unconfirmed and not told and not ended:
            told = True
            say(
                f"{before.part} ended without a verdict, and Slurm does not confirm that it has left "
                f"{names(unconfirmed)}: waiting until it must have stopped ({JOB_LEASE_S:.0f} s or a little more)"
            )
        sleep(POLL_S)


def take_epoch(run_path: Path, part: str) -> int:
    """Reserve a later epoch without a leader: controllers of older epochs step down when they see it.

    It is far ahead, since controllers that were elected while the run directory hung have left no record yet. The first
    of a run is 0.
    """
    while True:
        newest = run_directory.newest_epoch(run_path)
        epoch = (newest.epoch // EPOCHS + 1) * EPOCHS if newest else 0
        if run_directory.claim_epoch(run_path, EpochRecord(epoch, "", NOWHERE, f"{part}-begins")):
            return epoch
