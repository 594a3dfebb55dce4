"""Copies a flattened state into an arena: one pass of copies, which also computes each block's checksum."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from resilio_hpc.ckpt.devices.interface import CopiesOut
from resilio_hpc.ckpt.devices.registry import DEVICES
from resilio_hpc.ckpt.format.manifest import Extent, RankTable, SlabRecord, TensorRecord, blocks
from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.format.whole_snapshot import Header
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.device_copy import Begun, ChecksumSlot, DeviceCopies, Transfer
from resilio_hpc.ckpt.state import overlap, tensors
from resilio_hpc.ckpt.state.parts_held import known_group
from resilio_hpc.ckpt.state.tensors import LARGE_BYTES, Leaf
from resilio_hpc.ckpt.state.tree import Flattened
from resilio_hpc.core.errors import CheckpointError, UsageError
from resilio_hpc.native import copy_blocks, crc32c

_SHARE_BYTES = 32 << 20
"""What a thread copies in one go."""
_SMALL_BYTES = 1 << 20
"""Copied at once, whatever was asked: to hand so little on costs more than its copy."""
_MAX_THREADS = 4
_encode = msgspec.json.Encoder().encode


def copy_threads(local_world_size: int) -> int:
    """Return a rank's share of the cores that it may use, at most as many as memory bandwidth can feed."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // max(local_world_size, 1)))


