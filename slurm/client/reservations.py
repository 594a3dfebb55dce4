"""Reservations (maintenance and others): which one keeps a job from starting, and what would fit before it.

scontrol manual, SHOW RESERVATION; 22.05 and 26.05 print the same fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resilio_hpc.core.errors import CommandError, UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.client.answers import Garbled
from resilio_hpc.slurm.client.commands import TIMEOUT_S, parse_fields
from resilio_hpc.slurm.client.hostlist import NOTHING, expand
from resilio_hpc.slurm.client.runner import READING, Runner, run_here
from resilio_hpc.slurm.client.slurm_errors import refused

LEAST_S = 600.0  # a shorter job is not worth its start
MARGIN_S = 60.0  # Slurm's limits are whole minutes, and starting takes a moment


@dataclass(frozen=True)
class Reservation:
    """``begin``, ``end``: Unix seconds."""

    name: str
    begin: float
    end: float
    nodes: tuple[str, ...]
    maintenance: bool = False


def reservations(run: Runner = run_here) -> tuple[Reservation, ...]:
    """Return all that this account may see. Raises SlurmError."""
    try:
        return parse_reservations(run(["scontrol", "-o", "show", "reservation"], TIMEOUT_S, READING).stdout)
    except CommandError as error:
        raise refused(error) from error


def parse_reservations(text: str) -> tuple[Reservation, ...]:
    """Return one per line, without those that have no nodes (of licenses). Pure.

    Raises Garbled for one that cannot be read: it may keep a job from starting all the same.
    """
    found = []
    for line in text.splitlines():
        fields = parse_fields(line)
        name, begin, end = fields.get("ReservationName"), fields.get("StartTime", ""), fields.get("EndTime", "")
        if name is None or fields.get("Nodes") in NOTHING:
            continue
        try:
            nodes = tuple(expand(fields["Nodes"]))
            times = float(int(begin)), float(int(end))
        except (KeyError, ValueError, UsageError) as error:
            raise Garbled(f"reservation {printable(name, 40)} cannot be read: {printable(line, 120)!r}") from error
        found.append(Reservation(name, *times, nodes, "MAINT" in fields.get("Flags", "").split(",")))
    return tuple(found)


def in_the_way(
    known: Sequence[Reservation], own: str, nodes: Sequence[str], needed: int, begin: float, limit_s: float
) -> Reservation | None:
    """Return the first reservation that leaves a job too few nodes for its whole time limit; None without one. Pure.

    ``own``: the reservation in which the job runs; ``nodes``: those that it could get, of which it needs ``needed``;
    ``begin``: when it could start, Unix seconds.
    """
    for one in sorted(known, key=lambda each: each.begin):
        meets = one.end > begin and one.begin < begin + limit_s
        if one.name != own and meets and len(set(nodes) - set(one.nodes)) < needed:
            return one
    return None


def time_that_fits(one: Reservation, begin: float, least_s: float = LEAST_S) -> float | None:
    """Return how long a job can run before a reservation (seconds, whole minutes); None: not worth it. Pure."""
    room_s = (one.begin - begin - MARGIN_S) // 60 * 60
    return room_s if room_s >= least_s else None


def maintenance_of(known: Sequence[Reservation], own: str, nodes: Sequence[str], now: float) -> Reservation | None:
    """Return the next maintenance of any of these nodes. Pure."""
    coming = [one for one in known if one.maintenance and one.name != own and one.begin > now]
    return min((one for one in coming if set(nodes) & set(one.nodes)), key=lambda one: one.begin, default=None)
