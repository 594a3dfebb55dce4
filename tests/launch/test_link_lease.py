"""A new job waits for the old one's lease exactly when it must; an old lease ends when nobody renews it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from resilio_hpc.core.errors import LaunchError
from resilio_hpc.launch.chain.fencing import (
    EPOCHS,
    LIMIT_S,
    Seen,
    last_agents,
    last_pulse,
    take_epoch,
    unconfirmed_nodes,
    wait_for_predecessor,
)
from resilio_hpc.launch.protocol.job_lease import JOB_LEASE_S, JobLease
from resilio_hpc.launch.protocol.vote import EpochRecord
from resilio_hpc.launch.rundir import run_directory
from resilio_hpc.launch.rundir.run_claim import Turn

BEAT_S = 10.0
BEFORE = Turn(1, "7", "7", 1, ("n1", "n2"), -1, 0.0)
FREE = {"n1": "IDLE", "n2": "ALLOCATED"}
CUT = {"n1": "IDLE", "n2": "DOWN+NOT_RESPONDING"}


class Times:
    """A clock that only sleeping moves, and what is seen at each time."""

    def __init__(
        self, states: Mapping[str, str] | None, pulses: Mapping[float, int] | None = None, agents: tuple[str, ...] = ()
    ) -> None:
        self.agents = agents
        self.now = 1000.0
        self.states = states
        self.pulses = {0.0: 5, **(pulses or {})}
        self.said: list[str] = []
        self.clears_at = float("inf")
        self.runs_until = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def look(self, _run: Path, before: Turn) -> Seen:
        assert before == BEFORE
        waited = self.now - 1000.0
        pulse = max(moment for moment in self.pulses if moment <= waited)
        return Seen(
            FREE if waited >= self.clears_at else self.states, self.pulses[pulse], self.agents, waited < self.runs_until
        )

    def wait(self, run: Path, ended: bool = False, other_job: bool = True) -> float:
        return wait_for_predecessor(
            run, BEFORE, BEAT_S, self.said.append, ended, other_job, self.look, self.clock, self.sleep
        )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_directory.open_run(tmp_path / "run").path


def test_nodes_that_slurm_has_cleared_are_waited_for_shortly(run: Path) -> None:
    times = Times(FREE)
    assert times.wait(run) == BEAT_S
    assert times.said == []


@pytest.mark.parametrize("states", [CUT, None, {"n1": "IDLE"}, {"n1": "IDLE", "n2": "IDLE+COMPLETING"}])
def test_a_node_that_may_still_run_is_waited_for_as_long_as_its_lease(run: Path, states: dict[str, str] | None) -> None:
    times = Times(states)
    assert times.wait(run) == JOB_LEASE_S + BEAT_S
    assert len(times.said) == 1
    assert "n2" in times.said[0]


def test_the_wait_counts_from_the_last_beat_of_the_old_pulse(run: Path) -> None:
    assert Times(CUT, {20.0: 6, 33.0: 7}).wait(run) == 33.0 + JOB_LEASE_S + BEAT_S


def test_the_wait_ends_early_when_slurm_clears_the_nodes(run: Path) -> None:
    times = Times(CUT)
    times.clears_at = 25.0
    assert times.wait(run) == 25.0


def test_an_old_controller_that_does_not_stop_is_an_error_that_names_its_nodes(run: Path) -> None:
    times = Times(CUT, {float(second): second for second in range(1, int(LIMIT_S) + 10)})
    with pytest.raises(LaunchError, match="n1, n2"):
        times.wait(run)


def test_every_part_takes_an_epoch_of_its_own(run: Path) -> None:
    assert [take_epoch(run, part) for part in ("7", "7", "8")] == [0, EPOCHS, 2 * EPOCHS]
    newest = run_directory.newest_epoch(run)
    assert newest is not None
    assert newest.epoch == 2 * EPOCHS
    assert newest.job not in ("7", "8")  # agents of neither part follow it


def test_a_job_that_runs_after_all_is_waited_for_though_its_pulse_stands_still(run: Path) -> None:
    """Slurm did not answer when it was judged; its run directory hangs, so it leads by Slurm's word alone."""
    times = Times(FREE)
    times.runs_until = 200.0
    assert times.wait(run) == 200.0 + BEAT_S
    assert times.wait(run, other_job=False) == BEAT_S  # ourselves, requeued
    times.runs_until = 10 * LIMIT_S
    with pytest.raises(LaunchError, match="7 still runs"):
        times.wait(run)


