"""What users put into the spool: reports, and everything else that they might put there. Root reads it unharmed, and
all that follows is a check of its own."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.errors import HealthError, UsageError
from resilio_hpc.prolog_epilog.base import reports
from resilio_hpc.prolog_epilog.base.reports import MOST_BYTES, MOST_FILES, MOST_PER_USER, Report, prepare, take, write
from resilio_hpc.prolog_epilog.daemon.report_intake import LOOK_S, OF_ALL, PER_USER, WINDOW_S, Admission, ReportIntake
from tests.support.security.another_user import NOBODY, as_another_user, needs_root

GOOD = b'{"node":"n1","why":"ECC errors"}'


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    for path in (tmp_path, *tmp_path.parents):  # another user must get here
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    folder = tmp_path / "spool" / "reports"
    prepare(folder)
    return folder


def said(spool: Path, node: str = "n1", now: float | None = None) -> list[tuple[int, str]]:
    return [(one.user, one.why) for one in take(spool, node, time.time() if now is None else now).taken]


def test_a_report_is_taken_once(spool: Path) -> None:
    write(spool, Report(node="n1", why="ECC\nerrors \x1b[31m on GPU 3"))
    assert said(spool) == [(os.geteuid(), "ECC errors ?[31m on GPU 3")]
    assert said(spool) == []
    assert list(spool.iterdir()) == []


@needs_root
def test_anybody_may_report_and_nobody_may_list_or_remove(spool: Path) -> None:
    def hostile() -> list[str]:
        made = [write(spool, Report(node="n1", why="mine"))]
        for act in (
            lambda: list(spool.iterdir()),
            lambda: (spool / roots).unlink(),
            lambda: (spool / roots).rename(spool / "x"),
        ):
            try:
                act()
                made.append("done")
            except OSError as error:
                made.append(type(error).__name__)
        return made

    roots = write(spool, Report(node="n1", why="root's own"))
    assert as_another_user(hostile)[1:] == ["PermissionError"] * 3
    assert sorted(said(spool)) == [(0, "root's own"), (NOBODY, "mine")]  # who reports is the owner, whatever they say


def test_reports_on_other_nodes_wait_for_those_for_a_day(spool: Path) -> None:
    write(spool, Report(node="n2", why="loud fan"))
    assert said(spool, "n1") == []
    assert said(spool, "n2") == [(os.geteuid(), "loud fan")]
    write(spool, Report(node="gone", why="loud fan"))
    assert said(spool, "n1", time.time() + 86_500) == []
    assert list(spool.iterdir()) == []


def link(path: Path) -> None:
    path.symlink_to("/etc/shadow")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def hard_link(path: Path) -> None:
    elsewhere = path.parent.parent / "victim"
    elsewhere.write_bytes(GOOD)
    os.link(elsewhere, path)


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.fspath(path))


def device(path: Path) -> None:
    os.mknod(path, 0o666 | 0o20000, os.makedev(1, 5))  # /dev/zero: never ends


HOSTILE: dict[str, Callable[[Path], object]] = {
    "symbolic link": link,
    "link to itself": link_to_itself,
    "hard link": hard_link,
    "pipe": os.mkfifo,
    "socket": listener,
    "large": lambda path: path.write_bytes(b" " * MOST_BYTES + GOOD),
    "sparse": lambda path: (path.write_bytes(GOOD), os.truncate(path, 1 << 40)),
    "empty": lambda path: path.write_bytes(b""),
    "no JSON": lambda path: path.write_bytes(b"\0\xff" * 100),
    "deep": lambda path: path.write_bytes(b"[" * 4000),
    "a path for a node": lambda path: path.write_bytes(b'{"node":"../../etc","why":"x"}'),
    "all nodes": lambda path: path.write_bytes(b'{"node":["n1"],"why":"x"}'),
    "two words": lambda path: path.write_bytes(b'{"node":"n1 n2","why":"x"}'),
    "more than a report": lambda path: path.write_bytes(b'{"node":"n1","why":"x","drain":true}'),
    "a long why": lambda path: path.write_bytes(b'{"node":"n1","why":"' + b"x" * 2500 + b'"}'),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_report_is_not_read_and_is_removed(spool: Path, what: str) -> None:
    HOSTILE[what](spool / "report")
    write(spool, Report(node="n1", why="a real one"))
    sweep = take(spool, "n1", time.time())
    assert [one.why for one in sweep.taken] == ["a real one"]
    assert len(sweep.refused) == 1
    assert list(spool.iterdir()) == []
    victim = spool.parent / "victim"
    assert not victim.exists() or victim.read_bytes() == GOOD  # of a hard link the name alone is removed


@needs_root
def test_a_device_is_not_opened(spool: Path) -> None:
    device(spool / "report")
    assert "not a regular file" in take(spool, "n1", time.time()).refused[0]


@pytest.mark.parametrize(
    "name", [b"-rf", b"$(reboot)", b"a b\nc", b"\xff\xfe", b"\x1b[2J", b"x" * 255, b"report; drain n1", b"%s%n"]
)
def test_hostile_names_are_names_only(spool: Path, name: bytes) -> None:
    with open(os.fsencode(spool) + b"/" + name, "wb") as file:
        file.write(GOOD)
    with open(os.fsencode(spool) + b"/z" + name[:250], "wb") as file:
        file.write(b"nothing")
    sweep = take(spool, "n1", time.time())
    assert [one.why for one in sweep.taken] == ["ECC errors"]
    assert all(text.isprintable() for text in sweep.refused) and len(sweep.refused) == 1
    assert list(spool.iterdir()) == []


def test_a_report_that_is_still_being_written_waits_and_is_not_kept_for_ever(spool: Path) -> None:
    (spool / ".report-x").write_bytes(GOOD[:10])
    assert take(spool, "n1", time.time()) == reports.Sweep()
    assert [path.name for path in spool.iterdir()] == [".report-x"]
    take(spool, "n1", time.time() + 4000)
    assert list(spool.iterdir()) == []


def test_directories_hide_no_report_and_stay(spool: Path) -> None:
    for number in range(300):
        (spool / f"a{number}").mkdir()
    write(spool, Report(node="n1", why="behind them"))
    assert said(spool) == [(os.geteuid(), "behind them")]


def test_a_flood_is_read_a_part_at_a_time(spool: Path) -> None:
    for number in range(reports.MOST_FILES + 50):
        (spool / f"r{number}").write_bytes(GOOD)
    assert len(said(spool)) == reports.MOST_FILES
    assert len(said(spool)) == 50


@needs_root
def test_one_user_keeps_no_other_users_report_from_being_read(spool: Path) -> None:
    """Well-formed reports on another node, dated in the future, more of them than are read in a turn."""
    count = MOST_PER_USER + 300

    def flood() -> None:
        for number in range(count):
            name = spool / f"report-{number:016x}"
            name.write_bytes(b'{"node":"elsewhere","why":"x"}')
            os.utime(name, (time.time() + 1e8, time.time() + 1e8))

    as_another_user(flood)
    write(spool, Report(node="n1", why="genuine"))
    assert said(spool) == [(0, "genuine")]
    assert len(list(spool.iterdir())) == MOST_PER_USER
    for _ in range(-(-MOST_PER_USER // MOST_FILES)):
        take(spool, "n1", time.time() + 2 * 86_400)
    assert list(spool.iterdir()) == []  # nobody took them: what date their owner gave them does not matter


def test_a_spool_that_is_not_ours_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(HealthError, match="cannot be read"):
        take(tmp_path / "none", "n1", 0.0)
    prepare(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for path in (tmp_path / "link", tmp_path / "open"):
        (tmp_path / "open").mkdir(exist_ok=True)
        (tmp_path / "open").chmod(0o777)  # without the sticky bit anybody exchanges anybody's files
        with pytest.raises(HealthError):
            take(path, "n1", 0.0)
        with pytest.raises(HealthError):
            prepare(path)
    if os.geteuid() == 0:
        os.chown(tmp_path / "real", NOBODY, NOBODY)
        with pytest.raises(HealthError, match=f"belongs to user {NOBODY}"):
            prepare(tmp_path / "real")


def test_without_a_spool_a_user_is_told() -> None:
    with pytest.raises(UsageError, match="no daemon takes reports"):
        write(Path("/nowhere/at/all"), Report(node="n1", why="x"))


# -- how many checks follow ------------------------------------------------------------------------------------------


def test_a_user_gets_a_few_checks_an_hour_and_all_users_together_some_more() -> None:
    admission = Admission()
    assert [admission.admit(7, float(at)) for at in range(10)] == [True] * PER_USER + [False] * (10 - PER_USER)
    assert admission.admit(7, WINDOW_S + 1.0)
    assert sum(Admission().admit(7, 0.0) for _ in range(1)) == 1
    crowd = Admission()
    assert sum(crowd.admit(user, 0.0) for user in range(1000)) == OF_ALL
    assert crowd.admit(1, WINDOW_S + 1.0)


def desk(spool: Path, **more: Any) -> tuple[ReportIntake, list[str]]:
    told: list[str] = []
    return ReportIntake(spool, "n1", told.append, time.time, **more), told


def test_a_report_has_a_check_follow_and_too_many_have_none(spool: Path) -> None:
    made, told = desk(spool)
    assert not made.wanted(0.0)
    answers = []
    for turn in range(1, PER_USER + 3):
        write(spool, Report(node="n1", why="ECC errors"))
        answers.append(made.wanted(LOOK_S * turn))
    assert answers == [True] * PER_USER + [False] * 2
    assert told[0] == f"user {os.geteuid()} reports this node: ECC errors"
    assert "once too often" in told[-1]
    write(spool, Report(node="n1", why="ECC errors"))
    assert not made.wanted(LOOK_S * 5 + 1)  # not looked at in every turn
    assert len(list(spool.iterdir())) == 1


def hang_and_prepare(spool: Path) -> None:
    time.sleep(60)
    prepare(spool)


def test_a_spool_that_hangs_or_is_somebody_elses_is_said_once_and_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    made, told = desk(tmp_path / "open")
    assert not any(made.wanted(LOOK_S * turn) for turn in range(3))
    assert len(told) == 1 and "reports cannot be taken" in told[0]

    hanging, told = desk(tmp_path / "hangs", budget_s=0.05, prepare=hang_and_prepare)
    assert not any(hanging.wanted(LOOK_S * turn) for turn in range(2))
    assert told == [f"{tmp_path / 'hangs'} does not answer"]  # had it been waited for, it would have answered
