"""What Slurm says of our own job while it runs."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

from resilio_hpc.launch.allocation.job_watch import JobView, JobWatch, parse_view
from resilio_hpc.launch.rundir.time_limit import read_end_time, write_end_time
from tests.support.waiting import PATIENCE_S


def test_nodes_and_end_of_this_job_are_read() -> None:
    assert parse_view("7|n[1-2],m3|1795273200|RUNNING\n", "7") == JobView(("n1", "n2", "m3"), 1795273200.0)
    assert parse_view("7|n1|N/A|SUSPENDED\n", "7") == JobView(("n1",), math.inf)


@pytest.mark.parametrize(
    "end", ["2026-11-21T15:00:00", "in 5 hr", "21 Nov 15:00", "", "-1", "1.5", "\u0663", "invalid"]
)
def test_an_end_that_cannot_be_read_is_not_never(end: str) -> None:
    assert parse_view(f"7|n1|{end}|RUNNING\n", "7") == JobView(("n1",), None)


def test_of_an_array_only_our_own_task_counts() -> None:
    assert parse_view("9|n9|N/A|RUNNING\n8|n8|N/A|RUNNING\n7|n1|N/A|RUNNING\n", "7") == JobView(("n1",), math.inf)


def test_no_answer_is_no_view() -> None:
    for text in ("", "\n", "7||1795273200\n", "slurm_load_jobs error", "7|n[1-|N/A"):
        assert parse_view(text, "7") is None


def test_the_last_answer_stands_while_slurm_is_silent_and_a_look_does_not_wait() -> None:
    answers = [JobView(("n1", "n2"), 5.0), None]
    asked, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def ask(job: str) -> JobView | None:
        assert job == "7"
        asked.release()
        go_on.acquire()
        return answers.pop(0)

    watch = JobWatch("7", ask, interval_s=1e6, least_s=0.0)
    watch.start()
    assert asked.acquire(timeout=PATIENCE_S)
    assert watch.view is None
    go_on.release()
    watch.look_now()
    assert asked.acquire(timeout=PATIENCE_S)  # the second question is on its way: the first was answered
    assert (watch.view, watch.answers, watch.answering) == (JobView(("n1", "n2"), 5.0), 1, True)
    watch.close()
    go_on.release()
    watch._thread.join(PATIENCE_S)
    assert not watch._thread.is_alive()
    assert (watch.view, watch.answers, watch.answering) == (JobView(("n1", "n2"), 5.0), 1, False)


def test_a_changed_end_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    assert read_end_time(tmp_path, "7") is None
    write_end_time(tmp_path, "7", 1795280000.25)
    assert read_end_time(tmp_path, "7") == 1795280000.25
    assert read_end_time(tmp_path, "7r1") is None
    write_end_time(tmp_path, "7", None)
    assert read_end_time(tmp_path, "7") == math.inf
    (tmp_path / "links" / "7.end").write_text("soon")
    assert read_end_time(tmp_path, "7") is None


def test_a_job_that_slurm_ends_has_no_new_end() -> None:
    for state in ("COMPLETING", "CANCELLED", "PENDING", ""):
        assert parse_view(f"7|n1|2026-11-21T15:00:00|{state}\n", "7") is None
