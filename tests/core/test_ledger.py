"""The ledger: whole lines in, whole lines out, whatever else is in the directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from resilio_hpc.core.ledger import MAX_LINE_BYTES, Ledger, LedgerReader, parse_event, read_ledger


def line(**fields: object) -> str:
    return json.dumps({"v": 1, "time": 1.0, "writer": "w", "event": "round", **fields})


def test_events_of_all_writers_come_by_time(tmp_path: Path) -> None:
    for writer, at in (("b", 2.0), ("a", 3.0), ("c", 1.0)):
        Ledger(tmp_path, writer, clock=lambda at=at: at).append("agent", node=writer)
    assert [(e.writer, e.fields["node"]) for e in read_ledger(tmp_path)] == [("c", "c"), ("b", "b"), ("a", "a")]


def test_a_reader_gives_each_event_once_and_half_a_line_when_it_is_whole(tmp_path: Path) -> None:
    ledger, reader = Ledger(tmp_path, "a"), LedgerReader(tmp_path)
    ledger.append("agent")
    assert [e.kind for e in reader.read_new()] == ["agent"]
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(line()[:20])
        file.flush()
        assert reader.read_new() == []
        file.write(line()[20:] + "\n")
    Ledger(tmp_path, "new").append("controller")
    assert sorted(e.kind for e in reader.read_new()) == ["controller", "round"]
    assert reader.read_new() == []


@pytest.mark.parametrize(
    "torn",
    [
        "", "{", line()[:-5], "[]", "7", "null", '"x"', "\x00" * 50, "[" * 100_000, line(time="now"), line(time=None),
        line(time=True), line(event=7), line(event=""), line().replace("1.0", "NaN"), line().replace("1.0", "9" * 5000),
        line().replace("1.0", "1e999"), '{"event": "round"}',
    ],
)  # fmt: skip
def test_what_is_no_event_is_skipped(tmp_path: Path, torn: str) -> None:
    (tmp_path / "a.jsonl").write_text(f"{line()}\n{torn}\n{line(event='verdict')}\n")
    assert [e.kind for e in read_ledger(tmp_path)] == ["round", "verdict"]


def test_bytes_that_are_no_text_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe{}\n" + line().encode() + b"\n")
    assert len(read_ledger(tmp_path)) == 1


def test_a_line_beyond_all_measure_does_not_fill_memory_nor_hide_the_next(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line(x="y" * (3 * MAX_LINE_BYTES)) + "\n" + line(event="verdict") + "\n")
    assert [e.kind for e in read_ledger(tmp_path)] == ["verdict"]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "nowhere.jsonl").symlink_to("gone")
    (tmp_path / "notes.txt").write_text(line() + "\n")
    (tmp_path / "a.jsonl").write_text(line() + "\n")
    assert len(read_ledger(tmp_path)) == 1
    assert read_ledger(tmp_path / "none") == []


def test_an_event_keeps_fields_that_this_version_does_not_know() -> None:
    event = parse_event(line(later=[1]))
    assert event is not None and event.fields == {"v": 1, "later": [1]}