def test_epochs_that_were_elected_and_not_recorded_are_outranked(run: Path) -> None:
    run_directory.claim_epoch(run, EpochRecord(3, "n1", "10.0.0.1:5", "7"))
    take_epoch(run, "8")
    assert not run_directory.claim_epoch(run, EpochRecord(EPOCHS, "n2", "10.0.0.2:5", "7"))
    run_directory.claim_epoch(run, EpochRecord(6, "n2", "10.0.0.2:5", "7"))  # the old side's directory answers again
    newest = run_directory.newest_epoch(run)
    assert newest is not None
    assert newest.epoch == EPOCHS


@pytest.mark.parametrize(("states", "waits_s"), [(FREE, 0.0), (CUT, BEAT_S), (None, BEAT_S)])
def test_after_a_verdict_only_nodes_that_may_not_have_heard_it_are_waited_for(
    run: Path, states: dict[str, str] | None, waits_s: float
) -> None:
    times = Times(states, {1.0: 6, 2.0: 7})
    assert times.wait(run, ended=True) == waits_s
    assert times.said == []


def test_nodes_of_other_jobs_that_had_joined_are_waited_for_since_slurm_says_nothing_of_them(run: Path) -> None:
    times = Times(FREE, agents=("n1", "n7"))
    assert times.wait(run) == JOB_LEASE_S + BEAT_S
    assert "n7" in times.said[0]
    assert "n1," not in times.said[0]


@pytest.mark.parametrize(
    ("state", "free"),
    [
        ("IDLE", True), ("MIXED+DRAIN", True), ("ALLOCATED", True), ("IDLE+POWERED_DOWN", True), ("RESERVED", True),
        ("DOWN", False), ("DOWN+DRAIN", False), ("IDLE*", False), ("ALLOCATED+COMPLETING", False), ("FAILING", False),
        ("UNKNOWN", False), ("IDLE+POWERING_DOWN", False), ("DOWN+POWERED_DOWN", True), ("IDLE+NOT_RESPONDING", False),
    ],
)  # fmt: skip
def test_which_nodes_are_known_to_be_free(state: str, free: bool) -> None:
    assert (unconfirmed_nodes(["n1"], {"n1": state}) == ()) is free


def test_a_lease_counts_from_the_question_and_never_shrinks() -> None:
    lease = JobLease(now=0.0)
    assert not lease.expired(JOB_LEASE_S - 0.1)
    lease.pulse_written(asked=30.0)
    lease.slurm_says_running(asked=10.0)  # a late answer to an older question
    assert not lease.expired(30.0 + JOB_LEASE_S - 0.1)
    assert lease.expired(30.0 + JOB_LEASE_S)
    lease.slurm_says_running(asked=100.0)
    assert lease.ends_in_s(now=110.0) == JOB_LEASE_S - 10.0


def test_the_new_job_waits_longer_than_any_old_lease_lasts(run: Path) -> None:
    """The old side counts from its last beat at the latest; the new side sees that beat, or an earlier one."""
    lease = JobLease(now=0.0)
    lease.pulse_written(asked=33.0)
    assert lease.expired(Times(CUT, {33.0: 6}).wait(run))


def test_the_pulse_is_read_and_damage_is_none(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"epoch": 3, "pulse": 9, "agents": {"n1": {}, "n2": {}}}))
    assert last_pulse(tmp_path) == (3, 9)
    assert last_agents(tmp_path) == ("n1", "n2")
    for damage in ("", "{}", "[]"):
        (tmp_path / "status.json").write_text(damage)
        assert last_pulse(tmp_path) is None
        assert last_agents(tmp_path) == ()