class StateChanged(CheckpointError):
    """Raised when a tensor changed while it was being copied."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} was changed, by something else than optimizer.step(), while it was being copied; call "
            "Checkpointer.fence() before such a change, or leave overlap=True away"
        )


@dataclass(frozen=True)
class Plan:
    """The layout of a snapshot in its arena. ``room_bytes`` includes a bound for the table."""

    offsets: tuple[int, ...]
    tree_offset: int
    table_offset: int
    room_bytes: int


def plan(leaves: Iterable[Leaf], tree_size: int) -> Plan:
    """Return the layout: large tensors begin on a page (for direct I/O later), small ones on a cache line."""
    at, offsets, table_bound = PAGE, [], 1024
    for leaf in leaves:
        alignment = PAGE if leaf.held_bytes >= LARGE_BYTES else 64
        at = -(-at // alignment) * alignment
        offsets.append(at)
        at += leaf.held_bytes
        # each character may become six in JSON; 24 bytes hold any number
        table_bound += 6 * (len(leaf.path) + len(leaf.dtype)) + 24 * (
            8 + 3 * len(leaf.shape) + len(blocks(leaf.held_bytes))
        )
    table_offset = -(-(at + tree_size) // 64) * 64
    return Plan(tuple(offsets), at, table_offset, table_offset + table_bound)


class _Copy(NamedTuple):
    """A block to be copied (see ``native.copy_blocks``), and the slot of its checksum."""

    block: tuple[int, Any, int, int]
    slot: ChecksumSlot


def _note(slots: Iterable[ChecksumSlot], crcs: Sequence[int]) -> None:
    for slot, crc in zip(slots, crcs, strict=True):
        slot.checksums[slot.number] = crc


class Snapshot:
    """A snapshot on its way into an arena.

    The constructor makes the copies that cannot wait; then, once, ``finish``.
    """

    def __init__(
        self,
        pair: ArenaPair,
        step: int,
        state: Flattened,
        pool: ThreadPoolExecutor,
        overlapped: bool = False,
        device: CopiesOut = DEVICES,
        is_last: bool = False,
        known: Mapping[int, list[int]] = MappingProxyType({}),
        group: str = "",
    ) -> None:
        """Take the snapshot.

        ``is_last``: see ``ArenaPair.reserve``. ``overlapped``: tensors on devices, and tensors that only an optimizer's
        step changes, are copied in the background from here on. ``known``: checksums of tensors that are left out.
        ``group``: the ranks that have the same tensors, where the script says so.
        Raises OSError or CheckpointError; then the former snapshot is unchanged.
        """
        self._pair, self._step, self._state, self._pool = pair, step, state, pool
        leaves = state.leaves
        self._group = group or known_group(leaves)
        self._places = [None if leaf.value is None else device.place(leaf.value) for leaf in leaves]
        owned = overlap.owned(leaves, state.optimizers) if overlapped else [False] * len(leaves)
        self._late = [
            number
            for number, leaf in enumerate(leaves)
            if owned[number] and (self._places[number] is not None or overlap.may_wait(leaf))
        ]
        self._waits_on_host = any(self._places[number] is None for number in self._late)
        self._versions = self._current_versions()
        self._versions_held: list[int] | None = None
        self._plan = plan(leaves, len(state.tree))
        self._checksums = [[0] * len(blocks(leaf.held_bytes)) for leaf in leaves]
        for number, checksums in known.items():
            self._checksums[number] = checksums
        self._copies: list[Begun] = []
        self._slot, self._room, self._sequence = pair.reserve(step, self._plan.room_bytes, is_last)
        self._devices = DeviceCopies(device, self._room, pool)
        try:
            late = set(self._late)
            early = [number for number in range(len(leaves)) if number not in late]
            from_devices = self._copy_from_devices(early, overlapped)
            self._copy(self._on_host(early))
            self._collect()
            self._copies += from_devices
            if not overlapped:
                self._collect()
            self._copy(self._on_host(self._late))
        except BaseException:
            self._abandon()
            raise

    @property
    def is_copied(self) -> bool:
        """Return whether nothing is being copied in the background."""
        return not self._copies

    def hold_devices(self) -> bool:
        """Let devices copy what was saved before they do their later work.

        Return True if that is enough. False: the host copies too, and only the end of ``finish`` tells that it is done.
        """
        if self._versions_held is None:
            self._versions_held = self._current_versions()
            self._devices.hold()
        return not self._waits_on_host

    def finish(self) -> tuple[Path, int]:
        """Wait for the copies and make the snapshot whole; return the arena, and the size of the snapshot.

        Raises StateChanged when a tensor changed before its copy was complete; the snapshot is lost then.
        """
        try:
            self._collect()
            versions = self._current_versions()  # first: tensors that are held meanwhile may change from then on
            for number, before, now in zip(self._late, self._versions, self._versions_held or versions, strict=True):
                if before != now:
                    raise StateChanged(self._state.leaves[number].path)
            end = self._complete()
        except BaseException:
            self._abandon()
            raise
        return self._slot.path, end

    def _current_versions(self) -> list[int]:
        """Return torch's version counters, which grow when it changes a tensor in place."""
        return [self._state.leaves[number].value._version for number in self._late]

    def _on_host(self, numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if self._places[number] is None]

    def _copy_from_devices(self, early: Sequence[int], overlapped: bool) -> list[Begun]:
        """Begin all copies from devices.

        Tensors that may change before the next optimizer's step are held right away.
        """
        begun: list[Begun] = []
        places = dict.fromkeys(place for place in self._places if place is not None)
        for where in places:
            self._devices.follow(where)
            begun += self._devices.begin(where, self._transfers(where, early))
        if overlapped:
            self._devices.hold()
        for where in places:
            begun += self._devices.begin(where, self._transfers(where, self._late))
        return begun

    def _transfers(self, where: Any, numbers: Sequence[int]) -> list[Transfer]:
        return [
            Transfer(self._state.leaves[number].value, self._plan.offsets[number], self._checksums[number])
            for number in numbers
            if self._places[number] == where
        ]

    def _copy(self, numbers: Sequence[int]) -> None:
        """Begin to copy these tensors, with the checksums of their blocks."""
        share: list[_Copy] = []
        share_bytes = 0
        for number in numbers:
            leaf, offset = self._state.leaves[number], self._plan.offsets[number]
            if leaf.value is None:
                continue
            source = tensors.buffer_of(leaf)
            if source is None:
                self._copy_strided(number)
                continue
            for index, (start, size) in enumerate(blocks(leaf.size_bytes)):
                share.append(_Copy((offset + start, source, start, size), ChecksumSlot(self._checksums[number], index)))
                share_bytes += size
                if share_bytes >= _SHARE_BYTES:
                    self._submit(share)
                    share, share_bytes = [], 0
        if share_bytes <= _SMALL_BYTES:
            _note([copy.slot for copy in share], copy_blocks(self._room, [copy.block for copy in share]))
        else:
            self._submit(share)

    def _submit(self, share: list[_Copy]) -> None:
        crcs = self._pool.submit(copy_blocks, self._room, [copy.block for copy in share])
        self._copies.append(([copy.slot for copy in share], crcs))

    def _copy_strided(self, number: int) -> None:
        leaf, offset = self._state.leaves[number], self._plan.offsets[number]
        target = self._room[offset : offset + leaf.size_bytes]
        try:
            tensors.copy_out(leaf.value, target)
        except RuntimeError as error:  # a lazy change for which torch has no code
            why = str(error).partition("\n")[0]
            raise UsageError(f"{leaf.path}: torch cannot copy a {leaf.dtype} tensor of this kind: {why}") from error
        for index, (start, size) in enumerate(blocks(leaf.size_bytes)):
            self._checksums[number][index] = crc32c(target[start : start + size])

    def _collect(self) -> None:
        """Wait for the copies that were begun."""
        wait([crcs for _, crcs in self._copies])
        for slots, crcs in self._copies:
            _note(slots, crcs.result())
        self._copies.clear()

    def _complete(self) -> int:
        state, layout = self._state, self._plan
        with self._room as room:
            room[layout.tree_offset : layout.tree_offset + len(state.tree)] = state.tree
            table = RankTable(
                Extent(layout.tree_offset, len(state.tree), crc32c(state.tree)),
                tuple(map(_record, state.leaves, layout.offsets, self._checksums)),
                self._group or UNSET,
            )
            data = _encode(table)
            end = layout.table_offset + len(data)
            room[layout.table_offset : end] = data
        header = _header(self._pair.owner, self._step, self._sequence, layout.table_offset, data, end)
        self._pair.finish(self._slot, header)
        return end

    def _abandon(self) -> None:
        wait([crcs for _, crcs in self._copies])  # nothing may write to an arena that was given up
        self._devices.settle()
        self._room.release()
        self._pair.abandon(self._slot)


def _record(leaf: Leaf, offset: int, checksums: list[int]) -> TensorRecord:
    slab = None
    if leaf.slab is not None:
        slab = SlabRecord(tuple(leaf.slab.global_shape), tuple(leaf.slab.start), leaf.slab.replica)
    at = -1 if leaf.value is None else offset
    return TensorRecord(leaf.path, leaf.kind, leaf.dtype, leaf.shape, at, leaf.size_bytes, tuple(checksums), slab)


def _header(owner: Owner, step: int, sequence: int, table_offset: int, table: bytes, end: int) -> Header:
    return Header(
        step=step,
        sequence=sequence,
        **vars(owner),
        table_offset=table_offset,
        table_size=len(table),
        table_crc32c=crc32c(table),
        size_bytes=end,
    )
