"""Restores from other nodes' disks: read where they are what was committed, and left for the committed files else."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resilio_hpc.ckpt import REPLICATED, Checkpointer, Slab
from resilio_hpc.ckpt.coordination.coordinator import use
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.shard_reader import ShardReader
from resilio_hpc.ckpt.tiers import peer_disks
from resilio_hpc.ckpt.tiers.disk_messages import MAX_BYTES, Copy, Read, Remove, ServeDisk, asking
from resilio_hpc.ckpt.tiers.disk_server import DiskGiver
from resilio_hpc.ckpt.tiers.peer_disks import LIMITS, PeerFile, PeerLimits, write_known
from resilio_hpc.core.encrypted_stream import SealedConnection
from resilio_hpc.core.json_lines import encode_line
from tests.ckpt.test_local_restore import Told, state_of
from tests.support.ckpt.local_node import flip, lose_tensors
from tests.support.waiting import PATIENCE_S

KEY = secrets.token_bytes(32)
SIZE = 2_000_000  # 16 MB: more shares than threads
WORLD = 3


class Nodes:
    """As many processes as nodes, each with a disk of its own, the shared directory, and who gives from which disk."""

    def __init__(self, path: Path) -> None:
        self.remote, self.known = path / "remote", path / "known"
        self.disks = [path / f"disk{number}" for number in range(WORLD)]
        self.empty = path / "empty"
        for disk in (*self.disks, self.empty):
            disk.mkdir()
        self.givers: list[subprocess.Popen[bytes]] = []
        self.endpoints: list[str] = []

    def process(self, rank: int, world: int, disk: Path | None, **options: Any) -> tuple[Checkpointer, Told]:
        told = Told(self.remote, disk, rank, world)
        told.peer_disks = self.known
        use(told)
        made = Checkpointer(self.remote, **options)
        use(None)
        return made, told

    def save(self, step: int, states: list[Any], **options: Any) -> None:
        processes = [self.process(rank, WORLD, self.disks[rank], **options)[0] for rank in range(WORLD)]
        for handle in [made.save(step, state) for made, state in zip(processes, states, strict=True)]:
            handle.wait(timeout_s=60)

    def give(self) -> None:
        """Each disk, in a process of its own."""
        for disk in self.disks:
            listener = socket.create_server(("127.0.0.1", 0))
            argv = [sys.executable, "-m", "resilio_hpc.ckpt.tiers.disk_server", str(listener.fileno())]
            giver = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
            assert giver.stdin
            giver.stdin.write(encode_line(ServeDisk(KEY, str(disk), str(self.remote))))
            giver.stdin.flush()
            self.givers.append(giver)
            self.endpoints.append(f"127.0.0.1:{listener.getsockname()[1]}")
            listener.close()
        self.tell()

    def tell(self, key: bytes = KEY, limits: PeerLimits = LIMITS, **others: str) -> None:
        shards = self.manifest().shards
        known = {shard.node: endpoint for shard, endpoint in zip(shards, self.endpoints, strict=True)}
        write_known(self.known, key, known | others, limits=limits)

    def manifest(self) -> Any:
        return checkpoint_index.committed(self.remote)[-1]

    def copy(self, node: int) -> Path:
        (found,) = self.disks[node].glob(f"resilio-steps-*/step-{self.manifest().step:010d}-*/node-{node}.h5")
        return found

    def lose_tensors(self) -> None:
        lose_tensors(self.remote, self.manifest())

    def restored(self, rank: int, world: int = WORLD, disk: Path | None = None) -> str:
        """From where; its content is compared."""
        process, told = self.process(rank, world, disk)
        found = process.restore()
        assert found is not None
        step, state = found
        expected = state_of(step, rank, len(state["x"]))
        assert state["x"].tobytes() == expected["x"].tobytes()
        assert state["few"].tobytes() == expected["few"].tobytes()
        return told.sources[-1]

    def close(self) -> None:
        for giver in self.givers:
            giver.send_signal(signal.SIGCONT)
            giver.kill()
            giver.communicate()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    try:
        yield made
    finally:
        use(None)
        made.close()


@pytest.fixture
def saved(nodes: Nodes) -> Nodes:
    nodes.save(3, [state_of(3, rank, SIZE) for rank in range(WORLD)])
    nodes.give()
    return nodes


def test_what_is_not_on_the_own_disk_is_read_from_that_of_another_node(
    saved: Nodes, capfd: pytest.CaptureFixture[str]
) -> None:
    saved.lose_tensors()
    for rank in range(WORLD):  # the ranks have changed places
        assert saved.restored(rank, disk=saved.disks[(rank + 1) % WORLD]) == "peer"
    assert saved.restored(1, disk=saved.disks[1]) == "local"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("local_world", [1, 2])
def test_another_layout_takes_each_part_from_where_it_is(saved: Nodes, local_world: int) -> None:
    rows = 300
    whole = np.random.default_rng(1).random((WORLD * rows, 1000))
    parts = [Slab(whole[rows * n : rows * (n + 1)].copy(), whole.shape, (rows * n, 0)) for n in range(WORLD)]
    saved.save(5, [{"x": part} for part in parts])
    saved.tell()
    saved.lose_tensors()
    for number in range(2):  # columns
        width = whole.shape[1] // 2
        told = Told(saved.remote, saved.disks[number], number, 2)
        told.peer_disks = saved.known
        told.place = replace(told.place, local_world_size=local_world, local_rank=number % local_world)
        use(told)
        mine = np.zeros((len(whole), width))
        assert Checkpointer(saved.remote).restore({"x": Slab(mine, whole.shape, (0, number * width))})
        assert mine.tobytes() == whole[:, number * width :][:, :width].tobytes()
        assert told.sources == ["peer"]


def test_replicas_are_read_from_the_node_that_wrote_them(nodes: Nodes) -> None:
    state = {"x": np.arange(SIZE), "name": "the same"}
    nodes.save(4, [state] * WORLD, layout=REPLICATED)
    nodes.give()
    nodes.lose_tensors()
    for rank in range(1, WORLD):
        process, told = nodes.process(rank, WORLD, nodes.disks[rank], layout=REPLICATED)
        found = process.restore()
        assert found is not None
        assert found[1]["x"].tobytes() == state["x"].tobytes()
        assert told.sources == ["peer"]


def test_a_flipped_bit_of_a_copy_costs_that_copy_alone(saved: Nodes, capfd: pytest.CaptureFixture[str]) -> None:
    bad = saved.copy(1)
    with ShardReader(bad.parent, saved.manifest().shards[1]) as reader:
        (tensor,) = [one for one in reader.table(saved.manifest().shards[1].ranks[0]).tensors if one.path == "x"]
    flip(bad, tensor.offset + tensor.size_bytes // 2)
    assert saved.restored(1, disk=saved.empty) == "committed"
    said = capfd.readouterr().err
    assert "the copy of node-1.h5 on another node's disk is left: " in said
    assert "does not match its checksum" in said
    assert saved.manifest().shards[1].node in said
    assert saved.restored(0, disk=saved.empty) == "peer"
    assert saved.restored(1, disk=saved.empty) == "committed"
    assert not bad.exists()  # nobody reads it again
    assert saved.copy(0).exists()


@pytest.mark.parametrize("what", ["dead", "stopped", "gone", "another key", "cut off", "nobody there"])
def test_where_a_node_does_not_give_the_committed_file_is_read(
    what: str, saved: Nodes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if what == "stopped":
        assert saved.restored(1, disk=saved.empty) == "peer"
        saved.givers[1].send_signal(signal.SIGSTOP)
    limits = PeerLimits(0.5 if what == "stopped" else PATIENCE_S, share_bytes=1 << 20)
    saved.tell(limits=limits)
    if what == "dead":
        saved.givers[1].kill()
        saved.givers[1].wait()
    elif what == "gone":
        saved.copy(1).unlink()
    elif what == "another key":
        saved.tell(secrets.token_bytes(32), limits)
    elif what == "cut off":
        os.truncate(saved.copy(1), 5000)
    elif what == "nobody there":
        saved.tell(limits=limits, **{saved.manifest().shards[1].node: "127.0.0.1:9"})
    calls: list[PeerFile] = []
    call = PeerFile._call

    def counted(self: PeerFile) -> SealedConnection:
        calls.append(self)
        return call(self)

    monkeypatch.setattr(PeerFile, "_call", counted)
    assert saved.restored(1, disk=saved.empty) == "committed"
    assert 1 <= len(calls) <= peer_disks.THREADS  # nobody waits for it once more
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "the copy of node-1.h5 on another node's disk is left: " in said
    if what == "stopped":
        assert "it said nothing for 0.5 s" in said


def test_a_node_that_dies_while_it_gives_costs_no_restore(
    saved: Nodes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    receive = SealedConnection.receive_into
    seen: list[int] = []

    def dying(self: SealedConnection, memory: memoryview) -> None:
        seen.append(len(memory))
        if len(seen) == 2:
            saved.givers[1].kill()
            saved.givers[1].wait()
        receive(self, memory)

    monkeypatch.setattr(SealedConnection, "receive_into", dying)
    saved.tell(limits=PeerLimits(request_bytes=1 << 20))
    assert saved.restored(1, disk=saved.empty) == "committed"
    assert len(seen) >= 2
    assert "on another node's disk is left: " in capfd.readouterr().err


def test_without_what_the_agent_told_there_are_no_other_disks(saved: Nodes) -> None:
    for content in (None, b"", b"\xff{", b'{"key": "", "disks": 3}'):
        if content is None:
            saved.known.unlink()
        else:
            saved.known.write_bytes(content)
        assert saved.restored(1, disk=saved.empty) == "committed"


def test_what_the_agent_tells_is_for_this_user_alone(saved: Nodes) -> None:
    assert saved.known.stat().st_mode & 0o777 == 0o600


class InProcess:
    """A giver of the first disk, in threads of this process."""

    def __init__(self, nodes: Nodes, readers: int = 64) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        serve = ServeDisk(KEY, str(nodes.disks[0]), str(nodes.remote))
        self.called: list[socket.socket] = []
        threading.Thread(target=DiskGiver(self.listener, serve, readers).run, daemon=True).start()

    def call(self, key: bytes = KEY) -> SealedConnection:
        connection = socket.create_connection(self.address)
        self.called.append(connection)
        connection.settimeout(10)
        return SealedConnection(connection, key, calls=True)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        for connection in (self.listener, *self.called):
            connection.close()


@pytest.fixture
def giver(saved: Nodes) -> Iterator[Callable[..., InProcess]]:
    made: list[InProcess] = []

    def make(readers: int = 64) -> InProcess:
        made.append(InProcess(saved, readers))
        return made[-1]

    yield make
    for one in made:
        one.close()


def copy_of(nodes: Nodes, **changed: Any) -> Copy:
    manifest = nodes.manifest()
    shard = manifest.shards[0]
    return Copy(manifest.step, manifest.epoch, manifest.round, shard.file, shard.size_bytes)._replace(**changed)


def test_a_node_that_is_busy_says_so_and_nobody_is_told(
    saved: Nodes, giver: Callable[..., InProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    one = giver(1)
    saved.tell(**{saved.manifest().shards[0].node: f"127.0.0.1:{one.address[1]}"})
    reader = one.call()
    reader.send(asking.encode(Read(copy_of(saved), [(0, 8)])))
    assert reader.receive() == b""
    assert len(reader.receive()) == 8
    assert saved.restored(0, disk=saved.empty) == "committed"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "changed",
    [{"file": "../node-0.h5"}, {"file": "held"}, {"file": "/etc/passwd"}, {"step": 4}, {"epoch": 7}, {"round": 1},
     {"file": "node-0.h5\0"}, {"size_bytes": 5}, {"step": -1}],
)  # fmt: skip
def test_nothing_but_copies_of_shard_files_is_given(
    changed: dict[str, Any], saved: Nodes, giver: Callable[..., InProcess]
) -> None:
    reader = giver().call()
    reader.send(asking.encode(Read(copy_of(saved, **changed), [(0, 8)])))
    assert reader.receive() != b""
    reader.send(asking.encode(Remove(copy_of(saved, **changed))))
    reader.send(asking.encode(Read(copy_of(saved), [(0, 8)])))  # and it goes on
    if "size_bytes" not in changed:
        assert reader.receive() == b""
        assert reader.receive() == saved.copy(0).read_bytes()[:8]


def test_requests_for_too_much_or_beyond_the_end_are_refused(saved: Nodes, giver: Callable[..., InProcess]) -> None:
    one = giver()
    reader = one.call()
    size = copy_of(saved).size_bytes
    reader.send(asking.encode(Read(copy_of(saved), [(0, MAX_BYTES), (0, 1)])))
    assert b"more than" in reader.receive()
    for extent in ((size - 4, 8), (1 << 61, 8)):
        reader = one.call()
        reader.send(asking.encode(Read(copy_of(saved), [extent])))
        assert reader.receive() == b""
        with pytest.raises(ConnectionError):
            reader.receive()


def test_who_has_no_key_and_who_talks_nonsense_hears_nothing(saved: Nodes, giver: Callable[..., InProcess]) -> None:
    one = giver()
    stranger = one.call(bytes(32))
    stranger.send(asking.encode(Read(copy_of(saved), [(0, 8)])))
    with pytest.raises(ConnectionError):
        stranger.receive()
    negative = asking.encode(Read(copy_of(saved), [(0, MAX_BYTES * 2), (0, -MAX_BYTES * 2)]))  # in all nothing
    for nonsense in (negative, b"", b"\x01\x90", secrets.token_bytes(100)):
        friend = one.call()
        friend.send(nonsense)
        with pytest.raises(ConnectionError):
            friend.receive()
    assert copy_of(saved).size_bytes == saved.copy(0).stat().st_size
