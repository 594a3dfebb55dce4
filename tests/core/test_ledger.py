"""The ledger: one file per writer, whole lines, torn ends forgiven."""

from __future__ import annotations

from pathlib import Path

from resilio_hpc.core.ledger import Ledger, read_ledger


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
