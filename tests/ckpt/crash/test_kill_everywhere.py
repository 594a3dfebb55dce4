"""Whoever is killed at whichever I/O call: the next life finds the former step or the new one, whole."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.crash.harm import Harmed
from tests.support.requirements import need_program

CHANGING = (
    "open,openat,creat,write,writev,pwrite64,pwritev,pwritev2,sendfile,copy_file_range,splice,fsync,fdatasync,sync,"
    "syncfs,sync_file_range,ftruncate,truncate,fallocate,flock,fchmod,fchmodat,chmod,fchown,chown,lchown,fchownat,"
    "utimensat,utime,utimes,futimesat,mkdir,mkdirat,mknod,mknodat,rmdir,unlink,unlinkat,symlink,symlinkat,link,linkat,"
    "rename,renameat,renameat2,setxattr,fsetxattr,io_uring_enter,io_submit"
)
NAMES = {
    "pwrite64": "pwrite",
    "openat": "open",
    "unlinkat": "unlink",
    "renameat": "rename",
    "renameat2": "exchange",
    "io_uring_enter": "uring",
}


SCENARIOS = ("alone", "by disk", "rank 0", "rank 1", "saver", "prune")


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_any_call_of_a_save_leaves_a_whole_step_and_a_directory_that_goes_on(
    scenario: str, every: int, harmed: Harmed
) -> None:
    """At every eighth call in the quick tests."""
    found = harmed("kill_everywhere.py", scenario, SHIM_EVERY=str(every))
    former, new = ("6", "7") if scenario == "prune" else ("1", "2")
    assert set(found["left"]) == {former, new}
    assert every > 1 or found["calls"]["uring"] >= 1
    assert sum(found["left"].values()) == sum(found["calls"].values()) > 20 / every


@pytest.mark.parametrize("every", [15, pytest.param(1, marks=pytest.mark.slow)])
def test_a_saver_process_that_is_killed_at_a_call_leaves_a_whole_step(every: int, harmed: Harmed) -> None:
    assert set(harmed("kill_everywhere.py", "saver alone", SHIM_EVERY=str(every))["left"]) == {"1", "2"}


@pytest.mark.parametrize("every", [15, pytest.param(1, marks=pytest.mark.slow)])
def test_a_saver_whose_process_is_killed_at_a_call_of_it_commits_the_step(every: int, harmed: Harmed) -> None:
    assert set(harmed("kill_everywhere.py", "orphan", SHIM_EVERY=str(every))["left"]) == {"2"}


def test_a_kill_while_checkpoint_h5_is_made_leaves_the_former_one_or_the_new_one(harmed: Harmed) -> None:
    assert set(harmed("kill_everywhere.py", "view")["left"]) == {"1", "2"}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["alone", "saver"])
def test_it_is_so_without_io_uring_too(scenario: str, harmed: Harmed) -> None:
    found = harmed("kill_everywhere.py", scenario, SHIM_NO_IO_URING="1")
    assert set(found["left"]) == {"1", "2"}
    assert "uring" not in found["calls"]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["arenas", "arenas on disk"])
def test_a_kill_at_any_call_on_its_arenas_leaves_a_rank_the_last_whole_snapshot(
    where: str, every: int, harmed: Harmed
) -> None:
    """At every fourth call in the quick tests."""
    found = harmed("kill_everywhere.py", where, SHIM_EVERY=str(every))
    assert set(found["left"]) == set("01234567")
    assert every > 1 or found["calls"]["ftruncate" if where == "arenas" else "symlink"] >= 2


def test_the_shim_misses_no_call_that_changes_anything(harmed: Harmed, shm: Path, tmp_path: Path) -> None:
    """The kernel's own view: strace lists every call that can change a file system, CHANGING, in the same saves.

    Files that are mapped are not among them: checkpoints are never written so. Arenas are, and killed at random
    instants by ``kill_loop.py``.
    """
    need_program("strace", package="strace")
    trace = tmp_path / "trace"
    found = harmed(
        "kill_everywhere.py", "recorded", prefix=("strace", "-f", "-y", "-o", str(trace), f"-etrace={CHANGING}")
    )
    work, seen = re.compile(re.escape(str(shm / "work")) + '[/>"]'), Counter[str]()
    for line in trace.read_text().splitlines():
        call = re.match(r"\d+ +(\w+)\((.*)", line)
        if call is None or (call[1] != "io_uring_enter" and not work.search(call[2])):
            continue
        name = NAMES.get(call[1], call[1])
        if name == "open" and "O_CREAT" not in line and "O_TRUNC" not in line:
            continue
        if name == "exchange" and "RENAME_EXCHANGE" not in line:
            name = "rename"
        if name == "unlink" and "AT_REMOVEDIR" in line:
            name = "rmdir"
        if name == "fdatasync":
            name = "fsync"
        if name == "uring" and re.search(r">?, 0, 1, IORING_ENTER_GETEVENTS", line):
            continue  # waits for what was submitted before
        seen[name] += 1
    assert seen == found["calls"]
