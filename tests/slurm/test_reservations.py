"""Which reservation is in a job's way, and for how long the job could run before it."""

from __future__ import annotations

import pytest

from resilio_hpc.slurm.client.answers import Garbled
from resilio_hpc.slurm.client.reservations import (
    Reservation,
    in_the_way,
    maintenance_of,
    parse_reservations,
    time_that_fits,
)

# scontrol -o show reservation with SLURM_TIME_FORMAT=%s: 22.05.8 and 26.05.5
PRINTED = """\
ReservationName=fix StartTime=1795370738 EndTime=1795377938 Duration=02:00:00 Nodes=n[1-4] NodeCnt=4 CoreCnt=16 \
Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES,ALL_NODES TRES=cpu=16 Users=root Groups=(null) \
Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)
ReservationName=two StartTime=1795380000 EndTime=1795383600 Duration=01:00:00 Nodes=n1 NodeCnt=1 CoreCnt=4 \
Features=(null) PartitionName=(null) Flags=SPEC_NODES TRES=cpu=4 AllowedPartitions=(null) QOS=(null) Users=root,user
ReservationName=licenses StartTime=1795380000 EndTime=1795383600 Nodes=(null) NodeCnt=0 Flags=ANY_NODES
"""
FIX = Reservation("fix", 10_000.0, 20_000.0, ("n1", "n2"), maintenance=True)
ALL = ("n1", "n2", "n3")


def test_what_both_versions_print() -> None:
    fix, two = parse_reservations(PRINTED)
    assert fix == Reservation("fix", 1795370738.0, 1795377938.0, ("n1", "n2", "n3", "n4"), maintenance=True)
    assert (two.name, two.nodes, two.maintenance) == ("two", ("n1",), False)
    assert parse_reservations("No reservations in the system\n") == ()


@pytest.mark.parametrize(
    "torn", ["StartTime=2026-11-22T18 EndTime=179 Nodes=n1", "StartTime=178 EndTime=179 Nodes=n[", "StartTime=178"]
)
def test_a_reservation_that_cannot_be_read_is_not_none(torn: str) -> None:
    with pytest.raises(Garbled, match="reservation torn"):
        parse_reservations(PRINTED + f"ReservationName=torn {torn}\n")


@pytest.mark.parametrize(
    ("needed", "begin", "limit_s", "own", "blocked"),
    [
        (2, 5000.0, 5001.0, "", True),
        (2, 5000.0, 5000.0, "", False),  # over in time
        (1, 5000.0, 9000.0, "", False),  # n3 is left
        (2, 15_000.0, 60.0, "", True),  # it has begun
        (2, 20_000.0, 9000.0, "", False),  # it is over
        (2, 5000.0, float("inf"), "", True),  # no time limit
        (2, 5000.0, 9000.0, "fix", False),  # the job's own
    ],
)
def test_in_the_way(needed: int, begin: float, limit_s: float, own: str, blocked: bool) -> None:
    assert in_the_way([FIX], own, ALL, needed, begin, limit_s) == (FIX if blocked else None)


def test_what_fits_is_whole_minutes_with_a_margin_and_worth_it() -> None:
    assert time_that_fits(FIX, 8000.0) == 1920.0  # of 2000: 32 minutes
    assert time_that_fits(FIX, 9341.0) is None
    assert time_that_fits(FIX, 9340.0) == 600.0
    assert time_that_fits(FIX, 15_000.0) is None


def test_the_next_maintenance_of_a_jobs_nodes() -> None:
    other = Reservation("other", 5000.0, 6000.0, ("n3",), maintenance=True)
    known = [FIX, other, Reservation("users", 1000.0, 2000.0, ALL)]
    assert maintenance_of(known, "", ["n1"], 0.0) == FIX
    assert maintenance_of(known, "", ["n1", "n3"], 0.0) == other
    assert maintenance_of(known, "fix", ["n1"], 0.0) is None
    assert maintenance_of(known, "", ["n1"], 10_000.0) is None
