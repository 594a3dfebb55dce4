"""A node's own disk that stops answering: a file system in between (bindfs) whose daemon is stopped.

What it holds up is one save at most, and what it never does is to bring a step that nobody saved.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.ckpt import bulk_io, catalogue, hung_disk, local_disk, local_way, shard_file
from resilio_hpc.ckpt.bulk_io import Piece, Segment
from resilio_hpc.ckpt.checkpointer import Checkpointer
from resilio_hpc.ckpt.hung_disk import Activity
from resilio_hpc.ckpt.records import ShardRecord
from resilio_hpc.ckpt.saver_messages import Local, LocalFailed, SaverFailed
from resilio_hpc.launch.child_link import ChildLink
from resilio_hpc.native import crc32c
from resilio_hpc.slurm.devcluster.processes import wait_until_stopped
from tests.support.ckpt.local_node import Node, node_in

PATIENCE_S = 0.5
hanging = threading.Event()
"""Only now may a disk be taken for hung: on a busy machine a good one may take its time, too."""


class Mount:
    """A directory that answers as long as its daemon is not stopped."""

    def __init__(self, target: Path, daemon: subprocess.Popen[bytes]) -> None:
        self.target, self._daemon = target, daemon

    def hang(self) -> None:
        self._daemon.send_signal(signal.SIGSTOP)
        wait_until_stopped(self._daemon.pid)  # a thread of it may be in the middle of an answer
        hanging.set()

    def answer(self) -> None:
        hanging.clear()
        self._daemon.send_signal(signal.SIGCONT)


@contextmanager
def mounted(directory: Path) -> Iterator[Mount]:
    """``directory`` by way of a daemon."""
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs bindfs and /dev/fuse")
    behind = directory.with_name(f"{directory.name}-behind")
    behind.mkdir()
    argv = ["bindfs", "-f", "--multithreaded", "-o", "attr_timeout=0,entry_timeout=0,negative_timeout=0"]
    daemon = subprocess.Popen([*argv, str(behind), str(directory)], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 20
        while not directory.is_mount():
            assert daemon.poll() is None, daemon.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield Mount(directory, daemon)
    finally:
        daemon.send_signal(signal.SIGCONT)
        for thread in threading.enumerate():
            if thread.name == "resilio-disk":
                thread.join(20)
        subprocess.run(["umount", "-l", str(directory)], capture_output=True, check=False)
        daemon.kill()
        daemon.communicate()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    has_stopped, in_time = Activity.has_stopped, hung_disk.in_time

    def patient(act: Callable[[], Any], patience_s: float) -> Any:
        return in_time(act, patience_s if hanging.is_set() else 60)

    hanging.clear()
    monkeypatch.setattr(hung_disk, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(hung_disk, "ANSWER_S", PATIENCE_S)
    monkeypatch.setattr(hung_disk, "in_time", patient)
    monkeypatch.setattr(Activity, "has_stopped", lambda self, since: hanging.is_set() and has_stopped(self, since))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with node_in(tmp_path) as made:
        yield made


@pytest.fixture
def disk(node: Node) -> Iterator[Mount]:
    with mounted(node.disk) as mount:
        yield mount


def kinds(node: Node) -> list[type]:
    """What the saver told on the way."""
    found = [type(progress) for progress in node.progress]
    node.progress.clear()
    return found


# -- saves -----------------------------------------------------------------------------------------------------------


def test_a_disk_that_hangs_costs_a_save_its_short_way_and_later_ones_nothing(node: Node, disk: Mount) -> None:
    node.commit(node.persist(1))
    assert kinds(node) == [Local]
    disk.hang()
    node.commit(node.persist(2))
    assert node.is_committed(2)
    (failed,) = node.progress
    assert isinstance(failed, LocalFailed)
    assert failed.error.startswith(f"it has not answered for {PATIENCE_S:g} s: {node.disk}: have that disk looked at")
    assert kinds(node) == [LocalFailed]
    stuck = local_way._hung[str(node.disk)]
    node.commit(node.persist(3))
    assert local_way._hung[str(node.disk)] is stuck  # nobody asked it again
    assert kinds(node) == [LocalFailed]
    assert node.is_committed(3)


def test_a_disk_that_is_back_is_used_again_and_what_it_wrote_too_late_never(node: Node, disk: Mount) -> None:
    node.commit(node.persist(1))
    disk.hang()
    node.commit(node.persist(2))
    stuck = local_way._hung[str(node.disk)]
    disk.answer()
    stuck.exception(20)
    assert kinds(node) == [Local, LocalFailed]  # it did not say that memory could be let go
    node.commit(node.persist(3))
    assert kinds(node) == [Local]
    assert node.steps == ["step-0000000001-e1-r0", "step-0000000003-e1-r0"]
    assert [node.is_committed(step) for step in (2, 3)] == [True] * 2


def test_a_disk_that_hangs_once_memory_was_let_go_costs_that_save_alone(node: Node, disk: Mount) -> None:
    node.commit(node.persist(1))
    lost = node.persist(2, then=disk.hang)
    assert isinstance(lost, SaverFailed)
    assert "has not answered for 0.5 s; memory had been let go by then, so this save is lost" in lost.error
    assert kinds(node) == [Local, Local]
    node.commit(node.persist(3))
    assert kinds(node) == [LocalFailed]
    assert [node.is_committed(step) for step in (1, 3)] == [True] * 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_shared_file_system_that_hangs_is_waited_for(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``before``: while it is looked up which copies of the disk are of committed steps; ``after``: at the copy."""
    monkeypatch.setattr(hung_disk, "ANSWER_S", 60)  # the disk itself is good, and may be busy
    (tmp_path / "shared").mkdir()
    with node_in(tmp_path) as node, mounted(node.shared) as shared:
        node.commit(node.persist(1))
        release = threading.Timer(6 * PATIENCE_S, shared.answer)

        def hang() -> None:
            shared.hang()
            release.start()

        began = time.monotonic()
        if when == "before":
            hang()
        found = node.persist(2, then=hang if when == "after" else lambda: None)
        assert time.monotonic() - began > 5 * PATIENCE_S
        node.commit(found)
        assert kinds(node) == [Local, Local]
        assert node.is_committed(2)


