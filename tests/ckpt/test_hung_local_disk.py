"""A node's own disk that stops answering: a file system in between (bindfs) whose daemon is stopped.

What it holds up is one save at most, and what it never does is to bring a step that nobody saved.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.ckpt.checkpointer import Checkpointer
from resilio_hpc.ckpt.format import bulk_io
from resilio_hpc.ckpt.format.bulk_io import Segment
from resilio_hpc.ckpt.format.manifest import ShardRecord
from resilio_hpc.ckpt.saver import write_through
from resilio_hpc.ckpt.saver.messages import Local, LocalFailed, SaverFailed
from resilio_hpc.ckpt.store import checkpoint_index, shard_file
from resilio_hpc.ckpt.tiers import bounded_io, local_disk
from resilio_hpc.ckpt.tiers.bounded_io import Activity, Patience
from resilio_hpc.core import bounded
from resilio_hpc.devtools.devcluster.processes import wait_until_stopped
from resilio_hpc.launch.process.child_link import ChildLink
from resilio_hpc.native import crc32c, direct_io
from tests.support.ckpt.local_node import Node, node_in
from tests.support.requirements import need_program
from tests.support.waiting import PATIENCE_S, until

SILENT_S = 0.25


class Waits:
    """How the tests wait: a good disk for ever, one that hangs for the handed-in seconds.

    Only while a file system hangs may a disk be taken for hung: a busy machine may hold up a good one, too.
    """

    def __init__(self) -> None:
        self.hanging = threading.Event()
        self.each: Callable[[], object] = lambda: None
        """Called before each wait for a save while something hangs."""

    def patience(self, answer_s: float = SILENT_S) -> Patience:
        return Patience(SILENT_S, answer_s, wait=self._wait)

    def _wait(self, futures: Sequence[Future[Any]], seconds: float) -> None:
        until(lambda: self.hanging.is_set() or all(future.done() for future in futures), "a disk answers, or hangs")
        if self.hanging.is_set():
            if seconds == SILENT_S:
                self.each()
            wait_for(futures, seconds)


@pytest.fixture
def waits() -> Waits:
    return Waits()


class Mount:
    """A directory that answers as long as its daemon is not stopped."""

    def __init__(self, target: Path, daemon: subprocess.Popen[bytes], waits: Waits) -> None:
        self.target, self._daemon, self._waits = target, daemon, waits

    def hang(self) -> None:
        self._daemon.send_signal(signal.SIGSTOP)
        wait_until_stopped(self._daemon.pid)  # a thread of it may be in the middle of an answer
        self._waits.hanging.set()

    def answer(self) -> None:
        self._waits.hanging.clear()
        self._daemon.send_signal(signal.SIGCONT)


@contextmanager
def mounted(directory: Path, waits: Waits) -> Iterator[Mount]:
    """``directory`` by way of a daemon."""
    need_program("bindfs", package="bindfs")
    if not Path("/dev/fuse").exists():
        pytest.skip("needs /dev/fuse")
    behind = directory.with_name(f"{directory.name}-behind")
    behind.mkdir()
    argv = ["bindfs", "-f", "--multithreaded", "-o", "attr_timeout=0,entry_timeout=0,negative_timeout=0"]
    daemon = subprocess.Popen([*argv, str(behind), str(directory)], stderr=subprocess.PIPE)
    try:
        until(directory.is_mount, "bindfs mounts", alive=lambda: daemon.poll() is None)
        yield Mount(directory, daemon, waits)
    finally:
        daemon.send_signal(signal.SIGCONT)
        for thread in threading.enumerate():
            if thread.name == "resilio-bounded":
                thread.join(PATIENCE_S)
        subprocess.run(["umount", "-l", str(directory)], capture_output=True, check=False)
        daemon.kill()
        daemon.communicate()


@pytest.fixture
def node(tmp_path: Path, waits: Waits) -> Iterator[Node]:
    with node_in(tmp_path) as made:
        made.patience = waits.patience()
        yield made


@pytest.fixture
def disk(node: Node, waits: Waits) -> Iterator[Mount]:
    with mounted(node.disk, waits) as mount:
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
    assert failed.error.startswith(f"it has not answered for {SILENT_S:g} s: {node.disk}: have that disk looked at")
    assert kinds(node) == [LocalFailed]
    stuck = write_through._hung[str(node.disk)]
    node.commit(node.persist(3))
    assert write_through._hung[str(node.disk)] is stuck  # nobody asked it again
    assert kinds(node) == [LocalFailed]
    assert node.is_committed(3)


def test_a_disk_that_is_back_is_used_again_and_what_it_wrote_too_late_never(node: Node, disk: Mount) -> None:
    node.commit(node.persist(1))
    disk.hang()
    node.commit(node.persist(2))
    stuck = write_through._hung[str(node.disk)]
    disk.answer()
    stuck.exception(PATIENCE_S)
    assert kinds(node) == [Local, LocalFailed]  # it did not say that memory could be let go
    node.commit(node.persist(3))
    assert kinds(node) == [Local]
    # FUSE keeps a file that is removed while the late thread still has it open, and its directory with it
    assert [name for name in node.steps if name != "worn"] == ["step-0000000001-e1-r0", "step-0000000003-e1-r0"]
    assert [node.is_committed(step) for step in (2, 3)] == [True] * 2


def test_a_disk_that_hangs_once_memory_was_let_go_costs_that_save_alone(node: Node, disk: Mount) -> None:
    node.commit(node.persist(1))
    lost = node.persist(2, then=disk.hang)
    assert isinstance(lost, SaverFailed)
    assert f"has not answered for {SILENT_S:g} s; memory had been let go by then, so this save is lost" in lost.error
    assert kinds(node) == [Local, Local]
    node.commit(node.persist(3))
    assert kinds(node) == [LocalFailed]
    assert [node.is_committed(step) for step in (1, 3)] == [True] * 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_shared_file_system_that_hangs_is_waited_for(when: str, tmp_path: Path, waits: Waits) -> None:
    """``before``: while it is looked up which copies of the disk are of committed steps; ``after``: at the copy."""
    (tmp_path / "shared").mkdir()
    with node_in(tmp_path) as node, mounted(node.shared, waits) as shared:
        node.patience = waits.patience(answer_s=PATIENCE_S)  # the disk itself is good, and may be busy
        node.commit(node.persist(1))
        turns = []

        def is_in_use() -> bool:
            with (node.held / "held").open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
            return False

        def turn() -> None:
            until(is_in_use, "the disk is looked at")
            turns.append(None)
            if len(turns) > 3:
                shared.answer()

        waits.each = turn
        if when == "before":
            shared.hang()
        node.commit(node.persist(2, then=shared.hang if when == "after" else lambda: None))
        assert len(turns) > 3
        assert kinds(node) == [Local, Local]
        assert node.is_committed(2)


def test_a_slow_disk_is_waited_for(node: Node, disk: Mount, waits: Waits, tmp_path: Path) -> None:
    """Something is written all the time."""
    turns = []

    def turn() -> None:
        turns.append(None)
        (tmp_path / "written").write_bytes(b"x")
        if len(turns) > 3:
            disk.answer()

    node.persist(1, then=disk.answer)
    waits.each = turn
    disk.hang()
    node.commit(node.persist(2))
    assert len(turns) > 3
    assert kinds(node) == [Local, Local]


def test_a_file_that_comes_too_late_lets_go_of_nothing(
    node: Node, disk: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard, may_go_on = shard_file.write_shard, threading.Event()

    def late(*arguments: Any, **named: Any) -> ShardRecord:
        record = write_shard(*arguments, **named)
        if arguments[1].is_relative_to(node.disk):
            disk.hang()
            may_go_on.wait(PATIENCE_S)
        return record

    monkeypatch.setattr(shard_file, "write_shard", late)
    node.commit(node.persist(1))
    assert kinds(node) == [LocalFailed]
    disk.answer()
    may_go_on.set()
    assert isinstance(write_through._hung[str(node.disk)].result(PATIENCE_S), TimeoutError)
    assert kinds(node) == []
    assert node.is_committed(1)


# -- restores --------------------------------------------------------------------------------------------------------


def test_a_disk_that_hangs_at_a_restore_is_passed_by(
    tmp_path: Path, waits: Waits, capfd: pytest.CaptureFixture[str]
) -> None:
    local = tmp_path / "disk"
    local.mkdir()

    def restored() -> tuple[int, Any] | None:
        made = Checkpointer(tmp_path / "remote", local=local)
        made._points.patience = waits.patience()
        return made.restore()

    with mounted(local, waits) as disk:
        with_disk = Checkpointer(tmp_path / "remote", local=local)
        with_disk.save(3, {"x": 3}).wait(timeout_s=60)
        assert list(local.glob("resilio-steps-*/step-*/node-*.h5"))
        disk.hang()
        assert restored() == (3, {"x": 3})
        told = f"it has not answered for {SILENT_S:g} s: {local}: {tmp_path / 'remote'} is read instead"
        assert told in capfd.readouterr().err
        disk.answer()
        assert restored() == (3, {"x": 3})
        assert capfd.readouterr().err == ""


def test_a_copy_is_read_once_before_it_is_trusted(
    tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names may be known though the disk behind them is dead."""
    local = tmp_path / "disk"
    local.mkdir()
    Checkpointer(tmp_path / "remote", local=local).save(3, {"x": 3}).wait(timeout_s=60)
    read = threading.Event()
    monkeypatch.setattr(bounded_io, "read_page", lambda path: read.wait(PATIENCE_S))
    made = Checkpointer(tmp_path / "remote", local=local)
    made._points.patience = waits.patience()
    (manifest,) = checkpoint_index.committed(tmp_path / "remote")
    waits.hanging.set()
    with pytest.raises(TimeoutError):
        local_disk.answering_copies(local, tmp_path / "remote", manifest, waits.patience())
    assert made.restore() == (3, {"x": 3})
    read.set()


