"""``resilio clean``: what it says, for people and for programs, its mistakes, and root's cleaning for all users."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from resilio_hpc.cli import main
from resilio_hpc.cli.clean import CleanReport, LeftLaunch, lines
from resilio_hpc.launch.rundir.directory_locks import LOCK
from resilio_hpc.launch.rundir.stale_directories import IN_USE
from tests.support.launch.private_node import private_node
from tests.support.security.another_user import NOBODY

DEAD = LeftLaunch(
    0, "0dbbcdbf63de", "n1", 412.0, "", {"/dev/shm/resilio-0-57786ed96fa3-bnuu_lxe": 1_060_000_000},
    processes={4711: "sleep"}, segments=["/dev/shm/psm_1234abcd"],
)  # fmt: skip


def test_it_says_what_it_did() -> None:
    used = LeftLaunch(0, kept=IN_USE, directories={"/tmp/resilio-0-x": 5})
    young = LeftLaunch(0, kept="its launch may go on", idle_s=7.0, directories={"/tmp/resilio-0-y": 5000})
    rings = LeftLaunch(0, rings={"/dev/shm/resilio-blocks-0-a": 4096})
    told = lines(CleanReport(False, 1_060_004_096, [DEAD, used, young, rings]))
    assert told == [
        "run 0dbbcdbf63de on n1, silent for 412 s: removed",
        "    1.06 GB  /dev/shm/resilio-0-57786ed96fa3-bnuu_lxe",
        "    process  4711 (sleep)",
        "    segment  /dev/shm/psm_1234abcd",
        "a launch, silent for 7 s: stays",
        "  its launch may go on",
        "       5 kB  /tmp/resilio-0-y",
        "shared blocks of killed processes: removed",
        "     4.1 kB  /dev/shm/resilio-blocks-0-a",
        "freed 1.06 GB: 1 folder, 1 ring, 1 process, 1 segment; 1 folder in use",
    ]
    assert max(map(len, told)) <= 80 and max(map(len, told[:-1])) <= 60
    assert lines(CleanReport(True, 1_060_000_000, [DEAD]))[-1].startswith("would free 1.06 GB: ")
    assert lines(CleanReport(False, 0, [])) == ["nothing to remove"]


def test_hostile_names_are_made_plain() -> None:
    hostile = LeftLaunch(
        0, "\x1b[2J", "\x1b]0;x", 0.0, "", {"/tmp/\x1b[31m": 1}, processes={1: "\x1b"}, failed=["\x1b"]
    )
    assert "\x1b" not in "\n".join(lines(CleanReport(False, 0, [hostile])))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--older", "soon"], "--older: 'soon' is not a number of seconds"),
        (["--older", "-1"], "--older: '-1' is not a number of seconds"),
        (["--older", "nan"], "--older: 'nan' is not a number of seconds"),
        (["/no/such/disk"], "/no/such/disk: No such file or directory"),
        (["/etc/passwd"], "/etc/passwd is not a directory"),
    ],
)
def test_a_mistake_is_told_in_a_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["clean", *words]) == 2
    text = capsys.readouterr().err
    assert said in text and len(text.splitlines()) == 1


def test_links_in_a_circle_are_a_mistake_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "circle").symlink_to("circle")
    assert main.main(["clean", str(tmp_path / "circle")]) == 2
    assert "circle: Too many levels of symbolic links" in capsys.readouterr().err


def test_a_place_where_others_can_rename_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o777)
    assert main.main(["clean", "--dry-run", str(tmp_path)]) == 2
    assert "has no sticky bit: it cannot be cleaned safely" in capsys.readouterr().err


def test_root_cleans_for_all_users_as_each_of_them() -> None:
    with private_node() as node:
        place, precious = node.inside("/tmp"), node.path / "precious"
        precious.mkdir()
        theirs = f"resilio-{NOBODY}-57786ed96fa3-aaaaaaaa"
        for name, owner in {
            theirs: NOBODY,
            f"resilio-{NOBODY}-57786ed96fa3-planted": 0,
            "resilio-0-abcdefgh": 0,
        }.items():
            (place / name).mkdir(mode=0o700)
            (place / name / LOCK).touch(mode=0o600)
            (place / name / "link").symlink_to(precious)
            for path in (place / name / LOCK, place / name):
                os.utime(path, (1, time.time() - 1000))
                os.chown(path, owner, owner)
        clean = (sys.executable, "-m", "resilio_hpc.cli.main", "clean", "--json")
        mine = json.loads(node.run(*clean).stdout)["launches"]
        assert [list(one["directories"]) for one in mine] == [["/tmp/resilio-0-abcdefgh"]]
        assert (place / theirs).exists()
        done = node.run(*clean, "--all-users")
        assert done.returncode == 0, done.stderr
        (one,) = json.loads(done.stdout)["launches"]
        assert (one["user"], list(one["directories"]), one["kept"]) == (NOBODY, [f"/tmp/{theirs}"], "")
        assert [path.name for path in place.iterdir()] == [
            f"resilio-{NOBODY}-57786ed96fa3-planted"
        ]  # the name is theirs, it is not
        assert precious.is_dir()
