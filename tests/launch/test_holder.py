"""Which launch has a run: a process is known by its number, its start and its kernel; from elsewhere by its pulse."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.allocation.placements import Site, SiteMode
from resilio_hpc.launch.chain import run_in_use
from resilio_hpc.launch.rundir import holder, run_claim, run_directory
from resilio_hpc.launch.rundir.holder import Holder
from resilio_hpc.slurm.client.commands import Holding
from tests.support.waiting import PATIENCE_S, until

SHORT_S = 0.05  # for a pulse that stands still
HERE = Site(SiteMode.LOCAL, "local-9-9", ("here",), True)


def is_alive(other: Holder) -> bool | None:
    return holder.lives(other, holder.kernel_here())


def test_a_process_is_its_number_and_its_start_on_this_kernel() -> None:
    me = holder.this_process({})
    assert is_alive(me) is True
    assert is_alive(msgspec.structs.replace(me, born=me.born + 1)) is False  # the number is used again
    assert is_alive(msgspec.structs.replace(me, kernel="another boot")) is None
    assert is_alive(Holder()) is None  # an older version's turn


def test_a_dead_process_and_a_zombie_do_not_live() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        born = until(lambda: holder.born(process.pid), "the process")
        other = msgspec.structs.replace(holder.this_process({}), pid=process.pid, born=born)
        assert is_alive(other) is True
        process.kill()
        until(lambda: is_alive(other) is False, "its end, though nobody has waited for it")


def test_which_run_of_a_job_is_told() -> None:
    assert holder.slurm_part({}) == ""
    assert holder.slurm_part({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "0"}) == "12"
    assert holder.slurm_part({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "2"}) == "12r2"
    assert [run_claim.part_name("12", 0, 1), run_claim.part_name("12", 0, 2), run_claim.part_name("12", 2, 1)] == [
        "12", "12r0.2", "12r2"
    ]  # fmt: skip
    assert [run_claim.job_of(part) for part in ("12", "12r3", "12r0.2", "local-7-8")] == ["12", "12", "12", "local-7-8"]
    assert [run_claim.run_of(part) for part in ("12", "12r3", "12r3.2", "local-7-8")] == [0, 3, 3, 0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_directory.open_run(tmp_path / "run").path


def taken(run: Path, job: str, by: Holder, part: str = "") -> run_claim.Turn:
    turn = run_claim.Turn(1, part or job, job, 1, ("n1",), -1, 1_790_000_000.0, by)
    assert run_claim.take(run, turn)
    found = run_claim.newest(run)[0]
    assert found == turn
    return found


def elsewhere(within: str = "") -> Holder:
    return Holder("far", 4711, "another boot", 5, within)


def no_slurm(_job: str) -> Holding | None:
    return None


def test_a_live_launch_is_named_with_what_to_do(run: Path) -> None:
    last = taken(run, "local-1-1", holder.this_process({}))
    with pytest.raises(UsageError, match=rf"in use: process {os.getpid()} on \S+ has had it since 20\d\d-.*--run-dir"):
        run_in_use.refuse_if_held(run, last, HERE, SHORT_S, no_slurm)


def test_one_that_has_said_how_it_ended_is_over(run: Path) -> None:
    last = taken(run, "local-1-1", holder.this_process({}))
    run_directory.write_verdict(run, last.part, {"verdict": "terminated"})
    run_in_use.refuse_if_held(run, last, HERE, PATIENCE_S, no_slurm)


def test_one_that_was_killed_blocks_nobody(run: Path) -> None:
    me = holder.this_process({})
    last = taken(run, "local-1-1", msgspec.structs.replace(me, born=me.born + 1))
    run_in_use.refuse_if_held(run, last, HERE, PATIENCE_S, no_slurm)


def test_on_another_machine_only_a_pulse_that_moves_is_life(run: Path) -> None:
    last = taken(run, "local-1-1", elsewhere())
    holder.Pulse(holder.pulse_file(run, 1)).tick(0.0)
    run_in_use.refuse_if_held(run, last, HERE, SHORT_S, no_slurm)  # it stands still
    stop = threading.Event()

    def beat() -> None:
        pulse, now = holder.Pulse(holder.pulse_file(run, 1)), 0.0
        while not stop.wait(0.01):
            now += holder.BEAT_S
            pulse.tick(now)

    beats = threading.Thread(target=beat)
    beats.start()
    try:
        with pytest.raises(UsageError, match="process 4711 on far"):
            run_in_use.refuse_if_held(run, last, HERE, PATIENCE_S, no_slurm)
    finally:
        stop.set()
        beats.join()


def test_of_a_job_slurm_is_asked(run: Path) -> None:
    last = taken(run, "12", elsewhere("12"))
    with pytest.raises(UsageError, match=r"job 12, .*scancel 12"):
        run_in_use.refuse_if_held(run, last, HERE, SHORT_S, lambda _job: Holding("n1", ("n1",), "RUNNING"))
    run_in_use.refuse_if_held(run, last, HERE, SHORT_S, lambda _job: Holding("", (), "UNKNOWN"))
    another_job = Site(SiteMode.BATCH, "13", ("n1",), True)
    run_in_use.refuse_if_held(run, last, another_job, PATIENCE_S, no_slurm)  # ``judge`` decides between jobs


def test_a_second_launch_in_the_same_run_of_a_job_is_refused_and_a_requeued_job_is_not(run: Path) -> None:
    last = taken(run, "12", holder.this_process({}))
    with pytest.raises(UsageError, match="job 12"):
        run_in_use.refuse_if_held(run, last, Site(SiteMode.BATCH, "12", ("n1",), True, 0, 2), SHORT_S, no_slurm)
    run_in_use.refuse_if_held(run, last, Site(SiteMode.BATCH, "12", ("n1",), True, 1), PATIENCE_S, no_slurm)


def test_a_pulse_ends_with_its_launch(run: Path) -> None:
    pulse = holder.Pulse(holder.pulse_file(run, 3))
    pulse.tick(0.0)
    assert [turn.number for turn in run_claim.newest(run)] == []  # no turn is made of it
    pulse.end()
    pulse.end()
    assert not holder.pulse_file(run, 3).exists()
