"""Snapshots without the tensors that other ranks of this node have in theirs, for where memory is short (OPS-1).

Kept is what would be lost: plain values, generators of random numbers, counters, small tensors, and each tensor that no
other rank of the node has. Tensors are the same where path, type, shape and the checksums of all blocks are, as for
layout REPLICATED. A restore puts both together again, and verifies each block.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from resilio_hpc.ckpt.devices.interface import CopiesOut
from resilio_hpc.ckpt.format.manifest import BLOCK_BYTES, blocks
from resilio_hpc.ckpt.format.source import Wanted
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state import tensors
from resilio_hpc.ckpt.state.tensors import Leaf
from resilio_hpc.ckpt.state.tree import Flattened
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.native import copy_blocks

LEAST_BYTES = 64 << 10
"""Smaller tensors are kept."""
PATIENCE_S = 5.0
"""For the other ranks of the node, which save the same step at the same time, or say that they do not."""
WITHOUT = "without"
_POLL_S = 0.005
_WITHOUT = struct.Struct("<2Q")  # round, step


def take(
    pair: ArenaPair,
    step: int,
    state: Flattened,
    pool: ThreadPoolExecutor,
    device: CopiesOut,
    directory: Path,
    patience_s: float = PATIENCE_S,
) -> Snapshot | None:
    """Take a snapshot without what other ranks' snapshots of ``step`` in ``directory`` have; None: they have nothing.

    Waits until each of them has one, or has said that it has none. Raises the errors of ``Snapshot``.
    """
    say_without(directory, pair.owner.rank, pair.owner.round, step)
    sums = dict(zip(*_checksums(state, pool, device), strict=True))
    wanted = {number: _content(state.leaves[number], sums[number]) for number in sums}
    deadline = time.monotonic() + patience_s
    while True:
        without = _without(directory, pair.owner.round, step)  # first: a rank has one of the two at any instant
        there, ranks = _others(directory, pair.owner, step)
        left_out = {number: sums[number] for number, content in wanted.items() if content in there}
        if (
            len(left_out) == len(wanted)
            or len(ranks | without) >= pair.owner.local_world_size
            or time.monotonic() > deadline
        ):
            break
        time.sleep(_POLL_S)
    if not left_out:
        return None
    leaves = tuple(
        replace(leaf, value=None) if number in left_out else leaf for number, leaf in enumerate(state.leaves)
    )
    return Snapshot(pair, step, replace(state, leaves=leaves), pool, device=device, known=left_out)


def _checksums(state: Flattened, pool: ThreadPoolExecutor, device: CopiesOut) -> tuple[list[int], list[list[int]]]:
    """Return the numbers of the tensors that may be left out, and their blocks' checksums."""
    numbers = [
        number
        for number, leaf in enumerate(state.leaves)
        if leaf.value is not None and leaf.slab is None and leaf.size_bytes >= LEAST_BYTES
        and device.place(leaf.value) is None and tensors.buffer_of(leaf) is not None
    ]  # fmt: skip
    return numbers, [*pool.map(_checksums_of, [state.leaves[number] for number in numbers])]


def _checksums_of(leaf: Leaf) -> list[int]:
    source, room = tensors.buffer_of(leaf), memoryview(bytearray(BLOCK_BYTES))
    return [copy_blocks(room, [(0, source, start, size)])[0] for start, size in blocks(leaf.size_bytes)]


def _content(leaf: Leaf, checksums: list[int]) -> object:
    return leaf.path, leaf.kind, leaf.dtype, leaf.shape, leaf.size_bytes, tuple(checksums)


def say_without(directory: Path, rank: int, round_: int, step: int) -> None:
    """Say to the other ranks of the node that this one has no whole snapshot of ``step``: they need not wait."""
    with contextlib.suppress(OSError):  # then they wait
        file = os.open(directory / f"rank{rank}.{WITHOUT}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(file, _WITHOUT.pack(round_, step), 0)
        finally:
            os.close(file)


def _without(directory: Path, round_: int, step: int) -> set[int]:
    """Return the ranks that have said so of ``step``."""
    found = set()
    for path in directory.glob(f"rank*.{WITHOUT}"):
        rank = path.name.removeprefix("rank").removesuffix(f".{WITHOUT}")
        with contextlib.suppress(OSError):
            if rank.isdecimal() and path.read_bytes() == _WITHOUT.pack(round_, step):
                found.add(int(rank))
    return found


def _others(directory: Path, owner: Owner, step: int) -> tuple[set[object], set[int]]:
    """Return which tensors other ranks' snapshots hold themselves, and the ranks of these snapshots."""
    there: set[object] = set()
    ranks = set()
    for held in arena.scan(directory):
        if held.rank == owner.rank or (held.step, held.round, held.world_size) != (step, owner.round, owner.world_size):
            continue
        try:
            with ArenaSource(held.path) as source:
                there |= {record.content for record in source.tensors if record.offset >= 0 and record.slab is None}
        except CorruptCheckpoint:
            continue  # it was written over meanwhile
        ranks.add(held.rank)
    return there, ranks


class CompletedSource(ArenaSource):
    """A snapshot of a rank, with the tensors that it leaves out read from other ranks' snapshots of the same step."""

    def __init__(self, path: Path, memory: memoryview, directory: Path) -> None:
        """Open it, and keep the others from being written over. Raises CorruptCheckpoint where one is not there."""
        super().__init__(path, memory=memory)
        self._holders: dict[str, ArenaSource] = {}  # by path of the tensor
        self._opened: list[ArenaSource] = []
        self._locks: list[int] = []
        try:
            self._complete(directory)
        except BaseException:
            self.close()
            raise

    def _complete(self, directory: Path) -> None:
        missing = {
            record.content: number
            for number, record in enumerate(self.tensors)
            if record.offset < 0 < record.size_bytes
        }
        whole = list(self.tensors)
        for held in arena.scan(directory) if missing else ():
            if (held.step, held.world_size) != (self.step, self.header.world_size) or held.rank == self.header.rank:
                continue
            lock = arena.lock_snapshot(held)
            if lock is None:
                continue
            self._locks.append(lock)
            holder = ArenaSource(held.path)
            self._opened.append(holder)
            for record in holder.tensors:
                if record.offset >= 0 and record.slab is None and record.content in missing:
                    whole[missing.pop(record.content)] = record
                    self._holders[record.path] = holder
        if missing:
            path = self.tensors[min(missing.values())].path
            raise CorruptCheckpoint(
                f"no other rank of this node has {path} of step {self.step} any more, which the snapshot of rank "
                f"{self.header.rank} left out for lack of memory"
            )
        self.tensors = whole

    def fill(self, wanted: Sequence[Wanted], pool: ThreadPoolExecutor) -> None:
        """See Source."""
        super().fill([each for each in wanted if each[0].path not in self._holders], pool)
        for holder in self._opened:
            holder.fill([each for each in wanted if self._holders.get(each[0].path) is holder], pool)

    def close(self) -> None:
        """Close all of them."""
        super().close()
        while self._opened:
            self._opened.pop().close()
        while self._locks:
            os.close(self._locks.pop())