def test_an_agent_ends_without_a_saver_that_is_stuck(tmp_path: Path, waits: Waits) -> None:
    """Not even SIGKILL ends a process whose open file has to be flushed to a disk that hangs."""
    (tmp_path / "disk").mkdir()
    with mounted(tmp_path / "disk", waits) as disk:
        program = f"file = open({str(disk.target / 'file')!r}, 'w'); print('open', flush=True); input()"
        link = ChildLink("ckpt.saver.saver", tmp_path / "log")
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        link._process = process
        disk.hang()
        link.close()
        assert process.poll() is None
        disk.answer()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL


# -- what counts as hung ---------------------------------------------------------------------------------------------


def test_a_process_that_writes_or_computes_has_not_stopped(disk_path: Path) -> None:
    def rests() -> bool:
        before = Activity.now()
        time.sleep(0.1)
        return Activity.now().has_stopped(before)

    until(rests, "nothing moves")  # threads of other tests may work on
    before = Activity.now()
    (disk_path / "file").write_bytes(b"x")
    assert not Activity.now().has_stopped(before)
    counters = Activity.now().counters
    assert Activity(counters, 5.9).has_stopped(Activity(counters, 5.0))
    assert not Activity(counters, 6.1).has_stopped(Activity(counters, 5.0))
    before = time.process_time()
    until(lambda: time.process_time() > before, "time is spent", poll_s=0)
    assert Activity.now().cpu_s > before


