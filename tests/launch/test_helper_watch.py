"""Helper processes that somebody has stopped: continued, then killed; ours alone, and those that we stopped not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilio_hpc.launch.process.helper_watch import HelperWatch
from tests.support.waiting import until

LOOK_S, PATIENCE_S = 1.0, 2.0


@contextmanager
def stopped(title: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child with this title, stopped."""
    process = subprocess.Popen([title, "1000"], executable="/bin/sleep")
    try:
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: state(process.pid) == "T", "a stopped child")
        yield process
    finally:
        process.kill()
        process.wait()


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.fixture
def told() -> list[tuple[str, int, str]]:
    return []


def watch(told: list[tuple[str, int, str]], spared: tuple[int, ...] = ()) -> HelperWatch:
    def tell(name: str, pid: int, action: str) -> None:
        told.append((name, pid, action))

    return HelperWatch(tell, lambda: spared, LOOK_S, PATIENCE_S)


def test_it_is_continued_and_replaced_where_that_does_not_help(told: list[tuple[str, int, str]]) -> None:
    watching = watch(told)
    with stopped("resilio_hpc.launch.rundir.io_worker") as helper:
        watching.tick(0.0)
        watching.tick(LOOK_S)
        assert told == []  # Slurm resumes a job's processes one after the other
        watching.tick(PATIENCE_S)
        assert told == [("io_worker", helper.pid, "continued")]
        until(lambda: state(helper.pid) == "S", "it goes on")
        os.kill(helper.pid, signal.SIGSTOP)
        until(lambda: state(helper.pid) == "T", "it is stopped again")
        watching.tick(2 * PATIENCE_S)
        assert told[1:] == [("io_worker", helper.pid, "killed")]
        assert helper.wait() == -signal.SIGKILL


def test_one_that_goes_on_by_itself_is_forgotten(told: list[tuple[str, int, str]]) -> None:
    watching = watch(told)
    with stopped("resilio_hpc.ckpt.saver.saver") as helper:
        watching.tick(0.0)
        os.kill(helper.pid, signal.SIGCONT)
        until(lambda: state(helper.pid) == "S", "it goes on")
        watching.tick(LOOK_S)
        os.kill(helper.pid, signal.SIGSTOP)
        until(lambda: state(helper.pid) == "T", "it is stopped again")
        watching.tick(PATIENCE_S)
        assert told == []


def test_others_and_those_that_we_stopped_are_left_alone(told: list[tuple[str, int, str]]) -> None:
    with stopped("python train.py"), stopped("resilio_hpc.ckpt.saver.saver") as ours:
        watching = watch(told, (ours.pid,))
        for now in range(10):
            watching.tick(float(now))
        assert told == []


def test_a_store_is_watched_below_a_helper_and_no_other_grandchild(
    told: list[tuple[str, int, str]], tmp_path: Path
) -> None:
    """The title of a real store is ``resilio store n1 …``; of a rank, ``resilio rank 0 n1: …``."""
    for name in ("store", "rank 0 n1:", "saver"):
        (tmp_path / name).write_text("read end\n")
    script = """
import subprocess
titles = (["resilio", "store"], ["resilio", "rank 0 n1:"], ["resilio", "saver"])
children = [subprocess.Popen(title, executable="/bin/sh", stdin=subprocess.PIPE) for title in titles]
print(*(child.pid for child in children), flush=True)
input()
for child in children:
    child.kill()
    child.wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as helper:
        assert helper.stdout is not None
        pids = [int(word) for word in helper.stdout.readline().split()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            until(lambda pid=pid: state(pid) == "T", "a stopped grandchild")  # type: ignore[misc]
        watching = watch(told)
        watching.tick(0.0)
        watching.tick(PATIENCE_S)
        assert told == [("store", pids[0], "continued")]
        helper.communicate("\n")
