"""Restores of a step from the disks on which it may be: this node's own, another node's, the shared one, in turn.

    python benchmarks/peer_disks.py [--megabytes 1000] [--rounds 5] [--json FILE]

One process with numpy arrays, cold. All three are one disk of this machine, and the other node's giver a process on the
same processors, so what differs is the way: ``another node's`` is read, encrypted, sent over the loopback device and
decrypted. ``limit``: the bare connection, both ends on this machine, which moves as many bytes between memory and does
nothing else.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from checkpoint_methods import drop_caches
from measure import machine, shown

TENSORS = 48
HOST = "127.0.0.1"
WAYS = ("limit", "own disk", "another node's", "shared")


def start_giver(disk: Path, checkpoints: Path, key: bytes) -> tuple[subprocess.Popen[bytes], int]:
    from resilio_hpc.ckpt.tiers.disk_messages import ServeDisk
    from resilio_hpc.core.json_lines import encode_line

    with socket.create_server((HOST, 0)) as listener:
        argv = [sys.executable, "-m", "resilio_hpc.ckpt.tiers.disk_server", str(listener.fileno())]
        giver = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
        assert giver.stdin
        giver.stdin.write(encode_line(ServeDisk(key, str(disk), str(checkpoints))))
        giver.stdin.flush()
        return giver, listener.getsockname()[1]


def send(port: int, size: int) -> None:
    room = memoryview(bytearray(8 << 20))
    with socket.create_connection((HOST, port)) as connection:
        for at in range(0, size, len(room)):
            connection.sendall(room[: size - at])


def bare_connection(size: int) -> float:
    with socket.create_server((HOST, 0)) as listener:
        sender = multiprocessing.get_context("spawn").Process(target=send, args=(listener.getsockname()[1], size))
        sender.start()
        connection, _ = listener.accept()
        with connection:
            room, left = memoryview(bytearray(8 << 20)), size
            began = time.perf_counter()
            while left:
                left -= connection.recv_into(room[:left])
            took = time.perf_counter() - began
        sender.join()
        return took


def restore(way: str, checkpoints: Path, disk: Path, known: Path, state: Any, pool: ThreadPoolExecutor) -> float:
    from resilio_hpc.ckpt.restore.committed_source import CommittedSource
    from resilio_hpc.ckpt.restore.restore import restore as fill
    from resilio_hpc.ckpt.store import checkpoint_index
    from resilio_hpc.ckpt.tiers import local_disk

    manifest = checkpoint_index.manifest_of(checkpoints, 1)
    copies = local_disk.copies(disk, checkpoints, manifest) if way == "own disk" else {}
    drop_caches()
    began = time.perf_counter()
    with CommittedSource(
        checkpoint_index.step_directory(checkpoints, 1), manifest, 0, 1, "own", copies=copies,
        peers=known if way == "another node's" else None,
    ) as source:  # fmt: skip
        fill(source, state, pool)
        tier = {"own disk": "local", "another node's": "peer", "shared": "committed"}[way]
        assert source.tier == tier, source.tier
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, metavar="N", help="size of the state (1000)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="restores of each kind (5)")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to be measured (here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every timing there")
    options = parser.parse_args()
    import numpy

    from resilio_hpc.ckpt import Checkpointer
    from resilio_hpc.ckpt.store import checkpoint_index
    from resilio_hpc.ckpt.tiers.peer_disks import write_known

    state = {f"layer.{n}": numpy.full(options.megabytes * 1_000_000 // 8 // TENSORS, n) for n in range(TENSORS)}
    size = sum(array.nbytes for array in state.values())
    directory = Path(tempfile.mkdtemp(prefix="peer-disks-", dir=options.directory))
    checkpoints, disk, known = directory / "checkpoints", directory / "disk", directory / "known"
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    giver = None
    try:
        disk.mkdir()
        Checkpointer(checkpoints, local=disk).save(1, state).wait("committed", 300)
        key = secrets.token_bytes(32)
        giver, port = start_giver(disk, checkpoints, key)
        node = checkpoint_index.manifest_of(checkpoints, 1).shards[0].node
        write_known(known, key, {node: f"{HOST}:{port}"})
        with ThreadPoolExecutor(2) as pool:
            for _ in range(options.rounds):
                for way in WAYS:
                    for array in state.values():
                        array.fill(0)
                    took = (
                        bare_connection(size) if way == "limit" else restore(way, checkpoints, disk, known, state, pool)
                    )
                    found[way].append(took)
                    assert way == "limit" or all((array == n).all() for n, array in enumerate(state.values()))
    finally:
        if giver is not None:
            giver.kill()
            giver.communicate()
        shutil.rmtree(directory, ignore_errors=True)
    title = f"Restore of {options.megabytes} MB, cold: seconds, median (least … most)"
    table = Table(title=title, title_justify="left")
    for column in ("from", "takes"):
        table.add_column(column, no_wrap=True)
    for way, took in found.items():
        table.add_row(way, f"{shown(statistics.median(took))} ({shown(min(took))} … {shown(max(took))})")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "megabytes": options.megabytes, "results": found}))
    os._exit(0)  # the saver has nothing left to do


if __name__ == "__main__":
    main()
