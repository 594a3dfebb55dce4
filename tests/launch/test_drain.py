"""What is in the spool comes to the run directory once and whole, whoever is killed, and whatever sizes are told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from resilio_hpc.launch.rundir.log_spool import CHUNK_BYTES, HOLE_BYTES, KEPT_BYTES, QUIET_S, REMOVED_AT_ONCE, Drain


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    (tmp_path / "spool" / "ledger").mkdir(parents=True)
    return tmp_path / "spool"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def append(spool: Path, text: bytes, name: str = "ledger/7-n1.jsonl") -> None:
    path = spool / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text)


def ledger(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "ledger").iterdir())}


def test_the_next_child_or_agent_goes_on_where_the_last_one_was_killed(spool: Path, run: Path) -> None:
    append(spool, b"one\ntwo\n")
    assert Drain(spool, run).run() == ""
    append(spool, b"three\n")
    assert Drain(spool, run).run() == ""
    assert ledger(run) == {"7-n1.jsonl": b"one\ntwo\nthree\n"}


def test_a_write_that_a_dead_child_still_had_under_way_doubles_nothing(spool: Path, run: Path) -> None:
    append(spool, b"one\n")
    drain = Drain(spool, run)
    drain.run()
    append(spool, b"two\nthree\n")
    with (run / "ledger" / "7-n1.jsonl").open("ab") as file:
        file.write(b"two\nth")  # arrived though nobody noted it
    drain.run()
    Drain(spool, run).run()
    assert ledger(run) == {"7-n1.jsonl": b"one\ntwo\nthree\n"}


def test_a_size_that_is_told_too_small_does_no_harm(spool: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(spool, b"one\ntwo\n")
    Drain(spool, run).run()
    append(spool, b"three\n")
    true = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((*true(fd)[:6], 2, *true(fd)[7:])))  # an old size
    Drain(spool, run).run()
    assert ledger(run) == {"7-n1.jsonl": b"one\ntwo\nthree\n"}


def test_a_new_spool_continues_no_file_of_an_earlier_one(spool: Path, run: Path) -> None:
    for life in ("first", "second", "third"):
        append(spool, f"{life} begins\n{life} ends\n".encode())
        Drain(spool, run).run()
        for path in spool.parent.glob("spool*"):  # an agent that ends in order leaves nothing
            shutil.rmtree(path)
    assert ledger(run) == {
        "7-n1.jsonl": b"first begins\nfirst ends\n",
        "7-n1.part2.jsonl": b"second begins\nsecond ends\n",
        "7-n1.part3.jsonl": b"third begins\nthird ends\n",
    }


def test_a_disk_that_lost_what_was_copied_hides_nothing_that_comes_later(spool: Path, run: Path) -> None:
    append(spool, b"one\ntwo\nthree\n")
    Drain(spool, run).run()
    (spool / "ledger" / "7-n1.jsonl").write_bytes(b"one\n")  # a power cut
    append(spool, b"four\n")
    Drain(spool, run).run()
    assert ledger(run)["7-n1.part2.jsonl"].endswith(b"four\n")
    assert ledger(run)["7-n1.jsonl"] == b"one\ntwo\nthree\n"


def test_a_file_that_was_removed_from_the_run_directory_is_copied_anew(spool: Path, run: Path) -> None:
    append(spool, b"one\n")
    drain = Drain(spool, run)
    drain.run()
    (run / "ledger" / "7-n1.jsonl").unlink()
    append(spool, b"two\n")
    drain.run()
    assert ledger(run) == {"7-n1.jsonl": b"one\ntwo\n"}


def test_one_file_that_cannot_be_copied_holds_no_other_up_and_is_tried_again(spool: Path, run: Path) -> None:
    for name in ("a", "b/b", "c"):
        append(spool, name[:1].encode() * 100_000, f"logs/{name}")
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "b").write_text("in the way")
    drain = Drain(spool, run)
    assert "b" in drain.run()
    assert {(run / "logs" / name).stat().st_size for name in ("a", "c")} == {100_000}
    (run / "logs" / "b").unlink()
    assert drain.run() == ""
    assert (run / "logs" / "b" / "b").stat().st_size == 100_000


def log(spool: Path, number: int, text: bytes = b"line\n", rank: int = 0) -> Path:
    append(spool, text, f"logs/{number}/n1/{rank}.log")
    return spool / f"logs/{number}/n1/{rank}.log"


def quiet(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (0, path.stat().st_mtime - QUIET_S - 1))


def test_files_of_earlier_rounds_are_removed_when_they_have_arrived(spool: Path, run: Path) -> None:
    append(spool, b"{}\n")
    first, last = log(spool, 3), log(spool, 4)
    drain = Drain(spool, run)
    drain.run()
    assert first.exists()  # it was written a moment ago
    quiet(first, last)
    drain.run()
    assert not (spool / "logs" / "3").exists()
    assert not (spool.with_name("spool-names") / "logs" / "3").exists()
    assert last.exists()
    assert (run / "logs/3/n1/0.log").read_bytes() == b"line\n"
    Drain(spool, run).run()
    assert sorted(path.name for path in run.glob("logs/*/n1/*")) == ["0.log", "0.log"]  # no second part
    assert ledger(run) == {"7-n1.jsonl": b"{}\n"}


def test_a_file_that_a_process_has_open_is_kept_and_what_it_writes_arrives(spool: Path, run: Path) -> None:
    first, _ = log(spool, 3), log(spool, 4)
    drain = Drain(spool, run)
    script = 'exec 3>>"$0"; echo open; read go; echo late >&3'
    with subprocess.Popen(["sh", "-c", script, first], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as late:
        assert late.stdout is not None
        assert late.stdout.readline() == b"open\n"
        drain.run()
        quiet(first)
        drain.run()
        assert first.exists()
        late.communicate(b"go\n")
    drain.run()
    quiet(first)
    drain.run()
    assert not first.exists()
    assert (run / "logs/3/n1/0.log").read_bytes() == b"line\nlate\n"


def test_what_has_not_arrived_is_kept(spool: Path, run: Path) -> None:
    first, second, _ = log(spool, 3), log(spool, 3, rank=1), log(spool, 4)
    drain = Drain(spool, run)
    drain.run()
    quiet(first, second)
    (run / "logs/3/n1/0.log").unlink()  # by a user
    drain.run()
    assert first.exists()
    assert not second.exists()


def test_a_pass_removes_no_more_than_it_can_wait_for(spool: Path, run: Path) -> None:
    logs = [log(spool, 3, rank=rank) for rank in range(REMOVED_AT_ONCE + 3)]
    log(spool, 4)
    drain = Drain(spool, run)
    drain.run()
    quiet(*logs)
    drain.run()
    assert len(list(spool.glob("logs/3/n1/*"))) == 3
    drain.run()
    assert not (spool / "logs" / "3").exists()


def test_a_long_log_that_is_still_written_takes_little_of_the_disk(spool: Path, run: Path) -> None:
    text = os.urandom(HOLE_BYTES + KEPT_BYTES + 5)
    path = log(spool, 0, text)
    drain = Drain(spool, run)
    drain.run()
    assert path.stat().st_blocks * 512 <= KEPT_BYTES + CHUNK_BYTES
    assert path.stat().st_size == len(text)
    log(spool, 0, b"more")
    drain.run()
    copy = run / "logs/0/n1/0.log"
    assert copy.read_bytes() == text + b"more"
    copy.unlink()
    Drain(spool, run).run()  # what is left arrives at its place
    assert copy.stat().st_size == len(text) + 4
    assert copy.read_bytes().endswith(text[-KEPT_BYTES:] + b"more")
    assert copy.stat().st_blocks * 512 <= KEPT_BYTES + CHUNK_BYTES
