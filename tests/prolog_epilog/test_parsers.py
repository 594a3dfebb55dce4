"""Whatever files say, parsers give what they promise or Unreadable: never another error, never a hang."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.prolog_epilog.base import processes
from resilio_hpc.prolog_epilog.base.check import Unreadable
from resilio_hpc.prolog_epilog.base.mounts import culprit, mount_of, parse_mountinfo
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles, whole_number
from resilio_hpc.prolog_epilog.checks import clock, dcgm, file_systems, infiniband, memory, nvme, slurm_node
from tests.support.prolog_epilog.node_trees import HEALTHY, write

PARSERS: dict[str, Callable[[str], object]] = {
    "adjtimex": clock.parse,
    "config": slurm_node.parse_config,
    "cpu list": memory.parse_cpu_list,
    "dcgm discovery": dcgm.parse_discovery,
    "dcgm health": dcgm.parse_health,
    "fstab": file_systems.parse_fstab,
    "health log": lambda text: nvme.parse_log(text.encode(errors="replace")),
    "meminfo": memory.parse_meminfo,
    "mountinfo": parse_mountinfo,
    "number": lambda text: whole_number(text, "x"),
    "port rate": lambda text: infiniband.parse_rate(text, "x"),
    "port state": lambda text: infiniband.parse_state(text, "x"),
    "stat": processes.parse_stat,
}
PIECES = st.sampled_from(["0", "-", ",", "\n", " ", ":", " - ", "(", ") ", "1-99999", "kB", "MemTotal:", "\\040", "\0"])


@pytest.mark.parametrize("name", PARSERS)
@given(text=st.text() | st.lists(PIECES).map("".join))
def test_a_parser_parses_or_says_that_it_cannot(name: str, text: str) -> None:
    try:
        PARSERS[name](text)
    except Unreadable as error:
        assert str(error)


@given(st.binary(max_size=600))
def test_any_health_log_is_parsed_or_refused(data: bytes) -> None:
    try:
        assert nvme.parse_log(data).media_errors >= 0
    except Unreadable:
        pass


@given(st.text(min_size=1, max_size=30), st.binary())
def test_a_process_may_be_called_anything(name: str, rest: bytes) -> None:
    text = f"7 ({name}) S 1 7 7 {' '.join(['0'] * 15)} 42 0\n"
    found = processes.parse_stat(text)
    assert (found.pid, found.name, found.parent, found.started) == (7, name, 1, 42)


def test_mounts_with_odd_names_and_one_over_another() -> None:
    text = (
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 0:5 / /my\\040data rw shared:1 master:2 - nfs4 nas:/a\\011b rw,vers=4.2\n"
        "3 1 0:6 / /my\\040data ro - tmpfs none rw\n"
    )
    mounts = parse_mountinfo(text)
    over = mount_of("/my data/x", mounts)
    assert over is not None
    assert (over.path, over.type, over.read_only) == ("/my data", "tmpfs", True)
    assert mounts[1].device == "nas:/a\tb"
    other = mount_of("/my database", mounts)
    assert other is not None and other.path == "/"
    assert culprit("nvmlInit", mounts) == "nvmlInit"
    assert culprit("/my data/x", mounts) == "/my data/x on /my data (none, tmpfs)"


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    os.mkfifo(tmp_path / "proc" / "meminfo")
    with pytest.raises(Unreadable, match="no regular file"):
        NodeFiles(tmp_path).text("/proc/meminfo")


def test_no_file_of_any_size_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * (5 << 20))
    with pytest.raises(Unreadable, match="more than"):
        NodeFiles(tmp_path).text("/big")


def test_the_healthy_tree_is_what_the_tests_start_from(tmp_path: Path) -> None:
    root = write(tmp_path, {"/dev/nvme0": None})
    assert not (root / "dev/nvme0").exists()
    assert (root / "proc/uptime").read_text() == HEALTHY["/proc/uptime"]
