"""What kind of file system a file is on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resilio_hpc.core import file_system
from resilio_hpc.core.file_system import is_in_memory, is_of_this_machine


def test_files_in_memory_are_told_from_those_on_a_disk(disk_path: Path) -> None:
    for directory, in_memory in (("/dev/shm", True), (disk_path, False), ("/proc/self", False)):
        fd = os.open(directory, os.O_RDONLY)
        assert is_in_memory(fd) == in_memory, directory
        os.close(fd)
    assert not is_in_memory(9999)


def test_only_what_is_known_to_be_of_one_machine_is_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for directory, of_one in (("/dev/shm", True), ("/proc/self", False), ("/sys", False)):
        fd = os.open(directory, os.O_RDONLY)
        assert is_of_this_machine(fd) == of_one, directory
        os.close(fd)
    assert not is_of_this_machine(9999)
    for kind in (0x6969, 0x0BD00BD0, 0x65735546, 0x47504653, 0x19830326, 0x794C7630, 0xFF534D42):  # NFS, Lustre, FUSE …
        monkeypatch.setattr(file_system, "_kind", lambda fd, kind=kind: kind)
        assert not is_of_this_machine(0)
