"""A watch on a directory: woken by writes, not by what is mapped, and without the kernel's help not in the way."""

from __future__ import annotations

import select
from pathlib import Path

import pytest

from resilio_hpc.core import directory_watch
from resilio_hpc.core.directory_watch import DirectoryWatch


def test_a_write_wakes(tmp_path: Path) -> None:
    watch = DirectoryWatch(tmp_path)
    assert watch.fd is not None
    assert not watch.changed()
    (tmp_path / "one").write_bytes(b"1")
    assert select.select([watch.fd], [], [], 0)[0]
    assert watch.changed()
    assert not watch.changed()
    with (tmp_path / "one").open("r+b") as file:
        file.write(b"2")
        file.flush()
        assert watch.changed()


def test_without_a_watch_each_look_may_find_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert DirectoryWatch(tmp_path / "none").changed()

    class NoWatches:
        @staticmethod
        def inotify_init1(flags: int) -> int:
            return -1

    monkeypatch.setattr(directory_watch.ctypes, "CDLL", lambda *_, **__: NoWatches)
    watch = DirectoryWatch(tmp_path)
    assert watch.fd is None
    assert watch.changed()
