"""Only regular files are opened, and a file that is to be written is no link."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from resilio_hpc.core import regular_file
from resilio_hpc.core.regular_file import NotRegular


def test_what_is_no_regular_file_is_named_and_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to-pipe").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        kinds = {"pipe": "a named pipe", "to-pipe": "a named pipe", "socket": "a socket", ".": "a directory"}
        for name, kind in {**kinds, "/dev/null": "a device"}.items():
            for open_it in (regular_file.open_file, regular_file.open_direct, regular_file.read_file):
                with pytest.raises(NotRegular, match=f"it is {kind}, not a regular file"):
                    open_it(tmp_path / name)
            assert regular_file.size_of(tmp_path / name) == -1


def test_a_link_is_read_where_that_is_wanted_and_never_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert regular_file.read_file(tmp_path / "link", 4) == b"cont"
    assert regular_file.size_of(tmp_path / "link") == 7
    assert regular_file.size_of(tmp_path / "link", follow=False) == -1
    with pytest.raises(NotRegular, match="it is a link"):
        regular_file.read_file(tmp_path / "link", follow=False)
    for flags in (os.O_RDWR, os.O_WRONLY, os.O_WRONLY | os.O_TRUNC):
        with pytest.raises(NotRegular, match="it is a link"):
            regular_file.open_file(tmp_path / "link", flags)
    with pytest.raises(FileNotFoundError):
        regular_file.open_file(tmp_path / "none")
    assert (tmp_path / "file").read_bytes() == b"content"


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("directory")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "inner").symlink_to(tmp_path / "directory")
    for name in ("link", "tree", "none"):
        regular_file.remove(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["directory"]
    assert (tmp_path / "directory" / "file").read_bytes() == b"content"
