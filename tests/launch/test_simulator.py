"""Thousands of seeded schedules of faults: no invariant is broken, every kind of fault strikes, every run ends."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time

import pytest

from tests.support.environments import ROOT, scrubbed
from tests.support.simulator.faults import COMES_OF_IT
from tests.support.simulator.run import run, simulate
from tests.support.simulator.schedule import KINDS, schedule
from tests.support.simulator.search import Found, search, some
from tests.support.simulator.world import SeededWorld
from tests.support.virtual_cluster.invariants import Violation
from tests.support.waiting import PATIENCE_S

QUICK = 10_000
CHUNK = 125
FULL = int(os.environ.get("RESILIO_SIMULATOR_RUNS", "200000"))
FULL_FIRST = 1_000_000 + int(time.time() // 86400 % 5) * FULL  # others than the quick ones; others on the next day


def check(found: Found, count: int) -> None:
    """No invariant broken, and the runs were what they should be."""
    assert [f"seed {outcome.seed}: {outcome.violation}" for outcome in found.violations] == []
    assert found.runs == count
    verdicts = found.verdicts
    assert verdicts["completed"] >= 0.7 * count, "most runs survive what strikes them"
    assert all(verdicts[name] > 0 for name in ("not_enough_nodes", "no_progress", "needs_new_job", "time_limit"))
    assert verdicts["none"] <= 0.08 * count, "only where Slurm ended the job, or every node was lost"


@functools.cache
def some_of_the_quick(first: int) -> Found:
    """A chunk of the quick seeds, played once."""
    found = Found()
    found.take(some(range(first, first + CHUNK)))
    return found


@pytest.fixture(scope="module")
def quick() -> Found:
    """All quick seeds."""
    found = Found()
    for first in range(0, QUICK, CHUNK):
        found.add(some_of_the_quick(first))
    return found


@pytest.mark.parametrize("first", range(0, QUICK, CHUNK))
def test_no_invariant_is_broken_from_seed(first: int) -> None:
    assert [f"seed {one.seed}: {one.violation}" for one in some_of_the_quick(first).violations] == []


def test_thousands_of_schedules_are_what_they_should_be(quick: Found) -> None:
    check(quick, QUICK)


@pytest.mark.parametrize("kind", [*KINDS, *COMES_OF_IT])
def test_every_kind_of_fault_strikes_and_takes_effect(quick: Found, kind: str) -> None:
    assert quick.felt[kind] >= QUICK / 500, quick.felt


@pytest.mark.slow
def test_no_invariant_is_broken_in_this_days_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    began = said = time.monotonic()

    def progress(found: Found) -> None:
        nonlocal said
        if time.monotonic() > said + 60:
            said = time.monotonic()
            with capsys.disabled():
                print(f"{found.runs} of {FULL} runs, {said - began:.0f} s", flush=True)

    check(search(FULL_FIRST, FULL, 1, progress), FULL)


def test_without_faults_every_schedule_completes() -> None:
    verdicts = set()
    for seed in range(40):
        plan = schedule(seed)
        outcome = run(type(plan)(**{**plan.__dict__, "faults": ()}))
        assert outcome.violation == ""
        verdicts.add(outcome.verdict)
    assert verdicts == {"completed"}


def test_a_run_without_an_end_is_a_violation() -> None:
    world = SeededWorld(schedule(1))

    def again() -> None:
        world.after(0.0, again)

    again()
    with pytest.raises(Violation, match="endless"):
        world.advance(world.now + 1.0, 10_000)


def test_a_seed_is_replayed_exactly_in_another_process_with_other_hashes() -> None:
    told = [
        subprocess.run(
            [sys.executable, "-m", "tests.support.simulator", "7"], cwd=ROOT, capture_output=True, check=True,
            env=scrubbed(PYTHONHASHSEED=str(number)), timeout=PATIENCE_S,
        ).stdout.decode()
        for number in (1, 2)
    ]  # fmt: skip
    assert told[0] == told[1]
    assert told[0].splitlines() == list(simulate(7, tell=True).story)
