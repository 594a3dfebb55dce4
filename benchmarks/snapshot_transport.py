"""A snapshot from one node's memory into another's: ours, other ways, and the bare connection, taken in turn.

    python benchmarks/snapshot_transport.py [--megabytes 1000] [--rounds 7] [--json FILE]

Each giver and each taker is a process of its own on this machine, so both ends share its processors and the loopback
device is the network. ``ours`` are two replicators: a whole fetch, from the question to the snapshot that counts;
``a replica copy`` is of a rank whose tensors the taker's rank has, too; ``ours, libfabric`` reads the giver's memory by
libfabric's provider for TCP, not encrypted (an adapter for RDMA would need no processor for it). The others only move
bytes between memory that is mapped already: ``bare TCP`` (the limit), ``gloo`` (torch's send and recv, nothing
encrypted, as peers' replication of checkpoints on the host), ``ZeroMQ with CURVE`` (as the run's messages go).
Processor time is of both ends together.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for tests.support

from measure import machine, shown
from resilio_hpc.ckpt.replication.messages import TCP, Fetch, Fetched
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core import wire
from resilio_hpc.core.snapshot_transport import SnapshotTransport
from tests.support.ckpt.replicator_process import Replicator

HOST = "127.0.0.1"
MESSAGE_BYTES = 1 << 20
TENSORS = 400
AHEAD = 12  # messages that are asked for and have not come, over CURVE
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
Send = Callable[[], None]


def processor_s(pids: Sequence[int]) -> float:
    """Return what processes have used so far, to a hundredth of a second."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / TICKS_PER_S


# -- ours ------------------------------------------------------------------------------------------------------


