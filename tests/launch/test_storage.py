"""The storage child, real: hung, killed, full. The agent's side never blocks, and no byte is lost or doubled."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.launch.protocol.vote import EpochRecord
from resilio_hpc.launch.rundir import run_directory
from resilio_hpc.launch.rundir.holder import pulse_file
from resilio_hpc.launch.rundir.io_worker import LOOK_S, DirectoryPresence
from resilio_hpc.launch.rundir.storage import MAX_QUEUED, Storage
from resilio_hpc.launch.rundir.time_limit import read_end_time
from tests.support.waiting import until

RECORD = {"epoch": 1, "node": "n1", "endpoint": "h:1", "job": "7"}


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    return run_directory.open_run(tmp_path / "run").path


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    (tmp_path / "spool" / "ledger").mkdir(parents=True)
    return tmp_path / "spool"


@pytest.fixture
def storage(run_path: Path, spool: Path) -> Iterator[Storage]:
    made = Storage(run_path, spool, "7")
    yield made
    if made._process.poll() is None:
        made._process.send_signal(signal.SIGCONT)
        made.close(5.0)


def child(storage: Storage) -> int:
    return storage._process.pid


def serve_until(storage: Storage, done: Callable[[], bool]) -> None:
    def reached() -> bool:
        if done():
            return True
        full = [] if storage.full_fileno is None else [storage.full_fileno]
        if any(select.select([storage.fileno()], full, [], 0.05)):
            storage.serve()
        return done()

    until(reached, "what the storage child does", poll_s=0.0)


def ask(storage: Storage, operation: str, **arguments: Any) -> dict[str, Any] | None:
    answers: list[dict[str, Any] | None] = []
    storage.request(operation, answers.append, **arguments)
    serve_until(storage, lambda: bool(answers))
    return answers[0]


def test_epochs_verdicts_and_the_past(storage: Storage, run_path: Path) -> None:
    scanned = ask(storage, "scan")
    assert scanned is not None
    assert (scanned["record"], scanned["pulse"], scanned["epoch"]) == (None, None, 0)
    assert (ask(storage, "claim", record=RECORD) or {})["won"] is True
    assert (ask(storage, "claim", record=RECORD | {"node": "n2"}) or {})["won"] is False
    ask(storage, "status", status={"epoch": 1, "pulse": 5})
    scanned = ask(storage, "scan") or {}
    assert (scanned["record"], scanned["pulse"]) == (RECORD, 5)
    past = ask(storage, "past") or {}
    assert (past["steps"], past["last_round"], past["verdict"], past["epoch"]) == ([], -1, None, 1)
    ask(storage, "verdict", verdict={"verdict": "completed", "exit_code": 0, "epoch": 1})
    assert (ask(storage, "past") or {})["verdict"] == ["completed", 0]


def test_a_controller_that_was_superseded_writes_nothing(storage: Storage, run_path: Path) -> None:
    for epoch in (1, 2):
        run_directory.claim_epoch(run_path, EpochRecord(epoch, f"n{epoch}", "h:1", "7"))
    ask(storage, "status", status={"epoch": 2, "pulse": 1})
    assert (ask(storage, "status", status={"epoch": 1, "pulse": 9}) or {})["epoch"] == 2
    assert (ask(storage, "verdict", verdict={"verdict": "no_progress", "exit_code": 1, "epoch": 1}) or {})["epoch"] == 2
    assert run_directory.read_pulse(run_path, 2) == 1
    assert run_directory.read_verdict(run_path, "7") is None


def test_what_cannot_be_done_is_answered_with_none(storage: Storage, run_path: Path) -> None:
    assert ask(storage, "no such thing") is None
    (run_path / "epoch.5").write_text("torn{")
    assert ask(storage, "scan") is None


def test_a_hung_child_does_not_block_and_answers_when_it_wakes(storage: Storage) -> None:
    ask(storage, "scan")
    os.kill(child(storage), signal.SIGSTOP)
    answers: list[dict[str, Any] | None] = []
    for _ in range(200):  # a call that waited for the child would never return
        storage.request("status", answers.append, status={"epoch": 1, "pulse": 1, "filler": "x" * 5000})
    replaced = len(answers)
    assert replaced > 100  # the pipe is full, and of what waits only the newest counts
    assert set(map(type, answers)) == {type(None)}
    os.kill(child(storage), signal.SIGCONT)
    serve_until(storage, lambda: len(answers) == 200)
    assert sum(answer is not None for answer in answers) == 200 - replaced
    assert ask(storage, "scan") is not None  # the stream is sound


def test_a_status_larger_than_the_pipe_fails_nothing_else(storage: Storage, run_path: Path) -> None:
    ask(storage, "scan")
    os.kill(child(storage), signal.SIGSTOP)
    statuses: list[dict[str, Any] | None] = []
    answers: list[dict[str, Any] | None] = []
    for pulse in range(5):
        storage.request("status", statuses.append, status={"epoch": 1, "pulse": pulse, "filler": "x" * 1_000_000})
    assert statuses == [None] * 3  # the first is on its way, the last is the newest
    storage.request("claim", answers.append, record=RECORD)
    storage.request("past", answers.append)
    storage.request("verdict", answers.append, verdict={"verdict": "completed", "exit_code": 0, "epoch": 1})
    assert answers == []
    os.kill(child(storage), signal.SIGCONT)
    serve_until(storage, lambda: len(answers) == 3 and len(statuses) == 5)
    assert [answer is not None for answer in answers + statuses[3:]] == [True] * 5
    assert run_directory.read_pulse(run_path, 1) == 4
    assert storage.full_fileno is None


def test_only_so_much_waits_for_a_child_that_hangs(storage: Storage) -> None:
    ask(storage, "scan")
    os.kill(child(storage), signal.SIGSTOP)
    storage.request("status", status={"epoch": 1, "pulse": 1, "filler": "x" * 1_000_000})
    answers: list[dict[str, Any] | None] = []
    for _ in range(MAX_QUEUED + 3):
        storage.request("scan", answers.append)
    assert answers == [None] * 3
    os.kill(child(storage), signal.SIGCONT)
    serve_until(storage, lambda: len(answers) == MAX_QUEUED + 3)
    assert None not in answers[3:]


def test_a_killed_child_is_replaced_and_its_requests_fail(storage: Storage) -> None:
    ask(storage, "scan")
    first = child(storage)
    os.kill(first, signal.SIGSTOP)
    answers: list[dict[str, Any] | None] = []
    for _ in range(3):
        storage.request("scan", answers.append)
    os.kill(first, signal.SIGKILL)
    serve_until(storage, lambda: len(answers) == 3)
    assert answers == [None, None, None]
    assert ask(storage, "scan") is not None
    assert child(storage) != first


def test_logs_arrive_whole_and_once_though_the_child_is_killed(storage: Storage, spool: Path, run_path: Path) -> None:
    log = spool / "logs" / "0" / "n1" / "0.log"
    log.parent.mkdir(parents=True)
    target = run_path / "logs" / "0" / "n1" / "0.log"
    written = b""
    with log.open("ab", buffering=0) as file:
        for number in range(40):
            line = f"{number} ".encode() * 20_000
            file.write(line)
            written += line
            if number % 10 == 5:
                serve_until(storage, lambda: target.exists() and target.stat().st_size > 0)
                first = child(storage)
                os.kill(first, signal.SIGKILL)
                serve_until(storage, lambda first=first: child(storage) != first)  # type: ignore[misc]
    assert storage.close(10.0)
    assert target.read_bytes() == written


def test_what_a_supervisor_asks_for(storage: Storage, run_path: Path) -> None:
    run_directory.expect_verdict(run_path, "7")
    look = ask(storage, "look") or {}
    assert (look["ended"], look["status"]) == (None, None)
    ask(storage, "status", status={"epoch": 1, "pulse": 5})
    ask(storage, "verdict", verdict={"verdict": "completed", "exit_code": 0, "epoch": 1})
    look = ask(storage, "look") or {}
    assert (look["ended"]["verdict"], look["status"]["pulse"]) == ("completed", 5)
    assert ask(storage, "move_end", job="7", end_time=5.0) is not None
    assert read_end_time(run_path, "7") == 5.0


def test_a_run_directory_that_was_removed_is_told_from_one_that_fails(run_path: Path) -> None:
    run_id = run_directory.read_run(run_path).run_id
    presence = DirectoryPresence(run_path, run_id, gone_s=3.0)
    assert not presence.is_gone(0.0)
    away = run_path.rename(run_path.with_name("away"))
    assert [presence.is_gone(now) for now in (LOOK_S, LOOK_S + 1, LOOK_S + 3)] == [False, False, True]
    away.rename(run_path)
    assert not presence.is_gone(LOOK_S + 3 + LOOK_S)
    (run_path / "run.json").write_text("torn")
    assert [presence.is_gone(now) for now in (20.0, 30.0)] == [False, False]
    (run_path / "run.json").write_text('{"version": 1, "run_id": "another"}')
    assert [presence.is_gone(now) for now in (40.0, 50.0)] == [False, True]


def test_life_is_shown_by_every_child_until_the_end(storage: Storage, run_path: Path) -> None:
    storage.show_life(3)
    beats = pulse_file(run_path, 3)
    until(beats.exists, "a pulse")
    os.kill(child(storage), signal.SIGKILL)
    before = child(storage)
    serve_until(storage, lambda: child(storage) != before)
    beats.unlink()
    until(beats.exists, "the next child's pulse")
    assert storage.close(10.0)
    assert not beats.exists()
