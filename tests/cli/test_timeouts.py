"""``resilio timeouts``: limits for people and programs, changes for the controller, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilio_hpc.cli import main
from resilio_hpc.cli.timeouts import lines
from resilio_hpc.core.terminal import plain
from resilio_hpc.launch.rundir import limit_files, run_directory
from resilio_hpc.launch.rundir.limit_files import KeptLimits, LimitOrder
from resilio_hpc.watch.learned_limit import Waits
from resilio_hpc.watch.limit_table import LimitEntry

KEPT = KeptLimits(
    3, 1e9, 6, "p", 0.0,
    (
        LimitEntry("first_step", 60.0, "default"),
        LimitEntry("step", 2.0, "learned", 2.0, Waits(1200, 5000, 0.71, 0.6)),
        LimitEntry("section:evaluation", 600.0, "not learned yet", 10.0, Waits(1, 1, 33.0)),
        LimitEntry("hang", None, "option"),
    ),
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run_directory.open_run(tmp_path / "run")
    limit_files.write_kept(tmp_path / "run", KEPT)
    return tmp_path / "run"


def said(capsys: pytest.CaptureFixture[str], run: Path, *words: str, code: int = 0) -> str:
    assert main.main(["timeouts", str(run), *words]) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_all_limits_and_where_they_come_from(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _, *rows = said(capsys, run).splitlines()
    assert first.startswith(f"limits of {run}, as of 2001-")
    assert [row.split() for row in rows] == [
        ["first_step", "60.0", "s", "default", "-", "-", "-"],
        ["step", "2.00", "s", "learned", "1200", "0.71", "s", "2.00", "s"],
        ["evaluation", "10", "min", "00", "s", "not", "learned", "yet", "1", "33.0", "s", "10.0", "s"],
        ["hang", "never", "option", "-", "-", "-"],
    ]


def test_for_programs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(said(capsys, run, "--set", "step=30", "--json"))
    assert (told["ranks"], told["set"], told["taken"]) == (6, {"step": 30.0}, False)
    assert told["limits"][2] == {
        "name": "evaluation", "section": True, "limit_s": 600.0, "source": "not learned yet", "floor_s": 10.0,
        "waits": 1, "steps": 1, "longest_s": 33.0,
    }  # fmt: skip


def test_changes_add_up_and_are_taken_back(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, run, "--set", "step=30", "--set", "hang=0")
    first = limit_files.read_order(run)
    assert "not taken yet: evaluation 15 min 00 s, hang never, step 30.0 s" in said(
        capsys, run, "--set", "evaluation=900"
    )
    said(capsys, run, "--set", "step=auto", "--set", "section:export=50")
    order = limit_files.read_order(run)
    assert order.limits == {"hang": 0.0, "section:evaluation": 900.0, "section:export": 50.0}
    assert list(order.again) == ["step"]
    assert order.again["step"] == order.time > first.time


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("foo=3", "no such limit; there are first_step, step, call, hang, start, evaluation"),
        ("step", "write NAME=SECONDS"),
        ("=3", "write NAME=SECONDS"),
        ("step=", "auto, or 1 to 10000000 seconds"),
        ("step=0.5", "auto, or 1 to 10000000 seconds"),
        ("step=nan", "auto, or 1 to 10000000 seconds"),
        ("step=1e9", "auto, or 1 to 10000000 seconds"),
        ("hang=-1", "auto, or 0 to 10000000 seconds"),
        ("heartbeat=9", "--heartbeat-timeout"),
        ("section:=9", "1 to 64 printable"),
        ("section:\x1b[2J=9", "1 to 64 printable"),
        ("section:" + "x" * 65 + "=9", "1 to 64 printable"),
    ],
)
def test_mistakes_change_nothing(run: Path, change: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = said(capsys, run, "--set", "step=30", "--set", change, code=2)
    assert words in told
    assert len(told.splitlines()) == 1
    assert limit_files.read_order(run) == LimitOrder()


def test_a_directory_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no run directory" in said(capsys, tmp_path, code=2)


def test_a_run_of_which_nothing_is_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_directory.open_run(tmp_path / "run")
    assert "nothing is learned yet" in said(capsys, tmp_path / "run")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"limits": 3}', b'{"v": 2, "more": 1}', b"\xff", b"[" * 99_999])
def test_damaged_files_count_as_none(run: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    limit_files.kept_file(run).write_bytes(content)
    limit_files.order_file(run).write_bytes(content)
    assert "nothing is learned yet" in said(capsys, run)


def test_files_of_others_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit_files.order_file(run).write_text("{}")
    limit_files.order_file(run).chmod(0o666)
    assert "other users" in said(capsys, run, code=2)


@pytest.mark.parametrize("width", [60, 80])
def test_it_fits(width: int) -> None:
    order = LimitOrder({"section:evaluation": 900.0}, by="a_user_with_a_very_long_name", time=2e9)
    table = [line for line in lines(Path("run"), KEPT, order, width) if line.startswith("  ")]
    assert len(table) == 5
    assert all(len(line) <= width for line in table)
    assert all(line == plain(line) for line in table)