@contextmanager
def replica(size: int, root: Path) -> Iterator[tuple[Send, Sequence[int]]]:
    """Copy a snapshot whose tensors the taker's own rank has, too; what differs are 5 kB."""
    secret = wire.new_secret().decode()
    one, other = Replicator(root / "third", secret), Replicator(root / "fourth", secret)
    shared = {f"w{number}": np.full(size // TENSORS, number % 251, dtype=np.uint8) for number in range(TENSORS)}
    for rank, node in enumerate((one, other)):
        pair = ArenaPair(node.arenas, Owner(rank, 0, 2, 1, 0, "replicated", "run"), root / "spill")
        state = {**shared, "random": secrets.token_bytes(5000)}
        Snapshot(pair, 1, flatten(state), ThreadPoolExecutor(1)).finish()
    numbers = count()

    def send() -> None:
        answer = other.ask(Fetch(next(numbers), 1, [0], 2, one.endpoint, as_replicas=True))
        assert isinstance(answer, Fetched), answer

    yield send, (one.process.pid, other.process.pid)
    one.close()
    other.close()


@contextmanager
def ours(size: int, root: Path, transport: SnapshotTransport = "tcp") -> Iterator[tuple[Send, Sequence[int]]]:
    secret = wire.new_secret().decode()
    one, other = (Replicator(root / f"{name} {transport}", secret, transport=transport) for name in ("one", "other"))
    pair = ArenaPair(one.arenas, Owner(0, 0, 1, 1, 0, "own", "run"), root / "spill")
    state = {"w": np.zeros(size, dtype=np.uint8)}
    step = 0

    def send() -> None:
        answer = other.ask(Fetch(step, step, [0], 1, one.endpoint))
        assert isinstance(answer, Fetched), answer
        assert (answer.by == TCP) == (transport == "tcp"), answer

    for step in (1, 2, 3):  # both slots of both sides are there then
        Snapshot(pair, step, flatten(state), ThreadPoolExecutor(1)).finish()
        send()
    yield send, (one.process.pid, other.process.pid)
    one.close()
    other.close()


# -- processes that only move bytes ----------------------------------------------------------------------------


def zeros(size: int) -> memoryview:
    memory = bytearray(size)
    memory[:: 1 << 12] = bytes(len(memory[:: 1 << 12]))
    return memoryview(memory)


def tcp_giver(pipe: Connection, size: int) -> None:
    memory, listener = zeros(size), socket.create_server((HOST, 0))
    pipe.send(listener.getsockname()[1])
    with listener.accept()[0] as connection:
        while pipe.recv():
            for at in range(0, size, MESSAGE_BYTES):
                connection.sendall(memory[at : at + MESSAGE_BYTES])


def tcp_taker(pipe: Connection, size: int, port: int) -> None:
    memory = zeros(size)
    with socket.create_connection((HOST, port)) as connection:
        pipe.send(0)
        while pipe.recv():
            filled = 0
            while filled < size:
                filled += connection.recv_into(memory[filled : filled + MESSAGE_BYTES])
            pipe.send(filled)


def gloo_group(rank: int, store: str) -> Any:
    import torch.distributed as dist

    torch_threads_one()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    return dist


def torch_threads_one() -> None:
    import torch

    torch.set_num_threads(1)


def gloo_giver(pipe: Connection, size: int, store: str) -> None:
    import torch

    tensor = torch.zeros(size, dtype=torch.uint8)
    pipe.send(0)
    dist = gloo_group(0, store)
    while pipe.recv():
        dist.send(tensor, 1)
    os._exit(0)


def gloo_taker(pipe: Connection, size: int, store: str) -> None:
    import torch

    tensor = torch.zeros(size, dtype=torch.uint8)
    dist = gloo_group(1, store)
    pipe.send(0)
    while pipe.recv():
        dist.recv(tensor, 0)
        pipe.send(size)
    os._exit(0)


def curve_giver(pipe: Connection, size: int, secret: bytes) -> None:
    """Answers each question with a piece, until it is told to end."""
    context: zmq.Context[Any] = zmq.Context()
    keys, memory = wire.Keys.derive(secret), zeros(size)
    gatekeeper = wire.Gatekeeper(context, keys, wire.Counters())
    asked, port = wire.listen_anywhere(context, keys, HOST)
    pipe.send(port)
    poller = zmq.Poller()
    for watched in (asked, gatekeeper.socket, pipe.fileno()):
        poller.register(watched, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if pipe.fileno() in ready and not pipe.recv():
            break
        if gatekeeper.socket in ready:
            gatekeeper.serve()
        for caller, place in wire.receive_all(asked):
            at = int(place)
            asked.send_multipart([caller, place, memory[at : at + MESSAGE_BYTES]])
    context.destroy(linger=0)


def curve_taker(pipe: Connection, size: int, secret: bytes, port: int) -> None:
    context: zmq.Context[Any] = zmq.Context()
    memory = zeros(size)
    caller = wire.call(context, wire.Keys.derive(secret), f"{HOST}:{port}", b"taker")
    pipe.send(0)
    while pipe.recv():
        places = iter(range(0, size, MESSAGE_BYTES))
        waiting = 0
        for at, _ in zip(places, range(AHEAD), strict=False):
            caller.send(b"%d" % at)
            waiting += 1
        while waiting:
            place, data = caller.recv_multipart()
            waiting -= 1
            memory[int(place) : int(place) + len(data)] = data
            if (at := next(places, -1)) >= 0:
                caller.send(b"%d" % at)
                waiting += 1
        pipe.send(size)
    context.destroy(linger=0)


@contextmanager
def two_processes(
    giver: Callable[..., None], taker: Callable[..., None], size: int, *shared: object
) -> Iterator[tuple[Send, Sequence[int]]]:
    """Give the taker what the giver says first, if it says anything."""
    spawn = multiprocessing.get_context("spawn")
    (mine, its), (my, her) = spawn.Pipe(), spawn.Pipe()
    one = spawn.Process(target=giver, args=(its, size, *shared), daemon=True)
    one.start()
    port = mine.recv()
    other = spawn.Process(target=taker, args=(her, size, *shared, *([port] if port else [])), daemon=True)
    other.start()
    my.recv()

    def send() -> None:
        mine.send(True)
        my.send(True)
        assert my.recv() == size

    send()
    assert one.pid is not None
    assert other.pid is not None
    yield send, (one.pid, other.pid)
    for pipe, process in ((mine, one), (my, other)):
        pipe.send(False)
        process.join(10)
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, metavar="N", help="size of the snapshot (1000)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="how often each is measured (7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value here")
    options = parser.parse_args()
    size = options.megabytes * 1_000_000
    secret = secrets.token_hex(32).encode()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="resilio-transport-", dir="/dev/shm")))
        ways = {
            "bare TCP (limit)": two_processes(tcp_giver, tcp_taker, size),
            "ours": ours(size, root),
            "ours, libfabric": ours(size, root, "fabric"),
            "ours, a replica copy": replica(size, root),
            "gloo, not encrypted": two_processes(gloo_giver, gloo_taker, size, str(root / "store")),
            "ZeroMQ with CURVE": two_processes(curve_giver, curve_taker, size, secret),
        }
        made = {name: stack.enter_context(way) for name, way in ways.items()}
        seconds: dict[str, list[float]] = {name: [] for name in made}
        used: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(options.rounds):
            for name, (send, pids) in made.items():
                before, began = processor_s(pids), time.perf_counter()
                send()
                seconds[name].append((time.perf_counter() - began) / (size / 1e9))
                used[name].append((processor_s(pids) - before) / (size / 1e9))
    limit = statistics.median(seconds["bare TCP (limit)"])
    table = Table(title=f"{options.megabytes} MB from one process's memory into another's, {options.rounds} rounds")
    for column in ("way", "s per GB", "quartiles", "× limit", "GB/s", "processor s per GB"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, values in seconds.items():
        median = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (median, median, median)
        table.add_row(
            name, shown(median), f"{shown(low)} … {shown(high)}", f"{median / limit:.2f}", f"{1 / median:.2f}",
            f"{statistics.median(used[name]):.2f}",
        )  # fmt: skip
    Console(width=120).print(table)
    if options.json:
        found = {"machine": machine(), "options": vars(options) | {"json": str(options.json)}}
        options.json.write_text(json.dumps(found | {"s_per_gb": seconds, "processor_s_per_gb": used}, indent=1))


if __name__ == "__main__":
    main()