def test_a_slow_disk_is_waited_for(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard = shard_file.write_shard

    def slow(*arguments: Any, **named: Any) -> ShardRecord:
        for _ in range(60):
            (tmp_path / "written").write_bytes(b"x")
            time.sleep(0.1)
        hanging.clear()
        return write_shard(*arguments, **named)

    monkeypatch.setattr(shard_file, "write_shard", slow)
    monkeypatch.setattr(hung_disk, "PATIENCE_S", 2.0)
    hanging.set()
    node.commit(node.persist(1))
    assert kinds(node) == [Local]


def test_a_file_that_comes_too_late_lets_go_of_nothing(
    node: Node, disk: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard, may_go_on = shard_file.write_shard, threading.Event()

    def late(*arguments: Any, **named: Any) -> ShardRecord:
        record = write_shard(*arguments, **named)
        if arguments[1].is_relative_to(node.disk):
            disk.hang()
            may_go_on.wait(20)
        return record

    monkeypatch.setattr(shard_file, "write_shard", late)
    node.commit(node.persist(1))
    assert kinds(node) == [LocalFailed]
    disk.answer()
    may_go_on.set()
    assert isinstance(local_way._hung[str(node.disk)].result(20), TimeoutError)
    assert kinds(node) == []
    assert node.is_committed(1)


# -- restores --------------------------------------------------------------------------------------------------------


def test_a_disk_that_hangs_at_a_restore_is_passed_by(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    local = tmp_path / "disk"
    local.mkdir()
    with mounted(local) as disk:
        with_disk = Checkpointer(tmp_path / "remote", local=local)
        with_disk.save(3, {"x": 3}).wait(timeout_s=60)
        assert list(local.glob("resilio-steps-*/step-*/node-*.h5"))
        disk.hang()
        assert Checkpointer(tmp_path / "remote", local=local).restore() == (3, {"x": 3})
        told = f"it has not answered for {PATIENCE_S:g} s: {local}: {tmp_path / 'remote'} is read instead"
        assert told in capfd.readouterr().err
        disk.answer()
        assert Checkpointer(tmp_path / "remote", local=local).restore() == (3, {"x": 3})
        assert capfd.readouterr().err == ""


def test_a_copy_is_read_once_before_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names may be known though the disk behind them is dead."""
    local = tmp_path / "disk"
    local.mkdir()
    Checkpointer(tmp_path / "remote", local=local).save(3, {"x": 3}).wait(timeout_s=60)
    read = threading.Event()
    monkeypatch.setattr(hung_disk, "read_page", lambda path: read.wait(20))
    made = Checkpointer(tmp_path / "remote", local=local)
    (manifest,) = catalogue.committed(tmp_path / "remote")
    hanging.set()
    with pytest.raises(TimeoutError):
        local_disk.answering_copies(local, tmp_path / "remote", manifest)
    assert made.restore() == (3, {"x": 3})
    read.set()


def test_an_agent_ends_without_a_saver_that_is_stuck(tmp_path: Path) -> None:
    """Not even SIGKILL ends a process whose open file has to be flushed to a disk that hangs."""
    (tmp_path / "disk").mkdir()
    with mounted(tmp_path / "disk") as disk:
        program = f"file = open({str(disk.target / 'file')!r}, 'w'); print('open', flush=True); input()"
        link = ChildLink("ckpt.saver", tmp_path / "log")
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        link._process = process
        disk.hang()
        began = time.monotonic()
        link.close()
        assert time.monotonic() - began < 30
        assert process.poll() is None
        disk.answer()
        assert process.wait(20) == -signal.SIGKILL


# -- what counts as hung ---------------------------------------------------------------------------------------------


def test_a_process_that_writes_or_computes_has_not_stopped(disk_path: Path) -> None:
    hanging.set()

    def rests() -> bool:
        before = Activity.now()
        time.sleep(0.1)
        return Activity.now().has_stopped(before)

    assert any(rests() for _ in range(50))  # threads of other tests may work on
    before = Activity.now()
    (disk_path / "file").write_bytes(b"x")
    assert not Activity.now().has_stopped(before)
    before = Activity.now()
    until = time.process_time() + 1.1
    while time.process_time() < until:
        pass
    assert not Activity.now().has_stopped(before)


def test_where_nothing_is_counted_nothing_is_taken_for_hung() -> None:
    hanging.set()
    assert not Activity(None, 0.0).has_stopped(Activity(None, 0.0))
    assert not Activity(("wchar: 1",), 0.0).has_stopped(Activity(None, 0.0))


def test_what_is_done_in_time_comes_back_and_so_do_its_errors(tmp_path: Path) -> None:
    assert hung_disk.in_time(lambda: 7, 20) == 7
    with pytest.raises(FileNotFoundError):
        hung_disk.in_time(lambda: hung_disk.read_page(tmp_path / "missing"), 20)
    (tmp_path / "link").symlink_to("/dev/null")
    with pytest.raises(OSError, match="symbolic links"):
        hung_disk.read_page(tmp_path / "link")
    never = threading.Event()
    hanging.set()
    with pytest.raises(TimeoutError, match="it has not answered"):
        hung_disk.in_time(lambda: never.wait(20), 0.1)
    never.set()


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, False])
def test_a_read_of_a_disk_that_is_back_after_seconds_is_right(direct: bool, tmp_path: Path) -> None:
    """Though the kernel was asked to give back what it had not done by then."""
    (tmp_path / "disk").mkdir()
    content = os.urandom(9 << 20)
    with mounted(tmp_path / "disk") as disk:
        (disk.target.with_name("disk-behind") / "file").write_bytes(content)
        fd = os.open(disk.target / "file", os.O_RDWR)
        segments = [
            Segment(at, memoryview(bytearray(1 << 20)), crc32c(content[at : at + (1 << 20)]))
            for at in range(0, len(content), 1 << 20)
        ]
        disk.hang()
        reading = hung_disk.begin(lambda: bulk_io.read(fd, segments, direct))
        time.sleep(5)
        assert not reading.done()
        disk.answer()
        assert reading.result(30) == []
        assert b"".join(bytes(segment.target) for segment in segments) == content
        disk.hang()
        writing = hung_disk.begin(
            lambda: bulk_io.write(fd, memoryview(mmap.mmap(-1, 1 << 20)), [Piece(0, 4096, 1 << 20)], [])
        )
        time.sleep(5)
        disk.answer()
        assert writing.result(30) is None
        os.close(fd)
    found = (tmp_path / "disk-behind" / "file").read_bytes()
    assert found == content[:4096] + bytes(1 << 20) + content[4096 + (1 << 20) :]