def test_where_nothing_is_counted_nothing_is_taken_for_hung() -> None:
    assert not Activity(None, 0.0).has_stopped(Activity(None, 0.0))
    assert not Activity(("wchar: 1",), 0.0).has_stopped(Activity(None, 0.0))


def test_what_is_done_in_time_comes_back_and_so_do_its_errors(tmp_path: Path) -> None:
    patient = Patience(answer_s=PATIENCE_S)
    assert bounded_io.in_time(lambda: 7, patient) == 7
    with pytest.raises(FileNotFoundError):
        bounded_io.in_time(lambda: bounded_io.read_page(tmp_path / "missing"), patient)
    (tmp_path / "link").symlink_to("/dev/null")
    with pytest.raises(OSError, match="it is a link"):
        bounded_io.read_page(tmp_path / "link")
    never = threading.Event()
    with pytest.raises(TimeoutError, match="it has not answered"):
        bounded_io.in_time(lambda: never.wait(PATIENCE_S), Patience(answer_s=0.1))
    never.set()


@pytest.mark.parametrize("direct", [True, False])
def test_a_read_of_a_disk_that_is_back_later_is_right(direct: bool, tmp_path: Path, waits: Waits) -> None:
    """Though the kernel was asked again and again to give back what it had not done by then."""
    (tmp_path / "disk").mkdir()
    content = os.urandom(9 << 20)
    stalled_s = 0.05
    with mounted(tmp_path / "disk", waits) as disk:
        (disk.target.with_name("disk-behind") / "file").write_bytes(content)
        fd = os.open(disk.target / "file", os.O_RDWR | (os.O_DIRECT if direct else 0))
        segments = [
            Segment(at, memoryview(bytearray(1 << 20)), crc32c(content[at : at + (1 << 20)]))
            for at in range(0, len(content), 1 << 20)
        ]
        room = mmap.mmap(-1, 1 << 20)

        def read() -> list[int]:
            if not direct:
                return bulk_io.read(fd, segments, False)
            return direct_io.read(fd, segments, bulk_io.READ_DEPTH, bulk_io.READ_CHUNK_BYTES, True, stalled_s)

        def write() -> int:
            return direct_io.write(fd, room, [(0, 4096, 1 << 20)], [], 4, 1 << 18, 0.0, True, stalled_s)

        disk.hang()
        reading = bounded.begin(read)
        wait_for([reading], 10 * stalled_s)
        assert not reading.done()
        disk.answer()
        assert reading.result(PATIENCE_S) == []
        assert b"".join(bytes(segment.target) for segment in segments) == content
        disk.hang()
        writing = bounded.begin(write)
        wait_for([writing], 10 * stalled_s)
        disk.answer()
        assert writing.result(PATIENCE_S) == -1
        os.close(fd)
    found = (tmp_path / "disk-behind" / "file").read_bytes()
    assert found == content[:4096] + bytes(1 << 20) + content[4096 + (1 << 20) :]
