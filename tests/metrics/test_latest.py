"""The newest samples in the run directory: written whole, read without trust."""

from __future__ import annotations

import json
from pathlib import Path

from resilio_hpc.metrics.latest import every_s, read_all, write
from resilio_hpc.metrics.sheet import Sheet


def sheet() -> Sheet:
    found = Sheet()
    found.put("rank_step", 7, 3)
    found.put("rank_step", 9, 4)
    return found


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, "n2", sheet(), 12.0, "http://127.0.0.1:1/metrics")
    write(tmp_path, "n1", sheet(), 10.0, "")
    first, second = read_all(tmp_path)
    assert (first.node, first.time, first.endpoint) == ("n1", 10.0, "")
    assert (second.node, second.endpoint) == ("n2", "http://127.0.0.1:1/metrics")
    assert sorted(second.each("rank_step")) == [7, 9]
    assert second.values["rank_step{rank=3}"] == 7


def test_damaged_and_hostile_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "n1", sheet(), 10.0, "")
    folder = tmp_path / "metrics"
    evil = {"time": 1.0, "node": "\x1b[31mn0", "endpoint": 7, "values": {"a\n": 1, "b": "x", "c": 1e999, "d": None}}
    (folder / "evil.json").write_text(json.dumps(evil))
    (folder / "torn.json").write_text('{"time": 1.0, "nod')
    (folder / "list.json").write_text("[1]")
    (folder / "untimed.json").write_text('{"node": "n3"}')
    (folder / "folder.json").mkdir()
    (folder / "link.json").symlink_to("/etc/passwd")
    found = {sample.node: sample for sample in read_all(tmp_path)}
    assert set(found) == {"n1", "?[31mn0"}
    assert dict(found["?[31mn0"].values) == {"a ": 1.0}


def test_a_run_without_samples_has_none(tmp_path: Path) -> None:
    assert read_all(tmp_path) == []


def test_many_nodes_write_less_often() -> None:
    assert every_s(10.0, 1) == every_s(10.0, 64) == 10.0
    assert every_s(10.0, 2048) == 320.0
