"""Exactly one part of a run has the turn, however many want it; and damage to the records is no record."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resilio_hpc.launch.chain import handover
from resilio_hpc.launch.rundir import run_claim, run_directory
from resilio_hpc.launch.rundir.run_claim import Turn


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_directory.open_run(tmp_path / "run").path


def turn(number: int, job: str) -> Turn:
    return Turn(number, f"{job}r1", job, 2, ("n1", "n2"), 40, 1.5)


def test_of_many_that_want_a_turn_one_gets_it(run: Path) -> None:
    wanted = [turn(1, str(job)) for job in range(20)]
    with ThreadPoolExecutor(20) as pool:
        won = list(pool.map(lambda wish: run_claim.take(run, wish), wanted))
    assert won.count(True) == 1
    assert run_claim.newest(run) == [wanted[won.index(True)]]


def test_turns_come_back_newest_first(run: Path) -> None:
    assert run_claim.newest(run) == []
    for number in range(1, 12):
        assert run_claim.take(run, turn(number, "7"))
    assert [found.number for found in run_claim.newest(run, 3)] == [11, 10, 9]


@pytest.mark.parametrize("damage", ["", "[]", '{"number": 1}', "\x00", '{"v": 1, "nodes": 3}'])
def test_damage_is_no_record(run: Path, damage: str) -> None:
    (run / "links" / "turn.1.json").write_text(damage)
    (run / "links" / "7.handover.json").write_text(damage)
    assert run_claim.newest(run) == []
    assert handover.read(run, "7") is None


def test_a_damaged_newest_turn_hides_no_older_one(run: Path) -> None:
    run_claim.take(run, turn(1, "7"))
    (run / "links" / "turn.2.json").write_text("")
    assert [found.number for found in run_claim.newest(run)] == [1]
    assert run_claim.next_number(run) == 3
