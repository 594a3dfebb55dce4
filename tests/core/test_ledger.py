"""The ledger: one file per writer, whole lines, torn ends forgiven."""

from __future__ import annotations

from pathlib import Path

from resilio_hpc.core.ledger import MAX_LINE_BYTES, Event, Ledger, LedgerReader, read_ledger


def test_events_of_all_writers_come_back_by_time(tmp_path: Path) -> None:
    for writer, start in (("a", 1.0), ("b", 0.5)):
        clock = iter([start, start + 1])
        ledger = Ledger(tmp_path, writer, lambda clock=clock: next(clock))  # type: ignore[misc]
        ledger.append("first", n=1)
        ledger.append("second", text="ünï\ncode", nothing=None)
        ledger.close()
    events = read_ledger(tmp_path)
    assert [(event.writer, event.kind) for event in events] == [
        ("b", "first"), ("a", "first"), ("b", "second"), ("a", "second"),
    ]  # fmt: skip
    assert events[-1].fields["text"] == "ünï\ncode"


def test_a_torn_line_is_skipped_and_the_rest_is_read(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "a")
    ledger.append("kept")
    ledger.close()
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b'{"v":1,"time":12.0,"writer":"a","ev')
    assert [event.kind for event in read_ledger(tmp_path)] == ["kept"]


def test_lines_that_are_not_ours_are_skipped(tmp_path: Path) -> None:
    lines = ["[]", "12", "null", '{"time": 1}', '{"time":"x","writer":"a","event":"odd"}', "\x00\xff", ""]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    ledger = Ledger(tmp_path, "a", lambda: 2.0)
    ledger.append("kept")
    assert [event.kind for event in read_ledger(tmp_path)] == ["kept"]


def test_a_second_life_of_a_writer_appends(tmp_path: Path) -> None:
    for life in range(2):
        ledger = Ledger(tmp_path, "a", lambda life=life: float(life))  # type: ignore[misc]
        ledger.append("life", number=life)
        ledger.close()
    assert [event.fields["number"] for event in read_ledger(tmp_path)] == [0, 1]


HARD = [
    b'{"time":1,"writer":"a","event":"one"}', b"",
    b'{"time":2,"writer":"a","event" : "two","text":"\\"event\\":\\"one\\""}',
    b"x" * (2 * MAX_LINE_BYTES + 5), b'{"time":3,"writer":"a","event":"one","event":"two"}', b"\xff\x00",
    b'{"time":4,"writer":"a","event":"three","of":{"event":"one"}}', b'{"time":5,"writer":"a","event":"one"}',
    b'{"time":6,"event":"o', b'{"time":7,"writer":"a","event":"two"}',
]  # fmt: skip


def places(events: list[Event]) -> list[tuple[str, str, int]]:
    return [(event.kind, event.file, event.line) for event in events]


def test_each_event_knows_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(HARD) + b'\n{"time":8,"writer":"a","event":"torn"')
    expected = [("one", 1), ("two", 3), ("two", 5), ("three", 7), ("one", 8), ("two", 10)]
    assert places(read_ledger(tmp_path)) == [(kind, "a.jsonl", line) for kind, line in expected]


def test_events_of_some_kinds_and_the_last_are_those_of_all_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(HARD) + b"\n")
    every = places(read_ledger(tmp_path))
    for kinds in ({"one"}, {"two"}, {"one", "two"}, {"thre"}, {"o", "three"}):
        assert places(read_ledger(tmp_path, kinds)) == [one for one in every if one[0] in kinds or one == every[-1]]


def test_lines_are_counted_as_a_file_grows(tmp_path: Path) -> None:
    whole = b"\n".join(HARD) + b"\n"
    for kinds in (None, {"one", "two"}):
        path, reader, found = tmp_path / "a.jsonl", LedgerReader(tmp_path, kinds), list[Event]()
        path.write_bytes(b"")
        for begin in range(0, len(whole), 150_011):
            with path.open("ab") as file:
                file.write(whole[begin : begin + 150_011])
            found += reader.read_new()
        whole_kinds = kinds or {"one", "two", "three"}
        assert [one for one in places(found) if one[0] in whole_kinds] == [
            one for one in places(read_ledger(tmp_path)) if one[0] in whole_kinds
        ]
